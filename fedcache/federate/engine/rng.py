"""Random streams: one numpy generator for every key (seed, purpose, round, client, ...).

A key is hashed to 128 bits, so two keys never share a stream in practice, and no order of clients, chunk or execution
changes a draw. A round makes one stream for every client and purpose; ``generators`` seeds many at once, since numpy's
``SeedSequence`` spends 30 us on each. The states are those of ``PCG64(SeedSequence(hash))``, bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import permutations
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from numpy.random.bit_generator import ISeedSequence

Words = npt.NDArray[np.uint32]

WORDS = 4
"""32-bit words of a key's hash, and of numpy's entropy pool."""

MANY = 8
"""Keys from which on hashing them together is faster."""

_MASK = 0xFFFFFFFF


def _powers(first: int, factor: int, count: int) -> list[tuple[np.uint32, np.uint32]]:
    """(xor, multiplier) of each step of a running hash: the constant before and after its multiplication."""
    out = []
    for _ in range(count):
        after = first * factor & _MASK
        out.append((np.uint32(first), np.uint32(after)))
        first = after
    return out


# The constants of numpy's SeedSequence, which guarantees its streams.
_FILL = _powers(0x43B0D7E5, 0x931E8875, WORDS + WORDS * (WORDS - 1))
_DRAW = _powers(0x8B51F9DD, 0x58F38DED, 2 * WORDS)
_LEFT, _RIGHT = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
_SHIFT = np.uint32(16)


class _Seeded(ISeedSequence):
    """A seed whose state is known already."""

    def __init__(self, state: np.ndarray) -> None:
        self.state = state

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray:
        """The state; ``PCG64`` asks for four uint64."""
        return self.state


def key_hash(*key: int | str) -> int:
    """128 bits of a key."""
    return int.from_bytes(_digest(*key), "little")


def _digest(*key: int | str) -> bytes:
    return hashlib.blake2b("\0".join(str(k) for k in key).encode(), digest_size=4 * WORDS).digest()


def generator(seed: int, purpose: str, *key: int | str) -> np.random.Generator:
    """The generator of one stream."""
    return np.random.Generator(np.random.PCG64(key_hash(seed, purpose, *key)))


def generators(keys: Sequence[tuple[int | str, ...]]) -> list[np.random.Generator]:
    """``generator(*key)`` of every key."""
    if len(keys) < MANY:
        return [np.random.Generator(np.random.PCG64(key_hash(*key))) for key in keys]
    hashes = np.frombuffer(b"".join(_digest(*key) for key in keys), "<u4").reshape(-1, WORDS).T
    return [np.random.Generator(np.random.PCG64(cast(Any, _Seeded(state)))) for state in seed_states(hashes)]


def seed_states(entropy: np.ndarray) -> np.ndarray:
    """``SeedSequence(entropy).generate_state(4, uint64)`` of many entropies.

    Args:
        entropy: uint32 [4, n], the words of each from the lowest.

    Returns:
        uint64 [n, 4].
    """
    steps = iter(_FILL)

    def mixed(value: Words, step: tuple[np.uint32, np.uint32]) -> Words:
        value = (value ^ step[0]) * step[1]
        return value ^ value >> _SHIFT

    pool = [mixed(word, next(steps)) for word in entropy.astype(np.uint32)]
    for source, target in permutations(range(WORDS), 2):
        both = pool[target] * _LEFT - mixed(pool[source], next(steps)) * _RIGHT
        pool[target] = both ^ both >> _SHIFT
    drawn = np.stack([mixed(pool[i % WORDS], step) for i, step in enumerate(_DRAW)], 1)
    return drawn.astype("<u4").view("<u8").astype(np.uint64)
