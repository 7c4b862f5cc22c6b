"""Differential privacy of clients: clipped uploads, Gaussian noise, and its privacy cost.

In every round each client takes part independently with probability q (Poisson sampling, as the accounting assumes).
Its row is clipped to norm C, and N(0, (z C)^2) is added to the sum (McMahan et al., ICLR 2018). Neighbouring
federations differ in one client. The server is trusted, because it adds the noise to the sum.

Noise and sampling are drawn from the operating system (``system_normals``), so a private run cannot be repeated bit for
bit. With ``--dp-seed`` the noise is simulated: it is repeatable and provides no protection.
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
from fedcache.federate.partition.client_table import Client
from fedcache.federate.trust.accounting import Spent, epsilons, require_accounting
from fedcache.federate.trust.robust_rules import clip

# Standard normal numbers for privacy: from the operating system, or from a seed for a simulation.
#
# Anyone who knows the state of a generator can subtract its noise. That state may be a known seed, or
# can be computed from the output (the Mersenne twister, PCG, Philox with a 64-bit seed). So real
# noise is made of ``os.urandom`` alone. Every number takes fresh bytes, and none are kept or shared.


Noise = Callable[[int], Tensor]
"""Function from n to n independent draws of N(0, 1), float64 [n]."""

TERMS = 4
"""Number of normal draws that are summed to one, against attacks on the low bits of floating-point noise."""

BLOCK = 1 << 20
"""How many numbers are drawn at once, so that memory use stays small."""


def system_normals(n: int) -> Tensor:
    """float64 [n] independent draws of N(0, 1) from the operating system's randomness.

    A draw is the inverse of the normal distribution function at a uniform number of 63 bits, with a random sign. Each
    number is the sum of four draws, divided by 2. The low bits of a noisy sum reveal the summand if the noise is a
    single draw (Mironov, CCS 2012). The sum of four draws makes this attack infeasible (Holohan and Braghin, ESORICS
    2021).
    """
    made = torch.zeros(n, dtype=torch.float64)
    for start in range(0, n, BLOCK):
        size = min(BLOCK, n - start)
        for _ in range(TERMS):
            made[start : start + size] += _one_term(size)
    return made / math.sqrt(TERMS)


def _one_term(n: int) -> Tensor:
    bits = np.frombuffer(os.urandom(8 * n), np.uint64)
    # 63 bits give a point in the lower half of the distribution, where float64 is finest, and one bit the sign. The
    # tail reaches 9 deviations.
    position = (bits >> np.uint64(1)).astype(np.float64)
    lower = (position + 0.5) * 2.0**-64
    sign = (bits & np.uint64(1)).astype(np.float64) * 2.0 - 1.0
    quantile = torch.special.ndtri(torch.from_numpy(lower))
    drawn: Tensor = quantile * torch.from_numpy(sign)
    return drawn


def system_uniforms(n: int) -> NDArray[np.float64]:
    """[n] independent draws from [0, 1) of 53 bits, from the operating system's randomness."""
    bits = np.frombuffer(os.urandom(8 * n), np.uint64)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def simulated_normals(*key: int | str) -> Noise:
    """Repeatable noise for ``key``. It provides no protection, and shows the cost of noise in accuracy."""
    seed = key_hash(*key) & ((1 << 63) - 1)
    stream = torch.Generator().manual_seed(seed)
    return lambda n: torch.randn(n, generator=stream, dtype=torch.float64)


DELTA = 1e-5
"""Delta of the reported epsilon, unless ``--dp-delta`` is given."""

MOST = 1e6
"""Largest clipping norm and noise multiplier. With larger noise, a sum can overflow."""

LEAST_DELTA = 1e-12
"""Smallest delta. Below it, rounding errors of the accounting dominate."""

LEAST_NOISE = 1e-3
"""Smallest noise multiplier other than 0. Its epsilon is 500,000; smaller ones have no computable epsilon."""

UNCOVERED = {
    "evaluation": "every result that is measured on clients' own rows: accuracy, F1, confusion, diagnostics, classes "
    "owned",
    "participants": "the clients that took part in each round",
    "rows": "the number of training rows of all clients together",
    "statistics": "the mean of every feature over all clients' training rows (feat_post=center), the mean and "
    "standard deviation (feat_post=standardize), or the mean norm of these rows (rff_sigma=auto)",
}
"""Value of ``--dp-allow`` -> facts that the run then publishes although epsilon does not cover them."""


