"""Given partitions: a user provides the client of each row, or the rows of each client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedcache.errors import UsageError
from fedcache.federate.partition.client_table import (
    Client,
    ClientTable,
    RowLists,
    Validation,
    is_among,
    sorted_once,
)
from fedcache.federate.partition.partition import Partition, make
from fedcache.federate.partition.scheme import (
    TEST,
    TRAIN,
    VALIDATION,
    VALIDATION_ARGUMENT,
    Columns,
    Value,
)
from fedcache.federate.partition.validation import with_validation
from fedcache.tables.groups import Group

NAME = "given"
PARTS = ("train", "test", "validation")
NO_ROWS = np.empty(0, np.int64)
COLUMN = "client"
"""Name that stands for a column in messages and in the partition's name."""


def of_ids(columns: Columns, ids: Any, *, seed: int = 0, **arguments: object) -> Partition:
    """A client for each distinct value of ``ids`` [N]; rows with an empty value, None or NaN have no client.

    ``arguments`` are those of the scheme ``natural``: ``tests``, ``min_rows``, ``max_clients`` and so on. Raises
    UsageError for another number of values than rows.
    """
    group = ids
    if not isinstance(group, Group):
        group = Group.of(ids)
    found = len(group.codes)
    rows = len(columns.label)
    if found != rows:
        raise UsageError(
            f"Expected a client for each of the {rows} rows of the store, but got {found} values.",
            "Give one client per row, in the order of Store.samples.name. Give None for a row without a client.",
        )
    if arguments.pop("by", COLUMN) != COLUMN:
        raise UsageError(
            "The clients are given twice: by a column (by) and as lists of rows.",
            "Give one of them.",
        )

    def groups(_name: str) -> Group:
        return group

    grouped = replace(columns, groups=groups)
    made = make("natural", grouped, seed=seed, by=COLUMN, **arguments)
    if "-1" not in group.words:
        return made
    rows = int((group.codes == group.words.index("-1")).sum())
    note = f"-1 is a client with {rows:,} rows, like any other value; None marks a row without a client"
    return replace(made, notes=(*made.notes, note))


def of_splits(
    columns: Columns, ids: Group, split: np.ndarray, validation: object = None
) -> Partition:
    """A client for each value of ``ids``, with the training rows (0) and test rows (1) of ``split`` [N].

    Rows of split 2 are validation rows; ``validation`` as in ``of_rows``. Raises UsageError for a client without
    training rows or without test rows.
    """
    usable = (ids.codes >= 0) & columns.ok.astype(bool)
    clients: dict[str, dict[str, np.ndarray]] = {word: {} for word in ids.words}
    for part, code in zip(PARTS, (TRAIN, TEST, VALIDATION), strict=True):
        rows = np.flatnonzero(usable & (split == code))
        lists = RowLists.by_owner(rows, ids.codes[rows], len(ids.words))
        for word, of_client in zip(ids.words, lists, strict=True):
            clients[word][part] = of_client
    for name, held in clients.items():
        train = len(held["train"])
        test = len(held["test"])
        if not train or not test:
            raise UsageError(
                f"Client {name!r} has {train} training rows and {test} test rows.",
                "Give every client training and test rows. Or leave out the split, so that each client holds out a "
                "fifth of its rows.",
            )
    return of_rows(columns, clients, validation)


