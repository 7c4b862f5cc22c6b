"""A bounded memory for results that the runs of a grid share: rows cut out for a client, first weights, orders."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")

MEMO_BYTES = 64 << 20
"""Kept by one memory; the longest unused goes first."""

POOLED = 4
"""Pooled uploads that are kept, the latest used: a Gram matrix of 4,096 features is 64 MB."""


class SameObject:
    """A key that is equal for one object alone. It holds the object, so that no other can take its place in memory."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameObject) and other.value is self.value


class LruCache:
    """Values by key, within a number of bytes. They are shared: whoever gets one must not write into it."""

    def __init__(self, budget: int = MEMO_BYTES) -> None:
        self.budget = budget
        self.nbytes = 0
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T], size: Callable[[T], int]) -> T:
        """The value of ``key``, made if it is not there; ``size`` returns its bytes. Too large values are not kept."""
        if key in self._kept:
            self._kept.move_to_end(key)
            value: T = self._kept[key][0]
            return value
        made = make()
        if (size_of := size(made)) <= self.budget:
            self._kept[key] = (made, size_of)
            self.nbytes += size_of
        # the longest unused first
        while self.nbytes > self.budget:
            self.nbytes -= self._kept.popitem(last=False)[1][1]
        return made
