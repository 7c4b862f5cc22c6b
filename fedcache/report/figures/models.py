"""What single runs say of themselves: confusion matrices and the methods' own numbers per round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedcache.report.figures.grids import squares
from fedcache.report.figures.runs import MOST_CURVES, Named
from fedcache.report.find_runs import StoredRun
from fedcache.report.svg import SERIES, Cell, Marks, Plot, draw, legend_below, name_places, short

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

    return Plot(ident, title, says, ("true", "predicted", "rows"), rows, draw(ident, fill, height=4.6, says=says))


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

    return Plot(ident, title, says, ("true", "predicted", "rows"), rows, draw(ident, fill, height=3.8, says=says))


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
    return Plot(ident, title, says, ("run", "seed", "round", name), rows, draw(ident, fill, height=height, says=says))
