"""The rows of many clients in one array, one client after the other: a million clients are two arrays, not objects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import overload

import numpy as np

LARGEST_KEY = 2**62
"""Above which client and row do not fit into one number to sort by."""


class RowLists(Sequence[np.ndarray]):
    """Lists of rows; a list is a view of ``rows``, made when it is asked for.

    Args:
        rows: int64 [n].
        ends: int64 [M + 1], from 0 to n and never falling: list i is rows[ends[i]:ends[i + 1]].
    """

    def __init__(self, rows: np.ndarray, ends: np.ndarray) -> None:
        self.rows, self.ends = rows, ends

    @classmethod
    def of(cls, parts: Sequence[np.ndarray]) -> RowLists:
        """Lists that are arrays of their own; those that lie together already are taken as they are."""
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
        """int32 [n]: whose list each row is in."""
        return np.repeat(np.arange(len(self), dtype=np.int32), self.sizes)

    def ascending(self) -> RowLists:
        """The same lists, each in ascending order."""
        high = int(self.rows.max()) + 1 if len(self.rows) else 1
        if high * len(self) >= LARGEST_KEY:
            return RowLists(self.rows[np.lexsort((self.rows, self.owner))], self.ends)
        first = np.repeat(np.arange(len(self), dtype=np.int64) * high, self.sizes)
        key = first + self.rows  # sorted by client, then by row
        key.sort()
        key -= first  # clients ascend and keep their sizes, so theirs is what was added at each place
        return RowLists(key, self.ends)

    def take(self, order: np.ndarray) -> RowLists:
        """The lists at these places, in that order."""
        sizes = self.sizes[order]
        made = RowLists.of_sizes(self.rows[:0], sizes)
        source = np.repeat(self.ends[:-1][order] - made.ends[:-1], sizes) + np.arange(int(sizes.sum()))
        return RowLists(self.rows[source], made.ends)

    def joined(self, each: int) -> RowLists:
        """Every ``each`` neighbours as one list."""
        return RowLists(self.rows, self.ends[::each])

    def words(self, start: int, stop: int) -> list[str]:
        """The lists from ``start`` to ``stop``, each as its rows with commas between them."""
        ends = (self.ends[start : stop + 1] - self.ends[start]).tolist()
        said = list(map(str, self.rows[self.ends[start] : self.ends[stop]].tolist()))
        return [",".join(said[a:b]) for a, b in pairwise(ends)]

    def __len__(self) -> int:
        return len(self.ends) - 1

    @overload
    def __getitem__(self, i: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, i: slice) -> list[np.ndarray]: ...
    def __getitem__(self, i: int | slice) -> np.ndarray | list[np.ndarray]:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        i %= len(self)
        return self.rows[self.ends[i] : self.ends[i + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        ends = self.ends.tolist()
        return (self.rows[a:b] for a, b in pairwise(ends))


def sorted_once(values: np.ndarray) -> np.ndarray:
    """Each value once, ascending; ``np.unique`` puts them into a hash table, at a tenth of the speed."""
    ordered = np.sort(values)
    kept: np.ndarray = ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])] if len(ordered) else ordered
    return kept


def is_among(values: np.ndarray, others: np.ndarray) -> np.ndarray:
    """bool [n]: which of ``values`` are among ``others``."""
    if not len(others):
        return np.zeros(len(values), bool)
    ordered = np.sort(others)
    found: np.ndarray = ordered[np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)] == values
    return found


class NumberedNames(Sequence[str]):
    """``client-000`` to ``client-999``, each made when it is asked for."""

    def __init__(self, count: int) -> None:
        self._count, self._digits = count, len(str(count - 1))

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> list[str]: ...
    def __getitem__(self, i: int | slice) -> str | list[str]:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(self._count))]
        if not -self._count <= i < self._count:
            raise IndexError(i)
        return f"client-{i % self._count:0{self._digits}d}"

    @classmethod
    def recognise(cls, names: Sequence[str]) -> Sequence[str]:
        """These names as a rule where they are numbered so, else as a tuple."""
        numbered = cls(len(names))
        return numbered if all(map(str.__eq__, names, numbered)) else tuple(names)
