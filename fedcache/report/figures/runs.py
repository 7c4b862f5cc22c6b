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
    plot,
    short,
    size,
)
from fedcache.report.figures.grids import squares
from fedcache.report.find_runs import StoredRun
from fedcache.runs.client_columns import ClientColumns

MOST_CURVES = 8
MOST_STRIPS = 16

MOST_DOTS = 500
"""Clients of a run up to which each is drawn; above, their quantiles are."""

Named = Sequence[tuple[str, StoredRun]]
"""Runs with the label that tells them apart, in the order in which they are to be seen."""


def curves(ident: str, runs: Named) -> Plot | None:
    """Accuracy per measured round, the mean over seeds with the range between them."""
    rows: list[list[Cell]] = []
    drawn: list[tuple[str, np.ndarray, np.ndarray]] = []
    for label, entry in runs:
        seeds: dict[int, dict[int, float]] = {}
        for record in entry.rounds:
            if record["accuracy"] is not None:
                seeds.setdefault(record["seed"], {})[record["round"]] = record["accuracy"]
        rows += [[label, s, r, a] for s, found in seeds.items() for r, a in found.items()]
        shared = sorted(set.intersection(*(set(f) for f in seeds.values()))) if seeds else []
        if len(shared) > 1:
            values = 100 * np.array([[found[r] for r in shared] for found in seeds.values()])
            drawn.append((label, np.array(shared), values))
    if not drawn:
        return None
    left = len(drawn) - MOST_CURVES
    says = "Accuracy in percent after each measured round; bands reach from the lowest to the highest seed."
    if left > 0:
        says += f" {MOST_CURVES} of {len(drawn)} are drawn, the best of each method first; the data hold all."

    def fill(axes: Any, marks: Marks) -> None:
        for i, (label, rounds, values) in enumerate(drawn[:MOST_CURVES]):
            mean = values.mean(0)
            dots = "." if len(rounds) <= 60 else None
            (line,) = axes.plot(rounds, mean, color=SERIES[i], label=short(label), marker=dots, markersize=5)
            told = [f"{label}: round {r}, {m:.2f} %" for r, m in zip(rounds, mean, strict=True)]
            marks(line, told if dots else [f"{label}: {mean[-1]:.2f} % after round {rounds[-1]}"])
            if len(values) > 1:
                axes.fill_between(rounds, values.min(0), values.max(0), color=SERIES[i], alpha=0.18, linewidth=0)
        axes.set(xlabel="round", ylabel="accuracy %")
        axes.xaxis.get_major_locator().set_params(integer=True)
        legend_below(axes)

    height = 2.9 + 0.2 * min(len(drawn), MOST_CURVES)
    return plot(ident, "Accuracy per round", says, ("run", "seed", "round", "accuracy"), rows, fill, height=height)


