"""All rows of an array as one numpy array, without copying them: its chunk files mapped side by side in memory.

A chunk file is its rows and four bytes more. Where the rows fill whole pages, each file is mapped so that its rows end
where those of the next begin; the checksum is left out. Pages come from the page cache when they are read, and all
processes of a machine share them.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedcache.store.chunks import (
    CRC_BYTES,
    array_bytes,
    check_size,
    chunk_path,
    damaged,
    verify_payload,
)
from fedcache.store.files import at_once
from fedcache.store.reader import Reader

MOST_CHUNKS = 32_768
"""Chunk files that are mapped at once: Linux allows a process 65,530 maps."""

MAP_FIXED = 0x10
"""The same number on Linux and macOS; Python does not name it."""

_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True)
class MappedRows:
    """An array [N, ..] over mapped files."""

    values: NDArray[np.generic]
    address: int  # of the first byte
    nbytes: int  # of whole chunks

    def release(self) -> None:
        """Give the pages back that were read; they stay in the page cache."""
        assert LIBC is not None
        LIBC.madvise(self.address, self.nbytes, mmap.MADV_DONTNEED)


def map_rows(reader: Reader) -> MappedRows | None:
    """Every row of an array, each chunk verified now; None where chunk files cannot lie side by side.

    That is where a chunk is no whole number of pages, there are too many, or the system has no such maps. The values
    must not be written. Raises CorruptionError, when a chunk's size, checksum or place is wrong.
    """
    count = len(reader.info.chunks)
    size = _chunk_bytes(reader)
    if LIBC is None or not count or not size or size % mmap.PAGESIZE or count > MOST_CHUNKS:
        return None
    # Room that no other map takes; nothing can be read of it yet.
    address = LIBC.mmap(None, count * size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if address in (None, _FAILED):
        return None
    memory = (ctypes.c_ubyte * (count * size)).from_address(address)
    weakref.finalize(memory, LIBC.munmap, address, count * size)
    for number in range(count):
        if not _map_chunk(LIBC, reader, number, address + number * size):
            return None
    raw = np.ctypeslib.as_array(memory)[: math.prod(reader.shape) * reader.dtype.itemsize]
    values = raw.view(reader.dtype.newbyteorder("<")).reshape(reader.shape)
    return MappedRows(values, address, count * size)


def mapped_bytes(at_most: int) -> int:
    """Bytes of files that this process has in memory now, or ``at_most`` where the system does not say."""
    try:
        shared = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[2])
    except (OSError, ValueError, IndexError):
        return at_most
    return shared * mmap.PAGESIZE


def _chunk_bytes(reader: Reader) -> int:
    return array_bytes((reader.info.chunk_rows, *reader.shape[1:]), reader.info.dtype)


def _map_chunk(libc: ctypes.CDLL, reader: Reader, number: int, address: int) -> bool:
    """Map the rows of a chunk file to an address, verified; False where the system refuses."""
    place = chunk_path(reader.path, number, len(reader.shape))
    what = f"chunk {number} of {reader.key}"
    size = _chunk_bytes(reader)
    try:
        fd = at_once(str(place), os.O_RDONLY)
    except OSError as error:
        raise damaged(what, place, "is missing or unreadable") from error
    try:
        check_size(os.fstat(fd).st_size, size, place, what)
        # Private: a write that must not be would change this process's copy, and no file.
        flags = mmap.MAP_PRIVATE | MAP_FIXED
        if libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0) != address:
            return False
        rows = np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(address))
        verify_payload(rows, os.pread(fd, CRC_BYTES, size), reader.info.chunks[number], place, what)
        libc.madvise(address, size, mmap.MADV_DONTNEED)
    finally:
        os.close(fd)
    return True


def _load() -> ctypes.CDLL | None:
    """The C library with ``mmap``, which Python's own cannot place; None without one."""
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
