"""Client table: the clients of a partition as arrays; the object of a single client is made on access."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TypeVar, overload

import numpy as np

T = TypeVar("T", covariant=True)

LARGEST_KEY = 2**62
"""Upper limit of the numbers that combine client and row for sorting."""

DENSE = 16
"""``is_among`` uses a table if the range of its numbers is at most this factor times their count."""

BLOCK = 1 << 16
"""How many numbers are written in decimal at once, so that their digits stay in the processor's cache."""


class LazySequence(Sequence[T]):
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
            places = range(*i.indices(len(self)))
            return [self.at(place) for place in places]
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        return self.at(i % len(self))

    def __iter__(self) -> Iterator[T]:
        return map(self.at, range(len(self)))


class RowLists(LazySequence[np.ndarray]):
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
        rows = np.concatenate([np.empty(0, np.int64), *parts])
        return cls.of_sizes(rows.astype(np.int64, copy=False), sizes)

    @classmethod
    def of_sizes(cls, rows: np.ndarray, sizes: np.ndarray) -> RowLists:
        """Consecutive pieces of ``rows`` of these sizes [M]."""
        ends = np.concatenate([[0], np.cumsum(sizes)])
        return cls(rows, ends.astype(np.int64))

    @classmethod
    def by_owner(cls, rows: np.ndarray, owner: np.ndarray, count: int) -> RowLists:
        """The rows of each of ``count`` owners, in their order in ``rows``; ``owner`` [n] is below ``count``."""
        sizes = np.bincount(owner, minlength=count)
        order = np.argsort(owner, kind="stable")
        return cls.of_sizes(rows[order], sizes)

    @cached_property
    def sizes(self) -> np.ndarray:
        """int64 [M]: number of rows of each list."""
        return np.diff(self.ends)

    @property
    def owner(self) -> np.ndarray:
        """int32 [n]: the number of the list of each row."""
        numbers = np.arange(len(self), dtype=np.int32)
        return np.repeat(numbers, self.sizes)

    def ascending(self) -> RowLists:
        """The same lists, each in ascending order."""
        high = int(self.rows.max(initial=0)) + 1
        if high * len(self) >= LARGEST_KEY:
            order = np.lexsort((self.rows, self.owner))
            return RowLists(self.rows[order], self.ends)
        # One number for client and row sorts by client, then by row. Sorting moves no row to another client, so the
        # same numbers are subtracted afterwards.
        multiples = np.arange(len(self), dtype=np.int64) * high
        offset = np.repeat(multiples, self.sizes)
        key = offset + self.rows
        key.sort()
        key -= offset
        return RowLists(key, self.ends)

    def take(self, order: np.ndarray) -> RowLists:
        """The lists at these places, in that order."""
        sizes = self.sizes[order]
        places = ranges(self.ends[:-1][order], sizes)
        return RowLists.of_sizes(self.rows[places], sizes)

    def first(self, count: int | None) -> RowLists:
        """The first ``count`` lists, all for None."""
        if count is None:
            return self
        ends = self.ends[: count + 1]
        return RowLists(self.rows[: ends[-1]], ends)

    def joined(self, each: int) -> RowLists:
        """The lists joined in groups of ``each`` neighbours; ``each`` divides the number of lists."""
        return RowLists(self.rows, self.ends[::each])

    def words(self, start: int, stop: int) -> list[str]:
        """The lists from ``start`` to ``stop``, each as text: its rows with commas between them."""
        ends = self.ends[start : stop + 1]
        text, cuts = in_decimal(self.rows[ends[0] : ends[-1]])
        borders = cuts[ends - ends[0]].tolist()
        # Every row has a comma after it, which is cut off after the last one. An empty list has no comma.
        return [text[begin : max(begin, end - 1)] for begin, end in pairwise(borders)]

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
        hits = np.bincount(owner, value[known], minlength=len(self))
        counts = np.bincount(owner, minlength=len(self))
        return share_of_ones(hits, counts)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def at(self, i: int) -> np.ndarray:
        """List ``i``, as a view."""
        return self.rows[self.ends[i] : self.ends[i + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        ends = self.ends.tolist()
        return (self.rows[a:b] for a, b in pairwise(ends))


def in_decimal(numbers: np.ndarray) -> tuple[str, np.ndarray]:
    """Non-negative numbers [n] as text with a comma after each, and int64 [n + 1]: where each begins in the text.

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
        # A row of text for each number, with leading zeros and a comma; the zeros are cut off below. Digits are written
        # from the last to the first, and ``left`` is what remains of each number.
        text = np.full((len(left), width + 1), ord(","), np.uint8)
        # 32-bit division is faster, and numbers of nine digits fit into 32 bits.
        left = left.astype(np.uint64)
        if width < 10:
            left = left.astype(np.uint32)
        for place in reversed(range(width)):
            tenth = left // 10
            text[:, place] = left - tenth * 10 + ord("0")
            left = tenth
        is_kept = np.arange(width + 1) >= (width - digits)[:, None]
        parts.append(text[is_kept].tobytes())
    return b"".join(parts).decode("ascii"), np.cumsum(lengths)


def ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """int64: for each start as many consecutive integers as its size says, one range after the other.

    >>> ranges(np.array([10, 50]), np.array([2, 3]))
    array([10, 11, 50, 51, 52])
    """
    begins = np.cumsum(sizes) - sizes
    shift = np.repeat(starts - begins, sizes)
    numbers: np.ndarray = shift + np.arange(len(shift))
    return numbers


def blocks_within(
    sizes: np.ndarray, most: int, longest: int = LARGEST_KEY
) -> Iterator[tuple[int, int]]:
    """Begin and end of blocks of neighbours whose ``sizes`` sum to at most ``most``; one larger size is a block alone.

    A block has at most ``longest`` neighbours; the default is no limit in practice.

    >>> list(blocks_within(np.array([2, 2, 9, 1]), 4))
    [(0, 2), (2, 3), (3, 4)]
    """
    ends = np.cumsum(sizes)
    start = 0
    while start < len(sizes):
        before = ends[start] - sizes[start]
        fits = int(np.searchsorted(ends, before + most, "right"))
        stop = min(start + longest, max(start + 1, fits))
        yield start, stop
        start = stop


def share_of_ones(hits: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """hits / counts; NaN where ``counts`` is 0."""
    return np.where(counts > 0, hits / np.maximum(counts, 1), np.nan)


def sorted_once(values: np.ndarray) -> np.ndarray:
    """Each value once, ascending; ten times as fast as ``np.unique``, which uses a hash table."""
    ordered = np.sort(values)
    is_repeat = np.zeros(len(ordered), bool)
    is_repeat[1:] = ordered[1:] == ordered[:-1]
    return ordered[~is_repeat]


def is_among(values: np.ndarray, others: np.ndarray) -> np.ndarray:
    """bool [n]: which of ``values`` are among ``others``."""
    if not len(others):
        return np.zeros(len(values), bool)
    low = int(others.min())
    high = int(others.max())
    # A table with a place for each possible number is ten times as fast as sorting.
    if high - low < DENSE * len(others):
        is_present = np.zeros(high - low + 1, bool)
        is_present[others - low] = True
        is_found = (values >= low) & (values <= high)
        is_found[is_found] = is_present[values[is_found] - low]
        return is_found
    ordered = np.sort(others)
    place = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    found: np.ndarray = ordered[place] == values
    return found


class NumberedNames(LazySequence[str]):
    """Names such as ``client-000`` to ``client-999``, each made on access."""

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


@dataclass(frozen=True, eq=False)
class Client:
    """One client's rows of the store."""

    name: str  # a domain, or ``client-07``
    train: np.ndarray  # int64, ascending
    test: np.ndarray  # int64, ascending; the rows a personalised evaluation of this client uses
    validation: np.ndarray | None = None  # int64, ascending; None for a partition without any


@dataclass(frozen=True, eq=False)
class Validation:
    """Validation rows: no client trains on them or is tested on them."""

    rows: np.ndarray  # int64, ascending: all of them
    # validation rows of each of the M clients, some lists empty; None if all clients share ``rows``
    own: RowLists | None

    @classmethod
    def of_clients(cls, own: RowLists) -> Validation:
        """Validation rows that belong to clients."""
        return cls(own.distinct, own)


@dataclass(frozen=True, eq=False)
class ClientTable(LazySequence[Client]):
    """The clients of a partition, in client order.

    Args:
        names: of the M clients; ``NumberedNames`` for numbered ones.
        train: M lists of training rows.
        common: int64 [T]: the global test rows.
        shares: bool [M]: whether a client is tested on exactly the global test rows.
        tests: M lists of test rows; the list of a client that is tested on the global rows is not read.
        validation: validation rows; None without any.
    """

    names: Sequence[str]
    train: RowLists
    common: np.ndarray
    shares: np.ndarray
    tests: TestLists
    validation: Validation | None = None

    @classmethod
    def of(
        cls, clients: Sequence[Client], common: np.ndarray, validation: Validation | None = None
    ) -> ClientTable:
        """The table of single clients; those tested on the rows of ``common`` share it."""
        if isinstance(clients, ClientTable) and clients.common is common:
            return clients
        names = NumberedNames.recognise([c.name for c in clients])
        train = RowLists.of([c.train for c in clients])
        tests = [c.test for c in clients]
        return cls.dealt(names, train, common, tests, validation)

    @classmethod
    def tests_only(cls, clients: Sequence[Client]) -> ClientTable:
        """The clients as a table for scoring; single clients become a table without shared test rows."""
        if isinstance(clients, ClientTable):
            return clients
        return cls.of(clients, np.empty(0, np.int64))

    @classmethod
    def dealt(
        cls,
        names: Sequence[str],
        train: RowLists,
        common: np.ndarray,
        tests: Sequence[np.ndarray] | None,
        validation: Validation | None = None,
    ) -> ClientTable:
        """A table of lists; ``tests`` are the clients' own test rows, None if all share ``common``."""
        if tests is None:
            none = RowLists.of_sizes(common[:0], np.zeros(len(train), np.int64))
            shares = np.ones(len(train), bool)
            return cls(names, train, common, shares, none, validation)
        if isinstance(tests, MatchedLists):
            # If the rule chooses from the global rows, a list with as many rows has all of them.
            same = np.array_equal(np.sort(tests.order), common)
            shares = same & (tests.sizes == len(common))
            return cls(names, train, common, shares, tests, validation)
        is_common = (rows is common or np.array_equal(rows, common) for rows in tests)
        shares = np.fromiter(is_common, bool, len(train))
        # Clients that share the global rows have an empty list of their own.
        lists = list(tests)
        for i in np.flatnonzero(shares).tolist():
            lists[i] = common[:0]
        own = RowLists.of(lists)
        return cls(names, train, common, shares, own, validation)

    @property
    def tested(self) -> np.ndarray:
        """int64, ascending: every test row of a client or of the global evaluation."""
        if self.shares.all():
            return self.common
        return sorted_once(np.concatenate([self.tests.distinct, self.common]))

    @property
    def tested_by_clients(self) -> np.ndarray:
        """int64, ascending: every test row of a client."""
        if self.shares.any():
            return self.tested
        return self.tests.distinct

    @property
    def train_sizes(self) -> np.ndarray:
        """int64 [M]: training rows of each client."""
        return self.train.sizes

    @property
    def test_sizes(self) -> np.ndarray:
        """int64 [M]: test rows of each client."""
        return np.where(self.shares, len(self.common), self.tests.sizes)

    def test_of(self, i: int) -> np.ndarray:
        """The test rows of a client."""
        if self.shares[i]:
            return self.common
        return self.tests[i]

    @cached_property
    def for_validation(self) -> ClientTable | None:
        """The same clients with their validation rows as test rows; None without validation rows."""
        held = self.validation
        if held is None:
            return None
        if held.own is None:
            return ClientTable.dealt(self.names, self.train, held.rows, None)
        shares = np.zeros(len(self), bool)
        return ClientTable(self.names, self.train, held.rows, shares, held.own)

    @cached_property
    def scored_for_validation(self) -> ClientTable | None:
        """The same clients with test rows as validation scores them; None without validation rows.

        Clients that share their test rows also share all validation rows. Otherwise validation would prefer models
        that only know the classes of their client, although the test rows have all classes.
        """
        if self.validation is not None and self.shares.all():
            return ClientTable.dealt(self.names, self.train, self.validation.rows, None)
        return self.for_validation

    def without_validation(self) -> ClientTable:
        """The same clients with their own validation rows back among the training rows."""
        held = self.validation
        if held is None or held.own is None:
            return replace(self, validation=None)
        owner = np.concatenate([self.train.owner, held.own.owner])
        rows = np.concatenate([self.train.rows, held.own.rows])
        train = RowLists.by_owner(rows, owner, len(self)).ascending()
        return replace(self, train=train, validation=None)

    def without(self, i: int) -> ClientTable:
        """The table without the client with number ``i`` and its own test rows; the global test rows stay."""
        kept = np.delete(np.arange(len(self)), i)
        held = self.validation
        if held is not None and held.own is not None:
            held = Validation.of_clients(held.own.take(kept))
        names = [name for number, name in enumerate(self.names) if number != i]
        return ClientTable(
            NumberedNames.recognise(names),
            self.train.take(kept),
            self.common,
            self.shares[kept],
            self.tests.take(kept),
            held,
        )

    def __len__(self) -> int:
        return len(self.train)

    def at(self, i: int) -> Client:
        """The client with number ``i``."""
        validation = None
        if self.for_validation is not None:
            validation = self.for_validation.test_of(i)
        return Client(self.names[i], self.train[i], self.test_of(i), validation)


def train_sizes(clients: Sequence[Client]) -> np.ndarray:
    """int64 [M]: training rows of each client."""
    if isinstance(clients, ClientTable):
        return clients.train_sizes
    sizes = (len(c.train) for c in clients)
    return np.fromiter(sizes, np.int64, len(clients))


def train_rows_of(clients: Sequence[Client], which: Sequence[int]) -> np.ndarray:
    """int64: the training rows of some clients, one client after the other."""
    if isinstance(clients, ClientTable):
        return clients.train.take(np.asarray(which, np.int64)).rows
    return all_train_rows([clients[c] for c in which])


def names_of(clients: Sequence[Client]) -> Sequence[str]:
    """The name of each client, in client order."""
    if isinstance(clients, ClientTable):
        return clients.names
    return [c.name for c in clients]


def sorted_by_name(names: Sequence[str], clients: np.ndarray) -> np.ndarray:
    """int64: clients, given by ascending numbers, in the order of their names."""
    if isinstance(names, NumberedNames):
        return clients  # numbered names have the order of the numbers
    return np.array(sorted(clients.tolist(), key=names.__getitem__), np.int64)


def all_train_rows(clients: Sequence[Client]) -> np.ndarray:
    """int64: the training rows of all clients, one client after the other."""
    if isinstance(clients, ClientTable):
        return clients.train.rows
    lists = [np.asarray(c.train, np.int64) for c in clients]
    return np.concatenate([np.empty(0, np.int64), *lists])


# Matched test rows: the test rows of each client as a rule, from which a list is made on access.
#
# A client takes the first rows of each of its classes, in one random order that all clients share.
# So a client is stored as a few pairs of class and number, while its list can be most of the test
# rows.


class MatchedLists(LazySequence[np.ndarray]):
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
    def of(
        cls, candidates: np.ndarray, label: np.ndarray, rng: np.random.Generator, train: RowLists
    ) -> MatchedLists:
        """For every client the largest set of test rows with the class shares of its training rows.

        For a client with n_k training rows of class k, and a_k candidates, the set has ceil(n_k min_j(a_j / n_j)) rows
        of class k, where j are the client's classes that have candidates. So all candidates of its scarcest class are
        used, and this limits all other classes. Clients may share test rows. A client without a candidate of its
        classes gets no row.

        Args:
            candidates: int64 [T] test rows.
            label: [N] of all rows.
            rng: of the order of the candidates, which is the same for all clients.
            train: the clients' training rows.
        """
        shuffled = rng.permutation(candidates)
        order = shuffled[np.argsort(label[shuffled], kind="stable")]
        tested, begins = np.unique(label[order], return_index=True)  # classes with test rows
        starts = np.append(begins, len(order))
        # Every pair (client, class) of a training row whose class has test rows, as one number; then each pair once.
        place = np.searchsorted(tested, label[train.rows])
        is_tested = tested[np.minimum(place, len(tested) - 1)] == label[train.rows]
        pairs = train.owner[is_tested].astype(np.int64) * len(tested) + place[is_tested]
        pairs.sort()
        first = np.flatnonzero(np.diff(pairs, prepend=-1))
        counts = np.diff(first, append=len(pairs))
        client, of_class = np.divmod(pairs[first], len(tested))
        classes = RowLists.of_sizes(of_class, np.bincount(client, minlength=len(train)))
        # For each client, the class with the fewest candidates per training row limits all of its classes.
        available = np.diff(starts)[of_class]
        ratio = available / counts
        has_class = classes.sizes > 0
        sizes = classes.sizes[has_class]
        least = np.minimum.reduceat(ratio, classes.ends[:-1][has_class])
        scarcest = np.flatnonzero(ratio == np.repeat(least, sizes))
        is_first = np.diff(client[scarcest], prepend=-1) > 0
        scarcest = scarcest[is_first]
        # ceil(n_k a_j / n_j) in integers, with j the scarcest class of the client.
        a_j = np.repeat(available[scarcest], sizes)
        n_j = np.repeat(counts[scarcest], sizes)
        taken = -(-counts * a_j // n_j)
        return cls(order, starts, classes, taken)

    @classmethod
    def alike(cls, rows: np.ndarray, clients: int) -> MatchedLists:
        """The same ``rows`` for each of M clients, stored as one class."""
        classes = RowLists.of_sizes(np.zeros(clients, np.int64), np.ones(clients, np.int64))
        starts = np.array([0, len(rows)])
        taken = np.full(clients, len(rows))
        return cls(np.sort(rows), starts, classes, taken)

    @cached_property
    def sizes(self) -> np.ndarray:
        """int64 [M]: number of rows of each list."""
        before = np.concatenate([[0], np.cumsum(self.taken)])
        return np.diff(before[self.classes.ends])

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
        """The lists as text, as ``RowLists.words``."""
        return self.together(start, stop).words(0, stop - start)

    def take(self, order: np.ndarray) -> MatchedLists:
        """The lists at these places, in that order."""
        classes = self.classes.take(order)
        places = ranges(self.classes.ends[:-1][order], classes.sizes)
        return MatchedLists(self.order, self.starts, classes, self.taken[places])

    def _rows(self, classes: np.ndarray, taken: np.ndarray) -> np.ndarray:
        """The first ``taken`` rows of each of ``classes``, one class after the other."""
        places = ranges(self.starts[classes], taken)
        found: np.ndarray = self.order[places]
        return found

    def shares_right(self, rows: np.ndarray, right: np.ndarray) -> np.ndarray:
        """As ``RowLists.shares_right``; the time of a list depends on its classes, not on its rows."""
        value = np.full(len(self.order), np.nan)
        used = np.isin(self.order, rows)
        value[used] = right[np.searchsorted(rows, self.order[used])]
        known = ~np.isnan(value)
        begin = self.starts[self.classes.rows]
        end = begin + self.taken
        owner = self.classes.owner
        sums = []
        for each in (np.where(known, value, 0.0), known.astype(np.float64)):
            # The difference of two cumulative sums is the sum over the taken rows of a class.
            total = np.concatenate([[0.0], np.cumsum(each)])
            of_class = total[end] - total[begin]
            sums.append(np.bincount(owner, of_class, minlength=len(self)))
        return share_of_ones(*sums)

    def __len__(self) -> int:
        return len(self.classes)

    def at(self, i: int) -> np.ndarray:
        """List ``i``, made again at every call."""
        return self.together(i, i + 1).rows


TestLists = RowLists | MatchedLists
"""Own test rows of all clients, as lists or as a rule."""
