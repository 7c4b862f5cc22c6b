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
from fedcache.parsing import counted, slug_of
from fedcache.progress import Observer
from fedcache.runs.base_to_new import NewClasses
from fedcache.runs.spec import ResolvedRun, hyperparameters, resolve_run
from fedcache.runs.store_choice import backbones_of, images_for
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
    # recipe of each array: backbone, weights and everything else that determines a value
    recipes: tuple[Mapping[str, Any], ...] = ()
    feat_post: str = "none"  # transform that was applied to the features
    scaling: Scaling | None = None  # of ``feat_post=center`` and ``standardize``
    how: tuple[Mapping[str, Any], ...] = ()  # how each array was computed; () if it is not known


def read_store(
    method: Method,
    hp: Hp,
    store: Store,
    keys: Sequence[str],
    feat_post: str,
    train: NDArray[np.int64],
    observer: Observer,
) -> RunFeatures:
    """Read arrays of a store, apply ``feat_post``, and add the text features if a backbone has some.

    If backbones have different numbers of views, the smallest number is read of each. ``train`` are the [n] rows whose
    mean ``center`` and ``standardize`` use. Raises UsageError for an array of images.
    """
    arrays = [store.reader(key) for key in keys]
    for key, array in zip(keys, arrays, strict=True):
        # Features have the shape (rows, views, width); images have more axes.
        if len(array.shape) != 3:
            raise UsageError(
                f"{key} contains images, but {method.name} needs features.",
                "Choose other --backbones.",
            )
        identical = all_alike(array, store.samples.ok == 1)
        if identical:
            path = shell_word(store.path)
            observer.warn(
                f"The features of {key} are identical in the first {identical} rows, so the backbone may "
                f"ignore its input. To see how the features were made:  fedcache inspect {path}"
            )
    views = [array.shape[1] for array in arrays]
    common = min(views)
    if len(set(views)) > 1:
        each = ", ".join(map(str, views))
        observer.note(
            f"Training uses {common} view(s) of each backbone, because the backbones have different "
            f"numbers of views ({each})."
        )
    # Large features stay in their files; small ones, and those of several backbones, are copied into memory.
    x: Features | None = stored_rows(arrays, feat_post)
    scaling = None
    if x is None:
        scratch = Home.from_environment().root / "scratch"
        x, scaling = prepare_features(arrays, feat_post, train, views=common, scratch=scratch)
    samples = store.samples
    widths = tuple(array.shape[2] for array in arrays)
    label = samples.label.astype(np.int64)
    domain = samples.domain.astype(np.int64)
    return with_text(method, hp, store, keys, x, label, domain, widths, feat_post, scaling)


LOOKED_AT = 64
"""Number of first rows whose features are compared with each other; they are in one chunk."""


def all_alike(array: Reader, ok: NDArray[np.bool_]) -> int:
    """Number of compared rows if all have the same features; 0 if any two differ."""
    rows = np.flatnonzero(ok)[:LOOKED_AT]
    features = array.rows(rows)
    if len(rows) < 2:
        return 0
    first_view = features[:, 0]
    if (first_view == first_view[:1]).all():
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
    """Features of many stores as one matrix; a row that several stores hold (a shared test row) is taken once.

    Args:
        method: determines, with ``hp``, whether text features are read.
        hp: hyperparameters.
        stores: one per client, with the same arrays.
        keys: of their arrays.
        rows: for each store the places of its rows in the matrix.
        feat_post: transform of the features.
        train: [n] rows whose mean ``center`` and ``standardize`` use.
    """
    first = stores[0]
    count = max(int(places.max(initial=-1)) for places in rows) + 1
    arrays = []
    for key in keys:
        info = first.arrays[key]
        matrix = np.full((count, *info.shape[1:]), np.nan, np.dtype(info.dtype))
        for store, places in zip(stores, rows, strict=True):
            matrix[places] = store.reader(key).all()
        arrays.append(matrix)
    label = np.full(count, -1, np.int64)
    domain = np.zeros(count, np.int64)
    for store, places in zip(stores, rows, strict=True):
        label[places] = store.samples.label
        domain[places] = store.samples.domain
    x, scaling = prepare_features(arrays, feat_post, train)
    widths = tuple(array.shape[2] for array in arrays)
    return with_text(method, hp, first, keys, x, label, domain, widths, feat_post, scaling)


