"""Partitions: which rows of a store each client holds.

A partition is made once and saved, so that two methods are compared on the same clients. Rows are indices into the
store, never copies of features; a partition file can be shared without the data. Its digest covers every word of it,
so it covers scheme, arguments, seed, the dataset's digest and all row lists. Clients are arrays (``client_table``):
nothing here costs clients times rows, and no object exists for a client before it is asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.errors import FedcacheError, StoreError, UsageError, unknown
from fedcache.federate.partition import json_file
from fedcache.federate.partition.client_table import Client, ClientTable
from fedcache.federate.partition.row_lists import NumberedNames, RowLists, is_among, sorted_once
from fedcache.federate.partition.rows import TEST, TRAIN, Columns, Dealt, MatchedTests, Streams, make_pool
from fedcache.federate.partition.scheme import Argument, InfeasibleError, Scheme, Value, checked_seed
from fedcache.federate.partition.schemes import SCHEMES
from fedcache.notebooks import html_table
from fedcache.store.files import canonical_json, write_atomic

PART = 1 << 14
"""Clients, or rows of one list, that are written at once."""

SHOWN = 1000
"""Clients of a table in a notebook."""

__all__ = [
    "SCHEMES",
    "Argument",
    "Client",
    "ClientRow",
    "Columns",
    "InfeasibleError",
    "Partition",
    "Scheme",
    "from_payload",
    "load",
    "make",
]


@dataclass(frozen=True)
class ClientRow:
    """One line of the table that ``describe`` makes; ``counts`` are training rows of each class."""

    client: str
    train: int
    test: int
    classes: int
    counts: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Partition:
    """Rows of every client, and how they came about.

    Args:
        scheme: how the rows were dealt.
        args: every argument of the scheme, defaults included.
        seed: of the draws.
        clients: in client order; kept as a ``ClientTable``.
        test: int64, ascending; the rows a global evaluation uses. A client may be tested on exactly these.
        dataset: digest of the dataset's content.
        pool: how many rows could have been dealt.
        dropped: how many of those no client holds.
        notes: what a reader should know, in words.

    Raises:
        FedcacheError: usage error when clients are missing, empty or share a name, when a row list is not ascending
            and non-negative, or when a training row of one client is a test row of any.
    """

    scheme: str
    args: Mapping[str, Value]
    seed: int
    clients: Sequence[Client]
    test: np.ndarray
    dataset: str
    pool: int
    dropped: int
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if problem := _not_rows(self.clients, self.test) or _problem(self.table, self.test):
            raise UsageError(f"Not a partition: {problem}.", "Make one from a scheme: fedcache partition --help")
        object.__setattr__(self, "clients", self.table)

    @cached_property
    def table(self) -> ClientTable:
        """The clients as arrays."""
        return ClientTable.of(self.clients, self.test)

    @cached_property
    def digest(self) -> str:
        """sha256 of the canonical payload without its ``digest``."""
        digest = hashlib.sha256()
        for part in self._canonical():
            digest.update(part)
        return digest.hexdigest()

    @property
    def test_protocol(self) -> str:
        """matched or balanced: whose class shares the clients are tested on."""
        return str(self.args.get("test_protocol", "balanced"))

    def to_payload(self) -> dict[str, Any]:
        """The content of a partition file, plain JSON values."""
        t = self.table
        clients = [
            {"name": name, "train": train.tolist(), "test": None if shared else test.tolist()}
            for name, train, shared, test in zip(t.names, t.train, t.shares.tolist(), t.tests, strict=True)
        ]
        return {**self._words(), "clients": clients, "test": self.test.tolist(), "digest": self.digest}

    def _words(self) -> dict[str, Any]:
        """Everything but row lists and digest, as ``json_file`` describes it."""
        return {
            "schema": json_file.SCHEMA,
            "scheme": self.scheme,
            "args": {k: list(v) if isinstance(v, tuple) else v for k, v in self.args.items()},
            "seed": self.seed,
            "dataset": self.dataset,
            "pool": self.pool,
            "dropped": self.dropped,
            "notes": list(self.notes),
        }

    def _canonical(self, digest: str | None = None) -> Iterator[bytes]:
        """The canonical JSON of the content, and of ``digest`` where it is given, in parts of bounded size."""
        words = {name: canonical_json(value) for name, value in self._words().items()}
        words |= {} if digest is None else {"digest": canonical_json(digest)}
        for place, name in enumerate(sorted([*words, "clients", "test"])):
            yield f'{"," if place else "{"}"{name}":'.encode()
            if name == "clients":
                yield from _clients_json(self.table)
            elif name == "test":
                yield from _rows_json(self.test)
            else:
                yield words[name]
        yield b"}"

    def save(self, path: Path) -> None:
        """Write the partition file, whole or not at all."""
        write_atomic(path, b"".join(self._canonical(self.digest)), b"\n")

    def to_dict(self) -> dict[str, Any]:
        """The same as ``to_payload``."""
        return self.to_payload()

    def __repr__(self) -> str:
        return f"Partition({self.summary()})"

    def _repr_html_(self) -> str:
        rows = [(c.name, len(c.train), len(c.test)) for c in self.table[:SHOWN]]
        return html_table(self.summary(), ("client", "training rows", "test rows"), rows)

    def default_name(self) -> str:
        """A file name that shows scheme, the arguments that matter and the seed: ``dirichlet-a0.1-m100-s0``."""
        scheme = SCHEMES.get(self.scheme)
        return scheme.default_name(self.args, self.seed) if scheme else f"{self.scheme}-{self.digest[:8]}"

    def counts(self, columns: Columns) -> np.ndarray:
        """Training rows of each client and class, int64 [M, C]; rows without a label are not counted."""
        train, classes = self.table.train, len(columns.classes)
        label = columns.label[train.rows]
        place = train.owner.astype(np.int64)[label >= 0] * classes + label[label >= 0]
        return np.bincount(place, minlength=len(train) * classes).reshape(len(train), classes)

    def describe(self, columns: Columns) -> list[ClientRow]:
        """One line per client: rows, test rows, classes owned, rows of each class."""
        t, counts = self.table, self.counts(columns)
        sizes = zip(t.names, t.train_sizes.tolist(), t.test_sizes.tolist(), (counts > 0).sum(1).tolist(), strict=True)
        return [ClientRow(*each, tuple(count)) for each, count in zip(sizes, counts.tolist(), strict=True)]

    def summary(self) -> str:
        """One line for a person."""
        sizes = self.table.train_sizes
        return (
            f"{self.scheme}, seed {self.seed}: {len(sizes)} clients with {sizes.min()} to {sizes.max()} training rows, "
            f"{sizes.sum()} in all; {self.dropped} of {self.pool} rows left out; {self.test_protocol} tests, "
            f"{len(self.test)} global test rows"
        )


def make(scheme: str, columns: Columns, *, seed: int = 0, **args: object) -> Partition:
    """Deal the rows of a dataset to clients.

    Only rows with ok = 1 are dealt, never those of the validation split. Equal arguments give equal partitions.

    Args:
        scheme: a key of ``SCHEMES``.
        columns: of the dataset.
        seed: 0 to 2**63 - 1.
        args: arguments of the scheme, see ``SCHEMES[scheme].arguments``; None means the default.

    Raises:
        FedcacheError: usage error for an unknown scheme or argument, a value out of range, or a dataset without the
            labels, domains or splits the scheme needs.
        InfeasibleError: the arguments cannot be met by these rows; the error carries arguments that can.
    """
    if scheme not in SCHEMES:
        raise unknown("partition scheme", scheme, SCHEMES)
    how = SCHEMES[scheme]
    values = how.resolve(args)
    seed = checked_seed(seed)
    streams = Streams(seed, scheme)
    domain = values["domain"]
    assert domain is None or isinstance(domain, tuple)
    split = TEST if values.get("pool") == "test" else TRAIN
    pool = make_pool(columns, domain, split=split, needs_labels=how.needs_labels, scheme=scheme)
    dealt = how.deal(pool, values, streams)
    train = RowLists.of(dealt.train).ascending()
    trained = np.zeros(len(columns.label), bool)
    trained[train.rows] = True
    test = pool.test[~trained[pool.test]]  # label shift may train on the test split
    notes = [*pool.notes, *dealt.notes]
    if not len(test) and dealt.test is not None and any(len(rows) for rows in dealt.test):
        test = sorted_once(np.concatenate(dealt.test))
        notes.append("no test split: the global test rows are those of all clients together")
    if not len(test):
        raise UsageError(
            f"Scheme {scheme} needs rows of split test with ok = 1 to score with, but the chosen domains have none.",
            f"Give the dataset a test split, or cut test rows out of each client: {SCHEMES['label-shift'].command({})}",
        )
    names = dealt.names or NumberedNames(len(train))
    clients = ClientTable.dealt(names, train, test, _tests(dealt, test, train, columns, streams, values))
    if len(bare := np.flatnonzero(clients.test_sizes == 0)):
        raise UsageError(
            f"Scheme {scheme}: no test row has a class of client {names[int(bare[0])]!r} ({len(bare)} of {len(names)} "
            "clients are left without test rows).",
            "Test every client on balanced rows instead: --option test_protocol=balanced",
        )
    held = trained
    held[clients.tests.rows] = True
    held[test] |= bool(clients.shares.any())
    return Partition(
        scheme=scheme,
        args=values,
        seed=seed,
        clients=clients,
        test=test,
        dataset=columns.digest,
        notes=(*notes, *_leaks(columns, train.rows, clients.tested)),
        pool=len(pool.dealt),
        dropped=int((~held[pool.dealt]).sum()),
    )


def _tests(
    dealt: Dealt, test: np.ndarray, train: RowLists, columns: Columns, streams: Streams, values: Mapping[str, Value]
) -> Sequence[np.ndarray] | None:
    """The clients' test rows: those the scheme chose, or by ``test_protocol`` from the global ones; None for these."""
    if dealt.test is not None:
        return RowLists.of(dealt.test).ascending()
    if values.get("test_protocol") == "matched":
        matched = MatchedTests(test, columns.label, streams("test"))
        return RowLists.of([matched.of(rows) for rows in train]).ascending()
    return None


