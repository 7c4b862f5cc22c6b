"""Validation rows: a share of the training rows of every client, or those of the dataset's own split.

The choice depends on the rows alone and uses no random numbers. So partitions with and without validation rows assign
the same rows to the same clients, with the same test rows, and ``ClientTable.without_validation`` is the inverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedcache.errors import UsageError
from fedcache.federate.partition.client_table import (
    ClientTable,
    RowLists,
    Validation,
    is_among,
    ranges,
)
from fedcache.federate.partition.scheme import VALIDATION, Columns
from fedcache.tables.groups import Group

OWN_SPLIT = "split"
"""Value of ``validation`` that selects the dataset's own split."""

ROUNDING = 1e-9
"""Number that is added before rounding down: in float64, 0.29 x 100 is slightly below 29, for example."""


def with_validation(
    table: ClientTable,
    how: float | str,
    columns: Columns,
    domains: Sequence[int],
    by: Group | None,
    *,
    per_client: bool,
) -> ClientTable:
    """The clients with validation rows.

    Args:
        table: training and test rows.
        how: the share of every client's training rows, above 0 and below 1, or ``OWN_SPLIT``.
        columns: of all rows.
        domains: codes of the chosen domains.
        by: the column whose values are the clients; None for other clients.
        per_client: whether the rows of the split belong to single clients, because each value of ``by`` is one client
            with test rows of its own; otherwise all clients share them.

    Raises UsageError if there is no such row.
    """
    if how != OWN_SPLIT:
        train, taken = hold_out(table.train, columns.label, columns.uid, float(how))
        if not len(taken.rows):
            raise UsageError(
                "Validation rows need clients with at least two training rows, but every client has one.",
                "Use fewer clients, with more rows each:  --clients NUMBER",
            )
        return replace(table, train=train, validation=Validation.of_clients(taken))
    readable = (columns.split == VALIDATION) & columns.ok.astype(bool)
    rows = np.flatnonzero(readable & np.isin(columns.domain, domains))
    if by is not None:
        # Only rows with a value that clients train on; held-out values and clients that were left out have none.
        trained = by.codes[table.train.rows]
        rows = rows[is_among(by.codes[rows], trained)]
    # Rows without a label cannot be scored, and are left out unless no row has a label.
    known = columns.label[rows] >= 0
    if known.any():
        rows = rows[known]
    # A scheme may have assigned rows of this split for training or testing.
    assigned = np.concatenate([table.train.rows, table.tested])
    rows = rows[~is_among(rows, assigned)]
    if not len(rows):
        raise UsageError(
            "The dataset has no validation row for these clients: its validation split is empty, or its rows belong to "
            "other domains or clients, or are already used for training or testing.",
            "Use a share of the training rows:  --validation 0.2",
        )
    if by is None or not per_client:
        return replace(table, validation=Validation(rows, None))
    # Each value is one client: the client whose training rows have the value.
    client_of = np.full(len(by.words), -1)
    client_of[trained] = table.train.owner
    lists = RowLists.by_owner(rows, client_of[by.codes[rows]], len(table))
    return replace(table, validation=Validation.of_clients(lists))


def hold_out(
    train: RowLists, label: np.ndarray, uid: np.ndarray, share: float
) -> tuple[RowLists, RowLists]:
    """Training rows and validation rows of every client.

    A client gives floor(share n) of its n rows, of each class those with the smallest uids. Rounding is cumulative over
    the classes in their order, so each class is within one row of its share. A class keeps at least one row for
    training, so a client may give fewer rows. A client with two rows or more that would give none gives one row of its
    largest class.

    Args:
        train: M lists of rows, ascending.
        label: int [N]; -1, unknown, is a class of its own.
        uid: uint8 [N, 16].
        share: above 0 and below 1.
    """
    # One number for each class of each client, as int64, because int32 may overflow. Label -1 becomes class 0.
    of_class = label[train.rows] + 1
    classes = int(of_class.max(initial=0)) + 1
    group = train.owner * np.int64(classes) + of_class
    order = by_group_and_uid(group, uid[train.rows])
    # The first place of each class of each client in ``order``.
    first = np.flatnonzero(np.diff(group[order], prepend=-1))
    sizes = np.diff(first, append=len(order))
    client = group[order[first]] // classes
    # Rows of the client in earlier classes: its first row is at ``ends[client]``.
    before = first - train.ends[client]
    # Cumulative rounding: a class gives the share of all rows up to its end, less what earlier classes give. It
    # keeps its last row.
    up_to = np.floor(share * (before + sizes) + ROUNDING).astype(np.int64)
    earlier = np.floor(share * before + ROUNDING).astype(np.int64)
    given = np.minimum(up_to - earlier, sizes - 1)
    # A client that would give none gives one row of its largest class, the first of equally large ones.
    gives_none = np.bincount(client, given, minlength=len(train)) == 0
    gives_none &= train.sizes > 1
    most = np.zeros(len(train), np.int64)
    np.maximum.at(most, client, sizes)
    is_largest = sizes == most[client]
    largest = np.flatnonzero(gives_none[client] & is_largest)
    is_first = np.diff(client[largest], prepend=-1) > 0
    given[largest[is_first]] = 1
    # Each class gives its rows with the smallest uids, which come first in ``order``.
    place = ranges(np.zeros_like(sizes), sizes)
    chosen = np.zeros(len(order), bool)
    chosen[order[place < np.repeat(given, sizes)]] = True
    # A row that several clients hold is taken from all of them.
    chosen |= is_among(train.rows, train.rows[chosen])
    taken = np.bincount(train.owner[chosen], minlength=len(train))
    without_rows = int(((taken == train.sizes) & (taken > 0)).sum())
    if without_rows:
        raise UsageError(
            f"Clients share rows, and {without_rows} would have no training rows left after taking out the "
            "validation rows of all clients.",
            "Use a smaller --validation, or give no row to two clients:  --option sharing=false",
        )
    kept = RowLists.of_sizes(train.rows[~chosen], train.sizes - taken)
    return kept, RowLists.of_sizes(train.rows[chosen], taken)


def by_group_and_uid(group: np.ndarray, uid: np.ndarray) -> np.ndarray:
    """int64 [n]: the order by ``group`` [n] (from 0), then by ``uid`` [n, 16], then by place.

    It is sorted by one number of the group and the first bits of the uid, which is ten times as fast as sorting by all
    keys. Entries with equal numbers, mostly copies of an image, are then sorted by all keys.
    """
    # Big-endian numbers sort as their bytes do. ``high`` and ``low`` are the two halves of a uid.
    high, low = np.ascontiguousarray(uid).view(">u8").T.astype(np.uint64)
    bits = int(group.max(initial=0)).bit_length()
    key = high >> np.uint64(bits)
    if bits:  # a shift by 64 bits is undefined
        key |= group.astype(np.uint64) << np.uint64(64 - bits)
    order = np.argsort(key)
    same = np.diff(key[order]) == 0
    # Places with the key of a neighbour.
    alike = np.zeros(len(order), bool)
    alike[:-1] = same
    alike[1:] |= same
    undecided = np.flatnonzero(alike)
    rows = order[undecided]
    order[undecided] = rows[np.lexsort((rows, low[rows], high[rows], group[rows]))]
    return order
