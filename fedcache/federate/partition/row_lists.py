"""Row lists: the rows of many clients in one array, so that a million clients are two arrays and not objects."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TypeVar, overload

import numpy as np

T = TypeVar("T", covariant=True)

LARGEST_KEY = 2**62
"""Limit of the numbers that combine client and row for sorting."""

DENSE = 16
"""``is_among`` uses a table if the range of the numbers is at most this many times their count."""

BLOCK = 1 << 16
"""Numbers that are written in decimal at once, so that their digits stay in the processor's cache."""


class MadeWhenAsked(Sequence[T]):
    """A sequence that makes its items on access; a slice is a list of them."""

    @abstractmethod
    def at(self, i: int) -> T:
        """Item ``i``, from 0 to length - 1."""

    @overload
    def __getitem__(self, i: int) -> T: ...
    @overload
    def __getitem__(self, i: slice) -> list[T]: ...
    def __getitem__(self, i: int | slice) -> T | list[T]:
        if isinstance(i, slice):
            return [self.at(k) for k in range(*i.indices(len(self)))]
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        return self.at(i % len(self))

    def __iter__(self) -> Iterator[T]:
        return map(self.at, range(len(self)))


class RowLists(MadeWhenAsked[np.ndarray]):
    """M lists of rows; each list is a view of ``rows``, made on access.

    Args:
        rows: int64 [n].
        ends: int64 [M + 1], from 0 to n and never falling: list i is rows[ends[i]:ends[i + 1]].
    """

    def __init__(self, rows: np.ndarray, ends: np.ndarray) -> None:
        self.rows = rows
        self.ends = ends

    @classmethod
    def of(cls, parts: Sequence[np.ndarray]) -> RowLists:
        """The lists of separate arrays; ``RowLists`` are returned unchanged."""
        if isinstance(parts, RowLists):
            return parts
        sizes = np.fromiter(map(len, parts), np.int64, len(parts))
        rows = np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int64, copy=False)
        return cls.of_sizes(rows, sizes)

    @classmethod
    def of_sizes(cls, rows: np.ndarray, sizes: np.ndarray) -> RowLists:
        """Consecutive pieces of ``rows`` of these sizes [M]."""
        return cls(rows, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))

    @cached_property
    def sizes(self) -> np.ndarray:
        """int64 [M]."""
        return np.diff(self.ends)

    @property
    def owner(self) -> np.ndarray:
        """int32 [n]: the number of the list of each row."""
        return np.repeat(np.arange(len(self), dtype=np.int32), self.sizes)

    def ascending(self) -> RowLists:
        """The same lists, each in ascending order."""
        high = int(self.rows.max(initial=0)) + 1
        if high * len(self) >= LARGEST_KEY:
            return RowLists(self.rows[np.lexsort((self.rows, self.owner))], self.ends)
        # One number for client and row sorts by client, then by row. Sorting moves no row to another client, so the
        # same numbers are subtracted afterwards.
        first = np.repeat(np.arange(len(self), dtype=np.int64) * high, self.sizes)
        key = first + self.rows
        key.sort()
        key -= first
        return RowLists(key, self.ends)

    def take(self, order: np.ndarray) -> RowLists:
        """The lists at these places, in that order."""
        sizes = self.sizes[order]
        made = RowLists.of_sizes(self.rows[:0], sizes)
        source = np.repeat(self.ends[:-1][order] - made.ends[:-1], sizes) + np.arange(
            int(sizes.sum())
        )
        return RowLists(self.rows[source], made.ends)

    def first(self, count: int | None) -> RowLists:
        """The first ``count`` lists, all for None."""
        if count is None:
            return self
        ends = self.ends[: count + 1]
        return RowLists(self.rows[: ends[-1]], ends)

    def joined(self, each: int) -> RowLists:
        """The lists joined in groups of ``each`` neighbours."""
        return RowLists(self.rows, self.ends[::each])

    def words(self, start: int, stop: int) -> list[str]:
        """The lists from ``start`` to ``stop``, each as text: its rows with commas between them."""
        text, cuts = in_decimal(self.rows[self.ends[start] : self.ends[stop]])
        ends = cuts[self.ends[start : stop + 1] - self.ends[start]].tolist()
        # Every row has a comma after it, which is cut off after the last one.
        return [text[a : max(a, b - 1)] for a, b in pairwise(ends)]

    @property
    def distinct(self) -> np.ndarray:
        """int64, ascending: the rows of all lists, each once."""
        return sorted_once(self.rows)

    def shares_right(self, rows: np.ndarray, right: np.ndarray) -> np.ndarray:
        """float64 [M]: the mean of ``right`` over the known rows of each list; NaN for a list without known rows.

        Args:
            rows: int64 [R], ascending; includes every row of every list.
            right: float64 [R]: 1, 0, or NaN for an unknown row.
        """
        value = right[np.searchsorted(rows, self.rows)]
        known = ~np.isnan(value)
        owner = self.owner[known]
        return share_of_ones(
            np.bincount(owner, value[known], minlength=len(self)),
            np.bincount(owner, minlength=len(self)),
        )

    def __len__(self) -> int:
        return len(self.ends) - 1

    def at(self, i: int) -> np.ndarray:
        """A view."""
        return self.rows[self.ends[i] : self.ends[i + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        ends = self.ends.tolist()
        return (self.rows[a:b] for a, b in pairwise(ends))


def in_decimal(numbers: np.ndarray) -> tuple[str, np.ndarray]:
    """Non-negative numbers [n] as text with a comma after each, and the begin of each in it, int64 [n + 1].

    Digits are computed for a block of numbers at once, ten times as fast as ``str`` of each number.

    >>> in_decimal(np.array([7, 12]))
    ('7,12,', array([0, 2, 5]))
    """
    parts = []
    lengths = np.zeros(len(numbers) + 1, np.int64)
    for start in range(0, len(numbers), BLOCK):
        left = numbers[start : start + BLOCK]
        width = len(str(int(left.max())))
        digits = np.ones(len(left), np.int64)
        for power in range(1, width):
            digits += left >= 10**power
        lengths[start + 1 : start + 1 + len(left)] = digits + 1
        # A row of text for each number, with leading zeros and a comma; the zeros are cut off below.
        text = np.full((len(left), width + 1), ord(","), np.uint8)
        # 32-bit division is faster, and numbers of nine digits fit into 32 bits.
        left = left.astype(np.uint64)
        if width < 10:
            left = left.astype(np.uint32)
        for place in reversed(range(width)):
            tenth = left // 10
            text[:, place] = left - tenth * 10 + ord("0")
            left = tenth
        parts.append(text[np.arange(width + 1) >= (width - digits)[:, None]].tobytes())
    return b"".join(parts).decode("ascii"), np.cumsum(lengths)


def share_of_ones(hits: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """hits / counts; NaN where ``counts`` is 0."""
    return np.where(counts > 0, hits / np.maximum(counts, 1), np.nan)


def sorted_once(values: np.ndarray) -> np.ndarray:
    """Each value once, ascending; ten times as fast as ``np.unique``, which uses a hash table."""
    ordered = np.sort(values)
    again = np.zeros(len(ordered), bool)
    again[1:] = ordered[1:] == ordered[:-1]
    kept: np.ndarray = ordered[~again]
    return kept


def is_among(values: np.ndarray, others: np.ndarray) -> np.ndarray:
    """bool [n]: which of ``values`` are among ``others``."""
    if not len(others):
        return np.zeros(len(values), bool)
    low = int(others.min())
    high = int(others.max())
    # A table with a place for each possible number is ten times as fast as sorting.
    if high - low < DENSE * len(others):
        there = np.zeros(high - low + 1, bool)
        there[others - low] = True
        among = (values >= low) & (values <= high)
        among[among] = there[values[among] - low]
        return among
    ordered = np.sort(others)
    found: np.ndarray = (
        ordered[np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)] == values
    )
    return found


class NumberedNames(MadeWhenAsked[str]):
    """``client-000`` to ``client-999``, each made on access."""

    def __init__(self, count: int) -> None:
        self._count = count
        digits = len(str(count - 1))
        self._form = f"client-%0{digits}d"

    def __len__(self) -> int:
        return self._count

    def at(self, i: int) -> str:
        """The name with number ``i``, padded to the digits of the last number."""
        return self._form % i

    def __iter__(self) -> Iterator[str]:
        return map(self._form.__mod__, range(self._count))  # twice as fast as ``__getitem__``

    @classmethod
    def recognise(cls, names: Sequence[str]) -> Sequence[str]:
        """These names as ``NumberedNames`` if they have this form, else as a tuple."""
        numbered = cls(len(names))
        if all(map(str.__eq__, names, numbered)):
            return numbered
        return tuple(names)
