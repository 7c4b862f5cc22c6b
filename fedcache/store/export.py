"""Takes rows out of a store: writes all of them to a file, or each client's rows as a store of its own (a shard)."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import StoreError, UsageError, unknown
from fedcache.optional import need_arrow, need_h5py
from fedcache.store.chunks import are_empty
from fedcache.store.files import digest_of, explain_disk_errors, make_private
from fedcache.store.lock import need_folder, output_file
from fedcache.store.manifest import backbone_of, read_text, text_of_array
from fedcache.store.store import Store, copy_texts, put_groups
from fedcache.tables.groups import Group
from fedcache.tables.roles import GROUP, has_a_meaning
from fedcache.tables.splits import SPLIT_NAMES, TEST, TRAIN, VALIDATION

# Writing files of embeddings: npz, h5, parquet and safetensors, as ``tables.read`` reads them.
#
# Each format's library is imported by the function that needs it.


MOST_TEXT = 32 << 20
"""Limit in bytes for text features in the head of a parquet file; readers refuse a head that is much larger."""

SAFETENSORS_KINDS = {"f": "F", "i": "I", "u": "U"}
"""numpy's kind of numbers -> first letter of safetensors' dtype. The number of bits comes after it: F16, I32."""


@dataclass(frozen=True)
class Exported:
    """Data of an exported file: N rows, and the values that all of them share."""

    columns: Mapping[str, NDArray[Any]]  # features, labels, domains and splits of the rows
    names: Sequence[str]  # of the rows
    groups: Mapping[str, Group]  # of the rows
    texts: Mapping[str, NDArray[np.float32]]  # [C, D] by array
    meta: Mapping[str, Any]  # names of classes and domains, and of the dataset

    @property
    def group_columns(self) -> dict[str, Group]:
        """Groups by the names of their columns. A name that has another role in a file gets the prefix ``group/``."""
        columns = {}
        for name, group in self.groups.items():
            if has_a_meaning(name):
                name = f"{GROUP}{name}"
            columns[name] = group
        return columns

    @property
    def numbers(self) -> dict[str, NDArray[Any]]:
        """All columns of numbers: those of the rows, and text features."""
        texts = {f"text/{name}": matrix for name, matrix in self.texts.items()}
        return {**self.columns, **texts}

    @property
    def words(self) -> dict[str, list[str]]:
        """All columns of words; a row without a value in a group has an empty word."""
        columns = {}
        for name, group in self.group_columns.items():
            columns[name] = [word or "" for word in group.values()]
        columns["name"] = [*self.names]
        columns["classes"] = self.meta["classes"]
        columns["domains"] = self.meta["domains"]
        return columns


def _write_npz(file: BinaryIO, rows: Exported) -> None:
    words = {name: np.array(column, np.str_) for name, column in rows.words.items()}
    everything: dict[str, Any] = {**rows.numbers, **words}
    np.savez(file, **everything)


def _write_h5(file: BinaryIO, rows: Exported) -> None:
    import h5py

    with h5py.File(file, "w") as made:
        for name, values in rows.numbers.items():
            made.create_dataset(name, data=values)
        for name, column in rows.words.items():
            made.create_dataset(name, data=column, dtype=h5py.string_dtype())


def _dictionary(codes: NDArray[Any], words: Sequence[str]) -> Any:
    """A column of pyarrow: for each row a word, or null where the code is negative."""
    import pyarrow as pa

    indices = pa.array(codes.astype(np.int32), mask=codes < 0)
    return pa.DictionaryArray.from_arrays(indices, pa.array(words, pa.string()))


def _write_parquet(file: BinaryIO, rows: Exported) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    fields = {"name": pa.array(rows.names)}
    shapes = {}
    # pandas and polars show words, and nothing where a row has no label.
    words_of = {
        "labels": rows.meta["classes"],
        "domain": rows.meta["domains"],
        "split": SPLIT_NAMES,
    }
    for name, values in rows.columns.items():
        if name in words_of:
            fields[name] = _dictionary(values, words_of[name])
            continue
        shapes[name] = list(values.shape[1:])
        flat = np.ascontiguousarray(values.reshape(len(values), -1))
        inner = pa.array(flat.reshape(-1))
        fields[name] = pa.FixedSizeListArray.from_arrays(inner, flat.shape[1])
    for name, group in rows.group_columns.items():
        fields[name] = _dictionary(group.codes, group.words)
    size = sum(matrix.nbytes for matrix in rows.texts.values())
    if size > MOST_TEXT:
        raise UsageError(
            f"A parquet file can hold at most {MOST_TEXT >> 20} MiB of text features, but this store has "
            f"{size >> 20} MiB.",
            "fedcache export FILE.safetensors",
        )
    # A table has no columns of another length: text features are in its head.
    text = {}
    for name, matrix in rows.texts.items():
        raw = np.ascontiguousarray(matrix, "<f4").tobytes()
        text[name] = {"shape": list(matrix.shape), "float32": base64.b64encode(raw).decode()}
    head = {**rows.meta, "shapes": shapes, "text": text}
    table = pa.table(fields).replace_schema_metadata({"fedcache": json.dumps(head)})
    pq.write_table(table, file)


def _write_safetensors(file: BinaryIO, rows: Exported) -> None:
    tensors = {name: np.ascontiguousarray(values) for name, values in rows.numbers.items()}
    words = {}
    for name, group in rows.group_columns.items():
        tensors[name] = np.ascontiguousarray(group.codes)
        words[name] = list(group.words)
    head = {**rows.meta, "names": [*rows.names], "groups": words}
    # Written array by array, because safetensors would first copy all arrays into one block of bytes.
    header: dict[str, Any] = {"__metadata__": {"fedcache": json.dumps(head)}}
    end = 0
    # Wide numbers first, so that the numbers of every array are aligned for readers that map the file.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    for name, values in ordered:
        start = end
        end = start + values.nbytes
        kind = SAFETENSORS_KINDS[values.dtype.kind]
        bits = 8 * values.itemsize
        header[name] = {
            "dtype": f"{kind}{bits}",
            "shape": list(values.shape),
            "data_offsets": [start, end],
        }
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    file.write(len(raw).to_bytes(8, "little"))
    file.write(raw)
    for _, values in ordered:
        file.write(values.data)


WRITERS: dict[str, Callable[[BinaryIO, Exported], None]] = {
    ".npz": _write_npz,
    ".h5": _write_h5,
    ".hdf5": _write_h5,
    ".parquet": _write_parquet,
    ".safetensors": _write_safetensors,
}


def _write_shard(
    store: Store, path: Path, client: str, number: int, parts: Sequence[NDArray[np.int64]]
) -> None:
    """Write one client's rows as a store at ``path``; an equal store that exists already is kept.

    The rows keep their order, and their split is the client's own. The manifest's dataset names the parent and the row
    numbers in it, so that training from shards can equal training by index to the bit. ``number`` is the client's place
    among the clients; ``parts`` are its training, test and validation rows in the parent.
    """
    rows = np.unique(np.concatenate(parts))
    split = np.empty(len(rows), np.uint8)
    # The codes of the splits are indices of ``parts``. A row of several parts is a training row, or else a test row,
    # because the last assignment counts.
    for code in (VALIDATION, TEST, TRAIN):
        split[np.isin(rows, parts[code])] = code
    s = store.samples
    samples = replace(
        s,
        uid=s.uid[rows],
        name=tuple(s.name[r] for r in rows),
        label=s.label[rows],
        domain=s.domain[rows],
        split=split,
        # The writers of the arrays mark the rows that could not be read, as they did in the parent.
        ok=np.ones(len(rows), np.uint8),
    )
    origin = {
        "parent": store.dataset["digest"],
        "client": client,
        "number": number,
        "rows": rows.tolist(),
    }
    dataset = {
        "slug": store.dataset["slug"],
        "template": store.dataset.get("template"),
        "digest": digest_of({**origin, "split": split.tolist()}),
        "shard": origin,
    }
    reasons = {entry["row"]: entry["reason"] for entry in store.quarantined()}
    shard = Store.create(path, samples, dataset=dataset)
    put_groups(shard, _groups_of_rows(store, rows))
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
                of_chunk = rows[first : first + writer.chunk_rows]
                values = store.reader(key).rows(of_chunk)
                # A row that only another backbone could not read is not ok, but it has features here.
                unread = s.ok[of_chunk] == 0
                bad = {}
                for place in np.flatnonzero(are_empty(values) & unread):
                    bad[first + int(place)] = reasons[int(of_chunk[place])]
                writer.write(chunk, values, bad)
            writer.complete()
    copy_texts(store, shard)


def _groups_of_rows(store: Store, rows: NDArray[np.int64]) -> dict[str, Group]:
    """The groups of a store, by name, with the values of ``rows`` alone."""
    return {name: store.group(name).take(rows) for name in store.groups}


def write_shards(
    store: Store,
    clients: Sequence[tuple[str, NDArray[np.int64], NDArray[np.int64]]],
    out: Path,
    validation: Sequence[NDArray[np.int64] | None] | None = None,
) -> list[Path]:
    """One store per client under ``out``, named by number and client; shards that exist already are kept.

    ``clients`` are names with training rows and test rows, and ``validation`` the validation rows of each client.
    Raises StoreError if ``out`` contains other stores, because training reads all stores of a folder.
    """
    last = max(0, len(clients) - 1)
    width = len(str(last))
    names = []
    for number, (name, *_) in enumerate(clients):
        plain = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:80]
        names.append(f"{number:0{width}d}-{plain}.zarr")
    present = {place.name for place in out.glob("*.zarr")}
    others = sorted(present - set(names))
    if others:
        raise StoreError(
            f"{out} contains stores that do not belong to this partition, for example {others[0]}.",
            "Use another folder:  --out DIR",
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    make_private(out)
    paths = [out / name for name in names]
    for number, (name, train, test) in enumerate(clients):
        held = None
        if validation:
            held = validation[number]
        if held is None:
            held = np.empty(0, np.int64)
        _write_shard(store, paths[number], name, number, (train, test, held))
    return paths


def export(store: Store, out: Path, keys: Sequence[str]) -> int:
    """Write the readable rows of some arrays to a file; returns the number of rows.

    The ending of the file chooses the format. The file also holds labels, domains, splits, names and groups of the
    rows, and the text features of the arrays.

    Raises UsageError for an unknown ending or a missing folder, MachineError without the library of the format.
    """
    if out.suffix not in WRITERS:
        raise unknown("file ending", out.suffix, WRITERS)
    need_folder(out)
    if out.suffix in (".h5", ".hdf5"):
        need_h5py(str(out))
    if out.suffix == ".parquet":
        need_arrow(str(out))
    s = store.samples
    good = np.flatnonzero(s.ok == 1)
    columns: dict[str, Any] = {f"features/{key}": store.reader(key).rows(good) for key in keys}
    columns["labels"] = s.label[good]
    columns["domain"] = s.domain[good]
    columns["split"] = s.split[good]
    texts = {}
    for key in keys:
        entry = text_of_array(store.manifest, key)
        if entry is not None and entry["shape"][0] == len(s.classes):
            texts[key] = read_text(store.path, backbone_of(store.manifest, key), entry)
    rows = Exported(
        columns,
        names=[s.name[int(i)] for i in good],
        groups=_groups_of_rows(store, good),
        texts=texts,
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
