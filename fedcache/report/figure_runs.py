"""Figures of runs: accuracy, clients, costs, confusion matrices, the methods' own numbers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from fedcache.parsing import Facts, counted, size
from fedcache.progress import percent
from fedcache.report.comparison import Comparison, Interval, Pair, compact
from fedcache.report.comparison_output import (
    MOST_BARS,
    fill_ranks,
    ranking_words,
    same_blocks,
    show_p,
)
from fedcache.report.drawing import (
    INK,
    MUTED,
    PAPER,
    SERIES,
    Cell,
    Draw,
    Marks,
    Plot,
    Rows,
    bars,
    legend_below,
    name_places,
    settings_of,
    short,
    shortened,
)
from fedcache.report.find_runs import Labelled, Named, StoredRun, differing, grouped, labels
from fedcache.report.verdict import seconds_of
from fedcache.runs.directory import ClientColumns
from fedcache.runs.score import BY_VALIDATION, NOT_A_CHOICE, has_validation, validation_value
from fedcache.tables.words import some_names

# Figures of grids: accuracy over one or two swept hyperparameters, effect of each hyperparameter, and all points.

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
    rows = []
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

    square = np.array([(-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5)])
    corners = np.array(middles)[:, None] + square
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

    rows = [
        [name, setting, best[name].get(setting)]
        for name, setting in itertools.product(names, settings)
    ]
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
TO_THE_RIGHT: Facts = {
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
    values = [tuple(run.facts.get(name, "-") for name in names) for run in runs]
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


MOST_CURVES = 8
"""Maximum number of runs that are drawn as curves."""
MOST_STRIPS = 16
"""Maximum number of runs whose clients are drawn in strips."""
LEGEND = 34
STRIP = 20
"""Maximum number of characters of a run's name in a legend and next to a horizontal line."""

MOST_DOTS = 500
"""Maximum number of clients of a run that are drawn as dots. If a run has more, all runs are drawn as quantiles."""


def curves(ident: str, runs: Named) -> Plot | None:
    """Accuracy per measured round, the mean over seeds with the range between them."""
    rows: Rows = []
    drawn = []
    for label, entry in runs:
        seeds: dict[int, dict[int, float]] = {}
        for record in entry.rounds:
            if record["accuracy"] is not None:
                seeds.setdefault(record["seed"], {})[record["round"]] = record["accuracy"]
        for seed, of_seed in seeds.items():
            rows += [[label, seed, number, accuracy] for number, accuracy in of_seed.items()]
        if not seeds:
            continue
        # A mean is over the rounds that all seeds have.
        shared = sorted(set.intersection(*map(set, seeds.values())))
        if len(shared) > 1:
            accuracies = [[of_seed[number] for number in shared] for of_seed in seeds.values()]
            drawn.append((label, entry.key, np.array(shared), 100 * np.array(accuracies)))
    if not drawn:
        return None
    description = "Accuracy in percent after each measured round; bands reach from the lowest to the highest seed."
    if len(drawn) > MOST_CURVES:
        description += (
            f" The figure shows {MOST_CURVES} of {len(drawn)} runs (the best of each method first); "
            "the data file has all."
        )
    shown = drawn[:MOST_CURVES]

    def fill(axes: Any, marks: Marks) -> None:
        labels = [label for label, *_ in shown]
        names = shortened(labels, LEGEND)
        for i, (label, key, rounds, values) in enumerate(shown):
            mean = values.mean(0)
            marker = ""
            words = [f"{label}: {mean[-1]:.2f} % after round {rounds[-1]}"]
            if len(rounds) <= 60:
                marker = "."
                each = zip(rounds, mean, strict=True)
                words = [f"{label}: round {r}, {m:.2f} %" for r, m in each]
            style = {"color": SERIES[i], "label": names[i], "markersize": 5}
            (line,) = axes.plot(rounds, mean, marker=marker, **style)
            marks(line, words, key)
            if len(values) > 1:
                span = (values.min(0), values.max(0))
                band = axes.fill_between(rounds, *span, color=SERIES[i], alpha=0.18, linewidth=0)
                marks(band, (), key)
        _over_rounds(axes, marks, labels, [key for _, key, *_ in shown], "accuracy %")

    columns = ("run", "seed", "round", "accuracy")
    height = 2.9 + 0.24 * len(shown)
    return Plot(ident, "Accuracy per round", description, columns, rows, fill, height=height)


