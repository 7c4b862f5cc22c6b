"""The file formats of ``exchange``: columns to a file and back, with nothing in it that could run.

Each format's library is imported by the function that needs it. A reader returns arrays by column name and lets the
library's own error for a damaged file pass; ``exchange`` turns it into words.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.errors import UsageError


def _write_npz(path: Path, columns: dict[str, Any], names: list[str], meta: dict[str, Any]) -> None:
    text = {"name": np.array(names, np.str_), "classes": np.array(meta["classes"], np.str_)}
    everything: dict[str, Any] = {**columns, **text, "domains": np.array(meta["domains"], np.str_)}
    np.savez(path, **everything)


def _write_h5(path: Path, columns: dict[str, Any], names: list[str], meta: dict[str, Any]) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        for name, values in columns.items():
            file.create_dataset(name, data=values)
        for name, words in (("name", names), ("classes", meta["classes"]), ("domains", meta["domains"])):
            file.create_dataset(name, data=words, dtype=h5py.string_dtype())


def _write_parquet(path: Path, columns: dict[str, Any], names: list[str], meta: dict[str, Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    fields: dict[str, Any] = {"name": pa.array(names)}
    shapes = {}
    for name, values in columns.items():
        if values.ndim == 1:
            fields[name] = pa.array(values)
            continue
        shapes[name] = list(values.shape[1:])
        flat = np.ascontiguousarray(values.reshape(len(values), -1))
        inner = pa.array(flat.reshape(-1))
        fields[name] = pa.FixedSizeListArray.from_arrays(inner, flat.shape[1])
    table = pa.table(fields).replace_schema_metadata({"fedcache": json.dumps({**meta, "shapes": shapes})})
    pq.write_table(table, path)


def _write_safetensors(path: Path, columns: dict[str, Any], names: list[str], meta: dict[str, Any]) -> None:
    from safetensors.numpy import save_file

    tensors = {name: np.ascontiguousarray(values) for name, values in columns.items()}
    save_file(tensors, path, metadata={"fedcache": json.dumps({**meta, "names": names})})


WRITERS = {
    ".npz": _write_npz,
    ".h5": _write_h5,
    ".hdf5": _write_h5,
    ".parquet": _write_parquet,
    ".safetensors": _write_safetensors,
}


def _read_npz(path: Path) -> dict[str, Any]:
    # Opened here, because numpy leaves a file open that turns out to be no archive.
    with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
        found = {name: file[name] for name in file.files}
    odd = [name for name, values in found.items() if not isinstance(values, np.ndarray)]
    if odd:  # numpy hands out what is not an array as bytes
        raise UsageError(f"{path}: {odd[0]} is not an array.", "Write it with numpy.savez.")
    return found


def _read_npy(path: Path) -> dict[str, Any]:
    return {"features": np.load(path, allow_pickle=False)}


def _read_h5(path: Path) -> dict[str, Any]:
    import h5py

    found: dict[str, Any] = {}

    def walk(group: Any, prefix: str) -> None:
        for name in group:
            link = group.get(name, getlink=True)
            if not isinstance(link, h5py.HardLink):
                raise UsageError(f"{path} holds a link ({prefix}{name}) to elsewhere.", "Copy the data into the file.")
            item = group[name]
            if isinstance(item, h5py.Group):
                walk(item, f"{prefix}{name}/")
            elif item.external or item.is_virtual:
                raise UsageError(f"{path}: {prefix}{name} is stored in another file.", "Copy the data into the file.")
            else:
                text = item.shape is not None and h5py.check_string_dtype(item.dtype) is not None
                found[f"{prefix}{name}"] = np.array(item.asstr()[()], np.str_) if text else np.asarray(item[()])

    with h5py.File(path, "r") as file:
        walk(file, "")
    return found


def _read_parquet(path: Path) -> dict[str, Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # An extension type may name code to run when it is built; only plain columns are ever read.
    schema = pq.read_schema(path)
    odd = [
        f.name
        for f in schema
        if isinstance(f.type, pa.BaseExtensionType) or b"ARROW:extension:name" in (f.metadata or {})
    ]
    if odd:
        raise UsageError(
            f"{path}: column {odd[0]} has an extension type.", "Write plain numbers, words and lists of numbers."
        )
    table = pq.read_table(path)
    meta = json.loads((table.schema.metadata or {}).get(b"fedcache", b"{}"))
    found: dict[str, Any] = {k: np.array(meta[k], np.str_) for k in ("classes", "domains") if k in meta}
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        kind = column.type
        if column.null_count:
            raise UsageError(
                f"{path}: {column.null_count} rows of {name} are empty.",
                "Give every row a value; the label -1 means none.",
            )
        if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
            lengths = column.value_lengths().unique().to_pylist()
            flat = column.flatten()
            if len(lengths) > 1 or flat.null_count:
                raise UsageError(
                    f"{path}: the rows of {name} have lengths {sorted(lengths)[:4]}, with "
                    f"{flat.null_count} empty values.",
                    "Every row needs the same number of values.",
                )
            shape = meta.get("shapes", {}).get(name, lengths or [0])
            found[name] = flat.to_numpy(zero_copy_only=False).reshape(len(column), *shape)
        elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
            found[name] = np.array(column.to_pylist(), np.str_)
        else:
            found[name] = column.to_numpy(zero_copy_only=False)
    return found


def _read_safetensors(path: Path) -> dict[str, Any]:
    from safetensors import safe_open

    found: dict[str, Any] = {}
    with safe_open(path, framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118  (safe_open is no mapping)
            found[name] = file.get_tensor(name)
        meta = json.loads((file.metadata() or {}).get("fedcache", "{}"))
    found |= {k: np.array(meta[k], np.str_) for k in ("classes", "domains") if k in meta}
    if "names" in meta:
        found["name"] = np.array(meta["names"], np.str_)
    return found


READERS = {
    ".npz": _read_npz,
    ".npy": _read_npy,
    ".h5": _read_h5,
    ".hdf5": _read_h5,
    ".parquet": _read_parquet,
    ".safetensors": _read_safetensors,
}
