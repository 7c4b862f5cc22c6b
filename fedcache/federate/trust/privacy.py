"""Differential privacy of clients: clipped uploads, Gaussian noise, and what it costs.

Every round each client takes part with probability q by itself (Poisson sampling, as the accounting assumes), its row
is shortened to norm C, and N(0, (z C)^2) is added to the sum (McMahan et al., ICLR 2018). Neighbouring federations
differ in one client. The server is trusted: noise is added where the sum is made.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from fedcache.errors import MachineError, UsageError
from fedcache.federate.trust.robust_rules import clip

DELTA = 1e-5
MEANINGLESS = 50.0
"""Epsilon above which nothing is promised: a factor of 10^21 between two answers."""
MOST = 1e6
"""Bound and multiplier that are taken: above, noise overflows what it is added to."""


@dataclass(frozen=True)
class Privacy:
    """Clipping bound C, noise multiplier z and the delta that epsilon is told for."""

    bound: float
    noise: float
    delta: float = DELTA

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise on every number of a sum."""
        return self.bound * self.noise

    def noisy_sum(self, V: Tensor, generator: torch.Generator | None) -> Tensor:
        """sum_i clip(V_i) + N(0, (z C)^2) [d] of rows [m, d]."""
        total = clip(V, self.bound).sum(0)
        drawn = torch.randn(total.shape, generator=generator, dtype=torch.float64)
        return total + self.deviation * drawn.to(total.device)

    def require(self) -> None:
        """Refuse noise whose worth nobody can say. Raises MachineError when dp-accounting is not installed."""
        if self.noise and find_spec("dp_accounting") is None:
            raise MachineError(
                "Noise without accounting would be a number nobody knows the meaning of, and dp-accounting is missing.",
                "Install it: pip install 'fedcache[dp]'",
            )

    def cost(self, rounds: int, share: float) -> dict[str, float | str]:
        """What ``rounds`` rounds with a share of clients cost, by two accountants.

        Raises MachineError when dp-accounting is not installed.

        Returns:
            ``epsilon_pld`` (privacy loss distribution, the tighter) and ``epsilon_rdp`` (Renyi), and what they are of.
        """
        known: dict[str, float | str] = {
            "clip": self.bound, "noise": self.noise, "delta": self.delta, "rounds": rounds, "share": share,
            "unit": "one client, added or removed", "sampling": "Poisson", "server": "trusted",
        }  # fmt: skip
        if self.noise == 0.0:
            return {**known, "epsilon_pld": float("inf"), "epsilon_rdp": float("inf")}
        self.require()
        rdp, pld = _epsilons(self.noise, self.delta, rounds, share)
        return {**known, "epsilon_pld": pld, "epsilon_rdp": rdp}


@lru_cache(maxsize=64)
def _epsilons(noise: float, delta: float, rounds: int, share: float) -> tuple[float, float]:
    """Epsilon by Renyi divergence and by privacy loss distributions.

    Above ``MEANINGLESS`` the second is infinite too: the accountant's memory grows with epsilon, to hundreds of GiB for
    noise that hides nothing.
    """
    import dp_accounting
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    event: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(noise)
    if share < 1.0:
        event = dp_accounting.PoissonSampledDpEvent(share, event)
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)  # orders whose series does not converge are left out, with a line for each
    try:
        rdp = RdpAccountant().compose(event, rounds).get_epsilon(delta)
        pld = PLDAccountant().compose(event, rounds).get_epsilon(delta) if rdp <= MEANINGLESS else math.inf
    finally:
        log.setLevel(level)
    return float(rdp), float(pld)


def parse_privacy(bound: float | None, noise: float | None, delta: float | None) -> Privacy | None:
    """From the words of the command line; None when none is said. Raises UsageError."""
    if bound is None and noise is None:
        if delta is not None:
            raise UsageError("--dp-delta says nothing by itself.", "Add --dp-clip 1 --dp-noise 1")
        return None
    if bound is None or noise is None:
        missing = "--dp-clip" if bound is None else "--dp-noise"
        raise UsageError(
            f"{missing} is missing: noise is told as a multiple of the clipping bound.", f"Add {missing} 1"
        )
    delta = DELTA if delta is None else delta
    for name, value, legal in (("--dp-clip", bound, 0 < bound <= MOST), ("--dp-noise", noise, 0 <= noise <= MOST),
                               ("--dp-delta", delta, 0 < delta < 1)):  # fmt: skip
        if not legal or value != value or value == float("inf"):
            raise UsageError(f"{name} {value:g} is out of range.", f"For example {name} 1e-5"
                                if "delta" in name else f"For example {name} 1")  # fmt: skip
    return Privacy(bound, noise, delta)
