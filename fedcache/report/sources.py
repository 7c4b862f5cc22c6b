"""The store that a run was trained on, for what a result does not hold: labels, recipes, features."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.api.partitions import columns_of, load_partition
from fedcache.errors import FedcacheError
from fedcache.federate.partition import Columns, Partition
from fedcache.report.gather import Entry
from fedcache.store.store import Store


@dataclass(frozen=True)
class Source:
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


def source_of(entries: Sequence[Entry]) -> Source | str:
    """The source of runs of one setting, or why there is none, in words."""
    why = "these runs name no store"
    for entry in entries:
        try:
            table = tomllib.loads((entry.path / "config.toml").read_text(encoding="utf-8"))["train"]
        except (OSError, ValueError, KeyError):
            continue
        path = table.get("store")
        if not path:
            why = "these runs were made from clients' own stores"
            continue
        try:
            store = Store.open(Path(path))
            if store.dataset["digest"] != entry.result["dataset"]["digest"]:
                why = f"{path} holds another dataset now"
                continue
            partition = load_partition(store, _partition_of(entry, table))
        except (FedcacheError, OSError) as error:
            why = getattr(error, "message", str(error)).rstrip(".")
            continue
        there = {k for k, a in store.arrays.items() if a.dtype != "uint8"}
        keys = [k for k in dict.fromkeys(str(k) for e in entries for k in e.result["arrays"]) if k in there]
        fused = max((list(e.result["arrays"]) for e in entries), key=len)
        return Source(store, columns_of(store), partition, keys, [k for k in fused if k in there])
    return why


def _partition_of(entry: Entry, table: dict[str, Any]) -> str:
    """The partition's file in the run's directory, else its name in the store."""
    own = entry.path / f"partition-{entry.result['seeds'][0]}.json"
    return str(own) if own.exists() else str(table.get("partition") or entry.result["partition"]["name"])
