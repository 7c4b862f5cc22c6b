"""Which clients take part in a round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from fedcache.federate.engine.context import generator
from fedcache.federate.engine.method import clients_per_round
from fedcache.federate.partition.row_lists import NumberedNames

MANY = 1 << 16
"""Clients from which on a round's are drawn one by one."""

Participation = int | float | None
"""Clients a round: None for all, an int for a number, a float for a share."""


class ClientSampler:
    """Draws the clients of every round, in client order and the same whenever they are asked for.

    It draws over sorted names, so the order of clients in a partition is free.

    Args:
        names: of all M clients.
        eligible: int64, ascending: numbers of those that can train.
        seed: of the run.
        uniforms: (round, n) -> [n] numbers in [0, 1), where each client is drawn by itself, as the accounting of
            privacy assumes; None for as many clients in every round.
    """

    def __init__(
        self,
        names: Sequence[str],
        eligible: np.ndarray,
        seed: int,
        uniforms: Callable[[int, int], np.ndarray] | None = None,
    ) -> None:
        self.names, self.eligible, self.seed, self._uniforms = names, eligible, seed, uniforms
        self._last: tuple[tuple[int, Participation], list[int]] | None = None

    @cached_property
    def by_name(self) -> np.ndarray:
        """int64: the clients that can train, sorted by name; numbered ones are already."""
        if isinstance(self.names, NumberedNames):
            return self.eligible
        return np.array(sorted(self.eligible.tolist(), key=self.names.__getitem__), np.int64)

    def sample(self, round_: int, participation: Participation) -> list[int]:
        """The clients of a round (from 0), ascending."""
        if self._last is None or self._last[0] != (round_, participation):
            self._last = (round_, participation), self._sample(round_, participation)
        return self._last[1]

    def _sample(self, round_: int, participation: Participation) -> list[int]:
        by_name = self.by_name
        if self._uniforms is not None:
            return _ascending(by_name[self._uniforms(round_, len(by_name)) < self.share(participation)])
        count = min(clients_per_round(participation, len(self.names)), len(by_name))
        return _ascending(by_name[without_replacement(generator(self.seed, "sampling", round_), len(by_name), count)])

    def share(self, participation: Participation) -> float:
        """The expected share of clients in a round."""
        return clients_per_round(participation, len(self.names)) / len(self.names)

    def scored(self, share: Participation) -> list[int] | None:
        """The clients whose personal models ``--eval-clients`` scores, the same in every round; None for all."""
        if share is None:
            return None
        count = clients_per_round(share, len(self.by_name))
        drawn = without_replacement(generator(self.seed, "eval-clients"), len(self.by_name), count)
        return _ascending(self.by_name[drawn])


def without_replacement(rng: np.random.Generator, population: int, count: int) -> np.ndarray:
    """``count`` different numbers below ``population``, every set as likely as every other.

    They are the first of a permutation; of ``MANY`` clients and more one would take longer than the round, and the
    numbers are drawn one by one.
    """
    if population < MANY:
        return rng.permutation(population)[:count]
    drawn: np.ndarray = rng.choice(population, count, replace=False, shuffle=False)
    return drawn


def _ascending(clients: np.ndarray) -> list[int]:
    found: list[int] = np.sort(clients).tolist()
    return found
