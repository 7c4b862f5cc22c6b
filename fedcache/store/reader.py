"""Reading features: memory-mapped chunk files, each verified when it is first read in a process.

For scattered rows, the chunks that contain them are verified and copied once into one array in memory. Only the pages
of these chunks take memory. An array above the memory limit is not copied but read from mapped files.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import CorruptionError, FedcacheError, StoreError
from fedcache.store.byte_source import ending, in_threads
from fedcache.store.chunks import (
    CRC_BYTES,
    array_bytes,
    check_size,
    chunk_path,
    damaged,
    empty,
    map_file,
    read_file,
    verify_payload,
)
from fedcache.store.files import at_once, memory_limit, threads_for
from fedcache.store.journal import unfinished_arrays
from fedcache.store.manifest import ArrayInfo, Manifest, origin_of
from fedcache.store.mirror import FETCHERS, Mirror

T = TypeVar("T")

MAPS = 128
"""Maximum number of an array's chunks that are mapped at once. Each needs a file descriptor; some systems allow 256."""


def open_reader(store: Path, manifest: Manifest, key: str) -> Reader:
    """The reader of a complete feature array. Raises StoreError, for an array that is unfinished or not there."""
    info = manifest.arrays.get(key)
    if info is None:
        state = "missing"
        for begun in unfinished_arrays(store, manifest.arrays):
            if begun["name"] == key:
                state = "unfinished ({kept} of {chunks} chunks)".format(**begun)
        complete = ", ".join(sorted(manifest.arrays)) or "none"
        raise StoreError(
            f"{key} in {store} is {state}; complete feature sets: {complete}.",
            "Run its `fedcache extract` command again to resume.",
        )
    place = origin_of(store)
    mirror = None
    if place is not None:
        mirror = Mirror(store, place, manifest)
    return Reader(store / "features" / key, key, info, mirror)


