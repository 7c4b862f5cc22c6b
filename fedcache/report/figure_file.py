"""``fedcache figure``: one figure of runs as a file for a paper, the same data and drawing as in a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fedcache.errors import UsageError, unknown
from fedcache.report import figure_data, figure_grids, figure_runs
from fedcache.report.comparison import Comparison
from fedcache.report.drawing import COLUMNS, Plot, check_file, write_plot
from fedcache.report.find_runs import (
    Named,
    RunQuery,
    StoredRun,
    by_setting,
    gather,
    need_finished,
    setting_names,
)
from fedcache.report.page import (
    PRIVATE,
    comparison_of,
    every_method_first,
    first_of_each,
    ranked_runs,
)
from fedcache.report.run_groups import merge_seeds
from fedcache.report.run_origin import RunStore, store_of_run
from fedcache.report.verdict import ranked
from fedcache.runs.score import check_score, score_for


@dataclass(frozen=True)
class FigureInput:
    """Input of a figure: the runs of one setting in the order of a report."""

    title: str
    named: Named
    score: str
    embed: str

    @property
    def entries(self) -> list[StoredRun]:
        """The runs."""
        return [e for _, e in self.named]

    @property
    def tests(self) -> Comparison | None:
        """Paired tests with the first run."""
        return comparison_of(self.title, self.named, self.score)

    @cached_property
    def source(self) -> RunStore:
        """The store of the runs. Raises UsageError if it is not available or must not be shown."""
        store_or_reason: RunStore | str = PRIVATE
        if not any(e.private for e in self.entries):
            store_or_reason = store_of_run(self.entries)
        if isinstance(store_or_reason, str):
            raise UsageError(
                f"Partition and features cannot be drawn: {store_or_reason}.",
                "fedcache figure curves",
            )
        return store_or_reason

    @property
    def swept(self) -> figure_grids.SweptPoints | None:
        """Points of the first method that has enough of them."""
        for entries in figure_grids.by_method(self.entries).values():
            points = figure_grids.swept_points(entries, self.score)
            if points is not None:
                return points
        return None


@dataclass(frozen=True)
class Kind:
    """A kind of figure: its description, the runs that it needs, and the function that makes it."""

    description: str
    needs: str
    make: Callable[[FigureInput], Plot | None]


# Every drawing function gets "figure" as the name of its plot, which is needed only in the page of a report.


def _confusion_difference(i: FigureInput) -> Plot | None:
    """The first two methods, or the first two runs where there is one method only."""
    runs: Named = first_of_each(i.named)
    if len(runs) < 2:
        runs = i.named
    if len(runs) < 2:
        return None
    return figure_runs.confusion_difference("figure", runs[0], runs[1])


def _importance(i: FigureInput) -> Plot | None:
    points = i.swept
    if points is None:
        return None
    return figure_grids.importance_bars("figure", points)


def _parallel(i: FigureInput) -> Plot | None:
    points = i.swept
    if points is None:
        return None
    return figure_grids.parallel("figure", points)


KINDS = {
    "bytes": Kind(
        "accuracy against bytes sent",
        "two runs, and one of them sends something",
        lambda i: figure_runs.against_bytes("figure", i.named, i.score),
    ),
    "seconds": Kind(
        "accuracy against seconds of training",
        "two runs whose seconds were measured",
        lambda i: figure_runs.against_seconds("figure", i.named, i.score),
    ),
    "curves": Kind(
        "accuracy per round with bands over seeds",
        "runs with --eval-every",
        # All runs; the first of each method come before the others.
        lambda i: figure_runs.curves("figure", every_method_first(i.named)),
    ),
    "clients": Kind(
        "accuracy of every client",
        "clients that are scored on rows of their own",
        lambda i: figure_runs.spread("figure", every_method_first(i.named)),
    ),
    "differences": Kind(
        "paired differences from the first run",
        "two runs with three seeds or clients",
        lambda i: figure_runs.differences("figure", i.tests, i.named),
    ),
    "ranks": Kind(
        "mean ranks with the critical difference",
        "three runs with five seeds or clients, and significant differences",
        lambda i: figure_runs.ranks("figure", i.tests),
    ),
    "grid": Kind(
        "accuracy over one or two swept hyperparameters",
        "two configurations of a method",
        lambda i: next(iter(figure_grids.sweeps("figure", i.entries, i.score)), None),
    ),
    "importance": Kind(
        "effect of each hyperparameter of a grid",
        "eight configurations of a method that differ in two hyperparameters",
        _importance,
    ),
    "parallel": Kind(
        "every configuration of a grid as a line",
        "eight configurations of a method that differ in two hyperparameters",
        _parallel,
    ),
    "confusion": Kind(
        "test rows by true and predicted class of the first run",
        "a run with a mistake",
        lambda i: figure_runs.confusion("figure", *i.named[0]),
    ),
    "confusion-difference": Kind(
        "confusion of the first run minus that of a second method or run",
        "two runs with different predictions for a test row",
        _confusion_difference,
    ),
    "partition": Kind(
        "classes of each client",
        "training rows with labels",
        lambda i: figure_data.dots("figure", i.source),
    ),
    "features": Kind(
        "test rows in two dimensions",
        "three test rows, and --embed other than none",
        lambda i: figure_data.plane("figure", i.source, i.source.keys[0], i.embed),
    ),
}
ACROSS = "settings"
"""The kind of figure that shows several settings."""
LISTED = (*KINDS, ACROSS)


def kind_lines() -> list[str]:
    """Every kind with its description."""
    lines = [f"{name}: {kind.description}" for name, kind in KINDS.items()]
    lines.append(f"{ACROSS}: methods in several settings")
    return lines


def write_figure(
    kind: str,
    queries: Sequence[RunQuery],
    out: Path,
    root: Path,
    *,
    columns: int,
    score: str | None,
    embed: str,
) -> Plot:
    """Draw one figure of some runs into a file.

    Args:
        kind: of ``LISTED``.
        queries: runs as ``gather`` takes them; [] for all under ``root``.
        out: ends in .pdf, .svg or .png.
        root: where digests are looked up.
        columns: 1 or 2, the width in columns of a paper.
        score: client-mean | pooled; None for the score that suits the methods of a setting (``score_for``).
        embed: pca | tsne | umap, for ``features``.

    Raises:
        UsageError for an unknown kind, another ending, runs of several settings, and runs that the kind cannot show;
        StoreError where there is no finished run; MachineError without matplotlib.
    """
    if kind not in LISTED:
        kinds = "; ".join(kind_lines())
        raise UsageError(unknown("kind of figure", kind, LISTED).message, f"Kinds: {kinds}.")
    if columns not in COLUMNS:
        raise UsageError(
            f"--columns {columns} is not 1 or 2.", "--columns 2 is as wide as a page's text"
        )
    check_file(out, "-o")
    check_score(score)
    figure_data.check_embedding(embed)
    found = gather(queries, root)
    need_finished(found, root)
    settings = by_setting(merge_seeds(found).entries)
    titles = setting_names(settings)
    if kind == ACROSS:
        plot = _across(settings, titles, score)
    elif len(settings) > 1:
        listed = "; ".join(titles[:4])
        raise UsageError(
            f"The runs belong to {len(settings)} settings, such as {listed}, but a figure shows only one.",
            "Give the runs of one setting (fedcache runs list), or draw the figure `settings`.",
        )
    else:
        named, used = ranked_runs(settings[0], score)
        plot = KINDS[kind].make(FigureInput(titles[0], named, used, embed))
    if plot is None:
        needs = "two methods in two settings"
        if kind != ACROSS:
            needs = KINDS[kind].needs
        others = ", ".join(name for name in LISTED if name != kind)
        raise UsageError(
            f"The figure {kind} needs {needs}, which these runs do not give.",
            f"Other kinds: {others}",
        )
    write_plot(out, plot, columns)
    return plot


def _across(
    settings: Sequence[Sequence[StoredRun]], titles: Sequence[str], score: str | None
) -> Plot | None:
    """Methods in all settings, each with its first run in a setting."""
    points = []
    for title, entries in zip(titles, settings, strict=True):
        used = score or score_for(e.result for e in entries)
        # The label "" is not shown.
        firsts = first_of_each([("", e) for e in ranked(list(entries), used)])
        points += [(e.method, title, e.accuracy(used)) for _, e in firsts]
    return figure_grids.matrix("figure", points, titles)
