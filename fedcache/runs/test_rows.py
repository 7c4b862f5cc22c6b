"""Test rows file: how often every test row was classified correctly, sealed, next to a result.

With it two runs are compared over the very same images, by paired differences (``fedcache.report.comparison``).
"""

from __future__ import annotations

import base64
import io
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.runs.directory import DamagedRunError, file_digest

ROWS_FILE = "test-rows.npz"


@dataclass(frozen=True, eq=False)
class TestRows:
    """What one seed says of every test row that was scored; R rows.

    Attributes:
        rows: int64 [R], ascending: their numbers in the store.
        right: int64 [R]: clients whose model was right.
        scored: int64 [R]: clients whose model was scored on the row.
        share: float64 [R]: what the row adds to the mean over clients, sum_i right_i / (n_i M) of the M scored clients
            with n_i scored rows; the sum over rows is that mean.
        weight: float64 [R]: what it would add if all were right; the sum over rows is 1.
    """

    rows: np.ndarray
    right: np.ndarray
    scored: np.ndarray
    share: np.ndarray
    weight: np.ndarray

    __test__ = False  # not a class of tests

    def to_dict(self) -> dict[str, str]:
        """Plain JSON values."""
        return {
            f.name: base64.b64encode(getattr(self, f.name).tobytes()).decode() for f in fields(self)
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, str]) -> TestRows:
        """The inverse of ``to_dict``, on a machine of the same byte order."""
        kinds = {
            f.name: np.float64 if f.name in ("share", "weight") else np.int64 for f in fields(cls)
        }
        return cls(
            **{
                name: np.frombuffer(base64.b64decode(data[name]), kind)
                for name, kind in kinds.items()
            }
        )


def rows_file(seeds: Mapping[int, TestRows | None]) -> bytes | None:
    """The content of ``ROWS_FILE``; None unless every seed has rows. Equal rows give equal bytes."""
    arrays = {}
    for seed, found in seeds.items():
        if found is None:
            return None
        arrays.update({f"{f.name}_{seed}": getattr(found, f.name) for f in fields(found)})
    held = io.BytesIO()
    np.savez_compressed(held, allow_pickle=False, **arrays)
    return held.getvalue()


def test_rows(result: Mapping[str, Any], folder: Path) -> dict[int, TestRows] | None:
    """Those of a stored result, by seed; None for a result without them, as of earlier releases.

    Raises DamagedRunError for a file that is missing or not what was written.
    """
    digest = result.get("files", {}).get(ROWS_FILE)
    if digest is None:
        return None
    path = folder / ROWS_FILE
    try:
        raw = path.read_bytes()
    except OSError:
        raise DamagedRunError(path, "is missing or unreadable") from None
    if file_digest(ROWS_FILE, raw) != digest:
        raise DamagedRunError(path)
    seeds: Sequence[int] = result["seeds"]
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as held:
            return {
                s: TestRows(
                    **{f.name: _array(held.read(f"{f.name}_{s}.npy")) for f in fields(TestRows)}
                )
                for s in seeds
            }
    except (KeyError, ValueError, zipfile.BadZipFile) as error:
        raise DamagedRunError(path) from error


def _array(raw: bytes) -> np.ndarray:
    """What the bytes of an .npy file hold, as ``np.load`` does, which takes three times as long for a few rows."""
    # version 1.0: magic, version, length of the header, header
    start = 10 + int.from_bytes(raw[8:10], "little")
    shape, kind = _header(raw[:start])
    return np.frombuffer(raw, kind, offset=start).reshape(shape)


@lru_cache(maxsize=64)
def _header(raw: bytes) -> tuple[tuple[int, ...], np.dtype[Any]]:
    file = io.BytesIO(raw)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("not of version 1.0")
    shape, _, kind = np.lib.format.read_array_header_1_0(file)
    return shape, kind
