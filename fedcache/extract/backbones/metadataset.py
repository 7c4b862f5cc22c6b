"""The single-domain Meta-Dataset ResNet-18s (Dvornik et al., SUR, ECCV 2020; reused by URT and by FedPCL).

Each is a ResNet-18 with a 5x5 stride-2 stem of padding 1 and no max pooling after it. It was trained at 84 px on images
scaled to [-1, 1]; the feature is the average pool, 512 wide. FedPCL uses the same weights at 64 px, but its released
code does max-pool after the stem. ``resnet18-<domain>-maxpool`` is the network of this code, which reproduces FedPCL's
numbers; the features of the two networks differ. The code ends with an L2 normalisation that divides each number by
itself (``feat_post=sign``). This step is no part of the features.
"""

from __future__ import annotations

from fedcache.extract.backbones.backbone import Backbone, FrozenEncoder, ModuleEncoder, Weights
from fedcache.extract.recipe import Recipe


def load(
    backbone: Backbone, weights: Weights, recipe: Recipe, *, device: str, dtype: str
) -> FrozenEncoder:
    """The ResNet-18 up to its average pool."""
    from torch import nn
    from torchvision.models import resnet18

    model = resnet18(weights=None)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=5, stride=2, padding=1, bias=False)
    if backbone.recipe.pooling == "avg":  # else maxpool+avg, of resnet18-<domain>-maxpool
        model.maxpool = nn.Identity()
    model.fc = nn.Identity()
    weights.load_into(model, backbone.name, ignore=("cls_fn.", "fc."))
    return ModuleEncoder(backbone.name, model, recipe, device=device, dtype=dtype)
