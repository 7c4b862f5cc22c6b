"""Prediction sets of a run's global model: calibrated on its validation rows, counted on its clients' own test rows."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.config import Home
from fedcache.errors import StoreError, UsageError
from fedcache.federate.partition.client_table import RowLists
from fedcache.models.evaluate import LabelledRows
from fedcache.models.prediction_sets import PredictionSets, SetCounts, threshold
from fedcache.models.predictor import Predictor
from fedcache.models.saved_model import ModelOptions
from fedcache.process import Stop
from fedcache.progress import Observer
from fedcache.runs.evaluate_prior import MOST_SCORED, OwnRows, no_test_rows
from fedcache.runs.predict_run import counted

LEAVE_OUT = "Leave --coverage out."


def prediction_sets(
    place: Path,
    first: Predictor,
    rows: LabelledRows,
    coverage: float,
    options: ModelOptions,
    home: Home,
    observer: Observer,
    stop: Stop,
) -> PredictionSets:
    """The prediction sets of a global model for the rows of ``rows`` on which clients are tested.

    Raises UsageError for personal models, a client prior or a private run; StoreError without validation rows or test
    rows; StoppedError after a stop; other errors as ``OwnRows.of``.

    Args:
        place: the directory of a run, or a model file.
        first: the model.
        rows: that are evaluated.
        coverage: above 0 and below 1.
        options: that selected the model.
        home: with the run.
        observer: receives progress.
        stop: checked between blocks of rows.
    """
    facts = first.members[0].facts
    if facts.personal and not options.one_for_all:
        raise UsageError(
            f"--coverage needs one global model, but {facts.method} has a model for each client.",
            LEAVE_OUT,
        )
    if options.client_prior != "none":
        raise UsageError(
            "--coverage and --client-prior cannot be combined, because the threshold of --coverage is valid for one "
            "model, but every client prior gives other scores.",
            "Leave one of them out.",
        )
    own = OwnRows.of(place, first, rows.source, home, "--coverage")
    if own.private:
        raise UsageError(
            "The run has differential privacy. --coverage reads validation rows, and epsilon does not cover these "
            "rows.",
            LEAVE_OUT,
        )
    table = own.partition.table
    lists = RowLists.of([])
    if table.validation is not None:
        # Validation rows that all clients share count as the rows of one client.
        lists = table.validation.own or RowLists.of([table.validation.rows])
    tested = np.intersect1d(table.tested_by_clients, rows.rows)
    # For each row of the store: the number of classes in its set, -1 if it is not tested.
    size = np.full(own.store.rows, -1)
    covered = np.zeros(own.store.rows, bool)
    with counted(observer, stop, "prediction sets", len(lists.rows) + len(tested)) as done:
        parts = [np.empty(0)]
        for part, _, of_truth in _nonconformity(own, first, lists.rows):
            parts.append(of_truth)
            done(len(part))
        scores = np.concatenate(parts)
        known = ~np.isnan(scores)
        clients = len(np.unique(lists.owner[known]))
        if not clients:
            words = ["--method", facts.method, "--store", str(own.store.path)]
            raise StoreError(
                "--coverage needs labelled validation rows, but the run has none.",
                "Train the run again with validation rows:  fedcache train --validation 0.2 "
                + shlex.join(words),
            )
        limit = threshold(scores[known], clients, coverage)
        for part, of_classes, of_truth in _nonconformity(own, first, tested):
            sizes = (of_classes <= limit).sum(-1)
            size[part] = np.where(np.isnan(of_truth), -1, sizes)
            covered[part] = of_truth <= limit
            done(len(part))
    by_client = {}
    without_rows = 0
    # Clients with the same test rows have the same counts.
    of_common = None
    step = max(1, int(table.tests.sizes.sum()) // MOST_SCORED)
    for number in range(0, len(table), step):
        counts = of_common
        if counts is None or not table.shares[number]:
            test = table.test_of(number)
            counts = _counts(size[test], covered[test])
        if table.shares[number]:
            of_common = counts
        if counts.rows:
            by_client[table.names[number]] = counts
        else:
            without_rows += 1
    if not by_client:
        raise no_test_rows()
    return PredictionSets(
        target=coverage,
        threshold=limit,
        calibration_rows=int(known.sum()),
        calibration_clients=clients,
        test_protocol=own.partition.test_protocol,
        clients=by_client,
        without_rows=without_rows,
    )


def _counts(size: NDArray[np.int64], covered: NDArray[np.bool_]) -> SetCounts:
    """The counts of a client's test rows [n]: sizes of their sets, -1 for a row without one, and right sets."""
    known = size >= 0
    sizes = size[known]
    return SetCounts(
        len(sizes),
        int(covered[known].sum()),
        int(sizes.sum()),
        int((sizes == 1).sum()),
        int((sizes == 0).sum()),
    )


def _nonconformity(
    own: OwnRows, first: Predictor, rows: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.int64], Any, Any]]:
    """Yield rows [n], and 1 - p [n, C] of their classes and [n] of their labels; NaN without scores or a label."""
    for part, scores in first.over_store(own.store, rows):
        of_classes = 1 - first.mean_probability(scores)
        label = own.label[part]
        of_truth = np.take_along_axis(of_classes, label[:, None], 1)[:, 0]
        yield part, of_classes, np.where(label < 0, np.nan, of_truth)
