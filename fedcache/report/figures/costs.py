"""What accuracy costs: runs over bytes and seconds, the front, and what costs nothing or is no federation as a line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedcache.report.drawing import INK, SERIES, Cell, Marks, Plot, settings_of, shortened, size
from fedcache.report.figures.runs import Named
from fedcache.report.find_runs import StoredRun
from fedcache.runs.score import BY_VALIDATION, NOT_A_CHOICE, has_validation, score_of

ON_FRONT = 20
"""Letters of a run's name at a point."""


def against_bytes(ident: str, runs: Named, score: str = "own") -> Plot | None:
    """Accuracy against all bytes that travelled in one seed's run, and the front."""

    def cost(entry: StoredRun) -> float | None:
        exact = entry.result["traffic"]["exact"]
        return float(exact["up_bytes"] + exact["down_bytes"]) / max(1, len(entry.result["seeds"]))

    title = "Accuracy against bytes sent"
    axis = "bytes up and down, one seed"
    return _pareto(ident, title, axis, runs, cost, lambda v: f"{size(v)}B", score)


def against_seconds(ident: str, runs: Named, score: str = "own") -> Plot | None:
    """Accuracy against the seconds one seed's training took, and the front."""

    def cost(entry: StoredRun) -> float | None:
        if entry.seconds is None:
            return None
        return entry.seconds / max(1, len(entry.result["seeds"]))

    title = "Accuracy against seconds"
    axis = "seconds of training, one seed"
    return _pareto(ident, title, axis, runs, cost, lambda v: f"{v:.3g} s", score)


Priced = tuple[str, StoredRun, float, float]
"""Label, run, cost and accuracy."""


def _pareto(
    ident: str,
    title: str,
    axis: str,
    runs: Named,
    cost: Callable[[StoredRun], float | None],
    word: Callable[[float], str],
    score: str,
) -> Plot | None:
    """Runs as points of cost and accuracy; what is no federation or costs nothing as a line, at no invented cost."""
    priced = [
        (label, e, c, a)
        for label, e in runs
        if (c := cost(e)) is not None and (a := score_of(e.result, score).mean) is not None
    ]
    points = [p for p in priced if not p[1].pooled_rows and p[2] > 0]
    levels = [p for p in priced if p[1].pooled_rows or p[2] <= 0]
    if len(priced) < 2 or not points:
        return None
    front = _front(points)
    held = has_validation(e.result for _, e in runs)
    says = f"Accuracy in percent over {axis}; filled dots are on the front: nothing cheaper is as accurate. "
    says += f"The ring is {BY_VALIDATION if held else f'the {NOT_A_CHOICE}'}."
    says += (
        " Dashed lines are what costs nothing here or needs all rows in one place."
        if levels
        else ""
    )
    of = settings_of([label for label, e, *_ in points if e.key in front], ON_FRONT)
    says += f" Written is {of}." if of else ""

    def fill(axes: Any, marks: Marks) -> None:
        from matplotlib.ticker import LogLocator

        x = np.array([c for _, _, c, _ in points])
        y = np.array([100 * a for *_, a in points])
        on = np.array([e.key in front for _, e, _, _ in points])
        words = np.array(
            [f"{label}: {100 * a:.2f} %, {word(c)}" for label, _, c, a in points], object
        )
        keys = np.array([e.key for _, e, _, _ in points], object)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: word(value))
        narrow = x.max() < 30 * x.min()
        axes.xaxis.set_major_locator(
            LogLocator(subs=(1.0, 2.0, 5.0) if narrow else (1.0,), numticks=5)
        )
        axes.minorticks_off()
        order = np.argsort(x[on], kind="stable")
        axes.plot(
            x[on][order],
            y[on][order],
            color=SERIES[0],
            linewidth=1,
            drawstyle="steps-post",
            alpha=0.6,
        )
        if (~on).any():
            other = axes.scatter(x[~on], y[~on], s=26, facecolors="none", edgecolors=SERIES[0])
            marks(other, list(words[~on]), list(keys[~on]))
        marks(axes.scatter(x[on], y[on], s=34, color=SERIES[0]), list(words[on]), list(keys[on]))
        if points[0][1].key == next(e.key for _, e in runs if not e.pooled_rows):
            ring = axes.scatter(
                x[:1], y[:1], s=120, facecolors="none", edgecolors=INK, linewidths=1.6
            )
            marks(ring, (), str(keys[0]))
        _levels(axes, marks, levels)
        _name_front(axes, marks, [p for p in points if p[1].key in front], priced)
        axes.set(xlabel=axis, ylabel="accuracy %")
        axes.margins(x=0.16, y=0.14)

    rows: list[list[Cell]] = [
        [label, c, a, "front" if e.key in front else "reference" if e.pooled_rows else ""]
        for label, e, c, a in priced
    ]
    return Plot(ident, title, says, ("run", axis, "accuracy", "front"), rows, fill, height=3.6)


