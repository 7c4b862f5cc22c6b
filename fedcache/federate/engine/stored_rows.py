"""Features that stay in their files, in the dtype in which they are stored: rows are cast when they are gathered.

A cast of a row gives the same bits whichever rows are cast with it, so a run reads the same numbers as of a float32
copy of the whole, and needs no room for one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcache.federate.engine.feature_post import ROW_POSTS
from fedcache.store.machine import memory_limit
from fedcache.store.mapped_rows import map_rows, mapped_bytes
from fedcache.store.reader import Reader

RESIDENT = 768 << 20
"""Bytes of mapped pages from which on they are given back; a file that is read again is read from the page cache."""

IN_MEMORY = 256 << 20
"""Bytes of float32 features that are read into memory all the same: a cast for every gather costs more than they do."""

AROUND = 2 << 20
"""Bytes that the system may map around the one that is read: 64 KB on most, and up to a huge page of its cache."""


@dataclass
class _Touched:
    nbytes: int = 0


@dataclass(frozen=True, eq=False)
class StoredRows:
    """[N, V, D] features as a run reads them, with what the engine asks of a tensor of them.

    Indexing by rows, views and columns gives a tensor of its own, in ``dtype``: ``rows[index, 0]``.
    """

    stored: Tensor  # [N, V, D] in the stored dtype, never written
    dtype: torch.dtype = torch.float32  # of what is read
    # what is made of float32 rows [.., D], in place, each row by itself; None for nothing
    post: Callable[[NDArray[np.float32]], Any] | None = None
    release: Callable[[], None] | None = None  # gives back what was mapped of a file
    _touched: _Touched = field(default_factory=_Touched)

    @property
    def shape(self) -> torch.Size:
        """(N, V, D)."""
        return self.stored.shape

    @property
    def device(self) -> torch.device:
        """Where rows are gathered."""
        return self.stored.device

    @property
    def nbytes(self) -> int:
        """Bytes of memory of its own: none where the rows are mapped."""
        return 0 if self.release is not None else self.stored.nbytes

    def __len__(self) -> int:
        return len(self.stored)

    def is_floating_point(self) -> bool:
        """As of a tensor of ``dtype``."""
        return True

    def element_size(self) -> int:
        """Bytes of a number that is read."""
        return self.dtype.itemsize

    def to(self, target: torch.dtype | torch.device | str) -> StoredRows:
        """The same rows read as another dtype, or copied to another device."""
        if isinstance(target, torch.dtype):
            return replace(self, dtype=target)
        return replace(self, stored=self.stored.to(target), release=None)

    def new_empty(self, *size: int) -> Tensor:
        """A tensor of what is read, without values."""
        return torch.empty(*size, dtype=self.dtype, device=self.device)

    def __getitem__(self, key: Any) -> Tensor:
        rows, *others = key if isinstance(key, tuple) else (key,)
        if isinstance(rows, Tensor):
            read = self._read(self._gather(self.stored[(slice(None), *others[:1])], rows))
        else:
            read = self._read(self.stored[(rows, *others[:1])])
        return read[(..., *others[1:])]  # columns of what was made of whole rows

    def take(self, index: Tensor) -> Tensor:
        """Rows ``index`` [K] of the matrix [N V, D], of which row n V + v is view v of row n; [K, D]."""
        V, D = self.shape[1:]
        return self._read(self._gather(self.stored.reshape(-1, D), index, V))

    def _read(self, rows: Tensor) -> Tensor:
        read = rows.to(torch.float32, copy=self.post is not None)  # never write what is mapped
        if self.post is not None:
            made = read.cpu()
            self.post(made.numpy())
            read = made.to(self.device)
        return read.to(self.dtype)

    def _gather(self, source: Tensor, index: Tensor, views: int = 1) -> Tensor:
        """source[index] of the rows, or of the matrix of all views; mapped rows in parts, of which each may stay."""
        if self.release is None or not len(index) or self.stored.nbytes <= RESIDENT:
            return source[index]
        if (most := self._maps(index, views)) <= RESIDENT:
            self._touch(most)
            return source[index]
        flat = index.flatten()
        out = source.new_empty((len(flat), *source.shape[1:]))
        for part in flat.argsort().tensor_split(-(-most // RESIDENT)):
            rows = flat[part]
            self._touch(self._maps(rows, views))
            out[part] = source[rows]
        return out.reshape(*index.shape, *source.shape[1:])

    def _maps(self, index: Tensor, views: int) -> int:
        """Bytes that a gather maps at most: what lies around each of its rows, and all from the first to the last."""
        size = self.stored[0].nbytes
        span = (int(index.max()) - int(index.min())) // views + 1
        return min(index.numel() * (size + AROUND), span * size + AROUND)

    def _touch(self, most: int) -> None:
        """Count what a gather is about to map, and give back what is mapped when that may not stay."""
        self._touched.nbytes += most
        if self._touched.nbytes > RESIDENT:
            # That was the most it can be. Giving back and mapping again costs more than to ask what it is.
            self._touched.nbytes = mapped_bytes(self._touched.nbytes)
        if self._touched.nbytes > RESIDENT:
            self._touched.nbytes = most
            if self.release is not None:
                self.release()


def stored_rows(readers: Sequence[Reader], feat_post: str) -> StoredRows | None:
    """The features of an array where they need not be in memory: None for those that are small, or several arrays.

    Args:
        readers: one per backbone; side by side they are one matrix, which is in no file.
        feat_post: what is done to features; ``standardize`` reads all rows before it can make one.

    Raises CorruptionError, when a chunk is damaged.
    """
    if len(readers) != 1 or feat_post not in ROW_POSTS or len(readers[0].shape) != 3:
        return None
    if 4 * math.prod(readers[0].shape) <= min(IN_MEMORY, memory_limit()):
        return None
    mapped = map_rows(readers[0])
    if mapped is None:
        return None
    return StoredRows(
        torch.from_numpy(mapped.values), post=ROW_POSTS[feat_post], release=mapped.release
    )


Features = Tensor | StoredRows
"""[N, V, D] features of a run."""


def take_rows(x: Features, index: Tensor) -> Tensor:
    """Rows ``index`` [K] of the matrix [N V, D] of features [N, V, D], as ``StoredRows.take``."""
    return (
        x.take(index)
        if isinstance(x, StoredRows)
        else x.reshape(-1, x.shape[-1]).index_select(0, index)
    )
