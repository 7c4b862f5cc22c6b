"""By what runs are chosen: accuracy on the rows to choose by; without such rows the highest is no choice."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedcache.notebooks import percent
from fedcache.runs.score import score_of

NOT_A_CHOICE = "highest test accuracy (not a choice)"
BY_VALIDATION = "chosen by validation accuracy"
FIRST_OF_EQUALS = "the first by method and settings, numbers ascending, then words"
"""Which of several runs with equal figures is taken."""
DIGITS = 12
"""Figures that are equal to so many decimals are: sums in another order differ in the last ones."""

Order = tuple[tuple[str, int, float, str], ...]
"""What settings are sorted by."""


def choice_value(result: Mapping[str, Any], score: str = "own") -> float | None:
    """What runs are chosen by, mean over seeds: accuracy on the rows to choose by, else on test rows.

    ``score`` is a word of ``runs.score``: what is compared on test rows is chosen by the same score.
    """
    if "validation" in result:
        return validation_value(result, score)
    return score_of(result, score).mean


def validation_value(result: Mapping[str, Any], score: str = "own") -> float | None:
    """Accuracy on the rows to choose by, mean over seeds, by a word of ``runs.score``; None without such rows.

    Where an earlier result has not that score it is their mean.
    """
    held = result.get("validation")
    if held is None:
        return None
    key = "mean" if score == "own" else score.replace("-", "_")
    mean: float | None = held.get(key, held["mean"])
    return mean


def has_validation(results: Iterable[Mapping[str, Any]]) -> bool:
    """Whether all of some results, one or more, have rows to choose by."""
    held = ["validation" in result for result in results]
    return bool(held) and all(held)


def order_of_settings(settings: Mapping[str, Any]) -> Order:
    """What sorts settings alike however they were written: by name, and of each name numbers ascending, then words.

    >>> sorted([{"lr": "auto"}, {"lr": 1}, {"lr": "0.1"}], key=order_of_settings)
    [{'lr': '0.1'}, {'lr': 1}, {'lr': 'auto'}]
    """
    return tuple((name, *_order_of_value(settings[name])) for name in sorted(settings))


def order_of_run(result: Mapping[str, Any]) -> Order:
    """What runs with equal figures are sorted by: the method, then its hyperparameters and all else that was asked."""
    part = result.get("partition", {})
    trust = result.get("trust", {})
    rest = {key: result.get(key) for key in ("backbones", "preset", "rounds", "participation")}
    rest |= {f"partition.{key}": value for key, value in part.get("args", {}).items()}
    rest |= {
        f"trust.{key}": value for key, value in trust.items() if not isinstance(value, dict | list)
    }
    method = order_of_settings({"method": result.get("method")})
    return (
        *method,
        *order_of_settings(result.get("hyperparameters", {})),
        *order_of_settings(rest),
    )


def tie_sentence(
    figures: Sequence[float | None], first: str, what: str, of: str = ""
) -> str | None:
    """That the first of some figures, the highest first, is not alone, and which is taken; None where it is.

    ``what`` are the things that have the figures, and ``of`` what these are, where that is not plain.
    """
    if not figures or figures[0] is None:
        return None
    tied = sum(f is not None and round(f, DIGITS) == round(figures[0], DIGITS) for f in figures)
    if tied < 2:
        return None
    return f"{tied} {what} tie at {of}{percent(figures[0])}; {first} is taken, {FIRST_OF_EQUALS}."


def _order_of_value(value: object) -> tuple[int, float, str]:
    """Numbers before words, also those that are written as words (``0.1``, ``10%``)."""
    if not isinstance(value, bool):
        try:
            number = float(str(value).removesuffix("%"))
        except ValueError:
            number = math.nan
        if not math.isnan(number):
            return 0, number, str(value).rpartition("%")[1]
    return 1, 0.0, ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
