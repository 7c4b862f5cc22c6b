"""Exact unlearning of one client of a run whose server adds up uploads.

The configuration of the run is trained again without the client, as an ordinary run. This run is compared with the
model that the server gets on its own: it subtracts the client's upload from the sum of all uploads and takes its step
again. A model that is a function of sums forgets a part of its data in this way (Cao & Yang, "Towards Making Systems
Forget with Machine Unlearning", IEEE Symposium on Security and Privacy 2015).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fedcache.config import Home, PartitionConfig, TrainConfig, resolve
from fedcache.errors import FederatedRunError, StoreError, UsageError, shell_word
from fedcache.federate.engine.run import TrainingRun, new_run
from fedcache.federate.execution.executor import fit_group, groups_of
from fedcache.federate.partition.partition import Partition
from fedcache.heads.linear import Tree
from fedcache.parsing import Facts, Record
from fedcache.process import Stop, usual_torch_state
from fedcache.progress import Observer, Silent
from fedcache.runs.directory import check_files, run_folder, train_table
from fedcache.runs.features import Preparation
from fedcache.runs.loop import (
    TrainingOptions,
    named_method,
    prepare_run,
    resolve_inputs,
    row_source,
    train_run,
    training_run,
)
from fedcache.runs.origin import store_behind
from fedcache.runs.partitions import keep_partition
from fedcache.runs.predict_run import finished_result, load_seed, partition_of_seed
from fedcache.runs.run import Run
from fedcache.runs.spec import hyperparameters, why_not_sums
from fedcache.store.store import Store

LARGEST_DIFFERENCE = 1e-4
"""Relative difference of two models above which the uploads of a method do not add up as it declares."""

NO_WEIGHT = 1e20
"""Numbers of a model from here on are marks, such as the score of a class without rows, and no weights."""


@dataclass(frozen=True)
class Forgotten:
    """A run without one client, and how much its model differs from the earlier model minus the client's upload."""

    run: Run  # the new run
    source: str  # digest of the earlier run
    client: str
    rows: int  # training rows of the client
    # largest difference, over all seeds, between the new model and the model by subtraction, as a fraction of the
    # largest weight in the same tensor
    difference: float

    def to_dict(self) -> Facts:
        """The ``data`` of the JSON output."""
        return {**self.__dict__, "run": self.run.to_dict()}


@usual_torch_state()
def forget_client(
    place: Path, client: str, home: Home, observer: Observer, stop: Stop
) -> Forgotten:
    """Train a run again without a client, and compare the new model with the old one minus the client's upload.

    The new run is stored next to the run, and its partition is saved in the store.

    Raises UsageError for a run that cannot forget by subtraction and for a client that cannot be left out, StoreError
    for a run without its store or partition, FederatedRunError if the two models differ, StoppedError after a stop.

    Args:
        place: the directory of the run.
        client: name of the client.
        home: with the stores.
        observer: receives notes, warnings and the progress of the training.
        stop: ends the training at a point where no finished round is lost.
    """
    folder = run_folder(place)
    result = finished_result(folder)
    check_files(folder, result)
    store, partition = _rows_of_run(folder, result)
    section = {**train_table(folder), "dataset": None, "store": store.place}
    config = resolve(TrainConfig, section, {}, str(folder / "config.toml"))
    _check_adds_up(folder, result, config, store)
    smaller = partition.without_client(client)
    # A number of clients per round may be larger than the number of the remaining clients.
    config = replace(config, partition=keep_partition(store, smaller, home), participation="all")
    source = row_source(config, PartitionConfig(), Preparation(home, observer, stop, extract=False))
    inputs = prepare_run(config, source)
    run = train_run(inputs, config, TrainingOptions(folder.parent, observer, stop))
    inputs, spec = resolve_inputs(inputs, config, Silent())
    number = partition.table.names.index(client)
    difference = 0.0
    for seed in spec.seeds:
        found = by_subtraction(training_run(inputs, spec, seed), inputs.settings, partition, number)
        saved = load_seed(run.path, seed).tensors
        difference = max(difference, largest_difference(found, saved))
    if difference > LARGEST_DIFFERENCE:
        raise FederatedRunError(
            f"{spec.method} declares that its model depends only on the sum of all uploads. This is wrong: the model "
            f"after subtracting the upload of {client} and the model trained without {client} differ by "
            f"{difference:.1g} times the largest weight.",
            f"The run without the client is stored and complete:  fedcache runs show {shell_word(run.path)}",
        )
    rows = int(partition.table.train_sizes[number])
    return Forgotten(run, result["digest"], client, rows, difference)


