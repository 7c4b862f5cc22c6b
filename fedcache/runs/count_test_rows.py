"""Outcome of every test row, from the predictions of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from fedcache.federate.engine.outcome import Evaluation
from fedcache.federate.partition.client_table import ClientRows, ClientTable
from fedcache.federate.partition.matched_lists import MatchedLists
from fedcache.runs.test_rows import TestRows

MOST_ROWS = 100_000
"""Different test rows up to which a result has the file: of more, an interval is narrower than 0.4 points."""
MOST_SCORED = 1 << 21
"""Pairs of client and test row up to which they are added up."""


def count_test_rows(
    found: Evaluation, clients: Sequence[ClientRows], labels: Tensor
) -> TestRows | None:
    """The test rows of an evaluation; None where predictions were not kept, and above ``MOST_ROWS`` or ``MOST_SCORED``.

    Args:
        found: of these clients.
        clients: whose test rows they are.
        labels: int64 [N] of all rows of the store, -1 where unknown: such a row is not scored.
    """
    too_many = found.sizes is None and len(found.rows) > MOST_ROWS
    if not len(found.rows) or not found.whole or too_many:
        return None
    if isinstance(clients, ClientTable):
        table = clients
    else:
        table = ClientTable.of(clients, np.empty(0, np.int64))
    if found.sizes is None:
        lists = _one_model(found, table)
    else:
        lists = (found.rows, found.predictions, found.sizes)
    if lists is None:
        return None
    rows, guesses, sizes = lists
    if len(rows) > MOST_SCORED:
        return None
    truth = labels.cpu().numpy()[rows]
    known = (truth >= 0) & (guesses >= 0)
    owner = np.repeat(np.arange(len(sizes)), sizes)[known]
    right = (truth == guesses)[known]
    per_client = np.bincount(owner, minlength=len(sizes))
    each = 1.0 / (per_client[owner] * max(1, int((per_client > 0).sum())))
    distinct, place = np.unique(rows[known], return_inverse=True)
    if not 0 < len(distinct) <= MOST_ROWS:
        return None
    count = len(distinct)
    return TestRows(
        distinct,
        np.bincount(place[right], minlength=count),
        np.bincount(place, minlength=count),
        np.bincount(place[right], each[right], count),
        np.bincount(place, each, count),
    )


def _one_model(
    found: Evaluation, table: ClientTable
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Rows and predictions of one model, client by client, and how many each has; None for too many of them."""
    if int(table.test_sizes.sum()) > MOST_SCORED:
        return None
    if isinstance(table.tests, MatchedLists):
        every = table.tests.together(0, len(table))
        rows = every.rows
        sizes = every.sizes
    else:  # the lists of clients that share the common rows are empty
        shared = int(table.shares.sum())
        rows = np.concatenate([table.tests.rows, np.tile(table.common, shared)])
        sizes = np.concatenate([table.tests.sizes, np.full(shared, len(table.common))])
    return rows, found.predictions[np.searchsorted(found.rows, rows)], sizes
