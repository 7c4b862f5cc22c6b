"""Reading features: memory-mapped chunk files, each verified when it is first mapped in a process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.store.chunks import chunk_path, map_chunk
from fedcache.store.manifest import ArrayInfo


class Reader:
    """One complete feature array.

    Args:
        path: of the array.
        key: its name, for messages.
        info: from the manifest.
    """

    def __init__(self, path: Path, key: str, info: ArrayInfo) -> None:
        self.path, self.key, self.info = path, key, info
        self._mapped: dict[int, NDArray[Any]] = {}

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
        if number not in self._mapped:
            rows = self.info.chunk_rows
            file = chunk_path(self.path, number, len(self.shape))
            what = f"chunk {number} of {self.key}"
            whole = map_chunk(file, (rows, *self.shape[1:]), self.info.dtype, self.info.chunks[number], what)
            self._mapped[number] = whole[: min(rows, self.shape[0] - number * rows)]
        return self._mapped[number]

    def blocks(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """(first row, rows) of every chunk in order, mapped."""
        for number in range(len(self.info.chunks)):
            yield number * self.info.chunk_rows, self.chunk(number)

    def all(self) -> NDArray[Any]:
        """Every row, [N, V, D], in memory."""
        out = np.empty(self.shape, self.dtype)
        for start, rows in self.blocks():
            out[start : start + len(rows)] = rows
        return out

    def rows(self, index: NDArray[np.integer[Any]]) -> NDArray[Any]:
        """The rows of ``index``, [len(index), V, D], in the order asked for."""
        wanted = np.asarray(index, np.int64)
        if len(wanted) and not (int(wanted.min()) >= 0 and int(wanted.max()) < self.shape[0]):
            raise IndexError(f"rows {wanted.min()}..{wanted.max()} of {self.shape[0]}")
        out = np.empty((len(wanted), *self.shape[1:]), self.dtype)
        if not len(wanted):
            return out
        chunks = wanted // self.info.chunk_rows
        order = np.argsort(chunks, kind="stable")
        bounds = np.flatnonzero(np.diff(chunks[order], prepend=-1))
        for start, stop in zip(bounds, [*bounds[1:], len(order)], strict=True):
            where = order[start:stop]
            number = int(chunks[where[0]])
            out[where] = self.chunk(number)[wanted[where] - number * self.info.chunk_rows]
        return out
