"""Inputs of a run: features or images in memory, text features and live encoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedcache.config import Home, TrainConfig
from fedcache.errors import UsageError, shell_word
from fedcache.extract.backbones import clip_towers
from fedcache.extract.backbones.backbone import prompts
from fedcache.extract.embed_images import locate_recipe
from fedcache.extract.recipe import Recipe
from fedcache.federate.engine.client_data import (
    Data,
    Features,
    FrozenEncoders,
    Scaling,
    longest_row,
    prepare_features,
    stored_rows,
)
from fedcache.federate.engine.hyperparameters import Hp, Value
from fedcache.federate.engine.method import ClientOverrides, Method
from fedcache.federate.methods import wants_encoders
from fedcache.federate.partition.partition import Client, Partition
from fedcache.parsing import slug_of
from fedcache.progress import Observer
from fedcache.runs.spec import ResolvedRun, hyperparameters, resolve_run
from fedcache.runs.store_choice import images_for
from fedcache.store.files import digest_of, sha256_hex
from fedcache.store.reader import Reader
from fedcache.store.store import Store


@dataclass(frozen=True)
class RunFeatures:
    """Features of a run, and their origin."""

    arrays: tuple[str, ...]  # keys of the arrays, in the order in which they are concatenated
    data: Data  # all rows
    digests: tuple[str, ...]  # of the arrays' recipes, of the text features, and of live encoders
    templates: tuple[str, ...] = ()  # of the text that is used
    recipes: tuple[
        Mapping[str, Any], ...
    ] = ()  # of the arrays: backbone, weights and all that determines a value
    feat_post: str = "none"  # what was done to features
    scaling: Scaling | None = None  # of ``feat_post=center`` and ``standardize``
    how: tuple[Mapping[str, Any], ...] = ()  # the arrays were computed; () where that is not known

    def after(self, feat_post: str, scaling: Scaling | None) -> RunFeatures:
        """The same features, with a note of the ``feat_post`` that was applied to them."""
        data = replace(self.data, longest_row=longest_row(feat_post, self.data.widths))
        return replace(self, data=data, feat_post=feat_post, scaling=scaling)


def read_store(
    method: Method,
    hp: Hp,
    store: Store,
    keys: Sequence[str],
    feat_post: str,
    train: NDArray[np.int64],
    observer: Observer,
) -> RunFeatures:
    """Read arrays of a store, apply ``feat_post``, and take the text features of a backbone that has some.

    Backbones with different numbers of views are read as far as all have them. Raises UsageError for an array of
    images. ``train`` are the [n] rows of which ``center`` and ``standardize`` take the mean.
    """
    arrays = [store.reader(key) for key in keys]
    for key, array in zip(keys, arrays, strict=True):
        if len(array.shape) != 3:
            raise UsageError(
                f"{key} contains images, but {method.name} needs features.",
                "Choose other --backbones.",
            )
        if looked := all_alike(array, store.samples.ok == 1):
            path = shell_word(store.path)
            observer.warn(
                f"The features of {key} are identical in the first {looked} rows, as from a model that "
                f"ignores its input. To see how they were made:  fedcache inspect {path}"
            )
    views = [array.shape[1] for array in arrays]
    if len(set(views)) > 1:
        each = ", ".join(map(str, views))
        observer.note(
            f"Views: {min(views)} of each backbone, the number that all backbones have ({each})."
        )
    # Large features stay in their files; small ones, and those of several backbones, are copied into memory.
    x: Features | None = stored_rows(arrays, feat_post)
    scaling = None
    if x is None:
        scratch = Home.from_environment().root / "scratch"
        x, scaling = prepare_features(arrays, feat_post, train, views=min(views), scratch=scratch)
    samples = store.samples
    widths = tuple(a.shape[2] for a in arrays)
    label = samples.label.astype(np.int64)
    domain = samples.domain.astype(np.int64)
    made = with_text(method, hp, store, keys, x, label, domain, widths)
    return made.after(feat_post, scaling)


LOOKED_AT = 64
"""Rows from the beginning of an array of which features are compared; one chunk has them."""


def all_alike(array: Reader, ok: NDArray[np.bool_]) -> int:
    """Number of compared rows if all have the same features; 0 if any two differ."""
    rows = np.flatnonzero(ok)[:LOOKED_AT]
    found = array.rows(rows)
    if len(rows) > 1 and bool((found[:, 0] == found[:1, 0]).all()):
        return len(rows)
    return 0


def read_client_stores(
    method: Method,
    hp: Hp,
    stores: Sequence[Store],
    keys: Sequence[str],
    rows: Sequence[NDArray[np.int64]],
    feat_post: str,
    train: NDArray[np.int64],
) -> RunFeatures:
    """Features of many stores as one matrix; a row that several of them hold (a shared test row) is taken once.

    Args:
        method: says whether text features are read.
        hp: likewise.
        stores: one per client, which have the same arrays.
        keys: of their arrays.
        rows: for each store the rows of the matrix that its rows are.
        feat_post: what is done to features.
        train: [n] rows of which ``center`` and ``standardize`` take the mean.
    """
    first = stores[0]
    count = max(int(places.max(initial=-1)) for places in rows) + 1
    arrays = []
    for key in keys:
        info = first.arrays[key]
        whole = np.full((count, *info.shape[1:]), np.nan, np.dtype(info.dtype))
        for store, places in zip(stores, rows, strict=True):
            whole[places] = store.reader(key).all()
        arrays.append(whole)
    label = np.full(count, -1, np.int64)
    domain = np.zeros(count, np.int64)
    for store, places in zip(stores, rows, strict=True):
        label[places] = store.samples.label
        domain[places] = store.samples.domain
    x, scaling = prepare_features(arrays, feat_post, train)
    made = with_text(method, hp, first, keys, x, label, domain, tuple(a.shape[2] for a in arrays))
    return made.after(feat_post, scaling)


def with_text(
    method: Method,
    hp: Hp,
    store: Store,
    keys: Sequence[str],
    x: Features,
    label: NDArray[np.int64],
    domain: NDArray[np.int64],
    widths: tuple[int, ...],
) -> RunFeatures:
    """Features [N, V, D] with labels, domains, and the text features of the backbone where the method reads some."""
    text, templates = text_of(method, hp, store, keys)
    digests = [str(store.arrays[key].digest) for key in keys]
    text_features = None
    if text is not None:
        digests.append(sha256_hex(text.tobytes()))
        text_features = torch.from_numpy(text)
    data = Data(
        x=x,
        y=torch.from_numpy(label),
        classes=len(store.samples.classes),
        text=text_features,
        widths=widths,
        domain=torch.from_numpy(domain),
        backbones=tuple(str(store.arrays[key].recipe.get("backbone", key)) for key in keys),
    )
    recipes, how = zip(
        *((store.arrays[key].recipe, store.arrays[key].how) for key in keys), strict=True
    )
    return RunFeatures(tuple(keys), data, tuple(digests), tuple(templates), recipes, how=how)


def text_of(
    method: Method, hp: Hp, store: Store, keys: Sequence[str]
) -> tuple[NDArray[np.float32] | None, list[str]]:
    """The current text features of a run's only backbone, float32 [C, D], where the method reads some, and the
    templates they were made from.
    """
    backbone = str(store.arrays[keys[0]].recipe.get("backbone"))
    wants_text = "text" in method.needs or hp.get("init") == "text"
    # A linear head whose start is left open starts from class texts.
    if hp.get("init") == "auto" and hp.get("head") == "linear":
        wants_text = True
    if len(keys) > 1 or not wants_text or not store.has_text(backbone):
        return None, []
    recipe = store.arrays[keys[0]].recipe
    meta = store.texts[slug_of(backbone)][-1]["meta"]
    if meta.get("pooling", recipe.get("pooling")) != recipe.get("pooling") or "prompt" in recipe:
        raise UsageError(
            f"{keys[0]} pools its tokens differently from the text features of {backbone}.",
            f"fedcache extract --dataset DATASET --backbones {shell_word(backbone)}   makes matching "
            "features.",
        )
    return np.array(store.text(backbone), np.float32), store.templates(backbone) or []


def read_images(store: Store, keys: Sequence[str]) -> RunFeatures:
    """View 0 of every image of a store, uint8 [N, 1, H W 3], with labels.

    Args:
        store: whose images are read.
        keys: arrays of the run, of which the last holds the images.
    """
    images = store.reader(keys[-1]).all()[:, 0]
    N, H, W, channels = images.shape
    samples = store.samples
    data = Data(
        x=torch.from_numpy(np.ascontiguousarray(images)).view(N, 1, H * W * channels),
        y=torch.from_numpy(samples.label.astype(np.int64)),
        classes=len(samples.classes),
        domain=torch.from_numpy(samples.domain.astype(np.int64)),
        image=(H, W),
    )
    arrays = [store.arrays[key] for key in keys]
    digests, recipes, how = zip(*((str(a.digest), a.recipe, a.how) for a in arrays), strict=True)
    return RunFeatures(tuple(keys), data, digests, recipes=recipes, how=how)


@dataclass(frozen=True)
class RunEncoders:
    """The live encoders of a run, and what they read and determine."""

    towers: FrozenEncoders  # of image and text
    images: str | None  # the array of images they read, for methods that train on images
    digest: str  # of recipe, weights and template: what the encoders add to a run's identity

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

    Raises StoreError without images they can read; as ``load_towers``.
    """
    if not wants_encoders(method):
        return None
    images = None
    if "image tower" in method.needs:
        images = images_for(store, key)
    towers = load_towers(store, key, home)
    recipe = Recipe.from_dict(store.arrays[key].recipe)
    return RunEncoders(towers, images, digest_of([recipe.digest, recipe.weights, towers.template]))


