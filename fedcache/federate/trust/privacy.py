"""Differential privacy of clients: clipped uploads, Gaussian noise, and what it costs.

Every round each client takes part with probability q by itself (Poisson sampling, as the accounting assumes), its row
is shortened to norm C, and N(0, (z C)^2) is added to the sum (McMahan et al., ICLR 2018). Neighbouring federations
differ in one client. The server is trusted: noise is added where the sum is made.

Noise and sampling are drawn from the operating system (``system_normals``), so a private run cannot be repeated
bit for bit. With a seed of its own it is a simulation: repeatable, and a promise to nobody.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcache.errors import UsageError, unknown
from fedcache.federate.engine.context import generator, key_hash
from fedcache.federate.partition.client_table import ClientRows
from fedcache.federate.trust.accounting import Spent, epsilons, require_accounting
from fedcache.federate.trust.robust_rules import clip

# Standard normal numbers for privacy: from the operating system, or from a seed for a simulation.
#
# A generator with a seed, and any whose state can be worked out from what it gave (the Mersenne
# twister, PCG, Philox with a 64-bit seed), lets whoever knows it subtract the noise. Noise that
# protects is made of ``os.urandom`` alone: every number costs fresh bytes, nothing is kept, and no
# two runs or rounds share any.


Noise = Callable[[int], Tensor]
"""n -> float64 [n] independent draws of N(0, 1)."""

TERMS = 4
"""Normals that are averaged into one, against attacks on the low bits of floating-point noise."""

BLOCK = 1 << 20
"""Numbers drawn at once: memory stays small beside a model's."""


def system_normals(n: int) -> Tensor:
    """float64 [n] independent draws of N(0, 1) from the operating system's randomness.

    The inverse of the normal distribution function at uniform numbers of 63 bits, with a random sign. Each number is
    the sum of four such draws, divided by 2: a single one takes values from which its place among the floating-point
    numbers, and so what it was added to, can be told (Mironov, CCS 2012); the sum of four needs so many guesses that
    this is out of reach (Holohan and Braghin, ESORICS 2021).
    """
    made = torch.zeros(n, dtype=torch.float64)
    for start in range(0, n, BLOCK):
        size = min(BLOCK, n - start)
        for _ in range(TERMS):
            made[start : start + size] += _one_term(size)
    return made / math.sqrt(TERMS)


def _one_term(n: int) -> Tensor:
    bits = np.frombuffer(os.urandom(8 * n), np.uint64)
    # Half of the distribution, so that the numbers near 0 keep all their bits: the tail reaches 9 deviations.
    lower = ((bits >> np.uint64(1)).astype(np.float64) + 0.5) * 2.0**-64
    sign = (bits & np.uint64(1)).astype(np.float64) * 2.0 - 1.0
    drawn: Tensor = torch.special.ndtri(torch.from_numpy(lower)) * torch.from_numpy(sign)
    return drawn


def system_uniforms(n: int) -> NDArray[np.float64]:
    """[n] independent draws from [0, 1) of 53 bits, from the operating system's randomness."""
    return (np.frombuffer(os.urandom(8 * n), np.uint64) >> np.uint64(11)).astype(
        np.float64
    ) * 2.0**-53


def simulated_normals(*key: int | str) -> Noise:
    """Noise that anyone who knows ``key`` can repeat. It hides nothing, and shows what noise costs in accuracy."""
    stream = torch.Generator().manual_seed(key_hash(*key) & (1 << 63) - 1)
    return lambda n: torch.randn(n, generator=stream, dtype=torch.float64)


DELTA = 1e-5
MOST = 1e6
"""Bound and multiplier that are taken: above, noise overflows what it is added to."""

LEAST_DELTA = 1e-12
"""Below it the accountants' rounding is larger than what they are asked for."""

LEAST_NOISE = 1e-3
"""Multiplier from which on noise is taken, beside none at all: its epsilon is 500,000 already, and far below it is
beyond what can be computed with."""

UNCOVERED = {
    "evaluation": "every figure that is measured on clients' own rows: accuracy, F1, confusion, diagnostics, classes "
    "owned",
    "participants": "who took part in which round",
    "rows": "how many training rows all clients have together",
    "statistics": "mean and deviation of every feature over all clients' training rows (feat_post=standardize), or the "
    "mean length of these rows (rff_sigma=auto)",
}
"""What a run may tell although epsilon does not cover it: word of ``--dp-allow`` -> what it is."""


