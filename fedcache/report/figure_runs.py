"""Figures of runs: accuracy, clients, costs, confusion matrices, the methods' own numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fedcache.parsing import counted, size
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
    Rows,
    bars,
    legend_below,
    name_places,
    settings_of,
    short,
    shortened,
)
from fedcache.report.figure_grids import fit, squares, tiles
from fedcache.report.find_runs import Labelled, Named, StoredRun
from fedcache.report.verdict import seconds_of
from fedcache.runs.result_files import ClientColumns
from fedcache.runs.score import BY_VALIDATION, NOT_A_CHOICE, has_validation
from fedcache.tables.words import some_names

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
    rows: Rows = []
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
    rows: Rows = []
    for i, j in places:
        rows.append([names[i], names[j], int(table[i, j])])
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
                    row: list[Cell] = [label, record["seed"], record["round"], value]
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
        axis="bytes up and down, one seed",
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
    # All intervals are of one kind, so that bars can be compared. They are over blocks, or over test rows if these give
    # every pair an interval and the blocks do not.
    over_rows = []
    for p in pairs:
        if p.rows is not None and p.rows.interval is not None:
            over_rows.append(replace(p, interval=p.rows.interval, holm=p.rows.holm))
    if len(over_rows) == len(pairs) and not all(p.interval for p in pairs):
        pairs = over_rows
        over = "the test rows"
        if own_seeds:
            over = f"the test rows of the {c.over} that both runs have"
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
    rows: Rows = [[t.name, t.rank] for t in c.treatments]
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
