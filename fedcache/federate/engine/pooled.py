"""Accuracy over all test rows of all clients together, one definition for all methods (D-89)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedcache.federate.engine.client_data import Data
from fedcache.federate.engine.outcome import Evaluation
from fedcache.federate.partition.client_table import ClientTable
from fedcache.federate.partition.row_lists import RowLists


def with_pooled(
    found: Evaluation, clients: ClientTable, data: Data, *, everywhere: bool = False
) -> Evaluation:
    """With the accuracy over all labelled test rows of all clients that were scored.

    A row that several clients are tested on counts for each, whether one model predicts it or those of the clients.
    ``everywhere``: every client was scored on the union of the test rows. NaN where no client was scored.
    """
    accuracy = found.client_accuracy
    scored = ~np.isnan(accuracy)
    rows = np.ones(len(accuracy)) if everywhere else _labelled_rows(clients, data)
    pooled = (
        float(accuracy[scored] @ rows[scored] / max(1.0, rows[scored].sum()))
        if scored.any()
        else float("nan")
    )
    return replace(found, pooled=pooled)


def _labelled_rows(table: ClientTable, data: Data) -> np.ndarray:
    """float64 [M]: test rows of each client whose label is known."""
    known, tests = (data.y >= 0).cpu().numpy(), table.tests
    if isinstance(tests, RowLists):
        rows = np.bincount(tests.owner, known[tests.rows], minlength=len(table)).astype(np.float64)
    else:
        rows = tests.sizes.astype(np.float64)  # dealt by class, so all have a label
    rows[table.shares] = known[table.common].sum()
    return rows
