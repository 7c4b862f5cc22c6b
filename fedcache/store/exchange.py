"""Features in and out: npz, npy, h5, parquet and safetensors, never a pickle.

One layout for all: ``features/<name>`` [N, D] (or [N, V, D]) per backbone, ``labels``, ``domain``, ``split`` [N], and
``name`` where the format has strings, with the class and domain names. What ``export`` writes, ``ingest`` reads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import Exit, FedcacheError, unknown
from fedcache.store.chunks import stored
from fedcache.store.disk import writing
from fedcache.store.files import digest_of
from fedcache.store.formats import READERS, WRITERS
from fedcache.store.manifest import SAFE
from fedcache.store.store import Samples, Store, slug_of

FEATURES = ("features", "embeddings", "X", "x")
LABELS = ("labels", "label", "y")
SPLITS = ("train", "test", "validation")
CHUNK_ROWS = 512


@dataclass
class Embeddings:
    """What a file holds.

    Attributes:
        features: [N, V, D] per backbone name.
        labels: int [N], -1 unknown.
        domains: int [N].
        splits: int [N], 0 train, 1 test, 2 validation.
        names: N names.
        classes: class names.
        domain_names: domain names.
    """

    features: dict[str, NDArray[Any]]
    labels: NDArray[np.int32]
    domains: NDArray[np.int16]
    splits: NDArray[np.uint8]
    names: tuple[str, ...]
    classes: tuple[str, ...]
    domain_names: tuple[str, ...]


def export(store: Store, out: Path, keys: Sequence[str]) -> int:
    """Write the readable rows of some arrays to a file; its ending chooses the format.

    Returns:
        rows written.

    Raises:
        FedcacheError: USAGE for an unknown ending or a folder that is not there.
    """
    if out.suffix not in WRITERS:
        raise unknown("file ending", out.suffix, WRITERS)
    if not out.parent.is_dir():
        raise FedcacheError(Exit.USAGE, f"The folder {out.parent} does not exist.", f"mkdir -p {out.parent}")
    s = store.samples
    good = np.flatnonzero(s.ok == 1)
    columns: dict[str, Any] = {f"features/{key}": store.reader(key).rows(good) for key in keys}
    columns |= {"labels": s.label[good], "domain": s.domain[good], "split": s.split[good]}
    names = [s.name[i] for i in good]
    meta = {"classes": list(s.classes), "domains": list(s.domains), "dataset": store.dataset["slug"]}
    temporary = out.with_name(f".{out.name}.partial{out.suffix}")
    with writing(out, sum(values.nbytes for values in columns.values())):
        try:
            WRITERS[out.suffix](temporary, columns, names, meta)
            temporary.replace(out)
        finally:
            temporary.unlink(missing_ok=True)
    return len(good)


def read_embeddings(path: Path) -> Embeddings:
    """Read a file of embeddings.

    Keys: ``features/<name>``, or one of features, embeddings, X; labels, label or y; and domain, split, name, classes,
    domains where given. Without labels every row is -1; without splits every row is train.

    Raises:
        FedcacheError: USAGE, for a missing file, an unknown ending, a pickle, or columns that do not fit.
    """
    if not path.is_file():
        raise FedcacheError(Exit.USAGE, f"{path} is not a file.", f"Give one of {', '.join(READERS)}")
    if path.suffix not in READERS:
        raise unknown("file ending", path.suffix, READERS)
    try:
        raw = READERS[path.suffix](path)
    except FedcacheError:
        raise
    except Exception as error:  # the formats' libraries raise their own kinds for damaged files
        raise FedcacheError(
            Exit.USAGE,
            f"{path} could not be read as {path.suffix}: {type(error).__name__}: {str(error)[:160]}",
            "Object arrays and pickles are never read; write plain numbers.",
        ) from error
    return _assemble(path, raw)


def _assemble(path: Path, raw: dict[str, Any]) -> Embeddings:
    features: dict[str, NDArray[Any]] = {}
    for key, values in raw.items():
        name = key.removeprefix("features/") if key.startswith("features/") else path.stem if key in FEATURES else None
        if name is None:
            continue
        if values.dtype.kind != "f" or values.ndim not in (2, 3):
            raise FedcacheError(
                Exit.USAGE,
                f"{path}: {key} is {values.dtype} with shape {values.shape}.",
                "Features are floats [N, D] or [N, V, D].",
            )
        features[name] = values[:, None] if values.ndim == 2 else values
    if not features:
        raise FedcacheError(
            Exit.USAGE,
            f"{path} has no features; it has {', '.join(sorted(raw)) or 'nothing'}.",
            "Name them features/<backbone>, or features, embeddings or X.",
        )
    rows = {len(v) for v in features.values()}
    (count,) = rows if len(rows) == 1 else (0,)
    if not count:
        raise FedcacheError(
            Exit.USAGE, f"{path} has features of {sorted(rows)} rows.", "All need the same, at least 1."
        )
    labels, classes = _codes(path, raw, LABELS, "classes", count, unknown_code=-1)
    domains, domain_names = _codes(path, raw, ("domain",), "domains", count, unknown_code=0)
    splits = _splits(path, raw, count)
    names = raw.get("name")
    if names is not None and len(names) != count:
        raise FedcacheError(Exit.USAGE, f"{path}: {len(names)} names for {count} rows.", "Give one name per row.")
    width = len(str(count - 1))
    words = tuple(map(str, names)) if names is not None else tuple(f"{i:0{width}d}" for i in range(count))
    return Embeddings(features, labels, domains, splits, words, classes, domain_names or ("all",))


def _codes(
    path: Path, raw: dict[str, Any], keys: Sequence[str], names_key: str, count: int, *, unknown_code: int
) -> tuple[Any, tuple[str, ...]]:
    """A column of integers or words as codes, and the names of the codes."""
    key = next((k for k in keys if k in raw), None)
    named = tuple(map(str, raw[names_key])) if names_key in raw else ()
    if key is None:
        return np.full(count, unknown_code, np.int32), named
    values = raw[key]
    if values.shape != (count,) or values.dtype.kind not in "iuUS":
        raise FedcacheError(
            Exit.USAGE,
            f"{path}: {key} is {values.dtype} with shape {values.shape}, expected {count} integers or words.",
            "Give one per row.",
        )
    if values.dtype.kind in "US":
        found = sorted({str(v) for v in values})
        order = {name: i for i, name in enumerate(named or found)}
        missing = [n for n in found if n not in order]
        if missing:
            raise FedcacheError(Exit.USAGE, f"{path}: {key} {missing[0]!r} is not in {names_key}.", "Add its name.")
        return np.array([order[str(v)] for v in values], np.int32), tuple(order)
    codes = values.astype(np.int64)
    top = int(codes.max())
    if int(codes.min()) < min(0, unknown_code) or (named and top >= len(named)) or top > 10**6:
        raise FedcacheError(
            Exit.USAGE,
            f"{path}: {key} runs from {codes.min()} to {top}" + (f" with {len(named)} {names_key}." if named else "."),
            f"Codes run from {unknown_code} upwards, one name each.",
        )
    return codes.astype(np.int32), named or tuple(str(i) for i in range(top + 1))


def _splits(path: Path, raw: dict[str, Any], count: int) -> Any:
    if "split" not in raw:
        return np.zeros(count, np.uint8)
    values = raw["split"]
    if values.shape == (count,) and values.dtype.kind in "US" and {str(v) for v in values} <= {*SPLITS, "val"}:
        return np.array([{"train": 0, "test": 1}.get(str(v), 2) for v in values], np.uint8)
    if values.shape == (count,) and values.dtype.kind in "iu" and values.min() >= 0 and values.max() <= 2:
        return values.astype(np.uint8)
    raise FedcacheError(
        Exit.USAGE, f"{path}: split is {values.dtype} {values.shape}.", "0 train, 1 test, 2 validation, or those words."
    )


def ingest(embeddings: Embeddings, path: Path, name: str) -> Store:
    """Embeddings as a store. Rows are sorted by name; the values are the recipe.

    Raises:
        FedcacheError: USAGE for names that repeat; CORRUPT for non-finite features, with row numbers.
    """
    count = len(embeddings.names)
    if len(set(embeddings.names)) < count:
        raise FedcacheError(Exit.USAGE, f"{count - len(set(embeddings.names))} names repeat.", "Names must be unique.")
    order = np.array(sorted(range(count), key=lambda i: embeddings.names[i]))
    # Checked before anything is on disk, and before the rows are sorted: the numbers are those of the file.
    arrays = {key: _storable(key, values)[order] for key, values in embeddings.features.items()}
    uid = np.zeros((count, 16), np.uint8)
    for row in range(count):
        digest = hashlib.sha256()
        for key in sorted(arrays):
            digest.update(np.ascontiguousarray(arrays[key][row]).tobytes())
        uid[row] = np.frombuffer(digest.digest()[:16], np.uint8)
    samples = Samples(
        uid=uid,
        name=tuple(embeddings.names[i] for i in order),
        label=embeddings.labels[order],
        domain=embeddings.domains[order],
        split=embeddings.splits[order],
        ok=np.ones(count, np.uint8),
        classes=embeddings.classes,
        domains=embeddings.domain_names,
    ).checked()
    content = [
        hashlib.sha256(np.ascontiguousarray(getattr(samples, c)).tobytes()).hexdigest()
        for c in ("uid", "label", "domain", "split")
    ]
    whole = digest_of([content, list(samples.name), list(samples.classes), list(samples.domains)])
    path.parent.mkdir(parents=True, exist_ok=True)
    store = Store.create(path, samples, dataset={"slug": slug_of(name), "digest": whole, "template": None})
    for key, values in arrays.items():
        dtype = values.dtype.name
        values_digest = hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()
        recipe = {
            "backbone": key,
            "weights": values_digest,
            "source": "ingested",
            "dtype": dtype,
            "views": values.shape[1],
        }
        with store.writer(
            f"{slug_of(key)}-{digest_of(recipe)[:8]}",
            shape=values.shape,
            dtype=dtype,
            chunk_rows=CHUNK_ROWS,
            recipe=recipe,
            how={"source": "ingested"},
        ) as writer:
            for chunk in writer.missing():
                writer.write(chunk, values[chunk * CHUNK_ROWS : (chunk + 1) * CHUNK_ROWS])
            writer.complete()
    return Store.open(path)


def _storable(key: str, values: NDArray[Any]) -> NDArray[Any]:
    """Features in the dtype they are stored in: float16 stays, wider floats become float32.

    Raises:
        FedcacheError: CORRUPT, for values that are not finite there.
    """
    if not SAFE.fullmatch(slug_of(key)):
        raise FedcacheError(
            Exit.USAGE,
            f"Features are named {key!r}.",
            "A name begins with a letter or digit and has at most 110 characters.",
        )
    try:
        return stored(values, "float16" if values.dtype == np.float16 else "float32", (), 0, key)
    except FedcacheError as error:
        raise FedcacheError(error.code, error.message, "Mend these rows of the file or leave them out.") from error
