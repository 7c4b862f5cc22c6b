"""What the settings of a grid did: which of them mattered, and every point as a line through its values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcache.report.drawing import INK, PAPER, SERIES, Cell, Marks, Plot, short
from fedcache.report.figures.grids import by_method, criterion, order_of_value
from fedcache.report.find_runs import StoredRun, facts
from fedcache.report.run_names import differing, labels

LEAST_POINTS = 8
"""Points of a method from which on there is something to say of its settings."""
MOST_LEVELS = 8
"""Values of a setting that count one by one; numbers of more stand in four groups of equal size."""
GROUPS = 4
MOST_AXES = 7


@dataclass(frozen=True)
class SweptPoints:
    """Points of one method.

    Attributes:
        method: its name.
        what: validation accuracy, or accuracy.
        highest: words for the point with the highest.
        runs: in the order given.
        names: of the settings that differ.
        values: of each point, a word for each setting.
        scores: [P] fractions.
    """

    method: str
    what: str
    highest: str
    runs: tuple[StoredRun, ...]
    names: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]
    scores: np.ndarray


def swept_points(entries: Sequence[StoredRun], score: str = "own") -> SweptPoints | None:
    """The points of one method; None with fewer than ``LEAST_POINTS`` or two settings that differ."""
    what, highest, value = criterion(entries, score)
    found = [(e, v) for e in entries if (v := value(e)) is not None]
    runs = tuple(e for e, _ in found)
    if len(runs) >= LEAST_POINTS:
        names = tuple(n for n in differing(runs) if n != "method")
    else:
        names = ()
    if len(names) < 2:
        return None
    values = tuple(tuple(f.get(n, "-") for n in names) for f in map(facts, runs))
    short_names = tuple(n.removeprefix("set.") for n in names)
    return SweptPoints(
        entries[0].method, what, highest, runs, short_names, values, np.array([v for _, v in found])
    )


def importance(levels: Sequence[str], scores: np.ndarray) -> float:
    """The share of the variance of [P] scores that the marginal means of a setting explain, corrected for chance.

    Epsilon squared (Kelley, PNAS 21, 1935): (SS_between - (k - 1) MS_within) / SS_total of one setting with k values,
    at least 0. On a full grid it is the setting's main effect in the analysis of variance; what settings do together
    alone is in none of them.
    """
    groups = [
        scores[[i for i, x in enumerate(levels) if x == level]] for level in dict.fromkeys(levels)
    ]
    total = float(((scores - scores.mean()) ** 2).sum())
    free = len(scores) - len(groups)
    if total <= 0.0 or free < 1 or len(groups) < 2:
        return 0.0
    within = float(sum(((g - g.mean()) ** 2).sum() for g in groups))
    return max(0.0, (total - within - (len(groups) - 1) * within / free) / total)


def levels_of(values: Sequence[str]) -> list[str]:
    """The values of a setting as groups: each its own, of many numbers quarters of the points by size."""
    known = set(values)
    if len(known) <= MOST_LEVELS or any(order_of_value(v)[0] for v in known):
        return list(values)
    numbers = np.array([float(v) for v in values])
    place = np.searchsorted(
        np.quantile(numbers, np.arange(1, GROUPS) / GROUPS), numbers, side="left"
    )
    return [f"quarter {p + 1}" for p in place]


def importances(points: SweptPoints) -> list[tuple[str, float]]:
    """Settings with their importance, the largest first."""
    found = [
        (n, importance(levels_of([v[i] for v in points.values]), points.scores))
        for i, n in enumerate(points.names)
    ]
    return sorted(found, key=lambda f: -f[1])


def hyperparameters(ident: str, entries: Sequence[StoredRun], score: str = "own") -> list[Plot]:
    """For each method with points enough: bars of importance, and parallel coordinates."""
    made = []
    for i, found in enumerate(by_method(entries).values()):
        if (points := swept_points(found, score)) is not None:
            made += [
                importance_bars(f"{ident}-importance{i}", points),
                parallel(f"{ident}-parallel{i}", points),
            ]
    return made


def importance_bars(ident: str, points: SweptPoints) -> Plot:
    """How much each setting mattered."""
    found = importances(points)
    rest = max(0.0, 1.0 - sum(v for _, v in found))
    says = f"Share of the variance of the {points.what} over {len(points.runs)} points that each setting's marginal "
    says += f"means explain (epsilon squared); {100 * rest:.0f} % is what settings do together, and chance."

    def fill(axes: Any, marks: Marks) -> None:
        for y, (name, value) in enumerate(found):
            marks(
                axes.barh([y], [100 * value], color=SERIES[0], height=0.6)[0],
                [f"{name}: {100 * value:.1f} %"],
            )
            axes.annotate(
                f"{100 * value:.0f}",
                (100 * value, y),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
            )
        axes.set_yticks(range(len(found)), [short(n, 18) for n, _ in found])
        axes.set(xlabel="% of the variance", xlim=(0, 112), ylim=(len(found) - 0.5, -0.5))
        axes.set_xticks([0, 25, 50, 75, 100])
        axes.grid(visible=False, axis="y")

    rows: list[list[Cell]] = [[n, v] for n, v in found]
    title = f"{points.method}: which settings mattered"
    return Plot(
        ident, title, says, ("setting", "share"), rows, fill, height=1.2 + 0.34 * len(found)
    )


def parallel(ident: str, points: SweptPoints) -> Plot:
    """Every point as a line through its values; the last axis is what points are chosen by."""
    names = [n for n, _ in importances(points)][:MOST_AXES]
    places = [points.names.index(n) for n in names]
    axes_values = [sorted({v[p] for v in points.values}, key=order_of_value) for p in places]
    low = float(points.scores.min())
    high = float(points.scores.max())
    top = int(points.scores.argmax())
    told = labels(points.runs)
    says = (
        f"Each line is one of {len(points.runs)} points; the last axis is its "
        f"{points.what} in percent, deeper lines "
    )
    says += (
        f"are higher, the thick one is the {points.highest}. The menus above the table keep some."
    )

    def fill(axes: Any, marks: Marks) -> None:
        from matplotlib.collections import LineCollection

        order = [*(int(k) for k in np.argsort(points.scores, kind="stable") if k != top), top]
        if high > low:
            share = (points.scores - low) / (high - low)
        else:
            share = np.ones(len(order))
        height = [
            {v: k / max(1, len(values) - 1) for k, v in enumerate(values)} for values in axes_values
        ]
        paths = [
            [
                *((x, height[x][points.values[i][p]]) for x, p in enumerate(places)),
                (len(places), share[i]),
            ]
            for i in order
        ]
        colours = [(SERIES[0], 0.08 + 0.6 * float(share[i]) ** 2) for i in order[:-1]]
        lines = LineCollection(
            paths, colors=[*colours, (INK, 1.0)], linewidths=[1.1] * len(colours) + [2.6]
        )
        said = [f"{told[i]}: {100 * points.scores[i]:.2f} %" for i in order]
        marks(axes.add_collection(lines), said, [points.runs[i].key for i in order])
        ground = {"facecolor": PAPER, "alpha": 0.8, "linewidth": 0, "pad": 1.0}
        beside = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "bbox": ground}
        for x, values in enumerate(axes_values):
            axes.axvline(x, color=INK, linewidth=0.6)
            step = max(1, len(values) // 8)
            for k in range(0, len(values), step):
                at = (x, k / max(1, len(values) - 1))
                axes.annotate(short(values[k], 8), at, **beside)
        axes.axvline(len(places), color=INK, linewidth=0.6)
        for end in (0.0, 1.0):
            axes.annotate(f"{100 * (low + end * (high - low)):.1f}", (len(places), end), **beside)
        axes.set_xticks(
            range(len(places) + 1),
            [("\n" if x % 2 else "") + short(n, 12) for x, n in enumerate([*names, "result"])],
        )
        axes.set_yticks([])
        axes.grid(visible=False)
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.set(xlim=(-0.1, len(places) + 0.45), ylim=(-0.06, 1.06))

    rows: list[list[Cell]] = [
        [*v, float(s)] for v, s in zip(points.values, points.scores, strict=True)
    ]
    title = f"{points.method}: every point of the grid"
    return Plot(ident, title, says, (*points.names, points.what), rows, fill, height=4.2)
