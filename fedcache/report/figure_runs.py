"""Figures of runs: accuracy, clients, costs, confusion matrices, the methods' own numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedcache.parsing import size
from fedcache.progress import percent
from fedcache.report.comparison import Comparison, Pair, compact
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
    SERIES,
    Cell,
    Marks,
    Plot,
    bars,
    legend_below,
    name_places,
    settings_of,
    short,
    shortened,
)
from fedcache.report.figure_grids import squares, tiles
from fedcache.report.find_runs import StoredRun
from fedcache.runs.result_files import ClientColumns
from fedcache.runs.score import BY_VALIDATION, NOT_A_CHOICE, has_validation, score_of
from fedcache.tables.words import some_names

MOST_CURVES = 8
MOST_STRIPS = 16
LEGEND = 34
STRIP = 20
"""Letters of a run's name in a legend and next to a strip."""

MOST_DOTS = 500
"""Clients of a run up to which each is drawn; above, their quantiles are."""

Named = Sequence[tuple[str, StoredRun]]
"""Runs with the label that tells them apart, in the order in which they are to be seen."""


def curves(ident: str, runs: Named) -> Plot | None:
    """Accuracy per measured round, the mean over seeds with the range between them."""
    rows: list[list[Cell]] = []
    drawn: list[tuple[str, str, np.ndarray, np.ndarray]] = []
    for label, entry in runs:
        seeds: dict[int, dict[int, float]] = {}
        for record in entry.rounds:
            if record["accuracy"] is not None:
                seeds.setdefault(record["seed"], {})[record["round"]] = record["accuracy"]
        rows += [[label, s, r, a] for s, found in seeds.items() for r, a in found.items()]
        if not seeds:
            continue
        # A mean is over the rounds that all seeds have.
        shared = sorted(set.intersection(*map(set, seeds.values())))
        if len(shared) > 1:
            values = 100 * np.array([[found[r] for r in shared] for found in seeds.values()])
            drawn.append((label, entry.key, np.array(shared), values))
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
            style = {"color": SERIES[i], "label": names[i], "markersize": 5}
            if len(rounds) <= 60:
                (line,) = axes.plot(rounds, mean, marker=".", **style)
                each = zip(rounds, mean, strict=True)
                marks(line, [f"{label}: round {r}, {m:.2f} %" for r, m in each], key)
            else:
                (line,) = axes.plot(rounds, mean, **style)
                last = rounds[-1]
                marks(line, [f"{label}: {mean[-1]:.2f} % after round {last}"], key)
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
    """Axes of lines over rounds, and the legend of the runs that they are of."""
    axes.set(xlabel="round", ylabel=ylabel)
    axes.xaxis.get_major_locator().set_params(integer=True)
    legend_below(axes, marks, keys, title=settings_of(labels, LEGEND))


QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of the lowest client, the quartiles and the highest."""


def spread(ident: str, runs: Named) -> Plot | None:
    """The accuracies of a run's clients in one strip for each run, with their mean and the mean of the worst tenth.

    Every client is a dot; of more than ``MOST_DOTS`` in a run the quantiles are drawn.
    """
    known = [(label, e, c) for label, e in runs if len((c := e.clients).scored)]
    if all(len(c.scored) > 1 and not np.ptp(c.scored) for *_, c in known):
        return None  # none, or all clients are scored on the same rows
    many = any(len(columns.names) > MOST_DOTS for _, _, columns in known)
    over = "client"
    strip = "dots are clients"
    if many:
        over = "clients"
        strip = "the line reaches from the lowest to the highest client, the box from the 25 % to the 75 % quantile"
    found: list[tuple[str, str, float | None]] = []
    for label, e, columns in known:
        if many:
            each = zip(QUANTILES, np.quantile(columns.scored, QUANTILES).tolist(), strict=True)
            found += [(label, f"{q:.0%} quantile", a) for q, a in each]
            found.append((label, "mean of the worst tenth", e.result["fairness"].get("worst10")))
        else:
            clients = zip(columns.names, columns.accuracy.tolist(), strict=True)
            found += [(label, name, a) for name, a in clients]
    rows: list[list[Cell]] = []
    for label, name, accuracy in found:
        if accuracy is not None and np.isnan(accuracy):
            accuracy = None
        rows.append([label, name, accuracy])
    shown = known[:MOST_STRIPS]
    description = f"Accuracy of every client, in percent: {strip}, the bar is their mean, "
    description += "the triangle the mean of the worst tenth (ten clients and more)."
    if len(known) > len(shown):
        description += f" {MOST_STRIPS} of {len(known)} runs, the best of each method first."
    description += _left_behind(*known[0][::2])

    def fill(axes: Any, marks: Marks) -> None:
        for y, (label, e, columns) in enumerate(shown):
            values = 100 * columns.scored
            if many:
                five = [100 * a for a in np.quantile(columns.scored, QUANTILES).tolist()]
                low, left, _, right, high = five
                (reach,) = axes.plot([low, high], [y, y], color=SERIES[0], linewidth=1)
                marks(reach, (), e.key)
                (box,) = axes.plot(
                    [left, right], [y, y], color=SERIES[0], linewidth=7, solid_capstyle="butt"
                )
                words = ", ".join(f"{a:.2f}" for a in five)
                marks(box, [f"{label}: quantiles {words} %"], e.key)
            else:
                # A fixed wobble, so that equal clients lie next to each other and not upon.
                wobble = 0.22 * np.sin(np.arange(len(values)) * 2.399)
                dots = axes.scatter(
                    values, y + wobble, s=16, color=SERIES[0], alpha=0.45, linewidths=0
                )
                scored = np.flatnonzero(~np.isnan(columns.accuracy)).tolist()
                hovers = []
                for i, accuracy in zip(scored, values, strict=True):
                    name = columns.names[i]
                    hovers.append(f"{label}: {name} {accuracy:.2f} %")
                marks(dots, hovers, e.key)
            mean = values.mean()
            (bar,) = axes.plot([mean], [y], marker="|", markersize=15, color=INK, markeredgewidth=2)
            marks(bar, [f"{label}: mean of clients {mean:.2f} %"], e.key)
            worst = e.result["fairness"].get("worst10")
            if worst is not None:
                (tail,) = axes.plot([100 * worst], [y], marker="^", markersize=6, color=SERIES[1])
                marks(tail, [f"{label}: worst tenth {percent(worst)} %"], e.key)
        names = [label for label, _, _ in shown]
        axes.set_yticks(range(len(shown)), shortened(names, STRIP))
        axes.set_ylabel(settings_of(names, STRIP))
        axes.set(xlabel="accuracy % of a client", ylim=(len(shown) - 0.4, -0.6))
        axes.grid(visible=False, axis="y")

    title = "Accuracy of each client"
    height = 1.0 + 0.3 * max(3, len(shown))
    return Plot(ident, title, description, ("run", over, "accuracy"), rows, fill, height=height)


def _left_behind(label: str, columns: ClientColumns) -> str:
    """The clients of the first run with the lowest accuracies, in words."""
    # Clients without a score are sorted to the end.
    order = np.argsort(columns.accuracy, kind="stable")[: len(columns.scored)].tolist()
    if len(order) < 3 or columns.accuracy[order[0]] == columns.accuracy[order[-1]]:
        return ""
    lowest = []
    for i in order[:2]:
        name = short(columns.names[i], 20)
        accuracy = percent(float(columns.accuracy[i]))
        lowest.append(f"{name} {accuracy}")
    median = percent(float(np.median(columns.scored)))
    clients = ", ".join(lowest)
    return f" Lowest with {label}: {clients}; the median client has {median}."


MOST_DRAWN = 30
"""Classes up to which a confusion matrix is drawn; above, its worst pairs are listed."""
UNITS = {
    "entropy_bits": ("Entropy of pseudo-labels", "bits"),
    "pseudo_accuracy": ("Accuracy of pseudo-labels", "fraction of the true class"),
}


def confusion(ident: str, label: str, entry: StoredRun) -> Plot | None:
    """Test rows by true and predicted class, all seeds together."""
    counts = entry.result.get("confusion")
    if not counts:
        return None
    table = np.array(counts, np.int64)
    names = entry.result.get("class_names") or [str(i) for i in range(len(table))]
    return confusion_matrix(ident, label, table, names)


def confusion_matrix(
    ident: str, label: str, table: np.ndarray, names: Sequence[str]
) -> Plot | None:
    """Counts [C, C] of rows by true and predicted class; of many classes the most frequent mistakes, None without."""
    rows: list[list[Cell]] = [
        [names[i], names[j], int(table[i, j])] for i, j in zip(*np.nonzero(table), strict=True)
    ]
    total = table.sum(1, keepdims=True)
    share = 100 * table / np.maximum(total, 1)
    title = f"Confusion of {label}"
    columns = ("true", "predicted", "rows")
    if len(table) > MOST_DRAWN:
        wrong = np.where(np.eye(len(table), dtype=bool), -1, table)
        most = [(i, j) for i, j in _largest(wrong)[:MOST_PAIRS] if wrong[i, j] > 0]
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
                words.append(f"{mistake}: {table[i, j]} rows, {share[i, j]:.1f} %")
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
        for i, j in np.argwhere(table).tolist():
            mistake = f"{names[i]} taken for {names[j]}"
            rows_of_class = int(total[i, 0])
            words = f"{mistake}: {table[i, j]} of {rows_of_class}"
            cells.append((j, i, float(share[i, j]), words))
        squares(axes, marks, cells, small=len(table) > 12, form="{:.0f}")
        _class_axes(axes, names)

    return Plot(ident, title, description, columns, rows, fill, height=4.6)


def own_numbers(ident: str, runs: Named) -> list[Plot]:
    """A figure for each number that methods note of themselves, over rounds; entropy of pseudo-labels first."""
    found: dict[str, list[list[Cell]]] = {}
    for label, entry in runs:
        for record in entry.rounds:
            for name, value in record.get("diagnostics", {}).items():
                if value is not None:
                    found.setdefault(name, []).append(
                        [label, record["seed"], record["round"], value]
                    )
    # A curve needs two rounds of one run.
    curves = {}
    for name, rows in found.items():
        rounds = Counter((label, seed) for label, seed, *_ in rows)
        if max(rounds.values()) > 1:
            curves[name] = rows
    names = sorted(curves, key=lambda n: (n not in UNITS, n))
    keys = {label: entry.key for label, entry in runs}
    return [_one(f"{ident}-{i}", name, curves[name], keys) for i, name in enumerate(names)]


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
    end = len(names) - 0.5
    axes.set(xlabel="predicted", ylabel="true class", xlim=(-0.5, end), ylim=(end, -0.5))


def _number_words(name: str) -> tuple[str, str]:
    """Title and unit of a number that a method notes of itself."""
    return UNITS.get(name, (name.replace("_", " "), name))


def _one(ident: str, name: str, rows: list[list[Cell]], keys: dict[str, str]) -> Plot:
    title, unit = _number_words(name)
    series: dict[str, dict[int, list[float]]] = {}
    for label, _, number, value in rows:
        series.setdefault(str(label), {}).setdefault(int(number or 0), []).append(float(value or 0))
    description = f"{title} in every recorded round ({unit}); means over seeds."
    if len(series) > MOST_CURVES:
        description += f" The first {MOST_CURVES} of {len(series)} runs."
    labels = list(series)[:MOST_CURVES]

    def fill(axes: Any, marks: Marks) -> None:
        names = shortened(labels, LEGEND)
        for i, label in enumerate(labels):
            x = sorted(series[label])
            y = [float(np.mean(series[label][r])) for r in x]
            (line,) = axes.plot(x, y, color=SERIES[i], marker="o", markersize=4, label=names[i])
            words = [f"{label}: {v:.4g} in round {r}" for r, v in zip(x, y, strict=True)]
            marks(line, words, keys.get(label, ""))
        axes.margins(y=0.15)
        _over_rounds(axes, marks, labels, [keys.get(n, "") for n in labels], unit)

    height = 2.7 + 0.24 * len(labels)
    return Plot(
        ident, title, description, ("run", "seed", "round", name), rows, fill, height=height
    )


Labelled = tuple[str, StoredRun]
MOST_PAIRS = 15


def confusion_difference(ident: str, one: Labelled, other: Labelled) -> Plot | None:
    """Percent of each true class that one run takes for each class, minus the other's; None without both matrices.

    Of many classes the pairs of classes that differ most are bars.
    """
    tables = [np.array(e.result.get("confusion") or [], np.float64) for _, e in (one, other)]
    if not all(t.size for t in tables) or tables[0].shape != tables[1].shape:
        return None
    left, right = (100 * t / np.maximum(t.sum(1, keepdims=True), 1) for t in tables)
    gap = left - right
    most = float(np.abs(gap).max())
    if not most:
        return None
    names = one[1].result.get("class_names") or [str(i) for i in range(len(gap))]
    label = one[0]
    title = f"Confusion of {label} minus {other[0]}"
    differ = [(i, j, float(gap[i, j])) for i, j in np.argwhere(gap).tolist()]
    rows: list[list[Cell]] = [[names[i], names[j], v] for i, j, v in differ]
    columns = ("true", "predicted", "difference in points")
    description = (
        f"Points of a true class (a row) that {label} classifies as each class (a column) more often "
        "(blue) or less "
    )
    description += (
        f"often (orange) than {other[0]}; on the diagonal blue is better, elsewhere orange."
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
        values = [float(gap[i, j]) for i, j in pairs]
        labels = [short(names[i], 9) + " as " + short(names[j], 9) for i, j in pairs]
        words = [words_of(*pair) for pair in pairs]
        bars(axes, marks, values, words, labels, colours=[colour_of(v) for v in values])
        axes.set_xlabel("points of the true class")

    if len(gap) > MOST_DRAWN:
        return Plot(ident, title, description, columns, rows, fill_bars, height=4.4)

    def fill(axes: Any, marks: Marks) -> None:
        numbers = [""] * len(differ)
        if len(gap) <= 10:
            numbers = [f"{v:+.0f}" if abs(v) >= 0.5 else "" for *_, v in differ]
        tiles(
            axes,
            [(j, i) for i, j, _ in differ],
            [(colour_of(v), 0.06 + 0.8 * abs(v) / most) for *_, v in differ],
            numbers,
            [INK] * len(differ),
            marks=marks,
            words=[words_of(i, j) for i, j, _ in differ],
        )
        _class_axes(axes, names)

    return Plot(ident, title, description, columns, rows, fill, height=4.6)


ON_FRONT = 20
"""Letters of a run's name at a point."""
MOST_NAMES = 12
"""Points up to which each has its name in the figure."""


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
    # Runs whose cost and accuracy are both known: label, run, cost, accuracy.
    priced = [
        (label, e, c, a)
        for label, e in runs
        if (c := cost(e)) is not None and (a := score_of(e.result, score).mean) is not None
    ]
    points = [p for p in priced if not p[1].pooled_rows and p[2] > 0]
    levels = [p for p in priced if p not in points]
    if len(priced) < 2 or not points:
        return None
    front = _front(points)
    ring_words = f"the {NOT_A_CHOICE}"
    if has_validation(e.result for _, e in runs):
        ring_words = BY_VALIDATION
    description = (
        f"Accuracy in percent over {axis}; filled dots are on the Pareto front: no cheaper run is as "
        "accurate. "
    )
    description += f"The ring marks {ring_words}."
    if levels:
        description += " Dashed lines are methods without cost here, or with all rows in one place."
    # Of many points only the front and the first run of each method are named.
    named = points
    if len(points) > MOST_NAMES:
        firsts = {e.method: e.key for _, e, *_ in reversed(points)}
        named = [p for p in points if p[1].key in front | {*firsts.values()}]
        description += " Names are those of the front and of the best run of each method."
    named = sorted(named, key=lambda p: (p[1].key not in front, -p[3]))
    places = _places(named, points, levels)
    of = settings_of([label for label, *_ in named], ON_FRONT)
    if of:
        description += f" Labels show {of}."
    if without := [label for label, e, *_ in named if e.key not in places]:
        left = some_names(without, MOST_NAMES)
        description += f" Without a name, because names would overlap: {left}."

    def fill(axes: Any, marks: Marks) -> None:
        from matplotlib.ticker import LogLocator

        x = np.array([c for _, _, c, _ in points])
        y = np.array([100 * a for *_, a in points])
        on = np.array([e.key in front for _, e, _, _ in points])
        hovers = []
        for label, _, c, a in points:
            price = word(c)
            hovers.append(f"{label}: {100 * a:.2f} %, {price}")
        words = np.array(hovers, object)
        keys = np.array([e.key for _, e, _, _ in points], object)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: word(value))
        ticks: tuple[float, ...] = (1.0,)
        if x.max() < 30 * x.min():
            ticks = (1.0, 2.0, 5.0)
        axes.xaxis.set_major_locator(LogLocator(subs=ticks, numticks=5))
        axes.minorticks_off()
        # The front as stairs: between two of its points nothing is known to be better than the cheaper one.
        order = np.flatnonzero(on)[np.argsort(x[on], kind="stable")]
        stairs = {"linewidth": 1, "drawstyle": "steps-post", "alpha": 0.6}
        axes.plot(x[order], y[order], color=SERIES[0], **stairs)
        if (~on).any():
            other = axes.scatter(x[~on], y[~on], s=26, facecolors="none", edgecolors=SERIES[0])
            marks(other, list(words[~on]), list(keys[~on]))
        marks(axes.scatter(x[on], y[on], s=34, color=SERIES[0]), list(words[on]), list(keys[on]))
        # The run that stands first has a ring, where it is a point.
        if keys[0] == next(e.key for _, e in runs if not e.pooled_rows):
            ring = axes.scatter(
                x[:1], y[:1], s=120, facecolors="none", edgecolors=INK, linewidths=1.6
            )
            marks(ring, (), str(keys[0]))
        _levels(axes, marks, levels)
        names = shortened([label for label, *_ in named], ON_FRONT)
        for (_, e, c, a), name in zip(named, names, strict=True):
            if e.key not in places:
                continue
            x_side, y_side = places[e.key]
            text = axes.annotate(
                name,
                (c, 100 * a),
                xytext=(7 * x_side, 6 * y_side),
                textcoords="offset points",
                ha=("center", "left", "right")[x_side],
                va=("center", "bottom", "top")[y_side],
            )
            marks(text, (), e.key)
        axes.set(xlabel=axis, ylabel="accuracy %")
        axes.margins(x=0.16, y=0.14)

    rows: list[list[Cell]] = []
    for label, e, c, a in priced:
        kind = ""
        if e.key in front:
            kind = "front"
        elif e.pooled_rows:
            kind = "reference"
        rows.append([label, c, a, kind])
    return Plot(
        ident, title, description, ("run", axis, "accuracy", "front"), rows, fill, height=3.6
    )


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
        what = "no cost here"
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


