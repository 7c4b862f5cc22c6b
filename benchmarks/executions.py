"""FedAvg of a linear head, whole runs: the chosen execution against a clean loop with torch.optim, one thread."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks import clean
from benchmarks.measure import Row, at_least

SETTINGS = {"head": "linear", "opt": "sgd", "lr": 0.1, "momentum": 0.9, "wd": 1e-4, "batch": 32}
CASES = ((10, 100, 50, 10, 6.0), (10, 100, 500, 4, 3.0), (100, 100, 50, 6, 3.0), (10, 1000, 50, 6, 5.0))
"""(classes, clients, rows, rounds, target) of 1,024 features. Gram matrices and the evaluation are inside the time."""


def rows() -> list[Row]:
    torch.set_num_threads(1)
    made = []
    for C, M, n, rounds, bar in CASES:
        f = clean.federation(M, n, C)
        parts = f.cut()
        chosen = f.ours("fedavg", SETTINGS).execution
        calls = {
            "clean loop": partial(clean.fedavg, parts, C, rounds, clean.sgd()),
            "sequential": partial(f.ours, "fedavg", SETTINGS, "sequential", rounds),
            f"chosen execution {chosen}": partial(f.ours, "fedavg", SETTINGS, "auto", rounds),
        }
        name, target = f"fedavg linear, C={C}, {M} x {n}", f">= {bar:g} x a clean loop"
        detail = f"{rounds} rounds, 1 thread"
        made.append(at_least(name, target, bar, calls, "clean loop", f"chosen execution {chosen}", detail=detail))
    return made
