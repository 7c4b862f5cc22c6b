"""What runs reached and say of themselves: accuracy, clients, costs, confusion matrices, the methods' own numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedcache.report.drawing import (
    INK,
    SERIES,
    Cell,
    Marks,
    Plot,
    legend_below,
    name_places,
    percent,
    settings_of,
    short,
    shortened,
    size,
)
from fedcache.report.figures.grids import squares, tiles
from fedcache.report.find_runs import StoredRun
from fedcache.runs.client_columns import ClientColumns
from fedcache.runs.score import BY_VALIDATION, NOT_A_CHOICE, has_validation, score_of

MOST_CURVES = 8
MOST_STRIPS = 16
LEGEND = 34
STRIP = 20
"""Letters of a run's name in a legend and beside a strip."""

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
        shared = sorted(set.intersection(*(set(f) for f in seeds.values()))) if seeds else []
        if len(shared) > 1:
            values = 100 * np.array([[found[r] for r in shared] for found in seeds.values()])
            drawn.append((label, entry.key, np.array(shared), values))
    if not drawn:
        return None
    left = len(drawn) - MOST_CURVES
    says = "Accuracy in percent after each measured round; bands reach from the lowest to the highest seed."
    if left > 0:
        says += f" {MOST_CURVES} of {len(drawn)} are drawn, the best of each method first; the data hold all."

    def fill(axes: Any, marks: Marks) -> None:
        shown = drawn[:MOST_CURVES]
        names = shortened([label for label, *_ in shown], LEGEND)
        for i, (label, key, rounds, values) in enumerate(shown):
            mean = values.mean(0)
            dots = "." if len(rounds) <= 60 else None
            (line,) = axes.plot(
                rounds, mean, color=SERIES[i], label=names[i], marker=dots, markersize=5
            )
            told = [f"{label}: round {r}, {m:.2f} %" for r, m in zip(rounds, mean, strict=True)]
            marks(
                line, told if dots else [f"{label}: {mean[-1]:.2f} % after round {rounds[-1]}"], key
            )
            if len(values) > 1:
                low = values.min(0)
                high = values.max(0)
                marks(
                    axes.fill_between(rounds, low, high, color=SERIES[i], alpha=0.18, linewidth=0),
                    (),
                    key,
                )
        axes.set(xlabel="round", ylabel="accuracy %")
        axes.xaxis.get_major_locator().set_params(integer=True)
        legend_below(
            axes,
            marks,
            [key for _, key, *_ in shown],
            title=settings_of([n for n, *_ in shown], LEGEND),
        )

    height = 2.9 + 0.24 * min(len(drawn), MOST_CURVES)
    return Plot(
        ident,
        "Accuracy per round",
        says,
        ("run", "seed", "round", "accuracy"),
        rows,
        fill,
        height=height,
    )


