"""Load a backbone: the one place that imports the module of its provider."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from fedcache.extract.backbones.backbone import Backbone, FrozenEncoder, Weights
from fedcache.extract.recipe import Recipe

if TYPE_CHECKING:
    import torch


def load(
    backbone: Backbone, weights: Weights, recipe: Recipe, *, device: str | torch.device = "cpu", dtype: str = "float32"
) -> FrozenEncoder:
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
        UsageError, when the backbone cannot follow the recipe; MachineError, when the weights are refused
            or do not fit.
    """
    backbone.accepts(recipe)
    provider = import_module(f"fedcache.extract.backbones.{backbone.provider}")
    encoder: FrozenEncoder = provider.load(backbone, weights, recipe, device=str(device), dtype=dtype)
    return encoder
