"""Columns of clients in a result: in ``result.json`` for few clients, in a parquet file for many.

The file is one of those whose digests a result holds, so it is read whole, unchanged, or not at all.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.federate.partition.row_lists import MadeWhenAsked
from fedcache.optional import need_arrow
from fedcache.runs.directory import DamagedRunError, file_digest

CLIENTS_IN_RESULT = 1_000
"""Clients up to which ``result.json`` holds a number for each."""

CLIENTS_FILE = "clients.parquet"


def check_recordable(clients: int) -> None:
    """Refuse before training what could not be written after it. Raises MachineError for many without pyarrow."""
    if clients > CLIENTS_IN_RESULT:
        need_arrow(
            f"The result of {clients:,} clients (a parquet file above {CLIENTS_IN_RESULT:,})"
        )


@dataclass(frozen=True, eq=False)
class ClientColumns:
    """One entry per client, in client order."""

    names: Sequence[str]
    # float64 [M], means over seeds; NaN for a client that was not scored in every one of them
    accuracy: np.ndarray
    classes_owned: np.ndarray  # float64 [M], classes among the training rows, means over seeds
    # float64 [seeds, M], accuracy; of a small result, which holds means alone, [0, M]
    per_seed: np.ndarray
    validation: np.ndarray | None = (
        None  # float64 [M], as ``accuracy`` on the rows to choose by; None without such rows
    )

    @property
    def scored(self) -> np.ndarray:
        """float64: the accuracies that are known."""
        known: np.ndarray = self.accuracy[~np.isnan(self.accuracy)]
        return known

    def accuracy_of(self, name: str) -> float | None:
        """Of one client; None for a name that is not there, and a client that was not scored."""
        place = next((i for i, known in enumerate(self.names) if known == name), None)
        if place is None or np.isnan(self.accuracy[place]):
            return None
        return float(self.accuracy[place])

    def to_parquet(self, seeds: Sequence[int]) -> bytes:
        """The content of ``CLIENTS_FILE``: client, accuracy, classes_owned, and the accuracy of every seed."""
        import pyarrow as pa
        from pyarrow import parquet

        def known(values: np.ndarray) -> Any:
            return pa.array(values, pa.float64(), mask=np.isnan(values))

        columns = {
            "client": pa.array(list(self.names), pa.string()),
            "accuracy": known(self.accuracy),
            "classes_owned": pa.array(self.classes_owned, pa.float64()),
            **{
                f"accuracy_seed_{seed}": known(values)
                for seed, values in zip(seeds, self.per_seed, strict=True)
            },
            **({} if self.validation is None else {"validation": known(self.validation)}),
        }
        held = io.BytesIO()
        parquet.write_table(pa.table(columns), held, compression="zstd")
        return held.getvalue()


class _ColumnOfNames(MadeWhenAsked[str]):
    """A column of strings of a table of pyarrow, whose million need not be objects for a few to be shown."""

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
    """Those of a stored result, whose directory is ``folder``.

    Raises DamagedRunError for a file that is missing or not what was written.
    """
    if CLIENTS_FILE not in result.get("files", {}):
        accuracy = np.array(result["accuracy"]["per_client"], np.float64)  # None becomes NaN
        owned = np.full(len(accuracy), np.nan)
        if "classes_owned" in result:  # the earliest releases did not count them
            owned = np.array(result["classes_owned"]["per_client"], np.float64)
        held = result.get("validation")
        validation = None
        if held is not None:
            validation = np.array(held["per_client"], np.float64)
        return ClientColumns(
            result["clients"], accuracy, owned, np.empty((0, len(accuracy))), validation
        )
    path = folder / CLIENTS_FILE
    try:
        raw = path.read_bytes()
    except OSError:
        raise DamagedRunError(path, "is missing or unreadable") from None
    if file_digest(CLIENTS_FILE, raw) != result["files"][CLIENTS_FILE]:
        raise DamagedRunError(path)
    need_arrow(str(path))
    from pyarrow import parquet

    table = parquet.read_table(io.BytesIO(raw))

    def numbers(name: str) -> np.ndarray:
        found: np.ndarray = (
            table[name].to_numpy(zero_copy_only=False).astype(np.float64, copy=False)
        )
        return found

    per_seed = [numbers(name) for name in table.column_names if name.startswith("accuracy_seed_")]
    validation = None
    if "validation" in table.column_names:
        validation = numbers("validation")
    return ClientColumns(
        _ColumnOfNames(table["client"]),
        numbers("accuracy"),
        numbers("classes_owned"),
        np.stack(per_seed),
        validation,
    )
