"""Predictions: the best classes of each row with their probabilities, as lines of a table in a file."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import UsageError, unknown
from fedcache.optional import need_arrow
from fedcache.store.outputs import output_file
from fedcache.visible_text import escape_json, sheet_cell

FORMATS = (".csv", ".jsonl", ".parquet")
ROW_GROUP = 1 << 16
"""Rows of a .parquet file that are written at once."""
NO_FEATURES = "its features are not all finite numbers"
"""Why a row of a file has no class."""


@dataclass(frozen=True)
class Prediction:
    """One row."""

    name: str  # of the image, or of the row
    classes: tuple[str, ...]  # the best ones, the best first; () for a row that could not be read
    probabilities: tuple[float, ...]  # of these classes
    reason: str = ""  # why it could not be read

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; ``top`` has the best classes with their probabilities."""
        if self.reason:
            return {
                "name": self.name,
                "class": None,
                "probability": None,
                "top": [],
                "reason": self.reason,
            }
        top = [[c, p] for c, p in zip(self.classes, self.probabilities, strict=True)]
        return {
            "name": self.name,
            "class": self.classes[0],
            "probability": self.probabilities[0],
            "top": top,
            "reason": "",
        }


def best_of(
    names: Sequence[str],
    classes: Sequence[str],
    predicted: NDArray[np.int64],
    probability: NDArray[np.float64],
    ranking: NDArray[np.float64],
    top: int,
    reasons: Mapping[int, str],
) -> Iterator[Prediction]:
    """The ``top`` classes of each row, ``predicted`` first.

    Args:
        names: N of them.
        classes: C names.
        predicted: [N], -1 for a row without scores.
        probability: [N, C].
        ranking: [N, C], the higher the more probable, also of classes whose probability is rounded to 0.
        top: how many, at least 1; no more than there are classes.
        reasons: why a row has no scores, by its number.
    """
    told = np.maximum(predicted, 0)[:, None]
    # The predicted class first also where rounding makes another one as probable.
    behind = np.array(-ranking)
    np.put_along_axis(behind, told, -np.inf, 1)
    order = told
    if top > 1:
        order = np.argsort(behind, 1, kind="stable")[:, :top]
    chosen = order.tolist()
    shares = np.take_along_axis(probability, order, 1).tolist()
    for row, name in enumerate(names):
        if row in reasons or predicted[row] < 0:
            yield Prediction(name, (), (), reasons.get(row, NO_FEATURES))
        else:
            yield Prediction(name, tuple([classes[c] for c in chosen[row]]), tuple(shares[row]))


def check_out(path: Path) -> None:
    """Refuse, before anything is computed, an ending that no writer knows and a place to which none can write.

    Raises UsageError.
    """
    if path.suffix.lower() not in FORMATS:
        raise unknown("file ending", path.suffix, FORMATS)
    if path.is_dir():
        raise UsageError(f"{path} is a directory.", f"-o {path / 'classes.csv'}")
    if not path.parent.is_dir():
        raise UsageError(f"The directory {path.parent} does not exist.", f"mkdir -p {path.parent}")
    if path.suffix.lower() == ".parquet":
        need_arrow(str(path))


def write_predictions(path: Path, predictions: Iterable[Prediction], top: int) -> None:
    """Write rows as they come to a .csv, .jsonl or .parquet file, whole or not at all. Raises as ``check_out``.

    In a .csv no name is a formula or commands a terminal (``sheet_cell``); the others hold names as they are.
    """
    check_out(path)
    columns = list(_flat({"name": "", "top": [], "reason": ""}, top))
    with output_file(path) as file:
        if path.suffix.lower() == ".parquet":
            _write_parquet(file, columns, predictions, top)
        elif path.suffix.lower() == ".jsonl":
            for row in predictions:
                file.write(
                    escape_json(json.dumps(row.to_dict(), ensure_ascii=False)).encode() + b"\n"
                )
        else:
            text = io.TextIOWrapper(file, "utf-8", newline="")
            writer = csv.writer(text)
            writer.writerow(columns)
            writer.writerows(
                [sheet_cell(v) for v in _flat(row.to_dict(), top).values()] for row in predictions
            )
            text.detach()  # which leaves the file to whoever opened it, with all that was written


def _write_parquet(
    file: BinaryIO, columns: Sequence[str], predictions: Iterable[Prediction], top: int
) -> None:
    """Row group by row group."""
    import pyarrow as pa
    from pyarrow import parquet

    schema = pa.schema(
        [(c, pa.float64() if c.startswith("probability") else pa.string()) for c in columns]
    )
    rest = iter(predictions)
    with parquet.ParquetWriter(file, schema) as writer:
        while group := [_flat(row.to_dict(), top) for row in islice(rest, ROW_GROUP)]:
            writer.write_table(pa.Table.from_pylist(group, schema))


def _flat(row: Mapping[str, Any], top: int) -> dict[str, Any]:
    """One column per rank: ``class``, ``probability``, ``class_2``, ..., ``reason``."""
    flat: dict[str, Any] = {"name": row["name"]}
    for rank in range(top):
        end = ""
        if rank != 0:
            end = f"_{rank + 1}"
        if rank < len(row["top"]):
            found = row["top"][rank]
        else:
            found = (None, None)
        flat[f"class{end}"], flat[f"probability{end}"] = found
    return {**flat, "reason": row["reason"]}
