"""Reads the columns of a file of embeddings (npz, npy, h5, safetensors, tables) without running code from the file.

Features are read block by block in the order of their rows, as often as they are requested, so that a file larger than
memory can be ingested. Other columns are read as a whole if they have one value for each row; otherwise they are not
read. Each function imports the library of its format.
"""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import FedcacheError, UsageError, shell_word
from fedcache.optional import need_h5py
from fedcache.parsing import parse_json
from fedcache.tables.foreign_files import ONE_OBJECT, end_to_end, joined_clients, pickled_dict
from fedcache.tables.plain_pickle import load_plain
from fedcache.tables.roles import CLASS_NAMES
from fedcache.tables.table_files import TABLES
from fedcache.tables.table_readers import read_others, read_table
from fedcache.tables.words import (
    FileRows,
    Unread,
    Words,
    as_column,
    ending_of,
    explain_damage,
    objects_of,
    some_names,
)

Found = dict[str, Any]
"""Columns by name: numbers [N], ``Words``, ``FileRows`` of matrices of floats, and ``Unread``."""


def read_columns(path: Path, features: Sequence[str]) -> Found:
    """Columns by name; errors as ``embeddings.open_embeddings``.

    ``features`` are the columns that the user names as features. For a table with one column per dimension, the user
    may also give the common beginning of the names of these columns.
    """
    with explain_damage(path):
        if path.is_dir():
            return _read_folder(path)
        if ending_of(path) in TABLES:
            return read_table(path, features)
        return READERS[ending_of(path)](path)


UNKNOWN_NPY = "another version of numpy's format"


def npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]] | None:
    """(shape, whether the array is in Fortran order, dtype) of an open ``.npy`` file; reads it up to its first row.

    None for an unknown version of the format. Raises ValueError for a damaged header.
    """
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    version = np.lib.format.read_magic(file)
    read = readers.get(version)
    if read is None:
        return None
    return read(file)


def _npy(path: Path, opened: Callable[[], AbstractContextManager[IO[bytes]]], size: int) -> Any:
    """A column from numpy's own format. Matrices of floats stay in the file.

    ``opened`` opens the array, which has ``size`` bytes with its header.
    """
    with opened() as file:
        header = npy_header(file)
        if header is None:
            return Unread((), UNKNOWN_NPY, "an array of an unknown kind")  # (): unknown shape
        shape, fortran, dtype = header
        start = file.tell()
        if dtype.hasobject:
            return _objects(shape, file)
        if start + math.prod(shape) * dtype.itemsize > size:
            raise ValueError(
                f"the file has only {size:,} bytes, too few for an array of shape {shape} and {dtype}"
            )
        # Matrices of floats may be features. They stay in the file, except in Fortran order, which splits their rows.
        may_be_features = dtype.kind == "f" and len(shape) in (2, 3)
        if may_be_features and not fortran:
            return FileRows(path, shape, dtype, partial(_npy_parts, opened, start, shape, dtype))
    if shape and not may_be_features and not _one_per_row(shape):
        # Such an array is no column, so only its shape is needed, and no value is read.
        without_values = np.broadcast_to(np.zeros((), dtype), shape)
        return as_column(without_values)
    with opened() as file:
        return as_column(np.lib.format.read_array(file, allow_pickle=False))


def _one_per_row(shape: tuple[int, ...]) -> bool:
    """Whether an array of this shape, [N] or [N, 1], has one value for each row."""
    return len(shape) == 1 or shape[1:] == (1,)


def _objects(shape: tuple[int, ...], file: IO[bytes]) -> Any:
    """A column of Python objects, which numpy stores as a pickle; ``file`` is positioned at the pickle's first byte."""
    if not shape:
        return Unread(shape, "objects", ONE_OBJECT)
    if not _one_per_row(shape):
        return Unread(shape, "objects", "objects")
    try:
        content = load_plain(file)
    except ValueError as error:
        return Unread(
            shape, "objects", f"a pickle with objects other than words and numbers: {error}"[:160]
        )
    if not isinstance(content, np.ndarray) or content.shape != shape:
        return Unread(shape, "objects", "a pickle whose content does not match its header")
    return objects_of(content.ravel().tolist())


