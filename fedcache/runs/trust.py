"""The trust policy of a run, from its configuration, and how results and the terminal describe it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedcache.config import TrainConfig
from fedcache.errors import UsageError
from fedcache.federate.engine.method import Method
from fedcache.federate.engine.participation import clients_per_round
from fedcache.federate.trust.attacks import parse_attack
from fedcache.federate.trust.policy import NO_ATTACK, TrustPolicy, parse_policy
from fedcache.federate.trust.privacy import DELTA, parse_privacy

TRUST_OPTIONS = (
    "aggregate", "attack", "on_bad_update", "byzantine", "max_update_norm", "dp_clip", "dp_noise", "dp_delta",
)  # fmt: skip
"""Fields of ``TrainConfig`` that say it; each can be swept."""


def policy_from_config(config: TrainConfig, method: Method | None = None) -> TrustPolicy:
    """The choice of a configuration.

    Raises:
        UsageError for wrong words, and for a method whose uploads do not allow them; MachineError when noise
            is asked for and its accounting is not installed.
    """
    privacy = parse_privacy(config.dp_clip, config.dp_noise, config.dp_delta)
    if privacy is not None:
        privacy.require()  # before anything is trained
    trust = parse_policy(
        config.aggregate, config.attack, config.on_bad_update, config.byzantine, config.max_update_norm, privacy
    )
    if method is not None:
        trust.check(method, method.resolve())
    return trust


def non_default_options(config: TrainConfig) -> dict[str, Any]:
    """What differs from the default, as a result's identity holds it; {} for an ordinary run."""
    plain = TrainConfig()
    made = {k: getattr(config, k) for k in TRUST_OPTIONS if getattr(config, k) != getattr(plain, k)}
    if made.get("attack") == NO_ATTACK:
        del made["attack"]
    elif "attack" in made:
        made["attack"] = parse_attack(made["attack"]).text  # one attack has one spelling
    if config.aggregate == "mean":
        made.pop("byzantine", None)  # the mean expects nobody
    if config.dp_clip is not None and "dp_delta" not in made:
        made["dp_delta"] = DELTA
    return made


def typed_sweep_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Words of a sweep as the types of ``TrainConfig``.

    Raises:
        UsageError for a word that is no number where one is needed.
    """
    numbers = {"rounds": int, "byzantine": float, "max_update_norm": float, "dp_clip": float, "dp_noise": float,
               "dp_delta": float}  # fmt: skip
    made: dict[str, Any] = {}
    for key, value in values.items():
        if key in numbers:
            try:
                made[key] = numbers[key](value)
            except ValueError:
                raise UsageError(f"--sweep {key}: {value!r} is no number.", f"For example --sweep {key}=1,2") from None
    return made


def privacy_cost(
    policy: TrustPolicy, rounds: int, participation: int | float | None, clients: int
) -> dict[str, float | str | None]:
    """What the noise of a run costs; {} for a run without. Accountants' infinities are None: there is no bound."""
    if policy.privacy is None:
        return {}
    cost = policy.privacy.cost(rounds, clients_per_round(participation, clients) / clients)
    return {k: None if v == float("inf") else v for k, v in cost.items()}


def describe_trust(section: Mapping[str, Any]) -> list[str]:
    """The ``trust`` part of a result as lines for a person."""
    lines = []
    if section.get("aggregate", "mean") != "mean":
        lines.append(f"Uploads taken together by {section['aggregate']}.")
    if "attack" in section:
        liars = sorted({name for names in section["attackers"] for name in names})
        shown = ", ".join(liars[:5]) + (", ..." if len(liars) > 5 else "")
        lines.append(
            f"Attack {section['attack']}: {f'{len(liars)} clients lied ({shown})' if liars else 'nobody lied'}."
        )
    if section.get("rejected"):
        lines.append(f"{section['rejected']} uploads were rejected over all rounds and seeds.")
    if cost := section.get("privacy"):
        lines.append(describe_privacy(cost))
    return lines


def describe_privacy(cost: Mapping[str, Any]) -> str:
    """One sentence of what noise promises."""
    if cost["epsilon_rdp"] is None:
        return "Privacy: no noise, so nothing is promised (clipping alone)."
    pld = "too large to be worth computing" if cost["epsilon_pld"] is None else f"{cost['epsilon_pld']:.3g}"
    return (
        f"Privacy: epsilon {pld} by privacy loss distributions, {cost['epsilon_rdp']:.3g} by Renyi divergence, for "
        f"delta {cost['delta']:g}; {cost['rounds']} rounds, a share of {cost['share']:g} of the clients in each."
    )


def trust_section(
    options: Mapping[str, Any], cost: Mapping[str, Any], attackers: Sequence[Sequence[str]], rejected: int = 0
) -> dict[str, Any]:
    """The part of a result that says what was done; {} for an ordinary run.

    Args:
        options: ``non_default_options`` of the run.
        cost: ``privacy_cost`` of it.
        attackers: names of the clients that lied, for each seed.
        rejected: uploads that validation refused, over all seeds and rounds.
    """
    section = dict(options)
    if not section:
        return {}
    if "attack" in section:
        section["attackers"] = [list(names) for names in attackers]
    if section.get("on_bad_update") == "reject":
        section["rejected"] = rejected
    if cost:
        section["privacy"] = dict(cost)
    return {"trust": section}
