"""Partitions that a user brings: a mapping, an array, a function or a CSV, on the rows of a store."""

from __future__ import annotations

import csv
import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.errors import UsageError, unknown
from fedcache.federate.partition.given import of_ids, of_rows, of_splits
from fedcache.federate.partition.partition import Partition
from fedcache.runs.partitions import columns_of, save_partition, typed_arguments
from fedcache.store.store import Store
from fedcache.tables.groups import Group

CSV = ".csv"
_FIRST_LINE = "Its first line should be: name,client   or: name,client,split"


def is_given(clients: object) -> bool:
    """Whether this says who holds which rows, and is not the name of a scheme."""
    if isinstance(clients, str | Path):
        return str(clients).lower().endswith(CSV)
    return clients is not None


def given_partition(
    store: Store,
    clients: object,
    /,
    *,
    seed: int = 0,
    name: str | None = None,
    replace: bool = False,
    **arguments: Any,
) -> Partition:
    """The partition that somebody brings, saved in the store.

    Args:
        store: whose rows are dealt.
        clients: name -> rows (``given.of_rows``), the client of each row in the order of ``Store.samples.name`` (a
            pandas Series whose index names the rows is taken by name), a CSV of ``name,client[,split]`` with the
            names of the rows, or a function that takes the store and returns one of these.
        seed: of what is drawn by ``arguments``.
        name: to save it under.
        replace: whether it may take the place of another partition of that name.
        arguments: of the scheme ``natural`` (``tests``, ``min_rows``, ``max_clients``), where clients are values; and
            ``validation``.

    Raises:
        UsageError for rows or names that are not there, and arguments that do not go with the form.
    """
    if callable(clients):
        clients = _returned(clients(store))
    columns = columns_of(store)
    typed = typed_arguments("natural", arguments)
    split = None
    if isinstance(clients, str | Path):
        clients, split = read_clients(Path(clients), store)
    rows_are_given = isinstance(clients, Mapping) or split is not None
    validation = typed.pop("validation", None) if rows_are_given else None
    if rows_are_given and typed:
        raise UsageError(
            f"{next(iter(typed))} is given, and who trains and tests on which rows too.",
            "Leave one of them out.",
        )
    if isinstance(clients, Mapping):
        made = of_rows(columns, clients, validation)
    elif split is not None:
        assert isinstance(clients, Group)
        made = of_splits(columns, clients, split, validation)
    else:
        named = _by_name(clients, store)
        made = of_ids(columns, clients if named is None else named, seed=seed, **typed)
        if named is None and not all(
            word.rpartition("/")[2].isdigit() for word in store.samples.name
        ):
            said = f"clients are given in the order of the rows by name: the first is {store.samples.name[0]!r}"
            made = _with_note(made, said)
    save_partition(store, made, name or _free_name(store, made, replace), replace=replace)
    return made


def _with_note(made: Partition, note: str) -> Partition:
    return dataclasses.replace(made, notes=(*made.notes, note))


def _free_name(store: Store, made: Partition, replace: bool) -> str:
    """The partition's own name, with its digest behind where a saved one of that name has other rows."""
    name = made.default_name()
    if (
        replace
        or name not in store.partitions
        or store.partition(name).get("digest") == made.digest
    ):
        return name
    return f"{name}-{made.digest[:8]}"


def _by_name(clients: Any, store: Store) -> Group | None:
    """The client of each row where a pandas Series names the rows in its index; None for clients in the rows' order.

    Rows that it does not name are nobody's. Raises UsageError for a name that no row has, or that comes twice.
    """
    index = getattr(clients, "index", None)
    if (
        index is None
        or callable(index)
        or not (hasattr(index, "tolist") and hasattr(clients, "tolist"))
    ):
        return None
    names = index.tolist()
    if not names or not all(isinstance(name, str) for name in names):
        return None
    place = {name: row for row, name in enumerate(store.samples.name)}
    unknown_names = [name for name in names if name not in place]
    if unknown_names or len(set(names)) < len(names):
        wrong = (
            f"which no row is called ({len(unknown_names):,} such)" if unknown_names else "twice"
        )
        first = unknown_names[0] if unknown_names else Counter(names).most_common(1)[0][0]
        raise UsageError(
            f"The index of the clients has {first!r}, {wrong}.",
            f"Names are those of the store, for example {store.samples.name[0]!r}; clients.to_numpy() is taken in the "
            "order of Store.samples.name.",
        )
    values: list[Any] = [None] * store.rows
    for name, client in zip(names, clients.tolist(), strict=True):
        values[place[name]] = client
    return Group.of(values)


def _returned(clients: object) -> object:
    """What a function of the store said. Raises UsageError for what names no clients."""
    if (isinstance(clients, str | Path) and not is_given(clients)) or not isinstance(
        clients, str | Path | Iterable
    ):
        raise UsageError(
            f"The function of the store returned {clients!r:.60}.",
            'It returns the rows of each client, {"north": [0, 1], "south": [2, 3]}; the client of each row, a list as '
            "long as the store; or the path of a .csv of name,client[,split].",
        )
    return clients


def read_clients(path: Path, store: Store) -> tuple[Group, np.ndarray | None]:
    """The client of each row by a CSV, and the split of each (-1 where the CSV has no line) if it says so.

    Raises UsageError, with the line, for another header, a name that no row has or that comes twice, and other splits.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = [line for line in csv.reader(file, strict=True) if line]
    except FileNotFoundError:
        raise UsageError(
            f"There is no {path}.", f"Give the CSV that says who holds which rows. {_FIRST_LINE}"
        ) from None
    except OSError as error:
        raise UsageError(
            f"{path} could not be read: {error.strerror}.", "Give a CSV file that you may read."
        ) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path} is not a CSV in UTF-8: {error}.", _FIRST_LINE) from None
    head = [column.strip().lower() for column in lines[0]] if lines else []
    if head not in (["name", "client"], ["name", "client", "split"]):
        raise UsageError(f"{path} has the columns {', '.join(head) or '(none)'}.", _FIRST_LINE)
    if len(lines) < 2:
        raise UsageError(
            f"{path} has no line after its first, {','.join(head)}.",
            f"Add a line for each row that a client holds, for example {store.samples.name[0]},north"
            f"{',train' if len(head) == 3 else ''}",
        )
    place = {name: row for row, name in enumerate(store.samples.name)}
    client = [""] * store.rows
    split = np.full(store.rows, -1, np.int8)
    codes = {"train": 0, "training": 0, "test": 1, "validation": 2, "val": 2, "valid": 2}
    for number, line in enumerate(lines[1:], start=2):
        fields = [field.strip() for field in line]
        if len(fields) != len(head):
            raise UsageError(f"Line {number:,} of {path} has {len(fields)} fields.", _FIRST_LINE)
        row = place.get(fields[0])
        if row is None:
            example = store.samples.name[0]
            raise UsageError(
                f"Line {number:,} of {path}: no row of {store.path.name} is called {fields[0]!r}.",
                f"Names are those of the store, for example {example!r}; `fedcache export` shows them.",
            )
        if client[row]:
            raise UsageError(
                f"Line {number:,} of {path} names {fields[0]!r} again.", "Give each row one client."
            )
        client[row] = fields[1]
        if len(head) == 3:
            if fields[2].lower() not in codes:
                raise unknown(
                    "split",
                    fields[2],
                    codes,
                    hint=f"Line {number:,} of {path}: train, test or validation.",
                )
            split[row] = codes[fields[2].lower()]
    return Group.of(client), split if len(head) == 3 else None