def _front(points: Sequence[Priced]) -> set[str]:
    """Keys of the runs than which nothing cheaper is as accurate."""
    best = -1.0
    front = set()
    for _, entry, _, accuracy in sorted(points, key=lambda p: (p[2], -p[3])):
        if accuracy > best:
            best = accuracy
            front.add(entry.key)
    return front


def _levels(axes: Any, marks: Marks, levels: Sequence[Priced]) -> None:
    """Dashed lines across, each named at its right end unless another name is there."""
    written: list[float] = []
    for label, entry, _, accuracy in sorted(levels, key=lambda p: -p[3]):
        line = axes.axhline(100 * accuracy, color=SERIES[1], linewidth=1.2, linestyle=(0, (4, 3)))
        what = "costs nothing here"
        if entry.pooled_rows:
            what = "all rows in one place"
        marks(line, [f"{label}: {100 * accuracy:.2f} %, {what}"], entry.key)
        if all(abs(100 * accuracy - at) > 3 for at in written):  # points; the lines of a name
            written.append(100 * accuracy)
            text = axes.annotate(
                shortened([label], ON_FRONT)[0],
                (1, 100 * accuracy),
                xycoords=axes.get_yaxis_transform(),
                xytext=(0, 3),
                textcoords="offset points",
                ha="right",
                color=SERIES[1],
            )
            marks(text, (), entry.key)


LETTER = 0.026
LINE = 0.085
"""A letter's width and a line's height as shares of the axes."""


def _name_front(
    axes: Any, marks: Marks, points: Sequence[Priced], priced: Sequence[Priced]
) -> None:
    """Write the names of the most accurate, except where one would cover another or the name of a line."""
    costs = np.log10([c for _, e, c, _ in priced if c > 0 and not e.pooled_rows])
    every = [100 * a for *_, a in priced]
    least = costs.min()
    wide = max(float(np.ptp(costs)), 1e-9)
    low = min(every)
    high = max(max(every) - min(every), 1e-9)
    lines = [(label, a) for label, e, c, a in priced if e.pooled_rows or c <= 0]
    taken = [(1.1, (100 * a - low) / high, LETTER * len(label[:ON_FRONT])) for label, a in lines]
    x = np.log10([c for _, _, c, _ in points])
    y = [100 * a for *_, a in points]
    names = shortened([label for label, *_ in points], ON_FRONT)
    for i in sorted(range(len(points)), key=lambda i: -y[i]):
        across = 0.5
        if np.ptp(costs):
            across = (x[i] - least) / wide
        if across < 0.3:
            side = "left"
        else:
            side = "right" if across > 0.7 else "center"
        half = LETTER * 1.3 * len(names[i]) / 2
        middle = across + {"left": half, "right": -half, "center": 0.0}[side]
        at = (middle, (y[i] - low) / high, half)
        if any(abs(at[0] - a) < half + h and abs(at[1] - b) < 1.3 * LINE for a, b, h in taken):
            continue
        taken.append(at)
        style = {"xytext": (0, 7), "textcoords": "offset points", "ha": side}
        marks(axes.annotate(names[i], (points[i][2], y[i]), **style), (), points[i][1].key)
