"""What was done against bad uploads and for privacy, as lines for a person."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def is_private(result: Mapping[str, Any]) -> bool:
    """Whether a result promises differential privacy: with noise, and not as a simulation."""
    cost = result.get("trust", {}).get("privacy") or {}
    return bool(cost.get("noise")) and not cost.get("simulation")


def has_secret_times(result: Mapping[str, Any]) -> bool:
    """Whether a result is private and its epsilon assumes that nobody learns who took part in a round."""
    cost = result.get("trust", {}).get("privacy") or {}
    return is_private(result) and cost.get("participants") == "secret"


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
    """What noise promises, and of what that is said."""
    if not cost["noise"]:
        return "Privacy: no noise, so nothing is promised (clipping alone)."
    together = cost["composed"]
    known = cost.get("participants_known")
    figures = f"epsilon {_tight(cost)}"
    renyi = _number(cost["epsilon_rdp"])
    if cost["seeds"] > 1:
        figures += (
            f" for each of {cost['seeds']} seeds and {_tight(together)} for all of them together"
        )
        renyi += f" and {_number(together['epsilon_rdp'])}"
    figures += f" (by Renyi divergence {renyi}), delta {cost['delta']:g}; {cost['rounds']} rounds, "
    figures += f"each client in a round with probability {cost['share']:g}."
    if cost["simulation"]:
        secret = (
            f" This takes it that nobody knows who took part (else {_tight(known)})."
            if known
            else ""
        )
        return (
            f"Simulation of privacy: anyone can repeat the noise of {cost['noise_from']}, so it hides nothing. Noise "
            f"that is not repeatable would have {figures}{secret}"
        )
    secret = f" Nobody is told who took part (else it were {_tight(known)})." if known else ""
    if cost["participants"] == "known":
        secret = " Who took part is told, so sampling hides nothing."
    return (
        f"Privacy: {figures}{secret} Noise from the operating system: the run cannot be repeated bit for bit. Epsilon "
        f"does not cover, and --dp-allow allows: {', '.join(cost['allowed'])}."
    )


def _tight(figures: Mapping[str, Any]) -> str:
    """The figure by privacy loss distributions."""
    if figures["epsilon_pld"] is None:
        return "too large to be worth computing"
    return _number(figures["epsilon_pld"])


def _number(epsilon: float | None) -> str:
    if epsilon is None:
        return "without bound"
    return f"{epsilon:.3g}"
