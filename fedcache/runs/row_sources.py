"""Sources of a run's rows: one store with a partition, or a directory with one store per client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from fedcache.config import Home, PartitionConfig, TrainConfig
from fedcache.errors import MachineError, UsageError, shell_word, unknown
from fedcache.extract.backbones.own import known_name
from fedcache.extract.device import resolve_device
from fedcache.extract.planning.plan import say_templates
from fedcache.extract.recipe import IMAGES, held_by
from fedcache.federate.engine.client_data import SHARED_SUMS, StoredRows
from fedcache.federate.engine.hyperparameters import Value
from fedcache.federate.engine.method import ClientOverrides, Method
from fedcache.federate.execution.memory_estimate import free_memory_on
from fedcache.federate.partition.client_table import (
    ClientTable,
    RowLists,
    Validation,
    all_train_rows,
)
from fedcache.federate.partition.partition import Client, Partition
from fedcache.process import Stop
from fedcache.progress import Observer
from fedcache.runs.base_to_new import count_base_classes
from fedcache.runs.features import (
    RunFeatures,
    RunInputs,
    encoders_of_run,
    read_client_stores,
    read_images,
    read_store,
)
from fedcache.runs.partitions import (
    hints_name_the_store,
    need_labels,
    partition_seeds,
    single_class_warning,
)
from fedcache.runs.spec import check_named, client_overrides, named_backbones
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
from fedcache.store.store import Store


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

    def dataset(self) -> dict[str, Any]:
        """Slug, digest and numbers of rows."""

    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the domains and of the classes."""

    def backbones(self, arrays: Sequence[str]) -> tuple[str, ...]:
        """Names of the backbones that made the arrays."""

    def choices(self, arrays: Sequence[str]) -> dict[str, Any]:
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

    def choices(self, arrays: Sequence[str]) -> dict[str, Any]:
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
    def base(self) -> int | None:
        """Number of base classes; None if the run has all classes. Raises UsageError as ``count_base_classes``."""
        if self.config.base_classes is None:
            return None
        return count_base_classes(self.config.base_classes, self.store.samples.classes)

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
            method.defaults,
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
        if self.base is not None and (samples.label[rows] >= self.base).any():
            raise UsageError(
                f"The partition {config.partition} has training rows of new classes.",
                "Leave --partition out, or leave --base-classes out.",
            )
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

    def dataset(self) -> dict[str, Any]:
        """Slug, digest and numbers of rows, and the kind of the rows if they are not images."""
        dataset = self.store.dataset
        return {
            "slug": str(dataset["slug"]),
            "digest": str(dataset["digest"]),
            "rows": self.store.rows,
            "ok": self.store.rows_ok,
            **_kind_of_rows(self.store),
        }

    def choices(self, arrays: Sequence[str]) -> dict[str, Any]:
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

    def dataset(self) -> dict[str, Any]:
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
