"""Many strings of one length in one text, as the names of numbered rows are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import eq
from typing import overload

import numpy as np


class EqualStrings(Sequence[str]):
    """Strings of one length, cut out of one text as they are asked for: ten million names in a tenth of the memory.

    >>> words = EqualStrings("0001", 2)
    >>> words[1], words[:1], list(words), words == ("00", "01")
    ('01', ('00',), ['00', '01'], True)
    """

    def __init__(self, text: str, length: int) -> None:
        self.text = text
        self.length = length

    def __len__(self) -> int:
        return len(self.text) // self.length

    @overload
    def __getitem__(self, place: int) -> str: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[str]: ...

    def __getitem__(self, place: int | slice) -> str | Sequence[str]:
        if isinstance(place, slice):
            if place == slice(len(self)):
                return self
            return tuple(self._at(number) for number in range(*place.indices(len(self))))
        return self._at(range(len(self))[place])  # IndexError, and places from the end

    def _at(self, number: int) -> str:
        return self.text[number * self.length : (number + 1) * self.length]

    def __iter__(self) -> Iterator[str]:
        text = self.text
        length = self.length
        return (text[at : at + length] for at in range(0, len(text), length))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, tuple | list | EqualStrings)
            and len(self) == len(other)
            and all(map(eq, self, other))
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def increasing(self) -> bool:
        """Whether each is greater than the one before."""
        if not self.text.isascii():
            return all(a < b for a, b in pairwise(self))
        raw = np.frombuffer(self.text.encode("ascii"), f"S{self.length}")
        return bool((raw[:-1] < raw[1:]).all())

    def __repr__(self) -> str:
        return repr(tuple(self))


def numbered(count: int) -> EqualStrings:
    """0 to ``count`` - 1, filled up with zeros, so that they are in the order of their letters.

    >>> numbered(11)[9:]
    ('09', '10')
    """
    width = len(str(count - 1))
    numbers = np.arange(count)
    digits = np.empty((count, width), np.uint8)
    for place in range(width - 1, -1, -1):
        numbers, digits[:, place] = np.divmod(numbers, 10)
    return EqualStrings((digits + ord("0")).tobytes().decode("ascii"), width)
