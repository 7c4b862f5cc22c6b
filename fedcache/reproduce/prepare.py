"""Preparation of the data of a cell: the store with its features, or only the images, and the partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fedcache.config import ExtractConfig, Home, PartitionConfig, TrainConfig
from fedcache.errors import UsageError, shell_word
from fedcache.extract.backbones import lookup
from fedcache.extract.datasets import Context, Dataset, open_dataset
from fedcache.extract.extract_dataset import extract
from fedcache.extract.planning.plan import memory_of, roots_of
from fedcache.extract.workers.chunk_tasks import ExtractionEngine
from fedcache.federate.engine.local_training import batch_sizes
from fedcache.federate.methods import METHODS
from fedcache.federate.partition.partition import Columns, InfeasibleError, Partition, make
from fedcache.process import Stop
from fedcache.progress import EachOnce, Observer, progress_of
from fedcache.reproduce.planning import Options, find_domain, match_domains
from fedcache.reproduce.registry import PaperCell
from fedcache.runs.partitions import columns_of
from fedcache.runs.store_choice import pixel_recipe

DOMAIN_CLIENTS = ("feature-shift", "feature-label-shift")
"""Schemes in which each domain is a client, so that the dataset determines the number of clients."""


class WarningsOnly(EachOnce):
    """Observer that passes on progress and warnings (each once), but not the notes of every single run."""

    def note(self, text: str) -> None:
        """Leave out the note."""

    def ended(self, path: Path, result: Mapping[str, Any]) -> None:
        """Leave out the result."""


@dataclass(frozen=True)
class Features:
    """A store, the keys of a cell's arrays in it, and the names by which training finds these arrays."""

    path: Path
    keys: tuple[str, ...]
    names: tuple[str, ...]
    columns: Columns


class ReproductionEngine(ExtractionEngine, Protocol):
    """Cluster that extracts features and trains runs in place of this process: ``--engine``."""

    def run_configurations(
        self,
        todo: Sequence[tuple[TrainConfig, PartitionConfig]],
        home: Home,
        runs: Path,
        observer: Observer,
        stop: Stop,
    ) -> set[Path]:
        """Train and store runs; return the directories of the new ones."""


@dataclass
class Workbench:
    """Everything that measuring a cell needs; features and images are prepared once and shared by cells.

    Attributes:
        home: home with stores, runs, weights and data.
        options: options of the call.
        observer: receives notes, warnings and progress.
        halt: set by a signal handler to end the reproduction.
        pictures: folder for pictures that are drawn.
        runs: directory of results.
        engine: a cluster that extracts, or None.
        made: directories of runs that this command made, on this machine or ahead on the cluster.
    """

    home: Home
    options: Options
    observer: Observer
    halt: Stop
    pictures: Path
    runs: Path
    engine: ReproductionEngine | None = None
    made: set[Path] = field(default_factory=set)
    _features: dict[tuple[Any, ...], Features] = field(default_factory=dict)
    _images: dict[str, Dataset] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.quiet = WarningsOnly(self.observer)

    def features(self, cell: PaperCell) -> Features:
        """The store with every backbone of a cell; missing features are extracted first.

        Raises:
            FedcacheError: as ``extract``.
        """
        recipe = tuple(sorted(cell.recipe.items()))
        key = (cell.dataset, cell.backbones, recipe, cell.views, cell.augment)
        if key not in self._features:
            config = ExtractConfig(
                dataset=cell.dataset,
                backbones=cell.backbones,
                recipe={**cell.recipe, **recipe_of_pixels(cell, self.home)},
                views=cell.views,
                augment=cell.augment,
                limit=self.options.limit,
                weights=self.options.weights,
                data=self.options.data,
                device=self.options.device,
            )
            done = extract(
                config, self.home, observer=self.observer, stop=self.halt, engine=self.engine
            )
            store = done.store
            keys = tuple(a["key"] for a in done.arrays)
            stored_backbones = [str(a.recipe.get("backbone")) for a in store.arrays.values()]
            names = []
            for backbone, array in zip(cell.backbones, keys, strict=True):
                # Training finds the pixels next to an encoder by itself.
                if backbone == "pixels" and len(keys) > 1:
                    continue
                # An array is named by its key if the store has several of its backbone.
                if stored_backbones.count(backbone) == 1:
                    names.append(backbone)
                else:
                    names.append(array)
            self._features[key] = Features(done.path, keys, tuple(names), columns_of(store))
        return self._features[key]

    def images(self, cell: PaperCell) -> Dataset:
        """The dataset of a cell, opened."""
        if cell.dataset not in self._images:
            with progress_of(self.observer, f"reading {cell.dataset}", "images") as progress:
                context = Context(
                    memory_of(self.home),
                    roots_of(self.options.data),
                    self.home.data,
                    progress=progress,
                    limit=self.options.limit,
                )
                self._images[cell.dataset] = open_dataset(cell.dataset, context)
        return self._images[cell.dataset]

    def columns(self, cell: PaperCell) -> Columns:
        """The columns from which a partition of a cell's images is made. All images count as readable."""
        d = self.images(cell)
        return Columns(
            d.label,
            d.domain,
            d.split,
            np.ones(len(d), np.uint8),
            d.uid,
            d.classes,
            d.domains,
            d.digest,
        )


