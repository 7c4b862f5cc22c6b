"""``manifest.json``: the one file that says what a store holds, replaced atomically, ending with its own digest.

Everything read from it is checked for type and range here, so that the rest of the package may trust it: hostile or
damaged JSON is a ``FedcacheError`` and nothing else.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedcache.errors import Exit, FedcacheError
from fedcache.store.chunks import DTYPES
from fedcache.store.files import canonical_json, digest_of, write_atomic

FORMAT = 1
NAME = "manifest.json"
SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class ArrayInfo:
    """One complete feature array.

    Attributes:
        recipe: what determines its values; JSON.
        how: how it was computed; never part of a look-up.
        shape: (N, V, D), or (N, V, H, W, 3) for pixels.
        dtype: float16 | float32 | uint8.
        chunk_rows: rows per chunk file.
        chunks: crc32c per chunk file.
    """

    recipe: dict[str, Any]
    how: dict[str, Any]
    shape: tuple[int, ...]
    dtype: str
    chunk_rows: int
    chunks: tuple[int, ...]

    @property
    def digest(self) -> str:
        """Digest of the recipe."""
        return digest_of(self.recipe)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "recipe": self.recipe,
            "how": self.how,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "chunk_rows": self.chunk_rows,
            "chunks": list(self.chunks),
        }


@dataclass
class Manifest:
    """What a store holds.

    Attributes:
        dataset: slug, digest, template and whatever else identifies the data.
        rows: N, and rows_ok of them readable.
        classes: names, in label order.
        domains: names, in domain order.
        samples: crc32c per column of ``samples/``.
        arrays: complete feature arrays by key.
        texts: per backbone slug the text features, oldest first: {id, templates, shape, crc, meta}.
        files: sha256 of every sidecar by its path in the store.
    """

    dataset: dict[str, Any]
    rows: int
    rows_ok: int
    classes: tuple[str, ...]
    domains: tuple[str, ...]
    samples: dict[str, int]
    arrays: dict[str, ArrayInfo] = field(default_factory=dict)
    texts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Canonical JSON with its own digest."""
        body = {
            "format": FORMAT,
            "dataset": self.dataset,
            "rows": self.rows,
            "rows_ok": self.rows_ok,
            "classes": list(self.classes),
            "domains": list(self.domains),
            "samples": self.samples,
            "arrays": {key: info.to_dict() for key, info in self.arrays.items()},
            "texts": self.texts,
            "files": self.files,
        }
        return canonical_json({**body, "sha256": digest_of(body)})

    def write(self, store: Path) -> None:
        """Replace the store's manifest, whole or not at all."""
        write_atomic(store / NAME, self.to_bytes())


def read_manifest(store: Path) -> Manifest:
    """The manifest of a store.

    Raises:
        FedcacheError: STORE when there is none, or a newer fedcache wrote it; CORRUPT when it is damaged.
    """
    try:
        raw = (store / NAME).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        what = "is not a finished fedcache store" if store.exists() else "does not exist"
        raise FedcacheError(
            Exit.STORE,
            f"{store} {what}.",
            "Make one:  fedcache extract --dataset digits --backbones efficientnet-lite0",
        ) from error
    except OSError as error:
        raise _corrupt(store, f"cannot be read ({error.strerror})") from error
    try:
        data = json.loads(raw)
        claimed = data.pop("sha256")
        version = data["format"]
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise _corrupt(store, "is not the JSON fedcache writes") from error
    try:
        matches = digest_of(data) == claimed
    except (ValueError, TypeError, RecursionError) as error:
        raise _corrupt(store, "is not the JSON fedcache writes") from error
    if not matches:
        raise _corrupt(store, "does not have the digest it ends with")
    if version != FORMAT:
        raise FedcacheError(
            Exit.STORE, f"{store} has format {version}, this fedcache reads {FORMAT}.", "Upgrade fedcache to read it."
        )
    try:
        return _parse(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _corrupt(store, f"has a field that is wrong ({error})") from error


def _parse(data: dict[str, Any]) -> Manifest:
    arrays = {}
    for key, item in data["arrays"].items():
        shape = tuple(_count(n) for n in item["shape"])
        rows = _count(item["chunk_rows"])
        crcs = tuple(_count(c) for c in item["chunks"])
        if item["dtype"] not in DTYPES or not SAFE.fullmatch(key) or len(shape) < 2 or not rows:
            raise ValueError(f"array {key!r}")
        if shape[0] != data["rows"] or len(crcs) != -(-shape[0] // rows):
            raise ValueError(f"array {key!r} has {len(crcs)} chunks of {rows} rows for {shape[0]} rows")
        if not isinstance(item["recipe"], dict) or not isinstance(item["how"], dict):
            raise ValueError(f"array {key!r}")
        arrays[key] = ArrayInfo(item["recipe"], item["how"], shape, item["dtype"], rows, crcs)
    for slug, entries in data["texts"].items():
        if not SAFE.fullmatch(slug) or not all(SAFE.fullmatch(e["id"]) and len(e["shape"]) == 2 for e in entries):
            raise ValueError(f"text features {slug!r}")
    names = ("classes", "domains")
    if not all(isinstance(v, str) for name in names for v in data[name]):
        raise ValueError("class or domain names")
    if not isinstance(data["dataset"]["slug"], str) or not isinstance(data["dataset"]["digest"], str):
        raise ValueError("dataset")
    return Manifest(
        dataset=data["dataset"],
        rows=_count(data["rows"]),
        rows_ok=_count(data["rows_ok"]),
        classes=tuple(data["classes"]),
        domains=tuple(data["domains"]),
        samples={str(k): _count(v) for k, v in data["samples"].items()},
        arrays=arrays,
        texts={k: list(v) for k, v in data["texts"].items()},
        files={str(k): str(v) for k, v in data["files"].items()},
    )


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 40:
        raise ValueError(f"{value!r} is not a count")
    return value


def _corrupt(store: Path, why: str) -> FedcacheError:
    return FedcacheError(
        Exit.CORRUPT,
        f"{store / NAME} {why}.",
        f"The features may be whole: move {store} away and extract again, or restore the file from a copy.",
    )
