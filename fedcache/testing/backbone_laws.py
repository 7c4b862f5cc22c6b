"""The laws that every backbone keeps, on images of noise; they run on the CPU and read its own weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fedcache.config import Home
from fedcache.extract.backbones import Backbone, FrozenEncoder, load, locate, lookup
from fedcache.extract.planning.plan import memory_of
from fedcache.testing.law import require

IMAGES = 6
CLOSE = 1e-4
"""How far features may lie apart when an image shares its batch with others, as a part of their norm."""


@dataclass(frozen=True)
class Looked:
    """A backbone by its name, and what finds its weights."""

    name: str
    weights: Mapping[str, Path]  # as of ``--weights NAME=FILE``
    home: Home

    @property
    def row(self) -> Backbone:
        """The backbone as tables know it. Raises as ``lookup``."""
        return lookup(self.name, home=self.home.root, file=self.weights.get(self.name))

    def load(self) -> FrozenEncoder:
        """A freshly loaded encoder. Raises as ``load``, MachineError without its weights."""
        row = self.row
        given = {**self.weights, **({row.name: self.weights[self.name]} if self.name in self.weights else {})}
        found = locate(row, given=given, home=self.home.root, memory=memory_of(self.home), offline=True)
        recipe = replace(row.recipe, weights=found.sha256)
        return load(row, found, recipe, device="cpu", dtype="float32")

    def images(self, count: int = IMAGES) -> Tensor:
        """Images of noise, uint8 [count, H, W, 3], at the backbone's own size."""
        side = self.row.recipe.size or 32
        return torch.randint(0, 256, (count, side, side, 3), generator=torch.Generator().manual_seed(1)).to(torch.uint8)


def features_are_rows_of_its_width(backbone: Looked) -> None:
    """A batch of images gives one row of float32 numbers each, as many as the backbone says, all finite."""
    found = backbone.load().image(backbone.images())
    expected = (IMAGES, backbone.row.width)
    require(tuple(found.shape) == expected, f"features of shape {tuple(found.shape)}, expected {expected}")
    require(found.dtype == torch.float32, f"features are {found.dtype}")
    require(bool(found.isfinite().all()), "some features are not finite")


def the_same_images_give_the_same_bits(backbone: Looked) -> None:
    """Nothing is drawn and nothing is learnt: a second look, and a second loading, give the same bits."""
    encoder, images = backbone.load(), backbone.images()
    first = encoder.image(images).clone()
    require(torch.equal(first, encoder.image(images)), "a second look gives other features: is it in eval mode?")
    require(torch.equal(first, backbone.load().image(images)), "loaded again it gives other features")


def an_image_does_not_see_its_batch(backbone: Looked) -> None:
    """The features of an image are the same alone and beside others."""
    encoder, images = backbone.load(), backbone.images()
    together = encoder.image(images).clone()
    alone = torch.cat([encoder.image(images[i : i + 1]).clone() for i in range(IMAGES)])
    apart = float((together - alone).norm(dim=1).max() / together.norm(dim=1).max().clamp(min=1e-12))
    require(apart < CLOSE, f"features differ by {apart:.1e} of their norm: BatchNorm in training mode does this")


def images_are_told_apart(backbone: Looked) -> None:
    """Different images have different features."""
    found = backbone.load().image(backbone.images())
    nearest = torch.cdist(found, found) + torch.eye(IMAGES) * 1e9
    require(float(nearest.min()) > 0.0, "two different images have the same features")


def the_images_are_left_as_they_are(backbone: Looked) -> None:
    """The encoder does not write into the images it is given."""
    encoder, images = backbone.load(), backbone.images()
    before = images.clone()
    encoder.image(images)
    require(torch.equal(before, images), "the images were changed")


BACKBONE_LAWS: dict[str, Callable[[Looked], None]] = {
    law.__name__: law
    for law in (
        features_are_rows_of_its_width,
        the_same_images_give_the_same_bits,
        an_image_does_not_see_its_batch,
        images_are_told_apart,
        the_images_are_left_as_they_are,
    )
}
"""Every law by its name."""