def _over_rounds(
    axes: Any, marks: Marks, labels: Sequence[str], keys: Sequence[str], ylabel: str
) -> None:
    """Label the axes of lines over rounds, and add the legend of the runs."""
    axes.set(xlabel="round", ylabel=ylabel)
    axes.xaxis.get_major_locator().set_params(integer=True)
    legend_below(axes, marks, keys, title=settings_of(labels, LEGEND))


QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Quantiles that are drawn: lowest client, quartiles and highest client."""


def spread(ident: str, runs: Named) -> Plot | None:
    """The accuracies of a run's clients in one strip for each run, with their mean and the mean of the worst tenth.

    Every client is a dot. If a run has more than ``MOST_DOTS`` clients, the quantiles of all runs are drawn instead.
    None if no client was scored, or if all clients of each run have the same accuracy, as on common test rows.
    """
    known = [(label, e, e.clients) for label, e in runs if len(e.clients.scored)]
    if all(len(columns.scored) > 1 and not np.ptp(columns.scored) for *_, columns in known):
        return None
    many = any(len(columns.names) > MOST_DOTS for *_, columns in known)
    row_of = "client"
    strip = "dots are clients"
    if many:
        row_of = "clients"
        strip = "the line reaches from the lowest to the highest client, the box from the 25 % to the 75 % quantile"
    rows = []
    for label, e, columns in known:
        accuracies: list[float | None]
        if many:
            names = [f"{share:.0%} quantile" for share in QUANTILES]
            names.append("mean of the worst tenth")
            accuracies = np.quantile(columns.scored, QUANTILES).tolist()
            accuracies.append(e.result["fairness"].get("worst10"))
        else:
            names = list(columns.names)
            accuracies = columns.accuracy.tolist()
        for name, accuracy in zip(names, accuracies, strict=True):
            if accuracy is not None and np.isnan(accuracy):
                accuracy = None
            rows.append([label, name, accuracy])
    shown = known[:MOST_STRIPS]
    description = (
        f"Accuracy of every client, in percent: {strip}, the bar is their mean, the triangle the mean of the "
        "worst tenth (shown for ten clients or more)."
    )
    if len(known) > len(shown):
        description += f" {MOST_STRIPS} of {len(known)} runs, the best of each method first."
    # The caption names the clients with the lowest accuracies in the first run.
    first_label, _, first_columns = known[0]
    description += _left_behind(first_label, first_columns)

    def fill(axes: Any, marks: Marks) -> None:
        for y, (label, e, columns) in enumerate(shown):
            values = 100 * columns.scored
            if many:
                quantiles = [100 * a for a in np.quantile(columns.scored, QUANTILES).tolist()]
                low, left, _, right, high = quantiles
                (line,) = axes.plot([low, high], [y, y], color=SERIES[0], linewidth=1)
                marks(line, (), e.key)
                (box,) = axes.plot(
                    [left, right], [y, y], color=SERIES[0], linewidth=7, solid_capstyle="butt"
                )
                words = ", ".join(f"{a:.2f}" for a in quantiles)
                marks(box, [f"{label}: quantiles {words} %"], e.key)
            else:
                # A fixed vertical jitter, so that clients with equal accuracies do not cover each other. Steps of the
                # golden angle (2.399) spread the dots evenly.
                jitter = 0.22 * np.sin(np.arange(len(values)) * 2.399)
                dots = axes.scatter(
                    values, y + jitter, s=16, color=SERIES[0], alpha=0.45, linewidths=0
                )
                scored = np.flatnonzero(~np.isnan(columns.accuracy)).tolist()
                tooltips = []
                for i, accuracy in zip(scored, values, strict=True):
                    name = columns.names[i]
                    tooltips.append(f"{label}: {name} {accuracy:.2f} %")
                marks(dots, tooltips, e.key)
            mean = values.mean()
            (bar,) = axes.plot([mean], [y], marker="|", markersize=15, color=INK, markeredgewidth=2)
            marks(bar, [f"{label}: mean of clients {mean:.2f} %"], e.key)
            worst = e.result["fairness"].get("worst10")
            if worst is not None:
                (tail,) = axes.plot([100 * worst], [y], marker="^", markersize=6, color=SERIES[1])
                marks(tail, [f"{label}: worst tenth {percent(worst)} %"], e.key)
        _name_lines(axes, [label for label, *_ in shown])
        axes.set_xlabel("accuracy % of a client")

    title = "Accuracy of each client"
    height = 1.0 + 0.3 * max(3, len(shown))
    return Plot(ident, title, description, ("run", row_of, "accuracy"), rows, fill, height=height)


def _name_lines(axes: Any, labels: Sequence[str]) -> None:
    """Name the horizontal lines 0, 1, ... after runs, the first on top."""
    axes.set_yticks(range(len(labels)), shortened(labels, STRIP))
    axes.set(ylabel=settings_of(labels, STRIP), ylim=(len(labels) - 0.4, -0.6))
    axes.grid(visible=False, axis="y")


def _left_behind(label: str, columns: ClientColumns) -> str:
    """A sentence on the two clients of a run with the lowest accuracies; "" for equal, or fewer than three, clients."""
    # Clients without a score are sorted to the end.
    order = np.argsort(columns.accuracy, kind="stable")[: len(columns.scored)].tolist()
    if len(order) < 3 or columns.accuracy[order[0]] == columns.accuracy[order[-1]]:
        return ""
    lowest = []
    for i in order[:2]:
        name = short(columns.names[i], 20)
        accuracy = percent(columns.accuracy[i])
        lowest.append(f"{name} {accuracy}")
    median = percent(float(np.median(columns.scored)))
    clients = ", ".join(lowest)
    return f" Lowest with {label}: {clients}; the median client has {median}."


MOST_DRAWN = 30
"""Maximum number of classes for which the matrix is drawn. If there are more, bars show its most frequent mistakes."""
UNITS = {
    "entropy_bits": ("Entropy of pseudo-labels", "bits"),
    "pseudo_accuracy": ("Accuracy of pseudo-labels", "fraction of the true class"),
}
"""Diagnostic -> title and unit of its figure."""


def confusion(ident: str, label: str, entry: StoredRun) -> Plot | None:
    """Test rows by true and predicted class, all seeds together."""
    counts = entry.result.get("confusion")
    if not counts:
        return None
    table = np.array(counts, np.int64)
    return confusion_matrix(ident, label, table, _class_names(entry, len(table)))


def _class_names(entry: StoredRun, count: int) -> Sequence[str]:
    """Names of the classes of a run; their numbers for a result without names."""
    return entry.result.get("class_names") or list(map(str, range(count)))


def confusion_matrix(
    ident: str, label: str, table: np.ndarray, names: Sequence[str]
) -> Plot | None:
    """Counts [C, C] of rows by true and predicted class.

    With more than ``MOST_DRAWN`` classes the figure shows the most frequent mistakes; None if there is no mistake.
    """
    places = np.argwhere(table).tolist()
    rows: Rows = [[names[i], names[j], int(table[i, j])] for i, j in places]
    total = table.sum(1)
    share = _percent_of_class(table)
    title = f"Confusion of {label}"
    columns = ("true", "predicted", "rows")
    if len(table) > MOST_DRAWN:
        wrong = np.where(np.eye(len(table), dtype=bool), -1, table)
        most = [place for place in _largest(wrong)[:MOST_PAIRS] if wrong[place] > 0]
        if not most:
            return None
        description = (
            f"The most frequent mistakes among {len(table)} classes, in percent of the test rows of the true "
            "class."
        )

        def fill_bars(axes: Any, marks: Marks) -> None:
            words = []
            pairs = []
            for i, j in most:
                mistake = f"{names[i]} taken for {names[j]}"
                mistaken = counted(table[i, j], "row")
                words.append(f"{mistake}: {mistaken}, {share[i, j]:.1f} %")
                pairs.append(short(names[i], 14) + " as " + short(names[j], 14))
            bars(axes, marks, [share[i, j] for i, j in most], words, pairs)
            axes.set_xlabel("% of the true class")

        return Plot(ident, title, description, columns, rows, fill_bars, height=3.8)
    description = (
        f"Of the test rows of a true class (a row), the percentage that {label} classifies as each class "
        "(a column)."
    )

    def fill(axes: Any, marks: Marks) -> None:
        cells = []
        for i, j in places:
            mistake = f"{names[i]} taken for {names[j]}"
            words = f"{mistake}: {table[i, j]} of {total[i]}"
            cells.append((j, i, share[i, j], words))
        squares(axes, marks, cells, small=len(table) > 12, form="{:.0f}")
        _class_axes(axes, names)

    return Plot(ident, title, description, columns, rows, fill, height=4.6)


def _percent_of_class(table: np.ndarray) -> np.ndarray:
    """[C, C] percent of the rows of each true class (a row of ``table``); 0 for a class without rows."""
    share: np.ndarray = 100 * table / np.maximum(table.sum(1, keepdims=True), 1)
    return share


def own_numbers(ident: str, runs: Named) -> list[Plot]:
    """A figure over rounds for each diagnostic that methods record; entropy and accuracy of pseudo-labels first."""
    found: dict[str, Rows] = {}
    for label, entry in runs:
        for record in entry.rounds:
            for name, value in record.get("diagnostics", {}).items():
                if value is not None:
                    row = [label, record["seed"], record["round"], value]
                    found.setdefault(name, []).append(row)
    # A curve needs two rounds of one run.
    curves = {}
    for name, rows in found.items():
        rounds = Counter((label, seed) for label, seed, *_ in rows)
        if max(rounds.values()) > 1:
            curves[name] = rows
    names = sorted(curves, key=lambda name: (name not in UNITS, name))
    keys = {label: entry.key for label, entry in runs}
    return [_diagnostic(f"{ident}-{i}", name, curves[name], keys) for i, name in enumerate(names)]


def _largest(table: np.ndarray) -> list[tuple[int, int]]:
    """Places (row, column) of a square table, the largest value first."""
    order = np.argsort(-table, axis=None, kind="stable").tolist()
    return [divmod(k, len(table)) for k in order]


def _class_axes(axes: Any, names: Sequence[str]) -> None:
    """Predicted classes across and true classes down."""
    rotation = 0
    if max(map(len, names)) > 3:
        rotation = 90
    name_places(axes.set_xticks, names, rotation=rotation)
    name_places(axes.set_yticks, names)
    axes.set(xlabel="predicted", ylabel="true class")
    fit(axes, len(names), len(names))


def _diagnostic(ident: str, name: str, rows: Rows, keys: dict[str, str]) -> Plot:
    """One line over rounds for each run; ``rows`` are label, seed, round and value, ``keys`` those of the runs."""
    title, unit = UNITS.get(name, (name.replace("_", " "), name))
    # Values of all seeds, by run and round.
    series: dict[str, dict[int, list[float]]] = {}
    for label, _, number, value in rows:
        of_run = series.setdefault(str(label), {})
        of_run.setdefault(int(number or 0), []).append(float(value or 0))
    description = f"{title} in every recorded round ({unit}); means over seeds."
    if len(series) > MOST_CURVES:
        description += f" The first {MOST_CURVES} of {len(series)} runs."
    labels = list(series)[:MOST_CURVES]

    def fill(axes: Any, marks: Marks) -> None:
        names = shortened(labels, LEGEND)
        for i, label in enumerate(labels):
            rounds = sorted(series[label])
            means = [float(np.mean(series[label][number])) for number in rounds]
            style = {"color": SERIES[i], "label": names[i]}
            (line,) = axes.plot(rounds, means, marker="o", markersize=4, **style)
            each = zip(rounds, means, strict=True)
            words = [f"{label}: {mean:.4g} in round {number}" for number, mean in each]
            marks(line, words, keys.get(label, ""))
        axes.margins(y=0.15)
        _over_rounds(axes, marks, labels, [keys.get(n, "") for n in labels], unit)

    height = 2.7 + 0.24 * len(labels)
    return Plot(
        ident, title, description, ("run", "seed", "round", name), rows, fill, height=height
    )


MOST_PAIRS = 15
"""Maximum number of bars for pairs of classes."""


def confusion_difference(ident: str, one: Labelled, other: Labelled) -> Plot | None:
    """The difference of two confusion matrices in percent of each true class.

    None if a run has no matrix, or if the two do not differ.

    With more than ``MOST_DRAWN`` classes the figure shows the pairs of classes that differ most as bars.
    """
    label, run = one
    other_label, other_run = other
    table = np.array(run.result.get("confusion") or [], np.float64)
    other_table = np.array(other_run.result.get("confusion") or [], np.float64)
    if not table.size or table.shape != other_table.shape:
        return None
    gap = _percent_of_class(table) - _percent_of_class(other_table)
    most = float(np.abs(gap).max())
    if not most:
        return None
    names = _class_names(run, len(gap))
    title = f"Confusion of {label} minus {other_label}"
    differ = [(i, j, float(gap[i, j])) for i, j in np.argwhere(gap).tolist()]
    rows: Rows = [[names[i], names[j], v] for i, j, v in differ]
    columns = ("true", "predicted", "difference in points")
    description = (
        f"Points of a true class (a row) that {label} classifies as each class (a column) more often "
        f"(blue) or less often (orange) than {other_label}; on the diagonal blue is better, elsewhere orange."
    )

    def words_of(i: int, j: int) -> str:
        mistake = f"{names[i]} taken for {names[j]}"
        return f"{mistake}: {gap[i, j]:+.1f} points"

    def colour_of(value: float) -> str:
        if value > 0:
            return SERIES[0]
        return SERIES[1]

    def fill_bars(axes: Any, marks: Marks) -> None:
        pairs = _largest(np.abs(gap))[:MOST_PAIRS]
        values = [gap[i, j] for i, j in pairs]
        labels = [short(names[i], 9) + " as " + short(names[j], 9) for i, j in pairs]
        words = [words_of(*pair) for pair in pairs]
        bars(axes, marks, values, words, labels, colours=[colour_of(v) for v in values])
        axes.set_xlabel("points of the true class")

    if len(gap) > MOST_DRAWN:
        return Plot(ident, title, description, columns, rows, fill_bars, height=4.4)

    def fill(axes: Any, marks: Marks) -> None:
        middles = []
        colours = []
        numbers = []
        words = []
        for i, j, points in differ:
            middles.append((j, i))
            colours.append((colour_of(points), 0.06 + 0.8 * abs(points) / most))
            number = ""
            if len(gap) <= 10 and abs(points) >= 0.5:
                number = f"{points:+.0f}"
            numbers.append(number)
            words.append(words_of(i, j))
        inks = [INK] * len(differ)
        tiles(axes, middles, colours, numbers, inks, marks=marks, words=words)
        _class_axes(axes, names)

    return Plot(ident, title, description, columns, rows, fill, height=4.6)


ON_FRONT = 20
"""Maximum number of characters of a run's name next to a point."""
MOST_NAMES = 12
"""Maximum number of points in a figure that all have names."""


