"""A partition as arrays in one sealed file (``store/array_file``), and what such a file must be to be one.

The head holds the words of the partition and its digest, which is that of its JSON: the form is no part of it. Clients
are ``{"count", "names"}``, with null for numbered names. Arrays are ``train`` (rows of all clients, one after the
other) with ``train_sizes`` [M] and ``test`` (the global test rows). Where clients have test rows of their own, ``own``
with ``own_sizes`` [M] and ``shares`` [M], 1 for a client that is tested on the global ones; or the rule that chooses
them: ``order``, ``starts``, ``classes`` with ``classes_sizes`` [M], and ``taken`` (``MatchedLists``). Where there are
rows to choose by, ``validation``, with ``validation_sizes`` [M] where clients have their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fedcache.federate.partition.client_table import ClientTable, Validation
from fedcache.federate.partition.json_file import (
    LARGEST_ROW,
    WITH_VALIDATION,
    check_words,
    corrupt,
    is_name,
    words_of,
)
from fedcache.federate.partition.matched_lists import MatchedLists
from fedcache.federate.partition.row_lists import NumberedNames, RowLists, sorted_once
from fedcache.store.array_file import unpack

_ALL_SHARE = {"train", "train_sizes", "test"}
_OWN = {"own", "own_sizes", "shares"}
_MATCHED = {"order", "starts", "classes", "classes_sizes", "taken"}
_VALIDATION = {"validation", "validation_sizes"}


def arrays_of(table: ClientTable) -> dict[str, np.ndarray]:
    """The arrays of a file, by name."""
    arrays = {"train": table.train.rows, "train_sizes": table.train_sizes, "test": table.common}
    tests, held = table.tests, table.validation
    if held is not None and held.own is not None:
        arrays |= {"validation": held.own.rows, "validation_sizes": held.own.sizes}
    elif held is not None:
        arrays["validation"] = held.rows
    if table.shares.all():
        return arrays
    if isinstance(tests, RowLists):
        return {
            **arrays,
            "own": tests.rows,
            "own_sizes": tests.sizes,
            "shares": table.shares.view(np.uint8),
        }
    rule = {"order": tests.order, "starts": tests.starts, "taken": tests.taken}
    return {**arrays, **rule, "classes": tests.classes.rows, "classes_sizes": tests.classes.sizes}


def clients_of(table: ClientTable) -> dict[str, Any]:
    """The entry ``clients`` of the head."""
    names = None if isinstance(table.names, NumberedNames) else list(table.names)
    return {"count": len(table), "names": names}


def decode(raw: memoryview, origin: str) -> dict[str, Any]:
    """The fields of a partition: ``clients`` as a table that holds its own copy of the rows, ``digest`` as claimed.

    Raises CorruptionError for anything that is not such a file; the rows are compared with one another elsewhere.
    """
    try:
        content, arrays = unpack(raw)
    except ValueError as error:
        raise corrupt(origin, f"it {error}") from error
    words = words_of(check_words(content, origin))
    clients = content["clients"]
    if (
        type(clients) is not dict
        or clients.keys() != {"count", "names"}
        or type(clients["count"]) is not int
    ):
        raise corrupt(origin, "clients should be count and names")
    names, count = clients["names"], clients["count"]
    if names is not None and not (
        isinstance(names, list) and len(names) == count and all(map(is_name, names))
    ):
        raise corrupt(origin, f"names should be {count} names of 1 to 255 characters")
    tests = arrays.keys() - _VALIDATION in (_ALL_SHARE, _ALL_SHARE | _OWN, _ALL_SHARE | _MATCHED)
    if (
        not tests
        or ("validation" in arrays) != (content["schema"] == WITH_VALIDATION)
        or ("validation_sizes" in arrays and "validation" not in arrays)
    ):
        raise corrupt(origin, f"its arrays are {', '.join(sorted(arrays))[:80] or 'none'}")
    train = _lists(arrays, "train", count, origin)
    test = _rows(arrays, "test", origin)
    called = NumberedNames(count) if names is None else NumberedNames.recognise(names)
    if "own" in arrays:
        own, shares = _lists(arrays, "own", count, origin), arrays["shares"].astype(bool)
        if len(shares) != count or own.sizes[shares].any():
            raise corrupt(
                origin,
                f"shares should be {count} numbers, with no rows of their own for clients that share",
            )
        table = ClientTable(called, train, test, shares, own)
    else:
        table = ClientTable.dealt(
            called, train, test, _matched(arrays, count, origin) if "order" in arrays else None
        )
    if "validation_sizes" in arrays:
        table = replace(
            table, validation=Validation.of_clients(_lists(arrays, "validation", count, origin))
        )
    elif "validation" in arrays:
        table = replace(table, validation=Validation(_rows(arrays, "validation", origin), None))
    return {**words, "clients": table, "test": test}


def _matched(arrays: Mapping[str, np.ndarray], count: int, origin: str) -> MatchedLists:
    """The rule of test rows, when it gives every client a set of them."""
    order, classes = _rows(arrays, "order", origin), _lists(arrays, "classes", count, origin)
    starts, taken = (_rows(arrays, name, origin) for name in ("starts", "taken"))
    high = np.diff(starts)
    if not (len(starts) and starts[0] == 0 and starts[-1] == len(order) and (high >= 0).all()):
        raise corrupt(origin, f"starts should ascend from 0 to {len(order)}")
    again = np.diff(classes.rows) <= 0
    again[
        classes.ends[1:-1][(classes.ends[1:-1] > 0) & (classes.ends[1:-1] < len(classes.rows))] - 1
    ] = False
    if again.any() or (classes.rows >= len(high)).any():
        raise corrupt(origin, f"classes should ascend for each client and be below {len(high)}")
    if len(taken) != len(classes.rows) or (taken > high[classes.rows]).any():
        raise corrupt(
            origin,
            "taken should be a number of rows for each class of a client, no more than the class has",
        )
    if len(sorted_once(order)) < len(order):
        raise corrupt(origin, "order should hold each row once")
    return MatchedLists(order, starts, classes, taken)


def _rows(arrays: Mapping[str, np.ndarray], name: str, origin: str) -> np.ndarray:
    """int64 copy of an array of rows."""
    rows = arrays[name]
    if len(rows) and int(rows.max()) >= LARGEST_ROW:
        raise corrupt(
            origin, f"{name} holds {rows.max()}, expected rows from 0 to {LARGEST_ROW - 1}"
        )
    return rows.astype(np.int64)


def _lists(arrays: Mapping[str, np.ndarray], name: str, count: int, origin: str) -> RowLists:
    """The rows of an array in lists of the sizes beside it."""
    rows, sizes = _rows(arrays, name, origin), arrays[f"{name}_sizes"]
    # Each below the sum before it is taken: what a file can hold is then too little to pass 2**63.
    if (
        len(sizes) != count
        or (sizes > len(rows)).any()
        or int(sizes.sum(dtype=np.int64)) != len(rows)
    ):
        raise corrupt(origin, f"{name}_sizes should be {count} numbers with the sum {len(rows)}")
    return RowLists.of_sizes(rows, sizes.astype(np.int64))
