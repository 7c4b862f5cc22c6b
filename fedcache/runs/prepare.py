"""From a configuration to everything a run needs: method, features, partitions.

Where the rows come from is a ``RowSource``: one store whose rows are dealt to clients by index, a directory with one
store per client, or sites that keep their rows to themselves. What is left out comes from rules, and each choice is
said aloud.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedcache.config import PartitionConfig, TrainConfig
from fedcache.errors import UsageError
from fedcache.federate.engine.client_data import Data
from fedcache.federate.engine.client_overrides import ClientOverrides
from fedcache.federate.engine.hyperparameters import Value
from fedcache.federate.engine.method import Method
from fedcache.federate.methods import METHODS, find_method
from fedcache.federate.partition.partition import Client, Partition
from fedcache.runs.features import RunFeatures
from fedcache.runs.row_sources import Preparation, RowSource
from fedcache.runs.shard_rows import ShardRows
from fedcache.runs.spec import ResolvedRun, parse_seeds, resolve_run
from fedcache.runs.store_rows import StoreRows


@dataclass(frozen=True)
class RunInputs:
    """Everything a run reads.

    Attributes:
        method: with ``settings`` its hyperparameters.
        settings: every one of them; None is one that the method chooses by itself.
        features: of all rows, on the device that computes.
        backbones: names of those that made the features.
        dataset: its slug, digest and numbers of rows, as results hold them.
        domains: names.
        classes: names.
        partitions: one per seed.
        partition_name: under which they are saved; None for those made for this run.
        seconds: what preparing took, by step.
        overrides: in what single clients differ, by their number.
    """

    method: Method
    settings: Mapping[str, Value]
    features: RunFeatures
    backbones: tuple[str, ...]
    dataset: Mapping[str, Any]
    domains: tuple[str, ...]
    classes: tuple[str, ...]
    partitions: Mapping[int, Partition]
    partition_name: str | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    overrides: Mapping[int, ClientOverrides] = field(default_factory=dict)

    @property
    def data(self) -> Data:
        """Features, labels and text as methods read them."""
        return self.features.data

    @property
    def clients(self) -> Sequence[Client]:
        """Those of the first seed; every seed has as many."""
        return next(iter(self.partitions.values())).clients

    def resolve(self, config: TrainConfig) -> ResolvedRun:
        """What is run on these inputs; errors as ``resolve_run``."""
        return resolve_run(config, self.method, self.settings, self.features.arrays, len(self.clients))

    def with_settings_of(self, config: TrainConfig) -> RunInputs:
        """The same rows with the hyperparameters of another configuration of the same method."""
        settings = hyperparameters(self.method, config)
        kept = {"feat_post": self.settings["feat_post"]} if "feat_post" in settings else {}
        return replace(self, settings={**settings, **kept})

    def with_data(self, data: Data) -> RunInputs:
        """The same with other data."""
        return replace(self, features=replace(self.features, data=data))


def prepare_run(config: TrainConfig, source: RowSource, method: Method | None = None) -> RunInputs:
    """Resolve method, features and partitions.

    Args:
        config: as asked.
        source: where the rows come from.
        method: one of the user's own, in the place of the one that is named.

    Raises:
        UsageError, StoreError, CorruptionError; as extraction, where one is run.
    """
    method = method or named_method(config)
    settings, seeds = hyperparameters(method, config), parse_seeds(config.seeds)
    began = time.perf_counter()
    extracting = source.open(method, settings)
    arrays = source.arrays(method, settings)
    partitions, name = source.partitions(method, seeds)
    feat_post = source.feat_post(method, settings, arrays)
    if "feat_post" in settings:
        settings = {**settings, "feat_post": feat_post}
    features = source.read(method, settings, arrays, feat_post)
    domains, classes = source.names()
    clients = len(next(iter(partitions.values())).clients)
    return RunInputs(
        method=method,
        settings=settings,
        features=features,
        backbones=source.backbones(features.arrays),
        dataset=source.dataset(),
        domains=domains,
        classes=classes,
        partitions=partitions,
        partition_name=name,
        overrides=source.overrides(method, features, clients),
        seconds={"extract": extracting, "load": time.perf_counter() - began - extracting},
    )


def named_method(config: TrainConfig) -> Method:
    """The method that a configuration names.

    Raises:
        UsageError, also when it names none.
    """
    if config.method is not None:
        return find_method(config.method)
    if config.clients_from is not None:
        raise UsageError("No method was named.", "fedcache train --method fed3r --clients-from DIR")
    raise UsageError("No method was named.", f"--method {' | '.join(METHODS)}")


def hyperparameters(method: Method, config: TrainConfig) -> dict[str, Value]:
    """Every hyperparameter; a schedule of its own accord lasts as long as the run."""
    settings = method.resolve(config.preset, config.set)
    return with_schedule_rounds(settings, config.rounds or method.defaults.rounds)


def with_schedule_rounds(settings: Mapping[str, Value], rounds: int) -> dict[str, Value]:
    """Hyperparameters whose schedule, where nobody says how long it is, is that of so many rounds."""
    if "sched_rounds" in settings and settings["sched_rounds"] is None:
        return {**settings, "sched_rounds": rounds}
    return dict(settings)


def row_source(config: TrainConfig, partition: PartitionConfig, preparation: Preparation) -> RowSource:
    """The stores of ``--clients-from``, each a client, else one store whose rows are dealt by index."""
    if config.clients_from is not None:
        return ShardRows(config, Path(config.clients_from), preparation)
    return StoreRows(config, partition, preparation)
