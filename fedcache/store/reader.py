"""Reading features: memory-mapped chunk files, each verified when it is first read in a process."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import Exit, FedcacheError
from fedcache.store.chunks import CRC_BYTES, array_bytes, chunk_path, damaged, map_file, verify_payload
from fedcache.store.manifest import ArrayInfo

MAPS = 128
"""Chunks of an array mapped at a time. Each costs a file descriptor, and systems allow as few as 256."""


class Reader:
    """One complete feature array.

    Args:
        path: of the array.
        key: its name, for messages.
        info: from the manifest.
    """

    def __init__(self, path: Path, key: str, info: ArrayInfo) -> None:
        self.path, self.key, self.info = path, key, info
        self._row_bytes = array_bytes(info.shape[1:], info.dtype)
        self._mapped: dict[int, tuple[NDArray[np.uint8], NDArray[Any]]] = {}
        self._verified: set[int] = set()

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, V, D)."""
        return self.info.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Stored dtype."""
        return np.dtype(self.info.dtype)

    def chunk(self, number: int) -> NDArray[Any]:
        """Rows of one chunk, mapped read-only; the last chunk is cut at N.

        Raises:
            FedcacheError: CORRUPT, when size, checksum or place is wrong.
        """
        raw, values = self._map(number)
        if number not in self._verified:
            self._verify(number, raw[:-CRC_BYTES], raw)
        return values

    def blocks(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """(first row, rows) of every chunk in order, mapped."""
        for number in range(len(self.info.chunks)):
            yield number * self.info.chunk_rows, self.chunk(number)

    def all(self) -> NDArray[Any]:
        """Every row, [N, V, D], in memory.

        Raises:
            FedcacheError: CORRUPT, when a chunk's size, checksum or place is wrong.
        """
        for number in range(len(self.info.chunks)):  # before memory is asked for: a manifest may claim any shape
            if number not in self._verified:
                self._check_size(number)
        out = np.empty(self.shape, self.dtype.newbyteorder("<"))
        flat = out.reshape(-1).view(np.uint8)
        for number in range(len(self.info.chunks)):
            raw, _ = self._map(number)
            start = number * self.info.chunk_rows * self._row_bytes
            part = flat[start : start + self._length(number) * self._row_bytes]
            part[:] = raw[: len(part)]
            if number not in self._verified:
                # Of the copy, which is in the processor's cache now; only a short last chunk is read again.
                self._verify(number, part if len(part) == len(raw) - CRC_BYTES else raw[:-CRC_BYTES], raw)
        return out

    def rows(self, index: NDArray[np.integer[Any]]) -> NDArray[Any]:
        """The rows of ``index``, [len(index), V, D], in the order asked for.

        Raises:
            FedcacheError: STORE, for a row the store does not have; CORRUPT.
        """
        wanted = np.asarray(index, np.int64)
        if len(wanted) and not (int(wanted.min()) >= 0 and int(wanted.max()) < self.shape[0]):
            raise FedcacheError(
                Exit.STORE,
                f"Rows {wanted.min()} to {wanted.max()} were asked of {self.key}, which has {self.shape[0]}.",
                "The row numbers are another store's: make the partition again with fedcache partition.",
            )
        size = self.info.chunk_rows
        numbers = wanted // size
        if len(wanted):
            self.chunk(int(numbers[0]))  # before memory is asked for, as in `all`
        out = np.empty((len(wanted), *self.shape[1:]), self.dtype)
        order = None if (numbers[1:] >= numbers[:-1]).all() else np.argsort(numbers, kind="stable")
        if order is not None:
            numbers, wanted = numbers[order], wanted[order]
        edges = [*np.flatnonzero(np.diff(numbers, prepend=-1)).tolist(), len(wanted)]
        inside = wanted - numbers * size
        for start, stop in pairwise(edges):
            rows = self.chunk(int(numbers[start]))
            if order is None:
                # mode="clip" lets numpy write into `out` without a buffer; the range was checked above.
                rows.take(inside[start:stop], axis=0, out=out[start:stop], mode="clip")
            else:
                out[order[start:stop]] = rows[inside[start:stop]]
        return out

    def _length(self, number: int) -> int:
        return min(self.info.chunk_rows, self.shape[0] - number * self.info.chunk_rows)

    def _file(self, number: int) -> Path:
        return chunk_path(self.path, number, len(self.shape))

    def _what(self, number: int) -> str:
        return f"chunk {number} of {self.key}"

    def _size(self) -> int:
        return self.info.chunk_rows * self._row_bytes

    def _map(self, number: int) -> tuple[NDArray[np.uint8], NDArray[Any]]:
        """A chunk file's bytes and, over the same memory, its rows below N."""
        found = self._mapped.get(number)
        if found is None:
            raw = map_file(self._file(number), self._size(), self._what(number))
            values = raw[: self._length(number) * self._row_bytes].view(self.dtype.newbyteorder("<"))
            if len(self._mapped) >= MAPS:
                del self._mapped[next(iter(self._mapped))]
            found = self._mapped[number] = raw, values.reshape(-1, *self.shape[1:])
        return found

    def _verify(self, number: int, payload: NDArray[np.uint8], raw: NDArray[np.uint8]) -> None:
        tail, crc = raw[-CRC_BYTES:].tobytes(), self.info.chunks[number]
        verify_payload(payload, tail, crc, self._file(number), self._what(number))
        self._verified.add(number)

    def _check_size(self, number: int) -> None:
        try:
            found = self._file(number).stat().st_size
        except OSError as error:
            raise damaged(self._what(number), self._file(number), "is missing or unreadable") from error
        if found != self._size() + CRC_BYTES:
            why = f"has {found:,} bytes, expected {self._size() + CRC_BYTES:,}"
            raise damaged(self._what(number), self._file(number), why)