def spread(ident: str, runs: Named) -> Plot | None:
    """The accuracies of a run's clients in one strip for each run, with their mean and the mean of the worst tenth.

    Every client is a dot; of more than ``MOST_DOTS`` in a run the quantiles are drawn.
    """
    known = [(label, e, c) for label, e in runs if len((c := e.clients).scored)]
    if all(len(c.scored) > 1 and not np.ptp(c.scored) for *_, c in known):
        return None  # none, or all clients are scored on the same rows
    many = any(len(columns.names) > MOST_DOTS for _, _, columns in known)
    rows: list[list[Cell]] = []
    for label, e, columns in known:
        if many:
            rows += [[label, f"{q:.0%} quantile", a] for q, a in _quantiles(columns)]
            rows.append([label, "mean of the worst tenth", e.result["fairness"].get("worst10")])
        else:
            rows += [
                [label, name, a]
                for name, a in zip(columns.names, columns.accuracy.tolist(), strict=True)
            ]
    rows = [[*names, None if a is None or np.isnan(a) else a] for *names, a in rows]
    shown = known[:MOST_STRIPS]
    strip = "the line reaches from the lowest to the highest client, the box from the 25 % to the 75 % quantile"
    says = f"Accuracy of every client, in percent: {strip if many else 'dots are clients'}, the bar is their mean, "
    says += "the triangle the mean of the worst tenth (ten clients and more)."
    says += (
        f" {MOST_STRIPS} of {len(known)} runs, the best of each method first."
        if len(known) > len(shown)
        else ""
    )
    says += _left_behind(*known[0][::2])

    def fill(axes: Any, marks: Marks) -> None:
        for y, (label, e, columns) in enumerate(shown):
            values = 100 * columns.scored
            if many:
                low, left, middle, right, high = (100 * a for _, a in _quantiles(columns))
                told = f"{label}: quantiles {low:.2f}, {left:.2f}, {middle:.2f}, {right:.2f}, {high:.2f} %"
                (reach,) = axes.plot([low, high], [y, y], color=SERIES[0], linewidth=1)
                marks(reach, (), e.key)
                (box,) = axes.plot(
                    [left, right], [y, y], color=SERIES[0], linewidth=7, solid_capstyle="butt"
                )
                marks(box, [told], e.key)
            else:
                # A fixed wobble, so that equal clients lie beside each other and not upon.
                wobble = 0.22 * np.sin(np.arange(len(values)) * 2.399)
                dots = axes.scatter(
                    values, y + wobble, s=16, color=SERIES[0], alpha=0.45, linewidths=0
                )
                named = [
                    n
                    for n, a in zip(columns.names, columns.accuracy, strict=True)
                    if not np.isnan(a)
                ]
                marks(
                    dots,
                    [f"{label}: {n} {a:.2f} %" for n, a in zip(named, values, strict=True)],
                    e.key,
                )
            (mean,) = axes.plot(
                [values.mean()], [y], marker="|", markersize=15, color=INK, markeredgewidth=2
            )
            marks(mean, [f"{label}: mean of clients {values.mean():.2f} %"], e.key)
            if (worst := e.result["fairness"].get("worst10")) is not None:
                (tail,) = axes.plot([100 * worst], [y], marker="^", markersize=6, color=SERIES[1])
                marks(tail, [f"{label}: worst tenth {percent(worst)} %"], e.key)
        names = [label for label, _, _ in shown]
        axes.set_yticks(range(len(shown)), shortened(names, STRIP))
        axes.set_ylabel(settings_of(names, STRIP))
        axes.set(xlabel="accuracy % of a client", ylim=(len(shown) - 0.4, -0.6))
        axes.grid(visible=False, axis="y")

    height = 1.0 + 0.3 * max(3, len(shown))
    over = "clients" if many else "client"
    return Plot(
        ident,
        "Clients: who is left behind",
        says,
        ("run", over, "accuracy"),
        rows,
        fill,
        height=height,
    )


def _left_behind(label: str, columns: ClientColumns) -> str:
    """Which clients of the first run have the lowest accuracies."""
    order = [
        i for i in np.argsort(columns.accuracy, kind="stable") if not np.isnan(columns.accuracy[i])
    ]
    if len(order) < 3 or columns.accuracy[order[0]] == columns.accuracy[order[-1]]:
        return ""
    low = ", ".join(
        f"{short(columns.names[i], 20)} {percent(float(columns.accuracy[i]))}" for i in order[:2]
    )
    return f" Lowest with {label}: {low}; the median client has {percent(float(np.median(columns.scored)))}."


def _quantiles(columns: ClientColumns) -> list[tuple[float, float]]:
    """(share, accuracy) of the lowest client, the quartiles and the highest."""
    shares = (0.0, 0.25, 0.5, 0.75, 1.0)
    return list(zip(shares, np.quantile(columns.scored, shares).tolist(), strict=True))


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
    if len(table) > MOST_DRAWN:
        return _pairs(ident, title, table, share, names, rows)
    says = f"Of the test rows of a true class (a row), the percentage that {label} takes for each class (a column)."

    def fill(axes: Any, marks: Marks) -> None:
        cells = [
            (
                j,
                i,
                float(share[i, j]),
                f"{names[i]} taken for {names[j]}: {table[i, j]} of {int(total[i, 0])}",
            )
            for i in range(len(table))
            for j in range(len(table))
            if table[i, j]
        ]
        squares(axes, marks, cells, small=len(table) > 12, form="{:.0f}")
        name_places(axes.set_xticks, names, rotation=90 if max(map(len, names)) > 3 else 0)
        name_places(axes.set_yticks, names)
        axes.set(
            xlabel="predicted",
            ylabel="true class",
            xlim=(-0.5, len(table) - 0.5),
            ylim=(len(table) - 0.5, -0.5),
        )

    return Plot(ident, title, says, ("true", "predicted", "rows"), rows, fill, height=4.6)


