"""Files of embeddings: npz, npy, h5, parquet and safetensors, never a pickle, and what their columns mean.

One layout for all: ``features/<name>`` [N, D] (or [N, V, D]) per backbone, ``labels``, ``domain``, ``split`` [N], and
``name`` where the format has strings, with the class and domain names. What ``export`` writes, ``ingest`` reads; it
also takes class text features, ``text/<name>`` [C, D], where the format has arrays of another length.

Each format's library is imported by the function that needs it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import CorruptionError, FedcacheError, UsageError, unknown
from fedcache.parsing import parse_json
from fedcache.store.samples import SPLITS

FEATURES = ("features", "embeddings", "X", "x")
LABELS = ("labels", "label", "y")


@dataclass
class Embeddings:
    """What a file holds."""

    features: dict[str, NDArray[Any]]  # [N, V, D] per backbone name
    labels: NDArray[np.int32]  # int [N], -1 unknown
    domains: NDArray[np.int16]  # int [N]
    splits: NDArray[np.uint8] | None  # int [N], 0 train, 1 test, 2 validation; None when the file does not say
    names: tuple[str, ...]  # N names
    classes: tuple[str, ...]  # class names
    domain_names: tuple[str, ...]  # domain names
    # [C, D] per backbone name, features of the class names
    texts: dict[str, NDArray[np.float32]] = field(default_factory=dict)


def read_embeddings(path: Path) -> Embeddings:
    """Read a file of embeddings.

    Keys: ``features/<name>``, or one of features, embeddings, X; labels, label or y; and domain, split, name, classes,
    domains, ``text/<name>`` where given. Without labels every row is -1. Raises UsageError, for a missing file, an
    unknown ending, a pickle, or columns that do not fit.
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
    """What columns mean, by their names; ``path`` is for messages. Raises UsageError, for columns that do not fit."""
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


def _read_npz(path: Path) -> dict[str, Any]:
    # Opened here, because numpy leaves a file open that turns out to be no archive.
    with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
        found = {name: file[name] for name in file.files}
    odd = [name for name, values in found.items() if not isinstance(values, np.ndarray)]
    if odd:  # numpy hands out what is not an array as bytes
        raise UsageError(f"{path}: {odd[0]} is not an array.", "Write it with numpy.savez.")
    return found


def _read_npy(path: Path) -> dict[str, Any]:
    return {"features": np.load(path, allow_pickle=False)}


def _read_h5(path: Path) -> dict[str, Any]:
    import h5py

    found: dict[str, Any] = {}

    def walk(group: Any, prefix: str) -> None:
        for name in group:
            link = group.get(name, getlink=True)
            if not isinstance(link, h5py.HardLink):
                raise UsageError(f"{path} holds a link ({prefix}{name}) to elsewhere.", "Copy the data into the file.")
            item = group[name]
            if isinstance(item, h5py.Group):
                walk(item, f"{prefix}{name}/")
            elif item.external or item.is_virtual:
                raise UsageError(f"{path}: {prefix}{name} is stored in another file.", "Copy the data into the file.")
            else:
                text = item.shape is not None and h5py.check_string_dtype(item.dtype) is not None
                found[f"{prefix}{name}"] = np.array(item.asstr()[()], np.str_) if text else np.asarray(item[()])

    with h5py.File(path, "r") as file:
        walk(file, "")
    return found


def _read_parquet(path: Path) -> dict[str, Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # An extension type may name code to run when it is built; only plain columns are ever read.
    schema = pq.read_schema(path)
    odd = [
        f.name
        for f in schema
        if isinstance(f.type, pa.BaseExtensionType) or b"ARROW:extension:name" in (f.metadata or {})
    ]
    if odd:
        raise UsageError(
            f"{path}: column {odd[0]} has an extension type.", "Write plain numbers, words and lists of numbers."
        )
    table = pq.read_table(path)
    meta = parse_json((table.schema.metadata or {}).get(b"fedcache", b"{}"))
    found: dict[str, Any] = {k: np.array(meta[k], np.str_) for k in ("classes", "domains") if k in meta}
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        kind = column.type
        if column.null_count:
            raise UsageError(
                f"{path}: {column.null_count} rows of {name} are empty.",
                "Give every row a value; the label -1 means none.",
            )
        if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
            lengths = column.value_lengths().unique().to_pylist()
            flat = column.flatten()
            if len(lengths) > 1 or flat.null_count:
                raise UsageError(
                    f"{path}: the rows of {name} have lengths {sorted(lengths)[:4]}, with "
                    f"{flat.null_count} empty values.",
                    "Every row needs the same number of values.",
                )
            shape = meta.get("shapes", {}).get(name, lengths or [0])
            found[name] = flat.to_numpy(zero_copy_only=False).reshape(len(column), *shape)
        elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
            found[name] = np.array(column.to_pylist(), np.str_)
        else:
            found[name] = column.to_numpy(zero_copy_only=False)
    return found


def _read_safetensors(path: Path) -> dict[str, Any]:
    from safetensors import safe_open

    found: dict[str, Any] = {}
    with safe_open(path, framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118  (safe_open is no mapping)
            found[name] = file.get_tensor(name)
        meta = parse_json((file.metadata() or {}).get("fedcache", "{}"))
    found |= {k: np.array(meta[k], np.str_) for k in ("classes", "domains") if k in meta}
    if "names" in meta:
        found["name"] = np.array(meta["names"], np.str_)
    return found


READERS = {
    ".npz": _read_npz,
    ".npy": _read_npy,
    ".h5": _read_h5,
    ".hdf5": _read_h5,
    ".parquet": _read_parquet,
    ".safetensors": _read_safetensors,
}
