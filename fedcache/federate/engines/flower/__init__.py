"""Federations through Flower: every client keeps its own shard on its own machine (extra ``flower``).

    server --down of every point--> site: fit on its own rows --up--> gate --> pool --> aggregate

``messages`` are trees of tensors as bytes, ``site`` is what a client computes, ``members`` says who fits together,
``roster`` waits for them over a ``Carrier``, of which ``carrier`` is Flower's, and ``server`` is the loop of rounds.
Only ``carrier`` imports Flower, so the rest is tested without it.
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