def spread(ident: str, runs: Named) -> Plot | None:
    """The accuracies of a run's clients in one strip for each run, with their mean and the mean of the worst tenth.

    Every client is a dot; of more than ``MOST_DOTS`` in a run the quantiles are drawn.
    """
    known = [(label, e, c) for label, e in runs if len((c := e.clients).scored)]
    if not known:
        return None
    many = any(len(columns.names) > MOST_DOTS for _, _, columns in known)
    rows: list[list[Cell]] = []
    for label, e, columns in known:
        if many:
            rows += [[label, f"{q:.0%} quantile", a] for q, a in _quantiles(columns)]
            rows.append([label, "mean of the worst tenth", e.result["fairness"].get("worst10")])
        else:
            rows += [[label, name, a] for name, a in zip(columns.names, columns.accuracy.tolist(), strict=True)]
    rows = [[*names, None if a is None or np.isnan(a) else a] for *names, a in rows]
    shown = known[:MOST_STRIPS]
    strip = "the line reaches from the lowest to the highest client, the box from the 25 % to the 75 % quantile"
    says = f"Accuracy of every client, in percent: {strip if many else 'dots are clients'}, the bar is their mean, "
    says += "the triangle the mean of the worst tenth (ten clients and more)."
    says += f" {MOST_STRIPS} of {len(known)} runs, the best of each method first." if len(known) > len(shown) else ""

    def fill(axes: Any, marks: Marks) -> None:
        for y, (label, e, columns) in enumerate(shown):
            values = 100 * columns.scored
            if many:
                low, left, middle, right, high = (100 * a for _, a in _quantiles(columns))
                told = f"{label}: quantiles {low:.2f}, {left:.2f}, {middle:.2f}, {right:.2f}, {high:.2f} %"
                axes.plot([low, high], [y, y], color=SERIES[0], linewidth=1)
                (box,) = axes.plot([left, right], [y, y], color=SERIES[0], linewidth=7, solid_capstyle="butt")
                marks(box, [told])
            else:
                # A fixed wobble, so that equal clients lie beside each other and not upon.
                wobble = 0.22 * np.sin(np.arange(len(values)) * 2.399)
                dots = axes.scatter(values, y + wobble, s=16, color=SERIES[0], alpha=0.45, linewidths=0)
                named = [n for n, a in zip(columns.names, columns.accuracy, strict=True) if not np.isnan(a)]
                marks(dots, [f"{label}: {n} {a:.2f} %" for n, a in zip(named, values, strict=True)])
            (mean,) = axes.plot([values.mean()], [y], marker="|", markersize=15, color=INK, markeredgewidth=2)
            marks(mean, [f"{label}: mean of clients {values.mean():.2f} %"])
            if (worst := e.result["fairness"].get("worst10")) is not None:
                (tail,) = axes.plot([100 * worst], [y], marker="^", markersize=6, color=SERIES[1])
                marks(tail, [f"{label}: worst tenth {percent(worst)} %"])
        axes.set_yticks(range(len(shown)), [short(label, 26) for label, _, _ in shown])
        axes.set(xlabel="accuracy % of a client", ylim=(len(shown) - 0.4, -0.6))
        axes.grid(visible=False, axis="y")

    height = 1.0 + 0.3 * max(3, len(shown))
    over = "clients" if many else "client"
    return plot(ident, "Clients", says, ("run", over, "accuracy"), rows, fill, height=height)


def _quantiles(columns: ClientColumns) -> list[tuple[float, float]]:
    """(share, accuracy) of the lowest client, the quartiles and the highest."""
    shares = (0.0, 0.25, 0.5, 0.75, 1.0)
    return list(zip(shares, np.quantile(columns.scored, shares).tolist(), strict=True))


def against_bytes(ident: str, runs: Named) -> Plot | None:
    """Accuracy against all bytes that travelled in one seed's run, and the front."""

    def cost(entry: StoredRun) -> float | None:
        exact = entry.result["traffic"]["exact"]
        return float(exact["up_bytes"] + exact["down_bytes"]) / max(1, len(entry.result["seeds"]))

    title, axis = "Accuracy against bytes sent", "bytes up and down, one seed"
    return _pareto(ident, title, axis, runs, cost, lambda v: f"{size(v)}B")


def against_seconds(ident: str, runs: Named) -> Plot | None:
    """Accuracy against the seconds one seed's training took, and the front."""

    def cost(entry: StoredRun) -> float | None:
        return None if entry.seconds is None else entry.seconds / max(1, len(entry.result["seeds"]))

    title, axis = "Accuracy against seconds", "seconds of training, one seed"
    return _pareto(ident, title, axis, runs, cost, lambda v: f"{v:.3g} s")


