"""Live towers and images for the methods that need them: which backbone, whose weights, which images of the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from fedcache.config import Home
from fedcache.errors import Exit, FedcacheError
from fedcache.extract import backbones as registry
from fedcache.extract.planning.command_lines import extract_command
from fedcache.extract.planning.plan import memory_of
from fedcache.extract.recipe import Recipe
from fedcache.extract.text import prompts
from fedcache.store.files import digest_of
from fedcache.store.store import Store

if TYPE_CHECKING:
    from fedcache.federate.engine.client_data import Data
    from fedcache.federate.engine.encoders import FrozenEncoders
    from fedcache.federate.engine.hyperparameters import Value
    from fedcache.federate.engine.method import Method

INPUT = ("size", "resize", "interpolation", "crop_pct")
"""What determines an encoder's input image; normalisation happens after it."""


def wants_towers(method: Method) -> bool:
    """Whether a method runs live encoders; it then takes exactly one backbone, with text, as text methods do."""
    return bool({"text tower", "image tower"} & method.needs)


def pixel_recipe(recipe: Recipe) -> dict[str, str]:
    """``--recipe`` options that store images as an encoder of this recipe takes them."""
    plain = registry.lookup("pixels").recipe
    return {f"pixels:{k}": str(getattr(recipe, k)) for k in INPUT if getattr(recipe, k) != getattr(plain, k)}


def options(recipe: Mapping[str, str]) -> str:
    """`` --recipe key=value`` for each, as it is written after a command."""
    return "".join(f" --recipe {k}={v}" for k, v in recipe.items())


def without_images(method: Method, names: Sequence[str]) -> Sequence[str]:
    """``--backbones`` of a method with an image tower: its images may be named beside it, or not at all."""
    return tuple(n for n in names if "image tower" not in method.needs or n.partition("@")[0] != "pixels")


def to_extract(method: Method, backbones: Sequence[str], home: Home) -> tuple[tuple[str, ...], dict[str, str]]:
    """Backbones and recipe options of the extraction a method needs: an image tower's images are stored as it reads
    them.
    """
    if "image tower" not in method.needs:
        if "pixels" in method.needs:
            return ("pixels",), {"size": "32"}
        return tuple(backbones), {}
    towers = tuple(without_images(method, backbones)) or ("glyph-clip",)
    recipe = registry.lookup(towers[0].partition("@")[0], home=home.root).recipe
    return (*towers, "pixels"), pixel_recipe(recipe)


@dataclass(frozen=True)
class Brought:
    """What a run brings besides features.

    Attributes:
        towers: live encoders.
        images: the array of images they read, for methods that train on images.
        digest: of recipe, weights and template: what the towers add to a run's identity.
    """

    towers: FrozenEncoders
    images: str | None
    digest: str

    def attach(self, data: Data, store: Store) -> Data:
        """Data with the towers, and the class names as prompts have them."""
        return replace(data, towers=self.towers, names=tuple(prompts(store.samples.classes, "{}")))


def bring(method: Method, store: Store, key: str, home: Home) -> Brought | None:
    """The live encoders of a method that wants some, those of array ``key``; None for the others.

    Raises:
        FedcacheError: STORE without images they can read; as ``load_towers``.
    """
    if not wants_towers(method):
        return None
    images = images_for(store, key) if "image tower" in method.needs else None
    towers = load_towers(store, key, home)
    recipe = Recipe.from_dict(store.arrays[key].recipe)
    return Brought(towers, images, digest_of([recipe.digest, recipe.weights, towers.template]))


def load_towers(store: Store, key: str, home: Home) -> FrozenEncoders:
    """The towers that made a store's array, from the same weights.

    Raises:
        FedcacheError: ENVIRONMENT, when the weights are not here or are other ones; USAGE, for a text tower that
            cannot read trained prompts.
    """
    from fedcache.extract.backbones.live import load_towers as load

    recipe = Recipe.from_dict(store.arrays[key].recipe)
    backbone = registry.lookup(recipe.backbone, home=home.root)
    weights = registry.locate(backbone, given={}, home=home.root, memory=memory_of(home), offline=home.offline)
    if weights.path is None and weights.download is not None:
        raise FedcacheError(
            Exit.ENVIRONMENT,
            f"The weights of {backbone.name} are not here; its features were made elsewhere.",
            f"fedcache backbones pull {backbone.name}",
        )
    if weights.sha256 != recipe.weights:
        raise FedcacheError(
            Exit.ENVIRONMENT,
            f"{key} was made with weights {recipe.weights[:12]}, but those found ({weights.origin}) are"
            f" {weights.sha256[:12]}.",
            f"fedcache backbones import FILE --as {backbone.name}  puts the right file first.",
        )
    known = store.templates(backbone.name)
    template = known[0] if known else backbone.template or "a photo of a {}."
    return load(backbone, weights, recipe, template)


def images_for(store: Store, key: str) -> str:
    """The array of images that the backbone of array ``key`` takes as they are.

    Raises:
        FedcacheError: STORE, with the command that makes them.
    """
    recipe = Recipe.from_dict(store.arrays[key].recipe)
    found = {k: a.recipe for k, a in store.arrays.items() if a.dtype == "uint8"}
    for pixels, other in found.items():
        if all(other.get(k) == getattr(recipe, k) for k in INPUT):
            return pixels
    has = ", ".join(f"{r.get('backbone')}@{r.get('size')}" for r in found.values()) or "none"
    raise FedcacheError(
        Exit.STORE,
        f"{store.path.name} has no images as {recipe.backbone} takes them ({recipe.size} px, {recipe.resize}); it has"
        f" {has}.",
        extract_command(store, ["pixels"], pixel_recipe(recipe)),
    )


def load_images(store: Store, key: str) -> Data:
    """View 0 of every image of a store, uint8 [N, 1, H W 3], with labels."""
    import torch

    from fedcache.federate.engine.client_data import Data

    images = store.reader(key).all()[:, 0]
    N, H, W, channels = images.shape
    samples = store.samples
    return Data(
        x=torch.from_numpy(np.ascontiguousarray(images)).view(N, 1, H * W * channels),
        y=torch.from_numpy(samples.label.astype(np.int64)),
        classes=len(samples.classes),
        domain=torch.from_numpy(samples.domain.astype(np.int64)),
        image=(H, W),
    )


def with_rounds(hp: Mapping[str, Value], rounds: int) -> dict[str, Value]:
    """Hyperparameters whose schedule of its own accord lasts as long as the run."""
    return {**hp, "sched_rounds": rounds} if "sched_rounds" in hp and hp["sched_rounds"] is None else dict(hp)
