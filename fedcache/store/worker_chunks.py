"""Chunks written by workers that hold no lock: what they need to know of an array, and what they report."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from fedcache.errors import InternalError, MachineError
from fedcache.store import chunks as files
from fedcache.store.files import digest_of
from fedcache.store.journal import journal_path, read_journal
from fedcache.store.machine import explain_disk_errors


@dataclass(frozen=True)
class WorkerArray:
    """An array as a worker in another process or on another host writes it: chunk files that nothing refers to yet.

    A worker holds no lock and puts nothing in place: it writes each chunk as a ``.partial`` file and reports its
    checksum. The process that holds the array's lock commits the file; what nobody commits, also of a writer that is
    gone, the next writer removes.
    """

    store: Path  # the store's directory, on a path that all workers share
    key: str  # name of the array
    shape: tuple[int, ...]  # (N, V, D)
    dtype: str  # stored dtype
    chunk_rows: int  # rows per chunk file
    header: str  # digest of the journal's header, so that another array at this path is not taken for this one

    @property
    def path(self) -> Path:
        """The array's directory."""
        return self.store / "features" / self.key

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk's rows; the checksum in its file comes on top."""
        return files.array_bytes((self.chunk_rows, *self.shape[1:]), self.dtype)

    def chunk_file(self, chunk: int) -> Path:
        """Where a chunk lies once it is committed."""
        return files.chunk_path(self.path, chunk, len(self.shape))

    def check(self) -> None:
        """Refuse to write where the writer's journal is not. Raises MachineError."""
        header = read_journal(journal_path(self.store, self.key)).header
        if header is None or digest_of(header) != self.header:
            raise MachineError(
                f"{os.uname().nodename} does not see the store {self.store} that is being written.",
                "The store must lie on a path that all nodes share, e.g. NFS: give it with --store or FEDCACHE_HOME.",
            )

    def prepare(
        self, chunk: int, rows: NDArray[Any], bad: Mapping[int, str] | None
    ) -> tuple[NDArray[Any], dict[int, str]]:
        """A chunk's rows [n, V, D] in the stored dtype, and the reason per bad row among them.

        Raises FedcacheError, as ``ArrayWriter.write``.
        """
        start = chunk * self.chunk_rows
        # The last chunk of an array has the rows that remain; its file is padded to full size when it is written.
        expected = (max(0, min(self.chunk_rows, self.shape[0] - start)), *self.shape[1:])
        if chunk < 0 or rows.shape != expected or not expected[0]:
            raise InternalError(
                f"{self.key}: chunk {chunk} was given shape {rows.shape}, expected {expected}.",
                f"Chunks are numbered 0 to {-(-self.shape[0] // self.chunk_rows) - 1} and have {self.chunk_rows} rows, "
                "the last one the rest.",
            )
        reasons = {int(row): str(why) for row, why in (bad or {}).items() if start <= row < start + expected[0]}
        return files.to_stored_dtype(rows, self.dtype, [row - start for row in reasons], start, self.key), reasons

    def write(self, chunk: int, rows: NDArray[Any], bad: Mapping[int, str] | None = None) -> UncommittedChunk:
        """Write a chunk beside its place, under a name of its own; errors as ``ArrayWriter.write``."""
        values, reasons = self.prepare(chunk, rows, bad)
        place = self.chunk_file(chunk)
        file = place.with_name(f".{place.name}.{os.getpid()}-{secrets.token_hex(6)}.partial")
        with explain_disk_errors(place, self.chunk_bytes):
            crc = files.write_chunk_file(file, values, self.chunk_rows, self.dtype)
        return UncommittedChunk(self.key, chunk, crc, file, reasons)


@dataclass(frozen=True)
class UncommittedChunk:
    """A chunk file that waits to be committed."""

    key: str  # its array
    chunk: int  # its number
    crc: int  # of its rows
    file: Path  # where it lies
    bad: dict[int, str]  # reason per bad row of the store
