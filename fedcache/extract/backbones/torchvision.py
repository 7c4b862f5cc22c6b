"""AlexNet and VGG-11 (torchvision, IMAGENET1K_V1): the flattened ``features`` at 64 px, as in FedPCL's table.

At 64 px AlexNet leaves 256 x 1 x 1 and VGG-11 512 x 2 x 2 values. Weights and normalisation are those of ImageNet. No
crop is published for this size, so the image is squashed to the square.
"""

from __future__ import annotations

from fedcache.extract.backbones.backbone import Backbone, FrozenEncoder, ModuleEncoder, Weights
from fedcache.extract.recipe import Recipe


def load(
    backbone: Backbone, weights: Weights, recipe: Recipe, *, device: str, dtype: str
) -> FrozenEncoder:
    """The convolutional part, flattened."""
    import torch
    from torch import nn
    from torchvision.models import get_model

    with torch.device("meta"):  # the classifier, 94 % of the parameters, is never filled
        features = get_model(backbone.architecture, weights=None).features
    module = nn.Sequential()
    module.add_module("features", features.to_empty(device="cpu"))
    module.add_module("flatten", nn.Flatten())
    weights.load_into(module, backbone.name, ignore=("classifier.",))
    return ModuleEncoder(backbone.name, module, recipe, device=device, dtype=dtype)
