"""``arrays:FILE``: images and labels in a .npz, .npy or .h5 file, or in a folder of .npy files.

Images are uint8: [N, H, W], [N, H, W, 1] or [N, H, W, 3]. The channels may also come first; the shape shows this.
fedcache rejects other types of numbers, because their scale is unknown, and prints a line of Python that converts them.

The array of images is called ``images``, ``image``, ``data`` or ``x`` (in upper or lower case), or ``--images-key``
names it. The labels are called ``labels``, ``label``, ``target`` or ``y``, or ``--label-key`` names them. Names that
contain a split, such as ``x_train``, ``test_images`` or ``val/image``, define the split. ``domain`` and ``split`` are
columns too, and ``class_names`` holds the names of the classes. Every other column with a value for each row becomes a
group; ``--group-key hospital,scanner`` keeps only these two.

Rows are read one at a time, and compressed arrays in blocks. fedcache never opens a pickle. Each process unpacks a
compressed array once. ``np.savez`` therefore makes faster files than ``np.savez_compressed``, which saves little space
for images.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import CorruptionError, UsageError, shell_word
from fedcache.extract.datasets import archives, columns, tree
from fedcache.extract.datasets.columns import DatasetRequest, TableRows
from fedcache.extract.datasets.dataset import Context, Dataset, Source
from fedcache.extract.datasets.row_sources import (
    BLOCK,
    DAMAGED,
    BlockRows,
    FixedRows,
    H5Blocks,
    Packed,
    PackedBlocks,
    RowLayout,
    layout_of,
)
from fedcache.extract.digests import stat_key
from fedcache.extract.recipe import IMAGES
from fedcache.optional import need_h5py
from fedcache.tables.foreign_files import ONE_OBJECT, clients_of, pickled_dict, refuse_client_images
from fedcache.tables.plain_pickle import load_plain
from fedcache.tables.read import UNKNOWN_NPY, h5_class_names, h5_items, npy_header
from fedcache.tables.roles import CLASS_NAMES, find_column, words_in
from fedcache.tables.splits import NO_SPLIT, by_split, refuse_one_split
from fedcache.tables.words import Column, Unread, as_column, explain_damage, refuse_empty

SUFFIXES = (".npz", ".npy", ".h5", ".hdf5")
MOST_COLUMN = 1 << 30
"""Limit in bytes for a column of labels, splits or groups, which is read as a whole."""

# Compression method of zip for members that are stored as they are.
_STORED = 0


@dataclass(frozen=True)
class FileArray:
    """An array of a file, not read yet."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[], NDArray[Any]]  # reads the whole array, which must be small
    source: Callable[[RowLayout], Source]  # reader of its rows, as images or as numbers

    def column(self, where: str) -> NDArray[Any]:
        """All values of a column of numbers or words.

        Raises UsageError for a column of gigabytes, and for pickled objects, because unpickling them could run code.
        """
        value_count = math.prod(self.shape)
        if value_count * self.dtype.itemsize > MOST_COLUMN:
            raise UsageError(
                f"{where} has {value_count:,} values, too many for a column.",
                "Choose another column",
            )
        try:
            return self.read()
        except ValueError as error:
            reason = str(error)[:160]
            raise UsageError(
                f"{where} cannot be read: {reason}.",
                "labels.astype(str)   converts labels to words",
            ) from None


def read_arrays(path: Path, context: Context) -> dict[str, FileArray]:
    """The arrays of a file by name; those of a folder are its .npy files.

    Raises UsageError for a file without one of ``SUFFIXES`` or that cannot be read, CorruptionError for a damaged one.
    """
    if path.is_dir():
        found = {}
        within = context.within(path)
        for file in sorted(path.iterdir()):
            if file.suffix != ".npy" or not file.is_file():
                continue
            # Links that lead out of the folder are left out unless the user follows them.
            if within is not None and file.resolve().parent != path.resolve():
                continue
            with explain_damage(file):
                found[file.stem] = _npy(file)
        return found
    ending = path.suffix.lower()
    with explain_damage(path):
        if ending == ".npz":
            return _npz(path, context)
        if ending == ".npy":
            return {"images": _npy(path)}
        return _h5(path)


