"""``random-projection``: a seeded Gaussian projection of the pixels, without weights, for tests and as a baseline.

f(x) = G^T x / sqrt(n) for n = 3HW normalised values and G [n, D] standard normal, which keeps distances to within
O(1 / sqrt(D)) (Johnson and Lindenstrauss, 1984). ``random-projection:D`` names another width.
"""

from __future__ import annotations

import re

from fedcache.errors import UsageError, shell_word
from fedcache.extract.backbones.backbone import Backbone, FrozenEncoder, ModuleEncoder, Weights
from fedcache.extract.backbones.rows import random_projection
from fedcache.extract.recipe import Recipe

WIDEST = 65536


def derive(name: str) -> Backbone:
    """The row of ``random-projection:<D>``. Raises UsageError if D is not a width."""
    text = name.partition(":")[2]
    if not re.fullmatch(r"[1-9]\d{0,4}", text) or int(text) > WIDEST:
        raise UsageError(
            f"{name!r}: {text!r} is not a width from 1 to {WIDEST}.",
            "For example random-projection:128",
        )
    return random_projection(name, int(text))


def load(
    backbone: Backbone, weights: Weights, recipe: Recipe, *, device: str, dtype: str
) -> FrozenEncoder:
    """The projection of ``recipe.size`` px images, drawn on the CPU so that every device has the same."""
    import torch
    from torch import nn

    seed = seed_of(backbone, weights)
    inputs = 3 * recipe.size * recipe.size
    projection = nn.Linear(inputs, backbone.width, bias=False)
    draws = torch.randn(backbone.width, inputs, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        projection.weight.copy_(draws / inputs**0.5)
    module = nn.Sequential(nn.Flatten(), projection)
    return ModuleEncoder(backbone.name, module, recipe, device=device, dtype=dtype)


def seed_of(backbone: Backbone, weights: Weights) -> int:
    """The seed in ``seed:<n>``; UsageError when the weights are a file."""
    if weights.path is not None or not weights.sha256.startswith("seed:"):
        raise UsageError(
            f"{backbone.name} draws its weights from a seed, but {weights.origin} is not a seed.",
            f"For example --weights {shell_word(backbone.name)}=seed:1",
        )
    return int(weights.sha256.removeprefix("seed:"))
