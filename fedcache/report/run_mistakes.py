"""Mistakes of a stored run's models on its own test rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedcache.errors import StoreError
from fedcache.extract.planning.find_images import ImagePlaces
from fedcache.models.evaluate import Mistakes, find_mistakes
from fedcache.models.saved_model import ModelOptions
from fedcache.progress import Silent
from fedcache.report.find_runs import StoredRun
from fedcache.report.run_origin import RunStore
from fedcache.runs import predict_run
from fedcache.runs.directory import command_saving

MOST_SCORED = 1_000_000
"""Rows that clients' own models score; of clients that together hold more, every k-th is asked."""


def mistakes_of(entry: StoredRun, source: RunStore, places: ImagePlaces) -> Mistakes:
    """A run's mistakes on its own test rows, by the models of its first seed; of several clients' models each on the
    rows of its client.

    Raises StoreError for a run without models, and UsageError for one of a method of somebody's own.
    """
    members = predict_run.open_members(entry.path, ModelOptions(), Silent())
    facts = members[0].facts
    partition = source.partition
    if not facts.personal:
        one = predict_run.predictor_of(members, ModelOptions(), places.home, "auto")
        return find_mistakes(source.store, [(None, one, np.asarray(partition.test, np.int64))])
    clients = [c for c in partition.clients if c.name in facts.saved and len(c.test)]
    if not clients:
        raise StoreError(
            f"The run saved no client's model ({facts.clients:,} clients).",
            command_saving(entry.path, "all"),
        )
    first = predict_run.predictor_of(
        members, ModelOptions(client=clients[0].name), places.home, "auto"
    )
    # clients may all be tested on the same rows
    step = -(-sum(len(c.test) for c in clients) // MOST_SCORED)
    deals = (
        (c.name, replace(first, client=c.name), np.asarray(c.test, np.int64))
        for c in clients[::step]
    )
    return find_mistakes(source.store, deals)