def _npy_parts(
    opened: Callable[[], AbstractContextManager[IO[bytes]]],
    start: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    rows: int,
) -> Iterator[NDArray[Any]]:
    width = math.prod(shape[1:]) * dtype.itemsize
    with opened() as file:
        # The header is read, not skipped by ``seek``: a zip computes its checksum while it is read from the beginning.
        file.read(start)
        for first in range(0, shape[0], rows):
            count = min(rows, shape[0] - first)
            raw = file.read(count * width)
            values = np.frombuffer(raw, dtype, count * width // dtype.itemsize)
            yield values.reshape(count, *shape[1:])
        file.read(1)  # a zip compares the checksum when its end is read


@contextmanager
def _member(path: Path, name: str) -> Iterator[IO[bytes]]:
    with zipfile.ZipFile(path) as archive, archive.open(name) as file:
        yield file


def _read_npz(path: Path) -> Found:
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: info.file_size for info in archive.infolist()}
    magic = np.lib.format.MAGIC_PREFIX
    found = {}
    for member, size in members.items():
        name = member.removesuffix(".npy")
        with _member(path, member) as file:
            if file.read(len(magic)) != magic:
                raise UsageError(f"{path}: {name} is not an array.", "Write it with numpy.savez.")
        found[name] = _npy(path, partial(_member, path, member), size)
    pickled = [name for name, column in found.items() if getattr(column, "why", "") == ONE_OBJECT]
    if pickled and not any(len(column.shape) > 1 for column in found.values()):
        raise pickled_dict(path, pickled[0])
    return found


def _read_npy(path: Path) -> Found:
    return {"features": _npy(path, lambda: path.open("rb"), path.stat().st_size)}


