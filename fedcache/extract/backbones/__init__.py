"""Frozen backbones: what there is, where the weights lie, and how one is loaded.

``lookup`` and ``locate`` work on data alone and import no torch; ``load`` imports the provider's library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from fedcache.extract.backbones.backbone import Backbone, Download, Encoder, Weights
from fedcache.extract.backbones.table import BACKBONES, known, lookup
from fedcache.extract.backbones.weights import Caches, library_caches, locate, pull, ready
from fedcache.extract.recipe import Recipe

if TYPE_CHECKING:
    import torch

__all__ = [
    "BACKBONES",
    "Backbone",
    "Caches",
    "Download",
    "Encoder",
    "Weights",
    "known",
    "library_caches",
    "load",
    "locate",
    "lookup",
    "pull",
    "ready",
]


def load(
    backbone: Backbone, weights: Weights, recipe: Recipe, *, device: str | torch.device = "cpu", dtype: str = "float32"
) -> Encoder:
    """Load a backbone for one recipe.

    Args:
        backbone: from ``lookup``.
        weights: from ``locate``.
        recipe: the native one, or an override of it.
        device: where to run, already resolved.
        dtype: compute dtype, ``float32`` | ``bfloat16`` | ``float16``; weights and features stay float32.

    Returns:
        the encoder, in evaluation mode; equal inputs give equal features.

    Raises:
        FedcacheError: USAGE, when the backbone cannot follow the recipe; ENVIRONMENT, when the weights are refused
            or do not fit.
    """
    backbone.accepts(recipe)
    provider = import_module(f"fedcache.extract.backbones.{backbone.provider}")
    encoder: Encoder = provider.load(backbone, weights, recipe, device=device, dtype=dtype)
    return encoder
