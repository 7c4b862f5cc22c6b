"""``pixels``: the decoded image itself, for methods that need a live or a trainable encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedcache.extract.backbones.backbone import Backbone, FrozenEncoder, Weights, no_text
from fedcache.extract.recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor


class _Pixels:
    def image(self, x: Tensor) -> Tensor:
        return x

    def text(self, prompts: Sequence[str]) -> Tensor:
        raise no_text("pixels")


def load(
    backbone: Backbone, weights: Weights, recipe: Recipe, *, device: str, dtype: str
) -> FrozenEncoder:
    """The identity on uint8 [B, H, W, 3]."""
    return _Pixels()