def against_bytes(ident: str, runs: Named, score: str = "own") -> Plot | None:
    """Accuracy against all bytes that were sent in one seed's run, and the Pareto front."""

    def cost(entry: StoredRun) -> float | None:
        exact = entry.result["traffic"]["exact"]
        total = float(exact["up_bytes"] + exact["down_bytes"])
        return total / max(1, len(entry.seeds))

    return _pareto(
        ident,
        "Accuracy against bytes sent",
        axis="bytes up and down of all clients, one seed",
        runs=runs,
        cost=cost,
        word=lambda v: f"{size(v)}B",
        score=score,
    )


def against_seconds(ident: str, runs: Named, score: str) -> Plot | None:
    """Accuracy against the seconds of one seed's training, and the Pareto front."""
    return _pareto(
        ident,
        "Accuracy against seconds",
        axis="seconds of training, one seed",
        runs=runs,
        cost=seconds_of,
        word=lambda v: f"{v:.3g} s",
        score=score,
    )


class Priced(NamedTuple):
    """A run with its label, its cost and its accuracy as a fraction."""

    label: str
    entry: StoredRun
    cost: float
    accuracy: float

    @property
    def key(self) -> str:
        """The key of the run's marks."""
        return self.entry.key


def _coordinates(points: Sequence[Priced]) -> tuple[list[float], list[float]]:
    """The costs of some runs, and their accuracies in percent."""
    return [p.cost for p in points], [100 * p.accuracy for p in points]


