"""By what runs are chosen: accuracy on the rows to choose by; without such rows the highest is no choice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

NOT_A_CHOICE = "highest test accuracy (not a choice)"
BY_VALIDATION = "chosen by validation accuracy"


def choice_value(result: Mapping[str, Any]) -> float | None:
    """What runs are chosen by, mean over seeds: accuracy on the rows to choose by, else on test rows."""
    mean: float | None = result.get("validation", result["accuracy"])["mean"]
    return mean


def has_validation(results: Iterable[Mapping[str, Any]]) -> bool:
    """Whether all of some results, one or more, have rows to choose by."""
    held = ["validation" in result for result in results]
    return bool(held) and all(held)