def _leaks(columns: Columns, trained: np.ndarray, tested: np.ndarray) -> list[str]:
    """A note when an image is both trained and tested on under two names.

    Identities are compared by their first half, and in full where that agrees.
    """
    half = np.ascontiguousarray(columns.uid[:, :8]).view(np.uint64)[:, 0]
    alike = is_among(half[tested], half[trained])
    if not alike.any():
        return []
    near = {uid.tobytes() for uid in columns.uid[trained[is_among(half[trained], half[tested[alike]])]]}
    twice = sum(uid.tobytes() in near for uid in columns.uid[tested[alike]])
    return [f"{twice} of {len(tested)} test rows are the same image as a training row (equal bytes)"] if twice else []


def load(path: Path, *, dataset: str | None = None, rows: int | None = None) -> Partition:
    """Read a partition file.

    Args:
        path: of the file.
        dataset: digest the partition must be of; None skips the check.
        rows: rows of the store; every row of the partition must be below.

    Raises:
        FedcacheError: store error when the file is missing or of another dataset; corruption when it is not a
            partition file, its digest does not match its content, or it holds rows the store of its dataset has not.
    """
    return from_payload(json_file.read_json(path), dataset=dataset, rows=rows, origin=str(path))


def from_payload(
    payload: object, *, dataset: str | None = None, rows: int | None = None, origin: str = "partition"
) -> Partition:
    """The partition of a payload, as ``Partition.to_payload`` made it; arguments and errors as of ``load``."""
    fields = json_file.decode(payload, origin=origin)
    clients = [Client(*parts) for parts in fields.pop("clients")]
    digest = fields.pop("digest")
    try:
        partition = Partition(clients=clients, **fields)
    except FedcacheError as error:
        raise json_file.corrupt(origin, error.message) from error
    if partition.digest != digest:
        raise json_file.corrupt(origin, f"its content has digest {partition.digest[:12]}, it claims {digest[:12]}")
    if dataset is not None and partition.dataset != dataset:
        raise StoreError(
            f"{origin} was made for the dataset with digest {partition.dataset[:12]}, the store holds {dataset[:12]}.",
            "Make it again for this store: fedcache partition --help",
        )
    # Only now: a sound file of a larger dataset has rows beyond this store, and what is wrong is the dataset.
    if rows is not None and (beyond := _beyond(partition, rows)):
        raise json_file.corrupt(origin, f"{beyond}, expected rows from 0 to {rows - 1}")
    return partition


