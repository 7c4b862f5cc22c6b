"""``train --clients-from``: every store of a directory is a client; equal to training by index, to the bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.config import TrainConfig
from fedcache.errors import StoreError, UsageError
from fedcache.extract.planning.plan import say_templates
from fedcache.federate.engine.client_overrides import ClientOverrides
from fedcache.federate.engine.hyperparameters import Value
from fedcache.federate.engine.method import Method
from fedcache.federate.partition.partition import Client, Partition
from fedcache.runs.arrays import chosen_arrays, feat_post_for, wants_encoders
from fedcache.runs.encoders import encoders_of_run
from fedcache.runs.features import RunFeatures, read_client_stores
from fedcache.runs.partitions import single_class_warning
from fedcache.runs.row_sources import Preparation
from fedcache.store.store import Store


class ShardRows:
    """A ``RowSource``: the stores of a directory.

    Rows that several clients hold (shared test rows) are taken once, in the parent's order, so that every sum runs in
    the order it has when one store holds all rows.

    Args:
        config: names the backbones.
        folder: of the stores.
        preparation: what preparing may do.

    Attributes:
        stores: in client order, once they are open.
    """

    stores: list[Store]

    def __init__(self, config: TrainConfig, folder: Path, preparation: Preparation) -> None:
        self.config, self.folder, self.preparation = config, folder, preparation
        self._clients: list[Client] = []

    def open(self, method: Method, settings: Mapping[str, Value]) -> float:
        """Open the stores; nothing is ever extracted for them."""
        if "pixels" in method.reads(settings):
            raise UsageError(
                f"{method.name} trains on images, and --clients-from on the features of client stores.",
                f"Train on the store they were cut from: fedcache train --method {method.name} --partition NAME",
            )
        if self.config.client_backbones or self.config.client_set:
            raise UsageError(
                "--client-backbones and --client-set deal differences to clients by number, --clients-from to stores.",
                "Train on the store they were cut from:  fedcache train --partition NAME",
            )
        self.stores = open_clients(self.folder)
        self.preparation.observer.note(f"{len(self.stores)} client stores in {self.config.clients_from}.")
        # Numbers in the parent -> places in one matrix that holds every row once, in the parent's order.
        parents = [np.array(s.dataset["shard"]["rows"], np.int64) for s in self.stores]
        rows = np.unique(np.concatenate(parents))
        self._places = [np.searchsorted(rows, p) for p in parents]
        return 0.0

    def arrays(self, method: Method, settings: Mapping[str, Value]) -> list[str]:
        """Those of ``--backbones``; every client must have them, by the digest of their recipe."""
        return common_arrays(self.stores, self.config, "text" in method.needs or wants_encoders(method))

    def partitions(self, method: Method, seeds: Sequence[int]) -> tuple[dict[int, Partition], str | None]:
        """Each client holds the rows of its store, as the store splits them."""
        labels = []
        for store, places in zip(self.stores, self._places, strict=True):
            s, name = store.samples, str(store.dataset["shard"]["client"])
            good = s.ok == 1
            train, test = good & (s.split == 0), good & (s.split == 1)
            self._clients.append(Client(name, places[train], places[test]))
            labels.append(s.label[train])
        if "labels" in method.needs and any((label < 0).any() for label in labels):
            raise UsageError(
                f"{method.name} needs labels, and rows of the client stores in {self.config.clients_from} have none.",
                "Add labels to the dataset, then:  fedcache shard --partition NAME --out DIR",
            )
        warning = single_class_warning(method, np.concatenate(labels), self.stores[0].samples.classes)
        if warning is not None:
            self.preparation.observer.warn(warning)
        partition = Partition(
            scheme="shards-of-a-store",
            args={},
            seed=0,
            clients=tuple(self._clients),
            test=np.unique(np.concatenate([c.test for c in self._clients])),
            dataset=str(self.stores[0].dataset["shard"]["parent"]),
            pool=1 + max(int(places.max(initial=-1)) for places in self._places),
            dropped=0,
        )
        return dict.fromkeys(seeds, partition), None

    def feat_post(self, method: Method, settings: Mapping[str, Value], arrays: Sequence[str]) -> str:
        """As asked, else what is usual for these backbones, which is said."""
        requested, observer = "feat_post" in self.config.set, self.preparation.observer
        return feat_post_for(settings, requested, self.config.preset, self.stores[0], arrays, observer)

    def read(self, method: Method, settings: Mapping[str, Value], arrays: Sequence[str], feat_post: str) -> RunFeatures:
        """Every row once, with live encoders for a method that runs some."""
        trained = np.concatenate([c.train for c in self._clients])
        features = read_client_stores(method, settings, self.stores, arrays, self._places, feat_post, trained)
        encoders = encoders_of_run(method, self.stores[0], arrays[0], self.preparation.home)
        if encoders is not None:
            features = encoders.add_to(features, self.stores[0])
        say_templates(list(features.templates), self.preparation.observer)
        return features

    def overrides(self, method: Method, features: RunFeatures, clients: int) -> dict[int, ClientOverrides]:
        """None: they were refused."""
        return {}

    def dataset(self) -> dict[str, Any]:
        """The parent's slug and digest, and the rows of all clients, those that several hold counted for each."""
        first = self.stores[0].dataset
        return {
            "slug": first["slug"],
            "digest": str(first["shard"]["parent"]),
            "rows": int(sum(s.rows for s in self.stores)),
            "ok": int(sum(int(s.rows_ok) for s in self.stores)),
        }

    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Domains and classes."""
        return self.stores[0].samples.domains, self.stores[0].samples.classes

    def backbones(self, arrays: Sequence[str]) -> tuple[str, ...]:
        """Names of the backbones that made the arrays."""
        return tuple(str(self.stores[0].arrays[key].recipe.get("backbone", key)) for key in arrays)


def open_clients(folder: Path) -> list[Store]:
    """The stores of a directory in client order.

    Raises:
        StoreError, when there are none, or they are not shards of one dataset with the same classes.
    """
    paths = sorted(folder.glob("*.zarr")) if folder.is_dir() else []
    if not paths:
        raise StoreError(f"{folder} holds no client stores.", "fedcache shard --partition NAME --out DIR makes them.")
    stores = [Store.open(p) for p in paths]
    for store in stores:
        if "shard" not in store.dataset:
            raise StoreError(f"{store.path} is not a client's store.", "fedcache shard --partition NAME --out DIR")
    stores.sort(key=lambda s: int(s.dataset["shard"]["number"]))
    first = stores[0]
    numbers = [int(s.dataset["shard"]["number"]) for s in stores]
    names = [str(s.dataset["shard"]["client"]) for s in stores]
    for what, keys in (("number", [str(n) for n in numbers]), ("name", names)):
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            same = [s.path for s, key in zip(stores, keys, strict=True) if key == twice]
            raise StoreError(
                f"{len(same)} stores are of one client, by its {what} {twice}: {', '.join(map(str, same))}.",
                "Remove or move away all but one of them.",
            )
    gone = sorted(set(range(max(numbers) + 1)) - set(numbers))
    if gone:
        raise StoreError(
            f"{folder} lacks client {gone[0]}: it has {len(stores)} stores, numbered up to {max(numbers)}.",
            "fedcache shard --partition NAME --out DIR writes what is missing.",
        )
    for store in stores[1:]:
        for what, a, b in (
            ("parent dataset", first.dataset["shard"]["parent"], store.dataset["shard"]["parent"]),
            ("classes", first.samples.classes, store.samples.classes),
        ):
            if a != b:
                raise StoreError(
                    f"{store.path.name} and {first.path.name} differ in {what}.",
                    "Cut all client stores from one store, with one partition.",
                )
    return stores


def common_arrays(stores: list[Store], config: TrainConfig, needs_text: bool) -> list[str]:
    """The arrays to train on; every client must have them, by the digest of their recipe."""
    first = stores[0]
    keys = chosen_arrays(first, config.backbones)
    if needs_text:
        keys = [k for k in keys if first.has_text(str(first.arrays[k].recipe.get("backbone")))][:1]
        if not keys:
            raise StoreError(
                f"{first.path.name} has no text features.", "Extract a backbone with text, then shard again."
            )
    for store in stores:
        for key in keys:
            if key not in store.arrays or store.arrays[key].digest != first.arrays[key].digest:
                raise StoreError(
                    f"{store.path.name} lacks {key}, which {first.path.name} has.",
                    "Shard again, so that all clients have the same features.",
                )
    return keys