LETTER = 0.034
LINE = 0.08
"""A letter's width and a line's height as shares of the range of the points."""
SIDES = ((0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (-1, 1), (1, -1), (-1, -1))
"""Where a name can stand at its point: to the right (1) or left (-1), and above (1) or below (-1)."""


def _places(
    named: Sequence[Priced], points: Sequence[Priced], levels: Sequence[Priced]
) -> dict[str, tuple[int, int]]:
    """Run -> the side of its point at which its name covers no other name or point; runs without such a side lack."""
    costs = np.log10([c for _, _, c, _ in points])
    across = np.full(len(points), 0.5)
    if np.ptp(costs):
        across = (costs - costs.min()) / np.ptp(costs)
    every = [100 * a for *_, a in (*points, *levels)]
    low = min(every)
    high = max(max(every) - low, 1e-9)
    # Boxes that are taken: middle, and half of width and height.
    taken = [
        (1.1, (100 * a - low) / high, LETTER * len(label[:ON_FRONT]) / 2, LINE / 2)
        for label, _, _, a in levels
    ]
    at = {}
    for (_, entry, _, accuracy), x in zip(points, across.tolist(), strict=True):
        at[entry.key] = (x, (100 * accuracy - low) / high)
        taken.append((*at[entry.key], 0.02, 0.03))
    names = shortened([label for label, *_ in named], ON_FRONT)
    found = {}
    for (_, entry, *_), name in zip(named, names, strict=True):
        x, y = at[entry.key]
        half = LETTER * len(name) / 2
        for x_side, y_side in SIDES:
            box = (x + x_side * (half + 0.03), y + y_side * 0.09, half, LINE / 2)
            inside = abs(box[0] - 0.5) + half < 0.68 and abs(box[1] - 0.5) < 0.66
            if inside and not any(_overlap(box, other) for other in taken):
                found[entry.key] = (x_side, y_side)
                taken.append(box)
                break
    return found


Box = tuple[float, float, float, float]


def _overlap(one: Box, other: Box) -> bool:
    """Whether two boxes of middle and half sizes overlap."""
    return abs(one[0] - other[0]) < one[2] + other[2] and abs(one[1] - other[1]) < one[3] + other[3]


# Paired comparisons as figures: differences from a reference with their intervals, and ranks with
# what they tell.


MOST_ROWS = 20
MOST_NAMED = 4
"""Runs whose seeds the caption names."""
LEAST_BLOCKS = 5
"""Blocks from which on ranks are drawn, where the critical difference is also shorter than their scale."""


def differences(
    ident: str, c: Comparison, keys: Mapping[str, str] | None = None, runs: int = 0
) -> Plot | None:
    """Every treatment's mean difference from the reference, in points, with its interval; None without intervals.

    Args:
        ident: unique in the page.
        c: pairs with one reference.
        keys: name of a treatment -> key of its run.
        runs: that there are, where ``c`` compares the first of them.
    """
    pairs = [p for p in c.pairs if p.other == c.reference][:MOST_ROWS]
    shown: Sequence[tuple[Pair, tuple[float, float] | None, float | None]]
    shown = [(p, p.interval, p.holm) for p in pairs]
    blocks = len(c.blocks)
    over = f"{blocks} {c.over}"
    own_seeds = not same_blocks(c)
    if own_seeds:
        over = f"the {c.over} that both runs have"
    # All intervals are of one kind, so that bars can be compared.
    over_rows = [(p, p.rows.interval, p.rows.holm) for p in pairs if p.rows and p.rows.interval]
    if len(over_rows) == len(pairs) and not all(p.interval for p in pairs):
        shown = over_rows
        over = "the test rows"
        if own_seeds:
            over = f"the test rows of the {c.over} that both runs have"
    if not any(reach for _, reach, _ in shown):
        return None
    alpha = 1.0 - c.level
    level = 100 * c.level
    description = f"Mean difference from {c.reference} in points over {over}, with {level:g} % "
    description += f"intervals; filled dots differ after Holm's correction at {alpha:.2g}."
    if own_seeds:
        named = []
        for p in pairs:
            seeds = compact(p.blocks)
            named.append(f"{p.one}: {seeds}")
        if len(named) > MOST_NAMED:
            named[MOST_NAMED:] = ["..."]
        listed = "; ".join(named)
        description += f" Shared {c.over}: {listed}."
    if not all(reach for _, reach, _ in shown):
        description += " A hollow dot without an interval could not be tested."
    of = max(len(c.pairs), runs - 1)
    if of > len(pairs):
        description += f" Of {of} runs the first {len(pairs)}, in the order of the table."

    def words_of(pair: Pair, reach: tuple[float, float] | None, holm: float | None) -> str:
        difference = 100 * pair.difference
        words = f"{pair.one}: {difference:+.2f} points"
        if reach is not None:
            low, high = reach
            words += f", {100 * low:+.2f} to {100 * high:+.2f}"
        if holm is not None:
            words += f", p {show_p(holm)} (Holm)"
        if own_seeds:
            seeds = compact(pair.blocks)
            words += f", over {c.over} {seeds}"
        return words

    def fill(axes: Any, marks: Marks) -> None:
        from matplotlib.collections import LineCollection

        axes.axvline(0, color=MUTED, linewidth=1)
        words = [words_of(*one) for one in shown]
        of_run = [(keys or {}).get(p.one, "") for p in pairs]
        long = [(y, reach) for y, (_, reach, _) in enumerate(shown) if reach is not None]
        paths = [[(100 * low, y), (100 * high, y)] for y, (low, high) in long]
        lines = axes.add_collection(LineCollection(paths, colors=SERIES[0], linewidths=1.6))
        marks(lines, [words[y] for y, _ in long], [of_run[y] for y, _ in long])
        values = [100 * p.difference for p in pairs]
        # A difference that is significant has a filled dot.
        faces = [SERIES[0] if h is not None and h < alpha else "none" for *_, h in shown]
        dots = axes.scatter(values, range(len(pairs)), s=34, facecolors=faces, edgecolors=SERIES[0])
        marks(dots, words, of_run)
        names = [p.one for p in pairs]
        axes.set_yticks(range(len(pairs)), shortened(names, 20))
        axes.set(
            xlabel="difference in points",
            ylabel=settings_of(names, 20),
            ylim=(len(pairs) - 0.4, -0.6),
        )
        axes.grid(visible=False, axis="y")

    columns = ["run", "difference", "low", "high", "p Holm"]
    rows: list[list[Cell]] = [[p.one, p.difference, *(r or (None, None)), h] for p, r, h in shown]
    if own_seeds:
        columns.append(c.over)
        for row, pair in zip(rows, pairs, strict=True):
            row.append(compact(pair.blocks))
    height = 1.1 + 0.3 * max(3, len(pairs))
    return Plot(
        ident, f"Differences from {c.reference}", description, columns, rows, fill, height=height
    )


def enough_blocks(c: Comparison) -> bool:
    """Whether ranks can tell anything apart: blocks enough, and a critical difference shorter than the scale."""
    return c.ranking is not None and c.ranking.blocks >= LEAST_BLOCKS and not c.ranking.too_few


def ranks(ident: str, c: Comparison) -> Plot | None:
    """The critical-difference diagram; None where blocks are too few for it to tell any two apart."""
    if c.ranking is None or not enough_blocks(c) or len(c.treatments) > MOST_BARS:
        return None
    rows: list[list[Cell]] = [[t.name, t.rank] for t in c.treatments]
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