def _pairs(
    ident: str,
    title: str,
    table: np.ndarray,
    share: np.ndarray,
    names: Sequence[str],
    rows: list[list[Cell]],
) -> Plot | None:
    wrong = np.where(np.eye(len(table), dtype=bool), -1, table)
    order = [divmod(int(k), len(table)) for k in np.argsort(-wrong, axis=None, kind="stable")[:15]]
    order = [(i, j) for i, j in order if wrong[i, j] > 0]
    if not order:
        return None
    says = f"The most frequent mistakes among {len(table)} classes: percent of the true class's test rows."

    def fill(axes: Any, marks: Marks) -> None:
        bars = axes.barh(
            range(len(order)), [share[i, j] for i, j in order], color=SERIES[0], height=0.7
        )
        for bar, (i, j) in zip(bars, order, strict=True):
            marks(
                bar, [f"{names[i]} taken for {names[j]}: {table[i, j]} rows, {share[i, j]:.1f} %"]
            )
        words = [f"{short(names[i], 14)} as {short(names[j], 14)}" for i, j in order]
        axes.set_yticks(range(len(order)), words)
        axes.set(xlabel="% of the true class", ylim=(len(order) - 0.4, -0.6))

    return Plot(ident, title, says, ("true", "predicted", "rows"), rows, fill, height=3.8)


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
    curves = {n: rows for n, rows in found.items() if len({r for _, _, r, _ in rows}) > 1}
    names = sorted(curves, key=lambda n: (n not in UNITS, n))
    keys = {label: entry.key for label, entry in runs}
    return [_one(f"{ident}-{i}", name, curves[name], keys) for i, name in enumerate(names)]


def last_numbers(runs: Named) -> list[str]:
    """A sentence for each run that noted numbers of itself at the end alone."""
    made = []
    for label, entry in runs[:MOST_CURVES]:
        if len(entry.result["accuracy"].get("per_round", ())) > 1:
            continue  # it has curves
        known = {k: v for k, v in entry.result.get("diagnostics", {}).items() if v is not None}
        if known:
            told = ", ".join(
                f"{UNITS.get(k, (k.replace('_', ' '), ''))[0].lower()} {v:.4g}"
                for k, v in known.items()
            )
            made.append(f"{label}, at the end: {told}.")
    return made


