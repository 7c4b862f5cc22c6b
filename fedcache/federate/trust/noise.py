"""Standard normal numbers for privacy: from the operating system, or from a seed for a simulation.

A generator with a seed, and any whose state can be worked out from what it gave (the Mersenne twister, PCG, Philox with
a 64-bit seed), lets whoever knows it subtract the noise. Noise that protects is made of ``os.urandom`` alone: every
number costs fresh bytes, nothing is kept, and no two runs or rounds share any.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcache.federate.engine.context import key_hash

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
