"""Federations through Flower: every client keeps its own shard on its own machine (extra ``flower``).

    server --down of every point--> site: fit on its own rows --up--> validate --> pool --> aggregate

``messages`` packs trees of tensors as bytes. ``site`` computes for a client. ``sites`` waits for the sites over a
``Transport`` and checks that the sites fit together; ``transport`` is Flower's. ``server`` makes the rounds and stores
the runs. Only ``transport``, ``secure_aggregation``, ``app_forks`` and the two apps import Flower, so the rest is
tested without it.
"""

from __future__ import annotations

import os

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""Environment that stops Flower's requests to the network; otherwise a run of three messages makes 20 requests.
Flower reads these variables when flwr is imported, so every process sets them before the import."""

os.environ.update(QUIET)

TRAIN = (
    "method",
    "preset",
    "backbones",
    "rounds",
    "participation",
    "seeds",
    "set",
    "eval_every",
    "dtype",
    "aggregate",
    "on_bad_update",
    "byzantine",
    "max_update_norm",
    "max_rows_per_client",
    "max_share",
    "max_row_norm",
)
"""Fields of ``TrainConfig`` that a federation over sites supports. An app contains all of them."""