def _pareto(
    ident: str,
    title: str,
    axis: str,
    runs: Named,
    cost: Callable[[StoredRun], float | None],
    word: Callable[[float], str],
    score: str,
) -> Plot | None:
    """Runs as points of cost and accuracy.

    A run whose cost is 0, or with all rows in one place, is a horizontal line. A run without a known cost is left out.

    Args:
        ident: unique in the page.
        title: of the figure.
        axis: words for the cost.
        runs: with their labels.
        cost: of a run; None where it is not known.
        word: a cost in words.
        score: client-mean | pooled | own.
    """
    # Runs whose cost and accuracy are both known.
    priced = []
    points = []
    levels = []
    for label, entry in runs:
        price = cost(entry)
        if price is None:
            continue
        accuracy = entry.accuracy(score)
        if accuracy is None:
            continue
        run = Priced(label, entry, price, accuracy)
        priced.append(run)
        if price > 0 and not entry.pooled_rows:
            points.append(run)
        else:
            levels.append(run)
    if len(priced) < 2 or not points:
        return None
    front = _front(points)
    ring_words = f"the {NOT_A_CHOICE}"
    if has_validation(e.result for _, e in runs):
        ring_words = BY_VALIDATION
    description = (
        f"Accuracy in percent over {axis}; filled dots are on the Pareto front: no cheaper run is as "
        f"accurate. The ring marks {ring_words}."
    )
    if levels:
        description += " Dashed lines are methods without cost here, or with all rows in one place."
    # If there are many points, only those on the front and the first run of each method are named.
    named = points
    if len(points) > MOST_NAMES:
        # Reversed, because the last entry of a key is kept.
        firsts = {p.entry.method: p.key for p in reversed(points)}
        with_name = front.union(firsts.values())
        named = [p for p in points if p.key in with_name]
        description += " Only runs on the front and the best run of each method have names."
    named = sorted(named, key=lambda p: (p.key not in front, -p.accuracy))
    labels = [p.label for p in named]
    places = _places(named, shortened(labels, ON_FRONT), points, levels)
    settings = settings_of(labels, ON_FRONT)
    if settings:
        description += f" Labels show {settings}."
    without = [p.label for p in named if p.key not in places]
    if without:
        nameless = some_names(without, MOST_NAMES)
        description += f" These runs have no name, because names would overlap: {nameless}."

    def fill(axes: Any, marks: Marks) -> None:
        from matplotlib.ticker import LogLocator

        def dots(chosen: Sequence[Priced], **style: Any) -> None:
            """A dot with a tooltip for each run."""
            words = []
            for p in chosen:
                price = word(p.cost)
                words.append(f"{p.label}: {100 * p.accuracy:.2f} %, {price}")
            drawn = axes.scatter(*_coordinates(chosen), **style)
            marks(drawn, words, [p.key for p in chosen])

        on_front = [p for p in points if p.key in front]
        others = [p for p in points if p.key not in front]
        costs = [p.cost for p in points]
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: word(value))
        ticks: tuple[float, ...] = (1.0,)
        if max(costs) < 30 * min(costs):
            ticks = (1.0, 2.0, 5.0)
        axes.xaxis.set_major_locator(LogLocator(subs=ticks, numticks=5))
        axes.minorticks_off()
        # The front is drawn as stairs, because between two of its points no run is better than the cheaper one.
        stairs = _coordinates(sorted(on_front, key=lambda p: p.cost))
        axes.plot(*stairs, color=SERIES[0], linewidth=1, drawstyle="steps-post", alpha=0.6)
        if others:
            dots(others, s=26, facecolors="none", edgecolors=SERIES[0])
        dots(on_front, s=34, color=SERIES[0])
        # The first federated run has a ring if it is a point.
        first = next(e for _, e in runs if not e.pooled_rows)
        if points[0].entry is first:
            style = {"facecolors": "none", "edgecolors": INK, "linewidths": 1.6}
            ring = axes.scatter(*_coordinates(points[:1]), s=120, **style)
            marks(ring, (), first.key)
        _levels(axes, marks, levels)
        for p in named:
            if p.key not in places:
                continue
            name, x_side, y_side = places[p.key]
            text = axes.annotate(
                name,
                (p.cost, 100 * p.accuracy),
                xytext=(7 * x_side, 6 * y_side),
                textcoords="offset points",
                ha=HORIZONTAL[x_side],
                va=VERTICAL[y_side],
            )
            marks(text, (), p.key)
        axes.set(xlabel=axis, ylabel="accuracy %")
        axes.margins(x=0.16, y=0.14)

    rows: Rows = []
    for p in priced:
        kind = ""
        if p.key in front:
            kind = "front"
        elif p.entry.pooled_rows:
            kind = "reference"
        rows.append([p.label, p.cost, p.accuracy, kind])
    return Plot(
        ident, title, description, ("run", axis, "accuracy", "front"), rows, fill, height=3.6
    )


