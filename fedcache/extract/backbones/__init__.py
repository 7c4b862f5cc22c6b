"""Frozen backbones: what there is, where the weights lie, and how one is loaded.

``lookup`` and ``locate`` work on data alone and import no torch; ``load`` imports the provider's library.
"""

from __future__ import annotations

from fedcache.extract.backbones.backbone import Backbone, Download, FrozenEncoder, Weights
from fedcache.extract.backbones.download import import_weights, pull
from fedcache.extract.backbones.loading import load
from fedcache.extract.backbones.table import BACKBONES, lookup
from fedcache.extract.backbones.weights import Caches, known, library_caches, locate, ready

__all__ = [
    "BACKBONES",
    "Backbone",
    "Caches",
    "Download",
    "FrozenEncoder",
    "Weights",
    "import_weights",
    "known",
    "library_caches",
    "load",
    "locate",
    "lookup",
    "pull",
    "ready",
]
