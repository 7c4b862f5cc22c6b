"""What models get wrong and are most certain of: rows of a store, each scored by the model that its holder uses."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from fedcache.models.evaluate import model_labels
from fedcache.models.measures import Mistake, Mistakes
from fedcache.models.predictor import Predictor, array_keys
from fedcache.store.reader import Reader
from fedcache.store.store import Store

MOST = 24
"""Mistakes that are kept."""

Deal = tuple[str | None, Predictor, NDArray[np.int64]]
"""A client (None for the one model for all), its model, and the rows that it scores."""

BLOCK = 4096
"""Rows that are classified at once."""


def find_mistakes(store: Store, deals: Iterable[Deal]) -> Mistakes:
    """What models of one run get wrong with the highest probability; equal ones in the order of rows.

    Rows without a label that the model knows, unreadable ones and those without a score are left out. Raises
    StoreError for a store that lacks what the models read.
    """
    s, best = store.samples, list[Mistake]()
    rows_scored = wrong_rows = clients = 0
    readers: list[Reader] = []
    label = np.empty(0, np.int64)
    for client, predictor, wanted in deals:
        clients += client is not None
        if not readers:
            readers = [store.reader(key) for key in array_keys(predictor.members[0], store)]
            label = np.where(
                s.ok == 1,
                model_labels(np.asarray(s.label, np.int64), s.classes, predictor.classes),
                -1,
            )
        rows = np.asarray(wanted, np.int64)
        rows = rows[label[rows] >= 0]
        for start in range(0, len(rows), BLOCK):
            part = rows[start : start + BLOCK]
            scores = predictor.scores(*(reader.rows(part)[:, 0] for reader in readers))
            predicted = predictor.predicted(scores)
            told = predictor.mean_probability(scores)[np.arange(len(part)), predicted]
            wrong = np.flatnonzero((predicted >= 0) & (predicted != label[part]))
            rows_scored += int((predicted >= 0).sum())
            wrong_rows += len(wrong)
            names = predictor.classes
            best += [
                Mistake(
                    int(part[i]),
                    s.name[part[i]],
                    names[label[part[i]]],
                    names[predicted[i]],
                    float(told[i]),
                    client,
                )
                for i in wrong[np.argsort(-told[wrong], kind="stable")[:MOST]]
            ]
            best = sorted(best, key=lambda m: (-m.probability, m.row))[:MOST]
    return Mistakes(store.path, tuple(best), wrong_rows, rows_scored, clients)
