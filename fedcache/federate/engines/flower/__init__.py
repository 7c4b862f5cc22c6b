"""Federations through Flower: every client keeps its own shard on its own machine (extra ``flower``).

    server --down of every point--> site: fit on its own rows --up--> gate --> pool --> aggregate

``messages`` are trees of tensors as bytes, ``site`` is what a client computes, ``sites`` says which of them fit and
waits for them over a ``Transport``, of which ``transport`` is Flower's, ``server`` makes the rounds, and
``server`` has the life of a run too. Only ``transport`` and the two apps import Flower, so the rest is tested without
it.
"""

from __future__ import annotations

import os

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""What keeps Flower from looking up any name. It is read when flwr is imported, so it is set before, in every process;
with Flower's defaults a run of three messages made 20 look-ups."""

os.environ.update(QUIET)