def _pareto(
    ident: str,
    title: str,
    axis: str,
    runs: Named,
    cost: Callable[[StoredRun], float | None],
    word: Callable[[float], str],
) -> Plot | None:
    points = [
        (label, c, e.result["accuracy"]["mean"])
        for label, e in runs
        if (c := cost(e)) is not None and e.result["accuracy"]["mean"] is not None
    ]
    if len(points) < 2:
        return None
    best, front = -1.0, set()
    for label, c, a in sorted(points, key=lambda p: (p[1], -p[2])):
        if a > best:
            best = a
            front.add((label, c))
    free = any(c == 0 for _, c, _ in points)
    says = f"Accuracy in percent over {axis}; filled dots are on the front: nothing cheaper is as accurate."
    says += " What sends nothing stands at the left edge." if free else ""

    def fill(axes: Any, marks: Marks) -> None:
        least = min((c for _, c, _ in points if c > 0), default=1.0)
        x = np.array([c or least / 10 for _, c, _ in points])
        y = np.array([100 * a for _, _, a in points])
        on = np.array([(label, c) in front for label, c, _ in points])
        words = np.array([f"{label}: {100 * a:.2f} %, {word(c)}" for label, c, a in points], object)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: word(value))
        axes.minorticks_off()
        order = np.argsort(x[on], kind="stable")
        axes.plot(x[on][order], y[on][order], color=SERIES[0], linewidth=1, drawstyle="steps-post", alpha=0.6)
        if (~on).any():
            marks(axes.scatter(x[~on], y[~on], s=26, facecolors="none", edgecolors=SERIES[0]), list(words[~on]))
        marks(axes.scatter(x[on], y[on], s=34, color=SERIES[0]), list(words[on]))
        _name_front(axes, [(label, x[i], y[i]) for i, (label, _, _) in enumerate(points) if on[i]])
        axes.set(xlabel=axis, ylabel="accuracy %")
        axes.margins(x=0.16, y=0.14)

    rows = [[label, c, a, "front" if (label, c) in front else ""] for label, c, a in points]
    return plot(ident, title, says, ("run", axis, "accuracy", "front"), rows, fill)


def _name_front(axes: Any, points: Sequence[tuple[str, float, float]]) -> None:
    """Write the names of the most accurate, except where one would cover another."""
    spans = [np.log10([x for _, x, _ in points]), np.array([y for *_, y in points])]
    wide, high = (max(float(np.ptp(s)), 1e-9) for s in spans)
    written: list[tuple[float, float]] = []
    for label, x, y in sorted(points, key=lambda p: -p[2]):
        at = (float(np.log10(x)), y)
        if any(abs(at[0] - a) < 0.35 * wide and abs(at[1] - b) < 0.08 * high for a, b in written):
            continue
        written.append(at)
        axes.annotate(short(label, 22), (x, y), xytext=(0, 6), textcoords="offset points", fontsize=9.5, ha="center")


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


def confusion_matrix(ident: str, label: str, table: np.ndarray, names: Sequence[str]) -> Plot | None:
    """Counts [C, C] of rows by true and predicted class; of many classes the most frequent mistakes, None without."""
    rows: list[list[Cell]] = [[names[i], names[j], int(table[i, j])] for i, j in zip(*np.nonzero(table), strict=True)]
    total = table.sum(1, keepdims=True)
    share = 100 * table / np.maximum(total, 1)
    title = f"Confusion of {label}"
    if len(table) > MOST_DRAWN:
        return _pairs(ident, title, table, share, names, rows)
    says = f"Of the test rows of a true class (a row), the percentage that {label} takes for each class (a column)."

    def fill(axes: Any, marks: Marks) -> None:
        cells = [
            (j, i, float(share[i, j]), f"{names[i]} taken for {names[j]}: {table[i, j]} of {int(total[i, 0])}")
            for i in range(len(table))
            for j in range(len(table))
            if table[i, j]
        ]
        squares(axes, marks, cells, small=len(table) > 12, form="{:.0f}")
        name_places(axes.set_xticks, names, rotation=90 if max(map(len, names)) > 3 else 0)
        name_places(axes.set_yticks, names)
        axes.set(xlabel="predicted", ylabel="true class", xlim=(-0.5, len(table) - 0.5), ylim=(len(table) - 0.5, -0.5))

    return plot(ident, title, says, ("true", "predicted", "rows"), rows, fill, height=4.6)


