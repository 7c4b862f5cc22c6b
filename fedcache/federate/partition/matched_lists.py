"""Matched test rows: the test rows of each client as a rule, from which a list is made on access.

A client takes the first rows of each of its classes, in one random order that all clients share (``MatchedTests``). So
a client is stored as a few pairs of class and number, while its list can be most of the test rows.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from fedcache.federate.partition.row_lists import MadeWhenAsked, RowLists, share_of_ones
from fedcache.federate.partition.scheme import MatchedTests


class MatchedLists(MadeWhenAsked[np.ndarray]):
    """M lists of ascending test rows, with the interface of ``RowLists``.

    Args:
        order: int64 [T]: test rows, class by class.
        starts: int64 [K + 1], from 0 to T: class k is order[starts[k]:starts[k + 1]].
        classes: list of the classes of each client, ascending, numbers from 0 to K - 1.
        taken: int64, one for each entry of ``classes.rows``: number of rows that the client takes of the class.
    """

    def __init__(
        self, order: np.ndarray, starts: np.ndarray, classes: RowLists, taken: np.ndarray
    ) -> None:
        self.order = order
        self.starts = starts
        self.classes = classes
        self.taken = taken

    @classmethod
    def of(cls, matched: MatchedTests, train: RowLists, label: np.ndarray) -> MatchedLists:
        """The lists ``matched.of(rows)`` of every client's training rows, all at once; ``label`` [N] is of all rows."""
        order, starts, known = matched.by_class
        # Every pair (client, class) of a training row whose class has test rows, as one number; then each pair once.
        place = np.searchsorted(known, label[train.rows])
        kept = known[np.minimum(place, len(known) - 1)] == label[train.rows]
        pairs = train.owner[kept].astype(np.int64) * len(known) + place[kept]
        pairs.sort()
        first = np.flatnonzero(np.diff(pairs, prepend=-1))
        counts = np.diff(first, append=len(pairs))
        client, of_class = np.divmod(pairs[first], len(known))
        classes = RowLists.of_sizes(of_class, np.bincount(client, minlength=len(train)))
        # For each client, the class with the fewest candidates per training row limits all of its classes.
        have = np.diff(starts)[of_class]
        ratio = have / counts
        some = classes.sizes > 0
        least = np.repeat(np.minimum.reduceat(ratio, classes.ends[:-1][some]), classes.sizes[some])
        scarcest = np.flatnonzero(ratio == least)
        scarcest = scarcest[np.diff(client[scarcest], prepend=-1) > 0]
        limit, own = (np.repeat(each[scarcest], classes.sizes[some]) for each in (have, counts))
        return cls(order, starts, classes, -(-counts * limit // own))

    @classmethod
    def alike(cls, rows: np.ndarray, clients: int) -> MatchedLists:
        """The same ``rows`` for each of M clients, stored as one class."""
        classes = RowLists.of_sizes(np.zeros(clients, np.int64), np.ones(clients, np.int64))
        return cls(np.sort(rows), np.array([0, len(rows)]), classes, np.full(clients, len(rows)))

    @cached_property
    def sizes(self) -> np.ndarray:
        """int64 [M]."""
        return np.diff(np.concatenate([[0], np.cumsum(self.taken)])[self.classes.ends])

    @property
    def distinct(self) -> np.ndarray:
        """int64, ascending: the rows of all lists, each once."""
        most = np.zeros(len(self.starts) - 1, np.int64)
        np.maximum.at(most, self.classes.rows, self.taken)
        return np.sort(self._rows(np.arange(len(most)), most))

    def together(self, start: int, stop: int) -> RowLists:
        """The lists from ``start`` to ``stop``."""
        pairs = slice(self.classes.ends[start], self.classes.ends[stop])
        rows = self._rows(self.classes.rows[pairs], self.taken[pairs])
        return RowLists.of_sizes(rows, self.sizes[start:stop]).ascending()

    def words(self, start: int, stop: int) -> list[str]:
        """As of ``RowLists``."""
        return self.together(start, stop).words(0, stop - start)

    def _rows(self, classes: np.ndarray, taken: np.ndarray) -> np.ndarray:
        """The first ``taken`` rows of each of ``classes``, one class after the other."""
        begins = np.cumsum(taken) - taken
        places = np.repeat(self.starts[classes] - begins, taken) + np.arange(int(taken.sum()))
        found: np.ndarray = self.order[places]
        return found

    def shares_right(self, rows: np.ndarray, right: np.ndarray) -> np.ndarray:
        """As ``RowLists.shares_right``; the time of a list depends on its classes, not on its rows."""
        value = np.full(len(self.order), np.nan)
        used = np.isin(self.order, rows)
        value[used] = right[np.searchsorted(rows, self.order[used])]
        known = ~np.isnan(value)
        # The difference of two cumulative sums is the sum over the taken rows of a class.
        hits, scored = (
            np.concatenate([[0.0], np.cumsum(each)])
            for each in (np.where(known, value, 0.0), known.astype(np.float64))
        )
        begin = self.starts[self.classes.rows]
        owner = self.classes.owner
        sums = [
            np.bincount(owner, each[begin + self.taken] - each[begin], minlength=len(self))
            for each in (hits, scored)
        ]
        return share_of_ones(*sums)

    def __len__(self) -> int:
        return len(self.classes)

    def at(self, i: int) -> np.ndarray:
        """List ``i``, made again at every call."""
        return self.together(i, i + 1).rows


TestLists = RowLists | MatchedLists
"""The clients' own test rows, as lists or as a rule."""
