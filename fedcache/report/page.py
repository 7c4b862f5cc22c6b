"""``fedcache report``: runs to one self-contained HTML file that asks nothing of any network."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcache.errors import FedcacheError, MachineError, UsageError
from fedcache.extract.inputs import IMAGES
from fedcache.extract.planning.find_images import ImagePlaces
from fedcache.federate.trust.accounting import short_privacy
from fedcache.progress import Observer, Silent
from fedcache.report.chance_words import chance_lines
from fedcache.report.drawing import Plot, need_matplotlib, percent, short, size
from fedcache.report.figures import data, grids, runs
from fedcache.report.find_runs import (
    CLAIMED,
    Gathered,
    RunQuery,
    StoredRun,
    by_setting,
    differing,
    facts,
    gather,
    labels,
    setting_names,
)
from fedcache.report.galleries import Gallery, ToShow, galleries_of, refuse_private
from fedcache.report.render import HtmlCell, Section, render_page
from fedcache.report.run_origin import RunStore, command_of, store_of_run
from fedcache.runs.choice import DIGITS, NOT_A_CHOICE, Order, choice_value, has_validation, order_of_run
from fedcache.runs.score import score_for, score_of
from fedcache.store.files import write_atomic

MOST_SETTINGS = 12
"""Settings that get figures; the others get their table."""
MOST_CONFUSIONS, MOST_PLANES = 3, 3


@dataclass(frozen=True)
class Report:
    """A report that was written.

    Attributes:
        path: the file.
        runs: how many it shows.
        left_out: runs that it names and cannot show.
        bytes: its size.
        images: thumbnails of the dataset that it shows.
        mistakes: whose images it was to show.
    """

    path: Path
    runs: int
    left_out: int
    bytes: int
    images: int = 0
    mistakes: int = 0

    def __repr__(self) -> str:
        return f"Report({self.path}, {self.runs} runs, {self.left_out} left out, {self.bytes / 1e6:.2f} MB)"

    def to_dict(self) -> dict[str, Any]:
        """The ``data`` of the envelope."""
        return {**self.__dict__, "path": str(self.path)}


def write_report(
    asked: Sequence[RunQuery],
    out: Path,
    root: Path,
    *,
    title: str = "",
    embed: str = "pca",
    images: ImagePlaces | None = None,
    observer: Observer | None = None,
) -> Report:
    """Write the page of some runs.

    Args:
        asked: runs as ``gather`` takes them; [] for all under ``root``.
        out: the file; an earlier one is replaced, whole.
        root: where digests are looked up.
        title: heading; a general one when empty.
        embed: how features come to two dimensions: pca | tsne | umap | none.
        images: where images are, to show mistakes with them; None shows none.
        observer: told the progress.

    Raises:
        UsageError for a name that is no run, an unknown embedding, a directory that is not there or images of a
            private run; CorruptionError or StoreError when all runs that are named are damaged or not finished;
            MachineError without matplotlib.
    """
    observer = observer or Silent()
    if not out.parent.is_dir():
        raise UsageError(f"The directory {out.parent} does not exist.", f"mkdir -p {out.parent}")
    out = out.resolve() if out.is_symlink() else out  # a link stays a link
    if not os.access(out.parent, os.W_OK):
        raise MachineError(f"{out.parent} cannot be written to.", "-o another/place/report.html")
    if out.is_dir() or out.suffix.lower() not in (".html", ".htm"):
        raise UsageError(
            f"{out} is no HTML file.", f"-o {out / 'report.html' if out.is_dir() else out.with_suffix('.html')}"
        )
    need_matplotlib()
    data.check_embedding(embed)
    found = gather(asked, root)
    if asked and not found.entries and found.left_out:
        first = found.left_out[0]
        raise FedcacheError(first.exit, f"No run that was named can be shown: {first.sentence}", first.hint)
    if images is not None:
        refuse_private(found.entries)
    settings = by_setting(found.entries)
    titles, shown = setting_names(settings), ToShow()
    observer.start("drawing", len(settings), "sections")
    try:
        sections: list[Section] = []
        recipes: dict[str, str] = {}
        for number, (name, entries) in enumerate(zip(titles, settings, strict=True)):
            source = PRIVATE if any(e.private for e in entries) else store_of_run(entries)
            sections.append(_section(number, name, entries, source, embed, images, shown))
            recipes |= recipes_of(source)
            observer.advance(1)
        raw = _page(found, sections, recipes, title or "Federated runs on cached features").encode()
    finally:
        observer.stop()
    write_atomic(out, raw)
    for sentence in dict.fromkeys(shown.missing):
        observer.warn(sentence)
    there = sum(s.images for s in sections)
    return Report(out, len(found.entries), len(found.left_out), len(raw), there, shown.mistakes)


PRIVATE = "a run here has differential privacy, and its epsilon covers neither who holds which rows nor the features"


def _section(
    number: int,
    title: str,
    entries: list[StoredRun],
    source: RunStore | str,
    embed: str,
    images: ImagePlaces | None,
    shown: ToShow,
) -> Section:
    entries = sorted(entries, key=_by_choice)
    names = differing(entries)
    named = list(zip(labels(entries), entries, strict=True))
    ident = f"s{number}"
    notes: list[str] = []
    plots: list[Plot] = []
    galleries: list[Gallery] = []
    if number < MOST_SETTINGS:
        plots, notes = _plots(ident, named, source, embed)
        if images is not None:
            galleries, told = galleries_of(ident, _every_method_first(named), source, images, shown)
            notes += told
    else:
        notes.append(f"Figures are made for the first {MOST_SETTINGS} settings; report these runs alone to see theirs.")
    first = entries[0].result
    holds = first["dataset"].get("holds", IMAGES)
    says = f"Dataset {str(first['dataset']['digest'])[:16]}, {first['dataset']['ok']:,} readable {holds}; partition "
    says += f"{str(first['partition']['digest'])[:16]}, {first['partition']['clients']} clients"
    says += "; every seed has its own, the first is drawn." if len(set(first["partition"]["digests"])) > 1 else "."
    if has_validation(e.result for e in entries):
        says += " Runs stand by falling validation accuracy, by which one is chosen."
    elif len(entries) > 1:
        says += f" Runs stand by falling test accuracy; the first is the {NOT_A_CHOICE}."
    if score_for(e.result for e in entries) != "own":
        says += (
            " Accuracy is each method's own headline, of one model or a mean over clients; client mean and pooled "
            "(over all test rows of all clients) are one figure for all."
        )
    says += " Bold: the highest of its column, which is no choice by test rows." if len(entries) > 1 else ""
    if entries[0].claimed:
        says += f" {CLAIMED}"
    columns, rows = _table(entries, names)
    store = source.store.path.name if isinstance(source, RunStore) else ""
    commands = [(label, e.digest, command_of(e, store)) for label, e in named]
    points = [(e.method, e.result["accuracy"]["mean"]) for e in entries]
    return Section(ident, title, says, columns, rows, plots, notes, commands, points, galleries)


def _by_choice(entry: StoredRun) -> tuple[float, Order, str]:
    """What runs of a setting are sorted by: falling validation or test accuracy, of equals as in a grid."""
    figure = choice_value(entry.result) or 0.0
    return -round(figure, DIGITS), order_of_run(entry.result), str(entry.result.get("digest"))


def _plots(ident: str, named: runs.Named, source: RunStore | str, embed: str) -> tuple[list[Plot], list[str]]:
    entries = [e for _, e in named]
    firsts, shown = _first_of_each(named), _every_method_first(named)
    made: list[Plot | None] = [
        runs.curves(f"{ident}-curves", shown),
        runs.spread(f"{ident}-clients", shown),
        runs.against_bytes(f"{ident}-bytes", named),
        runs.against_seconds(f"{ident}-seconds", named),
        *grids.sweeps(f"{ident}-grid", entries),
    ]
    notes: list[str] = []
    if made[0] is None:
        notes.append("No run measured its accuracy in more than one round: `--eval-every 1` gives the curves.")
    for i, (label, entry) in enumerate(firsts[:MOST_CONFUSIONS]):
        made.append(runs.confusion(f"{ident}-confusion{i}", label, entry))
    if any("confusion" not in e.result for e in entries):
        notes.append("Results of earlier versions hold no confusion matrix: `--fresh` makes them again.")
    notes += [f"{label}: {' '.join(lines)}" for label, e in named if (lines := chance_lines(e.result))]
    made += runs.own_numbers(f"{ident}-own", named)
    notes += runs.last_numbers(named)
    if isinstance(source, RunStore):
        made.append(data.dots(f"{ident}-dots", source))
        made += [data.plane(f"{ident}-plane{i}", source, k, embed) for i, k in enumerate(source.keys[:MOST_PLANES])]
        made += [data.agreement(f"{ident}-fusion", source), data.label_entropy(f"{ident}-entropy", source)]
    else:
        notes.append(f"Partition and features are not drawn: {source}.")
    return [p for p in made if p is not None], notes


def _first_of_each(named: runs.Named) -> list[tuple[str, StoredRun]]:
    """The run of each method that stands first: the chosen one, or the highest."""
    best: dict[str, tuple[str, StoredRun]] = {}
    for label, entry in named:
        best.setdefault(entry.method, (label, entry))
    return list(best.values())


def _every_method_first(named: runs.Named) -> list[tuple[str, StoredRun]]:
    """The first run of each method, then its variants."""
    firsts = _first_of_each(named)
    return [*firsts, *(pair for pair in named if pair not in firsts)]


def _table(entries: Sequence[StoredRun], names: Sequence[str]) -> tuple[list[tuple[str, bool]], list[list[HtmlCell]]]:
    """(name, whether numbers) of the columns, and the rows."""
    told = [n for n in names if n != "method"]
    columns = [("method", False), *((n.removeprefix("set."), False) for n in told)]
    said_by = " (claimed)" if entries[0].claimed else ""  # of a setting all are, or none
    scores = ("accuracy %", "client mean %", "pooled %", "worst 10 %", "macro F1 %")
    accuracy, *others = (f"{name}{said_by}" for name in scores)
    validation = ("validation %",) if any("validation" in e.result for e in entries) else ()
    untrained = ("zero-shot %",) if any("zero_shot" in e.result["accuracy"] for e in entries) else ()
    columns += [(n, True) for n in (*validation, *untrained, accuracy, "± seeds", "seeds", *others)]
    columns += [(n, True) for n in ("scalars sent a round", "MB in all", "seconds")]
    private = any("privacy" in e.result.get("trust", {}) for e in entries)
    columns += [*([("privacy", False)] if private else []), ("fidelity", False), ("run", False)]
    rows = []
    for e in entries:
        r, said = e.result, facts(e)
        exact = r["traffic"]["exact"]
        megabytes = (exact["up_bytes"] + exact["down_bytes"]) / 1e6
        sent = exact["per_client_round"]["up"]
        rows.append(
            [
                HtmlCell(e.method, e.method),
                *(HtmlCell(said.get(n, "-"), said.get(n, "")) for n in told),
                *(_number(r.get("validation", {}).get("mean")) for _ in validation),
                *(_number(r["accuracy"].get("zero_shot")) for _ in untrained),
                _number(r["accuracy"]["mean"]),
                _number(r["accuracy"]["std"] or None),
                HtmlCell(str(len(r["seeds"])), str(len(r["seeds"]))),
                _number(score_of(r, "client-mean").mean),
                _number(score_of(r, "pooled").mean),
                _number(r["fairness"].get("worst10")),
                _number(r["macro_f1"]["mean"]),
                HtmlCell(size(sent), str(sent)),
                HtmlCell(f"{megabytes:,.2f}", str(megabytes)),
                HtmlCell("-" if e.seconds is None else f"{e.seconds:,.2f}", str(e.seconds or "")),
                *([_privacy(r.get("trust", {}).get("privacy"))] if private else []),
                HtmlCell(str(r["fidelity"]), str(r["fidelity"])),
                HtmlCell(e.digest[:8], e.digest),
            ]
        )
    for place, (name, _) in enumerate(columns):
        if name.removesuffix(said_by) in (*scores, *validation):
            _mark_best(rows, place)
    return columns, rows


def _privacy(cost: Mapping[str, Any] | None) -> HtmlCell:
    said = "-" if cost is None else short_privacy(cost)
    return HtmlCell(said, said)


def _number(value: float | None) -> HtmlCell:
    return HtmlCell(percent(value), "" if value is None else repr(value))


def _mark_best(rows: list[list[HtmlCell]], place: int) -> None:
    known = [float(row[place].sort) for row in rows if row[place].sort]
    for row in rows:
        if len(rows) > 1 and row[place].sort and float(row[place].sort) == max(known):
            row[place] = HtmlCell(row[place].text, row[place].sort, best=True)


def recipes_of(source: RunStore | str) -> dict[str, str]:
    """Array -> its recipe in words, of the arrays that the runs read; {} without a store."""
    if isinstance(source, str):
        return {}
    recipes = {key: source.store.arrays[key].recipe for key in source.keys}
    return {
        key: ", ".join(f"{k} {v}" for k, v in recipe.items() if not isinstance(v, dict | list))
        for key, recipe in recipes.items()
    }


def _page(found: Gathered, sections: list[Section], recipes: Mapping[str, str], title: str) -> str:
    accuracy = [(method, s.title, mean) for s in sections for method, mean in s.points]
    return render_page(
        title, sections, len(found.entries),
        across=grids.matrix("across", accuracy, [s.title for s in sections]),
        left_out=[(e.path.name, short(e.why.lstrip("/"), 300), e.hint) for e in found.left_out],
        recipes=recipes,
        trained=sorted({str(e.measured["torch"]) for e in found.entries if "torch" in e.measured}),
    )  # fmt: skip
