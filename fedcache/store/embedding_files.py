"""Reading a file of embeddings: what its columns mean, and what is wrong with them in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import CorruptionError, FedcacheError, UsageError, unknown
from fedcache.store.import_export_formats import READERS

FEATURES = ("features", "embeddings", "X", "x")
LABELS = ("labels", "label", "y")
SPLITS = ("train", "test", "validation")


@dataclass
class Embeddings:
    """What a file holds.

    Attributes:
        features: [N, V, D] per backbone name.
        labels: int [N], -1 unknown.
        domains: int [N].
        splits: int [N], 0 train, 1 test, 2 validation; None when the file does not say.
        names: N names.
        classes: class names.
        domain_names: domain names.
        texts: [C, D] per backbone name, features of the class names.
    """

    features: dict[str, NDArray[Any]]
    labels: NDArray[np.int32]
    domains: NDArray[np.int16]
    splits: NDArray[np.uint8] | None
    names: tuple[str, ...]
    classes: tuple[str, ...]
    domain_names: tuple[str, ...]
    texts: dict[str, NDArray[np.float32]] = field(default_factory=dict)


def read_embeddings(path: Path) -> Embeddings:
    """Read a file of embeddings.

    Keys: ``features/<name>``, or one of features, embeddings, X; labels, label or y; and domain, split, name, classes,
    domains, ``text/<name>`` where given. Without labels every row is -1.

    Raises:
        UsageError, for a missing file, an unknown ending, a pickle, or columns that do not fit.
    """
    if not path.is_file():
        raise UsageError(f"{path} is not a file.", f"fedcache ingest FILE --name NAME   takes {', '.join(READERS)}")
    ending = path.suffix.lower()
    if ending not in READERS:
        raise unknown("file ending", path.suffix, READERS)
    try:
        raw = READERS[ending](path)
        raw = {key: np.char.decode(v, "utf-8") if v.dtype.kind == "S" else v for key, v in raw.items()}
    except FedcacheError:
        raise
    except Exception as error:  # the formats' libraries raise their own kinds for damaged files
        raise UsageError(
            f"{path} could not be read as {path.suffix}: {type(error).__name__}: {str(error)[:160]}",
            "Object arrays and pickles are never read; write plain numbers.",
        ) from error
    return assemble(path, raw)


def assemble(path: Path, raw: dict[str, Any]) -> Embeddings:
    """What columns mean, by the names that ``read_embeddings`` lists; ``path`` is only named in messages.

    Raises:
        UsageError, for columns that do not fit.
    """
    features: dict[str, NDArray[Any]] = {}
    for key, values in raw.items():
        name = key.removeprefix("features/") if key.startswith("features/") else path.stem if key in FEATURES else None
        if name is None:
            continue
        if values.dtype.kind != "f" or values.ndim not in (2, 3) or not all(values.shape[1:]):
            raise UsageError(
                f"{path}: {key} is {values.dtype} with shape {values.shape}.",
                "Features are floats [N, D] or [N, V, D], D at least 1; numpy: .astype('float32').",
            )
        if name in features:
            raise UsageError(
                f"{path}: {key} and another column are both features of {name!r}.",
                "Name each features/<backbone>, or leave one out.",
            )
        features[name] = values[:, None] if values.ndim == 2 else values
    if not features:
        raise UsageError(
            f"{path} has no features; it has {', '.join(sorted(raw)) or 'nothing'}.",
            "Name them features/<backbone>, or features, embeddings or X; in parquet that is one column of lists.",
        )
    rows = {len(v) for v in features.values()}
    (count,) = rows if len(rows) == 1 else (0,)
    if not count:
        raise UsageError(
            f"{path} has features of {' and '.join(map(str, sorted(rows)))} rows.", "All need the same, at least 1."
        )
    labels, classes = _codes(path, raw, LABELS, "classes", count, unknown_code=-1)
    if twice := sorted({c for c, n in Counter(classes).items() if n > 1}):
        raise UsageError(f"{path}: the class name {twice[0]!r} is there twice.", "Give every class a name of its own.")
    domains, domain_names = _codes(path, raw, ("domain",), "domains", count, unknown_code=0)
    splits = _splits(path, raw, count)
    names = raw.get("name")
    if names is not None and names.shape != (count,):
        raise UsageError(f"{path}: name has shape {names.shape} for {count} rows.", "Give one name per row, or none.")
    width = len(str(count - 1))
    words = tuple(map(str, names)) if names is not None else tuple(f"{i:0{width}d}" for i in range(count))
    texts = _texts(path, raw, features)
    for name, matrix in texts.items():
        if "classes" not in raw and all(c.isdigit() for c in classes) and len(classes) < len(matrix):
            classes = tuple(str(i) for i in range(len(matrix)))  # labels are codes, or absent: the text says how many
        if len(matrix) != len(classes):
            raise UsageError(
                f"{path}: text/{name} has {len(matrix)} rows for {len(classes)} classes.",
                "Give one row per class, in the order of classes.",
            )
    return Embeddings(features, labels, domains, splits, words, classes, domain_names or ("all",), texts)


def _texts(path: Path, raw: dict[str, Any], features: dict[str, NDArray[Any]]) -> dict[str, NDArray[np.float32]]:
    """``text/<name>`` of backbones of the file, or ``text`` of its only one, as unit rows."""
    found: dict[str, NDArray[np.float32]] = {}
    for key, values in raw.items():
        if key != "text" and not key.startswith("text/"):
            continue
        name = key.removeprefix("text/") if key != "text" else next(iter(features))
        if name not in features or (key == "text" and len(features) > 1):
            raise UsageError(
                f"{path}: {key} belongs to none of the features {', '.join(features)}.",
                f"Name it text/{next(iter(features))}.",
            )
        width = features[name].shape[2]
        if values.dtype.kind != "f" or values.ndim != 2 or values.shape[1] != width:
            raise UsageError(
                f"{path}: {key} is {values.dtype} with shape {values.shape}, expected floats [classes, {width}].",
                "Text features are as wide as the features they go with.",
            )
        norm = np.linalg.norm(values.astype(np.float64), axis=1, keepdims=True)
        if not np.all(np.isfinite(norm) & (norm > 0)):
            row = int(np.flatnonzero(~(np.isfinite(norm) & (norm > 0)))[0])
            raise CorruptionError(
                f"{path}: row {row} of {key} is zero or not finite.", "Compute these text features again."
            )
        found[name] = (values / norm).astype(np.float32)
    return found


def _codes(
    path: Path, raw: dict[str, Any], keys: Sequence[str], names_key: str, count: int, *, unknown_code: int
) -> tuple[Any, tuple[str, ...]]:
    """A column of integers or words as codes, and the names of the codes."""
    key = next((k for k in keys if k in raw), None)
    named = tuple(map(str, raw[names_key].ravel())) if names_key in raw else ()
    if key is None:
        return np.full(count, unknown_code, np.int32), named
    values = raw[key]
    if values.shape != (count,) or values.dtype.kind not in "iuUS":
        raise UsageError(
            f"{path}: {key} is {values.dtype} with shape {values.shape}, expected {count} integers or words.",
            "Give one per row; numpy: .astype(int), or .argmax(1) of one-hot rows.",
        )
    if values.dtype.kind in "US":
        found = sorted({str(v) for v in values})
        order = {name: i for i, name in enumerate(named or found)}
        missing = [n for n in found if n not in order]
        if missing:
            raise UsageError(f"{path}: {key} {missing[0]!r} is not in {names_key}.", "Add its name.")
        return np.array([order[str(v)] for v in values], np.int32), tuple(order)
    codes = values.astype(np.int64)
    top = int(codes.max())
    if int(codes.min()) < min(0, unknown_code) or (named and top >= len(named)) or top > 10**6:
        raise UsageError(
            f"{path}: {key} runs from {codes.min()} to {top}" + (f" with {len(named)} {names_key}." if named else "."),
            f"Codes run from {unknown_code} upwards, one name each.",
        )
    return codes.astype(np.int32), named or tuple(str(i) for i in range(top + 1))


def _splits(path: Path, raw: dict[str, Any], count: int) -> Any:
    if "split" not in raw:
        return None
    values = raw["split"]
    if values.shape == (count,) and values.dtype.kind in "US" and {str(v) for v in values} <= {*SPLITS, "val"}:
        return np.array([{"train": 0, "test": 1}.get(str(v), 2) for v in values], np.uint8)
    if values.shape == (count,) and values.dtype.kind in "iu" and values.min() >= 0 and values.max() <= 2:
        return values.astype(np.uint8)
    seen = ", ".join(map(str, np.unique(values)[:4])) if values.dtype.kind in "iufbU" else "objects"
    raise UsageError(
        f"{path}: split is {values.dtype} with shape {values.shape}, holding {seen}.",
        f"Expected {count} of 0 train, 1 test, 2 validation, or of those words; without split a fifth is held out.",
    )
