"""``manifest.json``: the one file that says what a store holds, replaced atomically, ending with its own digest.

Everything read from it is checked for type and range here, so that the rest of the package may trust it: hostile or
damaged JSON is a ``FedcacheError`` and nothing else.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fedcache.errors import CorruptionError, Exit, FedcacheError, StoreError, shell_word
from fedcache.notebooks import html_table
from fedcache.parsing import SAFE, parse_json
from fedcache.store.chunks import DTYPES
from fedcache.store.files import digest_of, parse_signed, read_whole, to_signed, write_atomic
from fedcache.store.own_names import bare_name

FORMAT = 1
NAME = "manifest.json"
COLUMNS = {"uid": "uint8", "label": "int32", "domain": "int16", "split": "uint8", "ok": "uint8"}
HEX64 = re.compile(r"[0-9a-f]{64}")
CRC_LIMIT = 1 << 32
PARTITION_SUFFIXES = (".partition", ".json")
"""Of the files of partitions: arrays, and the JSON that earlier releases wrote."""


@dataclass(frozen=True)
class ArrayInfo:
    """One complete feature array."""

    recipe: dict[str, Any]  # what determines its values; JSON
    how: dict[str, Any]  # how it was computed; never part of a look-up
    shape: tuple[int, ...]  # (N, V, D), or (N, V, H, W, 3) for pixels
    dtype: str  # float16 | float32 | uint8
    chunk_rows: int  # rows per chunk file
    chunks: tuple[int, ...]  # crc32c per chunk file

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


def journal_header(
    recipe: dict[str, Any], how: dict[str, Any], shape: Sequence[int], dtype: str, chunk_rows: int
) -> dict[str, Any]:
    """What the journal of an array in flight begins with: everything on which the values of its rows depend."""
    where = {"shape": list(shape), "dtype": dtype, "chunk_rows": chunk_rows}
    return {"format": FORMAT, "recipe": digest_of(recipe), "how": how, **where}


@dataclass
class Manifest:
    """What a store holds."""

    dataset: dict[str, Any]  # slug, digest, template and whatever else identifies the data
    rows: int  # N, and rows_ok of them readable
    rows_ok: int
    classes: tuple[str, ...]  # names, in label order
    domains: tuple[str, ...]  # names, in domain order
    samples: dict[str, int]  # crc32c per column of ``samples/``
    arrays: dict[str, ArrayInfo] = field(default_factory=dict)  # complete feature arrays by key
    # per backbone slug the text features, the current ones last: {id, templates, shape, crc, meta}
    texts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    files: dict[str, str] = field(
        default_factory=dict
    )  # sha256 of every sidecar by its path in the store

    @property
    def partitions(self) -> list[str]:
        """Names of the saved partitions, sorted."""
        places = (name for name in self.files if name.startswith("partitions/"))
        return sorted(
            Path(name).stem if name.endswith(PARTITION_SUFFIXES) else name for name in places
        )

    def to_bytes(self) -> bytes:
        """Canonical JSON that ends with its own digest."""
        return to_signed(
            {
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
        )

    def write(self, store: Path) -> None:
        """Replace the store's manifest, whole or not at all."""
        write_atomic(store / NAME, self.to_bytes())