def _front(points: Sequence[Priced]) -> set[str]:
    """Keys of the runs on the Pareto front: more accurate than all cheaper runs."""
    best = -1.0
    front = set()
    for p in sorted(points, key=lambda p: (p.cost, -p.accuracy)):
        if p.accuracy > best:
            best = p.accuracy
            front.add(p.key)
    return front


def _levels(axes: Any, marks: Marks, levels: Sequence[Priced]) -> None:
    """Dashed horizontal lines, each named at its right end unless another name is there."""
    written: list[float] = []
    for label, entry, _, accuracy in sorted(levels, key=lambda p: -p.accuracy):
        height = 100 * accuracy
        line = axes.axhline(height, color=SERIES[1], linewidth=1.2, linestyle=(0, (4, 3)))
        what = "no cost here"
        if entry.pooled_rows:
            what = "all rows in one place"
        marks(line, [f"{label}: {height:.2f} %, {what}"], entry.key)
        # A name is about as high as three percentage points.
        if all(abs(height - other) > 3 for other in written):
            written.append(height)
            text = axes.annotate(
                shortened([label], ON_FRONT)[0],
                (1, height),
                xycoords=axes.get_yaxis_transform(),
                xytext=(0, 3),
                textcoords="offset points",
                ha="right",
                color=SERIES[1],
            )
            marks(text, (), entry.key)


