"""Partitions that somebody brings: the client of each row, or the rows of each client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedcache.errors import UsageError
from fedcache.federate.partition.client_table import Client
from fedcache.federate.partition.partition import Partition, make
from fedcache.federate.partition.row_lists import is_among, sorted_once
from fedcache.federate.partition.rows import TEST, TRAIN, Columns
from fedcache.store.groups import Group

NAME = "given"
COLUMN = "client"
"""What messages and the partition's name call the clients that were brought."""


def of_ids(columns: Columns, ids: Any, *, seed: int = 0, **arguments: object) -> Partition:
    """A client for each distinct value of ``ids`` [N]; a row with an empty one, None or NaN is nobody's.

    ``arguments`` are those of the scheme ``natural``: ``tests``, ``min_rows``, ``max_clients`` and so on. Raises
    UsageError for another number of values than rows.
    """
    group = ids if isinstance(ids, Group) else Group.of(ids)
    if len(group.codes) != len(columns.label):
        raise UsageError(
            f"{len(group.codes):,} clients are given for the {len(columns.label):,} rows of the store.",
            "Give one for each row, in the order of Store.samples.name; None for a row that nobody holds.",
        )
    if arguments.pop("by", COLUMN) != COLUMN:
        raise UsageError("A column (by) and the clients themselves are both given.", "Give one of them.")

    def groups(_name: str) -> Group:
        return group

    return make("natural", replace(columns, groups=groups), seed=seed, by=COLUMN, **arguments)


def of_splits(columns: Columns, ids: Group, split: np.ndarray) -> Partition:
    """A client for each value of ``ids``, which trains and tests on the rows that ``split`` [N] says (0 train, 1 test).

    Raises UsageError for a client that has no row of either.
    """
    usable = (ids.codes >= 0) & columns.ok.astype(bool)
    of = [np.flatnonzero(usable & (split == code)) for code in (TRAIN, TEST)]
    owned = [_by_client(ids, rows) for rows in of]
    clients = {word: (owned[0][i], owned[1][i]) for i, word in enumerate(ids.words)}
    lacking = [name for name, (train, test) in clients.items() if not len(train) or not len(test)]
    if lacking:
        train, test = clients[lacking[0]]
        raise UsageError(
            f"Client {lacking[0]!r} has {len(train)} rows to train and {len(test)} to test on ({len(lacking)} of "
            f"{len(clients)} clients lack one of them).",
            "Give every client both, or leave the split out: each then holds a fifth out.",
        )
    return of_rows(columns, clients)


def _by_client(ids: Group, rows: np.ndarray) -> list[np.ndarray]:
    order = rows[np.argsort(ids.codes[rows], kind="stable")]
    return np.split(order, np.cumsum(np.bincount(ids.codes[rows], minlength=len(ids.words)))[:-1])


def of_rows(columns: Columns, clients: Mapping[str, Any]) -> Partition:
    """Clients with the rows that are given.

    Args:
        columns: of the dataset.
        clients: name -> training rows, or (training rows, test rows), or {"train": .., "test": ..}. Clients without
            test rows of their own are tested on the rows of the test split that nobody trains on.

    Raises:
        UsageError for rows that are not there, or that two clients hold, or that are trained and tested on.
    """
    if not clients:
        raise UsageError("No client is given.", 'For example {"north": [0, 1, 2], "south": [3, 4]}')
    rows = len(columns.label)
    train, tests, notes = {}, {}, []
    for name, held in clients.items():
        own, tested = _parts(str(name), held)
        train[str(name)] = _rows(str(name), own, rows)
        tests[str(name)] = None if tested is None else _rows(str(name), tested, rows)
    ok = columns.ok.astype(bool)
    trained = np.concatenate(list(train.values()))
    if len(sorted_once(trained)) < len(trained):
        values, counts = np.unique(trained, return_counts=True)
        row = int(values[counts > 1][0])
        both = [name for name, own in train.items() if row in own]
        raise UsageError(
            f"Row {row} is given to {' and '.join(map(repr, both[:2]))} ({int((counts > 1).sum()):,} such rows).",
            "Give each training row to one client.",
        )
    if lost := int((~ok[trained]).sum()):
        notes.append(f"{lost:,} of {len(trained):,} rows are unreadable or gone (ok = 0) and left out")
    left = np.flatnonzero(ok & (columns.split == TEST))
    common = left[~is_among(left, trained)]
    chosen = [t for t in tests.values() if t is not None]
    if len(chosen) == len(tests):
        common = sorted_once(np.concatenate(chosen))
        common = common[ok[common]]
    made = [
        Client(name, own[ok[own]], common if (tested := tests[name]) is None else tested[ok[tested]])
        for name, own in train.items()
    ]
    known = int(ok.sum())
    held = np.zeros(rows, bool)
    held[trained] = True
    held[common] = True
    return Partition(
        scheme=NAME, args={}, seed=0, clients=made, test=common, dataset=columns.digest, pool=known,
        dropped=int((ok & ~held).sum()), notes=tuple(notes),
    )  # fmt: skip


def _parts(name: str, held: Any) -> tuple[Any, Any]:
    """Training and test rows of one client; None where no test rows are given."""
    if isinstance(held, Mapping):
        if "train" not in held or not set(held) <= {"train", "test"}:
            raise UsageError(
                f"Client {name!r} is given {', '.join(map(str, held)) or 'nothing'}.",
                'Expected "train", and "test" as wanted.',
            )
        return held["train"], held.get("test")
    if isinstance(held, tuple) and len(held) == 2 and not any(isinstance(part, int | np.integer) for part in held):
        return held
    return held, None


def _rows(name: str, rows: Sequence[int] | np.ndarray, count: int) -> np.ndarray:
    """Row numbers or a mask, as int64 in ascending order. Raises UsageError for what is neither."""
    found = np.asarray(rows)
    if found.dtype == bool and found.shape == (count,):
        found = np.flatnonzero(found)
    if found.ndim != 1 or not len(found) or found.dtype.kind not in "iu":
        raise UsageError(
            f"The rows of client {name!r} are {found.dtype} with shape {found.shape}.",
            f"Give row numbers from 0 to {count - 1}, at least one, or {count} truth values.",
        )
    if int(found.min()) < 0 or int(found.max()) >= count:
        raise UsageError(
            f"Client {name!r} is given row {int(found.max() if found.max() >= count else found.min())}.",
            f"The store has rows 0 to {count - 1}.",
        )
    ascending = sorted_once(found.astype(np.int64))
    if len(ascending) < len(found):
        raise UsageError(f"Client {name!r} is given a row twice.", "Give each row once.")
    return ascending