def with_text(
    method: Method,
    hp: Hp,
    store: Store,
    keys: Sequence[str],
    x: Features,
    label: NDArray[np.int64],
    domain: NDArray[np.int64],
    widths: tuple[int, ...],
    feat_post: str,
    scaling: Scaling | None,
) -> RunFeatures:
    """Features [N, V, D] with labels, domains, and the text features of the backbone if the method reads them.

    ``feat_post`` and ``scaling`` were applied to the features.
    """
    text, templates = text_of(method, hp, store, keys)
    text_features = None
    text_digests: tuple[str, ...] = ()
    if text is not None:
        text_digests = (sha256_hex(text.tobytes()),)
        text_features = torch.from_numpy(text)
    data = Data(
        x=x,
        y=torch.from_numpy(label),
        classes=len(store.samples.classes),
        text=text_features,
        widths=widths,
        domain=torch.from_numpy(domain),
        backbones=backbones_of(store, keys),
        longest_row=longest_row(feat_post, widths),
    )
    features = _of_arrays(store, keys, data)
    digests = (*features.digests, *text_digests)
    return replace(
        features,
        digests=digests,
        templates=tuple(templates),
        feat_post=feat_post,
        scaling=scaling,
    )


def _of_arrays(store: Store, keys: Sequence[str], data: Data) -> RunFeatures:
    """``data`` of some arrays of a store as features, with the origin of these arrays."""
    arrays = [store.arrays[key] for key in keys]
    return RunFeatures(
        arrays=tuple(keys),
        data=data,
        digests=tuple(str(array.digest) for array in arrays),
        recipes=tuple(array.recipe for array in arrays),
        how=tuple(array.how for array in arrays),
    )


def text_of(
    method: Method, hp: Hp, store: Store, keys: Sequence[str]
) -> tuple[NDArray[np.float32] | None, list[str]]:
    """The current text features, float32 [C, D], of a run's only backbone, and the templates they were made from.

    None and no templates if the method reads no text features, or if the run has several backbones or no texts.
    """
    recipe = store.arrays[keys[0]].recipe
    backbone = str(recipe.get("backbone"))
    init = hp.get("init")
    wants_text = "text" in method.needs or init == "text"
    # A linear head with init "auto" starts from class texts.
    if init == "auto" and hp.get("head") == "linear":
        wants_text = True
    if len(keys) > 1 or not wants_text or not store.has_text(backbone):
        return None, []
    pooling = recipe.get("pooling")
    meta = store.texts[slug_of(backbone)][-1]["meta"]
    if meta.get("pooling", pooling) != pooling or "prompt" in recipe:
        raise UsageError(
            f"The features {keys[0]} and the text features of {backbone} were made with different poolings of tokens.",
            f"fedcache extract --dataset DATASET --backbones {shell_word(backbone)}   makes matching "
            "features.",
        )
    return np.array(store.text(backbone), np.float32), store.templates(backbone) or []


