"""The table agrees with the libraries whose weights it names."""

import json
import math
from pathlib import Path

import pytest
from command import python
from refusal import refused

from fedcache.extract.backbones import BACKBONES, load, lookup
from fedcache.extract.backbones.backbone import Weights
from fedcache.extract.recipe import VERSION
from fedcache.store.files import read_sealed, write_sealed

TIMM = [b for b in BACKBONES.values() if b.architecture.startswith(("tf_", "vit_"))]
CLIP = [b for b in BACKBONES.values() if b.provider == "open_clip"]


@pytest.mark.parametrize("backbone", TIMM, ids=lambda b: b.name)
def test_native_recipes_are_timms(backbone):
    import timm

    cfg = timm.get_pretrained_cfg(backbone.architecture)
    recipe = backbone.recipe
    assert (3, recipe.size, recipe.size) == cfg.input_size
    assert recipe.interpolation == cfg.interpolation
    # timm resizes the short side to the floor of size / crop_pct, a recipe to the nearest integer
    assert round(recipe.size / recipe.crop_pct) == math.floor(recipe.size / cfg.crop_pct)
    assert recipe.mean == cfg.mean
    assert recipe.std == cfg.std
    assert recipe.resize == "crop"
    assert cfg.crop_mode == "center"
    if backbone.hub is not None:
        assert backbone.hub == cfg.hf_hub_id
    if cfg.license:
        assert backbone.licence.lower() == cfg.license


@pytest.mark.parametrize("backbone", CLIP, ids=lambda b: b.name)
def test_native_recipes_are_open_clips(backbone):
    import open_clip

    cfg = open_clip.get_pretrained_cfg(backbone.architecture, "openai")
    model = open_clip.get_model_config(backbone.architecture)
    recipe = backbone.recipe
    assert recipe.mean == cfg["mean"]
    assert recipe.std == cfg["std"]
    assert recipe.interpolation == cfg["interpolation"]
    assert recipe.resize == "crop"
    assert cfg["resize_mode"] == "shortest"
    assert recipe.activation == "quickgelu"
    assert cfg["quick_gelu"]
    assert recipe.size == model["vision_cfg"]["image_size"]
    assert backbone.width == backbone.text_width == model["embed_dim"]
    assert backbone.hub == cfg["hf_hub"].rstrip("/")


@pytest.mark.parametrize("name", ["alexnet", "vgg11"])
def test_native_recipes_are_torchvisions(name):
    from torchvision.models import get_model_weights

    weights = get_model_weights(name)["IMAGENET1K_V1"]
    preset = weights.transforms()
    backbone = BACKBONES[name]
    assert backbone.recipe.mean == tuple(preset.mean)
    assert backbone.recipe.std == tuple(preset.std)
    assert backbone.recipe.interpolation == preset.interpolation.value
    assert weights.url.endswith(backbone.files[0])
    assert abs(backbone.size / 2**20 - weights.meta["_file_size"]) < 0.1


def test_the_papers_widths():
    width = {name: b.width for name, b in BACKBONES.items()}
    # FedPCL: ResNets 512 each; 2048 + 256 + 2048 = 4352; ViTs 192 + 384 + 768 = 1344. CLIP RN50 1024, ViT-B/16 512.
    assert [width[f"resnet18-{d}"] for d in ("quickdraw", "aircraft", "birds")] == [512] * 3
    assert width["cnn2"] + width["alexnet"] + width["vgg11"] == 4352
    assert width["vit-tiny"] + width["vit-small"] + width["vit-base"] == 1344
    assert width["clip-rn50"] == 1024
    assert width["clip-vit-b-16"] == 512


def test_every_row_is_complete():
    for name, row in BACKBONES.items():
        assert row.name == name == row.recipe.backbone
        assert row.recipe.weights == ""
        assert row.source
        assert (row.width > 0) == (name != "pixels")
        assert row.has_weights or row.seeded or name == "pixels"


def test_an_unknown_name_is_a_usage_error_with_the_nearest():
    for name, said in (
        ("clip-rn5O", "Did you mean 'clip-rn50'"),
        ("timm:resnet10x", "timm model"),
        ("timm:resnet18.nobody", "timm weights"),
        ("open_clip:RN51@openai", "Did you mean 'RN50'"),
        ("open_clip:RN50@opnai", "Did you mean 'openai'"),
        ("random-projection:x", "width"),
    ):
        refused(lambda name=name: lookup(name), said)


def test_the_pooling_of_a_timm_model_is_its_own():
    import timm

    cfg = timm.get_pretrained_cfg("vit_tiny_patch16_224.augreg_in21k_ft_in1k")
    row = lookup("timm:vit_tiny_patch16_224.augreg_in21k_ft_in1k")
    assert row.recipe.pooling == "token"
    assert row.recipe.resize == "crop"
    assert row.recipe.size == 224
    assert (
        (row.recipe.mean, row.recipe.std)
        == (tuple(cfg.mean), tuple(cfg.std))
        == ((0.5,) * 3, (0.5,) * 3)
    )
    assert row.recipe.interpolation == cfg.interpolation == "bicubic"
    assert (cfg.crop_pct, row.recipe.crop_pct) == (0.9, 224 / 248), "timm resizes to int(224 / 0.9)"


@pytest.mark.slow
def test_the_width_of_a_timm_model_is_that_of_its_output():
    # mobilenetv3 ends in a 1x1 convolution after the pool: 576 channels go in and 1024 come out
    assert lookup("timm:mobilenetv3_small_050").width == 1024


def test_an_open_clip_name_keeps_its_own_preprocessing():
    row = lookup("open_clip:ViT-B-16-SigLIP@webli")
    assert row.recipe.resize == "squash"
    assert row.recipe.mean == (0.5, 0.5, 0.5)
    assert row.recipe.activation == "native"
    assert row.width == 768
    assert row.hub == "timm/ViT-B-16-SigLIP"
    assert lookup("open_clip:RN50@openai").recipe.activation == "quickgelu"
    assert lookup("open_clip:RN50@openai").fixed


@pytest.mark.slow
def test_a_derived_row_is_remembered_and_needs_no_library(tmp_path):
    name = "timm:resnet10t.c3_in1k"
    row = lookup(name, home=tmp_path)
    code = (
        "import sys; from pathlib import Path; from fedcache.extract.backbones import lookup;"
        f"row = lookup({name!r}, home=Path({str(tmp_path)!r}));"
        "print(row.recipe.digest, row.width, 'timm' in sys.modules, 'torch' in sys.modules)"
    )
    assert python(code).split() == [row.recipe.digest, "512", "False", "False"]


def test_a_row_remembered_by_another_version_of_the_preprocessing_is_derived_again(tmp_path):
    name = "random-projection:16"
    row = lookup(name, home=tmp_path)
    (file,) = (tmp_path / "recipes").iterdir()
    old = read_sealed(file, {"kind": "backbone", "name": name}).content
    old["recipe"]["version"] = VERSION - 1
    write_sealed(file, {"kind": "backbone", "name": name}, old)
    assert lookup(name, home=tmp_path) == row
    assert (
        json.loads(file.read_text())["content"]["recipe"]["version"]
        == row.recipe.version
        == VERSION
    )


def test_a_model_of_one_size_refuses_another_before_it_reads_a_file():
    for name in ("clip-rn50", "alexnet", "cnn2"):
        row = BACKBONES[name]
        other = row.recipe.override({"size": "96"})
        refused(
            lambda row=row, other=other: load(row, Weights(Path("/nowhere"), "", ""), other),
            f"{row.recipe.size} px",
        )