LETTER = 0.034
LINE = 0.08
"""Width of a letter and height of a line, as shares of the range of the points."""
SIDES = ((0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (-1, 1), (1, -1), (-1, -1))
"""Sides of a point for its name: horizontal (1 is right, -1 left), and vertical (1 is above, -1 below)."""
HORIZONTAL = {-1: "right", 0: "center", 1: "left"}
VERTICAL = {-1: "top", 0: "center", 1: "bottom"}
"""Horizontal side and vertical side -> alignment of the name there."""


class _Box(NamedTuple):
    """The place of a name or point: its middle and half of its size, as shares of the range of the points."""

    x: float
    y: float
    half_width: float
    half_height: float

    def overlaps(self, other: _Box) -> bool:
        """Whether two boxes have an area in common."""
        overlap_x = abs(self.x - other.x) < self.half_width + other.half_width
        overlap_y = abs(self.y - other.y) < self.half_height + other.half_height
        return overlap_x and overlap_y


def _places(
    named: Sequence[Priced],
    names: Sequence[str],
    points: Sequence[Priced],
    levels: Sequence[Priced],
) -> dict[str, tuple[str, int, int]]:
    """Key of a run -> its name, and the side of its point on which the name covers no other name or point.

    A run is missing if there is no such side.

    Args:
        named: the points that get a name.
        names: their names.
        points: all points.
        levels: the horizontal lines.
    """
    costs = np.log10([p.cost for p in points])
    across = np.full(len(points), 0.5)
    if np.ptp(costs):
        across = (costs - costs.min()) / np.ptp(costs)
    percents = [100 * p.accuracy for p in (*points, *levels)]
    low = min(percents)
    span = max(max(percents) - low, 1e-9)

    def height_of(p: Priced) -> float:
        """The height of a run, as a share of the range of all runs."""
        return (100 * p.accuracy - low) / span

    # Boxes that are taken by the names of lines, by points and by names of points.
    taken = []
    for level in levels:
        half = LETTER * len(level.label[:ON_FRONT]) / 2
        taken.append(_Box(1.1, height_of(level), half, LINE / 2))
    point_of = {}
    for p, x in zip(points, across.tolist(), strict=True):
        point = _Box(x, height_of(p), 0.02, 0.03)
        point_of[p.key] = point
        taken.append(point)
    found = {}
    for p, name in zip(named, names, strict=True):
        point = point_of[p.key]
        half = LETTER * len(name) / 2
        for x_side, y_side in SIDES:
            x = point.x + x_side * (half + 0.03)
            y = point.y + y_side * 0.09
            box = _Box(x, y, half, LINE / 2)
            # Whether the name is about within the margins of the axes.
            inside = abs(x - 0.5) + half < 0.68 and abs(y - 0.5) < 0.66
            if inside and not any(map(box.overlaps, taken)):
                found[p.key] = (name, x_side, y_side)
                taken.append(box)
                break
    return found


# Paired comparisons as figures: differences from a reference with their intervals, and mean ranks.


MOST_ROWS = 20
"""Maximum number of differences that are drawn."""
MOST_NAMED = 4
"""Maximum number of runs whose seeds the caption lists."""
LEAST_BLOCKS = 5
"""Minimum number of blocks for which ranks are drawn."""


def _width(interval: Interval | None) -> float:
    """Length of an interval; -1 for none."""
    if interval is None:
        return -1.0
    low, high = interval
    return high - low


def _wider(pair: Pair) -> Pair:
    """The pair with its interval and p over test rows, if this interval is wider than the one over blocks."""
    if pair.rows is None or _width(pair.rows.interval) <= _width(pair.interval):
        return pair
    return replace(pair, interval=pair.rows.interval, holm=pair.rows.holm)


def differences(ident: str, c: Comparison | None, named: Named, runs: int = 0) -> Plot | None:
    """Every treatment's mean difference from the reference, in points, with its interval; None without intervals.

    Args:
        ident: unique in the page.
        c: pairs with one reference; None where the runs cannot be compared.
        named: the runs of the treatments, with their names as labels; there may be more.
        runs: number of all runs, where ``c`` compares only the first of them.
    """
    if c is None:
        return None
    pairs = [p for p in c.pairs if p.other == c.reference][:MOST_ROWS]
    blocks = len(c.blocks)
    over = f"{blocks} {c.over}"
    own_seeds = not same_blocks(c)
    if own_seeds:
        over = f"the {c.over} that both runs have"
    # All seeds have the same test rows, and some runs do not vary over seeds. So the wider of both intervals is drawn.
    wider = list(map(_wider, pairs))
    if wider != pairs:
        pairs = wider
        over += " or the test rows, whichever interval is wider"
    if not any(p.interval for p in pairs):
        return None
    level = 100 * c.level
    description = f"Mean difference from {c.reference} in points over {over}, with {level:g} % "
    description += f"intervals; filled dots differ after Holm's correction at {c.alpha:.2g}."
    if own_seeds:
        shared = []
        for p in pairs:
            seeds = compact(p.blocks)
            shared.append(f"{p.one}: {seeds}")
        if len(shared) > MOST_NAMED:
            shared[MOST_NAMED:] = ["..."]
        listed = "; ".join(shared)
        description += f" Shared {c.over}: {listed}."
    if not all(p.interval for p in pairs):
        description += " A hollow dot without an interval could not be tested."
    others = max(len(c.pairs), runs - 1)
    if others > len(pairs):
        description += f" Of {others} runs the first {len(pairs)}, in the order of the table."

    def words_of(pair: Pair) -> str:
        difference = 100 * pair.difference
        words = f"{pair.one}: {difference:+.2f} points"
        if pair.interval is not None:
            low, high = pair.interval
            words += f", {100 * low:+.2f} to {100 * high:+.2f}"
        if pair.holm is not None:
            words += f", p {show_p(pair.holm)} (Holm)"
        if own_seeds:
            seeds = compact(pair.blocks)
            words += f", over {c.over} {seeds}"
        return words

    def fill(axes: Any, marks: Marks) -> None:
        from matplotlib.collections import LineCollection

        axes.axvline(0, color=MUTED, linewidth=1)
        words = list(map(words_of, pairs))
        names = [p.one for p in pairs]
        keys = {label: e.key for label, e in named}
        run_keys = [keys[name] for name in names]
        paths = []
        places_of_paths = []
        faces = []
        for y, pair in enumerate(pairs):
            if pair.interval is not None:
                low, high = pair.interval
                paths.append([(100 * low, y), (100 * high, y)])
                places_of_paths.append(y)
            # A significant difference has a filled dot.
            face = "none"
            if pair.holm is not None and pair.holm < c.alpha:
                face = SERIES[0]
            faces.append(face)
        lines = axes.add_collection(LineCollection(paths, colors=SERIES[0], linewidths=1.6))
        marks(lines, [words[y] for y in places_of_paths], [run_keys[y] for y in places_of_paths])
        values = [100 * p.difference for p in pairs]
        dots = axes.scatter(values, range(len(pairs)), s=34, facecolors=faces, edgecolors=SERIES[0])
        marks(dots, words, run_keys)
        _name_lines(axes, names)
        axes.set_xlabel("difference in points")

    columns = ["run", "difference", "low", "high", "p Holm"]
    if own_seeds:
        columns.append(c.over)
    rows: Rows = []
    for pair in pairs:
        low, high = pair.interval or (None, None)
        row: list[Cell] = [pair.one, pair.difference, low, high, pair.holm]
        if own_seeds:
            row.append(compact(pair.blocks))
        rows.append(row)
    height = 1.1 + 0.3 * max(3, len(pairs))
    return Plot(
        ident, f"Differences from {c.reference}", description, columns, rows, fill, height=height
    )


def enough_blocks(c: Comparison) -> bool:
    """Whether ranks can be distinguished: enough blocks, and a critical difference that is shorter than the scale."""
    return c.ranking is not None and c.ranking.blocks >= LEAST_BLOCKS and not c.ranking.too_few


def ranks(ident: str, c: Comparison | None) -> Plot | None:
    """The critical-difference diagram; None where the blocks are too few to tell any two treatments apart."""
    if c is None or c.ranking is None or not enough_blocks(c) or len(c.treatments) > MOST_BARS:
        return None
    rows = [[t.name, t.rank] for t in c.treatments]
    blocks = c.ranking.blocks
    description = (
        f"Mean ranks over {blocks} {c.over}, best left; a bar joins methods without a significant "
        "difference. "
    )
    description += ranking_words(c) or ""
    return Plot(
        ident,
        "Ranks with the critical difference",
        description,
        ("run", "mean rank"),
        rows,
        lambda axes, _marks: fill_ranks(axes, c, INK, MUTED, longest=16),
        height=1.6 + 0.14 * len(c.treatments) + 0.14 * len(c.ranking.groups),
    )
