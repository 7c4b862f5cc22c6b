"""Figures of grids: accuracy over one or two swept hyperparameters, effect of each hyperparameter, and all points."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcache.progress import percent
from fedcache.report.drawing import INK, PAPER, SERIES, Draw, Marks, Plot, Rows, short, shortened
from fedcache.report.find_runs import StoredRun, differing, grouped, labels
from fedcache.runs.score import (
    BY_VALIDATION,
    NOT_A_CHOICE,
    has_validation,
    validation_value,
)

MOST_SIDE = 24
"""Maximum number of columns of a heatmap."""
Cells = dict[tuple[str, ...], tuple[float, StoredRun]]
"""Values of the drawn settings -> the highest score with these values, and its run."""


def sweeps(ident: str, entries: Sequence[StoredRun], score: str = "own") -> list[Plot]:
    """A heatmap for each method with two or more settings that differ, a line for one setting, and nothing for none."""
    made = []
    for i, (name, found) in enumerate(by_method(entries).items()):
        plot = _sweep(f"{ident}-{i}", name, found, score)
        if plot is not None:
            made.append(plot)
    return made


def by_method(entries: Sequence[StoredRun]) -> dict[str, list[StoredRun]]:
    """Runs of each method, in the order in which methods first appear."""
    return grouped(entries, lambda e: e.method)


def _sweep(ident: str, name: str, entries: Sequence[StoredRun], score: str) -> Plot | None:
    """The figure of one method; None if no setting differs, or if a heatmap would have too many columns."""
    found = _points(entries, score)
    if not found.names:
        return None
    # The distinct values of each setting.
    values = [sorted(set(column), key=order_of_value) for column in zip(*found.values, strict=True)]
    # The two settings with most values are drawn. Each place of the figure shows the best run over all other settings.
    order = sorted(range(len(values)), key=lambda i: -len(values[i]))
    drawn = order[:2]
    # Of these two, the setting with more values is the horizontal axis; if they have equally many, it is the second.
    placed = sorted(drawn, key=lambda i: len(values[i]))[::-1]
    best: Cells = {}
    rows: Rows = []
    for run, at, value in zip(found.runs, found.values, found.scores.tolist(), strict=True):
        rows.append([*at, value])
        place = tuple(at[i] for i in placed)
        if place not in best or value > best[place][0]:
            best[place] = (value, run)
    what = found.what
    names = [found.names[i] for i in drawn]
    not_drawn = [n for i, n in enumerate(found.names) if i not in drawn]
    not_drawn_words = ""
    if not_drawn:
        not_drawn_words = f" For {', '.join(not_drawn)}, the figure shows the highest value."
    capital = what[:1].upper() + what[1:]
    description = f"{capital} in percent of {name} over {len(found.runs)} configurations; "
    title = f"{name}: {' and '.join(names)}"
    columns = [*found.names, what]
    if len(drawn) == 1:
        description += f"the ring marks the {found.highest}.{not_drawn_words}"
        draw_line = _line(names[0], values[drawn[0]], best, what)
        return Plot(ident, title, description, columns, rows, draw_line)
    across, down = (values[i] for i in placed)
    if len(across) > MOST_SIDE:
        return None
    description += f"darker is higher, the frame marks the {found.highest}.{not_drawn_words}"
    height = 1.3 + min(0.42 * len(down), 6.0)
    draw_squares = _heat([found.names[i] for i in placed], across, down, best)
    return Plot(ident, title, description, columns, rows, draw_squares, height=height)


def _line(name: str, values: Sequence[str], best: Cells, what: str) -> Draw:
    accuracy = np.array([100 * best[(v,)][0] for v in values])

    def fill(axes: Any, marks: Marks) -> None:
        # Words have no order, so only numbers are joined by a line.
        linestyle = ""
        if all(order_of_value(v)[0] == 0 for v in values):
            linestyle = "-"
        places = range(len(values))
        style = {"marker": "o", "color": SERIES[0], "linestyle": linestyle, "markersize": 5}
        (line,) = axes.plot(places, accuracy, **style)
        words = [f"{name}={v}: {a:.2f} %" for v, a in zip(values, accuracy, strict=True)]
        marks(line, words, [best[(v,)][1].key for v in values])
        top = int(accuracy.argmax())
        axes.plot([top], [accuracy[top]], marker="o", markersize=10, fillstyle="none", color=INK)
        step = max(1, len(values) // 8)
        longest = max(9, 32 // len(values))
        axes.set_xticks(places[::step], [short(v, longest) for v in values[::step]])
        axes.set(xlabel=name, ylabel=f"{what} %", xlim=(-0.4, len(values) - 0.6))

    return fill


def _heat(names: Sequence[str], across: Sequence[str], down: Sequence[str], best: Cells) -> Draw:
    top = max(best, key=lambda at: best[at][0])
    # Not every combination was run: the others stay empty.
    places = []
    for x, y in itertools.product(range(len(across)), range(len(down))):
        at = (across[x], down[y])
        if at in best:
            places.append((x, y, at))

    def fill(axes: Any, marks: Marks) -> None:
        from matplotlib.patches import Rectangle

        cells = []
        keys = []
        for x, y, at in places:
            value, run = best[at]
            keys.append(run.key)
            accuracy = 100 * value
            where = ", ".join(f"{name}={word}" for name, word in zip(names, at, strict=True))
            cells.append((x, y, accuracy, f"{where}: {accuracy:.2f} %"))
        squares(axes, marks, cells, small=len(across) > 7, runs=keys)
        # The best point has a frame.
        corner = (across.index(top[0]) - 0.48, down.index(top[1]) - 0.48)
        axes.add_patch(Rectangle(corner, 0.96, 0.96, fill=False, edgecolor=INK, linewidth=2))
        # Long words are turned when they would overlap.
        words = [short(v, 9) for v in across]
        turned = {}
        if len(words) * max(map(len, words)) > 34:
            turned = {"rotation": 90}
        axes.set_xticks(range(len(across)), words, **turned)
        axes.set_yticks(range(len(down)), [short(v, 12) for v in down])
        axes.set(xlabel=names[0], ylabel=names[1])
        fit(axes, len(across), len(down))

    return fill


def fit(axes: Any, columns: int, rows: int) -> None:
    """Set the limits of the axes of unit squares, the first row on top."""
    axes.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5))


def squares(
    axes: Any,
    marks: Marks,
    cells: Sequence[tuple[int, int, float, str]],
    *,
    small: bool = False,
    form: str = "{:.1f}",
    runs: Sequence[str] = (),
) -> None:
    """Squares (x, y, value, words) in one colour: the higher the value, the darker. ``small`` ones show no number."""
    values = np.array([v for *_, v, _ in cells])
    low = float(values.min())
    span = float(values.max()) - low
    depth = np.full(len(values), 0.5)
    if span > 0:
        depth = 0.06 + 0.86 * (values - low) / span
    # Dark digits on pale squares and light ones on dark squares; a dark page swaps the two.
    inks = np.where(depth > 0.6, PAPER, INK).tolist()
    numbers = [""] * len(cells)
    if not small:
        numbers = [form.format(v) for v in values]
    tiles(
        axes,
        [(x, y) for x, y, *_ in cells],
        [(SERIES[0], float(a)) for a in depth],
        numbers,
        inks,
        marks=marks,
        words=[words for *_, words in cells],
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
    """Unit squares around ``middles``, each in a colour with its opacity.

    Every other sequence has one entry for each square: the number written on it ("" for none), the colour of that
    number, its tooltip, and the key of its run.
    """
    from matplotlib.collections import PolyCollection

    corners = []
    for x, y in middles:
        left = x - 0.5
        right = x + 0.5
        low = y - 0.5
        high = y + 0.5
        corners.append([(left, low), (right, low), (right, high), (left, high)])
    drawn = axes.add_collection(PolyCollection(corners, facecolors=list(colours), linewidths=0))
    marks(drawn, words, runs or "")
    for (x, y), number, ink in zip(middles, numbers, inks, strict=True):
        if number:
            text = axes.text(x, y, number, ha="center", va="center", color=ink)
            # A number is inside its square, so the layout needs no room for it.
            text.set_in_layout(False)
    axes.grid(visible=False)


def order_of_value(value: str) -> tuple[int, float, str]:
    """Sort key of a value: numbers by size, then words."""
    try:
        return 0, float(value), value
    except ValueError:
        return 1, 0.0, value


def matrix(
    ident: str, runs: Sequence[tuple[str, str, float | None]], settings: Sequence[str]
) -> Plot | None:
    """Accuracy of the same methods in several settings, side by side and not averaged."""
    # Of several runs of a method in a setting, the best is shown.
    best: dict[str, dict[str, float]] = {}
    for label, setting, accuracy in runs:
        if accuracy is not None:
            row = best.setdefault(label, {})
            row[setting] = max(accuracy, row.get(setting, -1.0))
    if len(settings) < 2 or len(best) < 2:
        return None
    by_accuracy = sorted(best, key=lambda name: -max(best[name].values()))
    names = by_accuracy[: 2 * MOST_SIDE]
    description = (
        f"Accuracy in percent of each method's run that is {NOT_A_CHOICE}; darker is higher. "
        "Settings are not averaged."
    )
    # The name of a setting is written on several lines. More than three names are turned, so the figure gets taller.
    parts = [[short(part, 22) for part in setting.split(", ")] for setting in settings]
    rotation = 0
    below = 0.13 * max(map(len, parts))
    if len(settings) > 3:
        rotation = 90
        below = 0.07 * max(map(len, itertools.chain(*parts)))

    def fill(axes: Any, marks: Marks) -> None:
        cells = []
        for x, setting in enumerate(settings):
            for y, name in enumerate(names):
                accuracy = best[name].get(setting)
                if accuracy is not None:
                    words = f"{name} on {setting}: {percent(accuracy)} %"
                    cells.append((x, y, 100 * accuracy, words))
        squares(axes, marks, cells)
        words_below = ["\n".join(lines) for lines in parts]
        axes.set_xticks(range(len(settings)), words_below, rotation=rotation)
        axes.set_yticks(range(len(names)), shortened(names, 18))
        fit(axes, len(settings), len(names))

    rows: Rows = []
    for name, setting in itertools.product(names, settings):
        rows.append([name, setting, best[name].get(setting)])
    columns = ("run", "setting", "accuracy")
    height = 0.8 + 0.25 * len(names) + below
    return Plot(ident, "Methods in every setting", description, columns, rows, fill, height=height)


LEAST_POINTS = 8
"""Minimum number of a method's configurations for which the importance of its settings is shown."""
MOST_LEVELS = 8
"""Maximum number of values of a setting that are separate levels; more numbers are grouped into quarters."""
GROUPS = 4
"""Number of groups of equal size, the quarters."""
MOST_AXES = 7
"""Maximum number of settings that have an axis."""
TO_THE_RIGHT: dict[str, Any] = {
    "xytext": (4, 0),
    "textcoords": "offset points",
    "va": "center",
}
"""Place of the text that annotates a configuration."""