def _header(file: IO[bytes], size: int) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Shape, dtype and the byte at which the rows begin, of a .npy file of ``size`` bytes.

    The byte is -1 if the array is stored column by column. Raises ValueError for a file that is too short or has an
    unknown format.
    """
    header = npy_header(file)
    if header is None:
        raise ValueError(UNKNOWN_NPY)
    shape, fortran, dtype = header
    start = file.tell()
    end = start + math.prod(shape) * dtype.itemsize
    if not dtype.hasobject and end > size:
        raise ValueError(
            f"the file has only {size:,} bytes, too few for an array of shape {list(shape)} and {dtype}"
        )
    # In Fortran's order, the numbers of a row are not one after another.
    if fortran and len(shape) > 1:
        start = -1
    return shape, dtype, start


def _rows_begin(path: Path, start: int) -> int:
    """The same ``start``. Raises UsageError if it is -1: ``_header`` found an array that is stored column by column."""
    if start < 0:
        raise UsageError(
            f"The rows of {path} are stored column by column, so that no row is contiguous.",
            "Convert the rows before you save them:  np.ascontiguousarray(rows)",
        )
    return start


def _npy(path: Path) -> FileArray:
    """The array of a .npy file."""
    stamp = archives.stamp_of(path)
    with path.open("rb") as file:
        shape, dtype, start = _header(file, stamp[0])

    def whole() -> NDArray[Any]:
        return _whole(path.open("rb"), shape, dtype)

    def source(layout: RowLayout) -> Source:
        return FixedRows(path.absolute(), stamp, _rows_begin(path, start), layout)

    return FileArray(shape, dtype, whole, source)


def _whole(file: IO[bytes], shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """The array of an open .npy file; closes the file. Objects are read without running any code."""
    with file:
        if not dtype.hasobject:
            return np.asarray(np.lib.format.read_array(file, allow_pickle=False))
        # Reads the header, so that the pickle comes next. 0: the size of the file is not compared for objects.
        _header(file, 0)
        content = load_plain(file)
        if not isinstance(content, np.ndarray) or content.shape != shape:
            raise ValueError("the pickled array does not match its header")
        # ``load_plain`` returns a subclass of an array; this is a plain one.
        return np.array(content.tolist(), dtype=object)


def _npz(path: Path, context: Context) -> dict[str, FileArray]:
    """The arrays of a .npz file by name."""
    entries = archives.list_zip(path, capitals=True)
    archives.check_images(entries)
    _check_sums(path, entries, context)
    found = {
        name.removesuffix(".npy"): _member(path.absolute(), entries, i)
        for i, name in enumerate(entries.names)
        if name.endswith(".npy")
    }
    # One pickled object, such as a dictionary of arrays, has the shape ().
    pickled = [name for name, array in found.items() if not array.shape and array.dtype.hasobject]
    has_rows = any(len(array.shape) > 1 for array in found.values())
    if pickled and not has_rows:
        raise pickled_dict(path, pickled[0], images=True)
    return found


def _member(path: Path, entries: archives.Entries, i: int) -> FileArray:
    """The array of entry ``i`` of a .npz file."""
    packed = Packed(path, entries.stamp, entries.names[i])
    with packed.open() as file:
        shape, dtype, start = _header(file, int(entries.size[i]))

    def whole() -> NDArray[Any]:
        return _whole(packed.open(), shape, dtype)

    def source(layout: RowLayout) -> Source:
        _rows_begin(path, start)
        if int(entries.method[i]) != _STORED:
            blocks = PackedBlocks(packed, start, shape[0], layout.shape)
            return BlockRows(blocks, layout)
        with path.open("rb") as file:
            begin = archives.data_begins(file.fileno(), int(entries.at[i]))
        return FixedRows(path, entries.stamp, begin + start, layout)

    return FileArray(shape, dtype, whole, source)


def _check_sums(path: Path, entries: archives.Entries, context: Context) -> None:
    """Compare every member with its checksum now, because rows that are read by position later cannot be compared.

    This is done once for each file, and again if the file changes.

    Raises CorruptionError for a damaged member.
    """
    fact = ["checksums of the zip file", *stat_key(path)]
    if context.memory.recall(fact) is not None:
        return
    # Reading a member to its end compares its checksum.
    for name in entries.names:
        try:
            with zipfile.ZipFile(path) as archive, archive.open(name) as file:
                while file.read(BLOCK):
                    pass
        except (*DAMAGED, RuntimeError) as error:
            reason = str(error)[:80]
            raise CorruptionError(
                f"{path} is damaged: {name} cannot be read ({reason}).",
                f"Check it: unzip -t {path}",
            ) from None
    context.memory.remember(fact, True)


def _h5(path: Path) -> dict[str, FileArray]:
    """The arrays of an HDF5 file by name."""
    need_h5py(str(path))
    import h5py

    stamp = archives.stamp_of(path)
    place = path.absolute()
    found = {}

    # A column is read when it is needed, with its own file handle, because threads cannot share a handle of h5py.

    def column(key: str) -> NDArray[Any]:
        with h5py.File(path, "r") as file:
            data = file[key]
            if h5py.check_string_dtype(data.dtype) is not None:
                return np.array(data.asstr()[()], np.str_)
            return np.asarray(data[()])

    def rows(key: str, chunk: int, layout: RowLayout) -> Source:
        return BlockRows(H5Blocks(place, stamp, key, layout.shape, chunk), layout)

    with h5py.File(path, "r") as file:
        for key, item in h5_items(path, file):
            if item.shape is None:
                # An empty dataset of HDF5 has a type and no values.
                continue
            # h5py describes words as objects, but nothing is unpickled to read them. Their length does not matter here.
            dtype = item.dtype
            if h5py.check_string_dtype(dtype) is not None:
                dtype = np.dtype("U1")
            chunk = 1
            if item.chunks:
                chunk = item.chunks[0]
            source = partial(rows, key, chunk)
            found[key] = FileArray(tuple(item.shape), dtype, partial(column, key), source)
        attributes = dict(h5_class_names(path, file))
    # Client datasets of LEAF and TensorFlow Federated keep each client's rows apart.
    clients = clients_of([*found])
    if clients:
        columns_of_client = next(iter(clients.values()))
        refuse_client_images(path, [*columns_of_client])
        raise UsageError(
            f"{path} stores the rows of each client separately, under examples/CLIENT.",
            f"If the rows are embeddings:  fedcache ingest {shell_word(path)} --name NAME",
        )
    # Class names may be attributes of the file. Each becomes a column, whose source (1 is its chunk) is never used.
    for key, names in attributes.items():
        whole = partial(np.array, names)
        array = FileArray(names.shape, names.dtype, whole, partial(rows, key, 1))
        found.setdefault(key, array)
    return found


_Columns = Mapping[str, FileArray]


def key(rest: str, context: Context, kind: str = "arrays") -> list[Any]:
    """The kind, the columns that the spec names, and the stat of every file."""
    request = columns.parse_rest(rest, kind)
    path = locate(request.place)
    return [kind, request.facts, tree.state_of(path, context.within(path))]


def load(rest: str, context: Context) -> Dataset:
    """The dataset of ``arrays:FILE``.

    Raises UsageError for a missing file, columns that make no sense and numbers that are no pixels, CorruptionError for
    a damaged file.
    """
    return load_arrays(PIXELS, rest, context)


@dataclass(frozen=True)
class Reading:
    """How the rows of an array are read."""

    kind: str  # of the dataset: arrays or rows
    holds: str  # images or rows
    usual: tuple[str, ...]  # usual names of their column
    fits: Callable[[FileArray], bool]  # whether an array without a usual name looks like such rows
    # (shape, dtype, name for messages) -> layout; UsageError for an array that does not hold such rows
    layout: Callable[[Sequence[int], np.dtype[Any], str], RowLayout]


def _looks_like_images(array: FileArray) -> bool:
    return array.dtype == np.uint8 and len(array.shape) in (3, 4)


PIXELS = Reading("arrays", IMAGES, columns.IMAGE_NAMES, _looks_like_images, layout_of)


def load_arrays(reading: Reading, rest: str, context: Context) -> Dataset:
    """The dataset of a spec whose place holds arrays; ``reading`` says how their rows are read. Errors as ``load``."""
    request = columns.parse_rest(rest, reading.kind)
    # The facts come before the arrays are read, so that a change in between is noticed.
    facts = key(rest, context, reading.kind)
    path = locate(request.place)
    arrays = read_arrays(path, context)

    def has_rows(of_split: _Columns) -> bool:
        return _rows_of(of_split, request, reading) is not None

    if request.content and request.content in arrays:
        with_rows = [name for name, array in arrays.items() if len(array.shape) > 1]
        refuse_one_split(request.content, with_rows, str(path), "--images-key")
        tables: list[tuple[int | None, dict[str, FileArray]]] = [(None, dict(arrays))]
    else:
        tables = by_split(arrays, has_rows, str(path), "Choose one with --images-key NAME")
    # A table is (split code or None, arrays by name).
    if not has_rows(tables[0][1]):
        described = []
        for name, array in list(arrays.items())[:8]:
            shape = list(array.shape)
            described.append(f"{name} {array.dtype} {shape}")
        shapes = ", ".join(described) or "no arrays"
        fitting = [name for name, array in arrays.items() if reading.fits(array)]
        problem = f"no column of {reading.holds}"
        if request.content:
            problem = f"no column {request.content!r}"
        elif len(fitting) > 1:
            problem = f"several columns that could be {reading.holds}"
        raise UsageError(
            f"{path} has {problem}; it holds {shapes}.",
            f"Choose the column of {reading.holds} with --images-key NAME",
        )
    parts = []
    how = ""
    class_names = None
    left_out = {}
    if len(tables) > 1:
        # If names of columns give the split, the last table has the columns without a split, which belong to no rows.
        # Only class names among them are read.
        # find_column receives no column that the user names (None), and no option for its hint ("").
        _, without_split = tables.pop()
        names_column = find_column(path, without_split, None, CLASS_NAMES, "")
        if names_column is not None:
            values = without_split.pop(names_column).column(f"{path}, {names_column}")
            class_names = words_in(as_column(values))
        for name, array in without_split.items():
            left_out[name] = Unread(array.shape, str(array.dtype), NO_SPLIT)
    for split, of_split in tables:
        part, how = _part(split, of_split, request, path, reading)
        parts.append(replace(part, left_out=left_out))
    return columns.assemble(
        f"{reading.kind}:{rest}",
        path,
        columns.numbered_parts(parts),
        request=request,
        class_names=class_names,
        how=how,
        facts=facts,
        context=context,
        holds=reading.holds,
    )


def locate(place: str) -> Path:
    """The file or folder of arrays that a spec names; UsageError where there is none."""
    path = Path(place).expanduser()
    if not place or not path.exists():
        raise tree.no_such_path(
            place,
            f"a {', '.join(SUFFIXES)} file or a folder of .npy files",
            "Give the path of the arrays: --dataset arrays:FILE",
        )
    if not path.is_dir() and path.suffix.lower() not in SUFFIXES:
        raise UsageError(
            f"{path} is not a {' or '.join(SUFFIXES)} file.",
            "np.savez('images.npz', images=images, labels=labels)   makes an .npz file",
        )
    refuse_empty(path)
    return path


def _rows_of(arrays: _Columns, request: DatasetRequest, reading: Reading) -> str | None:
    """The column of images or rows: the requested one, else one of a usual name, else the only array that fits."""
    if request.content:
        if request.content in arrays:
            return request.content
        return None
    usual = find_column(reading.holds, arrays, None, reading.usual, "--images-key")
    if usual is not None and len(arrays[usual].shape) > 1:
        return usual
    fitting = [name for name, array in arrays.items() if reading.fits(array)]
    if len(fitting) == 1:
        return fitting[0]
    return None


def _part(
    split: int | None,
    arrays: dict[str, FileArray],
    request: DatasetRequest,
    path: Path,
    reading: Reading,
) -> tuple[TableRows, str]:
    """The rows of a split, and a clause that describes for the user what was read."""
    name = str(_rows_of(arrays, request, reading))
    images = arrays.pop(name)
    layout = reading.layout(images.shape, images.dtype, f"{path}, {name}")
    count = images.shape[0]
    found = {column: _column(array, count, f"{path}, {column}") for column, array in arrays.items()}
    names = columns.row_names(count, split)
    part = TableRows(names, images.source(layout), found, split)
    return part, f"{reading.holds} {layout} from {name}"


def _column(array: FileArray, count: int, where: str) -> Column:
    """An array next to the images as a column; ``Unread`` if it does not have one value for each row."""
    # A column has the shape [N] or [N, 1].
    if len(array.shape) != 1 and array.shape[1:] != (1,):
        why = "one value"
        if array.dtype.hasobject:
            why = ONE_OBJECT
        if array.shape:
            length, *shape_of_row = array.shape
            why = f"{length:,} values, but there are {count:,} rows"
            if length == count:
                each = math.prod(shape_of_row)
                why = f"{each:,} values per row"
        return Unread(array.shape, str(array.dtype), why)
    try:
        return as_column(array.column(where).reshape(-1))
    except UsageError as error:
        # A column of objects is no reason to refuse the images.
        if array.dtype.hasobject:
            why = f"objects, which fedcache does not read: {error.message}"
            return Unread(array.shape, "objects", why)
        raise