def _pairs(
    ident: str, title: str, table: np.ndarray, share: np.ndarray, names: Sequence[str], rows: list[list[Cell]]
) -> Plot | None:
    wrong = np.where(np.eye(len(table), dtype=bool), -1, table)
    order = [divmod(int(k), len(table)) for k in np.argsort(-wrong, axis=None, kind="stable")[:15]]
    order = [(i, j) for i, j in order if wrong[i, j] > 0]
    if not order:
        return None
    says = f"The most frequent mistakes among {len(table)} classes: percent of the true class's test rows."

    def fill(axes: Any, marks: Marks) -> None:
        bars = axes.barh(range(len(order)), [share[i, j] for i, j in order], color=SERIES[0], height=0.7)
        for bar, (i, j) in zip(bars, order, strict=True):
            marks(bar, [f"{names[i]} taken for {names[j]}: {table[i, j]} rows, {share[i, j]:.1f} %"])
        words = [f"{short(names[i], 14)} as {short(names[j], 14)}" for i, j in order]
        axes.set_yticks(range(len(order)), words)
        axes.set(xlabel="% of the true class", ylim=(len(order) - 0.4, -0.6))

    return plot(ident, title, says, ("true", "predicted", "rows"), rows, fill, height=3.8)


def own_numbers(ident: str, runs: Named) -> list[Plot]:
    """A figure for each number that methods note of themselves, over rounds; entropy of pseudo-labels first."""
    found: dict[str, list[list[Cell]]] = {}
    for label, entry in runs:
        for record in entry.rounds:
            for name, value in record.get("diagnostics", {}).items():
                if value is not None:
                    found.setdefault(name, []).append([label, record["seed"], record["round"], value])
    curves = {n: rows for n, rows in found.items() if len({r for _, _, r, _ in rows}) > 1}
    names = sorted(curves, key=lambda n: (n not in UNITS, n))
    return [_one(f"{ident}-{i}", name, curves[name]) for i, name in enumerate(names)]


def last_numbers(runs: Named) -> list[str]:
    """A sentence for each run that noted numbers of itself at the end alone."""
    made = []
    for label, entry in runs[:MOST_CURVES]:
        if len(entry.result["accuracy"].get("per_round", ())) > 1:
            continue  # it has curves
        known = {k: v for k, v in entry.result.get("diagnostics", {}).items() if v is not None}
        if known:
            told = ", ".join(f"{UNITS.get(k, (k.replace('_', ' '), ''))[0].lower()} {v:.4g}" for k, v in known.items())
            made.append(f"{label}, at the end: {told}.")
    return made


def _one(ident: str, name: str, rows: list[list[Cell]]) -> Plot:
    title, unit = UNITS.get(name, (name.replace("_", " "), name))
    series: dict[str, dict[int, list[float]]] = {}
    for label, _, number, value in rows:
        series.setdefault(str(label), {}).setdefault(int(number or 0), []).append(float(value or 0))
    left = len(series) - MOST_CURVES
    says = f"{title} in every round that noted it ({unit}); means over seeds."
    says += f" The first {MOST_CURVES} of {len(series)} runs." if left > 0 else ""

    def fill(axes: Any, marks: Marks) -> None:
        for i, (label, points) in enumerate(list(series.items())[:MOST_CURVES]):
            x = sorted(points)
            y = [float(np.mean(points[r])) for r in x]
            (line,) = axes.plot(x, y, color=SERIES[i], marker="o", markersize=4, label=short(label))
            marks(line, [f"{label}: {v:.4g} in round {r}" for r, v in zip(x, y, strict=True)])
        axes.set(xlabel="round", ylabel=unit)
        axes.margins(y=0.15)
        axes.xaxis.get_major_locator().set_params(integer=True)
        legend_below(axes)

    height = 2.7 + 0.2 * min(len(series), MOST_CURVES)
    return plot(ident, title, says, ("run", "seed", "round", name), rows, fill, height=height)
