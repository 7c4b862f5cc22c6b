"""Files of embeddings: what their columns mean, and writing them.

One layout for npz, npy, h5, parquet and safetensors: ``features/<name>`` [N, D] (or [N, V, D]) per backbone,
``labels``, ``domain``, ``split`` [N], and ``name`` where the format has strings, with the class and domain names. What
``export`` writes, ``ingest`` reads; it also takes class text features, ``text/<name>`` [C, D], where the format has
arrays of another length.

Each format's library is imported by the function that needs it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import CorruptionError, UsageError, unknown
from fedcache.store.embedding_readers import FEATURES, READERS, FileRows, read_columns
from fedcache.store.groups import Group
from fedcache.store.samples import SPLITS

LABELS = ("labels", "label", "y")


@dataclass
class Embeddings:
    """What a file holds."""

    features: dict[str, Any]  # [N, V, D] per backbone name: arrays, or ``FileRows`` that stay in the file
    labels: NDArray[np.int32]  # int [N], -1 unknown
    domains: NDArray[np.int16]  # int [N]
    splits: NDArray[np.uint8] | None  # int [N], 0 train, 1 test, 2 validation; None when the file does not say
    names: tuple[str, ...]  # N names
    classes: tuple[str, ...]  # class names
    domain_names: tuple[str, ...]  # domain names
    # [C, D] per backbone name, features of the class names
    texts: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)  # columns that sort the rows, by name


def open_embeddings(path: Path) -> Embeddings:
    """A file of embeddings whose features stay in it, to be read by block.

    Keys: ``features/<name>``, or one of features, embeddings, X; labels, label or y; and domain, split, name, classes,
    domains, ``text/<name>`` where given. Without labels every row is -1. Raises UsageError, for a missing file, an
    unknown ending, a pickle, or columns that do not fit.
    """
    if not path.is_file():
        raise UsageError(f"{path} is not a file.", f"fedcache ingest FILE --name NAME   takes {', '.join(READERS)}")
    if path.suffix.lower() not in READERS:
        raise unknown("file ending", path.suffix, READERS)
    return assemble(path, read_columns(path))


def read_embeddings(path: Path) -> Embeddings:
    """A file of embeddings with its features in memory; keys and errors as ``open_embeddings``."""
    found = open_embeddings(path)
    whole = {name: v.whole() if isinstance(v, FileRows) else v for name, v in found.features.items()}
    return replace(found, features=whole)


def assemble(path: Path, raw: dict[str, Any]) -> Embeddings:
    """What columns mean, by their names; ``path`` is for messages. Raises UsageError, for columns that do not fit."""
    features: dict[str, Any] = {}
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
        if isinstance(values, FileRows):
            features[name] = values.with_views()
        else:
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
    domains, domain_names = _codes(path, _with_domains(path, raw, count), ("domain",), "domains", count, unknown_code=0)
    if twice := sorted({d for d, n in Counter(domain_names).items() if n > 1}):
        raise UsageError(
            f"{path}: the domain name {twice[0]!r} is there twice.", "Give every domain a name of its own."
        )
    splits = _splits(path, raw, count)
    names = raw.get("name")
    if names is not None and names.shape != (count,):
        raise UsageError(f"{path}: name has shape {names.shape} for {count} rows.", "Give one name per row, or none.")
    width = len(str(count - 1))
    words = tuple(map(str, names)) if names is not None else tuple(map(f"{{:0{width}d}}".format, range(count)))
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


def _with_domains(path: Path, raw: dict[str, Any], count: int) -> dict[str, Any]:
    """The columns, with one that says which domain each row is of where ``domains`` does that and not name them.

    Raises UsageError for names of several domains that no column tells apart.
    """
    named = raw.get("domains")
    if named is None or "domain" in raw or named.size <= 1:
        return raw
    if named.shape == (count,):
        return {**{key: values for key, values in raw.items() if key != "domains"}, "domain": named}
    raise UsageError(
        f"{path}: domains names {named.size:,} domains, and no column says which row is of which.",
        f"Add domain, one integer or word for each of the {count:,} rows.",
    )


def _texts(path: Path, raw: dict[str, Any], features: Mapping[str, Any]) -> dict[str, NDArray[np.float32]]:
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


def _write_npz(path: Path, columns: dict[str, Any], names: list[str], meta: dict[str, Any]) -> None:
    text = {"name": np.array(names, np.str_), "classes": np.array(meta["classes"], np.str_)}
    everything: dict[str, Any] = {**columns, **text, "domains": np.array(meta["domains"], np.str_)}
    np.savez(path, **everything)


def _write_h5(path: Path, columns: dict[str, Any], names: list[str], meta: dict[str, Any]) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        for name, values in columns.items():
            file.create_dataset(name, data=values)
        for name, words in (("name", names), ("classes", meta["classes"]), ("domains", meta["domains"])):
            file.create_dataset(name, data=words, dtype=h5py.string_dtype())


def _write_parquet(path: Path, columns: dict[str, Any], names: list[str], meta: dict[str, Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    fields: dict[str, Any] = {"name": pa.array(names)}
    shapes = {}
    for name, values in columns.items():
        if values.ndim == 1:
            fields[name] = pa.array(values)
            continue
        shapes[name] = list(values.shape[1:])
        flat = np.ascontiguousarray(values.reshape(len(values), -1))
        inner = pa.array(flat.reshape(-1))
        fields[name] = pa.FixedSizeListArray.from_arrays(inner, flat.shape[1])
    table = pa.table(fields).replace_schema_metadata({"fedcache": json.dumps({**meta, "shapes": shapes})})
    pq.write_table(table, path)


def _write_safetensors(path: Path, columns: dict[str, Any], names: list[str], meta: dict[str, Any]) -> None:
    from safetensors.numpy import save_file

    tensors = {name: np.ascontiguousarray(values) for name, values in columns.items()}
    save_file(tensors, path, metadata={"fedcache": json.dumps({**meta, "names": names})})


WRITERS = {
    ".npz": _write_npz,
    ".h5": _write_h5,
    ".hdf5": _write_h5,
    ".parquet": _write_parquet,
    ".safetensors": _write_safetensors,
}
