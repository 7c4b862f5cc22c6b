"""Reads images and other rows of an array in a file by position, or block by block, and never the whole array.

A row of an uncompressed array is one ``pread``. A compressed array must be unpacked in order: a few blocks are kept,
and a process that needs an earlier row begins again. Extraction reads rows in order, so each of its processes unpacks
the array once.
"""

from __future__ import annotations

import copy
import gzip
import math
import os
import threading
import weakref
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import UsageError
from fedcache.extract.datasets.archives import Reopened, open_as_listed
from fedcache.extract.image_files import BadImage

BLOCK = 4 << 20
"""Bytes of a compressed file that are unpacked at a time."""

WARM = 8
"""Number of a dataset's files that a process keeps open."""

KEPT = 4
"""Number of unpacked blocks that a process keeps, because its threads may read rows of different blocks."""

DAMAGED = (zlib.error, zipfile.BadZipFile, EOFError, OSError)
"""Errors of reading a damaged compressed file. gzip raises an OSError."""


@dataclass(frozen=True)
class Layout:
    """Layout of the pixels of a row."""

    shape: tuple[int, ...]  # shape of a row in the file
    order: str  # gray | gray-last | gray-first | rgb-last | rgb-first

    def image(self, row: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The row as an image: uint8 [H, W] or [H, W, 3]."""
        if self.order == "gray-last":
            row = row[:, :, 0]
        elif self.order == "gray-first":
            row = row[0]
        if self.order == "rgb-first":
            return np.ascontiguousarray(row.transpose(1, 2, 0))
        return row

    def __str__(self) -> str:
        size = list(self.shape)
        channels = "gray"
        if self.order == "rgb-first":
            size = size[1:]
            channels = "RGB, channels first"
        elif self.order == "gray-first":
            size = size[1:]
        elif self.order == "rgb-last":
            channels = "RGB"
        return f"{size[0]} x {size[1]} {channels}"


@dataclass(frozen=True)
class NumbersLayout:
    """Layout of rows of numbers that an encoder receives unchanged, but in the byte order of this machine."""

    row: tuple[int, ...]  # shape of a row
    dtype: np.dtype[Any]  # dtype in the file

    @property
    def shape(self) -> tuple[int, ...]:
        """The bytes of a row, as one axis."""
        return (math.prod(self.row) * self.dtype.itemsize,)

    def image(self, row: NDArray[Any]) -> NDArray[Any]:
        """The row; raises ``BadImage`` for one with NaN or infinity."""
        numbers = np.ascontiguousarray(row).view(self.dtype).reshape(self.row)
        native = numbers.astype(self.dtype.newbyteorder("="))
        if native.dtype.kind == "f" and not np.isfinite(native).all():
            raise BadImage("it contains NaN or infinite numbers")
        return native

    def __str__(self) -> str:
        dtype = self.dtype.newbyteorder("=")
        return f"{dtype} {list(self.row)}"


RowLayout = Layout | NumbersLayout
"""Converts a row as it is in the file to an image, or to a row for an encoder of rows."""


def numbers_of(shape: Sequence[int], dtype: np.dtype[Any], where: str) -> NumbersLayout:
    """Layout of the rows of an array [N, ...] of numbers, for a ``module:`` encoder.

    Raises UsageError if a row is a single number or empty, and for types that torch does not have.
    """
    row = tuple(int(side) for side in shape[1:])
    if dtype.kind not in "iufb" or dtype.itemsize > 8 or not row or 0 in row:
        whole = list(map(int, shape))
        raise UsageError(
            f"The rows of {where} are {dtype} with shape {whole}; expected numbers [N, ...].",
            "rows.astype('float32').reshape(len(rows), -1)   gives rows of numbers",
        )
    return NumbersLayout(row, dtype)


def layout_of(shape: Sequence[int], dtype: np.dtype[Any], where: str) -> Layout:
    """Layout of the rows of an array [N, ...] of images, by its shape; three channels may come first or last.

    Raises UsageError, with a hint, for other numbers than uint8 and for shapes that are no images.
    """
    row = tuple(int(side) for side in shape[1:])
    if dtype != np.uint8:
        hint = "(255 * images).round().astype('uint8')   converts images in [0, 1]"
        if dtype.kind == "b":
            hint = "255 * images.astype('uint8')   converts black-and-white images"
        elif dtype.kind in "iu":
            hint = (
                "images.astype('uint8')   converts numbers from 0 to 255. For numbers up to 65,535:  "
                "(images // 257).astype('uint8')"
            )
        raise UsageError(
            f"The images of {where} are {dtype}, not uint8, so the range of their numbers is unknown.",
            hint,
        )
    if len(row) == 2 and 0 not in row:
        return Layout(row, "gray")
    if len(row) == 3 and 0 not in row:
        # Order -> (axis of the channels, number of channels). A row [3, H, 3] fits two orders; channels last is more
        # common, so it is tried first.
        orders = {
            "rgb-last": (2, 3),
            "rgb-first": (0, 3),
            "gray-last": (2, 1),
            "gray-first": (0, 1),
        }
        for order, (axis, channels) in orders.items():
            if row[axis] == channels:
                return Layout(row, order)
    hint = "images.reshape(-1, 28, 28)   gives each row a height and a width, for example 28 and 28"
    if row[-1:] == (4,):
        hint = "images[..., :3]   removes the fourth channel"
    whole = list(map(int, shape))
    raise UsageError(
        f"The images of {where} have the shape {whole}; expected [N, H, W], [N, H, W, 1], [N, H, W, 3] or channels "
        "first.",
        hint,
    )


@dataclass(frozen=True, eq=False)
class FixedRows(Reopened):
    """Rows that are stored one after another in a file, uncompressed."""

    path: Path
    stamp: tuple[int, int]  # (size, mtime_ns) of the file when it was listed
    start: int  # byte at which row 0 begins
    layout: RowLayout

    def read(self, row: int) -> NDArray[Any]:
        """The pixels of a row; raises ``BadImage``."""
        shape = self.layout.shape
        width = math.prod(shape)
        raw = os.pread(self._fd, width, self.start + row * width)
        if len(raw) != width:
            raise BadImage("the file ends before this image")
        return self.layout.image(np.frombuffer(raw, dtype=np.uint8).reshape(shape))

    @cached_property
    def _fd(self) -> int:
        fd = open_as_listed(self.path, self.stamp)
        weakref.finalize(self, os.close, fd)
        return fd


@dataclass(frozen=True)
class Packed:
    """A compressed file, or a compressed member of a zip, whose content is read in order."""

    path: Path
    stamp: tuple[int, int]  # (size, mtime_ns) of the file when it was listed
    member: str = ""  # name inside a zip; empty for a .gz

    def open(self) -> IO[bytes]:
        """The bytes from their beginning. Raises MachineError when the file has changed, ``DAMAGED`` for damage."""
        os.close(open_as_listed(self.path, self.stamp))  # raises when it has changed
        if not self.member:
            return gzip.open(self.path)  # type: ignore[return-value]
        # The archive stays open until its last member is closed.
        with zipfile.ZipFile(self.path) as archive:
            return archive.open(self.member)


@dataclass(eq=False)
class PackedBlocks(Reopened):
    """Reader of blocks of rows from a compressed stream."""

    packed: Packed
    start: int
    count: int
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        self.rows = max(1, BLOCK // max(1, math.prod(self.shape)))
        self._file: Any = None
        self._next = 0  # number of the block that the open stream returns next

    def block(self, number: int) -> NDArray[np.uint8]:
        """A block, uint8 [n, ...]; raises ``BadImage`` where the data is damaged."""
        first = number * self.rows
        width = math.prod(self.shape)
        count = min(self.rows, self.count - first)
        try:
            # A compressed stream cannot go back, so for an earlier block it is opened again.
            if self._file is None or number < self._next:
                self.close()
                self._file = self.packed.open()
                self._next = 0
                _skip(self._file, self.start)
            _skip(self._file, (number - self._next) * self.rows * width)
            raw = self._file.read(count * width)
        except DAMAGED:
            self.close()
            raise BadImage("its data in the file is damaged") from None
        if len(raw) != count * width:
            self.close()
            raise BadImage("the file ends before this image")
        self._next = number + 1
        return np.frombuffer(raw, dtype=np.uint8).reshape(count, *self.shape)

    def close(self) -> None:
        """Close the stream; the next block begins again."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def __del__(self) -> None:
        self.close()


def _skip(file: IO[bytes], count: int) -> None:
    while count > 0:
        raw = file.read(min(count, BLOCK))
        if not raw:
            raise EOFError
        count -= len(raw)


@dataclass(frozen=True, eq=False)
class H5Blocks(Reopened):
    """Reader of blocks of rows from an HDF5 dataset; a block is one or more chunks of the dataset."""

    path: Path
    stamp: tuple[int, int]  # (size, mtime_ns) of the file when it was listed
    key: str  # name of the dataset in the file
    shape: tuple[int, ...]  # shape of a row
    chunk: int  # number of rows of a chunk

    @cached_property
    def rows(self) -> int:
        """Rows of a block: those of as many whole chunks as fit into ``BLOCK`` bytes, at least one."""
        chunk_bytes = max(1, math.prod(self.shape) * self.chunk)
        return self.chunk * max(1, BLOCK // chunk_bytes)

    @cached_property
    def _data(self) -> Any:
        os.close(open_as_listed(self.path, self.stamp))  # raises when it has changed
        import h5py

        return h5py.File(self.path, "r")[self.key]

    def block(self, number: int) -> NDArray[np.uint8]:
        """A block, uint8 [n, ...]; raises ``BadImage`` where the data is damaged."""
        data = self._data
        first = number * self.rows
        try:
            # A slice stops at the end of the dataset, so the last block may be shorter.
            found: NDArray[np.uint8] = data[first : first + self.rows]
        except (OSError, RuntimeError):
            raise BadImage("its data in the file is damaged") from None
        return found


class BlockRows(Reopened):
    """Rows that are read in blocks; the last few blocks are kept in memory."""

    def __init__(self, blocks: PackedBlocks | H5Blocks, layout: RowLayout) -> None:
        self.blocks = blocks
        self.layout = layout
        self._kept: dict[int, NDArray[Any] | BadImage] = {}
        self._lock = threading.Lock()

    def read(self, row: int) -> NDArray[Any]:
        """The pixels of a row; raises ``BadImage``."""
        number, at = divmod(row, self.blocks.rows)
        with self._lock:
            block = self._kept.get(number)
            if block is None:
                try:
                    block = self.blocks.block(number)
                except BadImage as error:
                    # The error is kept, so that the next row of this block does not unpack the file again.
                    block = error
                while len(self._kept) >= KEPT:
                    del self._kept[next(iter(self._kept))]  # the block that was read first
                self._kept[number] = block
        if isinstance(block, BadImage):
            raise BadImage(str(block))
        return self.layout.image(block[at])


def place_of(row: int, starts: NDArray[np.int64]) -> tuple[int, int]:
    """The part that holds a row, and the row within it; ``starts`` has the first row of each part."""
    part = int(np.searchsorted(starts, row, side="right")) - 1
    return part, row - int(starts[part])


class Shards(Reopened):
    """The rows of several files in their order; each process keeps a few of the files open."""

    def __init__(self, sources: Sequence[Any], counts: Sequence[int], warm: int = WARM) -> None:
        self.sources = tuple(sources)  # one source for each file
        self.counts = tuple(counts)  # number of rows of each file
        self.warm = warm  # number of files that a process keeps open
        self._starts = np.cumsum([0, *counts])
        self._warm: dict[int, Any] = {}
        self._lock = threading.Lock()

    def read(self, row: int) -> Any:
        """The image of a row; raises ``BadImage``."""
        number, row_of_file = place_of(row, self._starts)
        with self._lock:
            source = self._warm.pop(number, None)
            if source is None:
                # A copy opens its own file handle, and closes it when the copy is deleted below.
                source = copy.copy(self.sources[number])
            while len(self._warm) >= self.warm:
                del self._warm[next(iter(self._warm))]  # the source used longest ago
            self._warm[number] = source
        return source.read(row_of_file)
