"""Features of one backbone on their way into a store: block by block, in the stored dtype, with a digest of all."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import FedcacheError, UsageError
from fedcache.parsing import slug_of
from fedcache.progress import Observer
from fedcache.store.chunks import all_finite, checksum, encode, to_stored_dtype
from fedcache.store.files import digest_of
from fedcache.store.samples import INGESTED
from fedcache.store.writer import ArrayWriter
from fedcache.tables.file_rows import FileRows, blocks_of

NOT_FINITE = "features are not finite"
"""The reason of a row that ``drop_nan`` leaves out."""

NOT_FINITE_HINT = "Mend these rows, or leave them out: drop_nan=True."


@dataclass(frozen=True)
class ContentArray:
    """Features of one backbone in the order of the rows of a store."""

    source: NDArray[Any] | FileRows  # [N, V, D], any float dtype
    dtype: str  # stored
    chunk_rows: int  # rows per chunk file
    name: str  # of the backbone, for messages
    digest: str = ""  # sha256 of all values, known after the first reading
    crcs: tuple[int, ...] = ()  # crc32c of every chunk, likewise
    drop: bool = False  # rows that are not finite are NaN throughout, in the place of an error

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, V, D)."""
        return self.source.shape

    @property
    def recipe(self) -> dict[str, Any]:
        """What determines the values: the values themselves."""
        return {
            "backbone": self.name,
            "weights": self.digest,
            "source": INGESTED,
            "dtype": self.dtype,
            "views": self.shape[1],
        }

    @property
    def key(self) -> str:
        """Name of the array in the store."""
        return f"{slug_of(self.name)}-{digest_of(self.recipe)[:8]}"

    def blocks(self) -> Iterator[NDArray[Any]]:
        """The rows of every chunk in its stored dtype; raises CorruptionError for values that are not finite there."""
        size = self.chunk_rows
        for number, rows in enumerate(blocks_of(self.source, size)):
            try:
                kept, lost = self._without_lost(rows)
                yield to_stored_dtype(kept, self.dtype, lost, number * size, self.name)
            except FedcacheError as error:
                raise FedcacheError(error.code, error.message, NOT_FINITE_HINT) from error

    def _without_lost(self, rows: NDArray[Any]) -> tuple[NDArray[Any], list[int]]:
        """Rows with NaN for all values of one that cannot be stored, and the places of those."""
        if not self.drop:
            return rows, []
        with np.errstate(over="ignore"):
            cast = rows.astype(self.dtype, copy=False)
        if all_finite(rows) and all_finite(cast):
            return rows, []
        lost = ~(np.isfinite(cast).all(axis=(1, 2)) & np.isfinite(rows).all(axis=(1, 2)))
        return np.where(lost[:, None, None], np.asarray(np.nan, rows.dtype), rows), np.flatnonzero(
            lost
        ).tolist()

    def blocks_again(self) -> Iterator[NDArray[Any]]:
        """The same as at the first reading. Raises UsageError for a file that has changed since."""
        for number, rows in enumerate(self.blocks()):
            if self.chunk_crc(rows) != self.crcs[number]:
                raise UsageError(
                    f"The features {self.name} changed while they were read: rows {number * self.chunk_rows} to "
                    f"{number * self.chunk_rows + len(rows) - 1}.",
                    "Ingest a file that nobody writes.",
                )
            yield rows

    def write_missing(self, writer: ArrayWriter, observer: Observer) -> None:
        """Write the chunks that a writer lacks, each while the next one is read; errors as ``ArrayWriter.write``."""
        missing = set(writer.missing())
        with ThreadPoolExecutor(1) as pool:  # which waits for the disk
            written: Future[None] | None = None
            for chunk, rows in enumerate(self.blocks_again() if missing else ()):
                if written is not None:
                    written.result()
                bad = {
                    chunk * self.chunk_rows + row: NOT_FINITE for row in lost_rows(rows).tolist()
                }
                written = pool.submit(writer.write, chunk, rows, bad) if chunk in missing else None
                observer.advance(len(rows))
            if written is not None:
                written.result()

    def chunk_crc(self, rows: NDArray[Any]) -> int:
        """crc32c of the chunk file that holds these rows, the last one filled up."""
        return checksum(encode(rows, self.chunk_rows, self.dtype).reshape(-1).view(np.uint8))


def lost_rows(rows: NDArray[Any]) -> NDArray[np.int64]:
    """The places of stored rows [n, V, D] that were left out: NaN throughout, and nothing else is NaN there."""
    return np.flatnonzero(np.isnan(rows[:, 0, 0]))
