"""The arrays in a .npz, .npy or .h5 file, or in a folder of .npy files: what there is, without reading the images."""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import CorruptionError, UsageError, shell_word
from fedcache.extract.datasets import archives
from fedcache.extract.datasets.dataset import Context, Source
from fedcache.extract.datasets.row_sources import (
    BLOCK,
    BlockRows,
    FixedRows,
    H5Blocks,
    Packed,
    PackedBlocks,
    RowLayout,
)
from fedcache.extract.digests import stat_key
from fedcache.optional import need_h5py
from fedcache.tables.foreign_files import clients_of, pickled_dict, refuse_client_images
from fedcache.tables.plain_pickle import load_plain
from fedcache.tables.read import h5_class_names, h5_items
from fedcache.tables.words import explain_damage

SUFFIXES = (".npz", ".npy", ".h5", ".hdf5")
MOST_COLUMN = 1 << 30
"""Largest column that is read whole, in bytes: labels, splits and groups."""

_STORED = 0


@dataclass(frozen=True)
class FileArray:
    """An array of a file, not read yet."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[], NDArray[Any]]  # the whole array; for small ones
    source: Callable[[RowLayout], Source]  # its rows, as images or as they are

    def column(self, where: str) -> NDArray[Any]:
        """The whole of a column of numbers or words.

        Raises UsageError for objects that are no words or numbers, of which nothing is run, and a column of gigabytes.
        """
        if math.prod(self.shape) * self.dtype.itemsize > MOST_COLUMN:
            raise UsageError(
                f"{where} has {math.prod(self.shape):,} values, too many for a column.",
                "Name another",
            )
        try:
            values = self.read()
        except ValueError as error:
            raise UsageError(
                f"{where} cannot be read: {str(error)[:160]}.",
                "labels.astype(str)   makes plain words",
            ) from None
        return values


def read_arrays(path: Path, context: Context) -> dict[str, FileArray]:
    """The arrays of a file by name; those of a folder are its .npy files.

    Raises UsageError for a file that is none of ``SUFFIXES`` or cannot be read, CorruptionError for a damaged one.
    """
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix == ".npy" and file.is_file())
        within = context.within(path)
        if within is not None:
            files = [file for file in files if file.resolve().parent == path.resolve()]
        found = {}
        for file in files:
            with explain_damage(file):
                found[file.stem] = _npy(file)
        return found
    with explain_damage(path):
        if path.suffix.lower() == ".npz":
            return _npz(path, context)
        if path.suffix.lower() == ".npy":
            return {"images": _npy(path)}
        return _h5(path)


def _header(file: IO[bytes], size: int) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Shape, dtype and the byte at which the rows begin, of numpy's own format of ``size`` bytes; -1 has no rows."""
    version = np.lib.format.read_magic(file)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)
    if read is None:
        raise ValueError(f"version {version} of numpy's format")
    shape, fortran, dtype = read(file)
    start = file.tell()
    if not dtype.hasobject and start + math.prod(shape) * dtype.itemsize > size:
        raise ValueError(
            f"an array of shape {list(shape)} and {dtype} does not fit into {size:,} bytes"
        )
    return shape, dtype, -1 if fortran and len(shape) > 1 else start


def _rows_begin(path: Path, start: int) -> int:
    if start < 0:
        raise UsageError(
            f"The rows of {path} are stored column by column, so that none lies in one piece.",
            "np.ascontiguousarray(rows)   before they are saved",
        )
    return start


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _npy(path: Path) -> FileArray:
    stamp = _stamp(path)
    with path.open("rb") as file:
        shape, dtype, start = _header(file, stamp[0])

    def source(layout: RowLayout) -> Source:
        return FixedRows(path.absolute(), stamp, _rows_begin(path, start), layout)

    return FileArray(shape, dtype, lambda: _whole(path.open("rb"), shape, dtype), source)


