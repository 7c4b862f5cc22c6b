"""The one accuracy by which all methods of a table are scored: the mean over clients, or pooled over test rows (D-89).

A method's own headline is not alike for all: of one model the accuracy on the union of the test rows, of personal
models the mean (or minimum) over clients. Every result holds both scores below of every method.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from fedcache.errors import unknown

SCORES = ("client-mean", "pooled")
WORDS = {
    "client-mean": "unweighted mean over clients, each on its own test rows",
    "pooled": "over all test rows of all clients together",
    "own": "each method's own headline",
}
LEVEL = 0.95


@dataclass(frozen=True)
class Score:
    """One score of a run: fractions; None for what an old result neither holds nor implies."""

    per_seed: tuple[float | None, ...]
    mean: float | None

    @property
    def std(self) -> float | None:
        """Over seeds, ddof 1; None with one seed or without all of them."""
        known = [v for v in self.per_seed if v is not None]
        if len(known) == len(self.per_seed) > 1:
            return float(np.std(known, ddof=1))
        return None


def check_score(score: str | None) -> None:
    """Refuse an unknown one. Raises UsageError."""
    if score is not None and score not in SCORES:
        raise unknown("--score", score, SCORES)


def score_of(result: Mapping[str, Any], score: str) -> Score:
    """A score of a stored result: ``client-mean`` | ``pooled`` | ``own``, its headline.

    Earlier results hold the headline of every seed and the mean over clients. Of them the mean over clients of a
    seed is the headline of personal models; the pooled accuracy is the headline of one model, whose rows count once, or
    what the counts by class say of personal models, mean over seeds.
    """
    accuracy = result["accuracy"]
    own = Score(tuple(accuracy.get("per_seed", ())), accuracy["mean"])
    if score == "own":
        return own
    name = score.replace("-", "_")
    if f"{name}_per_seed" in accuracy:
        return Score(tuple(accuracy[f"{name}_per_seed"]), accuracy[name])
    personal = result.get("protocol", "global") != "global"
    nothing = (None,) * len(own.per_seed)
    if score == "client-mean":
        mean = accuracy.get("client_mean")
        alike = (
            mean is not None
            and own.mean is not None
            and math.isclose(mean, own.mean, abs_tol=1e-12)
        )
        if alike and personal:
            return own
        return Score((mean,) if len(nothing) == 1 else nothing, mean)
    if not personal:
        return own
    counts = np.array(result.get("confusion") or [], np.int64)
    if not counts.size or not counts.sum():
        return Score(nothing, None)
    pooled = float(counts.trace() / counts.sum())
    return Score((pooled,) if len(nothing) == 1 else nothing, pooled)


def values_held_out(result: Mapping[str, Any]) -> tuple[str, ...]:
    """The values of a column whose rows a result is scored on and that nobody trained on; () where there are none."""
    held = result.get("partition", {}).get("args", {}).get("hold_out") or ()
    if isinstance(held, str):
        return (held,)
    return tuple(map(str, held))


def score_for(results: Iterable[Mapping[str, Any]]) -> str:
    """What scores a table where nobody asked: the headline where it is one for all runs, else the mean over clients.

    The headline too where an earlier run lacks the mean over clients of a seed.
    """
    known = list(results)
    if len({r.get("protocol") for r in known}) < 2 or any(
        None in score_of(r, "client-mean").per_seed for r in known
    ):
        return "own"
    return "client-mean"


def wilson(
    accuracy: float | None, rows: int | None, level: float = LEVEL
) -> tuple[float, float] | None:
    """Wilson's score interval (JASA 22, 1927) of an accuracy p on n independent test rows.

    (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n), z the quantile of the level.

    None without rows, and where the accuracy is no count of them, as a mean over clients of unequal sizes.
    """
    if accuracy is None or not rows or abs(accuracy * rows - round(accuracy * rows)) > 1e-6:
        return None
    z = NormalDist().inv_cdf(0.5 + level / 2.0)
    p = round(accuracy * rows) / rows
    middle = p + z**2 / (2 * rows)
    half = z * math.sqrt(p * (1.0 - p) / rows + z**2 / (4 * rows**2))
    return max(0.0, (middle - half) / (1.0 + z**2 / rows)), min(
        1.0, (middle + half) / (1.0 + z**2 / rows)
    )


def rows_interval(
    result: Mapping[str, Any], level: float = LEVEL
) -> tuple[int, float, float] | None:
    """Test rows of a result whose accuracy does not vary over its seeds, and the Wilson interval of it.

    Only of one model on a partition that all seeds share: there the test rows are all there is to sample.
    """
    per_seed: Sequence[float | None] = result["accuracy"].get("per_seed", ())
    part = result.get("partition", {})
    fixed = len(set(part.get("digests", ()))) == 1
    if (
        result.get("protocol") != "global"
        or not fixed
        or None in per_seed
        or len(set(per_seed)) != 1
    ):
        return None
    counts = np.array(result.get("confusion") or [], np.int64)
    rows = int(counts.sum()) // len(per_seed) if counts.size else part.get("test_rows")
    found = wilson(per_seed[0], rows, level)
    if found is None or rows is None:
        return None
    return (rows, *found)
