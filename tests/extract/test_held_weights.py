"""Weights held in a narrow type: the features have the bits of autocast, which casts them in every call."""

import copy

import pytest
import torch
from torch import nn

from fedcache import Recipe
from fedcache.extract.backbones.backbone import ModuleEncoder


class Own(nn.Linear):
    """A layer that computes with its weight itself."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight / self.weight.norm(), self.bias)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.BatchNorm2d(6),
        nn.GELU(),
        nn.Flatten(),
        nn.LayerNorm(6 * 6 * 6),
        nn.Linear(6 * 6 * 6, 16),
        Own(16, 8),
    ).eval()


def encoder(module, dtype, **more):
    recipe = Recipe("x", "", size=8)
    return ModuleEncoder("x", module, recipe, device="cpu", dtype=dtype, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_features_have_the_bits_of_autocast(dtype):
    images = torch.randint(0, 256, (4, 8, 8, 3), dtype=torch.uint8)
    plain = encoder(network(), "float32")
    held = encoder(network(), dtype)
    assert {p.dtype for p in plain.module.parameters()} == {torch.float32}
    narrow = getattr(torch, dtype)
    layers = held.module
    assert [layers[i].weight.dtype for i in (0, 1, 4, 5, 6)] == [
        narrow,
        torch.float32,
        torch.float32,
        narrow,
        torch.float32,  # a subclass
    ]
    with torch.inference_mode(), torch.autocast("cpu", dtype=narrow):
        expected = plain.module(plain.normalise(images)).float()
    assert torch.equal(held.image(images), expected)
    assert not torch.equal(plain.image(images), expected)


def test_a_tower_of_texts_keeps_its_weights():
    both = nn.ModuleDict({"visual": network(), "words": nn.Linear(4, 8)})
    made = encoder(
        both, "bfloat16", image=both.visual, text=both.words, tokenize=lambda _: torch.ones(2, 4)
    )
    assert both.visual[0].weight.dtype is torch.bfloat16
    before = copy.deepcopy(both.words)
    assert both.words.weight.dtype is torch.float32
    expected = nn.functional.normalize(before(torch.ones(2, 4)), dim=-1)
    assert torch.equal(made.text(["a", "b"]), expected)
    unknown = nn.Sequential(nn.Linear(4, 8))
    encoder(unknown, "bfloat16", text=unknown, tokenize=lambda _: torch.ones(2, 4))
    assert unknown[0].weight.dtype is torch.float32, "which part makes texts is not known"
