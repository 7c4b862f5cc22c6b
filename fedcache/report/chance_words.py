"""What a person is told of a result that is no better than a guess, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedcache.errors import FedcacheError, shell_word
from fedcache.report.drawing import percent
from fedcache.runs.method_facts import usual_settings
from fedcache.runs.score import at_chance

LARGE_RATE = 0.1
"""A learning rate from which on a larger one is not what is missing."""


def chance_lines(result: Mapping[str, Any]) -> list[str]:
    """That the accuracy is no better than a guess, and the next command; [] for a result that is better."""
    chance = at_chance(result)
    if chance is None:
        return []
    return [
        f"NO BETTER THAN CHANCE: a guess gives {percent(chance.level)} % on these {chance.rows:,} test rows of "
        f"{chance.classes} classes, and {percent(chance.least)} % would be more.",
        f"Next: {next_step(result)}",
    ]


def next_step(result: Mapping[str, Any]) -> str:
    """What of the same command to change: who takes part where nobody sent anything, tuned values where the method has
    some, else a larger rate, else the data.
    """
    bytes_of = result.get("traffic", {}).get("exact", {})
    # a method may send nothing by design
    asked_for = bytes_of.get("down_bytes") or result.get("participants")
    if result.get("protocol") == "global" and asked_for and not bytes_of.get("up_bytes", 1):
        return (
            "no client sent anything in any round: the same command with more clients a round (--participation), or "
            "fewer that are away or lost (--availability, --client-dropout)"
        )
    method = str(result["method"])
    hp = result["hyperparameters"]
    tuned = _tuned_values(method)
    if tuned and any(hp.get(name) != value for name, value in tuned.items()):
        words = " ".join(
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in tuned.items()
        )
        return f"the same command with --preset tuned  ({words}, chosen on validation rows)"
    rate = hp.get("lr")
    if isinstance(rate, float) and rate < LARGE_RATE:
        return f"the same command with a larger rate, --set lr={10 * rate:g}"
    if result["rounds"] > 1:
        rates = f"fedcache methods info {shell_word(method)}"
        return f"the same command with --rounds {4 * result['rounds']}, or other rates ({rates})"
    return "`fedcache inspect`, whether the features tell the classes apart; or other --backbones"


def _tuned_values(method: str) -> dict[str, Any]:
    """The hyperparameters that preset ``tuned`` sets; {} for none, and for a method that is not there any more."""
    try:
        usual = usual_settings(method, "paper")
        tuned = usual_settings(method, "tuned")
    except FedcacheError:
        return {}
    return {name: value for name, value in tuned.items() if value != usual[name]}
