"""Cautions to read before an accuracy: no better than a guess, below zero-shot, on unseen classes, or of some clients
only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fedcache.errors import FedcacheError, shell_word
from fedcache.progress import percent
from fedcache.runs.identity import usual_settings
from fedcache.runs.privacy_ledger import describe_privacy
from fedcache.runs.score import at_chance
from fedcache.tables.words import some_names

HALF_A_POINT = 0.005
"""Differences from zero-shot below this are not spoken of: they are in the figures in addition to one another."""


def caution_lines(result: Mapping[str, Any]) -> list[str]:
    """Sentences on a ``result.json``; [] where nothing is unusual."""
    return [*chance_lines(result), *_below_zero_shot(result), *_unseen_classes(result)]


def drawn_clients(result: Mapping[str, Any]) -> tuple[str, list[float]] | None:
    """How many clients were drawn and scored (``--eval-clients``), and the standard error of their mean in each seed.

    ``500 of 100,000 clients were drawn and scored, 3 of which took part in some round``, by the first seed. Errors are
    fractions; a seed with fewer than two scored clients has none. None where all clients were scored.
    """
    drawn = result["accuracy"].get("eval_clients", ())
    if not drawn:
        return None
    scored = drawn[0]["scored"]
    trained = drawn[0].get("trained")
    clients = result["partition"]["clients"]
    verb = "were"
    if scored == 1:
        verb = "was"
    who = f"{scored:,} of {clients:,} clients {verb} drawn and scored"
    if trained == 0:
        who += "; none of these took part in any round, so the accuracy is that of untrained models"
    elif trained is not None and trained < scored:
        who += f"; {trained:,} of these took part in some round"
    return who, [float(d["standard_error"]) for d in drawn if d["standard_error"] is not None]


def unlike_tests(results: Iterable[Mapping[str, Any]]) -> str | None:
    """Why validation may choose wrongly between models of different kinds; None for runs where it may not."""
    known = list(results)
    kinds = {r.get("protocol") for r in known}
    if (
        len(kinds) < 2
        or not all("validation" in r for r in known)
        or not any(map(_unseen_classes, known))
    ):
        return None
    return (
        "Validation rows have the classes of each client, but the test rows here have all classes. "
        "Validation may therefore prefer another kind of model (personal or global) than the one that is "
        "best on the test rows. --option test_protocol=matched makes both alike."
    )


def few_validation_classes(results: Iterable[Mapping[str, Any]]) -> str | None:
    """Why validation may rank settings of personal models in another order than test rows do; None where it may not.

    Validation rows are rows of the client, but its model is tested on all classes.
    """
    for result in results:
        part = result.get("partition", {})
        args = part.get("args", {})
        held = result.get("validation")
        own_tests = "by" in args or args.get("test_protocol", "balanced") != "balanced"
        if result.get("protocol") != "personalised" or held is None or own_tests:
            continue
        # A client has no more classes among its validation rows than rows.
        most = min(held["rows"] / part["clients"], typical_classes(result) or math.inf)
        if most < result["classes"]:
            return (
                f"The validation rows of a typical client hold at most {most:.3g} of {result['classes']} classes, "
                "but personal models are tested on all classes. Validation may therefore rank settings, such as "
                "learning rates, in another order than the test rows: compare both columns."
            )
    return None


def typical_classes(result: Mapping[str, Any]) -> float | None:
    """Number of classes among the training rows of a typical client; None for a result without it."""
    owned = result.get("classes_owned", {})
    each = owned.get("per_client")
    if each:
        return float(np.median(each))
    mean: float | None = owned.get("mean")
    return mean


def _below_zero_shot(result: Mapping[str, Any]) -> list[str]:
    """A caution where class texts alone, without any training, are more accurate; [] otherwise."""
    untrained = result["accuracy"].get("zero_shot")
    trained = result["accuracy"]["mean"]
    if untrained is None or trained is None or untrained - trained < HALF_A_POINT:
        return []
    cost = 100 * (untrained - trained)
    return [
        f"BELOW ZERO-SHOT: the model is {cost:.2f} points below the {percent(untrained)} % that the class "
        "texts alone reach on these rows. Try fewer rounds or a lower learning rate."
    ]


def _unseen_classes(result: Mapping[str, Any]) -> list[str]:
    """A caution where clients' own models are scored on classes that most clients have no training row of; []
    otherwise.
    """
    args = result["partition"].get("args", {})
    if result.get("protocol") != "personalised" or args.get("test_protocol") != "balanced":
        return []
    typical = typical_classes(result)
    if typical is None or typical > result["classes"] / 2:
        return []
    return [
        f"ON UNSEEN CLASSES: each personal model is tested on all {result['classes']} classes, but a "
        f"typical client has training rows of {typical:.3g}. To test with each client's own class shares: "
        "--option test_protocol=matched"
    ]


LARGE_RATE = 0.1
"""A learning rate from which on a larger one is not what is missing."""


def chance_lines(result: Mapping[str, Any]) -> list[str]:
    """A caution where the accuracy is no better than a guess, and the next command; [] for a better result."""
    chance = at_chance(result)
    if chance is None:
        return []
    guess = percent(chance.level)
    more = percent(chance.least)
    return [
        f"NO BETTER THAN CHANCE: guessing gives {guess} % on these {chance.rows:,} test rows of "
        f"{chance.classes} classes; only more than {more} % would differ from guessing.",
        f"Next: {next_step(result)}",
    ]


def next_step(result: Mapping[str, Any]) -> str:
    """The first thing to change in the same command.

    More clients where no client sent anything, tuned values where the method has some, else a larger rate, else the
    data.
    """
    bytes_of = result.get("traffic", {}).get("exact", {})
    # A method may send nothing by design; one that sends something to clients waits for their answers.
    waits = bytes_of.get("down_bytes") or result.get("participants")
    if result.get("protocol") == "global" and waits and not bytes_of.get("up_bytes", 1):
        return (
            "no client sent anything in any round; use more clients per round (--participation) or fewer "
            "unavailable clients (--availability, --client-dropout)"
        )
    method = str(result["method"])
    hp = result["hyperparameters"]
    tuned = _tuned_values(method)
    if tuned and any(hp.get(name) != value for name, value in tuned.items()):
        words = []
        for name, value in tuned.items():
            if isinstance(value, float):
                value = f"{value:g}"
            words.append(f"{name}={value}")
        return (
            f"the same command with --preset tuned  ({' '.join(words)}, chosen on validation rows)"
        )
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


def describe_trust(section: Mapping[str, Any]) -> list[str]:
    """The ``trust`` part of a result as lines for a person."""
    lines = []
    if section.get("aggregate", "mean") != "mean":
        lines.append(f"Uploads combined by {section['aggregate']}.")
    if "attack" in section:
        liars = sorted({name for names in section["attackers"] for name in names})
        happened = "no client was malicious"
        if liars:
            happened = f"{len(liars)} clients were malicious ({some_names(liars, 5)})"
        lines.append(f"Attack {section['attack']}: {happened}.")
    if section.get("rejected"):
        lines.append(f"{section['rejected']} uploads were rejected over all rounds and seeds.")
    if cost := section.get("privacy"):
        lines.append(describe_privacy(cost))
    return lines
