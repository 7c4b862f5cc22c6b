"""Rows taken out of a store: all of them as a file, or each client's as a store of its own, a shard."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import StoreError, UsageError, unknown
from fedcache.optional import need_arrow, need_h5py
from fedcache.store.embedding_writers import WRITERS, Exported
from fedcache.store.files import digest_of, make_private
from fedcache.store.groups import put_groups
from fedcache.store.machine import explain_disk_errors
from fedcache.store.outputs import output_file
from fedcache.store.store import Samples, Store
from fedcache.store.text_features import backbone_of, read_text, text_of_array

TRAIN = 0
TEST = 1
VALIDATION = 2
NONE = np.empty(0, np.int64)


def write_shard(
    store: Store,
    path: Path,
    *,
    client: str,
    number: int,
    train: NDArray[np.int64],
    test: NDArray[np.int64],
    validation: NDArray[np.int64] = NONE,
) -> Store:
    """Write one client's rows as a store at ``path``; an equal one that is there is kept.

    The rows keep their order, and their split says what the client does with them. The manifest's dataset names the
    parent and the parent's row numbers, so that training from shards can equal training by index to the bit. ``number``
    is the client's place among the clients; ``train``, ``test`` and ``validation`` are rows of the parent.
    """
    rows = np.unique(np.concatenate([train, test, validation]))
    s = store.samples
    split = np.where(
        np.isin(rows, train), TRAIN, np.where(np.isin(rows, test), TEST, VALIDATION)
    ).astype(np.uint8)
    samples = Samples(
        uid=s.uid[rows],
        name=tuple(s.name[r] for r in rows),
        label=s.label[rows],
        domain=s.domain[rows],
        split=split,
        ok=np.ones(
            len(rows), np.uint8
        ),  # the arrays bring what could not be read, as they did in the parent
        classes=s.classes,
        domains=s.domains,
    )
    identity: dict[str, Any] = {
        "parent": store.dataset["digest"],
        "client": client,
        "number": number,
        "rows": rows.tolist(),
        "split": split.tolist(),
    }
    dataset = {
        "slug": store.dataset["slug"],
        "template": store.dataset.get("template"),
        "digest": digest_of(identity),
        "shard": {key: identity[key] for key in ("parent", "client", "number", "rows")},
    }
    reasons = {entry["row"]: entry["reason"] for entry in store.quarantined()}
    shard = Store.create(path, samples, dataset=dataset)
    put_groups(shard, {name: store.group(name).take(rows) for name in store.groups})
    for key, info in store.arrays.items():
        with shard.writer(
            key,
            shape=(len(rows), *info.shape[1:]),
            dtype=info.dtype,
            chunk_rows=info.chunk_rows,
            recipe=info.recipe,
            how=info.how,
            wait=True,  # another process that cuts this shard writes the same rows
        ) as writer:
            for chunk in writer.missing():
                first = chunk * writer.chunk_rows
                values = store.reader(key).rows(rows[first : first + writer.chunk_rows])
                # An image one backbone could read and another could not has features here and a line in the list.
                flat = values.reshape(len(values), -1)
                empty = np.isnan(flat).all(axis=1) if flat.dtype.kind == "f" else ~flat.any(axis=1)
                lost = empty & (s.ok[rows[first : first + len(values)]] == 0)
                writer.write(
                    chunk,
                    values,
                    {first + int(i): reasons[int(rows[first + i])] for i in np.flatnonzero(lost)},
                )
            writer.complete()
    for entries in store.texts.values():
        for entry in entries:
            backbone = str(entry["meta"].get("backbone"))
            weights = entry["meta"].get("weights")
            if not shard.has_text(backbone, entry["templates"], weights=weights):
                shard.put_text(
                    backbone,
                    entry["templates"],
                    read_text(store.path, backbone, entry),
                    entry["meta"],
                )
        shard.use_text(
            backbone, entry["templates"], weights=weights
        )  # an older shard may hold others last
    return shard


def write_shards(
    store: Store,
    clients: Sequence[tuple[str, NDArray[np.int64], NDArray[np.int64]]],
    out: Path,
    validation: Sequence[NDArray[np.int64] | None] | None = None,
) -> list[Path]:
    """One store per client under ``out``, named by number and client; shards that are there already are kept.

    ``clients`` are names with training rows and test rows, ``validation`` the rows that each chooses by. Raises
    StoreError for a folder that holds stores of other clients, with which these could not be trained.
    """
    width = len(str(max(0, len(clients) - 1)))
    names = [
        f"{number:0{width}d}-{re.sub(r'[^A-Za-z0-9._-]', '_', name)[:80]}.zarr"
        for number, (name, *_) in enumerate(clients)
    ]
    others = sorted({p.name for p in out.glob("*.zarr")} - set(names)) if out.is_dir() else []
    if others:
        raise StoreError(
            f"{out} holds {len(others)} stores that are not of this partition, {others[0]} for one.",
            "Name another folder:  --out DIR",
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    make_private(out)
    made = []
    for number, (name, train, test) in enumerate(clients):
        path = out / names[number]
        held = None if validation is None else validation[number]
        write_shard(
            store,
            path,
            client=name,
            number=number,
            train=train,
            test=test,
            validation=NONE if held is None else held,
        )
        made.append(path)
    return made


def export(store: Store, out: Path, keys: Sequence[str]) -> int:
    """Write the readable rows of some arrays to a file, whose ending chooses the format; returns how many they are.

    Labels, domains, splits, names and groups of the rows go with them, and the text features of the arrays.

    Raises UsageError for an unknown ending or a folder that is not there, MachineError without the ending's library.
    """
    if out.suffix not in WRITERS:
        raise unknown("file ending", out.suffix, WRITERS)
    if not out.parent.is_dir():
        raise UsageError(f"The folder {out.parent} does not exist.", f"mkdir -p {out.parent}")
    if out.suffix in (".h5", ".hdf5"):
        need_h5py(str(out))
    if out.suffix == ".parquet":
        need_arrow(str(out))
    s = store.samples
    good = np.flatnonzero(s.ok == 1)
    columns: dict[str, Any] = {f"features/{key}": store.reader(key).rows(good) for key in keys}
    columns |= {"labels": s.label[good], "domain": s.domain[good], "split": s.split[good]}
    entries = {key: text_of_array(store.manifest, key) for key in keys}
    rows = Exported(
        columns,
        names=[s.name[int(i)] for i in good],
        groups={name: store.group(name).take(good) for name in store.groups},
        texts={
            key: read_text(store.path, backbone_of(store.manifest, key), entry)
            for key, entry in entries.items()
            if entry is not None and entry["shape"][0] == len(s.classes)
        },
        meta={
            "classes": list(s.classes),
            "domains": list(s.domains),
            "dataset": store.dataset["slug"],
        },
    )
    size = sum(values.nbytes for values in columns.values())
    with explain_disk_errors(out, size), output_file(out) as file:
        WRITERS[out.suffix](file, rows)
    return len(good)
