"""``cnn2``: the two-layer CNN, which FedPCL's table of three backbones has in addition to AlexNet and VGG-11.

The paper calls it pretrained on ImageNet; its released code ignores the flag and uses random weights, so a seed is
the default here and a file is an option. At 64 px: conv 5x5 (10 channels), BN, max pool 2, ReLU; conv 5x5 (20),
max pool 2, ReLU; 20 x 13 x 13 = 3380 values; linear to 2048, ReLU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedcache.extract.backbones.backbone import Backbone, FrozenEncoder, ModuleEncoder, Weights
from fedcache.extract.backbones.random import seed_of
from fedcache.extract.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn


def build() -> nn.Module:
    """The network up to the features; parameter names are those of the released code."""
    from collections import OrderedDict

    from torch import nn

    layers = [
        ("conv1", nn.Conv2d(3, 10, 5)),
        ("bn1", nn.BatchNorm2d(10)),
        ("pool1", nn.MaxPool2d(2)),
        ("relu1", nn.ReLU()),
        ("conv2", nn.Conv2d(10, 20, 5)),
        ("pool2", nn.MaxPool2d(2)),
        ("relu2", nn.ReLU()),
        ("flatten", nn.Flatten()),
        ("fc1", nn.Linear(3380, 2048)),
        ("relu3", nn.ReLU()),
    ]
    return nn.Sequential(OrderedDict(layers))


def load(
    backbone: Backbone, weights: Weights, recipe: Recipe, *, device: str, dtype: str
) -> FrozenEncoder:
    """The network with weights from a file, or drawn from the seed."""
    module = build()
    if weights.path is not None:
        weights.load_into(module, backbone.name, ignore=("fc2.",))  # the classifier
    else:
        _draw(module, seed_of(backbone, weights))
    return ModuleEncoder(backbone.name, module, recipe, device=device, dtype=dtype)


def _draw(module: nn.Module, seed: int) -> None:
    """U(-1/sqrt(fan in), 1/sqrt(fan in)) for weights and biases, torch's default, from a generator of their own."""
    import torch
    from torch import nn

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                bound = layer.weight[0].numel() ** -0.5
                for value in (layer.weight, layer.bias):
                    if value is not None:
                        draws = torch.rand(value.shape, generator=generator)
                        value.copy_((draws * 2 - 1) * bound)
