"""``pixels``: the decoded image itself, for methods that need a live or a trainable encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedcache.extract.backbones.backbone import Backbone, Encoder, Weights
from fedcache.extract.recipe import Recipe

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BACKBONES = (
    Backbone(
        name="pixels",
        provider="pixels",
        width=0,
        text_width=None,
        recipe=Recipe("pixels", "", size=0, pooling="none", dtype="uint8"),
        source="no weights: the image, decoded and resized",
    ),
)


class _Pixels:
    def image(self, x: Tensor) -> Tensor:
        return x

    def text(self, prompts: Sequence[str]) -> Tensor:
        from fedcache.extract.backbones.encoder import no_text

        raise no_text("pixels")


def load(backbone: Backbone, weights: Weights, recipe: Recipe, *, device: str | torch.device, dtype: str) -> Encoder:
    """The identity on uint8 [B, H, W, 3]."""
    return _Pixels()
