"""Two confusion matrices as one figure: where one run takes fewer rows for the wrong class, and where more."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedcache.report.drawing import INK, SERIES, Cell, Marks, Plot, name_places, short
from fedcache.report.figures.grids import tiles
from fedcache.report.figures.runs import MOST_DRAWN
from fedcache.report.find_runs import StoredRun

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