def _one(ident: str, name: str, rows: list[list[Cell]], keys: dict[str, str]) -> Plot:
    title, unit = UNITS.get(name, (name.replace("_", " "), name))
    series: dict[str, dict[int, list[float]]] = {}
    for label, _, number, value in rows:
        series.setdefault(str(label), {}).setdefault(int(number or 0), []).append(float(value or 0))
    left = len(series) - MOST_CURVES
    says = f"{title} in every round that noted it ({unit}); means over seeds."
    says += f" The first {MOST_CURVES} of {len(series)} runs." if left > 0 else ""

    def fill(axes: Any, marks: Marks) -> None:
        shown = list(series.items())[:MOST_CURVES]
        names = shortened([label for label, _ in shown], LEGEND)
        for i, (label, points) in enumerate(shown):
            x = sorted(points)
            y = [float(np.mean(points[r])) for r in x]
            (line,) = axes.plot(x, y, color=SERIES[i], marker="o", markersize=4, label=names[i])
            told = [f"{label}: {v:.4g} in round {r}" for r, v in zip(x, y, strict=True)]
            marks(line, told, keys.get(label, ""))
        axes.set(xlabel="round", ylabel=unit)
        axes.margins(y=0.15)
        axes.xaxis.get_major_locator().set_params(integer=True)
        legend_below(
            axes,
            marks,
            [keys.get(n, "") for n, _ in shown],
            title=settings_of([n for n, _ in shown], LEGEND),
        )

    height = 2.7 + 0.24 * min(len(series), MOST_CURVES)
    return Plot(ident, title, says, ("run", "seed", "round", name), rows, fill, height=height)


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
    if not np.abs(gap).max():
        return None
    names = one[1].result.get("class_names") or [str(i) for i in range(len(gap))]
    title = f"Confusion of {one[0]} minus {other[0]}"
    rows: list[list[Cell]] = [
        [names[i], names[j], float(gap[i, j])] for i, j in zip(*np.nonzero(gap), strict=True)
    ]
    columns = ("true", "predicted", "difference in points")
    says = f"Points of a true class (a row) that {one[0]} takes for each class (a column) more often (blue) or less "
    says += f"often (orange) than {other[0]}; on the diagonal blue is better, elsewhere orange."
    order = [divmod(int(k), len(gap)) for k in np.argsort(-np.abs(gap), axis=None, kind="stable")]
    if len(gap) > MOST_DRAWN:
        return Plot(
            ident, title, says, columns, rows, _bars(gap, order[:MOST_PAIRS], names), height=4.4
        )

    def fill(axes: Any, marks: Marks) -> None:
        most = float(np.abs(gap).max())
        cells = [(i, j, float(gap[i, j])) for i, j in sorted(order) if gap[i, j]]
        tiles(
            axes,
            [(j, i) for i, j, _ in cells],
            [(SERIES[0] if v > 0 else SERIES[1], 0.06 + 0.8 * abs(v) / most) for *_, v in cells],
            [f"{v:+.0f}" if len(gap) <= 10 and abs(v) >= 0.5 else "" for *_, v in cells],
            [INK] * len(cells),
            marks=marks,
            words=[f"{names[i]} taken for {names[j]}: {v:+.1f} points" for i, j, v in cells],
        )
        name_places(axes.set_xticks, names, rotation=90 if max(map(len, names)) > 3 else 0)
        name_places(axes.set_yticks, names)
        axes.set(
            xlabel="predicted",
            ylabel="true class",
            xlim=(-0.5, len(gap) - 0.5),
            ylim=(len(gap) - 0.5, -0.5),
        )

    return Plot(ident, title, says, columns, rows, fill, height=4.6)


def _bars(gap: np.ndarray, order: list[tuple[int, int]], names: list[str]) -> Any:
    def fill(axes: Any, marks: Marks) -> None:
        for y, (i, j) in enumerate(order):
            v = float(gap[i, j])
            bar = axes.barh([y], [v], color=SERIES[0] if v > 0 else SERIES[1], height=0.7)[0]
            marks(bar, [f"{names[i]} taken for {names[j]}: {v:+.1f} points"])
        axes.set_yticks(
            range(len(order)), [f"{short(names[i], 9)} as {short(names[j], 9)}" for i, j in order]
        )
        axes.set(xlabel="points of the true class", ylim=(len(order) - 0.4, -0.6))

    return fill


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
        what = "all rows in one place" if entry.pooled_rows else "costs nothing here"
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
        across = (x[i] - least) / wide if np.ptp(costs) else 0.5
        side = "left" if across < 0.3 else "right" if across > 0.7 else "center"
        half = LETTER * 1.3 * len(names[i]) / 2
        middle = across + {"left": half, "right": -half, "center": 0.0}[side]
        at = (middle, (y[i] - low) / high, half)
        if any(abs(at[0] - a) < half + h and abs(at[1] - b) < 1.3 * LINE for a, b, h in taken):
            continue
        taken.append(at)
        style = {"xytext": (0, 7), "textcoords": "offset points", "ha": side}
        marks(axes.annotate(names[i], (points[i][2], y[i]), **style), (), points[i][1].key)
