"""Evaluations of models as files: one page with figures, a table for spreadsheets, or everything as JSON."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.errors import FedcacheError, UsageError, unknown
from fedcache.extract.planning.image_places import ImagePlaces
from fedcache.models.evaluate import BINS, ClassMeasures, RightRows, RunEvaluation
from fedcache.progress import Observer, Silent
from fedcache.report.drawing import (
    MUTED,
    SERIES,
    Cell,
    Marks,
    Plot,
    legend_below,
    need_matplotlib,
    percent,
    short,
)
from fedcache.report.figures.runs import confusion_matrix
from fedcache.report.galleries import Gallery, gallery, lost_of
from fedcache.report.render import Column, HtmlCell, Section, render_page
from fedcache.store.outputs import write_output
from fedcache.visible_text import sheet_cell

ENDINGS = (".html", ".csv", ".json")
MOST_DRAWN = 6
"""Runs that get figures; tables have all of them."""
COLUMNS = (
    "run",
    "method",
    "model",
    "rows_of",
    "scope",
    "name",
    "rows",
    "right",
    "accuracy",
    "low",
    "high",
    "precision",
    "f1",
    "ece",
    "nll",
    "best_temperature",
)


def check_asked(out: Path | None, *, with_images: bool) -> None:
    """Refuse a file that cannot be written, and images without a page, before any work. Raises as ``check_out``."""
    if out is not None:
        check_out(out)
    if with_images and (out is None or out.suffix.lower() != ".html"):
        raise UsageError(
            f"--with-images shows images on a page, and {'none is written' if out is None else f'{out} is none'}.",
            "-o evaluation.html",
        )


def check_out(path: Path) -> None:
    """Refuse a file that cannot be written. Raises UsageError, MachineError."""
    if path.suffix.lower() not in ENDINGS:
        raise unknown("file ending", path.suffix, ENDINGS)
    if not path.parent.is_dir():
        raise UsageError(f"The directory {path.parent} does not exist.", f"mkdir -p {path.parent}")
    if path.suffix.lower() == ".html":
        need_matplotlib()


def write_evaluations(
    path: Path,
    found: Sequence[RunEvaluation],
    images: ImagePlaces | None = None,
    observer: Observer | None = None,
) -> None:
    """Write evaluations to a .html, .csv or .json file, whole or not at all.

    Raises as ``check_out``.

    Args:
        path: the file.
        found: what was measured.
        images: where images are, to show mistakes with them; None shows none.
        observer: warned of images that are not at hand.
    """
    check_out(path)
    kind = path.suffix.lower()
    if kind == ".json":
        raw = json.dumps([_plain(e.to_dict()) for e in found], ensure_ascii=False, indent=1)
    else:
        if kind == ".csv":
            raw = _table(found)
        else:
            raw = evaluation_page(found, images, observer)
    write_output(path, raw.encode())


def _plain(value: Any) -> Any:
    """JSON has no infinity and no NaN."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _table(found: Sequence[RunEvaluation]) -> str:
    """One line for all rows of a run, and one for each of its domains, classes and clients."""
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, COLUMNS, restval="")
    writer.writeheader()
    for e in found:
        for line in _lines(e):
            writer.writerow(
                {k: sheet_cell(v) if isinstance(v, str) else v for k, v in line.items()}
            )
    return out.getvalue()


def _lines(e: RunEvaluation) -> Iterator[dict[str, Any]]:
    whose = {"run": e.run, "method": e.method, "model": e.model, "rows_of": e.rows}
    m = e.measures
    best = e.measures.temperature
    yield {
        **whose,
        "scope": "all",
        **_right(m.all),
        "f1": m.macro_f1,
        "ece": m.ece,
        "nll": m.nll,
        "best_temperature": None if best is None else best.value,
    }
    for name, d in m.by_domain.items():
        yield {**whose, "scope": "domain", "name": name, **_right(d)}
    for c in m.by_class:
        own = {
            "rows": c.rows,
            "right": c.right,
            "accuracy": c.recall,
            "precision": c.precision,
            "f1": c.f1,
        }
        yield {**whose, "scope": "class", "name": c.name, **own}
    for name, accuracy in () if e.clients is None else e.clients.clients.items():
        yield {**whose, "scope": "client", "name": name, "accuracy": accuracy}


def _right(found: RightRows) -> dict[str, Any]:
    low, high = found.interval or (None, None)
    return {
        "rows": found.rows,
        "right": found.right,
        "accuracy": found.accuracy,
        "low": low,
        "high": high,
    }


def evaluation_page(
    found: Sequence[RunEvaluation],
    images: ImagePlaces | None = None,
    observer: Observer | None = None,
) -> str:
    """One self-contained HTML page. Raises MachineError without matplotlib; arguments as ``write_evaluations``."""
    sections = []
    told = observer or Silent()
    for number, rows in enumerate(dict.fromkeys(e.rows for e in found)):
        mine = [e for e in found if e.rows == rows]
        ident = f"e{number}"
        plots: list[Plot | None] = [reliability(f"{ident}-reliability", mine[:MOST_DRAWN])]
        for i, e in enumerate(mine[:MOST_DRAWN]):
            plots += [
                accuracy_of_classes(f"{ident}-classes{i}", e),
                confusion(f"{ident}-confusion{i}", e),
            ]
        notes = [f"{e.label}: {said}" for e in mine for said in e.sentences()]
        says = (
            f"ECE over {BINS} bins of confidence of equal width; intervals are Wilson's at 95 %. Of several clients' "
            "models figures are means over clients."
        )
        columns, cells = _cells(mine)
        drawn = [p for p in plots if p is not None]
        galleries: list[Gallery] = []
        for i, e in enumerate(mine[:MOST_DRAWN]):
            if images is None or e.mistakes is None:
                continue
            try:
                own = gallery(
                    f"{ident}-mistakes{i}", e.label, e.mistakes, (rows, "all of them"), images
                )
                galleries += own
                for sentence in lost_of(e.label, own):
                    told.warn(sentence)
            except FedcacheError as error:
                notes.append(f"Mistakes of {e.label} are not shown: {error.message} {error.hint}")
                told.warn(notes[-1])
        sections.append(
            Section(ident, f"On {rows}", says, columns, cells, drawn, notes, [], [], galleries)
        )
    return render_page("Evaluation of models", sections, len(found))


