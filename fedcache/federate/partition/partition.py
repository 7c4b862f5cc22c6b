"""Partitions: which rows of a store each client holds.

A partition is made once and saved, so that two methods are compared on the same clients. Rows are indices into the
store, never copies of features; a partition file can be shared without the data. Its digest covers every word of it,
so it covers scheme, arguments, seed, the dataset's digest and all row lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.errors import FedcacheError, StoreError, UsageError, unknown
from fedcache.federate.partition import json_file
from fedcache.federate.partition.rows import TEST, TRAIN, Columns, Dealt, Streams, make_pool, matched
from fedcache.federate.partition.scheme import Argument, InfeasibleError, Scheme, Value, checked_seed
from fedcache.federate.partition.schemes import SCHEMES
from fedcache.notebooks import html_table
from fedcache.store.files import canonical_json, digest_of, write_atomic

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


@dataclass(frozen=True, eq=False)
class Client:
    """One client's rows of the store."""

    name: str  # a domain, or ``client-07``
    train: np.ndarray  # int64, ascending
    test: np.ndarray  # int64, ascending; the rows a personalised evaluation of this client uses


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
        clients: in client order.
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
    clients: tuple[Client, ...]
    test: np.ndarray
    dataset: str
    pool: int
    dropped: int
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if problem := _problem(self):
            raise UsageError(f"Not a partition: {problem}.", "Make one from a scheme: fedcache partition --help")

    @cached_property
    def digest(self) -> str:
        """sha256 of the canonical payload without its ``digest``."""
        return digest_of(self._content())

    @property
    def test_protocol(self) -> str:
        """matched or balanced: whose class shares the clients are tested on."""
        return str(self.args.get("test_protocol", "balanced"))

    def to_payload(self) -> dict[str, Any]:
        """The content of a partition file, plain JSON values."""
        return {**self._content(), "digest": self.digest}

    def _content(self) -> dict[str, Any]:
        """Everything but the digest, as ``json_file`` describes it."""
        return {
            "schema": json_file.SCHEMA,
            "scheme": self.scheme,
            "args": {k: list(v) if isinstance(v, tuple) else v for k, v in self.args.items()},
            "seed": self.seed,
            "dataset": self.dataset,
            "clients": [
                {
                    "name": client.name,
                    "train": client.train.tolist(),
                    "test": None if np.array_equal(client.test, self.test) else client.test.tolist(),
                }
                for client in self.clients
            ],
            "test": self.test.tolist(),
            "pool": self.pool,
            "dropped": self.dropped,
            "notes": list(self.notes),
        }

    def save(self, path: Path) -> None:
        """Write the partition file, whole or not at all."""
        write_atomic(path, canonical_json(self.to_payload()), b"\n")

    def to_dict(self) -> dict[str, Any]:
        """The same as ``to_payload``."""
        return self.to_payload()

    def __repr__(self) -> str:
        return f"Partition({self.summary()})"

    def _repr_html_(self) -> str:
        rows = [(c.name, len(c.train), len(c.test)) for c in self.clients]
        return html_table(self.summary(), ("client", "training rows", "test rows"), rows)

    def default_name(self) -> str:
        """A file name that shows scheme, the arguments that matter and the seed: ``dirichlet-a0.1-m100-s0``."""
        scheme = SCHEMES.get(self.scheme)
        return scheme.default_name(self.args, self.seed) if scheme else f"{self.scheme}-{self.digest[:8]}"

    def counts(self, columns: Columns) -> np.ndarray:
        """Training rows of each client and class, int64 [M, C]; rows without a label are not counted."""
        label = columns.label
        classes = len(columns.classes)
        return np.stack([np.bincount(label[c.train][label[c.train] >= 0], minlength=classes) for c in self.clients])

    def describe(self, columns: Columns) -> list[ClientRow]:
        """One line per client: rows, test rows, classes owned, rows of each class."""
        return [
            ClientRow(client.name, len(client.train), len(client.test), int((count > 0).sum()), tuple(count.tolist()))
            for client, count in zip(self.clients, self.counts(columns), strict=True)
        ]

    def summary(self) -> str:
        """One line for a person."""
        sizes = [len(client.train) for client in self.clients]
        return (
            f"{self.scheme}, seed {self.seed}: {len(sizes)} clients with {min(sizes)} to {max(sizes)} training rows, "
            f"{sum(sizes)} in all; {self.dropped} of {self.pool} rows left out; {self.test_protocol} tests, "
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
    train = [np.sort(rows) for rows in dealt.train]
    test = np.setdiff1d(pool.test, np.concatenate(train))  # label shift may train on the test split
    notes = [*pool.notes, *dealt.notes]
    if not len(test) and dealt.test is not None and any(len(rows) for rows in dealt.test):
        test = np.unique(np.concatenate(dealt.test))
        notes.append("no test split: the global test rows are those of all clients together")
    if not len(test):
        raise UsageError(
            f"Scheme {scheme} needs rows of split test with ok = 1 to score with, but the chosen domains have none.",
            f"Give the dataset a test split, or cut test rows out of each client: {SCHEMES['label-shift'].command({})}",
        )
    tests = [np.sort(rows) for rows in _tests(dealt, test, train, columns, streams, values)]
    names = dealt.names or [f"client-{i:0{len(str(len(train) - 1))}d}" for i in range(len(train))]
    if bare := [name for name, rows in zip(names, tests, strict=True) if not len(rows)]:
        raise UsageError(
            f"Scheme {scheme}: no test row has a class of client {bare[0]!r} ({len(bare)} of {len(names)} clients are "
            "left without test rows).",
            "Test every client on balanced rows instead: --option test_protocol=balanced",
        )
    return Partition(
        scheme=scheme,
        args=values,
        seed=seed,
        clients=tuple(Client(*parts) for parts in zip(names, train, tests, strict=True)),
        test=test,
        dataset=columns.digest,
        notes=(*notes, *_leaks(columns, train, tests, test)),
        pool=len(pool.dealt),
        dropped=len(np.setdiff1d(pool.dealt, np.concatenate([*train, *tests]))),
    )


def _tests(
    dealt: Dealt,
    test: np.ndarray,
    train: Sequence[np.ndarray],
    columns: Columns,
    streams: Streams,
    values: Mapping[str, Value],
) -> Sequence[np.ndarray]:
    """The clients' test rows: those the scheme chose, or by ``test_protocol`` from the global ones."""
    if dealt.test is not None:
        return dealt.test
    if values.get("test_protocol") == "matched":
        return [matched(rows, test, columns.label, streams("test")) for rows in train]
    return [test] * len(train)


def _leaks(columns: Columns, train: Sequence[np.ndarray], tests: Sequence[np.ndarray], test: np.ndarray) -> list[str]:
    """A note when an image is both trained and tested on under two names."""
    uid = columns.uid
    trained = {uid[row].tobytes() for row in np.concatenate(train)}
    tested = np.unique(np.concatenate([test, *tests]))
    twice = sum(uid[row].tobytes() in trained for row in tested)
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
    clients = tuple(Client(*parts) for parts in fields.pop("clients"))
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
    for where, held in (
        ("test", partition.test),
        *((f"client {c.name!r}", part) for c in clients for part in (c.train, c.test)),
    ):
        if rows is not None and len(held) and held[-1] >= rows:
            raise json_file.corrupt(origin, f"{where} holds {held[-1]}, expected rows from 0 to {rows - 1}")
    return partition


def _problem(partition: Partition) -> str | None:
    """What makes these row lists no partition, in words; None when nothing does."""
    clients = partition.clients
    if not clients:
        return "it has no clients"
    names = [client.name for client in clients]
    if len(set(names)) < len(names):
        return f"{len(names)} clients have {len(set(names))} names"
    trains, tests = [], [("the global test rows", partition.test)]
    for client in clients:
        if not len(client.train) or not len(client.test):
            return f"client {client.name!r} has {len(client.train)} training and {len(client.test)} test rows"
        trains.append((f"training rows of {client.name!r}", client.train))
        if client.test is not partition.test:  # most clients are tested on the very same array: check it once
            tests.append((f"test rows of {client.name!r}", client.test))
    for what, rows in [*trains, *tests]:
        if rows.dtype != np.int64 or rows.ndim != 1:
            return f"{what} are {rows.dtype} with {rows.ndim} axes, expected int64 with 1"
        if len(rows) and (rows[0] < 0 or (np.diff(rows) <= 0).any()):
            return f"{what} are not ascending and non-negative"
    trained = np.unique(np.concatenate([rows for _, rows in trains]))
    both = trained[np.isin(trained, np.concatenate([rows for _, rows in tests]))]
    return f"row {both[0]} is trained and tested on ({len(both)} such rows)" if len(both) else None
