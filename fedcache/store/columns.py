"""The columns of ``samples/``: uid, name, label, domain, split and ok of every row, read from disk and verified."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.store import chunks as files
from fedcache.store.journal import journals
from fedcache.store.manifest import COLUMNS, Manifest
from fedcache.store.samples import Samples


def read_samples(store: Path, manifest: Manifest) -> Samples:
    """Every column.

    Raises:
        CorruptionError, for a column that is not the one the manifest lists.
    """
    columns: dict[str, Any] = {key: read_column(store, manifest, key) for key in COLUMNS}
    place = _file(store, "name", 1)
    raw = _verified(store, manifest, "name", place, None)
    try:
        name = files.decode_strings(raw)
    except ValueError as error:
        raise files.damaged("samples/name", place, f"holds no names ({error})") from error
    if len(name) != max(1, manifest.rows):
        raise files.damaged("samples/name", place, f"holds {len(name)} names for {manifest.rows} rows")
    return Samples(name=name[: manifest.rows], classes=manifest.classes, domains=manifest.domains, **columns)


def read_column(store: Path, manifest: Manifest, key: str) -> NDArray[Any]:
    """One column of numbers: [N], or uint8 [N, 16] for ``uid``; errors as ``read_samples``."""
    dtype = COLUMNS[key]
    shape = (max(1, manifest.rows), 16) if key == "uid" else (max(1, manifest.rows),)
    place = _file(store, key, len(shape))
    raw = _verified(store, manifest, key, place, files.array_bytes(shape, dtype))
    return np.frombuffer(raw, np.dtype(dtype).newbyteorder("<")).reshape(shape)[: manifest.rows]


def _file(store: Path, key: str, axes: int) -> Path:
    return files.chunk_path(store / "samples" / key, 0, axes)


def _verified(store: Path, manifest: Manifest, key: str, place: Path, size: int | None) -> bytes:
    """The bytes of a column that is whole and is the one the manifest lists."""
    listed = [manifest.samples[key]]
    if key == "ok":
        # Between the replacement of this column and that of the manifest, a journal vouches for the new one.
        listed += [commit["ok"] for journal in journals(store) for commit in journal.commits]
    raw = files.read_checked(place, None, f"samples/{key}", size=size)
    if files.checksum(raw) not in listed:
        raise files.damaged(f"samples/{key}", place, "is whole but not the column the manifest lists")
    return raw
