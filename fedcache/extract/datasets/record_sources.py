"""Images that are values of a column: encoded bytes in parquet or Arrow files, read a few rows at a time.

A row group of a parquet file is read from its beginning in small batches, whatever its size, so that a file that was
written as one row group of gigabytes needs the memory of a few images. Arrow files are mapped.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.extract.datasets.archives import open_as_listed
from fedcache.extract.datasets.dataset import Source
from fedcache.extract.image_files import BadImage

BATCH = 32
"""Rows of a parquet file that are decoded at a time."""

KEPT = 4
"""Batches that a process keeps: threads may be a batch apart."""

WARM = 8
"""Files of a dataset that a process holds open."""


def image_bytes(values: Any, at: int) -> bytes:
    """An encoded image of a column as ``only_bytes`` makes it; raises ``BadImage`` for none."""
    found = values[at].as_py()
    if not isinstance(found, bytes):
        raise BadImage("its row holds no image, or only the path of one")
    return found


def only_bytes(values: Any) -> Any:
    """A column of bytes, of one of bytes or of {bytes, path}, which is how Hugging Face writes images."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_struct(values.type):
        return pc.struct_field(values, "bytes")
    return values


class ParquetRows:
    """The images of a parquet file."""

    def __init__(
        self, path: Path, stamp: tuple[int, int], column: str, groups: tuple[int, ...]
    ) -> None:
        self.path = path
        self.stamp = stamp
        self.column = column  # of bytes, or of {bytes, path}, of which the bytes are read
        self.groups = groups  # rows of each row group
        self._starts = np.cumsum([0, *groups])
        self._lock = threading.Lock()
        self._file: Any = None
        self._batches: Any = None  # those that follow, of row group ``_group``
        self._group, self._at = -1, 0  # ``_at`` is the first row that they hold
        self._kept: list[tuple[int, Any]] = []  # (first row, values)
        self._broken: dict[int, int] = {}  # row group -> first row that could not be read

    def read(self, row: int) -> bytes:
        """The encoded image of a row; raises ``BadImage``."""
        with self._lock:
            for first, values in self._kept:
                if first <= row < first + len(values):
                    return image_bytes(values, row - first)
            first, values = self._find(row)
            return image_bytes(values, row - first)

    def _find(self, row: int) -> tuple[int, Any]:
        """The batch that holds a row, and its first row; raises ``BadImage``."""
        import pyarrow as pa

        group = int(np.searchsorted(self._starts, row, side="right")) - 1
        if row >= self._broken.get(group, row + 1):
            raise BadImage("its data in the file is damaged")
        try:
            if group != self._group or row < self._at:
                self._batches = self._open().iter_batches(
                    BATCH, row_groups=[group], columns=[self.column]
                )
                self._group, self._at = group, int(self._starts[group])
            for batch in self._batches:
                first = self._at
                self._at = self._at + len(batch)
                self._kept = [*self._kept[1 - KEPT :], (first, only_bytes(batch.column(0)))]
                if row < self._at:
                    return self._kept[-1]
        except (pa.ArrowException, OSError):
            pass
        # Looking again would begin at the start of the group for every row that follows.
        self._broken[group], self._group = self._at, -1
        raise BadImage("its data in the file is damaged")

    def _open(self) -> Any:
        if self._file is None:
            import pyarrow.parquet as pq

            os.close(open_as_listed(self.path, self.stamp))  # raises when it has changed
            self._file = pq.ParquetFile(
                self.path, buffer_size=1 << 20, page_checksum_verification=True
            )
        return self._file

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("path", "stamp", "column", "groups")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


class ArrowRows:
    """The images of an Arrow file or stream, which is mapped."""

    def __init__(self, path: Path, stamp: tuple[int, int], column: str) -> None:
        self.path = path
        self.stamp = stamp
        self.column = column
        self._values: Any = None
        self._lock = threading.Lock()

    def read(self, row: int) -> bytes:
        """The encoded image of a row; raises ``BadImage``."""
        with self._lock:
            if self._values is None:
                os.close(open_as_listed(self.path, self.stamp))
                self._values = only_bytes(open_arrow(self.path).column(self.column))
        return image_bytes(self._values, row)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("path", "stamp", "column")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def open_arrow(path: Path) -> Any:
    """The table of an Arrow file or stream, mapped and not read. Raises what pyarrow does for a damaged one."""
    import pyarrow as pa

    mapped = pa.memory_map(str(path))
    if mapped.read(6) == b"ARROW1":
        return pa.ipc.open_file(mapped).read_all()
    mapped.seek(0)
    return pa.ipc.open_stream(mapped).read_all()


class Shards:
    """Files that follow one another, of which a process holds a few open."""

    def __init__(self, sources: Sequence[Source], counts: Sequence[int]) -> None:
        self.sources, self.counts = tuple(sources), tuple(counts)  # of each file, and its rows
        self._starts = np.cumsum([0, *counts])
        self._warm: dict[int, Source] = {}
        self._lock = threading.Lock()

    def read(self, row: int) -> Any:
        """The image of a row; raises ``BadImage``."""
        which = int(np.searchsorted(self._starts, row, side="right")) - 1
        with self._lock:
            source = self._warm.pop(which, None)
            if source is None:
                # a copy opens the file anew, and closes it when it is dropped
                source = copy.copy(self.sources[which])
            while len(self._warm) >= WARM:
                del self._warm[next(iter(self._warm))]  # the one used longest ago
            self._warm[which] = source
        return source.read(row - int(self._starts[which]))

    def __getstate__(self) -> dict[str, Any]:
        return {"sources": self.sources, "counts": self.counts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]
