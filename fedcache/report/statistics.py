"""Statistics of paired values: intervals, tests, correction, ranks, critical differences, as in Demšar (JMLR 7, 2006).

Values of one treatment in several blocks (seeds, clients, settings) are paired by block. No result depends on the order
of the blocks, because values are sorted before they are resampled.

``scipy.stats`` takes most of a second to import, and ``scipy.special`` a quarter. Scipy imports each of them at its
first use, which few pages need.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import scipy
from numpy.typing import NDArray

TESTS = ("wilcoxon", "ttest")
LEAST_BLOCKS = 3
"""Minimum number of values for an interval. With two values, an interval is too wide to be useful."""
FEW_BLOCKS = 10
"""Number of values from which the interval is a bootstrap interval: with fewer, its coverage is not as stated."""
RESAMPLES = 9999
SEED = 0
DIGITS = 12
"""Decimals that are compared. Accuracies are counts over at most millions of rows. Numbers that are equal in these
decimals differ only by rounding, and count as ties."""

Floats = NDArray[np.float64]
Interval = tuple[float, float]
"""The low and the high end of an interval."""


def interval(values: Floats, level: float) -> Interval | None:
    """Interval of the mean of [B] values: Student's of fewer than ``FEW_BLOCKS``, else the percentile bootstrap.

    None with fewer than ``LEAST_BLOCKS`` values, and for equal values, because an interval of length 0 would claim too
    much certainty.

    The bootstrap of few normal values is too narrow: a 95 % interval covers the mean in 76 % of cases with 3 values,
    83 % with 5 and 91 % with 10. BCa is not used, because it estimates its acceleration from few values, covers no
    better, and is NaN for equal values.
    """
    count = len(values)
    if count < LEAST_BLOCKS or constant(values):
        return None
    # Student's interval is right for few values that are about normal; the bootstrap needs more of them.
    if count < FEW_BLOCKS:
        mean = float(values.mean())
        half = student_half(values, level)
        return mean - half, mean + half
    # Sorted values and a fixed seed give the same interval for every order of the runs.
    found = scipy.stats.bootstrap(
        (np.sort(values),),
        np.mean,
        n_resamples=RESAMPLES,
        # At most 2 million resampled values are in memory at once.
        batch=max(1, 2_000_000 // count),
        confidence_level=level,
        method="percentile",
        random_state=np.random.default_rng(SEED),
    )
    ends = found.confidence_interval
    return float(ends.low), float(ends.high)


def student_half(values: Floats, level: float) -> float:
    """Half of Student's interval of the mean of [B] values, t s / sqrt(B)."""
    count = len(values)
    deviation = float(values.std(ddof=1))
    return student_quantile(level, count - 1) * deviation / math.sqrt(count)


@lru_cache(maxsize=256)
def student_quantile(level: float, freedom: int) -> float:
    """The quantile of Student's t for a two-sided interval of this level."""
    return float(scipy.special.stdtrit(freedom, 0.5 + level / 2))


def interval_words(count: int) -> str:
    """The name of the interval that ``interval`` uses for this number of values."""
    if count < FEW_BLOCKS:
        return "Student's t intervals"
    return "percentile bootstrap intervals"


def constant(values: Floats) -> bool:
    """Whether all of [B] values are equal up to rounding."""
    return float(np.ptp(values)) < 10.0**-DIGITS


def p_value(test: str, differences: Floats) -> float | None:
    """Two-sided p of the hypothesis that [B] paired differences are centred at 0.

    Args:
        test: ``wilcoxon`` (signed ranks; differences of 0 are dropped) or ``ttest``.
        differences: B of at least 2.

    Returns:
        1 where all differences are 0; None for a t-test of equal differences, because they have no spread.
    """
    d = np.round(differences, DIGITS)
    if not d.any():
        return 1.0
    if test == "wilcoxon":
        return float(scipy.stats.wilcoxon(d).pvalue)
    if constant(d):
        return None
    return float(scipy.stats.ttest_1samp(d, 0.0).pvalue)


def lowest_p(test: str, blocks: int) -> float:
    """The lowest two-sided p that a test of this number of differences can give; 0 for a test without such a bound."""
    if test == "wilcoxon":
        return 2.0 ** (1 - blocks)
    return 0.0


