"""A random generator whose draws are given."""

from __future__ import annotations


class Drawn:
    """In the place of a generator: each draw lies at the next given share of its range."""

    def __init__(self, *shares: float) -> None:
        self.shares = list(shares)

    def uniform(self, low: float, high: float) -> float:
        return low + self.shares.pop(0) * (high - low)

    def random(self) -> float:
        return self.shares.pop(0)
