"""Files of a result: values of single clients (many are in a parquet file, few in ``result.json``), and test rows.

A result has the digests of these files, so a damaged or changed file is never read.
"""

from __future__ import annotations

import base64
import io
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.federate.partition.client_table import LazySequence
from fedcache.optional import need_arrow
from fedcache.runs.directory import DamagedRunError, file_digest

CLIENTS_IN_RESULT = 1_000
"""Maximum number of clients for which ``result.json`` has a value per client; other results have a parquet file."""

CLIENTS_FILE = "clients.parquet"


def check_recordable(clients: int) -> None:
    """Raise MachineError before training if the result of many clients could not be written, for lack of pyarrow."""
    if clients > CLIENTS_IN_RESULT:
        need_arrow(
            f"The result of {clients:,} clients (a parquet file above {CLIENTS_IN_RESULT:,})"
        )


@dataclass(frozen=True, eq=False)
class ClientColumns:
    """One entry per client, in client order."""

    names: Sequence[str]
    # float64 [M], means over seeds; NaN for a client that was not scored in every seed
    accuracy: np.ndarray
    classes_owned: np.ndarray  # float64 [M], classes among the training rows, means over seeds
    # float64 [seeds, M], accuracy; [0, M] for a small result, which has only means
    per_seed: np.ndarray
    # float64 [M], like ``accuracy`` on validation rows; None without such rows
    validation: np.ndarray | None = None

    @property
    def scored(self) -> np.ndarray:
        """Accuracies of the scored clients, float64."""
        known: np.ndarray = self.accuracy[~np.isnan(self.accuracy)]
        return known

    def accuracy_of(self, name: str) -> float | None:
        """Accuracy of one client; None for an unknown name and for a client that was not scored."""
        place = next((i for i, known in enumerate(self.names) if known == name), None)
        if place is None or np.isnan(self.accuracy[place]):
            return None
        return float(self.accuracy[place])

    def to_parquet(self, seeds: Sequence[int]) -> bytes:
        """The content of ``CLIENTS_FILE``: client, accuracy, classes_owned, and the accuracy of every seed."""
        import pyarrow as pa
        from pyarrow import parquet

        def nan_as_null(values: np.ndarray) -> Any:
            return pa.array(values, pa.float64(), mask=np.isnan(values))

        columns = {
            "client": pa.array(list(self.names), pa.string()),
            "accuracy": nan_as_null(self.accuracy),
            "classes_owned": pa.array(self.classes_owned, pa.float64()),
        }
        for seed, values in zip(seeds, self.per_seed, strict=True):
            columns[f"accuracy_seed_{seed}"] = nan_as_null(values)
        if self.validation is not None:
            columns["validation"] = nan_as_null(self.validation)
        buffer = io.BytesIO()
        parquet.write_table(pa.table(columns), buffer, compression="zstd")
        return buffer.getvalue()


class _ColumnOfNames(LazySequence[str]):
    """A column of strings of a pyarrow table. Strings are made on request, because a table may have a million rows."""

    def __init__(self, column: Any) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    def at(self, i: int) -> str:
        """The string of one row."""
        return str(self._column[i].as_py())

    def __iter__(self) -> Iterator[str]:
        return iter(self._column.to_pylist())

    def __eq__(self, other: object) -> bool:
        """Whether another column has the same strings in the same order."""
        if isinstance(other, _ColumnOfNames):
            return bool(self._column.equals(other._column))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]


def client_columns(result: Mapping[str, Any], folder: Path) -> ClientColumns:
    """The columns of a stored result in the directory ``folder``.

    Raises DamagedRunError for a file that is missing or was changed.
    """
    validation = None
    files = result.get("files", {})
    if CLIENTS_FILE not in files:
        accuracy = np.array(result["accuracy"]["per_client"], np.float64)  # None becomes NaN
        owned = np.full(len(accuracy), np.nan)
        if "classes_owned" in result:  # not in results of the earliest releases
            owned = np.array(result["classes_owned"]["per_client"], np.float64)
        per_seed = np.empty((0, len(accuracy)))
        stored = result.get("validation")
        if stored is not None:
            validation = np.array(stored["per_client"], np.float64)
        return ClientColumns(result["clients"], accuracy, owned, per_seed, validation)
    path = folder / CLIENTS_FILE
    raw = _unchanged(path, files[CLIENTS_FILE])
    need_arrow(str(path))
    from pyarrow import parquet

    table = parquet.read_table(io.BytesIO(raw))

    def numbers(name: str) -> np.ndarray:
        column = table[name].to_numpy(zero_copy_only=False)
        values: np.ndarray = column.astype(np.float64, copy=False)
        return values

    of_seeds = [numbers(name) for name in table.column_names if name.startswith("accuracy_seed_")]
    if "validation" in table.column_names:
        validation = numbers("validation")
    return ClientColumns(
        _ColumnOfNames(table["client"]),
        numbers("accuracy"),
        numbers("classes_owned"),
        np.stack(of_seeds),
        validation,
    )