def _whole(file: IO[bytes], shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    with file:
        if not dtype.hasobject:
            return np.asarray(np.lib.format.read_array(file, allow_pickle=False))
        _header(file, 0)  # the pickle follows
        held = load_plain(file)
        if not isinstance(held, np.ndarray) or held.shape != shape:
            raise ValueError("a pickle of something else than its header says")
        return np.array(held.tolist(), dtype=object)


def _npz(path: Path, context: Context) -> dict[str, FileArray]:
    entries = archives.list_zip(path, capitals=True)
    archives.check_images(entries)
    _check_sums(path, entries, context)
    found = {}
    for i, name in enumerate(entries.names):
        if name.endswith(".npy"):
            found[name.removesuffix(".npy")] = _member(path.absolute(), entries, i)
    pickled = [name for name, array in found.items() if not array.shape and array.dtype.hasobject]
    if pickled and not any(len(array.shape) > 1 for array in found.values()):
        raise pickled_dict(path, pickled[0], images=True)
    return found


def _member(path: Path, entries: archives.Entries, i: int) -> FileArray:
    packed = Packed(path, entries.stamp, entries.names[i])
    with packed.open() as file:
        shape, dtype, start = _header(file, int(entries.size[i]))

    def source(layout: RowLayout) -> Source:
        _rows_begin(path, start)
        if int(entries.method[i]) != _STORED:
            return BlockRows(PackedBlocks(packed, start, shape[0], layout.shape), layout)
        with path.open("rb") as file:
            head = os.pread(file.fileno(), 30, int(entries.at[i]))
        begin = (
            int(entries.at[i])
            + 30
            + int.from_bytes(head[26:28], "little")
            + int.from_bytes(head[28:30], "little")
        )
        return FixedRows(path, entries.stamp, begin + start, layout)

    return FileArray(shape, dtype, lambda: _whole(packed.open(), shape, dtype), source)


def _check_sums(path: Path, entries: archives.Entries, context: Context) -> None:
    """Compare every member with its checksum, once for a file: rows that are read by position could not be."""
    fact = ["sums of a zip", *stat_key(path)]
    if context.memory.recall(fact) is not None:
        return
    for name in entries.names:
        try:
            with zipfile.ZipFile(path) as archive, archive.open(name) as file:
                while file.read(BLOCK):
                    pass
        except (
            zlib.error,
            zipfile.BadZipFile,
            EOFError,
            OSError,
            NotImplementedError,
            RuntimeError,
        ) as error:
            raise CorruptionError(
                f"{path} is damaged: {name} cannot be read ({str(error)[:80]}).",
                f"Check it: unzip -t {path}",
            ) from None
    context.memory.remember(fact, True)


def _h5(path: Path) -> dict[str, FileArray]:
    need_h5py(str(path))
    import h5py

    stamp = _stamp(path)
    place = path.absolute()
    found = {}

    def column(key: str) -> NDArray[Any]:
        with h5py.File(path, "r") as file:
            data = file[key]
            words = h5py.check_string_dtype(data.dtype) is not None
            if words:
                return np.array(data.asstr()[()], np.str_)
            return np.asarray(data[()])

    def rows(key: str, count: int, chunk: int) -> Callable[[RowLayout], Source]:
        return lambda layout: BlockRows(
            H5Blocks(place, stamp, key, count, layout.shape, chunk), layout
        )

    with h5py.File(path, "r") as file:
        for key, item in h5_items(path, file):
            if item.shape is None:
                continue
            words = h5py.check_string_dtype(item.dtype) is not None
            if words:
                dtype = np.dtype("U1")
            else:
                dtype = item.dtype
            count = 0
            if item.shape:
                count = item.shape[0]
            chunk = 1
            if item.chunks:
                chunk = item.chunks[0]
            found[key] = FileArray(
                tuple(item.shape), dtype, partial(column, key), rows(key, count, chunk)
            )
        attributes = dict(h5_class_names(path, file))
    clients = clients_of([*found])
    if clients:
        raise refuse_client_images(path, [*next(iter(clients.values()))]) or UsageError(
            f"{path} keeps the rows of each client apart, under examples/CLIENT.",
            f"Of embeddings:  fedcache ingest {shell_word(path)} --name NAME",
        )
    for key, names in attributes.items():
        whole = partial(np.array, names)
        found.setdefault(key, FileArray(names.shape, names.dtype, whole, rows(key, len(names), 1)))
    return found
