"""Origin of a stored run: its configuration, the command that repeats it, the store of its rows."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from fedcache.config import TrainConfig, option_value
from fedcache.errors import FedcacheError
from fedcache.federate.partition.partition import Columns, Partition
from fedcache.parsing import Facts, Record
from fedcache.report.find_runs import StoredRun
from fedcache.runs.directory import command_again, train_table, usual_preset, usual_settings
from fedcache.runs.origin import store_behind
from fedcache.runs.partitions import columns_of, load_partition
from fedcache.store.manifest import PARTITION_SUFFIXES
from fedcache.store.store import Store


@dataclass(frozen=True)
class RunStore:
    """The store, the columns and the partition behind stored runs.

    Attributes:
        store: of the run's dataset.
        columns: labels, domains and names.
        partition: of the run's first seed.
        keys: the feature arrays that any of the runs read, if they still exist.
        fused: the arrays of the run that reads most arrays, if they still exist.
    """

    store: Store
    columns: Columns
    partition: Partition
    keys: list[str]
    fused: list[str]

    def features(self, key: str, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """[N, D] float32 of the first view; rows that could not be read are NaN."""
        return self.store.reader(key).rows(rows)[:, 0].astype(np.float32)


def store_of_run(entries: Sequence[StoredRun]) -> RunStore | str:
    """The store behind runs of one setting, or in words why there is none or nothing that is read from it is shown."""
    # If one run of a setting is private, no rows of that setting are shown.
    if any(entry.private for entry in entries):
        return (
            "a run of this setting has differential privacy, and epsilon does not cover the partition or the "
            "features"
        )
    why = "these runs were trained on client stores"
    for entry in entries:
        table = train_table(entry.path)
        if table.get("clients_from"):
            continue
        try:
            store = store_behind(entry.path, entry.result)
            if store is None:
                digest = entry.result["dataset"]["digest"][:16]
                why = f"the store of the dataset {digest} no longer exists"
                continue
            partition = load_partition(store, _partition_of(entry, table))
            if partition.digest not in entry.result["partition"]["digests"]:
                name = entry.result["partition"]["name"]
                why = f"the partition {name!r} has been replaced by a partition with other rows"
                continue
        except (FedcacheError, OSError) as error:
            why = getattr(error, "message", str(error)).rstrip(".")
            continue
        # Arrays of uint8 hold pixels, not features.
        stored = {key for key, array in store.arrays.items() if array.dtype != "uint8"}
        arrays_of_runs = [e.result["arrays"] for e in entries]
        every = dict.fromkeys(itertools.chain(*arrays_of_runs))
        most = max(arrays_of_runs, key=len)
        keys = [key for key in every if key in stored]
        fused = [key for key in most if key in stored]
        return RunStore(store, columns_of(store), partition, keys, fused)
    return why


def _partition_of(entry: StoredRun, table: Facts) -> str:
    """The partition's file in the run's directory, else its name in the store."""
    seed = entry.seeds[0]
    for suffix in PARTITION_SUFFIXES:
        file = entry.path / f"partition-{seed}{suffix}"
        if file.exists():
            return str(file)
    return str(table.get("partition") or entry.result["partition"]["name"])


_WRITTEN_APART = (
    "method",
    "set",
    "store",
    "dataset",
    "partition",
    "clients_from",
    "seeds",
    "rounds",
    "client_set",
    "preset",
)
"""Options that ``command_of`` handles separately from the other fields of the configuration."""

_DEFAULTS = {f.name: f.default for f in fields(TrainConfig)}


def command_of(entry: StoredRun, store: str) -> str:
    """One line for a shell with every option that differs from its default; stores and partitions by name, not by path.

    A run over sites gets a sentence, see ``command_again``.

    Args:
        entry: the run.
        store: the name of its dataset's store; "" where it no longer exists.
    """
    table = train_table(entry.path)
    if not table:
        return ""
    if "federation" in entry.result:
        return command_again(entry.path)
    words = ["fedcache", "train", "--method", entry.method]
    preset = str(table.get("preset", "paper"))
    if preset != usual_preset(entry.method):
        words += ["--preset", preset]
    if table.get("clients_from"):
        words += ["--clients-from", str(table["clients_from"])]
    else:
        if store:
            words += ["--store", store]
        else:
            words += ["--dataset", str(table.get("dataset") or entry.result["dataset"]["slug"])]
        words += _partition(entry, str(table.get("partition") or ""))
    rounds = entry.result["rounds"]
    # One round is the default of a one-shot method, so the option is left out unless the run was given one.
    if rounds != 1 or "rounds" in table:
        words += ["--rounds", str(rounds)]
    words += ["--seeds", ",".join(map(str, entry.seeds))]
    for name, value in table.items():
        if name in _WRITTEN_APART or name not in _DEFAULTS or value == _DEFAULTS[name]:
            continue
        option = name.replace("_", "-")
        words += [f"--{option}", option_value(value)]
    for name, value in _changed(entry, table).items():
        words += ["--set", f"{name}={option_value(value)}"]
    for name, value in table.get("client_set", {}).items():
        words += ["--client-set", f"{name}={option_value(value)}"]
    return shlex.join(words)


def _partition(entry: StoredRun, name: str) -> list[str]:
    """Options of a partition: its name if it is saved, its scheme if it was made for the run."""
    partition = entry.result["partition"]
    # No scheme makes a partition again from which clients were removed later.
    is_reduced = "forgotten" in partition["args"]
    if name and (is_reduced or not name.endswith(PARTITION_SUFFIXES)):
        return ["--partition", name]
    words = ["--scheme", partition["scheme"]]
    args = {k: v for k, v in partition["args"].items() if v is not None}
    if "clients" in args:
        words += ["--clients", str(args.pop("clients"))]
    for key, value in args.items():
        words += ["--option", f"{key}={option_value(value)}"]
    if partition["seed"]:
        words += ["--partition-seed", str(partition["seed"])]
    if entry.redrawn:
        return [*words, "--repartition"]
    return words


def _changed(entry: StoredRun, table: Record) -> Facts:
    """Hyperparameters that differ from the preset; all of them for a method that is no longer installed."""
    hp = entry.result["hyperparameters"]
    try:
        usual = usual_settings(entry.method, str(table.get("preset", "paper")))
    except FedcacheError:
        return dict(hp)
    changed = {}
    for name, value in hp.items():
        if name in usual:
            default = usual[name]
            # Results write "auto" for None, a value that the method chooses itself.
            if default is None:
                default = "auto"
            if default == value:
                continue
        changed[name] = value
    return changed
