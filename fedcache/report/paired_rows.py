"""Two runs compared over the test rows that both were scored on: which images one gets right and the other wrong.

Seeds repeat the training; test rows are the sample from which an accuracy speaks of new images. Both are shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import scipy

from fedcache.report.find_runs import StoredRun
from fedcache.report.paired_seeds import paired_seeds
from fedcache.report.statistics import DIGITS, Floats
from fedcache.runs.test_rows import TestRows

ROW_TESTS = {"mcnemar": "McNemar's exact test", "z": "z-test of the paired rows"}
PERSONAL = ("personalised", "everywhere")
MOST_EXACT = 2000
"""Rows that differ up to which the binomial is added up in whole numbers: that takes 1 ms, and scipy's functions a
quarter of a second to import, which scipy does when one of them is first asked for."""


@dataclass(frozen=True)
class RowDifference:
    """One run minus another over test rows.

    Attributes:
        rows: different test rows that both were scored on.
        gained: rows that the first gets right more often, over clients and seeds.
        lost: rows that the other gets right more often.
        difference: of the accuracies, a fraction.
        interval: of it, over test rows: difference -+ z sqrt(R / (R - 1) sum_r e_r^2), with e_r = d_r - difference w_r,
            where row r adds d_r to the difference and has the weight w_r of all; None for one row.
        p: two-sided. Where every row that differs counts the same, of McNemar's exact test: the binomial of ``gained``
            among ``gained + lost``. Else of a z-test with the variance above.
        test: mcnemar | z.
        holm: p corrected for all pairs of the comparison.
    """

    rows: int
    gained: int
    lost: int
    difference: float
    interval: tuple[float, float] | None
    p: float
    test: str
    holm: float | None = None


def row_difference(
    one: StoredRun, other: StoredRun, metric: str, level: float
) -> RowDifference | None:
    """``one`` minus ``other``, over the pairs of ``paired_seeds``.

    None where a run holds no test rows, where the two were not scored on the same ones, and for a metric that is no sum
    over rows.

    Args:
        one: a run.
        other: a run of the same dataset and partition.
        metric: accuracy (the headline of both), client_mean or pooled.
        level: of the interval.

    Raises:
        DamagedRunError for test rows that are not what was written.
    """
    kinds = {one.result.get("protocol") in PERSONAL, other.result.get("protocol") in PERSONAL}
    if metric == "accuracy" and len(kinds) == 1:
        metric = "once"
        if kinds == {True}:
            metric = "client_mean"
    if metric not in ("client_mean", "pooled", "once"):
        return None
    ours = one.test_rows or {}
    theirs = other.test_rows or {}
    per_seed: list[Rows] = []
    for mine, its in paired_seeds(one, other):
        if mine not in ours or its not in theirs:
            continue
        found = _of_seed(ours[mine], theirs[its], metric)
        if found is None:
            return None
        per_seed.append(found)
    if per_seed:
        return _tested(per_seed, level)
    return None


Rows = tuple[np.ndarray, Floats, Floats]
"""Numbers of rows, what each adds to the difference, and its weight; weights have the sum 1."""


def _of_seed(ours: TestRows, theirs: TestRows, metric: str) -> Rows | None:
    alike = np.array_equal(ours.rows, theirs.rows) and np.array_equal(ours.scored, theirs.scored)
    if not alike or not np.allclose(ours.weight, theirs.weight, rtol=1e-9, atol=0.0):
        return None
    if metric == "client_mean":
        return ours.rows, ours.share - theirs.share, ours.weight
    apart = (ours.right - theirs.right).astype(np.float64)
    if metric == "pooled":
        total = float(ours.scored.sum())
        return ours.rows, apart / total, ours.scored / total
    count = len(ours.rows)  # of one model, which says the same to every client: each row once
    return ours.rows, apart / ours.scored / count, np.full(count, 1.0 / count)


def _joined(seeds: list[Rows]) -> tuple[Floats, Floats]:
    """What each image adds, and its weight, means over seeds: an image that several seeds test is one image."""
    if len(seeds) == 1:
        return seeds[0][1:]
    rows, place = np.unique(np.concatenate([r for r, _, _ in seeds]), return_inverse=True)
    adds, weights = (
        np.bincount(place, np.concatenate([seed[i] for seed in seeds]), len(rows)) / len(seeds)
        for i in (1, 2)
    )
    return adds, weights


def _spread(adds: Floats, weights: Floats) -> float:
    """Standard error of a sum over R rows of a sample: sqrt(R / (R - 1) sum_r e_r^2), e_r = adds_r - sum weights_r."""
    count = len(adds)
    return float(np.sqrt(count / (count - 1) * ((adds - adds.sum() * weights) ** 2).sum()))


def rows_of_run(
    run: StoredRun, metric: str, level: float, seeds: Sequence[int] | None = None
) -> tuple[int, float, float] | None:
    """Test rows of a run, and the interval over them of its accuracy with models of clients; None without.

    accuracy -+ z sqrt(R / (R - 1) sum_r (a_r - accuracy w_r)^2): row r adds a_r to the accuracy and has the weight w_r.

    Args:
        run: of one seed, or of several that give the same.
        metric: accuracy or client_mean, which of models of clients are one; or pooled.
        level: of the interval.
        seeds: of the run that count; None for all.

    Raises:
        DamagedRunError for test rows that are not what was written.
    """
    if run.result.get("protocol") not in PERSONAL or metric not in (
        "accuracy",
        "client_mean",
        "pooled",
    ):
        return None
    made: list[Rows] = []
    for seed, found in (run.test_rows or {}).items():
        if seeds is not None and seed not in seeds:
            continue
        total = float(found.scored.sum())
        pooled = (found.rows, found.right / total, found.scored / total)
        made.append(pooled if metric == "pooled" else (found.rows, found.share, found.weight))
    adds, weights = _joined(made) if made else (np.empty(0), np.empty(0))
    if len(adds) < 2:
        return None
    half = NormalDist().inv_cdf(0.5 + level / 2.0) * _spread(adds, weights)
    mean = float(adds.sum())
    return len(adds), max(0.0, mean - half), min(1.0, mean + half)


def sign_test(gained: int, lost: int) -> float:
    """Two-sided p of ``gained`` among ``gained + lost`` fair throws: twice the smaller tail, at most 1."""
    fewer = min(gained, lost)
    throws = gained + lost
    if throws > MOST_EXACT:
        return min(1.0, 2.0 * float(scipy.special.bdtr(fewer, throws, 0.5)))
    ways = tail = 1  # of choosing none; then C(n, i) = C(n, i - 1) (n - i + 1) / i
    for i in range(1, fewer + 1):
        ways = ways * (throws - i + 1) // i
        tail += ways
    return min(1.0, 2 * tail / (1 << throws))


def _tested(seeds: list[Rows], level: float) -> RowDifference:
    adds, weights = _joined(seeds)
    count = len(adds)
    adds = np.where(np.abs(adds) < 10.0**-DIGITS / count, 0.0, adds)
    difference = float(adds.sum())
    gained = int((adds > 0).sum())
    lost = int((adds < 0).sum())
    sizes = np.abs(adds[adds != 0])
    if count < 2:
        return RowDifference(count, gained, lost, difference, None, 1.0, "mcnemar")
    spread = _spread(adds, weights)
    half = NormalDist().inv_cdf(0.5 + level / 2.0) * spread
    exact = not len(sizes) or bool(np.ptp(sizes) <= 1e-9 * sizes.max())
    if exact:
        p = sign_test(gained, lost)
    else:
        p = 0.0
        if spread > 0:
            p = math.erfc(abs(difference) / spread / math.sqrt(2.0))
    interval = (difference - half, difference + half)
    return RowDifference(count, gained, lost, difference, interval, p, "mcnemar" if exact else "z")