class Reader:
    """One complete feature array; ``mirror`` brings the chunk files of a published store."""

    def __init__(self, path: Path, key: str, info: ArrayInfo, mirror: Mirror | None = None) -> None:
        self.path = path
        self.key = key
        self.info = info
        self.mirror = mirror
        self._row_bytes = array_bytes(info.shape[1:], info.dtype)
        self._mapped: dict[int, NDArray[Any]] = {}
        self._verified: set[int] = set()
        # All rows [N, V, D] in memory; those of a chunk are filled in once it is `_present`.
        self._held: NDArray[Any] | None = None
        self._present = np.zeros(0, bool)

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, V, D)."""
        return self.info.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Stored dtype."""
        return np.dtype(self.info.dtype)

    def chunk(self, number: int) -> NDArray[Any]:
        """Rows of a chunk below N, mapped read-only. Raises CorruptionError, for a wrong size, checksum or place."""
        found = self._mapped.get(number)
        if found is None:
            found = self.use_file(number, lambda place: self._map(number, place))
        return found

    def use_file(self, number: int, use: Callable[[Path], T]) -> T:
        """The result of ``use`` for the file of a chunk.

        A mirror first fetches a missing file. If ``use`` finds it damaged, it is fetched again: another process may
        have removed it to make room, or the disk may have changed it.
        """
        place = self.chunk_file(number)
        if self.mirror is None:
            return use(place)
        for is_last in (False, False, True):
            self.mirror.bring(self.key, number)
            try:
                return use(place)
            except CorruptionError:
                if is_last:
                    raise
                place.unlink(missing_ok=True)
        raise AssertionError("the last attempt returns or raises")

    def blocks(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """(first row, rows) of every chunk in order, mapped."""
        for number in range(len(self.info.chunks)):
            yield number * self.info.chunk_rows, self.chunk(number)

    def all(self) -> NDArray[Any]:
        """Every row, [N, V, D], in memory. Raises CorruptionError, when a chunk's size, checksum or place is wrong."""
        # Check files before memory is requested, because a manifest may claim any shape.
        if self.mirror is not None and self.info.chunks:
            self.chunk(0)
        self.check_files()
        out = empty(self.shape, self.dtype.newbyteorder("<"))
        self._fill(out, range(len(self.info.chunks)))
        return out

    def check_files(self) -> None:
        """Raise CorruptionError if a file is missing or has another size. Files are not read, and a mirror has none."""
        if self.mirror is not None:
            return
        for number in range(len(self.info.chunks)):
            if number not in self._verified:
                place = self.chunk_file(number)
                what = self.chunk_name(number)
                try:
                    check_size(place.stat().st_size, self.info.chunk_bytes, place, what)
                except OSError as error:
                    raise damaged(what, place, "is missing or unreadable") from error

    def rows(self, index: NDArray[np.integer[Any]]) -> NDArray[Any]:
        """The rows of ``index``, [len(index), V, D], in the order requested.

        Raises StoreError, for a row the store does not have; CorruptionError.
        """
        wanted = np.asarray(index, np.int64)
        if len(wanted):
            first = int(wanted.min())
            last = int(wanted.max())
            if first < 0 or last >= self.shape[0]:
                raise StoreError(
                    f"Rows {first} to {last} of {self.key} were requested, but it has {self.shape[0]} rows.",
                    "The row numbers are from another store. Make the partition again with fedcache partition.",
                )
        size = self.info.chunk_rows
        numbers = wanted // size
        if len(wanted) and self._held is None:
            self.chunk(int(numbers[0]))  # a file is checked before memory is requested, as in `all`
        if self._hold(numbers):
            assert self._held is not None
            # The range was checked above; the mode "raise" would check it again, and more slowly.
            return self._held.take(wanted, axis=0, mode="clip")
        return self._gather(wanted, numbers)

    def _hold(self, numbers: NDArray[np.int64]) -> bool:
        """Read the chunks ``numbers`` into memory; False for an array above the memory limit."""
        if self._held is None:
            if array_bytes(self.shape, self.info.dtype) > memory_limit():
                return False
            # A page takes memory only once its chunk is filled in.
            self._held = empty(self.shape, self.dtype.newbyteorder("<"))
            self._present = np.zeros(len(self.info.chunks), bool)
        needed = np.bincount(numbers, minlength=len(self._present)).astype(bool)
        absent = np.flatnonzero(needed & ~self._present)
        if len(absent):
            self._fill(self._held, absent.tolist())
            self._present[absent] = True
        return True

    def _gather(self, wanted: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[Any]:
        """Rows out of mapped chunks, each mapped once."""
        out = np.empty((len(wanted), *self.shape[1:]), self.dtype)
        order = None
        if not (numbers[1:] >= numbers[:-1]).all():
            order = np.argsort(numbers, kind="stable")
            numbers = numbers[order]
            wanted = wanted[order]
        # Places where the rows of another chunk begin.
        starts = np.flatnonzero(np.diff(numbers, prepend=-1))
        edges = [*starts.tolist(), len(wanted)]
        inside = wanted - numbers * self.info.chunk_rows
        for start, stop in pairwise(edges):
            rows = self.chunk(int(numbers[start]))
            if order is None:
                # mode="clip" lets numpy write into `out` without a buffer; the range was checked above.
                rows.take(inside[start:stop], axis=0, out=out[start:stop], mode="clip")
            else:
                out[order[start:stop]] = rows[inside[start:stop]]
        return out

    def _fill(self, out: NDArray[Any], numbers: Iterable[int]) -> None:
        """Copy chunks, verified, to their rows of ``out`` [N, V, D]. Raises CorruptionError for the first bad one."""
        flat = out.reshape(-1).view(np.uint8)
        todo = list(numbers)
        turns = itertools.count()  # shared, so that a thread on a busy core takes fewer chunks
        errors: dict[int, FedcacheError] = {}

        def work() -> None:
            while not (errors or ending().is_set()) and (turn := next(turns)) < len(todo):
                try:
                    self._copy(todo[turn], flat)
                except FedcacheError as error:
                    errors[turn] = error

        threads = threads_for(len(todo))
        if self.mirror is not None:
            threads = min(FETCHERS, len(todo))
        if threads <= 1:
            work()
        else:
            in_threads(threads, lambda _: work(), range(threads))
        if errors:
            raise errors[min(errors)]

    def _copy(self, number: int, flat: NDArray[np.uint8]) -> None:
        """Read a chunk to its place. This is faster than copying from a map, which is set up page by page."""
        start = number * self.info.chunk_rows * self._row_bytes
        part = flat[start : start + self._bytes_below_end(number)]
        what = self.chunk_name(number)

        def read(place: Path) -> None:
            rest = read_file(place, part, self.info.chunk_bytes, what)
            if number not in self._verified:
                # The bytes were just read, so they are in the processor's cache.
                verify_payload(part, rest, self.info.chunks[number], place, what)
                self._verified.add(number)

        self.use_file(number, read)

    def _bytes_below_end(self, number: int) -> int:
        """Bytes of a chunk's rows below N; the last chunk may have rows beyond the end of the array."""
        rows = min(self.info.chunk_rows, self.shape[0] - number * self.info.chunk_rows)
        return rows * self._row_bytes

    def chunk_file(self, number: int) -> Path:
        """The file of a chunk."""
        return chunk_path(self.path, number, len(self.shape))

    def chunk_name(self, number: int) -> str:
        """Name of a chunk in messages."""
        return f"chunk {number} of {self.key}"

    def _map(self, number: int, place: Path) -> NDArray[Any]:
        """A chunk's rows below N, as a view of its mapped file, which is verified when it is first read."""
        what = self.chunk_name(number)
        raw = map_file(place, self.info.chunk_bytes, what)
        if number not in self._verified:
            tail = raw[-CRC_BYTES:].tobytes()
            verify_payload(raw[:-CRC_BYTES], tail, self.info.chunks[number], place, what)
            self._verified.add(number)
        values = raw[: self._bytes_below_end(number)].view(self.dtype.newbyteorder("<"))
        rows = values.reshape(-1, *self.shape[1:])
        if len(self._mapped) >= MAPS:
            oldest = next(iter(self._mapped))
            del self._mapped[oldest]
        self._mapped[number] = rows
        return rows


# All rows of an array as one numpy array, without copying them: its chunk files mapped side by side in memory.
#
# A chunk file is its rows and a checksum of four bytes. If the rows fill whole pages, each file is mapped without its
# checksum, so that its rows end where those of the next file begin. Pages come from the page cache when they are read,
# and all processes of a machine share them.


MOST_CHUNKS = 32_768
"""Maximum number of chunk files that are mapped at once, because Linux allows a process 65,530 maps."""

MAP_FIXED = 0x10
"""Flag of ``mmap``. It has the same value on Linux and macOS, but no name in Python."""

_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True)
class MappedRows:
    """An array [N, ..] over mapped files."""

    values: NDArray[np.generic]
    address: int  # of the first byte
    nbytes: int  # of whole chunks

    def release(self) -> None:
        """Release the memory of pages that were read; they stay in the page cache."""
        assert LIBC is not None
        LIBC.madvise(self.address, self.nbytes, mmap.MADV_DONTNEED)


def map_rows(reader: Reader) -> MappedRows | None:
    """Every row of an array, each chunk verified now; None if its chunk files cannot be mapped side by side.

    That is so if chunks do not fill whole pages, there are too many chunks, or the system has no such maps. The values
    must not be changed. Raises CorruptionError, when a chunk's size, checksum or place is wrong.
    """
    count = len(reader.info.chunks)
    size = reader.info.chunk_bytes
    fills_pages = size > 0 and size % mmap.PAGESIZE == 0
    if LIBC is None or not fills_pages or not 0 < count <= MOST_CHUNKS:
        return None
    if reader.mirror is not None and not reader.mirror.bring_all(reader.key):
        return None
    nbytes = count * size
    # Reserve addresses that no other map takes; they cannot be read yet.
    address = LIBC.mmap(None, nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if address in (None, _FAILED):
        return None
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    # The map ends with the last array that uses the memory.
    weakref.finalize(memory, LIBC.munmap, address, nbytes)
    for number in range(count):
        map_chunk = partial(_map_chunk, LIBC, reader, number, address + number * size)
        if not reader.use_file(number, map_chunk):
            return None
    raw = np.ctypeslib.as_array(memory)[: array_bytes(reader.shape, reader.info.dtype)]
    values = raw.view(reader.dtype.newbyteorder("<")).reshape(reader.shape)
    return MappedRows(values, address, nbytes)


def mapped_bytes(at_most: int) -> int:
    """Bytes of files that this process has in memory now, or ``at_most`` if the system does not tell."""
    try:
        fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
        shared_pages = int(fields[2])
    except (OSError, ValueError, IndexError):
        return at_most
    return shared_pages * mmap.PAGESIZE


def _map_chunk(libc: ctypes.CDLL, reader: Reader, number: int, address: int, place: Path) -> bool:
    """Map the rows of a chunk file to an address, and verify them; False if the system refuses the map."""
    what = reader.chunk_name(number)
    size = reader.info.chunk_bytes
    try:
        fd = at_once(str(place), os.O_RDONLY)
    except OSError as error:
        raise damaged(what, place, "is missing or unreadable") from error
    try:
        check_size(os.fstat(fd).st_size, size, place, what)
        # Private, so that a write by mistake would change this process's copy and no file.
        flags = mmap.MAP_PRIVATE | MAP_FIXED
        rights = mmap.PROT_READ | mmap.PROT_WRITE
        if libc.mmap(address, size, rights, flags, fd, 0) != address:
            return False
        rows = np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(address))
        tail = os.pread(fd, CRC_BYTES, size)
        verify_payload(rows, tail, reader.info.chunks[number], place, what)
        # The check read all pages; this releases their memory, as ``MappedRows.release``.
        libc.madvise(address, size, mmap.MADV_DONTNEED)
    finally:
        os.close(fd)
    return True


def _load() -> ctypes.CDLL | None:
    """The C library, because Python's own ``mmap`` cannot map to an address; None if it cannot be used."""
    if not hasattr(mmap, "MADV_DONTNEED") or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
    except (OSError, AttributeError, TypeError):
        return None
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


LIBC = _load()