@dataclass(frozen=True)
class Privacy:
    """What a run does for the privacy of its clients."""

    bound: float  # C, the norm that uploads are cut to
    noise: float  # z, the deviation of the noise on their sum as a multiple of C
    delta: float = DELTA  # for which epsilon is told
    seed: int | None = (
        None  # of noise that is only simulated; None draws it from the operating system
    )
    allow: tuple[
        str, ...
    ] = ()  # of ``UNCOVERED``, what may be told although epsilon does not cover it

    @property
    def protects(self) -> bool:
        """Whether there is noise that nobody can repeat."""
        return self.noise > 0.0 and self.seed is None

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise on every number of a sum."""
        return self.bound * self.noise

    def noisy_sum(self, V: Tensor, noise: Noise) -> Tensor:
        """sum_i clip(V_i) + N(0, (z C)^2) [d] of rows [m, d]."""
        total = clip(V, self.bound).sum(0)
        if not self.noise:
            return total
        return total + self.deviation * noise(total.numel()).to(total.device)

    def require(self) -> None:
        """Refuse noise whose worth nobody can say. Raises MachineError when dp-accounting is not installed."""
        if self.noise:
            require_accounting()

    @property
    def keeps_participants_secret(self) -> bool:
        """Whether nobody is told who took part in a round, as amplification by sampling assumes."""
        return self.protects and "participants" not in self.allow

    def cost(self, rounds: int, share: float, seeds: int = 1) -> dict[str, Any]:
        """What ``rounds`` rounds with a share of clients cost, by two accountants.

        Raises MachineError when dp-accounting is not installed.

        Returns:
            what the figures are of, and three pairs of ``epsilon_pld`` (privacy loss distribution, the tighter) and
            ``epsilon_rdp`` (Renyi), None where there is no bound: of one seed; ``composed`` of ``seeds`` of them, as
            every seed is a release of the same clients; ``participants_known``, of one seed whose participants are
            known, where that differs.
        """
        told = self.protects and not self.keeps_participants_secret
        counted = share
        if told:
            counted = 1.0
        known: dict[str, Any] = {
            "clip": self.bound,
            "noise": self.noise,
            "delta": self.delta,
            "rounds": rounds,
            "share": share,
            "unit": "one client, added or removed",
            "sampling": "Poisson",
            "server": "trusted",
            "participants": "known" if told else "secret",
            "noise_from": "the operating system" if self.seed is None else f"--dp-seed {self.seed}",
            "simulation": self.seed is not None,
            "repeatable": not self.protects,
            "allowed": list(self.allow),
        }
        one = Spent(self.noise, counted, rounds)
        made = {**known, **epsilons([one], self.delta), "seeds": seeds}
        made["composed"] = epsilons([replace(one, rounds=rounds * seeds)], self.delta)
        if counted < 1.0:
            made["participants_known"] = epsilons([replace(one, share=1.0)], self.delta)
        return made


class PrivateDraws:
    """What the privacy of one run draws: who takes part in a round, and the noise on its sum.

    Args:
        privacy: of the run; None for a run without, of which nothing but public draws is asked.
        seed: of the run, which is public.
        identity: words that determine the run, beside its hyperparameters and clients.
        hp: its hyperparameters.
        clients: with their rows.
    """

    def __init__(
        self,
        privacy: Privacy | None,
        seed: int,
        identity: Sequence[str],
        hp: Mapping[str, Any],
        clients: Sequence[ClientRows],
    ) -> None:
        self._privacy = privacy
        self._seed = seed
        self._identity = tuple(identity)
        self._hp = hp
        self._clients = clients
        self._secret: tuple[int, NDArray[np.float64]] | None = None  # round, numbers

    def uniforms(self, round_: int, n: int) -> NDArray[np.float64]:
        """[n] numbers that decide who takes part in a round (from 0), the same however often they are asked for.

        Who took part must be as unknown as the noise, so a run that protects does not draw it from its seed.
        """
        if self._privacy is None or not self._privacy.protects:
            return generator(self._seed, "poisson", round_).random(n)
        if self._secret is None or self._secret[0] != round_:
            self._secret = round_, system_uniforms(n)
        return self._secret[1]

    def normals(self, round_: int) -> Noise:
        """The noise of a round (from 0)."""
        if self._privacy is None or self._privacy.seed is None:
            return system_normals
        return simulated_normals(self._privacy.seed, "privacy", self._key, self._seed, round_)

    @cached_property
    def _key(self) -> str:
        """Digest of what the run is, for simulated noise: runs that differ in anything share none of it.

        Else the difference of two results would be that of what their clients sent, without any noise.
        """
        digest = hashlib.sha256(repr((self._identity, sorted(self._hp.items()))).encode())
        for client in self._clients:
            rows = np.asarray(client.train, np.int64)
            digest.update(f"\0{client.name}\0{len(rows)}\0".encode())
            digest.update(rows.tobytes())
        return digest.hexdigest()


def parse_privacy(
    bound: float | None,
    noise: float | None,
    delta: float | None = None,
    seed: int | None = None,
    allow: str | None = None,
) -> Privacy | None:
    """From the words of the command line; None when none is said. Raises UsageError."""
    if bound is None and noise is None:
        for name, given in (("--dp-delta", delta), ("--dp-seed", seed), ("--dp-allow", allow)):
            if given is not None:
                raise UsageError(f"{name} says nothing by itself.", "Add --dp-clip 1 --dp-noise 1")
        return None
    if bound is None or noise is None:
        missing = "--dp-noise"
        if bound is None:
            missing = "--dp-clip"
        raise UsageError(
            f"{missing} is missing: noise is told as a multiple of the clipping bound.",
            f"Add {missing} 1",
        )
    if delta is None:
        delta = DELTA
    known = noise == 0 or LEAST_NOISE <= noise <= MOST
    for name, value, legal in (
        ("--dp-clip", bound, 0 < bound <= MOST),
        ("--dp-noise", noise, known),
        ("--dp-delta", delta, LEAST_DELTA <= delta < 1),
    ):
        if not legal or value != value or value == float("inf"):
            raise UsageError(
                f"{name} {value:g} is out of range.",
                f"For example {name} 1e-5" if "delta" in name else f"For example {name} 1",
            )
    if seed is not None and seed < 0:
        raise UsageError(f"--dp-seed {seed} is below 0.", "For example --dp-seed 0")
    return Privacy(bound, noise, delta, seed, parse_allowed(allow))


def parse_allowed(text: str | None) -> tuple[str, ...]:
    """The words of ``--dp-allow``, each once and sorted. Raises UsageError for one that is none."""
    words = {word.strip() for word in (text or "").split(",")} - {""}
    for word in sorted(words):
        if word not in UNCOVERED:
            raise unknown("--dp-allow", word, UNCOVERED)
    return tuple(sorted(words))
