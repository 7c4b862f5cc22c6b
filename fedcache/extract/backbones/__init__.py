"""Frozen backbones: the table of all backbones, finding their weights, and loading them.

``lookup`` and ``locate`` work on data alone and import no torch; ``load`` imports the provider's library.
"""

from __future__ import annotations

from fedcache.extract.backbones.backbone import Backbone, FrozenEncoder, Weights, library_caches
from fedcache.extract.backbones.rows import BACKBONES
from fedcache.extract.backbones.table import load, lookup, lookup_recorded
from fedcache.extract.backbones.weights import (
    CHECKPOINTS,
    import_weights,
    known,
    locate,
    pull,
    ready,
    try_weights,
)

__all__ = [
    "BACKBONES",
    "CHECKPOINTS",
    "Backbone",
    "FrozenEncoder",
    "Weights",
    "import_weights",
    "known",
    "library_caches",
    "load",
    "locate",
    "lookup",
    "lookup_recorded",
    "pull",
    "ready",
    "try_weights",
]