def _beyond(partition: Partition, rows: int) -> str | None:
    """The first list that holds a row from ``rows`` on, and that row, in words; None when none does."""
    t = partition.table
    if len(partition.test) and partition.test[-1] >= rows:
        return f"test holds {partition.test[-1]}"
    first = [(np.searchsorted(held.ends, np.flatnonzero(held.rows >= rows)[:1], "right"), held)
             for held in (t.train, t.tests)]  # fmt: skip
    found = [(int(place[0]) - 1, order, held) for order, (place, held) in enumerate(first) if len(place)]
    if not found:
        return None
    client, _, held = min(found, key=lambda one: one[:2])
    return f"client {t.names[client]!r} holds {held[client][-1]}"


def _not_rows(clients: Sequence[Client], test: np.ndarray) -> str | None:
    """What is no list of rows at all, in words; None when all are."""
    if not len(clients):
        return "it has no clients"
    if isinstance(clients, ClientTable):
        lists = [("training rows", clients.train.rows), ("the clients' test rows", clients.tests.rows)]
    else:
        lists = [(f"{what} rows of {c.name!r}", rows) for c in clients
                 for what, rows in (("training", c.train), ("test", c.test))]  # fmt: skip
    for what, rows in [*lists, ("the global test rows", test)]:
        if rows.dtype != np.int64 or rows.ndim != 1:
            return f"{what} are {rows.dtype} with {rows.ndim} axes, expected int64 with 1"
    return None