def of_rows(columns: Columns, clients: Mapping[str, Any], validation: object = None) -> Partition:
    """Clients with the given rows.

    Args:
        columns: of the dataset.
        clients: name -> training rows, or (training rows, test rows), or {"train": .., "test": .., "validation": ..}.
            Clients without test rows of their own are tested on the rows of the test split that no client trains on.
        validation: share of the training rows that become validation rows, or ``split``; as in every scheme.

    Raises:
        UsageError for rows that do not exist, training rows of two clients, and rows with two uses (training, test,
            validation).
    """
    if not clients:
        raise UsageError(
            "No clients are given.", 'For example {"north": [0, 1, 2], "south": [3, 4]}'
        )
    rows = len(columns.label)
    train = {}
    tests: dict[str, np.ndarray | None] = {}
    notes = []
    validating = []  # validation rows of each client
    ok = columns.ok.astype(bool)
    for key, given in clients.items():
        name = str(key)
        training, tested, validated = _parts(name, given)
        train[name] = _rows(name, training, rows)
        tests[name] = None
        if tested is not None:
            tests[name] = _rows(name, tested, rows)
        checked = NO_ROWS
        # An empty list of validation rows is allowed; ``_rows`` refuses empty lists.
        if validated is not None and len(validated):
            checked = _rows(name, validated, rows)
        validating.append(checked[ok[checked]])
    if validation is not None and any(map(len, validating)):
        raise UsageError(
            "Validation rows are given twice: as rows of clients, and as a share or split.",
            "Give one of them.",
        )
    trained = np.concatenate(list(train.values()))
    if len(sorted_once(trained)) < len(trained):
        values, counts = np.unique(trained, return_counts=True)
        row = int(values[counts > 1][0])
        owners = [repr(name) for name, of_client in train.items() if row in of_client]
        both = " and ".join(owners)
        raise UsageError(
            f"Row {row} is assigned to {both}.",
            "Assign each training row to one client.",
        )
    lost = int((~ok[trained]).sum())
    if lost:
        notes.append(
            f"{lost:,} of {len(trained):,} rows are unreadable or removed (ok = 0) and left out"
        )
    readable = trained[ok[trained]]
    of_test = int((columns.split[readable] == TEST).sum())
    if of_test:
        rows_are = "rows of the test split are"
        if of_test == 1:
            rows_are = "row of the test split is"
        notes.append(f"{of_test:,} {rows_are} used for training, as given")
    test_split = np.flatnonzero(ok & (columns.split == TEST))
    used = np.concatenate([trained, *validating])
    common = test_split[~is_among(test_split, used)]
    # If every client has its own test rows, the global test rows are all of these.
    chosen = [t for t in tests.values() if t is not None]
    if len(chosen) == len(tests):
        common = sorted_once(np.concatenate(chosen))
        common = common[ok[common]]
    made = []
    for name, of_client in train.items():
        tested = tests[name]
        if tested is None:
            tested = common
        else:
            tested = tested[ok[tested]]
        made.append(Client(name, of_client[ok[of_client]], tested))
    in_use = np.zeros(rows, bool)
    for in_part in (used, common, *chosen):
        in_use[in_part] = True
    args: dict[str, Value] = {}
    table = ClientTable.of(made, common)
    if any(map(len, validating)):
        table = replace(table, validation=Validation.of_clients(RowLists.of(validating)))
    elif validation is not None:
        how = VALIDATION_ARGUMENT.check(validation)
        assert isinstance(how, float | str)
        args["validation"] = how
        domains = range(len(columns.domains))
        # No column makes these clients, so ``by`` is None.
        table = with_validation(table, how, columns, domains, None, per_client=False)
    return Partition(
        scheme=NAME,
        args=args,
        seed=0,
        clients=table,
        test=common,
        dataset=columns.digest,
        pool=int(ok.sum()),
        dropped=int((ok & ~in_use).sum()),
        notes=tuple(notes),
    )


def _parts(name: str, held: Any) -> tuple[Any, Any, Any]:
    """Training, test and validation rows of one client; None for test or validation rows that are not given."""
    if isinstance(held, Mapping):
        if "train" not in held or not set(held) <= set(PARTS):
            keys = ", ".join(map(str, held)) or "nothing"
            raise UsageError(
                f"The entry of client {name!r} has the keys {keys}.",
                'Expected "train", and optionally "test" and "validation".',
            )
        return held["train"], held.get("test"), held.get("validation")
    is_pair = isinstance(held, tuple) and len(held) == 2
    # A pair of numbers is two training rows, not two lists of rows.
    if is_pair and not any(isinstance(part, int | np.integer) for part in held):
        return (*held, None)
    return held, None, None


def _rows(name: str, rows: Sequence[int] | np.ndarray, count: int) -> np.ndarray:
    """Row numbers or a mask, as int64 in ascending order. Raises UsageError for any other value."""
    found = np.asarray(rows)
    if found.dtype == bool and found.shape == (count,):
        found = np.flatnonzero(found)
    if found.ndim == 1 and not len(found):
        raise UsageError(
            f"Client {name!r} has no rows.",
            "Leave the client out, or assign at least one row to it.",
        )
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise UsageError(
            f"The rows of client {name!r} are an array of {found.dtype} with shape {found.shape}.",
            f"Give one or more row numbers from 0 to {count - 1}, or {count} truth values, one for each row.",
        )
    outside = found[(found < 0) | (found >= count)]
    if len(outside):
        raise UsageError(
            f"Client {name!r} has row {outside[0]}, which does not exist.",
            f"The store has rows 0 to {count - 1}.",
        )
    ascending = sorted_once(found.astype(np.int64))
    if len(ascending) < len(found):
        raise UsageError(f"Client {name!r} has a row twice.", "List each row once.")
    return ascending