@dataclass(frozen=True)
class SweptPoints:
    """Points of one method.

    Attributes:
        method: its name.
        what: validation accuracy, or accuracy.
        highest: words for the point with the highest score.
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


def _points(entries: Sequence[StoredRun], score: str) -> SweptPoints:
    """The points of one method that have a score, with the settings that differ between them."""
    what = "accuracy"
    highest = NOT_A_CHOICE
    by_validation = has_validation(e.result for e in entries)
    if by_validation:
        what = "validation accuracy"
        highest = f"configuration {BY_VALIDATION}"
    runs = []
    scores = []
    for entry in entries:
        if by_validation:
            value = validation_value(entry.result, score)
        else:
            value = entry.accuracy(score)
        if value is not None:
            runs.append(entry)
            scores.append(value)
    names = [name for name in differing(runs) if name != "method"]
    values = []
    for run in runs:
        values.append(tuple(run.facts.get(name, "-") for name in names))
    return SweptPoints(
        method=entries[0].method,
        what=what,
        highest=highest,
        runs=tuple(runs),
        names=tuple(name.removeprefix("set.") for name in names),
        values=tuple(values),
        scores=np.array(scores),
    )


def swept_points(entries: Sequence[StoredRun], score: str = "own") -> SweptPoints | None:
    """The points of one method; None with fewer than ``LEAST_POINTS`` or two settings that differ."""
    found = _points(entries, score)
    if len(found.runs) < LEAST_POINTS or len(found.names) < 2:
        return None
    return found


def importance(levels: Sequence[str], scores: np.ndarray) -> float:
    """The share of the variance of [P] scores that the marginal means of a setting explain, corrected for chance.

    Epsilon squared (Kelley, PNAS 21, 1935): (SS_between - (k - 1) MS_within) / SS_total of one setting with k values,
    at least 0. On a full grid it is the setting's main effect in the analysis of variance. Interactions between
    settings do not count for any of them.
    """
    words = np.array(levels)
    groups = [scores[words == level] for level in dict.fromkeys(levels)]
    total = float(((scores - scores.mean()) ** 2).sum())
    free = len(scores) - len(groups)
    if total <= 0.0 or free < 1 or len(groups) < 2:
        return 0.0
    within = float(sum(((g - g.mean()) ** 2).sum() for g in groups))
    chance = (len(groups) - 1) * within / free
    return max(0.0, (total - within - chance) / total)


def levels_of(values: Sequence[str]) -> list[str]:
    """The level of each value of a setting: the value itself, or its quarter by size.

    A setting with up to ``MOST_LEVELS`` values has one level for each. If it has more, and all are numbers, they are
    grouped into quarters by size.
    """
    known = set(values)
    if len(known) <= MOST_LEVELS or any(order_of_value(v)[0] for v in known):
        return list(values)
    numbers = np.array([float(v) for v in values])
    limits = np.quantile(numbers, np.arange(1, GROUPS) / GROUPS)
    places = np.searchsorted(limits, numbers)
    return [f"quarter {place + 1}" for place in places]


def importances(points: SweptPoints) -> list[tuple[str, float]]:
    """Settings with their importance, the largest first."""
    found = []
    for i, name in enumerate(points.names):
        levels = levels_of([values[i] for values in points.values])
        found.append((name, importance(levels, points.scores)))
    return sorted(found, key=lambda pair: -pair[1])


def hyperparameters(ident: str, entries: Sequence[StoredRun], score: str = "own") -> list[Plot]:
    """For each method with enough points: bars of importance, and parallel coordinates."""
    made = []
    for i, found in enumerate(by_method(entries).values()):
        points = swept_points(found, score)
        if points is not None:
            made.append(importance_bars(f"{ident}-importance{i}", points))
            made.append(parallel(f"{ident}-parallel{i}", points))
    return made


def importance_bars(ident: str, points: SweptPoints) -> Plot:
    """Bars of the share of variance that each setting explains."""
    found = importances(points)
    # Main effects need not explain everything: the rest is interactions and chance.
    rest = 100 * max(0.0, 1.0 - sum(v for _, v in found))
    count = len(points.runs)
    description = (
        f"Share of the variance of the {points.what} over {count} configurations that each hyperparameter's "
        f"marginal means explain (epsilon squared); the remaining {rest:.0f} % are interactions and chance."
    )

    def fill(axes: Any, marks: Marks) -> None:
        shares = [100 * v for _, v in found]
        for y, ((name, _), share) in enumerate(zip(found, shares, strict=True)):
            (bar,) = axes.barh([y], [share], color=SERIES[0], height=0.6)
            marks(bar, [f"{name}: {share:.1f} %"])
            axes.annotate(f"{share:.0f}", (share, y), **TO_THE_RIGHT)
        axes.set_yticks(range(len(found)), [short(n, 18) for n, _ in found])
        axes.set(xlabel="% of the variance", xlim=(0, 112), ylim=(len(found) - 0.5, -0.5))
        axes.set_xticks([0, 25, 50, 75, 100])
        axes.grid(visible=False, axis="y")

    rows: Rows = [[n, v] for n, v in found]
    title = f"{points.method}: effect of each hyperparameter"
    height = 1.2 + 0.34 * len(found)
    return Plot(ident, title, description, ("setting", "share"), rows, fill, height=height)


def parallel(ident: str, points: SweptPoints) -> Plot:
    """Every point as a line through its values; the last axis is the score by which points are chosen."""
    names = [n for n, _ in importances(points)][:MOST_AXES]
    places = [points.names.index(n) for n in names]
    axes_values = [sorted({v[p] for v in points.values}, key=order_of_value) for p in places]
    low = float(points.scores.min())
    high = float(points.scores.max())
    top = int(points.scores.argmax())
    run_labels = labels(points.runs)
    count = len(points.runs)
    description = (
        f"Each line is one of {count} configurations. The last axis is its {points.what} in percent; "
        f"darker lines are higher, the thick line is the {points.highest}. The menus above the table "
        "filter the lines."
    )

    def fill(axes: Any, marks: Marks) -> None:
        from matplotlib.collections import LineCollection

        # The best point is drawn last, on top of the others.
        order = np.argsort(points.scores, kind="stable").tolist()
        order.remove(top)
        order.append(top)
        if high > low:
            share = (points.scores - low) / (high - low)
        else:
            share = np.ones(len(order))
        # For each axis: value -> its height, from 0 to 1.
        height = []
        for values in axes_values:
            last = max(1, len(values) - 1)
            height.append({value: k / last for k, value in enumerate(values)})
        paths = []
        words = []
        for i in order:
            point = points.values[i]
            through = [(x, height[x][point[place]]) for x, place in enumerate(places)]
            paths.append([*through, (len(places), share[i])])
            score = 100 * points.scores[i]
            words.append(f"{run_labels[i]}: {score:.2f} %")
        colours = [(SERIES[0], 0.08 + 0.6 * float(share[i]) ** 2) for i in order[:-1]]
        lines = LineCollection(
            paths, colors=[*colours, (INK, 1.0)], linewidths=[1.1] * len(colours) + [2.6]
        )
        marks(axes.add_collection(lines), words, [points.runs[i].key for i in order])
        ground = {"facecolor": PAPER, "alpha": 0.8, "linewidth": 0, "pad": 1.0}
        for x, values in enumerate(axes_values):
            axes.axvline(x, color=INK, linewidth=0.6)
            step = max(1, len(values) // 8)
            for value in values[::step]:
                at = (x, height[x][value])
                axes.annotate(short(value, 8), at, bbox=ground, **TO_THE_RIGHT)
        axes.axvline(len(places), color=INK, linewidth=0.6)
        for end, score in ((0.0, low), (1.0, high)):
            at = (len(places), end)
            axes.annotate(f"{100 * score:.1f}", at, bbox=ground, **TO_THE_RIGHT)
        # Every second name is a line lower, so that neighbours do not overlap.
        ticks = [short(n, 12) for n in [*names, "result"]]
        ticks[1::2] = [f"\n{n}" for n in ticks[1::2]]
        axes.set_xticks(range(len(places) + 1), ticks)
        axes.set_yticks([])
        axes.grid(visible=False)
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.set(xlim=(-0.1, len(places) + 0.45), ylim=(-0.06, 1.06))

    rows: Rows = [[*v, float(s)] for v, s in zip(points.values, points.scores, strict=True)]
    title = f"{points.method}: every configuration of the grid"
    return Plot(ident, title, description, (*points.names, points.what), rows, fill, height=4.2)