def holm(found: Sequence[float | None]) -> list[float | None]:
    """p values corrected for their number (Holm 1979, step-down); None stays None and does not count."""
    known = sorted((p, i) for i, p in enumerate(found) if p is not None)
    corrected: list[float | None] = [None] * len(found)
    highest = 0.0
    for place, (p, i) in enumerate(known):
        # Corrected values never fall as p rises.
        highest = max(highest, min(1.0, (len(known) - place) * p))
        corrected[i] = highest
    return corrected


def mean_ranks(values: Floats) -> Floats:
    """Mean rank over blocks of [T, B] values as [T]; 1 is the highest value, equals share the mean of their ranks."""
    rounded = np.round(values, DIGITS)
    blocks = rounded.shape[1]
    # A rank is 1, plus the number of higher values, plus half the number of other equal values.
    higher = np.array([(rounded > row).sum() for row in rounded])
    equal = np.array([(rounded == row).sum() - blocks for row in rounded])
    return np.asarray((blocks + higher + equal / 2.0) / blocks, np.float64)


def friedman(values: Floats) -> tuple[float, float]:
    """Friedman's chi-squared, corrected for ties, and its p for [T, B] values of T >= 3 treatments in B >= 2 blocks."""
    rounded = np.round(values, DIGITS)
    # Where all values of every block are tied, the statistic would be 0/0.
    if not np.ptp(rounded, axis=0).any():
        return 0.0, 1.0
    found = scipy.stats.friedmanchisquare(*rounded)
    return float(found.statistic), float(found.pvalue)


def critical_difference(treatments: int, blocks: int, level: float) -> float:
    """Nemenyi's: mean ranks further apart than this differ at 1 - ``level``.

    CD = q_alpha sqrt(k (k + 1) / (6 N)), where q_alpha is the studentized range of k groups and infinitely many degrees
    of freedom, divided by sqrt(2).
    """
    q = float(scipy.stats.studentized_range.ppf(level, treatments, np.inf)) / math.sqrt(2)
    return q * math.sqrt(treatments * (treatments + 1) / (6 * blocks))


def groups(ranks: Sequence[float], apart: float) -> tuple[tuple[int, ...], ...]:
    """The largest sets of at least two treatments whose ranks span at most ``apart``.

    The groups, and the treatments in each group, are sorted from the best rank to the worst.
    """
    order = sorted(range(len(ranks)), key=lambda i: (ranks[i], i))
    most = apart + 10.0**-DIGITS
    made = []
    reached = 0
    for first, i in enumerate(order):
        last = max(k for k in range(first, len(order)) if ranks[order[k]] - ranks[i] <= most)
        # A set that ends where an earlier group ends is a part of that group.
        if last > first and last > reached:
            made.append(tuple(order[first : last + 1]))
            reached = last
    return tuple(made)


@dataclass(frozen=True)
class Ranking:
    """Treatments by mean rank.

    Attributes:
        ranks: of each treatment; 1 is best.
        statistic: Friedman's chi-squared.
        p: p of Friedman's test.
        cd: the critical difference.
        groups: indices of treatments whose ranks do not differ by more than the critical difference.
        blocks: number of blocks that were ranked.
    """

    ranks: tuple[float, ...]
    statistic: float
    p: float
    cd: float
    groups: tuple[tuple[int, ...], ...]
    blocks: int

    @property
    def too_few(self) -> bool:
        """Whether the blocks are too few for any two mean ranks to differ by the critical difference."""
        # Mean ranks of k treatments are between 1 and k, so they differ by at most k - 1.
        return self.cd >= len(self.ranks) - 1


def ranking(values: Floats, level: float) -> Ranking | None:
    """The ranking of [T, B] values; None with fewer than three treatments or two blocks."""
    treatments, blocks = values.shape
    if treatments < 3 or blocks < 2:
        return None
    ranks = tuple(map(float, mean_ranks(values)))
    statistic, p = friedman(values)
    cd = critical_difference(treatments, blocks, level)
    return Ranking(ranks, statistic, p, cd, groups(ranks, cd), blocks)
