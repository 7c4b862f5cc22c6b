"""The mean length of all clients' training rows: the one number that a run asks of its clients before the first round.

Every client tells the sum of its rows' lengths beside their number, and is told the mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fedcache.federate.engine.outcome import Traffic
from fedcache.federate.engine.stored_rows import Features, take_rows
from fedcache.federate.execution.cache import LruCache, SameObject
from fedcache.federate.partition.client_table import ClientRows, all_train_rows

STEP = 4096
"""Rows whose lengths are computed at once."""

SUM_BYTES = 8
"""Of the number that travels each way: sums are float64."""


def mean_length(x: Features, rows: np.ndarray) -> float:
    """Mean length of the rows ``rows`` (int64 [n]) of features [N, V, D], view 0, in float64; 0 without rows."""
    total, V = 0.0, x.shape[1]
    for start in range(0, len(rows), STEP):
        part = torch.from_numpy(rows[start : start + STEP]).to(x.device)
        total += float(take_rows(x, part * V).double().norm(dim=-1).sum())
    return total / max(1, len(rows))


def mean_training_length(x: Features, clients: Sequence[ClientRows], known: LruCache) -> float:
    """``mean_length`` of all clients' training rows, computed once for the points of a grid that share ``known``.

    Rows are taken in the order of the matrix, so the number does not depend on who holds which.
    """
    rows = np.sort(all_train_rows(clients))
    key = ("mean length", SameObject(x), rows.tobytes())
    return known.get(key, lambda: mean_length(x, rows), lambda _: rows.nbytes)


def count_exchange(traffic: Traffic, clients: np.ndarray, totals: dict[str, int]) -> None:
    """Add what telling the sums and the mean costs: one scalar each way for each of ``clients``.

    Args:
        traffic: of the run; its counts of single clients grow.
        clients: int64 numbers of those that can train.
        totals: of the round in which it is counted; they grow.
    """
    for way in ("up", "down"):
        getattr(traffic, way)[clients] += 1
        totals[way] += len(clients)
        totals[f"{way}_bytes"] += SUM_BYTES * len(clients)
