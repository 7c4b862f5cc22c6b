"""Columns of a file of embeddings: npz, npy, h5, parquet and safetensors, never a pickle.

Features are read block by block in the order of their rows, as often as they are asked for, so that a file larger than
memory can be ingested; every other column is small and read whole. Each format's library is imported by the function
that needs it.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import FedcacheError, UsageError
from fedcache.parsing import parse_json

FEATURES = ("features", "embeddings", "X", "x")

Parts = Callable[[int], Iterator[NDArray[Any]]]
"""Rows of a column in order, in pieces of about that many."""


@contextmanager
def explain_damage(path: Path) -> Iterator[None]:
    """Turn what the formats' libraries raise for damaged files, each its own kinds, into a UsageError."""
    try:
        yield
    except FedcacheError:
        raise
    except Exception as error:
        raise UsageError(
            f"{path} could not be read as {path.suffix}: {type(error).__name__}: {str(error)[:160]}",
            "Object arrays and pickles are never read; write plain numbers.",
        ) from error


@dataclass(frozen=True)
class FileRows:
    """A column of numbers that stays in its file.

    >>> rows = FileRows(Path("x.npy"), (3, 2), np.dtype("f4"), lambda n: iter(np.ones((1, 3, 2), "f4")))
    >>> [block.shape for block in rows.with_views().blocks(2)]
    [(2, 1, 2), (1, 1, 2)]
    """

    path: Path  # for messages
    shape: tuple[int, ...]  # (N, D) or (N, V, D)
    dtype: np.dtype[Any]
    parts: Parts

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def with_views(self) -> FileRows:
        """The same as [N, V, D]; a matrix has one view."""
        return self if self.ndim == 3 else replace(self, shape=(self.shape[0], 1, self.shape[1]))

    def blocks(self, rows: int) -> Iterator[NDArray[Any]]:
        """All rows in order, ``rows`` at a time and the rest; raises UsageError for a damaged file."""
        with explain_damage(self.path):
            found, rest = 0, np.empty((0, *self.shape[1:]), self.dtype)
            for part in self.parts(rows):
                part = part.reshape(len(part), *self.shape[1:])
                rest = np.concatenate([rest, part]) if len(rest) else part
                while len(rest) >= rows:
                    found += rows
                    yield rest[:rows]
                    rest = rest[rows:]
            if found + len(rest) != len(self):
                raise ValueError(f"{found + len(rest):,} rows are there of {len(self):,}")
            if len(rest):
                yield rest

    def whole(self) -> NDArray[Any]:
        """All rows in memory."""
        out = np.empty(self.shape, self.dtype)
        start = 0
        for block in self.blocks(1 << 16):
            out[start : start + len(block)] = block
            start += len(block)
        return out


def read_columns(path: Path) -> dict[str, Any]:
    """Columns by name: arrays, and ``FileRows`` for features; errors as ``embedding_files.read_embeddings``."""
    with explain_damage(path):
        raw = READERS[path.suffix.lower()](path)
        return {
            key: np.char.decode(v, "utf-8") if v.dtype.kind == "S" and isinstance(v, np.ndarray) else v
            for key, v in raw.items()
        }


def _is_feature(name: str) -> bool:
    return name in FEATURES or name.startswith("features/")


