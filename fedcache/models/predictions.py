"""Predictions: the best classes of each row with their probabilities, and the files that hold them."""

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
from fedcache.parsing import escape_json, sheet_cell
from fedcache.store.lock import need_folder, output_file

FORMATS = (".csv", ".jsonl", ".parquet")
ROW_GROUP = 1 << 16
"""Number of rows of a .parquet file that are written at once."""
NO_FEATURES = "some of its features are not finite"
"""Reason that is given for a row that cannot be classified because of its features."""


@dataclass(frozen=True)
class Prediction:
    """The prediction for one row."""

    name: str  # of the image, or of the row
    classes: tuple[str, ...]  # the best first; () for a row that could not be read
    probabilities: tuple[float, ...]  # of these classes
    reason: str = ""  # why the row could not be read

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; ``top`` has the best classes with their probabilities."""
        top = [[c, p] for c, p in zip(self.classes, self.probabilities, strict=True)]
        best: list[Any] = [None, None]
        if top:
            best = top[0]
        return {
            "name": self.name,
            "class": best[0],
            "probability": best[1],
            "top": top,
            "reason": self.reason,
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
        names: of the N rows.
        classes: C names.
        predicted: [N], -1 for a row without scores.
        probability: [N, C].
        ranking: [N, C], the order of the classes: higher is more probable. It also orders classes whose probabilities
            are rounded to 0.
        top: number of classes, from 1 to C.
        reasons: number of a row -> why it has no scores.
    """
    # A row without scores (-1) takes class 0 here, which is not used below.
    best_class = np.maximum(predicted, 0)[:, None]
    order = best_class
    if top > 1:
        # The predicted class comes first, even if rounding makes another class equally probable.
        falling = np.negative(ranking)
        np.put_along_axis(falling, best_class, -np.inf, 1)
        order = np.argsort(falling, 1, kind="stable")[:, :top]
    chosen = order.tolist()
    probabilities = np.take_along_axis(probability, order, 1).tolist()
    for row, name in enumerate(names):
        if row in reasons or predicted[row] < 0:
            yield Prediction(name, (), (), reasons.get(row, NO_FEATURES))
        else:
            best = [classes[c] for c in chosen[row]]
            yield Prediction(name, tuple(best), tuple(probabilities[row]))


def check_out(path: Path) -> None:
    """Refuse an unknown file ending and a folder that cannot be written, before anything is computed.

    Raises UsageError.
    """
    if path.suffix.lower() not in FORMATS:
        raise unknown("file ending", path.suffix, FORMATS)
    if path.is_dir():
        raise UsageError(f"{path} is a directory.", f"-o {path / 'classes.csv'}")
    need_folder(path)
    if path.suffix.lower() == ".parquet":
        need_arrow(str(path))


def write_predictions(path: Path, predictions: Iterable[Prediction], top: int) -> None:
    """Write rows as they come to a .csv, .jsonl or .parquet file, whole or not at all. Raises as ``check_out``.

    Names in a .csv are escaped so that no program runs them as a formula (``sheet_cell``); the other files hold names
    unchanged.
    """
    check_out(path)
    columns = list(_flat({"name": "", "top": [], "reason": ""}, top))  # the same for every row
    with output_file(path) as file:
        if path.suffix.lower() == ".parquet":
            _write_parquet(file, columns, predictions, top)
        elif path.suffix.lower() == ".jsonl":
            for row in predictions:
                line = escape_json(json.dumps(row.to_dict(), ensure_ascii=False))
                file.write(line.encode() + b"\n")
        else:
            text = io.TextIOWrapper(file, "utf-8", newline="")
            writer = csv.writer(text)
            writer.writerow(columns)
            for row in predictions:
                cells = _flat(row.to_dict(), top).values()
                writer.writerow([sheet_cell(cell) for cell in cells])
            text.detach()  # flushes, and leaves the file open for ``output_file``


def _write_parquet(
    file: BinaryIO, columns: Sequence[str], predictions: Iterable[Prediction], top: int
) -> None:
    """Write row groups of at most ``ROW_GROUP`` rows."""
    import pyarrow as pa
    from pyarrow import parquet

    types = []
    for column in columns:
        kind = pa.string()
        if column.startswith("probability"):
            kind = pa.float64()
        types.append((column, kind))
    schema = pa.schema(types)
    flat = (_flat(row.to_dict(), top) for row in predictions)
    with parquet.ParquetWriter(file, schema) as writer:
        while group := list(islice(flat, ROW_GROUP)):
            writer.write_table(pa.Table.from_pylist(group, schema))


def _flat(row: Mapping[str, Any], top: int) -> dict[str, Any]:
    """A row with columns for each rank: ``name``, ``class``, ``probability``, ``class_2``, ..., ``reason``."""
    flat = {"name": row["name"]}
    # A row that could not be read has no classes.
    empty = [(None, None)] * (top - len(row["top"]))
    for rank, (best, probability) in enumerate([*row["top"], *empty], 1):
        end = f"_{rank}"
        if rank == 1:
            end = ""
        flat[f"class{end}"] = best
        flat[f"probability{end}"] = probability
    flat["reason"] = row["reason"]
    return flat