def read_manifest(store: Path) -> Manifest:
    """A store's manifest. Raises StoreError for none or a newer one; CorruptionError when it is damaged or lost."""
    try:
        raw = read_whole(store / NAME)
    except (FileNotFoundError, NotADirectoryError) as error:
        if was_store(store):
            if (
                store / NAME
            ).exists():  # looked for last: a store may appear here, whole, at any moment
                return read_manifest(store)
            raise _corrupt(store, "is missing, and the rest of a store is there") from error
        kind = "a directory but not" if store.is_dir() else "a file, not"
        what = f"is {kind} a fedcache store" if store.exists() else "does not exist"
        named = "digits"
        made = "Make one"
        if store.is_dir():
            named = f"folder:{store}"
            made = "Of a folder of images one is made"
        command = shlex.join(
            ["fedcache", "extract", "--dataset", named, "--backbones", "efficientnet-lite0"]
        )
        raise StoreError(f"{store} {what}.", f"{made}:  {command}") from error
    except OSError as error:
        raise _corrupt(store, f"cannot be read ({error.strerror})") from error
    try:
        data = parse_signed(raw)
    except ValueError as error:
        raise _corrupt(store, str(error)) from error
    version = data.get("format")
    if version != FORMAT:
        raise StoreError(
            f"{store} has format {version}, this fedcache reads {FORMAT}.",
            "Upgrade fedcache to read it.",
        )
    try:
        return _parse(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _corrupt(store, f"has a field that is wrong ({error})") from error


def was_store(path: Path) -> bool:
    """Whether a directory holds what only a store has, with or without its manifest."""
    if (path / "samples" / "uid").is_dir() or any(path.glob("journal-*.jsonl")):
        return True
    try:
        return "fedcache" in parse_json((path / "zarr.json").read_bytes())["attributes"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _parse(data: dict[str, Any]) -> Manifest:
    rows = _count(data["rows"])
    rows_ok = _count(data["rows_ok"])
    if rows_ok > rows:
        raise ValueError(f"{rows_ok} of {rows} rows are readable")
    for name in ("slug", "digest"):
        if type(data["dataset"][name]) is not str:
            raise ValueError(f"dataset {name}")
    files = _mapping(data["files"])
    for path, digest in files.items():
        if not all(SAFE.fullmatch(part) for part in path.split("/")) or not HEX64.fullmatch(
            _text(digest)
        ):
            raise ValueError(f"file {path!r}")
    samples = {key: _count(crc, CRC_LIMIT) for key, crc in _mapping(data["samples"]).items()}
    if set(samples) != {*COLUMNS, "name"}:
        raise ValueError(f"columns {sorted(samples)}")
    texts = {
        slug: [_text_features(slug, e) for e in _sequence(v)]
        for slug, v in _mapping(data["texts"]).items()
    }
    return Manifest(
        dataset=_mapping(data["dataset"]),
        rows=rows,
        rows_ok=rows_ok,
        classes=tuple(_text(v) for v in _sequence(data["classes"])),
        domains=tuple(_text(v) for v in _sequence(data["domains"])),
        samples=samples,
        arrays={key: _array(key, item, rows) for key, item in _mapping(data["arrays"]).items()},
        texts=texts,
        files=files,
    )


def _array(key: str, item: Any, rows: int) -> ArrayInfo:
    shape = tuple(_count(n) for n in _sequence(item["shape"]))
    chunk_rows = _count(item["chunk_rows"])
    crcs = tuple(_count(c, CRC_LIMIT) for c in _sequence(item["chunks"]))
    if not SAFE.fullmatch(key) or item["dtype"] not in DTYPES or len(shape) < 2 or not chunk_rows:
        raise ValueError(f"array {key!r}")
    if shape[0] != rows or len(crcs) != -(-rows // chunk_rows):
        raise ValueError(
            f"array {key!r} has {len(crcs)} chunks of {chunk_rows} rows for {rows} rows"
        )
    return ArrayInfo(
        _mapping(item["recipe"]), _mapping(item["how"]), shape, item["dtype"], chunk_rows, crcs
    )


def _text_features(slug: str, entry: Any) -> dict[str, Any]:
    shape = [_count(n) for n in _sequence(entry["shape"])]
    if not SAFE.fullmatch(slug) or not SAFE.fullmatch(_text(entry["id"])) or len(shape) != 2:
        raise ValueError(f"text features {slug!r}")
    templates = [_text(t) for t in _sequence(entry["templates"])]
    crc = _count(entry["crc"], CRC_LIMIT)
    meta = _mapping(entry["meta"])
    return {"id": entry["id"], "templates": templates, "meta": meta, "shape": shape, "crc": crc}


def _count(value: Any, limit: int = 1 << 40) -> int:
    if type(value) is not int or not 0 <= value < limit:
        raise ValueError(f"{value!r:.40} is not a count")
    return value


def _typed(value: Any, kind: type, called: str) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{value!r:.40} is not {called}")
    return value


_text = partial(_typed, kind=str, called="a string")
_sequence = partial(_typed, kind=list, called="a list")
_mapping = partial(_typed, kind=dict, called="an object")


def _corrupt(store: Path, why: str) -> FedcacheError:
    return CorruptionError(
        f"{store / NAME} {why}.",
        "Nothing else says what is whole, so `fedcache repair` cannot make it. Restore the file from a copy, or:  "
        f"mv {shell_word(store)} {shell_word(f'{store}.damaged')}   and run the command that made this store again.",
    )


def names_of(key: str, info: ArrayInfo) -> tuple[str, str, str]:
    """What an array is called: its key, its backbone, and ``backbone@size``."""
    backbone = str(info.recipe.get("backbone", key))
    return key, backbone, f"{backbone}@{info.recipe.get('size', 0)}"


def match_arrays(arrays: Mapping[str, ArrayInfo], name: str) -> list[str]:
    """Keys of the arrays that a name may mean, also one with the path of a user's model."""
    called = {key: names_of(key, info) for key, info in arrays.items()}
    found = [key for key, names in called.items() if name in names]
    bare = name if found else bare_name(name)  # which may look at installed packages
    return found or [key for key, names in called.items() if bare in names]


def select_arrays(
    arrays: Mapping[str, ArrayInfo], backbones: str | Sequence[str] | None, store: str
) -> list[str]:
    """Keys of the arrays of features that are named, as ``names_of`` spells them; all of them for None.

    Raises StoreError, for one that the store does not hold; UsageError, for a name of several, and for images.
    """
    names = [backbones] if isinstance(backbones, str) else list(backbones or [])
    features = {k: a for k, a in arrays.items() if a.dtype != "uint8"}
    if not names:
        if not features:
            raise StoreError(f"{store} holds no features yet.", "fedcache extract --help")
        return list(features)
    chosen = []
    for name in names:
        found = match_arrays(features, name)
        if len(found) != 1:
            listed = ", ".join(features) or "no features"
            what = "no features" if not found else f"{len(found)} arrays"
            raise FedcacheError(
                Exit.USAGE if found else Exit.STORE,
                f"{store} has {what} of {name!r}.",
                f"It has {listed}; each of these names means one array.",
            )
        chosen.append(found[0])
    return list(dict.fromkeys(chosen))


def describe_store(path: Path, m: Manifest) -> dict[str, Any]:
    """What the manifest says, plain JSON values; rows and features are not among them."""
    return {
        "path": str(path),
        "dataset": dict(m.dataset),
        "rows": m.rows,
        "ok": m.rows_ok,
        "classes": list(m.classes),
        "domains": list(m.domains),
        "arrays": [{"key": k, **_described(a)} for k, a in sorted(m.arrays.items())],
        "texts": {k: [list(e["templates"]) for e in v] for k, v in m.texts.items()},
        "partitions": m.partitions,
    }


def store_html(path: Path, m: Manifest) -> str:
    """A table of the arrays under one line on the dataset."""
    some = ", ".join(m.classes[:10]) + (f", .. ({len(m.classes):,})" if len(m.classes) > 10 else "")
    title = f"{m.dataset['slug']}: {m.rows_ok:,} of {m.rows:,} images; classes {some}; {path}"
    rows = [(k, *_described(a).values()) for k, a in sorted(m.arrays.items())]
    return html_table(title, ("array", "backbone", "shape", "dtype"), rows)


def _described(info: ArrayInfo) -> dict[str, Any]:
    return {
        "backbone": str(info.recipe.get("backbone", "")),
        "shape": list(info.shape),
        "dtype": info.dtype,
    }