def read_images(store: Store, keys: Sequence[str]) -> RunFeatures:
    """View 0 of every image of a store, uint8 [N, 1, H W 3], with labels.

    Args:
        store: whose images are read.
        keys: arrays of the run; the last one holds the images.
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
    return _of_arrays(store, keys, data)


@dataclass(frozen=True)
class RunEncoders:
    """The live encoders of a run, the images that they read, and their digest."""

    towers: FrozenEncoders  # of image and text
    images: str | None  # key of the array of images, for methods that train on images
    digest: str  # of recipe, weights and template; a part of the run's identity

    def add_to(self, features: RunFeatures, store: Store) -> RunFeatures:
        """The features with the encoders in their data, and with the class names in the spelling of prompts."""
        names = tuple(prompts(store.samples.classes, "{}"))
        data = replace(features.data, towers=self.towers, names=names)
        return replace(
            features,
            data=data,
            digests=(*features.digests, self.digest),
            templates=features.templates or (self.towers.template,),
        )


def encoders_of_run(method: Method, store: Store, key: str, home: Home) -> RunEncoders | None:
    """The live encoders of array ``key``, for a method that uses live encoders; None for other methods.

    Raises StoreError without images that they can read; other errors as ``load_towers``.
    """
    if not wants_encoders(method):
        return None
    images = None
    if "image tower" in method.needs:
        images = images_for(store, key)
    towers = load_towers(store, key, home)
    recipe = Recipe.from_dict(store.arrays[key].recipe)
    digest = digest_of([recipe.digest, recipe.weights, towers.template])
    return RunEncoders(towers, images, digest)


def load_towers(store: Store, key: str, home: Home) -> FrozenEncoders:
    """The encoders that made a store's array, with the same weights.

    Raises MachineError if the weights are missing or differ, and UsageError for a text encoder that cannot read trained
    prompts.
    """
    item = locate_recipe(Recipe.from_dict(store.arrays[key].recipe), home)
    known = store.templates(item.backbone.name)
    template = item.backbone.template or "a photo of a {}."
    if known:
        template = known[0]
    return clip_towers.load_towers(item.backbone, item.weights, item.recipe, template)


@dataclass(frozen=True)
class RunInputs:
    """All inputs of a run."""

    method: Method
    # every hyperparameter of the method; None if the method chooses the value itself
    settings: Mapping[str, Value]
    features: RunFeatures  # of all rows, on the device that computes
    backbones: tuple[str, ...]  # names of the backbones that made the features
    dataset: Mapping[str, Any]  # its slug, digest and numbers of rows, as in a result
    domains: tuple[str, ...]  # names
    classes: tuple[str, ...]  # names
    partitions: Mapping[int, Partition]  # one per seed
    partition_name: str | None = None  # of saved partitions; None if they were made for this run
    repartition: bool = False  # whether every seed draws its own partition
    seconds: Mapping[str, float] = field(default_factory=dict)  # of each step of the preparation
    # differences of single clients, by their number
    overrides: Mapping[int, ClientOverrides] = field(default_factory=dict)
    # fields of ``TrainConfig`` that lead to the same inputs again
    choices: Mapping[str, Any] = field(default_factory=dict)
    # of the privacy that runs spend; None if no private run is allowed
    ledger: Path | None = None
    new_classes: NewClasses | None = None  # None if the run has all classes

    @property
    def data(self) -> Data:
        """Features, labels and text as methods read them."""
        return self.features.data

    @property
    def clients(self) -> Sequence[Client]:
        """The clients of the first seed; every seed has the same number."""
        return next(iter(self.partitions.values())).clients

    def resolve(self, config: TrainConfig) -> ResolvedRun:
        """The resolved configuration for these inputs.

        Raises UsageError for more stages than classes; other errors as ``resolve_run``.
        """
        classes = len(self.classes)
        if config.stages > classes:
            available = counted(classes, "class")
            raise UsageError(
                f"--stages is {config.stages}, but there are only {available}.",
                f"--stages {classes}",
            )
        return resolve_run(
            config, self.method, self.settings, self.features.arrays, len(self.clients)
        )

    def with_settings_of(self, config: TrainConfig) -> RunInputs:
        """The same rows with the hyperparameters of another configuration of the same method."""
        settings = hyperparameters(self.method, config)
        # The features stay as they are, so the transform that was applied to them stays too.
        if "feat_post" in settings:
            settings["feat_post"] = self.settings["feat_post"]
        return replace(self, settings=settings)

    def with_data(self, data: Data) -> RunInputs:
        """The same inputs with other data."""
        return replace(self, features=replace(self.features, data=data))
