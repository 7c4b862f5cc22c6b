"""The laws that every backbone must keep, on random images, texts or rows, depending on what the backbone reads.

The laws run on the CPU with the backbone's own weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcache.config import Home
from fedcache.extract.backbones import Backbone, FrozenEncoder, load, locate, lookup
from fedcache.extract.planning.plan import memory_of
from fedcache.extract.recipe import IMAGES, TEXTS, reads_of
from fedcache.testing.law import by_name, require

ITEMS = 6
CLOSE = 1e-4
"""Largest difference, relative to the norm, between features of an item alone and in a batch."""

WORDS = (
    "a",
    "river",
    "the",
    "red",
    "night",
    "of",
    "seven",
    "sounds",
    "quick",
    "paper",
    "under",
    "ice",
)


@dataclass(frozen=True)
class BackboneTrial:
    """A backbone by its name, and the places where its weights are searched."""

    name: str
    weights: Mapping[str, Path]  # as of ``--weights NAME=FILE``
    home: Home

    @property
    def row(self) -> Backbone:
        """The row of the backbone in the table of backbones; errors as of ``lookup``."""
        return lookup(self.name, home=self.home.root, file=self.weights.get(self.name))

    def load(self) -> FrozenEncoder:
        """The encoder, loaded again. Errors as of ``load``; MachineError if its weights are not found."""
        row = self.row
        # Weights may be given under an alias; ``locate`` looks for them under the name in the table.
        given = dict(self.weights)
        if self.name in given:
            given[row.name] = given[self.name]
        memory = memory_of(self.home)
        found = locate(row, given=given, home=self.home.root, memory=memory, offline=True)
        recipe = replace(row.recipe, weights=found.sha256)
        return load(row, found, recipe, device="cpu", dtype="float32")

    def noise(self, encoder: FrozenEncoder) -> Any:
        """Six different items: uint8 [6, H, W, 3] at the backbone's own size, texts, or rows like its ``example``."""
        kind = reads_of(self.row.recipe)
        g = np.random.default_rng(1)
        if kind == IMAGES:
            side = self.row.recipe.size or 32  # size 0: images keep their size
            pixels = g.integers(0, 256, (ITEMS, side, side, 3), dtype=np.uint8)
            return torch.from_numpy(pixels)
        if kind == TEXTS:
            return [" ".join(g.choice(WORDS, 3 + i)) for i in range(ITEMS)]
        example = encoder.example.numpy()  # type: ignore[attr-defined]
        # Rows may be whole numbers. Without the factor, most of them would be 0.
        drawn = 100.0 * g.standard_normal((ITEMS, *example.shape))
        if example.dtype.kind == "u":  # unsigned integers
            drawn = np.abs(drawn)
        return drawn.astype(example.dtype)


def features(encoder: FrozenEncoder, items: Any) -> Tensor:
    """A copy of the features [B, D] of images, texts or rows."""
    found: Tensor
    if isinstance(items, Tensor):
        found = encoder.image(items)
    else:
        found = encoder.items(items)[0]  # type: ignore[attr-defined]
    # An encoder may reuse its output for the next call.
    return found.clone()


def features_are_rows_of_its_width(backbone: BackboneTrial) -> None:
    """A batch gives one row of finite float32 numbers for each item, with the declared width of the backbone."""
    encoder = backbone.load()
    found = features(encoder, backbone.noise(encoder))
    shape = tuple(found.shape)
    expected = (ITEMS, backbone.row.width)
    require(shape == expected, f"features of shape {shape}, expected {expected}")
    require(found.dtype == torch.float32, f"features are {found.dtype}")
    require(bool(found.isfinite().all()), "some features are not finite")


def the_same_items_give_the_same_bits(backbone: BackboneTrial) -> None:
    """Nothing is drawn or trained: a second call, and a second loading, give the same bits."""
    encoder = backbone.load()
    items = backbone.noise(encoder)
    first = features(encoder, items)
    same = torch.equal(first, features(encoder, items))
    require(same, "a second call gives other features, as without eval mode")
    same = torch.equal(first, features(backbone.load(), items))
    require(same, "the backbone gives other features after it is loaded again")


def an_item_does_not_see_its_batch(backbone: BackboneTrial) -> None:
    """An item has the same features alone and in a batch with other items."""
    encoder = backbone.load()
    items = backbone.noise(encoder)
    together = features(encoder, items)
    alone = torch.cat([features(encoder, items[i : i + 1]) for i in range(ITEMS)])
    # A batch of another size may use another kernel, with sums that differ in their last bits.
    norm = together.norm(dim=1).max().clamp(min=1e-12)
    apart = float((together - alone).norm(dim=1).max() / norm)
    require(
        apart < CLOSE,
        f"features differ by {apart:.1e} of their norm, as with BatchNorm in training mode or padding that is read",
    )


def items_are_distinguished(backbone: BackboneTrial) -> None:
    """Different items have different features."""
    encoder = backbone.load()
    found = features(encoder, backbone.noise(encoder))
    # The diagonal has each item's distance to itself; a large number excludes it from the minimum.
    distances = torch.cdist(found, found) + torch.eye(ITEMS) * 1e9
    require(float(distances.min()) > 0.0, "two different items have the same features")


def the_items_are_left_as_they_are(backbone: BackboneTrial) -> None:
    """The encoder does not write into its input."""
    encoder = backbone.load()
    items = backbone.noise(encoder)
    before = deepcopy(items)
    features(encoder, items)
    if isinstance(items, list):
        same = items == before
    else:
        same = bool((items == before).all())
    require(same, "the backbone changed its input")


BACKBONE_LAWS = by_name(
    features_are_rows_of_its_width,
    the_same_items_give_the_same_bits,
    an_item_does_not_see_its_batch,
    items_are_distinguished,
    the_items_are_left_as_they_are,
)
"""All laws of backbones by name."""