def load_towers(store: Store, key: str, home: Home) -> FrozenEncoders:
    """The towers that made a store's array, from the same weights.

    Raises MachineError, when the weights are not here or are other ones; UsageError, for a text tower that cannot read
    trained prompts.
    """
    item = locate_recipe(Recipe.from_dict(store.arrays[key].recipe), home)
    known = store.templates(item.backbone.name)
    if known:
        template = known[0]
    else:
        template = item.backbone.template or "a photo of a {}."
    return clip_towers.load_towers(item.backbone, item.weights, item.recipe, template)


@dataclass(frozen=True)
class RunInputs:
    """All inputs of a run."""

    method: Method  # with ``settings`` its hyperparameters
    settings: Mapping[
        str, Value
    ]  # every one of them; None is one that the method chooses by itself
    features: RunFeatures  # of all rows, on the device that computes
    backbones: tuple[str, ...]  # names of those that made the features
    dataset: Mapping[str, Any]  # its slug, digest and numbers of rows, as results hold them
    domains: tuple[str, ...]  # names
    classes: tuple[str, ...]  # names
    partitions: Mapping[int, Partition]  # one per seed
    partition_name: str | None = (
        None  # under which they are saved; None for those made for this run
    )
    repartition: bool = False  # whether every seed draws its own partition
    seconds: Mapping[str, float] = field(default_factory=dict)  # what preparing took, by step
    # in what single clients differ, by their number
    overrides: Mapping[int, ClientOverrides] = field(default_factory=dict)
    # fields of ``TrainConfig`` that lead to them again
    choices: Mapping[str, Any] = field(default_factory=dict)
    ledger: Path | None = (
        None  # where what a private run spends is written down; None where none may be run
    )

    @property
    def data(self) -> Data:
        """Features, labels and text as methods read them."""
        return self.features.data

    @property
    def clients(self) -> Sequence[Client]:
        """Those of the first seed; every seed has as many."""
        return next(iter(self.partitions.values())).clients

    def resolve(self, config: TrainConfig) -> ResolvedRun:
        """The resolved configuration for these inputs; errors as ``resolve_run``."""
        return resolve_run(
            config, self.method, self.settings, self.features.arrays, len(self.clients)
        )

    def with_settings_of(self, config: TrainConfig) -> RunInputs:
        """The same rows with the hyperparameters of another configuration of the same method."""
        settings = hyperparameters(self.method, config)
        if "feat_post" in settings:
            kept = {"feat_post": self.settings["feat_post"]}
        else:
            kept = {}
        return replace(self, settings={**settings, **kept})

    def with_data(self, data: Data) -> RunInputs:
        """The same inputs with other data."""
        return replace(self, features=replace(self.features, data=data))
