"""Chunks of computed batches: how large they are, how they fill up, and the thread that writes them in order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedcache.extract.batches import ComputedBatch

MAX_CHUNK_BYTES = 8 << 20
MAX_CHUNK_ROWS = 512


def chunk_rows_for(batch: int, row_bytes: int) -> int:
    """Rows of a chunk: the largest batch * 2^j with at most 512 rows and 8 MiB, at least one batch.

    Powers of two so that the chunks of all backbones of a run nest and each image is decoded once.
    """
    rows = batch
    while rows * 2 <= MAX_CHUNK_ROWS and rows * 2 * row_bytes <= MAX_CHUNK_BYTES:
        rows *= 2
    return rows


class ChunkWriter(Protocol):
    """What takes the chunks of an array."""

    @property
    def chunk_rows(self) -> int:
        """Rows per chunk."""

    def write(self, chunk: int, rows: NDArray[Any], bad: Mapping[int, str] | None = None) -> None:
        """Take one chunk."""


@dataclass
class PendingChunk:
    """A chunk being filled: its rows, the batches that are still to come, and the reason per bad row."""

    rows: NDArray[Any]
    left: int
    bad: dict[int, str] = field(default_factory=dict)


class ChunkCollector:
    """Places computed batches into chunks and hands full ones to a writing thread.

    One thread writes, so that chunks reach the journal in the order in which they became full, and computing goes on
    meanwhile.
    """

    def __init__(self, writers: Mapping[str, ChunkWriter], rows: int, batch: int) -> None:
        self.writers = writers
        self.rows = rows
        self.batch = batch
        self.pending: dict[tuple[str, int], PendingChunk] = {}
        self.unsaved = dict.fromkeys(writers, 0)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="store-writer")
        self.saving: dict[Future[None], tuple[str, int]] = {}

    def chunk_of(self, key: str, batch: int) -> int:
        """The chunk of ``key`` that holds absolute batch ``batch``."""
        return batch * self.batch // self.writers[key].chunk_rows

    def batches_in(self, key: str, chunk: int) -> int:
        """Batches of a chunk; the last one may be short."""
        size = self.writers[key].chunk_rows
        return math.ceil((min((chunk + 1) * size, self.rows) - chunk * size) / self.batch)

    def limit(self, key: str) -> int:
        """Batches of ``key`` that may be computed and not yet journalled: one chunk."""
        return math.ceil(self.writers[key].chunk_rows / self.batch)

    def add(self, batch: int, computed: ComputedBatch) -> None:
        """Place a batch; start the write of every chunk it completes."""
        first = batch * self.batch
        for key, values in computed.features.items():
            chunk = self.chunk_of(key, batch)
            size = self.writers[key].chunk_rows
            # Batches of a chunk come in any order from several workers; each has its place by its row numbers.
            part = self.pending.get((key, chunk))
            if part is None:
                length = min((chunk + 1) * size, self.rows) - chunk * size
                part = PendingChunk(
                    np.empty((length, *values.shape[1:]), values.dtype), self.batches_in(key, chunk)
                )
                self.pending[key, chunk] = part
            offset = first - chunk * size
            part.rows[offset : offset + len(values)] = values
            part.bad.update(computed.bad)
            part.left -= 1
            if part.left == 0:
                del self.pending[key, chunk]
                future = self.thread.submit(self.writers[key].write, chunk, part.rows, part.bad)
                self.saving[future] = (key, self.batches_in(key, chunk))

    def collect_writes(self, *, block: bool = False) -> None:
        """Take note of finished writes; ``block`` waits for all. A failed write raises here."""
        if block and self.saving:
            wait(self.saving)
        for future in [f for f in self.saving if f.done()]:
            key, count = self.saving.pop(future)
            future.result()
            self.unsaved[key] -= count
