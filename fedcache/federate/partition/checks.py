"""What makes clients and test rows no partition, in words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedcache.federate.partition.client_table import ClientRows, ClientTable, Validation
from fedcache.federate.partition.matched_lists import TestLists
from fedcache.federate.partition.row_lists import NumberedNames, RowLists, is_among


def not_rows(clients: Sequence[ClientRows], test: np.ndarray) -> str | None:
    """What is no list of rows at all, in words; None when all are."""
    if not len(clients):
        return "it has no clients"
    if isinstance(clients, ClientTable):
        lists = [
            ("training rows", clients.train.rows),
            ("the clients' test rows", _held(clients.tests)),
        ]
        if clients.validation is not None:
            lists.append(("validation rows", clients.validation.rows))
    else:
        lists = [
            (f"{what} rows of {c.name!r}", rows)
            for c in clients
            for what, rows in (("training", c.train), ("test", c.test))
        ]
    for what, rows in [*lists, ("the global test rows", test)]:
        if rows.dtype != np.int64 or rows.ndim != 1:
            return f"{what} are {rows.dtype} with {rows.ndim} axes, expected int64 with 1"
    return None


def problem_of(table: ClientTable, test: np.ndarray) -> str | None:
    """What makes these row lists no partition, in words; None when nothing does."""
    names = table.names
    if not isinstance(names, NumberedNames) and len(set(names)) < len(names):
        return f"{len(names)} clients have {len(set(names))} names"
    sizes = np.stack([table.train_sizes, table.test_sizes], 1)
    if len(empty := np.flatnonzero((sizes == 0).any(1))):
        train, tested = sizes[empty[0]].tolist()
        return f"client {names[int(empty[0])]!r} has {train} training and {tested} test rows"
    for what, lists in (("training rows of {!r}", table.train), ("test rows of {!r}", table.tests)):
        if isinstance(lists, RowLists) and (client := _out_of_order(lists)) is not None:
            return f"{what.format(names[client])} are not ascending and non-negative"
    if _out_of_order(RowLists.of([test])) is not None:
        return "the global test rows are not ascending and non-negative"
    tested = table.tested
    both = tested[is_among(tested, table.train.rows)]
    if len(both):
        return f"row {both[0]} is trained and tested on ({len(both)} such rows)"
    return None if table.validation is None else _problem_of_validation(table, table.validation)


def _problem_of_validation(table: ClientTable, held: Validation) -> str | None:
    """As ``problem_of``, of the rows to choose by."""
    rows, own = held.rows, held.own
    if not len(rows):
        return "there is no row among its validation rows"
    if own is not None and len(own) != len(table):
        return f"{len(table)} clients have {len(own)} lists of validation rows"
    if own is not None and (client := _out_of_order(own)) is not None:
        return f"validation rows of {table.names[client]!r} are not ascending and non-negative"
    if _out_of_order(RowLists.of([rows])) is not None:
        return "the validation rows are not ascending and non-negative"
    for what, others in (("trained", table.train.rows), ("tested", table.tested)):
        if len(both := rows[is_among(rows, others)]):
            return f"row {both[0]} is {what} on and is a validation row ({len(both)} such rows)"
    return None


def _held(tests: TestLists) -> np.ndarray:
    """The array that holds the rows of the lists; a rule gives ascending lists of what is in it."""
    return tests.rows if isinstance(tests, RowLists) else tests.order


def _out_of_order(lists: RowLists) -> int | None:
    """The first list that is not ascending and non-negative, by its number."""
    wrong = np.diff(lists.rows, prepend=-1) <= 0
    starts = lists.ends[:-1][lists.sizes > 0]
    wrong[starts] = lists.rows[starts] < 0  # the difference there is to the list before
    return int(np.searchsorted(lists.ends, wrong.argmax(), "right")) - 1 if wrong.any() else None


def beyond(table: ClientTable, rows: int) -> str | None:
    """The first list that holds a row from ``rows`` on, and that row, in words; None when none does."""
    if len(table.common) and table.common[-1] >= rows:
        return f"test holds {table.common[-1]}"
    if table.validation is not None and table.validation.rows[-1] >= rows:
        return f"validation holds {table.validation.rows[-1]}"
    first = [
        (np.searchsorted(held.ends, np.flatnonzero(held.rows >= rows)[:1], "right"), held)
        for held in (table.train, table.tests)
        if isinstance(held, RowLists)
    ]
    found = [
        (int(place[0]) - 1, order, held) for order, (place, held) in enumerate(first) if len(place)
    ]
    if not found:
        rule = np.empty(0, np.int64) if isinstance(table.tests, RowLists) else table.tests.order
        return f"the clients' tests hold {rule.max()}" if (rule >= rows).any() else None
    client, _, held = min(found, key=lambda one: one[:2])
    return f"client {table.names[client]!r} holds {held[client][-1]}"
