"""Switches of methods that train an encoder on images: which encoder, how views are drawn, and in which precision.

Augmentation is a named policy whose numbers can be set one by one. FLESD says only that augmentation differs by data
set (5.1) and that local training is SimCLR. Preset ``paper`` takes the policy of Chen et al. for CIFAR at half
strength. Preset ``official`` takes the policies that FLESD released, selected by the image size (D-91).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from fedcache.errors import MachineError, UsageError
from fedcache.federate.methods.common import Ctx, Hp, HParam
from fedcache.heads.augment import Crop, Policy, augment
from fedcache.heads.encoder import RESNETS, STEMS, Encoder

ON_IMAGES = HParam(
    "encoder",
    "conv",
    "choice",
    "conv: a ResNet-18 on images (--backbones pixels); resnet50: a ResNet-50 on images",
    choices=tuple(RESNETS),
)

SMALL_IMAGE = 32
"""Image side in pixels up to which ``augment=auto`` takes CIFAR's policy; FLESD's other data sets have 64 and 224."""

POLICIES = {
    "plain": Policy(flip=False),
    "simclr": Policy("resized", jitter=0.4, hue=0.1, grey=0.2),
    "cifar": Policy("resized", jitter=0.8, hue=0.2, grey=0.2),
    "imagenet": Policy("resized", jitter=0.8, hue=0.4, grey=0.5, blur=0.5),
    "supervised": Policy("padded"),
}
"""``plain`` changes nothing. ``simclr`` is that of Chen et al. (B.9), with colours at strength 0.5 and FLESD's area.
The others are those of the released FLESD code."""

LARGE_SUPERVISED = Policy("resized", area=0.08)
"""``supervised`` for images larger than ``SMALL_IMAGE``, as released for Tiny-ImageNet and ImageNet-100."""

AUGMENT = (
    HParam(
        "augment",
        "simclr",
        "choice",
        "policy of live augmentation (D-91); auto: cifar for images of up to 32 px, imagenet for "
        "larger ones; supervised: padded crop for images of up to 32 px, resized crop for larger "
        "ones",
        official="auto",
        choices=("auto", *POLICIES),
    ),
    HParam(
        "crop",
        "auto",
        "choice",
        "crop of the augmentation; resized: a window of random size; padded: a window as large "
        "as the image, over a margin of 4 px; auto: the crop of the policy",
        choices=("auto", "resized", "padded", "none"),
    ),
    HParam(
        "crop_area",
        None,
        "float",
        "smallest share of the image that a resized crop shows",
        low=0.01,
        high=1.0,
        auto="the policy's",
    ),
    HParam(
        "jitter",
        None,
        "float",
        "strength of brightness, contrast and saturation",
        low=0.0,
        auto="the policy's",
    ),
    HParam(
        "hue",
        None,
        "float",
        "largest change of the hue, as a share of the colour circle",
        low=0.0,
        high=0.5,
        auto="the policy's",
    ),
    HParam(
        "grey",
        None,
        "float",
        "share of views without colour",
        low=0.0,
        high=1.0,
        auto="the policy's",
    ),
    HParam("blur", None, "float", "share of blurred views", low=0.0, high=1.0, auto="the policy's"),
    HParam(
        "flip",
        True,
        "bool",
        "whether live augmentation may mirror images; set false for letters and digits",
    ),
)

LIVE = (
    HParam(
        "channels",
        64,
        "int",
        "channels of the first convolution; ResNet-18 and ResNet-50 have 64",
        low=1,
    ),
    HParam(
        "stem",
        "cifar",
        "choice",
        "first layers of the ResNet; cifar: a 3 x 3 convolution; imagenet: a 7 x 7 convolution "
        "and max pooling",
        choices=STEMS,
    ),
    *AUGMENT,
    HParam(
        "amp",
        False,
        "bool",
        "train with autocast in bfloat16 on a CUDA GPU (D-97)",
    ),
)


def encoder_of(hp: Hp) -> Encoder:
    """The encoder that the switches describe."""
    sizes: dict[str, Any] = {k: hp[k] for k in ("hidden", "proj", "channels", "stem") if k in hp}
    return Encoder(str(hp["encoder"]), **sizes)


def on_images(hp: Hp) -> bool:
    """Whether the encoder reads images."""
    return hp["encoder"] in RESNETS


def policy_of(hp: Hp, image: tuple[int, int]) -> Policy:
    """How views of images of (height, width) are drawn."""
    name = str(hp["augment"])
    small = max(image) <= SMALL_IMAGE
    if name == "auto":
        name = "imagenet"
        if small:
            name = "cifar"
    # ``supervised`` has a policy of its own for larger images.
    policy = LARGE_SUPERVISED
    if small or name != "supervised":
        policy = POLICIES[name]
    # A switch that is set replaces the number of the policy.
    keys = {"crop_area": "area", "jitter": "jitter", "hue": "hue", "grey": "grey", "blur": "blur"}
    numbers = {}
    for key, field in keys.items():
        if hp[key] is not None:
            numbers[field] = float(cast(float, hp[key]))
    if hp["crop"] == "auto":
        crop = policy.crop
    else:
        crop = cast(Crop, hp["crop"])
    flip = policy.flip and bool(hp["flip"])
    return replace(policy, crop=crop, flip=flip, **numbers)


def view(x: Tensor, u: Tensor, ctx: Ctx) -> Tensor:
    """An augmented view [B, 3, H, W] in [-1, 1] of stored rows x [B, H W 3], by draws u [B, DRAWS]."""
    policy = policy_of(ctx.hp, ctx.image)
    return 2.0 * augment(unit_range(x, ctx), u, policy) - 1.0


def unit_range(x: Tensor, ctx: Ctx) -> Tensor:
    """Bytes [.., H W 3] as [.., 3, H, W] in [0, 1]."""
    channels_first = x.reshape(*x.shape[:-1], *ctx.image, 3).movedim(-1, -3)
    return channels_first.to(ctx.env.dtype) / 255.0


def precision(ctx: Ctx) -> AbstractContextManager[object]:
    """The precision of forward passes in training; bfloat16 has the range of float32, so losses need no scaling."""
    if not ctx.hp.get("amp"):
        return nullcontext()
    return torch.autocast(ctx.env.device.type, dtype=torch.bfloat16)


def check(hp: Hp, ctx: Ctx) -> None:
    """Refuse images for a head, features for a convolution, and ``amp`` without a CUDA GPU."""
    if on_images(hp) != bool(ctx.env.image):
        found = "features"
        hint = "Train on images: --backbones pixels, or use --set encoder=mlp if the method has it."
        if ctx.env.image:
            found = "images"
            hint = "Train on features: --backbones NAME, or use --set encoder=conv if the method has it."
        raise UsageError(f"encoder={hp['encoder']} cannot read {found}.", hint)
    if hp.get("amp") and ctx.env.device.type != "cuda":
        raise MachineError(
            f"amp=true trains in bfloat16 on a CUDA GPU, but this run computes on {ctx.env.device.type}.",
            "Use --device cuda on a machine that has one, or --set amp=false.",
        )
