"""Whether a result is better than a guess: what is asked of every accuracy before it is believed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ERRORS = 2.0
"""Standard errors of a guess's accuracy within which a result is no better than it."""

SHARE = 0.5
POINTS = 0.05
"""A result must be above a guess by this share of it, or by these points where that is less: of ten classes 15 %."""


@dataclass(frozen=True)
class Chance:
    """What a guess gives on the test rows of a run that is no better."""

    accuracy: float  # of the run, mean over seeds
    level: (
        float  # of always the same class: 1 / C, or the share of the largest class of the test rows
    )
    least: float  # from which on a result would be better than a guess
    classes: int
    rows: int  # different test rows of a seed, at most


def at_chance(result: Mapping[str, Any]) -> Chance | None:
    """What a guess gives, for a ``result.json`` whose accuracy is no better; None for one that is, or was not scored.

    Better is above max(1/C, share of the largest class) by ``ERRORS`` standard errors of a share of so many rows, and
    by ``SHARE`` of it or ``POINTS``. Of the test rows of results without a confusion matrix only the number is known.
    """
    accuracy, classes = (
        result["accuracy"]["mean"],
        int(result.get("classes") or 0),
    )  # earlier releases had no number
    if accuracy is None or classes < 2:
        return None
    counts = [
        sum(row) for row in result.get("confusion") or []
    ]  # test rows of each class, summed over seeds
    total = sum(counts)
    level = max(1 / classes, max(counts) / total) if total else 1 / classes
    rows = distinct = int(result["partition"].get("test_rows") or 0)
    if total:  # clients that are tested on the same rows are no more rows
        rows = min(total // len(result["seeds"]), distinct or total)
    if not rows:
        return None
    error = math.sqrt(level * (1 - level) / rows)
    least = level + max(ERRORS * error, min(SHARE * level, POINTS))
    if least >= 1.0:  # so few rows, or one class so large, that nothing could be told from a guess
        return None
    if accuracy <= least:
        return Chance(accuracy, level, least, classes, rows)
    return None