def _rows_of_run(folder: Path, result: Record) -> tuple[Store, Partition]:
    """The store and the partition of a run; errors as of ``forget_client``."""
    if "federation" in result or train_table(folder).get("clients_from"):
        raise UsageError(
            "This run was trained on a separate store for each client, so there is no partition from which a client "
            "could be removed.",
            "Train again without the store of the client. To see the command of the run:  fedcache runs show "
            f"{shell_word(folder)}",
        )
    store = store_behind(folder, result)
    partition = None
    if store is not None:
        partition = partition_of_seed(folder, result, result["seeds"][0], store)
    if store is None or partition is None:
        raise StoreError(
            "The store or the partition of this run no longer exists, or has other rows now.",
            "fedcache ls",
        )
    return store, partition


def _check_adds_up(folder: Path, result: Record, config: TrainConfig, store: Store) -> None:
    """Raise UsageError if the model of a run is not a function of the sum of one upload of each client."""
    method = named_method(config)
    settings = dict(hyperparameters(method, config))
    # The value that the run used follows from its backbone.
    if "feat_post" in settings:
        settings["feat_post"] = result["hyperparameters"]["feat_post"]
    why = why_not_sums(config, method, settings, result["partition"]["clients"])
    if not why and config.partition is None:
        why = "each seed has its own partition"
    if why:
        file = folder / f"partition-{result['seeds'][0]}.partition"
        partition = shell_word(config.partition or file)
        raise UsageError(
            f"This run of {method.name} cannot forget a client by subtraction, because {why}. To forget the client, "
            "train again without it.",
            f"A run that can:  fedcache train --store {shell_word(store.place)} --partition {partition} "
            "--method fed3r",
        )


def by_subtraction(training: TrainingRun, hp: Record, partition: Partition, client: int) -> Tree:
    """The broadcast of a server that subtracts one upload from the sum of all uploads, and takes its step again.

    Args:
        training: one seed of the run without the client.
        hp: its hyperparameters.
        partition: the partition with the client.
        client: number of the client in ``partition``.
    """
    before = new_run(replace(training, clients=partition.clients), hp)
    before.start()
    down = before.down()
    total: Facts = {}
    for group in groups_of(before, before.eligible.tolist()):
        up = fit_group(before, down, group)
        total = {name: t + total.get(name, 0) for name, t in up.items()}
    upload = before.fit_one(down, client)
    server = new_run(training, hp)
    server.start()
    remaining = {name: total[name] - t for name, t in upload.items()}
    server.server = server.next_server(remaining, server.eligible.tolist())
    return server.down()


def largest_difference(found: Tree, saved: Mapping[str, Tensor]) -> float:
    """The largest difference of two models, each number as a fraction of the largest weight in its tensor.

    ``found`` is a broadcast, and ``saved`` has the tensors of a model file.
    """
    worst = 0.0
    for name, t in found.items():
        expected = saved[f"server/{name}"].double()
        size = expected.abs()
        largest = float(torch.where(size < NO_WEIGHT, size, 0.0).max())
        # Marks are compared as fractions of themselves. The small number avoids a division by 0.
        scale = size.clamp(min=max(largest, 1e-300))
        apart = (t.cpu().double() - expected).abs() / scale
        worst = max(worst, float(apart.max()))
    return worst
