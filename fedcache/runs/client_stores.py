"""``--clients-from DIR``: the stores of a directory, one for each client."""

from __future__ import annotations

from pathlib import Path

from fedcache.errors import StoreError, closest
from fedcache.store.store import Store


def check_client_folder(folder: Path) -> None:
    """Refuse what is no directory, with the name of one that is meant. Raises StoreError."""
    if not folder.is_dir():
        beside = (
            [p.name for p in folder.parent.iterdir() if p.is_dir()]
            if folder.parent.is_dir()
            else []
        )
        near = closest(folder.name, beside)
        raise StoreError(
            f"There is no directory {folder}." + (f" Did you mean {near!r}?" if near else ""),
            "fedcache shard --partition NAME --out DIR   makes client stores.",
        )


def open_clients(folder: Path) -> list[Store]:
    """The stores of a directory in client order.

    Raises StoreError, when there are none, or they are not shards of one dataset with the same classes.
    """
    check_client_folder(folder)
    paths = sorted(folder.glob("*.zarr"))
    if not paths:
        raise StoreError(
            f"{folder} holds no client stores.",
            "fedcache shard --partition NAME --out DIR   makes them.",
        )
    stores = [Store.open(p) for p in paths]
    for store in stores:
        if "shard" not in store.dataset:
            raise StoreError(
                f"{store.path} is not a client's store.",
                "fedcache shard --partition NAME --out DIR",
            )
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
            "fedcache shard --partition NAME --out DIR   writes what is missing.",
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
