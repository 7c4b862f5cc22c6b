"""Inputs of a run: features or images in memory, text features and live encoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcache.config import Home, PartitionConfig, TrainConfig
from fedcache.errors import MachineError, UsageError, shell_word, unknown
from fedcache.extract.backbones import clip_towers
from fedcache.extract.backbones.backbone import prompts
from fedcache.extract.backbones.own import known_name
from fedcache.extract.device import resolve_device
from fedcache.extract.embed_images import locate_recipe
from fedcache.extract.planning.plan import say_templates
from fedcache.extract.recipe import IMAGES, Recipe, held_by
from fedcache.federate.engine.client_data import (
    SHARED_SUMS,
    Data,
    Features,
    FrozenEncoders,
    Scaling,
    StoredRows,
    longest_row,
    prepare_features,
    stored_rows,
)
from fedcache.federate.engine.hyperparameters import Hp, Value
from fedcache.federate.engine.method import ClientOverrides, Method
from fedcache.federate.execution.memory_estimate import free_memory_on
from fedcache.federate.methods import wants_encoders
from fedcache.federate.partition.client_table import (
    ClientTable,
    RowLists,
    Validation,
    all_train_rows,
)
from fedcache.federate.partition.partition import Client, Partition
from fedcache.parsing import Facts, Record, counted, slug_of
from fedcache.process import Stop
from fedcache.progress import Observer
from fedcache.runs.partitions import (
    deciding_method,
    hints_name_the_store,
    need_labels,
    partition_seeds,
    single_class_warning,
)
from fedcache.runs.spec import (
    ResolvedRun,
    check_named,
    client_overrides,
    hyperparameters,
    named_backbones,
    resolve_run,
)
from fedcache.runs.store_choice import (
    array_name,
    arrays_for,
    backbones_of,
    common_arrays,
    feat_post_for,
    find_or_extract,
    images_for,
    needs_text,
    open_clients,
)
from fedcache.store.files import digest_of, sha256_hex
from fedcache.store.manifest import ArrayInfo
from fedcache.store.reader import Reader
from fedcache.store.store import Store


@dataclass(frozen=True)
class NewClasses:
    """The classes that a run is not trained on."""

    label: NDArray[np.int64]  # [n] of the test rows, by number of the new class
    rows: NDArray[np.int64]  # [n] of the store
    classes: int
    text: Tensor | None  # [C, D] text features; None for a method that reads none
    names: tuple[str, ...]  # in the spelling of prompts; () for a method without live encoders


class Target(NamedTuple):
    """A dataset on which a run is not trained, but scored (``--transfer``)."""

    name: str  # slug and the beginning of the digest
    store: Store
    new: NewClasses  # its labelled test rows and classes


@dataclass(frozen=True)
class RunFeatures:
    """Features of a run, and their origin."""

    arrays: tuple[str, ...]  # keys of the arrays, in the order in which they are concatenated
    data: Data  # all rows
    digests: tuple[str, ...]  # of the arrays' recipes, of the text features, and of live encoders
    templates: tuple[str, ...] = ()  # of the text that is used
    # recipe of each array: backbone, weights and everything else that determines a value
    recipes: tuple[Record, ...] = ()
    feat_post: str = "none"  # transform that was applied to the features
    scaling: Scaling | None = None  # of ``feat_post=center`` and ``standardize``
    how: tuple[Record, ...] = ()  # how each array was computed; () if it is not known
    new_classes: NewClasses | None = None  # None if the run has all classes


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
        digests=tuple(_digest_of_features(array) for array in arrays),
        recipes=tuple(array.recipe for array in arrays),
        how=tuple(array.how for array in arrays),
    )


def _digest_of_features(array: ArrayInfo) -> str:
    """Digest of the recipe of an array, and of the number type of the computation if it is not float32."""
    computed_in = array.how.get("dtype", "float32")
    if computed_in == "float32":
        return array.digest
    return digest_of([array.digest, computed_in])


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
    dataset: Record  # its slug, digest and numbers of rows, as in a result
    domains: tuple[str, ...]  # names
    classes: tuple[str, ...]  # names
    partitions: Mapping[int, Partition]  # one per seed
    partition_name: str | None = None  # of saved partitions; None if they were made for this run
    repartition: bool = False  # whether every seed draws its own partition
    seconds: Mapping[str, float] = field(default_factory=dict)  # of each step of the preparation
    # differences of single clients, by their number
    overrides: Mapping[int, ClientOverrides] = field(default_factory=dict)
    # fields of ``TrainConfig`` that lead to the same inputs again
    choices: Record = field(default_factory=dict)
    # of the privacy that runs spend; None if no private run is allowed
    ledger: Path | None = None
    targets: tuple[Target, ...] = ()  # of ``--transfer``

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


# Sources of a run's rows: one store with a partition, or a directory with one store per client.


class RowSource(Protocol):
    """Source of a run's rows. The methods are called in the order below, each once for a run."""

    def open(self, method: Method, settings: Mapping[str, Value]) -> float:
        """Find the stores that hold the rows, and extract missing arrays. Returns the seconds that extraction took.

        Raises StoreError for a missing store or array; UsageError if this source cannot serve the method.
        """

    def arrays(self, method: Method, settings: Mapping[str, Value]) -> list[str]:
        """Keys of the arrays the run trains on."""

    def partitions(
        self, method: Method, seeds: Sequence[int]
    ) -> tuple[dict[int, Partition], str | None]:
        """The rows of each client, by seed, and the name of a saved partition."""

    def feat_post(
        self, method: Method, settings: Mapping[str, Value], arrays: Sequence[str]
    ) -> str:
        """The transform of features before training."""

    def read(
        self, method: Method, settings: Mapping[str, Value], arrays: Sequence[str], feat_post: str
    ) -> RunFeatures:
        """The features of all rows."""

    def overrides(
        self, method: Method, features: RunFeatures, clients: int
    ) -> dict[int, ClientOverrides]:
        """Differences of single clients."""

    def dataset(self) -> Facts:
        """Slug, digest and numbers of rows."""

    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the domains and of the classes."""

    def backbones(self, arrays: Sequence[str]) -> tuple[str, ...]:
        """Names of the backbones that made the arrays."""

    def choices(self, arrays: Sequence[str]) -> Facts:
        """Fields of ``TrainConfig`` that lead to these rows and arrays again, even after later extractions."""


@dataclass
class InputCache:
    """Features and partitions that the points of one grid share, read and drawn once."""

    # key and features of the last arrays read; one entry is enough, because grids sort their points by arrays
    features: tuple[Any, RunFeatures] | None = None
    # partition of each seed, and the name of a saved one; by everything that determines them
    partitions: dict[Any, tuple[dict[int, Partition], str | None]] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)  # warnings that were given


@dataclass(frozen=True)
class Preparation:
    """Settings of preparing a run: home, observer, stop, and whether extraction is allowed."""

    home: Home  # where stores are
    observer: Observer  # receives a note on every choice that the user did not make
    stop: Stop  # ends an extraction that runs
    extract: bool = True  # whether to run a missing extraction
    # whether every seed draws its own partition (else all seeds share one)
    repartition: bool = False
    cache: InputCache = field(default_factory=InputCache)  # shared by the points of a grid
    whole: bool = False  # whether validation rows are trained on, as if the partition had none


class OneStore:
    """A run's only store, or the first of several stores with the same arrays and names."""

    config: TrainConfig
    preparation: Preparation
    store: Store  # set by ``open``

    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the domains and of the classes."""
        return self.store.samples.domains, self.store.samples.classes

    def backbones(self, arrays: Sequence[str]) -> tuple[str, ...]:
        """Names of the backbones that made the arrays."""
        return backbones_of(self.store, arrays)

    def choices(self, arrays: Sequence[str]) -> Facts:
        """The names of the arrays."""
        return {"backbones": [array_name(self.store, key) for key in arrays]}

    def feat_post(
        self, method: Method, settings: Mapping[str, Value], arrays: Sequence[str]
    ) -> str:
        """The requested transform, else the usual one for these backbones, with a note if features are read."""
        config = self.config
        requested = "feat_post" in config.set
        observer: Observer | None = self.preparation.observer
        if "pixels" in method.reads(settings):
            observer = None
        return feat_post_for(settings, requested, config.preset, self.store, arrays, observer)


class StoreRows(OneStore):
    """A ``RowSource``: the store of a configuration. If it does not exist, it is extracted first."""

    base: int | None = None  # number of the first classes whose rows are assigned; None for all

    def __init__(
        self, config: TrainConfig, partition: PartitionConfig, preparation: Preparation
    ) -> None:
        root = preparation.home.root
        backbones = tuple(known_name(name, root) for name in config.backbones)
        self.config = replace(config, backbones=backbones)
        self.partition = partition
        self.preparation = preparation
        self._trained_rows = np.empty(0, np.int64)

    def open(self, method: Method, settings: Mapping[str, Value]) -> float:
        """Find the store. Returns the seconds of the extraction that was run for it."""
        p = self.preparation
        self.store, seconds = find_or_extract(
            method, self.config, p.home, extract=p.extract, observer=p.observer, stop=p.stop
        )
        if self.config.client_backbones:
            check_named(self.config, self.store, p.home)
        return seconds

    def arrays(self, method: Method, settings: Mapping[str, Value]) -> list[str]:
        """The arrays of ``--backbones``, else those that the method takes by default."""
        names = named_backbones(self.config)
        keys = arrays_for(method, settings, self.store, names, self.preparation.observer)
        need_labels(method, self.store, None)
        if "image tower" in method.needs:
            images_for(self.store, keys[0])  # refused before rows are assigned
        for name in self.config.domain:
            if name not in self.store.samples.domains:
                raise unknown("domain", name, self.store.samples.domains)
        return keys

    @property
    def draws_for_each_seed(self) -> bool:
        """Whether every seed draws its own partition."""
        return self.preparation.repartition and self.config.partition is None

    def partitions(
        self, method: Method, seeds: Sequence[int]
    ) -> tuple[dict[int, Partition], str | None]:
        """A saved partition, or those of a scheme. Missing labels are refused; a single class causes a warning."""
        p = self.preparation
        config = self.config
        samples = self.store.samples
        key = (
            self.store.path,
            deciding_method(method, self.partition).defaults,
            config.partition,
            config.domain,
            self.base,
            str(self.partition),
            tuple(seeds),
            p.repartition,
        )
        if key not in p.cache.partitions:
            with hints_name_the_store(dataset=config.dataset, store=config.store):
                p.cache.partitions[key] = partition_seeds(
                    method,
                    self.store,
                    config,
                    self.partition,
                    seeds,
                    repartition=p.repartition,
                    observer=p.observer,
                    base=self.base,
                )
        by_seed, name = p.cache.partitions[key]
        if p.whole:
            by_seed = without_validation(by_seed)
            name = None  # the saved partition has other training rows
        first = next(iter(by_seed.values()))
        rows = all_train_rows(first.clients)
        self._trained_rows = rows
        need_labels(method, self.store, rows)
        warning = single_class_warning(method, samples.label[rows], samples.classes)
        if warning is not None and warning not in p.cache.warned:
            p.cache.warned.add(warning)
            p.observer.warn(warning)
        if (samples.label[first.test] < 0).all():
            p.observer.note("No test row has a label, so models are trained but not scored.")
        return by_seed, name

    def read(
        self, method: Method, settings: Mapping[str, Value], arrays: Sequence[str], feat_post: str
    ) -> RunFeatures:
        """Features or images of every row of the store, with live encoders for a method that uses them."""
        p = self.preparation
        store = self.store
        reads = method.reads(settings)
        encoders = encoders_of_run(method, store, arrays[0], p.home)
        if encoders is not None and encoders.images is not None:
            arrays = [*arrays, encoders.images]
        if "pixels" in reads:
            features = read_images(store, arrays)
        else:
            features = self._read_once(method, settings, arrays, feat_post)
        if encoders is not None:
            features = encoders.add_to(features, store)
        if features.templates:
            say_templates(list(features.templates), p.observer)
        # A method that reads neither labels nor texts learns no classes, so a linear probe classifies its features.
        has_classes = bool(reads & {"labels", "text"})
        if not has_classes and (store.samples.label[self._trained_rows] < 0).all():
            p.observer.note(
                "No training row has a label, so no linear probe can be trained and nothing is scored."
            )
        views = features.data.x.shape[1]
        # View 0 is the plain image, and a pair of different augmentations needs two more.
        if "views" in reads and views < 3:
            p.observer.note(
                f"{method.name} uses augmented views, but the store has {views} view per image, so the "
                "result is approximate. To store more: `fedcache extract --views 8`"
            )
        return features

    def _read_once(
        self, method: Method, settings: Mapping[str, Value], arrays: Sequence[str], feat_post: str
    ) -> RunFeatures:
        """The features, from the cache if the last point of the grid had the same."""
        cache = self.preparation.cache
        rows = self._trained_rows
        scaled_by = b""  # the rows that determine the scaling of features
        if feat_post in SHARED_SUMS:
            scaled_by = rows.tobytes()
        key = (
            self.store.path,
            tuple(arrays),
            feat_post,
            scaled_by,
            method.needs,
            settings.get("init"),
            settings.get("head"),
        )
        if cache.features is None or cache.features[0] != key:
            cache.features = None  # frees the memory of the old ones before the new ones are read
            observer = self.preparation.observer
            features = read_store(method, settings, self.store, arrays, feat_post, rows, observer)
            cache.features = (key, features)
        return cache.features[1]

    def overrides(
        self, method: Method, features: RunFeatures, clients: int
    ) -> dict[int, ClientOverrides]:
        """Differences by ``--client-backbones`` and ``--client-set``."""
        if not self.config.client_backbones and not self.config.client_set:
            return {}
        widths = features.data.widths
        return client_overrides(method, self.config, self.store, features.arrays, widths, clients)

    def dataset(self) -> Facts:
        """Slug, digest and numbers of rows, and the kind of the rows if they are not images."""
        dataset = self.store.dataset
        return {
            "slug": str(dataset["slug"]),
            "digest": str(dataset["digest"]),
            "rows": self.store.rows,
            "ok": self.store.rows_ok,
            **_kind_of_rows(self.store),
        }

    def choices(self, arrays: Sequence[str]) -> Facts:
        """The names of the arrays, and the path of the store if the user did not name it."""
        choices = super().choices(arrays)
        if self.config.store or self.config.dataset:
            return choices
        place = self.store.address or str(self.store.path.resolve())
        return {"store": place, **choices}


def _kind_of_rows(store: Store) -> dict[str, str]:
    """The kind of the rows, if they are not images."""
    kind = held_by(array.recipe for array in store.arrays.values())
    if kind == IMAGES:
        return {}
    return {"holds": kind}


def without_validation(partitions: Mapping[int, Partition]) -> dict[int, Partition]:
    """The partition of each seed with validation rows among the training rows.

    Seeds that share a partition share the new one.
    """
    by_id = {id(partition): partition.without_validation() for partition in partitions.values()}
    return {seed: by_id[id(partition)] for seed, partition in partitions.items()}


class ShardRows(OneStore):
    """A ``RowSource``: a directory with one store per client.

    Rows that several clients hold (shared test rows) are taken once, in the parent's order. So sums add up in the same
    order as for one store with all rows.
    """

    stores: list[Store]  # in client order; set by ``open``

    def __init__(self, config: TrainConfig, folder: Path, preparation: Preparation) -> None:
        self.config = config
        self.folder = folder
        self.preparation = preparation
        self._clients: list[Client] = []

    def open(self, method: Method, settings: Mapping[str, Value]) -> float:
        """Open the stores; nothing is ever extracted for them."""
        if "pixels" in method.reads(settings):
            raise UsageError(
                f"{method.name} trains on images, but --clients-from gives features of client stores.",
                "Train on the store from which the client stores were made: fedcache train --method "
                f"{shell_word(method.name)} --partition NAME",
            )
        if self.config.client_backbones or self.config.client_set:
            raise UsageError(
                "--client-backbones and --client-set need numbered clients, but the clients of --clients-from have "
                "names.",
                "Train on the store from which the client stores were made:  fedcache train --partition "
                "NAME",
            )
        self.stores = open_clients(self.folder)
        self.store = self.stores[0]
        count = len(self.stores)
        self.preparation.observer.note(f"{count} client stores in {self.config.clients_from}.")
        # Row numbers in the parent store become places in one matrix, which holds every row once in the same order.
        in_parent = [np.array(store.dataset["shard"]["rows"], np.int64) for store in self.stores]
        distinct = np.unique(np.concatenate(in_parent))
        self._places = [np.searchsorted(distinct, rows) for rows in in_parent]
        return 0.0

    def arrays(self, method: Method, settings: Mapping[str, Value]) -> list[str]:
        """The arrays of ``--backbones``; every client must have them with the same recipe."""
        return common_arrays(self.stores, self.config, needs_text(method))

    def partitions(
        self, method: Method, seeds: Sequence[int]
    ) -> tuple[dict[int, Partition], str | None]:
        """Each client holds the rows of its store, with the splits of the store."""
        labels: list[NDArray[np.int32]] = []
        validation_rows: list[NDArray[np.int64]] = []
        for store, places in zip(self.stores, self._places, strict=True):
            s = store.samples
            name = str(store.dataset["shard"]["client"])
            good = s.ok == 1
            # Splits: 0 training, 1 test, 2 validation.
            train = good & (s.split == 0)
            test = good & (s.split == 1)
            self._clients.append(Client(name, places[train], places[test]))
            labels.append(s.label[train])
            validation_rows.append(places[good & (s.split == 2)])
        if "labels" in method.needs and any((label < 0).any() for label in labels):
            folder = self.config.clients_from
            raise UsageError(
                f"{method.name} needs labels, but some rows of the client stores in {folder} have none.",
                "Add labels to the dataset, then:  fedcache shard --partition NAME --out DIR",
            )
        classes = self.store.samples.classes
        warning = single_class_warning(method, np.concatenate(labels), classes)
        if warning is not None:
            self.preparation.observer.warn(warning)
        test = np.unique(np.concatenate([client.test for client in self._clients]))
        validation = None
        if any(map(len, validation_rows)):
            validation = Validation.of_clients(RowLists.of(validation_rows))
        partition = Partition(
            scheme="shards-of-a-store",
            args={},
            seed=0,
            clients=ClientTable.of(self._clients, test, validation),
            test=test,
            dataset=str(self.store.dataset["shard"]["parent"]),
            pool=1 + max(int(places.max(initial=-1)) for places in self._places),  # distinct rows
            dropped=0,
        )
        by_seed = dict.fromkeys(seeds, partition)
        if self.preparation.whole:
            by_seed = without_validation(by_seed)
        return by_seed, None

    def read(
        self, method: Method, settings: Mapping[str, Value], arrays: Sequence[str], feat_post: str
    ) -> RunFeatures:
        """Every row once, with live encoders for a method that uses them."""
        trained = np.concatenate([client.train for client in self._clients])
        features = read_client_stores(
            method, settings, self.stores, arrays, self._places, feat_post, trained
        )
        encoders = encoders_of_run(method, self.store, arrays[0], self.preparation.home)
        if encoders is not None:
            features = encoders.add_to(features, self.store)
        if features.templates:
            say_templates(list(features.templates), self.preparation.observer)
        return features

    def overrides(
        self, method: Method, features: RunFeatures, clients: int
    ) -> dict[int, ClientOverrides]:
        """No differences: ``open`` refuses the options that set them."""
        return {}

    def dataset(self) -> Facts:
        """The parent's slug and digest, and the rows of all clients; a row of several clients counts several times."""
        return {
            "slug": self.store.dataset["slug"],
            "digest": str(self.store.dataset["shard"]["parent"]),
            "rows": sum(store.rows for store in self.stores),
            "ok": sum(store.rows_ok for store in self.stores),
            **_kind_of_rows(self.store),
        }


