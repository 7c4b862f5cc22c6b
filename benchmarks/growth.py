"""How the cost of a round grows with clients, rows, width, classes and grid points: curves for docs/performance.md."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks import clean
from benchmarks.executions import SETTINGS
from benchmarks.measure import seconds_of

BASE = {"clients": 100, "rows": 50, "width": 1024, "classes": 10}
AXES: dict[str, tuple[int, ...]] = {
    "clients": (25, 50, 100, 200, 400),
    "rows": (25, 50, 100, 200, 400),
    "width": (256, 512, 1024, 2048),
    "classes": (10, 20, 50, 100, 200),
    "points": (1, 4, 16, 64),
}
"""Values of each axis; the others stay at 100 clients x 50 rows, 1,024 features, 10 classes."""
ROUNDS = 2


def cost(call: Any) -> float:
    """Seconds a round, best of 3 after one call."""
    call()
    return min(seconds_of(call) for _ in range(3)) / ROUNDS


def curves() -> dict[str, dict[str, list[float]]]:
    """axis -> {x, and seconds a round of the clean loop and of every execution}; a grid's are of all its points."""
    torch.set_num_threads(1)
    out: dict[str, dict[str, list[float]]] = {}
    for axis, values in AXES.items():
        found = out[axis] = {"x": list(map(float, values))}
        for value in values:
            size = {**BASE, **({axis: value} if axis in BASE else {})}
            f = clean.federation(size["clients"], size["rows"], size["classes"], size["width"])
            if axis == "points":
                points = [{**SETTINGS, "lr": 0.01 * 1.05**i} for i in range(value)]
                calls: dict[str, Any] = {
                    execution: partial(f.grid, "fedavg", points, ROUNDS, execution)
                    for execution in ("batched", "gram")
                }
            else:
                parts = f.cut()
                calls = {
                    "clean loop": partial(clean.fedavg, parts, size["classes"], ROUNDS, clean.sgd())
                }
                calls |= {
                    execution: partial(f.ours, "fedavg", SETTINGS, execution, ROUNDS)
                    for execution in ("batched", "gram")
                    if execution == "batched" or 2 * size["rows"] <= size["width"]
                }
            for name, call in calls.items():
                found.setdefault(name, []).append(cost(call))
    return out