def _problem(table: ClientTable, test: np.ndarray) -> str | None:
    """What makes these row lists no partition, in words; None when nothing does."""
    names = table.names
    if not isinstance(names, NumberedNames) and len(set(names)) < len(names):
        return f"{len(names)} clients have {len(set(names))} names"
    sizes = np.stack([table.train_sizes, table.test_sizes], 1)
    if len(empty := np.flatnonzero((sizes == 0).any(1))):
        train, tested = sizes[empty[0]].tolist()
        return f"client {names[int(empty[0])]!r} has {train} training and {tested} test rows"
    for what, lists in (("training rows of {!r}", table.train), ("test rows of {!r}", table.tests)):
        if (client := _out_of_order(lists)) is not None:
            return f"{what.format(names[client])} are not ascending and non-negative"
    if _out_of_order(RowLists.of([test])) is not None:
        return "the global test rows are not ascending and non-negative"
    tested = table.tested
    both = tested[is_among(tested, table.train.rows)]
    return f"row {both[0]} is trained and tested on ({len(both)} such rows)" if len(both) else None


def _out_of_order(lists: RowLists) -> int | None:
    """The first list that is not ascending and non-negative, by its number."""
    wrong = np.diff(lists.rows, prepend=-1) <= 0
    starts = lists.ends[:-1][lists.sizes > 0]
    wrong[starts] = lists.rows[starts] < 0  # the difference there is to the list before
    return int(np.searchsorted(lists.ends, wrong.argmax(), "right")) - 1 if wrong.any() else None


def _rows_json(rows: np.ndarray) -> Iterator[bytes]:
    """Canonical JSON of one list of rows, in parts."""
    yield b"["
    for start in range(0, len(rows), PART):
        yield (b"," if start else b"") + ",".join(map(str, rows[start : start + PART].tolist())).encode()
    yield b"]"


def _clients_json(table: ClientTable) -> Iterator[bytes]:
    """Canonical JSON of the list of clients: name, test rows or null for the common ones, training rows of each."""
    plain = isinstance(table.names, NumberedNames)  # nothing in them needs an escape
    yield b"["
    for start in range(0, len(table), PART):
        stop, said = min(start + PART, len(table)), []
        train, test = (lists.words(start, stop) for lists in (table.train, table.tests))
        shares = table.shares[start:stop].tolist()
        for name, rows, shared, own in zip(table.names[start:stop], train, shares, test, strict=True):
            quoted = f'"{name}"' if plain else canonical_json(name).decode()
            said.append(f'{{"name":{quoted},"test":{"null" if shared else f"[{own}]"},"train":[{rows}]}}')
        yield (b"," if start else b"") + ",".join(said).encode()
    yield b"]"