def _npy(path: Path, opened: Callable[[], AbstractContextManager[IO[bytes]]], size: int, lazy: bool) -> Any:
    """An array in numpy's own format, ``size`` bytes with its header; features in C order stay where they are."""
    with opened() as file:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
        if read is not None:
            shape, fortran, dtype = read(file)
            start = file.tell()
            if not dtype.hasobject and start + math.prod(shape) * dtype.itemsize > size:
                raise ValueError(f"an array of shape {shape} and {dtype} does not fit into {size:,} bytes")
            if lazy and not fortran and dtype.kind == "f" and len(shape) in (2, 3):
                return FileRows(path, shape, dtype, partial(_npy_parts, opened, start, shape, dtype))
    with opened() as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _npy_parts(
    opened: Callable[[], AbstractContextManager[IO[bytes]]],
    start: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    rows: int,
) -> Iterator[NDArray[Any]]:
    width = math.prod(shape[1:]) * dtype.itemsize
    with opened() as file:
        file.read(start)  # not seek: a zip checks the sum of what was read from its beginning
        for first in range(0, shape[0], rows):
            count = min(rows, shape[0] - first)
            raw = file.read(count * width)
            yield np.frombuffer(raw, dtype, count * width // dtype.itemsize).reshape(count, *shape[1:])
        file.read(1)  # at its end a zip compares the sum


@contextmanager
def _member(path: Path, name: str) -> Iterator[IO[bytes]]:
    with zipfile.ZipFile(path) as archive, archive.open(name) as file:
        yield file


def _read_npz(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: info.file_size for info in archive.infolist()}
    found = {}
    for member, size in members.items():
        name = member.removesuffix(".npy")
        with _member(path, member) as file:
            if file.read(len(np.lib.format.MAGIC_PREFIX)) != np.lib.format.MAGIC_PREFIX:
                raise UsageError(f"{path}: {name} is not an array.", "Write it with numpy.savez.")
        found[name] = _npy(path, partial(_member, path, member), size, _is_feature(name))
    return found


def _read_npy(path: Path) -> dict[str, Any]:
    return {"features": _npy(path, lambda: path.open("rb"), path.stat().st_size, True)}


def h5_items(path: Path, group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(name, dataset) of an open file, at all levels; raises UsageError for what lies outside of it."""
    import h5py

    for name in group:
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            raise UsageError(f"{path} holds a link ({prefix}{name}) to elsewhere.", "Copy the data into the file.")
        item, key = group[name], f"{prefix}{name}"
        if isinstance(item, h5py.Group):
            yield from h5_items(path, item, f"{key}/")
        elif item.external or item.is_virtual:
            raise UsageError(f"{path}: {key} is stored in another file.", "Copy the data into the file.")
        else:
            yield key, item


def _read_h5(path: Path) -> dict[str, Any]:
    import h5py

    found: dict[str, Any] = {}
    with h5py.File(path, "r") as file:
        for key, item in h5_items(path, file):
            if _is_feature(key) and item.dtype.kind == "f" and item.ndim in (2, 3):
                found[key] = FileRows(path, item.shape, item.dtype, partial(_h5_parts, path, key, len(item)))
            else:
                text = item.shape is not None and h5py.check_string_dtype(item.dtype) is not None
                found[key] = np.array(item.asstr()[()], np.str_) if text else np.asarray(item[()])
    return found


def _h5_parts(path: Path, key: str, count: int, rows: int) -> Iterator[NDArray[Any]]:
    import h5py

    with h5py.File(path, "r") as file:
        for first in range(0, count, rows):
            yield file[key][first : first + rows]


def _read_parquet(path: Path) -> dict[str, Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        schema, count = file.schema_arrow, file.metadata.num_rows
        # An extension type may name code to run when it is built; only plain columns are ever read.
        odd = [
            f.name
            for f in schema
            if isinstance(f.type, pa.BaseExtensionType) or b"ARROW:extension:name" in (f.metadata or {})
        ]
        if odd:
            raise UsageError(
                f"{path}: column {odd[0]} has an extension type.", "Write plain numbers, words and lists of numbers."
            )
        meta = parse_json((schema.metadata or {}).get(b"fedcache", b"{}"))
        shapes = meta.get("shapes", {})
        found: dict[str, Any] = {k: np.array(meta[k], np.str_) for k in ("classes", "domains") if k in meta}
        for column in schema:
            name, kind = column.name, column.type
            is_list = pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind)
            if count and _is_feature(name) and is_list and pa.types.is_floating(kind.value_type):
                first = next(_parquet_parts(path, name, shapes.get(name), 1))
                shape = (count, *first.shape[1:])
                parts = partial(_parquet_parts, path, name, shape[1:])
                found[name] = FileRows(path, shape, first.dtype, parts)
            else:
                found[name] = _column(path, name, file.read([name]).column(name).combine_chunks(), shapes.get(name))
    return found


def _parquet_parts(path: Path, name: str, shape: Any, rows: int) -> Iterator[NDArray[Any]]:
    """Batches of a column of lists, which never hold more than one row group."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(rows, columns=[name]):
            part = _column(path, name, batch.column(name), shape)
            if shape is not None and part.shape[1:] != tuple(shape):
                raise _uneven(path, name, {part[0].size, math.prod(shape)}, 0)
            yield part


def _column(path: Path, name: str, column: Any, shape: Any) -> NDArray[Any]:
    """A column, or a part of one; lists as rows of ``shape``, where that is known."""
    import pyarrow as pa

    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if column.null_count:
        raise UsageError(
            f"{path}: {column.null_count} rows of {name} are empty.", "Give every row a value; the label -1 means none."
        )
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = column.value_lengths().unique().to_pylist()
        flat = column.flatten()
        if len(lengths) > 1 or flat.null_count:
            raise _uneven(path, name, set(lengths), flat.null_count)
        if shape is None or lengths != [math.prod(shape)]:
            shape = lengths or [0]
        return np.asarray(flat.to_numpy(zero_copy_only=False)).reshape(len(column), *shape)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return np.array(column.to_pylist(), np.str_)
    return np.asarray(column.to_numpy(zero_copy_only=False))


def _uneven(path: Path, name: str, lengths: set[int], empty: int) -> FedcacheError:
    return UsageError(
        f"{path}: the rows of {name} have lengths {sorted(lengths)[:4]}, with {empty} empty values.",
        "Every row needs the same number of values.",
    )


def _read_safetensors(path: Path) -> dict[str, Any]:
    from safetensors import safe_open

    found: dict[str, Any] = {}
    with safe_open(path, framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118  (safe_open is no mapping)
            part = file.get_slice(name)
            shape, dtype = tuple(part.get_shape()), {"F16": "f2", "F32": "f4", "F64": "f8"}.get(part.get_dtype())
            if _is_feature(name) and dtype is not None and len(shape) in (2, 3):
                parts = partial(_safetensors_parts, path, name, shape[0])
                found[name] = FileRows(path, shape, np.dtype(dtype), parts)
            else:
                found[name] = file.get_tensor(name)
        meta = parse_json((file.metadata() or {}).get("fedcache", "{}"))
    found |= {k: np.array(meta[k], np.str_) for k in ("classes", "domains") if k in meta}
    if "names" in meta:
        found["name"] = np.array(meta["names"], np.str_)
    return found


def _safetensors_parts(path: Path, name: str, count: int, rows: int) -> Iterator[NDArray[Any]]:
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        part = file.get_slice(name)
        for first in range(0, count, rows):
            yield part[first : min(first + rows, count)]


READERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    ".npz": _read_npz,
    ".npy": _read_npy,
    ".h5": _read_h5,
    ".hdf5": _read_h5,
    ".parquet": _read_parquet,
    ".safetensors": _read_safetensors,
}
