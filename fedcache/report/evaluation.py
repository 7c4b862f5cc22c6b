"""Evaluations of models as files: one page with figures, a table for spreadsheets, or everything as JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.errors import FedcacheError, UsageError, unknown
from fedcache.extract.planning.find_images import ImagePlaces
from fedcache.models.evaluate import BINS, RightRows, RunEvaluation
from fedcache.parsing import Facts, counted, finite, sheet_cell
from fedcache.progress import Observer, Silent, percent, percent_range
from fedcache.report.drawing import (
    MUTED,
    SERIES,
    Marks,
    Plot,
    Rows,
    bars,
    legend_below,
    need_matplotlib,
    short,
)
from fedcache.report.figure_runs import confusion_matrix
from fedcache.report.render import Column, HtmlCell, Section, gallery, number_cell, render_page
from fedcache.store.lock import need_folder, write_output

ENDINGS = (".html", ".csv", ".json")
MOST_DRAWN = 6
"""Maximum number of runs that are drawn; the table shows all runs."""
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
"""Columns of a .csv file."""


def check_request(out: Path | None, *, with_images: bool) -> None:
    """Refuse a file that cannot be written, and a request for images without an HTML page, before any work.

    Raises as ``check_out``.
    """
    if out is not None:
        check_out(out)
    if with_images and (out is None or out.suffix.lower() != ".html"):
        named = out or "no file"
        raise UsageError(
            f"--with-images shows images on an HTML page, but -o names {named}.",
            "-o evaluation.html",
        )


def check_out(path: Path) -> None:
    """Refuse a file that cannot be written. Raises UsageError, MachineError."""
    if path.suffix.lower() not in ENDINGS:
        raise unknown("file ending", path.suffix, ENDINGS)
    need_folder(path)
    if path.suffix.lower() == ".html":
        need_matplotlib()


def write_evaluations(
    path: Path,
    evaluations: Sequence[RunEvaluation],
    images: ImagePlaces | None = None,
    observer: Observer | None = None,
) -> None:
    """Write evaluations to a .html, .csv or .json file, whole or not at all.

    Raises as ``check_out``.

    Args:
        path: the file.
        evaluations: one for each model that was evaluated.
        images: where images are, to show mistakes with them; None shows none.
        observer: warned of images that are not available.
    """
    check_out(path)
    kind = path.suffix.lower()
    if kind == ".json":
        values = [finite(e.to_dict()) for e in evaluations]
        raw = json.dumps(values, ensure_ascii=False, indent=1)
    elif kind == ".csv":
        raw = _table(evaluations)
    else:
        raw = evaluation_page(evaluations, images, observer or Silent())
    write_output(path, raw.encode())


def _table(evaluations: Sequence[RunEvaluation]) -> str:
    """One line for all rows of a run, and one for each of its domains, classes and clients."""
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, COLUMNS, restval="")
    writer.writeheader()
    for e in evaluations:
        run = {"run": e.run, "method": e.method, "model": e.model, "rows_of": e.rows}
        for line in _lines(e):
            # A name that a spreadsheet would run as a formula is quoted.
            cells = {**run, **line}
            writer.writerow({column: sheet_cell(value) for column, value in cells.items()})
    return out.getvalue()


def _lines(e: RunEvaluation) -> Iterator[Facts]:
    """The lines of the table for one evaluation, without the columns that name the run; missing cells stay empty."""
    m = e.measures
    best = None
    if m.temperature is not None:
        best = m.temperature.value
    yield {
        "scope": "all",
        **_right(m.all),
        "f1": m.macro_f1,
        "ece": m.ece,
        "nll": m.nll,
        "best_temperature": best,
    }
    for name, of_domain in m.by_domain.items():
        yield {"scope": "domain", "name": name, **_right(of_domain)}
    for c in m.by_class:
        yield {
            "scope": "class",
            "name": c.name,
            "rows": c.rows,
            "right": c.right,
            "accuracy": c.recall,
            "precision": c.precision,
            "f1": c.f1,
        }
    if e.client_prior is not None:
        prior = e.client_prior
        accuracies = {"no prior": prior.without, f"prior {prior.kind}": prior.with_prior}
        for name, by_score in accuracies.items():
            accuracy = by_score["pooled"]
            yield {"scope": "own test rows", "name": name, "rows": prior.rows, "accuracy": accuracy}
    if e.prediction_sets is not None:
        sets = e.prediction_sets
        coverage = sets.figures()["pooled"]
        name = f"sets of coverage {sets.target:g}"
        yield {
            "scope": "own test rows",
            "name": name,
            "rows": sets.total.rows,
            "accuracy": coverage,
        }
    if e.adaptation is not None:
        name = f"adaptation {e.adaptation.name}"
        yield {"scope": "all", "name": name, **_right(e.adaptation.adapted)}
    if e.clients is None:
        return
    for name, accuracy in e.clients.clients.items():
        yield {"scope": "client", "name": name, "accuracy": accuracy}


def _right(found: RightRows) -> Facts:
    """Counts, accuracy and interval of some rows, by column of the table."""
    low, high = found.interval or (None, None)
    return {
        "rows": found.rows,
        "right": found.right,
        "accuracy": found.accuracy,
        "low": low,
        "high": high,
    }


def evaluation_page(
    evaluations: Sequence[RunEvaluation], images: ImagePlaces | None, observer: Observer
) -> str:
    """One self-contained HTML page; arguments as for ``write_evaluations``. Raises MachineError without matplotlib."""
    sections = []
    description = (
        f"ECE over {BINS} bins of confidence of equal width; intervals are Wilson's at 95 %. For several "
        "personal models, values are means over clients."
    )
    # There is one section for each set of rows, because results on different rows cannot be compared.
    for number, rows in enumerate(dict.fromkeys(e.rows for e in evaluations)):
        mine = [e for e in evaluations if e.rows == rows]
        ident = f"e{number}"
        plots: list[Plot | None] = [reliability(f"{ident}-reliability", mine[:MOST_DRAWN])]
        galleries = []
        notes = []
        for e in mine:
            notes += [f"{e.label}: {sentence}" for sentence in e.sentences()]
        # Figures and images are of the first runs only; the table has all runs.
        for i, e in enumerate(mine[:MOST_DRAWN]):
            plots.append(accuracy_of_classes(f"{ident}-classes{i}", e))
            plots.append(confusion(f"{ident}-confusion{i}", e))
            if images is None or e.mistakes is None:
                continue
            place = f"{ident}-mistakes{i}"
            try:
                made = gallery(place, e.label, e.mistakes, (rows, "these rows"), images)
            except FedcacheError as error:
                reason = f"{error.message} {error.hint}"
                notes.append(f"Mistakes of {e.label} are not shown: {reason}")
                observer.warn(notes[-1])
                continue
            if made is not None:
                galleries.append(made)
                for sentence in made.warnings:
                    observer.warn(sentence)
        columns, cells = _cells(mine)
        drawn = [p for p in plots if p is not None]
        section = Section(
            ident,
            f"On {rows}",
            description,
            columns,
            cells,
            plots=drawn,
            notes=notes,
            galleries=galleries,
        )
        sections.append(section)
    return render_page("Evaluation of models", sections, len(evaluations))


def _cells(evaluations: Sequence[RunEvaluation]) -> tuple[list[Column], list[list[HtmlCell]]]:
    """Columns and rows of the table of evaluations."""
    texts = ("method", "run", "model", "trained on")
    numbers = ("rows", "accuracy %", "macro F1 %", "ECE %", "NLL", "best temperature", "NLL there")
    columns = [Column(name) for name in texts]
    columns += [Column(name, numbers=True) for name in numbers]
    columns.append(Column("95 % interval"))
    rows = []
    for e in evaluations:
        # For models of several clients the table shows the spread over clients, for one model the interval over rows.
        m = e.measures
        interval = percent_range(m.all.interval) or "-"
        if e.clients is not None and e.clients.std is not None:
            spread = percent(e.clients.std)
            interval = f"std over clients {spread}"
        cells = [HtmlCell(w, w) for w in (e.method, e.short_run, e.model, e.trained_on)]
        cells.append(number_cell(m.all.rows, f"{m.all.rows:,}"))
        for fraction in (e.accuracy, m.macro_f1, m.ece):
            cells.append(number_cell(fraction, percent(fraction)))
        cells.append(number_cell(m.nll, f"{m.nll:.4f}"))
        # The temperature that would fit best, and the loss with it.
        if m.temperature is None:
            cells += [number_cell(None, "-")] * 2
        else:
            cells.append(number_cell(m.temperature.value, f"{m.temperature.value:.4g}"))
            cells.append(number_cell(m.temperature.nll, f"{m.temperature.nll:.4f}"))
        cells.append(HtmlCell(interval, ""))
        rows.append(cells)
    return columns, rows


def reliability(ident: str, evaluations: Sequence[RunEvaluation]) -> Plot:
    """The figure of accuracy over confidence, a point for each bin. On the diagonal both are equal."""
    description = (
        f"Accuracy of the rows in each of {BINS} bins of confidence. Points below the diagonal show an overconfident "
        "model."
    )
    rows: Rows = []
    for e in evaluations:
        rows += [[e.label, count, *at] for count, *at in e.measures.bins if count]

    def fill(axes: Any, marks: Marks) -> None:
        axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle="--")
        for i, e in enumerate(evaluations):
            confidences = []
            accuracies = []
            words = []
            for count, confidence, accuracy in e.measures.bins:
                if count:
                    confidences.append(confidence)
                    accuracies.append(accuracy)
                    inside = counted(count, "row")
                    words.append(
                        f"{e.label}: {accuracy:.3f} right at confidence {confidence:.3f}, {inside}"
                    )
            axes.plot(confidences, accuracies, color=SERIES[i], label=short(e.label))
            dots = axes.scatter(confidences, accuracies, s=24, color=SERIES[i])
            marks(dots, words)
        axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1.02), ylim=(0, 1.02))
        legend_below(axes)

    columns = ("run", "rows", "confidence", "accuracy")
    return Plot(ident, "Reliability", description, columns, rows, fill, height=4.2)


MOST_BARS = 24
"""Maximum number of classes that have a bar."""


def accuracy_of_classes(ident: str, e: RunEvaluation) -> Plot:
    """A bar for each class, the lowest accuracy first; at most ``MOST_BARS`` bars."""
    ordered = sorted(e.measures.by_class, key=lambda c: c.recall or 0.0)
    shown = ordered[:MOST_BARS]
    description = "Percentage of each class's rows that are classified correctly"
    if len(ordered) > MOST_BARS:
        description += f"; the {MOST_BARS} lowest of {len(ordered)} classes"

    def fill(axes: Any, marks: Marks) -> None:
        words = []
        for c in shown:
            right = f"{c.right:,} of {c.rows:,} right"
            words.append(f"{c.name}: {right}, F1 {percent(c.f1)} %")
        shares = [100 * (c.recall or 0.0) for c in shown]
        bars(axes, marks, shares, words, [short(c.name, 18) for c in shown])
        axes.set(xlabel="% right", xlim=(0, 100))

    rows: Rows = [[c.name, c.rows, c.right, c.predicted, c.f1] for c in ordered]
    title = f"Classes of {e.label}"
    columns = ("class", "rows", "right", "predicted", "F1")
    height = 1.4 + 0.17 * len(shown)
    return Plot(ident, title, f"{description}.", columns, rows, fill, height=height)


def confusion(ident: str, e: RunEvaluation) -> Plot | None:
    """Rows by label and predicted class."""
    classes: dict[str, None] = {}
    for label, predicted, _ in e.measures.confusion:
        classes[label] = None
        classes[predicted] = None
    # Classes in the order of the measures; predicted classes that have no row come last.
    order = {c.name: k for k, c in enumerate(e.measures.by_class)}
    names = sorted(classes, key=lambda name: order.get(name, len(order)))
    place = {name: k for k, name in enumerate(names)}
    table = np.zeros((len(names), len(names)), np.int64)
    for label, predicted, rows in e.measures.confusion:
        table[place[label], place[predicted]] = rows
    return confusion_matrix(ident, e.label, table, names)
