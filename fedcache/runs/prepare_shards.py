"""``train --clients-from``: every sub-store of a directory is a client; equal to training by index, to the bit."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedcache.config import Home, TrainConfig
from fedcache.errors import Exit, FedcacheError
from fedcache.extract.planning.templates import say_templates
from fedcache.federate.engine.client_data import Data, prepare
from fedcache.federate.partition.partition import Client, Partition
from fedcache.progress import Observer
from fedcache.runs import encoders
from fedcache.runs.features import chosen_arrays, feat_post_for, text_of
from fedcache.runs.partitions import only_class
from fedcache.runs.prepare import Setting, find_method, parse_seeds
from fedcache.store.files import sha256_hex
from fedcache.store.store import Store

if TYPE_CHECKING:
    from fedcache.federate.engine.method import Method


def open_clients(folder: Path) -> list[Store]:
    """The stores of a directory in client order.

    Raises:
        FedcacheError: STORE, when there are none, or they are not shards of one dataset with the same classes.
    """
    paths = sorted(folder.glob("*.zarr")) if folder.is_dir() else []
    if not paths:
        raise FedcacheError(
            Exit.STORE, f"{folder} holds no client stores.", "fedcache shard --partition NAME --out DIR makes them."
        )
    stores = [Store.open(p) for p in paths]
    for store in stores:
        if "shard" not in store.dataset:
            raise FedcacheError(
                Exit.STORE, f"{store.path} is not a client's store.", "fedcache shard --partition NAME --out DIR"
            )
    stores.sort(key=lambda s: int(s.dataset["shard"]["number"]))
    first = stores[0]
    numbers = [int(s.dataset["shard"]["number"]) for s in stores]
    names = [str(s.dataset["shard"]["client"]) for s in stores]
    for what, keys in (("number", [str(n) for n in numbers]), ("name", names)):
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            same = [s.path for s, key in zip(stores, keys, strict=True) if key == twice]
            raise FedcacheError(
                Exit.STORE,
                f"{len(same)} stores are of one client, by its {what} {twice}: {', '.join(map(str, same))}.",
                "Remove or move away all but one of them.",
            )
    gone = sorted(set(range(max(numbers) + 1)) - set(numbers))
    if gone:
        raise FedcacheError(
            Exit.STORE,
            f"{folder} lacks client {gone[0]}: it has {len(stores)} stores, numbered up to {max(numbers)}.",
            "fedcache shard --partition NAME --out DIR writes what is missing.",
        )
    for store in stores[1:]:
        for what, a, b in (
            ("parent dataset", first.dataset["shard"]["parent"], store.dataset["shard"]["parent"]),
            ("classes", first.samples.classes, store.samples.classes),
        ):
            if a != b:
                raise FedcacheError(
                    Exit.STORE,
                    f"{store.path.name} and {first.path.name} differ in {what}.",
                    "Cut all client stores from one store, with one partition.",
                )
    return stores


def prepare_from_shards(config: TrainConfig, home: Home, observer: Observer, method: Method | None = None) -> Setting:
    """The setting of ``--clients-from``; ``method`` is one of the user's own, in the place of the one that is named.

    Rows that several clients hold (shared test rows) are taken once, in the parent's order, so that every sum runs in
    the order it has when one store holds all rows.
    """
    if config.method is None or config.clients_from is None:
        raise FedcacheError(Exit.USAGE, "No method was named.", "fedcache train --method fed3r --clients-from DIR")
    method = method or find_method(config.method)
    hp = method.resolve(config.preset, config.set)
    if "pixels" in method.reads(hp):
        raise FedcacheError(
            Exit.USAGE,
            f"{method.name} trains on images, and --clients-from on the features of client stores.",
            f"Train on the store they were cut from: fedcache train --method {method.name} --partition NAME",
        )
    if config.client_backbones or config.client_set:
        raise FedcacheError(
            Exit.USAGE,
            "--client-backbones and --client-set deal differences to clients by number, --clients-from to stores.",
            "Train on the store they were cut from:  fedcache train --partition NAME",
        )
    hp = encoders.with_rounds(hp, config.rounds or method.defaults.rounds)
    began = time.perf_counter()
    stores = open_clients(Path(config.clients_from))
    first = stores[0]
    observer.note(f"{len(stores)} client stores in {config.clients_from}.")
    keys = keys_of(stores, config, "text" in method.needs or encoders.wants_towers(method))
    parents = [np.array(s.dataset["shard"]["rows"], np.int64) for s in stores]
    rows = np.unique(np.concatenate(parents))
    where = [np.searchsorted(rows, p) for p in parents]
    label = np.full(len(rows), -1, np.int64)
    domain = np.zeros(len(rows), np.int64)
    arrays = []
    for key in keys:
        info = first.arrays[key]
        whole = np.full((len(rows), *info.shape[1:]), np.nan, np.dtype(info.dtype))
        for store, place in zip(stores, where, strict=True):
            whole[place] = store.reader(key).all()
        arrays.append(whole)
    clients = []
    for store, place in zip(stores, where, strict=True):
        s = store.samples
        label[place], domain[place] = s.label, s.domain
        good = s.ok == 1
        clients.append(
            Client(str(store.dataset["shard"]["client"]), place[good & (s.split == 0)], place[good & (s.split == 1)])
        )
    if "labels" in method.needs and any((label[c.train] < 0).any() for c in clients):
        raise FedcacheError(
            Exit.USAGE,
            f"{method.name} needs labels, and rows of the client stores in {config.clients_from} have none.",
            "Add labels to the dataset, then:  fedcache shard --partition NAME --out DIR",
        )
    alone = only_class(method, np.concatenate([label[c.train] for c in clients]), first.samples.classes)
    if alone is not None:
        observer.warn(alone)
    feat_post = feat_post_for(hp, "feat_post" in config.set, config.preset, first, keys, observer)
    hp = {**hp, **({"feat_post": feat_post} if "feat_post" in hp else {})}
    x = prepare(arrays, feat_post, np.concatenate([c.train for c in clients]))
    digests = [first.arrays[key].digest for key in keys]
    text, templates = text_of(method, hp, first, keys)
    if text is not None:
        digests.append(sha256_hex(text.tobytes()))
    parent = str(first.dataset["shard"]["parent"])
    tested = np.unique(np.concatenate([c.test for c in clients]))
    partition = Partition(
        scheme="shards-of-a-store",
        args={},
        seed=0,
        clients=tuple(clients),
        test=tested,
        dataset=parent,
        pool=len(rows),
        dropped=0,
    )
    data = Data(
        x=x,
        y=torch.from_numpy(label),
        classes=len(first.samples.classes),
        text=None if text is None else torch.from_numpy(text),
        widths=tuple(a.shape[2] for a in arrays),
        domain=torch.from_numpy(domain),
    )
    brought = encoders.bring(method, first, keys[0], home)
    if brought is not None:
        data, digests = brought.attach(data, first), [*digests, brought.digest]
        templates = templates or [brought.towers.template]
    say_templates(templates, observer)
    ok = int(sum(int(s.rows_ok) for s in stores))
    dataset = {"slug": first.dataset["slug"], "digest": parent, "rows": int(sum(s.rows for s in stores)), "ok": ok}
    return Setting(
        method=method,
        hp=hp,
        feat_post=feat_post,
        data=data,
        keys=keys,
        backbones=[str(first.arrays[k].recipe.get("backbone", k)) for k in keys],
        features=digests,
        dataset=dataset,
        domains=first.samples.domains,
        partitions=dict.fromkeys(parse_seeds(config.seeds), partition),
        named=None,
        seconds={"extract": 0.0, "load": time.perf_counter() - began},
        templates=templates,
        classes=first.samples.classes,
    )


def keys_of(stores: list[Store], config: TrainConfig, needs_text: bool) -> list[str]:
    """The arrays to train on; every client must have them, by the digest of their recipe."""
    first = stores[0]
    keys = chosen_arrays(first, config.backbones)
    if needs_text:
        keys = [k for k in keys if first.has_text(str(first.arrays[k].recipe.get("backbone")))][:1]
        if not keys:
            raise FedcacheError(
                Exit.STORE,
                f"{first.path.name} has no text features.",
                "Extract a backbone with text, then shard again.",
            )
    for store in stores:
        for key in keys:
            if key not in store.arrays or store.arrays[key].digest != first.arrays[key].digest:
                raise FedcacheError(
                    Exit.STORE,
                    f"{store.path.name} lacks {key}, which {first.path.name} has.",
                    "Shard again, so that all clients have the same features.",
                )
    return keys
