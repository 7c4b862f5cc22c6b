"""What a model says of rows: the best classes of each with their probabilities, as lines of a table in a file."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import UsageError, unknown
from fedcache.optional import need_arrow
from fedcache.store.files import write_atomic
from fedcache.visible_text import escape_json, sheet_cell

FORMATS = (".csv", ".jsonl", ".parquet")
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
            return {"name": self.name, "class": None, "probability": None, "top": [], "reason": self.reason}
        top = [[c, p] for c, p in zip(self.classes, self.probabilities, strict=True)]
        return {"name": self.name, "class": self.classes[0], "probability": self.probabilities[0], "top": top,
                "reason": ""}  # fmt: skip


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
    for row, name in enumerate(names):
        if row in reasons or predicted[row] < 0:
            yield Prediction(name, (), (), reasons.get(row, NO_FEATURES))
            continue
        # The predicted class first also where rounding makes another one as probable.
        order = [int(predicted[row])]
        order += [int(c) for c in np.argsort(-ranking[row], kind="stable") if c != predicted[row]]
        chosen = order[: min(top, len(classes))]
        yield Prediction(name, tuple(classes[c] for c in chosen), tuple(float(probability[row, c]) for c in chosen))


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
    """Write rows to a .csv, .jsonl or .parquet file, whole or not at all. Raises as ``check_out``.

    In a .csv no name is a formula or commands a terminal (``sheet_cell``); the others hold names as they are.
    """
    check_out(path)
    rows = [p.to_dict() for p in predictions]
    if path.suffix.lower() == ".jsonl":
        write_atomic(path, b"".join(escape_json(json.dumps(r, ensure_ascii=False)).encode() + b"\n" for r in rows))
        return
    table = [_flat(row, top) for row in rows]
    if path.suffix.lower() == ".parquet":
        import pyarrow as pa
        from pyarrow import parquet

        held = io.BytesIO()
        names = list(_flat({"name": "", "class": None, "probability": None, "top": [], "reason": ""}, top))
        columns = {name: [row[name] for row in table] for name in names}
        text = [name for name in names if not name.startswith("probability")]
        schema = pa.schema([(name, pa.string() if name in text else pa.float64()) for name in names])
        parquet.write_table(pa.table(columns, schema=schema), held)
        write_atomic(path, held.getvalue())
        return
    text_file = io.StringIO(newline="")
    writer = csv.DictWriter(text_file, list(_flat({"name": "", "class": "", "top": [], "reason": ""}, top)))
    writer.writeheader()
    writer.writerows({name: sheet_cell(value) for name, value in row.items()} for row in table)
    write_atomic(path, text_file.getvalue().encode())


def _flat(row: Mapping[str, Any], top: int) -> dict[str, Any]:
    """One column per rank: ``class``, ``probability``, ``class_2``, ..., ``reason``."""
    flat: dict[str, Any] = {"name": row["name"]}
    for rank in range(top):
        end = "" if rank == 0 else f"_{rank + 1}"
        found = row["top"][rank] if rank < len(row["top"]) else (None, None)
        flat[f"class{end}"], flat[f"probability{end}"] = found
    return {**flat, "reason": row["reason"]}