@dataclass(frozen=True)
class Privacy:
    """Privacy options of a run."""

    bound: float  # C, the norm that uploads are clipped to
    noise: float  # z, the deviation of the noise on their sum as a multiple of C
    delta: float = DELTA  # of the reported epsilon
    seed: int | None = None  # of simulated noise; None draws it from the operating system
    allow: tuple[str, ...] = ()  # words of ``UNCOVERED``

    @property
    def protects(self) -> bool:
        """Whether there is real noise, which cannot be repeated."""
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
        """Refuse noise without accounting. Raises MachineError if dp-accounting is not installed."""
        if self.noise:
            require_accounting()

    @property
    def keeps_participants_secret(self) -> bool:
        """Whether the participants of a round are secret, as amplification by sampling assumes."""
        return self.protects and "participants" not in self.allow

    def cost(self, rounds: int, share: float, seeds: int = 1) -> dict[str, Any]:
        """The privacy cost of ``rounds`` rounds with a share of the clients, by two accountants.

        Raises MachineError if dp-accounting is not installed.

        Returns:
            the options, and three pairs of ``epsilon_pld`` (privacy loss distribution, the tighter) and ``epsilon_rdp``
            (Renyi), None without a bound: of one seed; ``composed`` of ``seeds`` seeds, because every seed is a release
            about the same clients; ``participants_known``, of one seed with known participants, if that differs.
        """
        participants = "secret"
        counted = share
        if self.protects and not self.keeps_participants_secret:
            participants = "known"
            counted = 1.0
        noise_from = "the operating system"
        if self.seed is not None:
            noise_from = f"--dp-seed {self.seed}"
        options: dict[str, Any] = {
            "clip": self.bound,
            "noise": self.noise,
            "delta": self.delta,
            "rounds": rounds,
            "share": share,
            "unit": "one client, added or removed",
            "sampling": "Poisson",
            "server": "trusted",
            "participants": participants,
            "noise_from": noise_from,
            "simulation": self.seed is not None,
            "repeatable": not self.protects,
            "allowed": list(self.allow),
        }
        one_seed = Spent(self.noise, counted, rounds)
        made = {**options, **epsilons([one_seed], self.delta), "seeds": seeds}
        all_seeds = replace(one_seed, rounds=rounds * seeds)
        made["composed"] = epsilons([all_seeds], self.delta)
        if counted < 1.0:
            known_participants = replace(one_seed, share=1.0)
            made["participants_known"] = epsilons([known_participants], self.delta)
        return made


class PrivateDraws:
    """Random draws for the privacy of one run: the participants of a round, and the noise on its sum.

    Args:
        privacy: of the run.
        seed: of the run, which is public.
        identity: words that determine the run, apart from its hyperparameters and clients.
        hp: its hyperparameters.
        clients: with their rows.
    """

    def __init__(
        self,
        privacy: Privacy,
        seed: int,
        identity: Sequence[str],
        hp: Mapping[str, Any],
        clients: Sequence[Client],
    ) -> None:
        self._privacy = privacy
        self._seed = seed
        self._identity = tuple(identity)
        self._hp = hp
        self._clients = clients
        self._secret: tuple[int, NDArray[np.float64]] | None = None  # round, numbers

    def uniforms(self, round_: int, n: int) -> NDArray[np.float64]:
        """[n] numbers that decide who takes part in a round (from 0); repeated calls give the same numbers.

        A run with real noise does not draw them from its public seed, because its participants must be secret.
        """
        if not self._privacy.protects:
            return generator(self._seed, "poisson", round_).random(n)
        if self._secret is None or self._secret[0] != round_:
            self._secret = round_, system_uniforms(n)
        return self._secret[1]

    def normals(self, round_: int) -> Noise:
        """The noise of a round (from 0)."""
        if self._privacy.seed is None:
            return system_normals
        return simulated_normals(self._privacy.seed, "privacy", self._key, self._seed, round_)

    @cached_property
    def _key(self) -> str:
        """Digest of all facts that determine the run, which seeds simulated noise, so that no two runs share noise.

        With shared noise, the difference of two results would be free of noise.
        """
        facts = repr((self._identity, sorted(self._hp.items())))
        digest = hashlib.sha256(facts.encode())
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
    """The options of the command line; None without any of them. Raises UsageError."""
    if bound is None and noise is None:
        for name, given in (("--dp-delta", delta), ("--dp-seed", seed), ("--dp-allow", allow)):
            if given is not None:
                raise UsageError(
                    f"{name} has no effect without --dp-clip and --dp-noise.",
                    "Add --dp-clip 1 --dp-noise 1",
                )
        return None
    if bound is None or noise is None:
        missing = "--dp-noise"
        if bound is None:
            missing = "--dp-clip"
        raise UsageError(
            f"{missing} is missing. Both are needed: the noise has a standard deviation of --dp-noise times "
            "--dp-clip.",
            f"Add {missing} 1",
        )
    if delta is None:
        delta = DELTA
    most = f"at most {MOST:,.0f}"
    for name, value, legal, limits, example in (
        ("--dp-clip", bound, 0 < bound <= MOST, f"above 0 and {most}", "1"),
        (
            "--dp-noise",
            noise,
            noise == 0 or LEAST_NOISE <= noise <= MOST,
            f"0, or at least {LEAST_NOISE} and {most}",
            "1",
        ),
        (
            "--dp-delta",
            delta,
            LEAST_DELTA <= delta < 1,
            f"at least {LEAST_DELTA} and below 1",
            "1e-5",
        ),
    ):
        if not legal:
            raise UsageError(
                f"{name} is {value:g}, but it must be {limits}.", f"For example {name} {example}"
            )
    if seed is not None and seed < 0:
        raise UsageError(f"--dp-seed {seed} is below 0.", "For example --dp-seed 0")
    return Privacy(bound, noise, delta, seed, parse_allowed(allow))


def parse_allowed(text: str | None) -> tuple[str, ...]:
    """The words of ``--dp-allow``, each once and sorted. Raises UsageError for an unknown word."""
    words = {word.strip() for word in (text or "").split(",")}
    allowed = sorted(words - {""})
    for word in allowed:
        if word not in UNCOVERED:
            raise unknown("--dp-allow", word, UNCOVERED)
    return tuple(allowed)
