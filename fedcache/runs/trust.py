"""What a run does with uploads, from configuration: robust rules, attacks, the gate's verdict, privacy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedcache.config import TrainConfig
from fedcache.errors import Exit, FedcacheError
from fedcache.federate.engine.method import Method

if TYPE_CHECKING:
    from fedcache.federate.trust.pipeline import Trust

KEYS = (
    "aggregate", "attack", "on_bad_update", "byzantine", "max_update_norm", "dp_clip", "dp_noise", "dp_delta",
)  # fmt: skip
"""Fields of ``TrainConfig`` that say it; each can be swept."""


def trust_of(config: TrainConfig, method: Method | None = None) -> Trust:
    """The choice of a configuration.

    Raises:
        FedcacheError: USAGE for wrong words, and for a method whose uploads do not allow them; ENVIRONMENT when noise
            is asked for and its accounting is not installed.
    """
    from fedcache.federate.trust.pipeline import parse_trust
    from fedcache.federate.trust.privacy import parse_privacy

    privacy = parse_privacy(config.dp_clip, config.dp_noise, config.dp_delta)
    if privacy is not None:
        privacy.require()  # before anything is trained
    trust = parse_trust(
        config.aggregate, config.attack, config.on_bad_update, config.byzantine, config.max_update_norm, privacy
    )
    if method is not None:
        trust.check(method, method.resolve())
    return trust


def chosen(config: TrainConfig) -> dict[str, Any]:
    """What differs from the default, as a result's identity holds it; {} for an ordinary run."""
    from fedcache.federate.trust.attacks import parse_attack
    from fedcache.federate.trust.pipeline import NO_ATTACK

    plain = TrainConfig()
    made = {k: getattr(config, k) for k in KEYS if getattr(config, k) != getattr(plain, k)}
    if made.get("attack") == NO_ATTACK:
        del made["attack"]
    elif "attack" in made:
        made["attack"] = parse_attack(made["attack"]).text  # one attack has one spelling
    if config.aggregate == "mean":
        made.pop("byzantine", None)  # the mean expects nobody
    if config.dp_clip is not None and "dp_delta" not in made:
        from fedcache.federate.trust.privacy import DELTA

        made["dp_delta"] = DELTA
    return made


def swept_words(values: Mapping[str, Any]) -> dict[str, Any]:
    """Words of a sweep as the types of ``TrainConfig``.

    Raises:
        FedcacheError: USAGE for a word that is no number where one is needed.
    """
    numbers = {"rounds": int, "byzantine": float, "max_update_norm": float, "dp_clip": float, "dp_noise": float,
               "dp_delta": float}  # fmt: skip
    made: dict[str, Any] = {}
    for key, value in values.items():
        if key in numbers:
            try:
                made[key] = numbers[key](value)
            except ValueError:
                raise FedcacheError(
                    Exit.USAGE, f"--sweep {key}: {value!r} is no number.", f"For example --sweep {key}=1,2"
                ) from None
    return made


def spent(resolved: Mapping[str, Any], clients: int) -> dict[str, float | str | None]:
    """What the noise of a run costs; {} for a run without. Accountants' infinities are None: there is no bound."""
    if "dp_clip" not in resolved:
        return {}
    from fedcache.federate.engine.run_state import sampled
    from fedcache.federate.trust.privacy import Privacy
    from fedcache.runs.prepare import parse_participation

    share = sampled(parse_participation(str(resolved["participation"])), clients) / clients
    privacy = Privacy(resolved["dp_clip"], resolved["dp_noise"], resolved["dp_delta"])
    cost = privacy.spent(int(resolved["rounds"]), share)
    return {k: None if v == float("inf") else v for k, v in cost.items()}


def words(told: Mapping[str, Any]) -> list[str]:
    """The ``trust`` part of a result as lines for a person."""
    lines = []
    if told.get("aggregate", "mean") != "mean":
        lines.append(f"Uploads taken together by {told['aggregate']}.")
    if "attack" in told:
        liars = sorted({name for names in told["attackers"] for name in names})
        shown = ", ".join(liars[:5]) + (", ..." if len(liars) > 5 else "")
        lines.append(f"Attack {told['attack']}: {f'{len(liars)} clients lied ({shown})' if liars else 'nobody lied'}.")
    if told.get("rejected"):
        lines.append(f"{told['rejected']} uploads were rejected over all rounds and seeds.")
    if cost := told.get("privacy"):
        lines.append(epsilon(cost))
    return lines


def epsilon(cost: Mapping[str, Any]) -> str:
    """One sentence of what noise promises."""
    if cost["epsilon_rdp"] is None:
        return "Privacy: no noise, so nothing is promised (clipping alone)."
    pld = "too large to be worth computing" if cost["epsilon_pld"] is None else f"{cost['epsilon_pld']:.3g}"
    return (
        f"Privacy: epsilon {pld} by privacy loss distributions, {cost['epsilon_rdp']:.3g} by Renyi divergence, for "
        f"delta {cost['delta']:g}; {cost['rounds']} rounds, a share of {cost['share']:g} of the clients in each."
    )


def told(
    resolved: Mapping[str, Any], attackers: Sequence[Sequence[str]], clients: int, rejected: int = 0
) -> dict[str, Any]:
    """The part of a result that says what was done; {} for an ordinary run."""
    made = {k: resolved[k] for k in KEYS if k in resolved}
    if not made:
        return {}
    if "attack" in made:
        made["attackers"] = [list(names) for names in attackers]
    if made.get("on_bad_update") == "reject":
        made["rejected"] = rejected
    if "dp_clip" in made:
        made["privacy"] = spent(resolved, clients)
    return {"trust": made}