def _cells(found: Sequence[RunEvaluation]) -> tuple[list[Column], list[list[HtmlCell]]]:
    texts = ("method", "run", "model", "trained on")
    numbers = ("rows", "accuracy %", "macro F1 %", "ECE %", "NLL", "best temperature", "NLL there")
    columns = [*map(Column, texts), *(Column(n, True) for n in numbers), Column("95 % interval")]
    rows = []
    for e in found:
        m = e.measures
        best = e.measures.temperature
        interval = "-"
        if m.all.interval is not None:
            interval = " to ".join(percent(v) for v in m.all.interval)
        if e.clients is not None and e.clients.std is not None:
            interval = f"std over clients {percent(e.clients.std)}"
        words = [HtmlCell(w, w) for w in (e.method, e.short_run, e.model, e.trained_on)]
        figures = [
            (f"{m.all.rows:,}", m.all.rows),
            (percent(e.accuracy), e.accuracy),
            (percent(m.macro_f1), m.macro_f1),
            (percent(m.ece), m.ece),
            (f"{m.nll:.4f}", m.nll),
        ]
        figures += (
            [("-", None)] * 2
            if best is None
            else [(f"{best.value:.4g}", best.value), (f"{best.nll:.4f}", best.nll)]
        )
        rows.append(
            [
                *words,
                *(HtmlCell(t, "" if v is None else repr(v)) for t, v in figures),
                HtmlCell(interval, ""),
            ]
        )
    return columns, rows


def reliability(ident: str, found: Sequence[RunEvaluation]) -> Plot:
    """Accuracy over confidence, bin by bin: on the diagonal probabilities say how often they are right."""
    says = f"Of {BINS} bins of confidence, the accuracy of their rows; below the diagonal a model is overconfident."
    rows: list[list[Cell]] = [[e.label, n, c, a] for e in found for n, c, a in e.measures.bins if n]

    def fill(axes: Any, marks: Marks) -> None:
        axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle="--")
        for i, e in enumerate(found):
            known = [(n, c, a) for n, c, a in e.measures.bins if n]
            axes.plot(
                [c for _, c, _ in known],
                [a for *_, a in known],
                color=SERIES[i],
                label=short(e.label),
            )
            dots = axes.scatter(
                [c for _, c, _ in known], [a for *_, a in known], s=24, color=SERIES[i]
            )
            marks(
                dots,
                [
                    f"{e.label}: {a:.3f} right at confidence {c:.3f}, {n:,} rows"
                    for n, c, a in known
                ],
            )
        axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1.02), ylim=(0, 1.02))
        legend_below(axes)

    columns = ("run", "rows", "confidence", "accuracy")
    return Plot(ident, "Reliability", says, columns, rows, fill, height=4.2)


MOST_BARS = 24


def accuracy_of_classes(ident: str, e: RunEvaluation) -> Plot:
    """A bar for each class, or for those that are right least often."""
    ordered: list[ClassMeasures] = sorted(e.measures.by_class, key=lambda c: c.recall or 0.0)
    shown = ordered[:MOST_BARS]
    says = "Of the rows of each class, the percentage that is right"
    says += (
        f"; the {MOST_BARS} lowest of {len(ordered)} classes." if len(ordered) > MOST_BARS else "."
    )

    def fill(axes: Any, marks: Marks) -> None:
        bars = axes.barh(
            range(len(shown)), [100 * (c.recall or 0.0) for c in shown], color=SERIES[0], height=0.7
        )
        for bar, c in zip(bars, shown, strict=True):
            marks(bar, [f"{c.name}: {c.right:,} of {c.rows:,} right, F1 {percent(c.f1)} %"])
        axes.set_yticks(range(len(shown)), [short(c.name, 18) for c in shown])
        axes.set(xlabel="% right", xlim=(0, 100), ylim=(len(shown) - 0.4, -0.6))

    rows: list[list[Cell]] = [[c.name, c.rows, c.right, c.predicted, c.f1] for c in ordered]
    title = f"Classes of {e.label}"
    height = 1.4 + 0.17 * len(shown)
    return Plot(
        ident, title, says, ("class", "rows", "right", "predicted", "F1"), rows, fill, height=height
    )


def confusion(ident: str, e: RunEvaluation) -> Plot | None:
    """Rows by label and predicted class."""
    names = list(dict.fromkeys(name for i, j, _ in e.measures.confusion for name in (i, j)))
    order = {c.name: k for k, c in enumerate(e.measures.by_class)}
    names.sort(key=lambda name: order.get(name, len(order)))
    place = {name: k for k, name in enumerate(names)}
    table = np.zeros((len(names), len(names)), np.int64)
    for i, j, rows in e.measures.confusion:
        table[place[i], place[j]] = rows
    return confusion_matrix(ident, e.label, table, names)
