"""Live frozen encoders for the methods that run some: whose weights, and which images of the store they read."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedcache.config import Home
from fedcache.errors import MachineError
from fedcache.extract import backbones as registry
from fedcache.extract.backbones import clip_towers
from fedcache.extract.planning.plan import memory_of
from fedcache.extract.recipe import Recipe
from fedcache.extract.text import prompts
from fedcache.federate.engine.encoders import FrozenEncoders
from fedcache.federate.engine.method import Method
from fedcache.runs.arrays import images_for, wants_encoders
from fedcache.runs.features import RunFeatures
from fedcache.store.files import digest_of
from fedcache.store.store import Store


@dataclass(frozen=True)
class RunEncoders:
    """The live encoders of a run, and what they read and determine.

    Attributes:
        towers: of image and text.
        images: the array of images they read, for methods that train on images.
        digest: of recipe, weights and template: what the encoders add to a run's identity.
    """

    towers: FrozenEncoders
    images: str | None
    digest: str

    def add_to(self, features: RunFeatures, store: Store) -> RunFeatures:
        """RunFeatures whose data has the encoders, and the class names as prompts have them."""
        names = tuple(prompts(store.samples.classes, "{}"))
        return replace(
            features,
            data=replace(features.data, towers=self.towers, names=names),
            digests=(*features.digests, self.digest),
            templates=features.templates or (self.towers.template,),
        )


def encoders_of_run(method: Method, store: Store, key: str, home: Home) -> RunEncoders | None:
    """The live encoders of a method that wants some, those of array ``key``; None for the others.

    Raises:
        StoreError without images they can read; as ``load_towers``.
    """
    if not wants_encoders(method):
        return None
    images = images_for(store, key) if "image tower" in method.needs else None
    towers = load_towers(store, key, home)
    recipe = Recipe.from_dict(store.arrays[key].recipe)
    return RunEncoders(towers, images, digest_of([recipe.digest, recipe.weights, towers.template]))


def load_towers(store: Store, key: str, home: Home) -> FrozenEncoders:
    """The towers that made a store's array, from the same weights.

    Raises:
        MachineError, when the weights are not here or are other ones; UsageError, for a text tower that
            cannot read trained prompts.
    """
    recipe = Recipe.from_dict(store.arrays[key].recipe)
    backbone = registry.lookup(recipe.backbone, home=home.root)
    weights = registry.locate(backbone, given={}, home=home.root, memory=memory_of(home), offline=home.offline)
    if weights.path is None and weights.download is not None:
        raise MachineError(
            f"The weights of {backbone.name} are not here; its features were made elsewhere.",
            f"fedcache backbones pull {backbone.name}",
        )
    if weights.sha256 != recipe.weights:
        raise MachineError(
            f"{key} was made with weights {recipe.weights[:12]}, but those found ({weights.origin}) are"
            f" {weights.sha256[:12]}.",
            f"fedcache backbones import FILE --as {backbone.name}  puts the right file first.",
        )
    known = store.templates(backbone.name)
    template = known[0] if known else backbone.template or "a photo of a {}."
    return clip_towers.load_towers(backbone, weights, recipe, template)
