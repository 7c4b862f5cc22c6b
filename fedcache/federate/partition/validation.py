"""Rows to choose by: taken out of the training rows of every client, or those of the dataset's own split.

What is taken is a function of the rows alone, and takes no draw: partitions with and without validation rows deal the
same rows to the same clients and test them on the same rows, and ``ClientTable.without_validation`` gives them back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedcache.errors import UsageError
from fedcache.federate.partition.client_table import ClientTable, Validation
from fedcache.federate.partition.row_lists import RowLists, is_among
from fedcache.federate.partition.scheme import VALIDATION, Columns
from fedcache.tables.groups import Group

OWN_SPLIT = "split"
"""The word for the dataset's own split, in the place of a share."""

ROUNDING = 1e-9
"""Less than any share of a row: 0.29 times 100 rows are 29, which a float64 is a little below."""


def with_validation(
    table: ClientTable,
    how: float | str,
    columns: Columns,
    domains: Sequence[int],
    by: Group | None,
    *,
    own: bool,
) -> ClientTable:
    """The clients with rows to choose by.

    Args:
        table: training and test rows.
        how: the share of every client's training rows, above 0 and below 1, or ``OWN_SPLIT``.
        columns: of all rows.
        domains: codes of the domains whose rows are dealt.
        by: the column whose values the clients are; None for other clients.
        own: of ``by``: each value is one client, which is tested on rows of its own.

    Raises UsageError, where there is no such row.
    """
    if how != OWN_SPLIT:
        train, taken = hold_out(table.train, columns.label, columns.uid, float(how))
        if not len(taken.rows):
            raise UsageError(
                "Validation rows are taken from clients with two training rows or more, and every client has one.",
                "Fewer clients have more rows each:  --clients NUMBER",
            )
        return replace(table, train=train, validation=Validation.of_clients(taken))
    rows = np.flatnonzero(
        (columns.split == VALIDATION) & columns.ok.astype(bool) & np.isin(columns.domain, domains)
    )
    if by is not None:  # no row of a value that is held out, or of a client that is left out
        rows = rows[is_among(by.codes[rows], by.codes[table.train.rows])]
    if (known := columns.label[rows] >= 0).any():
        rows = rows[known]
    # Rows that a scheme has dealt all the same are trained or tested on already.
    rows = rows[~is_among(rows, np.concatenate([table.train.rows, table.tested]))]
    if not len(rows):
        raise UsageError(
            "The dataset has no row of split validation that could be scored with these clients.",
            "Take a share of the training rows:  --validation 0.2",
        )
    if by is None or not own:
        return replace(table, validation=Validation(rows, None))
    client_of = np.full(len(by.words), -1)
    client_of[by.codes[table.train.rows]] = table.train.owner
    owner = client_of[by.codes[rows]]
    lists = RowLists.of_sizes(
        rows[np.argsort(owner, kind="stable")], np.bincount(owner, minlength=len(table))
    )
    return replace(table, validation=Validation.of_clients(lists))


def hold_out(
    train: RowLists, label: np.ndarray, uid: np.ndarray, share: float
) -> tuple[RowLists, RowLists]:
    """Training rows and validation rows of every client: of its n rows floor(share n), of each class those with the
    smallest uids.

    Classes come in order, and one gives as many rows as bring those up to it to their share: each is within one row of
    its own. A class keeps a row for training, so a client may give fewer; one with two rows or more that would give
    none gives one of its largest class.

    Args:
        train: M lists of rows, ascending.
        label: int [N]; -1, unknown, is a class of its own.
        uid: uint8 [N, 16].
        share: above 0 and below 1.
    """
    classes = int(label[train.rows].max(initial=-1)) + 2
    group = train.owner * np.int64(classes) + (label[train.rows] + 1)
    order = by_group_and_uid(group, uid[train.rows])
    # where each class of each client begins
    first = np.flatnonzero(np.diff(group[order], prepend=-1))
    sizes = np.diff(first, append=len(order))
    client = group[order[first]] // classes
    before = first - train.ends[client]  # rows of the client in the classes before
    # A class gives what brings the classes up to it to their share, and keeps a row for training.
    up_to = np.floor(share * (before + sizes) + ROUNDING).astype(np.int64)
    earlier = np.floor(share * before + ROUNDING).astype(np.int64)
    given = np.minimum(up_to - earlier, sizes - 1)
    gives_none = np.bincount(client, given, minlength=len(train)) == 0
    gives_none &= train.sizes > 1
    most = np.zeros(len(train), np.int64)
    np.maximum.at(most, client, sizes)
    largest = np.flatnonzero(gives_none[client] & (sizes == most[client]))
    given[largest[np.diff(client[largest], prepend=-1) > 0]] = 1
    chosen = np.zeros(len(order), bool)
    chosen[order[np.arange(len(order)) - np.repeat(first, sizes) < np.repeat(given, sizes)]] = True
    # A row that several clients hold is taken from all of them.
    chosen |= is_among(train.rows, train.rows[chosen])
    taken = np.bincount(train.owner[chosen], minlength=len(train))
    if len(bare := np.flatnonzero((taken == train.sizes) & (taken > 0))):
        raise UsageError(
            f"Clients hold the same rows, and {len(bare)} would have none left to train on beside the validation rows "
            "of all.",
            "A smaller share, or clients that share no row:  --option sharing=false",
        )
    return RowLists.of_sizes(train.rows[~chosen], train.sizes - taken), RowLists.of_sizes(
        train.rows[chosen], taken
    )


def by_group_and_uid(group: np.ndarray, uid: np.ndarray) -> np.ndarray:
    """int64 [n]: the order of numbers from 0 on [n], of equal ones by their uids [n, 16], of equal ones as they stand.

    Sorted by one number, group and first bits of the uid, at a tenth of the time of sorting by all; what that leaves
    undecided, copies of an image above all, is sorted by all.
    """
    # Eight bytes are ordered as the number that begins with the first.
    high, low = (half.astype(np.uint64) for half in np.ascontiguousarray(uid).view(">u8").T)
    bits = int(group.max(initial=0)).bit_length()
    key = high >> np.uint64(bits)
    if bits:  # a shift by 64 is undefined
        key |= group.astype(np.uint64) << np.uint64(64 - bits)
    order = np.argsort(key)
    same = np.diff(key[order]) == 0
    # Places whose neighbour has the same key; of an empty order there is none.
    alike = np.zeros(len(order), bool)
    alike[:-1] = same
    alike[1:] |= same
    undecided = np.flatnonzero(alike)
    rows = order[undecided]
    order[undecided] = rows[np.lexsort((rows, low[rows], high[rows], group[rows]))]
    return order