def _unchanged(path: Path, digest: str) -> bytes:
    """The content of a result file. Raises DamagedRunError if it is missing or does not have the digest."""
    try:
        raw = path.read_bytes()
    except OSError:
        raise DamagedRunError(path, "is missing or unreadable") from None
    if file_digest(path.name, raw) != digest:
        raise DamagedRunError(path)
    return raw


# The file of test rows: how often every test row was classified correctly. It is sealed and next to a result.


ROWS_FILE = "test-rows.npz"


@dataclass(frozen=True, eq=False)
class TestRows:
    """Outcomes of one seed for every scored test row; R rows.

    Attributes:
        rows: int64 [R], ascending: numbers of the rows in the store.
        right: int64 [R]: number of clients whose model was right.
        scored: int64 [R]: number of clients whose model was scored on the row.
        share: float64 [R]: part of the row in the mean over clients, sum_i right_i / (n_i M) over the M scored clients
            with n_i scored rows. The sum over rows is that mean.
        weight: float64 [R]: the part if all models were right. The sum over rows is 1.
    """

    rows: np.ndarray
    right: np.ndarray
    scored: np.ndarray
    share: np.ndarray
    weight: np.ndarray

    __test__ = False  # not a class of tests

    def to_dict(self) -> dict[str, str]:
        """Plain JSON values."""
        plain = {}
        for name, values in vars(self).items():
            plain[name] = base64.b64encode(values.tobytes()).decode()
        return plain

    @classmethod
    def from_dict(cls, data: Mapping[str, str]) -> TestRows:
        """The inverse of ``to_dict``, on a machine of the same byte order."""
        arrays = {}
        for field in fields(cls):
            kind: Any = np.int64
            if field.name in ("share", "weight"):
                kind = np.float64
            arrays[field.name] = np.frombuffer(base64.b64decode(data[field.name]), kind)
        return cls(**arrays)


def rows_file(seeds: Mapping[int, TestRows | None]) -> bytes | None:
    """The content of ``ROWS_FILE``; None unless every seed has rows. Equal rows give equal bytes."""
    arrays = {}
    for seed, rows in seeds.items():
        if rows is None:
            return None
        for name, values in vars(rows).items():
            arrays[f"{name}_{seed}"] = values
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def test_rows(result: Mapping[str, Any], folder: Path) -> dict[int, TestRows] | None:
    """Test rows of a stored result, by seed; None for a result without them, such as one of an earlier release.

    Raises DamagedRunError for a file that is missing or was changed.
    """
    digest = result.get("files", {}).get(ROWS_FILE)
    if digest is None:
        return None
    path = folder / ROWS_FILE
    raw = _unchanged(path, digest)
    seeds: Sequence[int] = result["seeds"]
    names = [field.name for field in fields(TestRows)]
    by_seed = {}
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            for seed in seeds:
                arrays = {name: _array(archive.read(f"{name}_{seed}.npy")) for name in names}
                by_seed[seed] = TestRows(**arrays)
    except (KeyError, ValueError, zipfile.BadZipFile) as error:
        raise DamagedRunError(path) from error
    return by_seed


def _array(raw: bytes) -> np.ndarray:
    """The array of an .npy file's bytes. For a few rows this is three times as fast as ``np.load``."""
    # Parts of version 1.0 of the format: magic, version, length of the header, header, values.
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


def is_private(result: Mapping[str, Any]) -> bool:
    """Whether a result promises differential privacy: with noise, and not as a simulation."""
    cost = result.get("trust", {}).get("privacy") or {}
    return bool(cost.get("noise")) and not cost.get("simulation")


def has_secret_times(result: Mapping[str, Any]) -> bool:
    """Whether a result is private and its epsilon assumes that participants of rounds stay secret."""
    cost = result.get("trust", {}).get("privacy") or {}
    return is_private(result) and cost.get("participants") == "secret"
