"""Privacy accounting of rounds of noise by two accountants of ``dp-accounting``, without torch.

A round is the Gaussian mechanism on a sum whose terms have norm at most C: adding or removing a client changes the sum
by at most C, and the noise has deviation z C. If each client takes part independently with probability q, and the
participants are secret, a round costs less (amplification by Poisson sampling).
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from fedcache.errors import MachineError

FEW_ROUNDS = 1000
"""Number of rounds up to which privacy losses are discretised in coarse steps."""
MEANINGLESS = 50.0
"""Epsilon above which there is no protection: it allows probabilities to differ by a factor of 10^21."""


@dataclass(frozen=True, order=True)
class Spent:
    """Rounds of the Gaussian mechanism."""

    noise: float  # multiplier z
    # Probability with which each client takes part in a round, independently; 1.0 if participants are known.
    share: float
    rounds: int


def counted_share(cost: Mapping[str, Any]) -> float:
    """The share of clients in the accounting of a result's ``privacy`` part: 1 if the participants are known."""
    if cost["participants"] == "known":
        return 1.0
    return float(cost["share"])


def short_privacy(cost: Mapping[str, Any]) -> str:
    """The ``privacy`` part of a result in words: ``epsilon 2.8`` of all seeds, or ``simulation of epsilon 2.8``.

    Results of earlier releases have the epsilon of one seed, and simulated noise.
    """
    together = cost.get("composed", cost)
    found = together["epsilon_pld"] or together["epsilon_rdp"]
    words = "no bound"
    if found is not None:
        words = f"epsilon {found:.3g}"
    if "composed" not in cost:
        words += " a seed"
    # Earlier releases had only simulated noise, and no such key.
    if cost.get("simulation", True):
        return f"simulation of {words}"
    return words


def require_accounting() -> None:
    """Raise MachineError when dp-accounting is not installed."""
    if find_spec("dp_accounting") is None:
        raise MachineError(
            "--dp-noise needs the package dp-accounting to compute epsilon, but the package is not installed.",
            "Install it: pip install 'fedcache[dp]'",
        )


def epsilons(spent: Iterable[Spent], delta: float) -> dict[str, float | None]:
    """``epsilon_pld`` and ``epsilon_rdp`` of all these rounds together; None without a bound.

    Raises MachineError when dp-accounting is not installed.
    """
    rounds = Counter[tuple[float, float]]()
    for one in spent:
        rounds[one.noise, one.share] += one.rounds
    bounds: dict[str, float | None] = {"epsilon_pld": None, "epsilon_rdp": None}
    # A round without noise has no bound.
    if not all(noise for noise, _ in rounds):
        return bounds
    require_accounting()
    together = sorted((noise, share, count) for (noise, share), count in rounds.items())
    rdp, pld = _epsilons(tuple(together), delta)
    if math.isfinite(pld):
        bounds["epsilon_pld"] = pld
    if math.isfinite(rdp):
        bounds["epsilon_rdp"] = rdp
    return bounds


@lru_cache(maxsize=256)
def _epsilons(spent: tuple[tuple[float, float, int], ...], delta: float) -> tuple[float, float]:
    """Epsilon by Renyi divergence and by privacy loss distributions, of (noise, share, rounds) together.

    Above ``MEANINGLESS`` the second is reported as infinite, because the memory of its accountant grows with epsilon,
    to hundreds of GiB.
    """
    import dp_accounting
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    # Losses are rounded up in every round. A coarse step is ten times as fast, and exact to 0.1 % for few rounds.
    step = 1e-4
    if sum(rounds for *_, rounds in spent) <= FEW_ROUNDS:
        step = 1e-3
    by_renyi = RdpAccountant()
    by_losses = PLDAccountant(value_discretization_interval=step)
    log = logging.getLogger("absl")
    level = log.level
    # The accountant logs a line for each order whose series does not converge.
    log.setLevel(logging.ERROR)
    try:
        events = []
        for noise, share, rounds in spent:
            event = dp_accounting.GaussianDpEvent(noise)
            if share < 1.0:
                event = dp_accounting.PoissonSampledDpEvent(share, event)
            by_renyi.compose(event, rounds)
            events.append((event, rounds))
        rdp = float(by_renyi.get_epsilon(delta))
        if rdp > MEANINGLESS:
            return rdp, math.inf
        for event, rounds in events:
            by_losses.compose(event, rounds)
        return rdp, float(by_losses.get_epsilon(delta))
    finally:
        log.setLevel(level)
