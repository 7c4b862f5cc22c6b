"""The store that a run was trained on, for what a result does not hold: labels, recipes, features."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import FedcacheError
from fedcache.federate.partition.partition import Columns, Partition
from fedcache.report.find_runs import StoredRun
from fedcache.runs.partitions import columns_of, load_partition
from fedcache.store.store import Store


@dataclass(frozen=True)
class RunStore:
    """Where a run's rows came from.

    Attributes:
        store: of the run's dataset.
        columns: labels, domains and names.
        partition: of the run's first seed.
        keys: the feature arrays that any of the runs read, those that are still there.
        fused: those of the run that read most together.
    """

    store: Store
    columns: Columns
    partition: Partition
    keys: list[str]
    fused: list[str]

    def features(self, key: str, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """[N, D] float32 of the first view; rows that could not be read are NaN."""
        x: NDArray[np.float32] = self.store.reader(key).rows(rows)[:, 0].astype(np.float32)
        return x


def store_of_run(entries: Sequence[StoredRun]) -> RunStore | str:
    """The source of runs of one setting, or why there is none, in words."""
    why = "these runs were made from clients' own stores"
    for entry in entries:
        table = config_of(entry)
        if table.get("clients_from"):
            continue
        try:
            store = store_of(entry)
            if store is None:
                why = f"no store of dataset {str(entry.result['dataset']['digest'])[:16]} is here any more"
                continue
            partition = load_partition(store, _partition_of(entry, table))
        except (FedcacheError, OSError) as error:
            why = getattr(error, "message", str(error)).rstrip(".")
            continue
        there = {k for k, a in store.arrays.items() if a.dtype != "uint8"}
        keys = [k for k in dict.fromkeys(str(k) for e in entries for k in e.result["arrays"]) if k in there]
        fused = max((list(e.result["arrays"]) for e in entries), key=len)
        return RunStore(store, columns_of(store), partition, keys, [k for k in fused if k in there])
    return why


def config_of(entry: StoredRun) -> dict[str, Any]:
    """The ``[train]`` table that made a run; {} when it is not readable."""
    try:
        table: dict[str, Any] = tomllib.loads((entry.path / "config.toml").read_text(encoding="utf-8"))["train"]
    except (OSError, ValueError, KeyError):
        return {}
    return table


def store_of(entry: StoredRun) -> Store | None:
    """The store of the run's dataset: the one its configuration names, else one beside the runs; None without."""
    digest = str(entry.result["dataset"]["digest"])
    named = config_of(entry).get("store")
    beside = entry.path.parent.parent / "stores"
    slug = f"*-{digest[:8]}.zarr"
    for path in (*([Path(named)] if named else []), *sorted(beside.glob(slug)), *sorted(beside.glob("*.zarr"))):
        try:
            store = Store.open(path)
        except (FedcacheError, OSError):
            continue
        if store.dataset["digest"] == digest:
            return store
    return None


def _partition_of(entry: StoredRun, table: dict[str, Any]) -> str:
    """The partition's file in the run's directory, else its name in the store."""
    own = entry.path / f"partition-{entry.result['seeds'][0]}.json"
    return str(own) if own.exists() else str(table.get("partition") or entry.result["partition"]["name"])