# The device that trains a run, and the inputs on that device.


def training_device(requested: str, observer: Observer, *, live: bool = False) -> str:
    """The device that trains a run: ``auto`` is the CPU, so that runs have the same bits with and without a GPU.

    With ``live`` encoders ``auto`` is a GPU if torch can use one. ``cuda`` is never replaced by another device. Raises
    UsageError for an unknown device, MachineError for ``cuda`` without a usable GPU.
    """
    if requested == "auto" and not live:
        if torch.cuda.is_available():
            observer.note(
                "Training on the CPU, although there is a GPU. --device cuda is faster for many clients."
            )
        return "cpu"
    return resolve_device(requested).kind


def on_device(inputs: RunInputs, device: str) -> RunInputs:
    """Inputs with their tensors on a device. Raises MachineError if they do not fit into the memory of a GPU."""
    if device == "cpu":
        return inputs
    x = inputs.data.x
    if isinstance(x, StoredRows):
        x = x.stored
    needed = x.nbytes
    free = free_memory_on(device)
    if needed > free:
        needed_mib = needed / 2**20
        free_mib = free / 2**20
        raise MachineError(
            f"The features take {needed_mib:,.0f} MiB, but only {free_mib:,.0f} MiB of GPU memory are "
            "free.",
            "Use a machine with more memory, --device cpu (which reads features from the store), or "
            "fewer backbones.",
        )
    return inputs.with_data(inputs.data.to(device))