def h5_items(path: Path, group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(name, dataset) of a group of an open file, at all levels. Raises UsageError for data in another file."""
    import h5py

    for name in group:
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            raise UsageError(
                f"{path} contains a link ({prefix}{name}) to another file.",
                "Copy the data into the file.",
            )
        item = group[name]
        key = f"{prefix}{name}"
        if isinstance(item, h5py.Group):
            yield from h5_items(path, item, f"{key}/")
        elif item.external or item.is_virtual:
            raise UsageError(
                f"{path}: {key} is stored in another file.", "Copy the data into the file."
            )
        else:
            yield key, item


def _read_h5(path: Path) -> Found:
    need_h5py(str(path))
    import h5py

    found: Found = {}
    with h5py.File(path, "r") as file:
        for key, item in h5_items(path, file):
            # Matrices of floats may be features: they stay in the file.
            if item.dtype.kind == "f" and item.ndim in (2, 3):
                parts = partial(_h5_parts, path, key)
                found[key] = FileRows(path, item.shape, item.dtype, parts)
            else:
                found[key] = _h5_column(item)
        listed = {key: as_column(names) for key, names in h5_class_names(path, file)}
    return listed | joined_clients(path, found)


def h5_class_names(path: Path, file: Any) -> Iterator[tuple[str, NDArray[Any]]]:
    """(name, class names) from attributes: of a dataset ``label``, as ``label/class_names``, and of the whole file."""
    # Attributes of datasets come first: they are more specific than those of the whole file.
    for key, item in (*h5_items(path, file), ("", file)):
        for name in CLASS_NAMES:
            names = np.asarray(item.attrs.get(name, ()))
            if names.ndim == 1 and names.dtype.kind in "SUO":
                yield f"{key}/{name}".lstrip("/"), names


def _h5_column(item: Any) -> Any:
    import h5py

    are_words = h5py.check_string_dtype(item.dtype) is not None
    readable = are_words or item.dtype.kind in "iufbS"
    if item.shape is None or not _one_per_row(item.shape) or not readable:
        why = "one value"
        if item.shape:
            why = f"{item.dtype} with shape {item.shape}"
        return Unread(item.shape or (), str(item.dtype), why)
    values = np.asarray(item[()])
    if are_words:
        return objects_of(values.ravel().tolist())
    return as_column(values)


def _h5_parts(path: Path, key: str, rows: int) -> Iterator[NDArray[Any]]:
    import h5py

    with h5py.File(path, "r") as file:
        item = file[key]
        for first in range(0, len(item), rows):
            yield item[first : first + rows]


def _read_safetensors(path: Path) -> Found:
    from safetensors import safe_open

    floats = {"F16": "f2", "F32": "f4", "F64": "f8"}
    found: Found = {}
    with safe_open(path, framework="numpy") as file:
        head = file.metadata() or {}
        meta = parse_json(head.get("fedcache", "{}"))
        for name in file.keys():  # noqa: SIM118  (safe_open is no mapping)
            part = file.get_slice(name)
            shape = tuple(part.get_shape())
            kind = str(part.get_dtype())
            dtype = floats.get(kind)
            readable = dtype is not None or kind == "BOOL" or kind[0] in "IU"
            if dtype is not None and len(shape) in (2, 3):
                parts = partial(_safetensors_parts, path, name, shape[0])
                found[name] = FileRows(path, shape, np.dtype(dtype), parts)
            elif readable and _one_per_row(shape):
                found[name] = as_column(file.get_tensor(name))
            else:
                found[name] = Unread(shape, kind, f"{kind} with shape {shape}")
    # Safetensors hold no words: the column of a group holds codes, and the metadata of the file list their words.
    for name, words in meta.get("groups", {}).items():
        found[name] = Words.coded(found[name], words)
    for key in ("classes", "domains"):
        if key in meta:
            found[key] = Words.of(meta[key])
    if "names" in meta:
        found["name"] = Words.of(meta["names"])
    return found


def _safetensors_parts(path: Path, name: str, count: int, rows: int) -> Iterator[NDArray[Any]]:
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        part = file.get_slice(name)
        for first in range(0, count, rows):
            yield part[first : min(first + rows, count)]


def _read_folder(path: Path) -> Found:
    """The columns of a folder of clip-retrieval: ``img_emb/*.npy``, ``text_emb/*.npy`` and ``metadata/*.parquet``.

    Raises UsageError for another folder, with the names of its files.
    """
    found = {}
    for name in ("img_emb", "text_emb"):
        files = _parts_of(path / name, ".npy")
        if files:
            parts = [_read_npy(file)["features"] for file in files]
            found[f"features/{name}"] = end_to_end(path, name, parts)
    if not found:
        raise _no_embeddings(path)
    # Every part has a table. A column that is missing in one of these tables is left out.
    tables = []
    for file in _parts_of(path / "metadata", ".parquet"):
        table = TABLES[".parquet"](file)
        columns, _ = read_others(table, [*table.types])
        tables.append(columns)
    for name in dict.fromkeys(chain(*tables)):
        if all(name in columns for columns in tables):
            found[name] = end_to_end(path, name, [columns[name] for columns in tables])
    return found


def _parts_of(folder: Path, ending: str) -> list[Path]:
    """The files of a folder in the order of the numbers in their names: part 2 before part 10."""

    def natural(file: Path) -> list[int | str]:
        return [int(word) if word.isdigit() else word for word in re.split(r"(\d+)", file.name)]

    files = [file for file in folder.glob(f"*{ending}") if file.is_file()]
    return sorted(files, key=natural)


def _no_embeddings(path: Path) -> FedcacheError:
    """The error for a folder that clip-retrieval did not write, with the files to give instead."""
    clients = sorted([*path.glob("train/*.npz"), *path.glob("test/*.npz"), *path.glob("*.npz")])
    if clients:
        _read_npz(clients[0])  # may raise an error that says how files of clients are converted
    names = sorted(file.name for file in path.iterdir())
    readable = [name for name in names if ending_of(Path(name)) in ENDINGS]
    endings = ", ".join(ENDINGS)
    hint = f"Give one file: {endings}. For a folder of images:  fedcache extract --dataset folder:{shell_word(path)}"
    if readable:
        first = path / readable[0]
        hint = f"For example  fedcache ingest {shell_word(first)} --name NAME"
    return UsageError(
        f"{path} is a folder, but not an output folder of clip-retrieval; it contains {some_names(names)}.",
        hint,
    )


READERS: dict[str, Callable[[Path], Found]] = {
    ".npz": _read_npz,
    ".npy": _read_npy,
    ".h5": _read_h5,
    ".hdf5": _read_h5,
    ".safetensors": _read_safetensors,
}
ENDINGS = (*READERS, *TABLES)