def recipe_of_pixels(cell: PaperCell, home: Home) -> dict[str, str]:
    """``--recipe`` options that store ``pixels`` in the size in which the encoder next to them reads images."""
    encoders = [b for b in cell.backbones if b != "pixels"]
    if not encoders or "pixels" not in cell.backbones:
        return {}
    return pixel_recipe(lookup(encoders[0], home=home.root).recipe)


@dataclass(frozen=True)
class CellPartition:
    """A partition, the arguments of its scheme, and a sentence for each difference from the arguments of the cell."""

    partition: Partition
    args: Mapping[str, Any]
    departures: tuple[str, ...]


def with_known_domains(
    cell: PaperCell, columns: Columns, *, proxy: bool
) -> tuple[PaperCell, list[str]]:
    """The cell with its domains as the dataset calls them.

    Raises:
        UsageError, when the paper's own dataset lacks the domain.
    """
    lost = [d for d in cell.domain if find_domain(d, columns.domains) is None]
    if lost and not proxy:
        first = lost[0]
        domains = ", ".join(columns.domains)
        raise UsageError(
            f"{cell.dataset} has no domain {first}; it has {domains}.",
            f"fedcache datasets info {shell_word(cell.dataset)}",
        )
    found, departures = match_domains(cell.domain, columns.domains)
    return replace(cell, domain=found), departures


def partition_cell(cell: PaperCell, columns: Columns, seed: int, *, proxy: bool) -> CellPartition:
    """The cell's partition. With ``proxy`` it is scaled down, with a note, if the dataset has too few rows.

    Raises:
        UsageError for too few rows; with ``proxy`` only if no scaled-down partition fits either.
    """
    args = dict(cell.args)
    domain = {}
    if cell.domain:
        domain = {"domain": cell.domain}
    # Each attempt takes the values that the scheme proposes; some schemes need several attempts.
    for _ in range(4):
        try:
            made = make(cell.scheme, columns, seed=seed, **args, **domain)
        except InfeasibleError as error:
            changes = {k: v for k, v in error.instead.items() if args.get(k) != v}
            if not proxy or not changes:
                raise
            args |= changes
            continue
        departures = []
        for key, value in args.items():
            usual = cell.args.get(key, "the default")
            if value != cell.args.get(key):
                departures.append(f"{key} {value} instead of {usual} in the partition")
        if proxy and cell.scheme in DOMAIN_CLIENTS:
            clients = len(made.clients)
            departures.append(f"{clients} clients, the domains of `{cell.dataset}`")
        departures += [f"in the partition, {note}" for note in made.notes]
        return CellPartition(made, args, tuple(departures))
    raise UsageError(
        f"{cell.scheme} does not fit these rows at any scale that was tried.",
        "Give more data with --on.",
    )


def short_batches(
    cell: PaperCell, partition: Partition, *, proxy: bool
) -> tuple[dict[str, Any], list[str]]:
    """The settings of a cell, adapted to a small dataset, and their differences from the paper.

    Only a proxy is adapted: it also trains on short batches if the smallest client has fewer rows than a batch, and it
    replaces FLESD's queue of keys if the public rows cannot fill the queue. With another number of rows, clients also
    take another number of steps, so the steps of a proxy are named.
    """
    hp = METHODS[cell.method].resolve(cell.preset, cell.set)
    settings = dict(cell.set)
    departures: list[str] = []
    if not proxy:
        return settings, departures
    # These settings leave out batches that are not full; the smallest client may have no full batch.
    dropping = [key for key in ("drop_last", "proto_drop_last") if hp.get(key)]
    batch = hp.get("batch")
    least = min(len(c.train) for c in partition.clients)
    no_full_batch = isinstance(batch, int) and least < batch
    if dropping and no_full_batch:
        settings |= dict.fromkeys(dropping, False)
        departures.append(
            f"short batches are used, because the smallest client has {least} rows and a batch has {batch}"
        )
    if isinstance(batch, int):
        steps = [len(batch_sizes(len(c.train), {**hp, **settings})) for c in partition.clients]
        departures.append(f"steps per client and local epoch (median): {np.median(steps):g}")
    # The first client holds FLESD's public rows; they must fill the queue twice.
    public = len(partition.clients[0].train)
    queue = hp.get("queue")
    too_few_keys = isinstance(queue, int) and public < 2 * queue
    if hp.get("anchors") == "queue" and too_few_keys:
        settings |= {"anchors": "all", "esd_drop_last": False}
        departures.append(
            f"all {public} public rows as anchors, because they are too few for a queue of {queue}"
        )
    return settings, departures
