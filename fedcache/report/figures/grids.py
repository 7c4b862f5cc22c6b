"""Grids: what two swept values did to the accuracy, the rest at its highest, and the highest point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcache.report.drawing import (
    INK,
    PAPER,
    SERIES,
    Cell,
    Draw,
    Marks,
    Plot,
    percent,
    short,
    shortened,
)
from fedcache.report.find_runs import StoredRun, differing, facts, labels
from fedcache.runs.score import (
    BY_VALIDATION,
    NOT_A_CHOICE,
    has_validation,
    score_of,
    validation_value,
)

MOST_SIDE = 24
Cells = dict[tuple[str, ...], tuple[float, StoredRun]]


def sweeps(ident: str, entries: Sequence[StoredRun], score: str = "own") -> list[Plot]:
    """A heatmap for each method with two swept values or more, a line for one; none for a method that stands alone."""
    made = [
        _method(f"{ident}-{i}", name, found, score)
        for i, (name, found) in enumerate(by_method(entries).items())
    ]
    return [plot for plot in made if plot is not None]


def by_method(entries: Sequence[StoredRun]) -> dict[str, list[StoredRun]]:
    """Runs of each method, in the order in which methods first appear."""
    methods: dict[str, list[StoredRun]] = {}
    for entry in entries:
        methods.setdefault(entry.method, []).append(entry)
    return methods


def criterion(
    entries: Sequence[StoredRun], score: str
) -> tuple[str, str, Callable[[StoredRun], float | None]]:
    """What points are chosen by: its name, words for the highest, and its value of a run."""
    if has_validation(e.result for e in entries):
        return (
            "validation accuracy",
            f"point {BY_VALIDATION}",
            lambda e: validation_value(e.result, score),
        )
    return "accuracy", NOT_A_CHOICE, lambda e: score_of(e.result, score).mean


def _method(ident: str, name: str, entries: Sequence[StoredRun], score: str) -> Plot | None:
    what, highest, value = criterion(entries, score)
    scored = [(e, v) for e in entries if (v := value(e)) is not None]
    names = (
        [n for n in differing([e for e, _ in scored]) if n != "method"] if len(scored) > 1 else []
    )
    if not names:
        return None
    told = [facts(e) for e, _ in scored]
    values = {n: sorted({f.get(n, "-") for f in told}, key=order_of_value) for n in names}
    chosen = sorted(names, key=lambda n: -len(values[n]))[:2]
    best: Cells = {}
    for f, (e, v) in zip(told, scored, strict=True):
        at = tuple(f.get(n, "-") for n in chosen)
        if at not in best or v > best[at][0]:
            best[at] = (v, e)
    rows: list[list[Cell]] = [
        [*(f.get(n, "-") for n in names), v] for f, (_, v) in zip(told, scored, strict=True)
    ]
    columns = [*(n.removeprefix("set.") for n in names), what]
    rest = [n.removeprefix("set.") for n in names if n not in chosen]
    over = f" Of {', '.join(rest)} the highest value is taken." if rest else ""
    title = f"{name}: {' and '.join(n.removeprefix('set.') for n in chosen)}"
    says = f"{what[:1].upper()}{what[1:]} in percent of {name} over {len(scored)} points; "
    if len(chosen) == 1:
        says += f"the ring is the {highest}.{over}"
        return Plot(
            ident, title, says, columns, rows, _line(chosen[0], values[chosen[0]], best, what)
        )
    if max(len(values[n]) for n in chosen) > MOST_SIDE:
        return None
    says += f"deeper is higher, the frame is the {highest}.{over}"
    down = min(len(values[n]) for n in chosen)
    return Plot(
        ident,
        title,
        says,
        columns,
        rows,
        _heat(chosen, values, best),
        height=1.3 + min(0.42 * down, 6.0),
    )


def _line(name: str, values: Sequence[str], best: Cells, what: str) -> Draw:
    accuracy = np.array([100 * best[(v,)][0] for v in values])

    def fill(axes: Any, marks: Marks) -> None:
        # nothing lies between two words
        joined = "-" if all(order_of_value(v)[0] == 0 for v in values) else ""
        (line,) = axes.plot(
            range(len(values)),
            accuracy,
            marker="o",
            markersize=5,
            linestyle=joined,
            color=SERIES[0],
        )
        told = [
            f"{name.removeprefix('set.')}={v}: {a:.2f} %"
            for v, a in zip(values, accuracy, strict=True)
        ]
        marks(line, told, [best[(v,)][1].key for v in values])
        top = int(accuracy.argmax())
        axes.plot([top], [accuracy[top]], marker="o", markersize=10, fillstyle="none", color=INK)
        step = max(1, len(values) // 8)
        axes.set_xticks(
            range(0, len(values), step),
            [short(v, max(9, 32 // len(values))) for v in values[::step]],
        )
        axes.set(
            xlabel=name.removeprefix("set."), ylabel=f"{what} %", xlim=(-0.4, len(values) - 0.6)
        )

    return fill


def _heat(names: Sequence[str], values: dict[str, list[str]], best: Cells) -> Draw:
    across, down = sorted(names, key=lambda n: len(values[n]))[::-1]
    flip = names[0] != across
    found = {(at[1], at[0]) if flip else at: v for at, v in best.items()}
    top = max(found, key=lambda at: found[at][0])
    places = [
        (x, y, a, b)
        for x, a in enumerate(values[across])
        for y, b in enumerate(values[down])
        if (a, b) in found
    ]

    def fill(axes: Any, marks: Marks) -> None:
        from matplotlib.patches import Rectangle

        cells = []
        for x, y, a, b in places:
            v = 100 * found[a, b][0]
            said = f"{across.removeprefix('set.')}={a}, {down.removeprefix('set.')}={b}: {v:.2f} %"
            cells.append((x, y, v, said))
        squares(
            axes,
            marks,
            cells,
            small=len(values[across]) > 7,
            runs=[found[a, b][1].key for *_, a, b in places],
        )
        at = (values[across].index(top[0]), values[down].index(top[1]))
        corner = (at[0] - 0.48, at[1] - 0.48)
        axes.add_patch(Rectangle(corner, 0.96, 0.96, fill=False, edgecolor=INK, linewidth=2))
        turned = (
            {"rotation": 90}
            if len(values[across]) * max(len(short(v, 9)) for v in values[across]) > 34
            else {}
        )
        axes.set_xticks(range(len(values[across])), [short(v, 9) for v in values[across]], **turned)
        axes.set_yticks(range(len(values[down])), [short(v, 12) for v in values[down]])
        axes.set(xlabel=across.removeprefix("set."), ylabel=down.removeprefix("set."))
        axes.set(xlim=(-0.5, len(values[across]) - 0.5), ylim=(len(values[down]) - 0.5, -0.5))

    return fill


def squares(
    axes: Any,
    marks: Marks,
    cells: Sequence[tuple[int, int, float, str]],
    *,
    small: bool = False,
    form: str = "{:.1f}",
    runs: Sequence[str] = (),
) -> None:
    """Squares (x, y, value, words) whose depth of one colour is the value; their numbers are written where they fit."""
    values = np.array([v for *_, v, _ in cells])
    low = float(values.min())
    high = float(values.max())
    depth = 0.06 + 0.86 * (values - low) / (high - low) if high > low else np.full(len(values), 0.5)
    # Ink on pale squares and paper on deep ones; in the dark both are turned round.
    inks = [PAPER if a > 0.6 else INK for a in depth]
    numbers = ["" if small else form.format(v) for v in values]
    tiles(
        axes,
        [(x, y) for x, y, *_ in cells],
        [(SERIES[0], float(a)) for a in depth],
        numbers,
        inks,
        marks=marks,
        words=[said for *_, said in cells],
        runs=runs,
    )
    for side in axes.spines.values():
        side.set_visible(False)


def tiles(
    axes: Any,
    middles: Sequence[tuple[int, int]],
    colours: Sequence[tuple[str, float]],
    numbers: Sequence[str],
    inks: Sequence[str],
    *,
    marks: Marks,
    words: Sequence[str],
    runs: Sequence[str] = (),
) -> None:
    """Unit squares by their middles, each of a colour with its depth; what is written on them, "" for nothing."""
    from matplotlib.collections import PolyCollection

    corners = [
        [(x - 0.5, y - 0.5), (x + 0.5, y - 0.5), (x + 0.5, y + 0.5), (x - 0.5, y + 0.5)]
        for x, y in middles
    ]
    drawn = axes.add_collection(PolyCollection(corners, facecolors=list(colours), linewidths=0))
    marks(drawn, words, runs or "")
    for (x, y), number, ink in zip(middles, numbers, inks, strict=True):
        if number:  # it lies inside, and needs no room
            axes.text(x, y, number, ha="center", va="center", color=ink).set_in_layout(False)
    axes.grid(visible=False)


def order_of_value(value: str) -> tuple[int, float, str]:
    """Numbers by size, then words."""
    try:
        return 0, float(value), value
    except ValueError:
        return 1, 0.0, value


def matrix(
    ident: str, runs: Sequence[tuple[str, str, float | None]], settings: Sequence[str]
) -> Plot | None:
    """(label, setting, accuracy) of the same methods in several settings, beside each other and not averaged."""
    known = [(label, s, a) for label, s, a in runs if a is not None]
    labels = list(dict.fromkeys(label for label, *_ in known))
    if len(settings) < 2 or len(labels) < 2:
        return None
    best: dict[tuple[str, str], float] = {}
    for label, s, a in known:
        best[label, s] = max(a, best.get((label, s), -1.0))
    labels = sorted(labels, key=lambda n: -max(best.get((n, s), 0.0) for s in settings))[
        : 2 * MOST_SIDE
    ]
    says = f"Accuracy in percent: of each method's runs in a setting the {NOT_A_CHOICE}; deeper is higher. "
    says += "Settings are not averaged."
    parts = [[short(part, 22) for part in s.split(", ")] for s in settings]
    upright = len(settings) > 3
    below = (
        0.07 * max(len(line) for lines in parts for line in lines)
        if upright
        else 0.13 * max(map(len, parts))
    )

    def fill(axes: Any, marks: Marks) -> None:
        cells = [
            (x, y, 100 * best[n, s], f"{n} on {s}: {percent(best[n, s])} %")
            for x, s in enumerate(settings)
            for y, n in enumerate(labels)
            if (n, s) in best
        ]
        squares(axes, marks, cells)
        axes.set_xticks(
            range(len(settings)),
            ["\n".join(lines) for lines in parts],
            rotation=90 if upright else 0,
        )
        axes.set_yticks(range(len(labels)), shortened(labels, 18))
        axes.set(xlim=(-0.5, len(settings) - 0.5), ylim=(len(labels) - 0.5, -0.5))

    rows: list[list[Cell]] = [[n, s, best.get((n, s))] for n in labels for s in settings]
    columns = ("run", "setting", "accuracy")
    height = 0.8 + 0.25 * len(labels) + below
    return Plot(ident, "Methods in every setting", says, columns, rows, fill, height=height)


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
    names = tuple(n for n in differing(runs) if n != "method") if len(runs) >= LEAST_POINTS else ()
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
        share = (points.scores - low) / (high - low) if high > low else np.ones(len(order))
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
