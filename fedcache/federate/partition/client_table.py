"""Client table: the clients of a partition as arrays; the object of a single client is made on access."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, overload

import numpy as np

from fedcache.federate.partition.matched_lists import MatchedLists, TestLists
from fedcache.federate.partition.row_lists import NumberedNames, RowLists, sorted_once


class ClientRows(Protocol):
    """Which rows a client holds; ``Client`` is one."""

    @property
    def name(self) -> str:
        """Unique name; the key of the client's random streams."""

    @property
    def train(self) -> np.ndarray:
        """int64 rows it trains on."""

    @property
    def test(self) -> np.ndarray:
        """int64 rows its deployed model is scored on."""


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
    # of each of the M clients, some of them empty; None if all clients share all of them
    own: RowLists | None

    @classmethod
    def of_clients(cls, own: RowLists) -> Validation:
        """Validation rows that belong to clients."""
        return cls(own.distinct, own)


@dataclass(frozen=True, eq=False)
class ClientTable(Sequence[Client]):
    """The clients of a partition, in client order.

    Args:
        names: of the M clients; ``NumberedNames`` for numbered ones.
        train: M lists of training rows.
        common: int64 [T]: the global test rows.
        shares: bool [M]: whether a client is tested on exactly these.
        tests: M lists of test rows; lists of clients that share the global rows are not read.
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
        cls, clients: Sequence[ClientRows], common: np.ndarray, validation: Validation | None = None
    ) -> ClientTable:
        """The table of single clients; those tested on the rows of ``common`` share it."""
        if isinstance(clients, ClientTable) and clients.common is common:
            return clients
        return cls.dealt(
            NumberedNames.recognise([c.name for c in clients]),
            RowLists.of([c.train for c in clients]),
            common,
            [c.test for c in clients],
            validation,
        )

    @classmethod
    def tests_only(cls, clients: Sequence[ClientRows]) -> ClientTable:
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
            return cls(names, train, common, np.ones(len(train), bool), none, validation)
        if isinstance(tests, MatchedLists):
            # If the rule chooses from the global rows, a list of their number has all of them.
            same = np.array_equal(np.sort(tests.order), common)
            return cls(names, train, common, same & (tests.sizes == len(common)), tests, validation)
        shares = np.fromiter(
            (t is common or np.array_equal(t, common) for t in tests), bool, len(train)
        )
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
        sizes: np.ndarray = np.where(self.shares, len(self.common), self.tests.sizes)
        return sizes

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
        return ClientTable(self.names, self.train, held.rows, np.zeros(len(self), bool), held.own)

    def without_validation(self) -> ClientTable:
        """The same clients with their own validation rows back among the training rows."""
        held = self.validation
        if held is None or held.own is None:
            return replace(self, validation=None)
        of = np.concatenate([self.train.owner, held.own.owner])
        rows = np.concatenate([self.train.rows, held.own.rows])[np.argsort(of, kind="stable")]
        train = RowLists.of_sizes(rows, self.train.sizes + held.own.sizes).ascending()
        return replace(self, train=train, validation=None)

    def __len__(self) -> int:
        return len(self.train)

    @overload
    def __getitem__(self, i: int) -> Client: ...
    @overload
    def __getitem__(self, i: slice) -> tuple[Client, ...]: ...
    def __getitem__(self, i: int | slice) -> Client | tuple[Client, ...]:
        if isinstance(i, slice):
            return tuple(self[k] for k in range(*i.indices(len(self))))
        validation = None
        if self.for_validation is not None:
            validation = self.for_validation.test_of(i)
        return Client(self.names[i], self.train[i], self.test_of(i), validation)

    def __iter__(self) -> Iterator[Client]:
        return (self[i] for i in range(len(self)))


def train_sizes(clients: Sequence[ClientRows]) -> np.ndarray:
    """int64 [M]: training rows of each client."""
    if isinstance(clients, ClientTable):
        return clients.train_sizes
    return np.fromiter((len(c.train) for c in clients), np.int64, len(clients))


def train_rows_of(clients: Sequence[ClientRows], which: Sequence[int]) -> np.ndarray:
    """int64: the training rows of some clients, one client after the other."""
    if isinstance(clients, ClientTable):
        return clients.train.take(np.asarray(which, np.int64)).rows
    return all_train_rows([clients[c] for c in which])


def names_of(clients: Sequence[ClientRows]) -> Sequence[str]:
    """The name of each client, in client order."""
    if isinstance(clients, ClientTable):
        return clients.names
    return [c.name for c in clients]


def all_train_rows(clients: Sequence[ClientRows]) -> np.ndarray:
    """int64: the training rows of all clients, one client after the other."""
    if isinstance(clients, ClientTable):
        return clients.train.rows
    return np.concatenate(
        [np.empty(0, np.int64), *(np.asarray(c.train, np.int64) for c in clients)]
    )
