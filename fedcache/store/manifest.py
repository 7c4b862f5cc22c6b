"""``manifest.json``: the file that lists the content of a store, replaced atomically, ending with its own digest.

The type and range of every value read from it are checked here, so the rest of the package may rely on them. Hostile or
damaged JSON always raises a ``FedcacheError``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.config import is_store_address
from fedcache.errors import (
    CorruptionError,
    FedcacheError,
    InternalError,
    StoreError,
    UsageError,
    shell_word,
)
from fedcache.parsing import SAFE, parse_json, slug_of
from fedcache.plugins import bare_name
from fedcache.store.chunks import (
    DTYPES,
    array_bytes,
    array_metadata,
    checksum,
    chunk_path,
    damaged,
    encode,
    group_metadata,
    is_array_file,
    make_directories,
    mapped,
    read_checked,
    read_content,
    to_stored_dtype,
    write_chunk_file,
)
from fedcache.store.files import (
    Buffer,
    append_line,
    canonical_json,
    digest_of,
    explain_disk_errors,
    file_sha256,
    parse_signed,
    read_sealed,
    read_whole,
    sha256_hex,
    to_signed,
    write_atomic,
)
from fedcache.store.journal import BadRows, announced_checksums, journal_path

# Part i of n of a store: some chunks of every array, in a folder of their own until ``join``
# assembles all parts.
#
# A part is a store whose arrays stay unfinished: it has the rows of the whole dataset, and its
# journals vouch for the chunks that it holds. Its manifest names the part in ``dataset`` and lists
# no array, so it cannot be used for training.

PART = "part"
"""Key of the manifest's ``dataset`` with {number, of, recipes}. ``recipes`` are those of the finished arrays."""

PLACE = re.compile(r"(.+)\.part-(\d+)-of-(\d+)\.zarr")
"""The name of the folder of a part."""


@dataclass(frozen=True)
class StorePart:
    """Part ``number`` of ``of``."""

    number: int  # from 1
    of: int  # how many parts there are

    def __str__(self) -> str:
        return f"part {self.number} of {self.of}"

    @property
    def option(self) -> str:
        """The value of ``--part`` for this part."""
        return f"{self.number}/{self.of}"

    @property
    def command(self) -> str:
        """The command that computes this part, without the options that all parts have."""
        return f"fedcache extract --part {self.option}"

    def chunks(self, count: int) -> range:
        """The numbers of this part's chunks of an array with ``count`` chunks; may be none if there are many parts."""
        start = count * (self.number - 1) // self.of
        stop = count * self.number // self.of
        return range(start, stop)

    def place(self, store: Path) -> Path:
        """The folder of this part, next to the folder of the store."""
        stem = store.name.removesuffix(".zarr")
        return store.with_name(f"{stem}.part-{self.number}-of-{self.of}.zarr")

    def record(self) -> dict[str, Any]:
        """Description of a new part for its manifest."""
        return {"number": self.number, "of": self.of, "recipes": {}}


def part_of(dataset: Mapping[str, Any]) -> StorePart | None:
    """Which part a store is, by ``dataset`` of its manifest; None for a whole store. Raises ValueError."""
    if PART not in dataset:
        return None
    record = dataset[PART]
    number = record["number"]
    of = record["of"]
    if [type(number), type(of)] != [int, int] or not 1 <= number <= of:
        raise ValueError(f"part {(number, of)}")
    if not all(isinstance(recipe, dict) for recipe in record["recipes"].values()):
        raise ValueError("recipes of a part")
    return StorePart(number, of)


def join_command(path: Path) -> str:
    """The command that joins a part with the others next to it."""
    found = PLACE.fullmatch(path.name)
    if found is None:
        return "fedcache join PART PART .. -o STORE"
    # The star is for the shell, so it is not quoted.
    stem = shell_word(path.with_name(found[1]))
    whole = shell_word(path.with_name(f"{found[1]}.zarr"))
    return f"fedcache join {stem}.part-*-of-{found[3]}.zarr -o {whole}"


def no_store(path: Path, dataset: Mapping[str, Any]) -> StoreError:
    """The error for a part in place of a whole store."""
    return StoreError(
        f"{path} is only {part_of(dataset)} of a store.",
        f"When all parts are finished, join them:  {join_command(path)}",
    )


FORMAT = 1
PUBLISHED = 2
"""Format number of a published store (FORMAT.md, "Published stores")."""
MARK = "publication.json"
"""First object of a published store, which identifies the store."""

ORIGIN = "origin.json"
"""File of a mirror that says which published store it copies."""
MIRROR = {"kind": "origin of a mirror"}

NAME = "manifest.json"
COLUMNS = {"uid": "uint8", "label": "int32", "domain": "int16", "split": "uint8", "ok": "uint8"}
HEX64 = re.compile(r"[0-9a-f]{64}")
CRC_LIMIT = 1 << 32
PARTITION_SUFFIXES = (".partition", ".json")
"""Endings of partition files: arrays now, JSON in earlier releases."""


@dataclass(frozen=True)
class ArrayInfo:
    """One complete feature array."""

    recipe: dict[str, Any]  # settings that determine its values; JSON
    how: dict[str, Any]  # how it was computed; never part of a look-up
    shape: tuple[int, ...]  # (N, V, D), or (N, V, H, W, 3) for pixels
    dtype: str  # float16 | float32 | uint8
    chunk_rows: int  # rows per chunk file
    chunks: tuple[int, ...]  # crc32c per chunk file

    @property
    def digest(self) -> str:
        """Digest of the recipe."""
        return digest_of(self.recipe)

    @property
    def count(self) -> int:
        """Number of chunks of all rows; ``chunks`` of a part of a store are only its own."""
        return -(-self.shape[0] // self.chunk_rows)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the rows of a chunk file."""
        return array_bytes((self.chunk_rows, *self.shape[1:]), self.dtype)

    @property
    def header(self) -> dict[str, Any]:
        """Header of the journal while the array is unfinished: everything on which the values of its rows depend."""
        return {
            "format": FORMAT,
            "recipe": self.digest,
            "how": self.how,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "chunk_rows": self.chunk_rows,
        }


def column_shape(key: str, rows: int) -> tuple[int, ...]:
    """Shape of a column of numbers of so many rows."""
    if key == "uid":
        return (rows, 16)
    return (rows,)


def column_file(store: Path, key: str) -> Path:
    """The file of a column in a store, also of ``name``."""
    axes = len(column_shape(key, 0))
    return chunk_path(store / "samples" / key, 0, axes)


def feature_file(store: Path, key: str, number: int, shape: Sequence[int]) -> Path:
    """The file of a chunk, or of a shard of a published store, of a feature array of this shape."""
    return chunk_path(store / "features" / key, number, len(shape))


@dataclass
class Manifest:
    """Content of a store."""

    dataset: dict[str, Any]  # slug, digest, template and other facts that identify the data
    rows: int  # N
    rows_ok: int  # number of readable rows
    classes: tuple[str, ...]  # names, in label order
    domains: tuple[str, ...]  # names, in domain order
    samples: dict[str, int]  # crc32c per column of ``samples/``
    arrays: dict[str, ArrayInfo] = field(default_factory=dict)  # complete feature arrays by key
    # entries {id, templates, shape, crc, meta} of text features per backbone slug, the current one last
    texts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    # sha256 of every sidecar by its path in the store
    files: dict[str, str] = field(default_factory=dict)
    # of a published store the number of chunks in a shard file, per array; else {}, as every chunk is a file
    shards: dict[str, int] = field(default_factory=dict)

    @property
    def partitions(self) -> list[str]:
        """Names of the saved partitions, sorted."""
        names = []
        for name in self.files:
            if name.startswith("partitions/"):
                if name.endswith(PARTITION_SUFFIXES):
                    name = Path(name).stem
                names.append(name)
        return sorted(names)

    def to_bytes(self) -> bytes:
        """Canonical JSON that ends with its own digest."""
        arrays = {key: vars(info) for key, info in self.arrays.items()}
        content = {"format": FORMAT, **vars(self), "arrays": arrays}
        if self.shards:
            content["format"] = PUBLISHED
        else:
            del content["shards"]
        return to_signed(content)

    def write(self, store: Path) -> None:
        """Replace the store's manifest, whole or not at all."""
        write_atomic(store / NAME, self.to_bytes())


def read_manifest(store: Path) -> Manifest:
    """A store's manifest. Raises StoreError without one or for a newer format; CorruptionError for a damaged one."""
    try:
        raw = read_whole(store / NAME)
    except (FileNotFoundError, NotADirectoryError) as error:
        if was_store(store):
            # Another process may have put a whole store here after the attempt to read.
            if (store / NAME).exists():
                return read_manifest(store)
            raise _corrupt(store, "is missing, but the other files of a store exist") from error
        what = "does not exist"
        dataset = "digits"
        aim = "To make a store"
        if store.is_dir():
            what = "is a directory but not a fedcache store"
            dataset = f"folder:{store}"
            aim = "To make a store from a folder of images"
        elif store.exists():
            what = "is a file, not a fedcache store"
        raise StoreError(
            f"{store} {what}.",
            f"{aim}:  fedcache extract --dataset {shell_word(dataset)} --backbones efficientnet-lite0",
        ) from error
    except OSError as error:
        raise _corrupt(store, f"cannot be read ({error.strerror})") from error
    return parse_manifest(raw, store)


def parse_manifest(raw: bytes, store: Path | str) -> Manifest:
    """The manifest in the bytes of its file; ``store`` is for messages. Raises StoreError, CorruptionError."""
    try:
        data = parse_signed(raw)
    except ValueError as error:
        raise _corrupt(store, str(error)) from error
    version = data.get("format")
    if version not in (FORMAT, PUBLISHED):
        raise StoreError(
            f"{store} has format version {version}, but this fedcache reads only versions {FORMAT} and {PUBLISHED}.",
            "Upgrade fedcache to read it.",
        )
    try:
        return _parse(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _corrupt(store, f"has an invalid field ({error})") from error


def was_store(path: Path) -> bool:
    """Whether a directory contains files that only a store has, with or without a manifest."""
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
    if PART in data["dataset"]:
        part_of(data["dataset"])
    files = _mapping(data["files"])
    for path, digest in files.items():
        is_safe = all(SAFE.fullmatch(part) for part in path.split("/"))
        if not is_safe or not HEX64.fullmatch(_text(digest)):
            raise ValueError(f"file {path!r}")
    samples = {key: _count(crc, CRC_LIMIT) for key, crc in _mapping(data["samples"]).items()}
    if set(samples) != {*COLUMNS, "name"}:
        raise ValueError(f"columns {sorted(samples)}")
    texts = {}
    for slug, entries in _mapping(data["texts"]).items():
        texts[slug] = [_text_features(slug, entry) for entry in _sequence(entries)]
    arrays = {key: _array(key, item, rows) for key, item in _mapping(data["arrays"]).items()}
    shards = {key: _count(n) for key, n in _mapping(data.get("shards", {})).items()}
    shards_fit = shards.keys() == arrays.keys() and 0 not in shards.values()
    if data["format"] == PUBLISHED and not shards_fit:
        raise ValueError("the lists of shards and arrays differ")
    return Manifest(
        dataset=_mapping(data["dataset"]),
        rows=rows,
        rows_ok=rows_ok,
        classes=tuple(_text(v) for v in _sequence(data["classes"])),
        domains=tuple(_text(v) for v in _sequence(data["domains"])),
        samples=samples,
        arrays=arrays,
        texts=texts,
        files=files,
        shards=shards,
    )


def _array(key: str, item: Any, rows: int) -> ArrayInfo:
    shape = tuple(_count(n) for n in _sequence(item["shape"]))
    chunk_rows = _count(item["chunk_rows"])
    crcs = tuple(_count(crc, CRC_LIMIT) for crc in _sequence(item["chunks"]))
    has_rows = len(shape) >= 2 and chunk_rows > 0
    if not SAFE.fullmatch(key) or item["dtype"] not in DTYPES or not has_rows:
        raise ValueError(f"array {key!r}")
    if shape[0] != rows or len(crcs) != -(-rows // chunk_rows):
        raise ValueError(
            f"array {key!r} has the shape {shape} and {len(crcs)} chunks of {chunk_rows} rows, which does not fit a "
            f"store of {rows} rows"
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
        raise ValueError(f"{value!r:.40} is no valid number of rows or files")
    return value


def _typed(value: Any, kind: type, called: str) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{value!r:.40} is not {called}")
    return value


_text = partial(_typed, kind=str, called="a string")
_sequence = partial(_typed, kind=list, called="a list")
_mapping = partial(_typed, kind=dict, called="an object")


def _corrupt(store: Path | str, why: str) -> FedcacheError:
    return CorruptionError(
        f"{store}/{NAME} {why}.",
        "`fedcache repair` cannot restore this file, because no other file has its content. Restore the file from a "
        f"copy. Or move the store away and run the command that made it again:  mv {shell_word(store)} "
        f"{shell_word(f'{store}.damaged')}",
    )


def chunk_files(path: Path, listed: Manifest) -> Iterator[tuple[Path, int, int | None, str]]:
    """(file, crc32c, bytes, words for messages) of every chunk file of the manifest.

    Without ``samples/ok``, which may be replaced at this moment. The bytes of the names are not known, so None.
    """
    for key, dtype in COLUMNS.items():
        if key != "ok":
            # No chunk is empty, so a column of a store without rows has one row.
            size = array_bytes(column_shape(key, max(1, listed.rows)), dtype)
            yield column_file(path, key), listed.samples[key], size, f"samples/{key}"
    yield column_file(path, "name"), listed.samples["name"], None, "samples/name"
    for key, info in listed.arrays.items():
        for number, crc in enumerate(info.chunks):
            place = feature_file(path, key, number, info.shape)
            yield place, crc, info.chunk_bytes, f"chunk {number} of {key}"
    for slug, entries in listed.texts.items():
        for entry in entries:
            place, size = text_file(path, slug, entry)
            yield place, entry["crc"], size, f"text features of {slug}"


def names_of(key: str, info: ArrayInfo) -> tuple[str, str, str]:
    """Names of an array: its key, its backbone, and ``backbone@size``."""
    backbone = str(info.recipe.get("backbone", key))
    size = info.recipe.get("size", 0)
    return key, backbone, f"{backbone}@{size}"


def match_arrays(arrays: Mapping[str, ArrayInfo], name: str) -> list[str]:
    """Keys of the arrays that a name may mean; the name may also contain the path of a user's model."""
    names_by_key = {key: names_of(key, info) for key, info in arrays.items()}
    found = [key for key, names in names_by_key.items() if name in names]
    if found:
        return found
    bare = bare_name(name)  # only now, because it looks at installed packages
    return [key for key, names in names_by_key.items() if bare in names]


def select_arrays(
    arrays: Mapping[str, ArrayInfo], backbones: str | Sequence[str] | None, store: str
) -> list[str]:
    """Keys of the feature arrays that have the names ``backbones`` (see ``names_of``); None means all feature arrays.

    Raises StoreError for a name without features in the store, also if it has pixels of that name; UsageError for a
    name of several arrays.
    """
    if isinstance(backbones, str):
        names = [backbones]
    else:
        names = list(backbones or [])
    # Arrays of uint8 are pixels.
    features = {key: info for key, info in arrays.items() if info.dtype != "uint8"}
    if not names:
        if not features:
            raise StoreError(f"{store} has no features yet.", "fedcache extract --help")
        return list(features)
    chosen = []
    for name in names:
        found = match_arrays(features, name)
        listed = ", ".join(features) or "no features"
        hint = f"The store has {listed}. Each of these names selects one feature set."
        if not found:
            raise StoreError(f"{store} has no features of {name!r}.", hint)
        if len(found) > 1:
            raise UsageError(f"{store} has {len(found)} feature sets of {name!r}.", hint)
        chosen += found
    return list(dict.fromkeys(chosen))


# The small files of a store next to its arrays: unreadable images, saved partitions, and the
# history.
#
# ``quarantine.jsonl`` lists the rows whose image could not be read, one line each, sorted by row;
# ``samples/ok`` is its complement. Both are replaced just before the manifest that lists them; in
# between, the journal of the array whose rows are added to them vouches for them. ``history.jsonl``
# lists events with times and measurements. It is the only file that may differ between equal stores.


QUARANTINE = "quarantine.jsonl"

VANISHED = "is no longer in the dataset"
"""Reason of a row that an earlier store had and whose image was removed from the dataset. It is not a defect."""

HISTORY = "history.jsonl"


def entries_of(rows: BadRows) -> list[dict[str, Any]]:
    """{row, name, reason} of unreadable rows, sorted by row."""
    entries = []
    for row, (name, reason) in sorted(rows.items()):
        entries.append({"row": row, "name": name, "reason": reason})
    return entries


def lines_of(rows: BadRows) -> bytes:
    """The bytes of ``quarantine.jsonl``: a line per entry."""
    return b"".join(canonical_json(entry) + b"\n" for entry in entries_of(rows))


def write_sidecar(store: Path, manifest: Manifest, relative: str, *parts: Buffer) -> None:
    """Write a small file of a store and enter it in ``manifest``, which the caller writes."""
    path = store / relative
    make_directories(path.parent)
    write_atomic(path, *parts)
    manifest.files[relative] = sha256_hex(*parts)


def commit_of(manifest: Manifest, rows: BadRows) -> dict[str, Any]:
    """Content of a journal's commit line: the checksums of ``samples/ok`` and of the list after ``rows`` are added."""
    raw = encode(_ok(manifest, rows), max(1, manifest.rows), "uint8")
    return {"ok": checksum(raw), "quarantine": sha256_hex(lines_of(rows))}


def replace_sidecars(store: Path, manifest: Manifest, rows: BadRows) -> None:
    """Write ``samples/ok`` and the list of unreadable rows, and enter both in ``manifest``, which the caller writes."""
    ok = _ok(manifest, rows)
    place = column_file(store, "ok")
    manifest.samples["ok"] = write_chunk_file(place, ok, max(1, manifest.rows), "uint8")
    manifest.rows_ok = int(ok.sum())
    if rows or QUARANTINE in manifest.files:
        write_sidecar(store, manifest, QUARANTINE, lines_of(rows))


def _ok(manifest: Manifest, rows: BadRows) -> NDArray[np.uint8]:
    ok = np.ones(manifest.rows, np.uint8)
    ok[sorted(rows)] = 0
    return ok


def read_quarantine(store: Path, manifest: Manifest) -> BadRows:
    """(name, reason) per bad row. Raises CorruptionError if no manifest or journal has the file's digest."""
    path = store / QUARANTINE
    expected = manifest.files.get(QUARANTINE)
    try:
        raw = read_whole(path)
    except FileNotFoundError:
        if expected is None:
            return {}
        raise _damaged(path, "is missing") from None
    except OSError as error:
        raise _damaged(path, "is unreadable") from error
    found = sha256_hex(raw)
    if found != expected and found not in announced_checksums(store, "quarantine"):
        raise _damaged(path, "does not have the sha256 that the manifest lists")
    rows = {}
    try:
        for line in raw.splitlines():
            entry = parse_json(line)
            row = entry["row"]
            if 0 <= row < manifest.rows:
                rows[int(row)] = (str(entry["name"]), str(entry["reason"]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(path, "was not written by fedcache") from error
    return rows


def _damaged(path: Path, why: str) -> FedcacheError:
    return damaged("the list of unreadable images", path, why)


def append_event(store: Path, event: Mapping[str, Any]) -> None:
    """Append one event, after removing an incomplete last line. The caller holds the history's lock."""
    path = store / HISTORY
    with explain_disk_errors(path):
        if path.exists():
            raw = read_whole(path)
            if raw and not raw.endswith(b"\n"):
                os.truncate(path, raw.rfind(b"\n") + 1)
        append_line(path, to_signed(event))


def read_history(store: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The events, and the numbers (from 1) of lines that are damaged."""
    try:
        raw = read_whole(store / HISTORY)
    except OSError:
        return [], []
    events = []
    damaged_lines = []
    for number, line in enumerate(raw.splitlines(keepends=True), 1):
        try:
            if not line.endswith(b"\n"):
                raise ValueError("is torn")
            events.append(parse_signed(line[:-1]))
        except ValueError:
            damaged_lines.append(number)
    return events, damaged_lines


def forgotten_arrays(store: Path, manifest: Manifest) -> list[str]:
    """Keys of arrays that the history lists as finished and that have a folder, but no journal or manifest entry.

    There are such arrays only if an older manifest was put back. The history is read only if a folder is not listed.
    """
    unlisted = set()
    for folder in (store / "features").glob("*"):
        key = folder.name
        is_known = key in manifest.arrays or journal_path(store, key).exists()
        if not is_known and folder.is_dir():
            unlisted.add(key)
    if not unlisted:
        return []
    events, _ = read_history(store)
    finished: set[str] = set()
    for event in events:
        finished.update(map(str, event.get("keys", ())))
    return sorted(unlisted & finished)


def partition_file(store: Path, manifest: Manifest, name: str) -> str:
    """The place in the store of a partition: arrays, or JSON of an earlier release. Raises StoreError without one."""
    for suffix in PARTITION_SUFFIXES:
        relative = f"partitions/{name}{suffix}"
        if relative in manifest.files:
            return relative
    raise StoreError(
        f"{store.name} has no partition {name!r}.", "Make one: fedcache partition --help"
    )


def read_partition(store: Path, manifest: Manifest, name: str) -> memoryview:
    """The file of a partition, mapped. Raises StoreError without one; CorruptionError as ``read_sidecar``."""
    relative = partition_file(store, manifest, name)
    return read_sidecar(store, manifest, relative, f"partition {name}")


def read_sidecar(store: Path, manifest: Manifest, relative: str, what: str) -> memoryview:
    """A file that the manifest lists, mapped. Raises CorruptionError, naming ``what``, for another sha256."""
    path = store / relative
    try:
        raw = mapped(path)
    except OSError as error:
        raise damaged(what, path, "is missing or unreadable") from error
    if sha256_hex(raw) != manifest.files[relative]:
        raise damaged(what, path, "does not have the sha256 that the manifest lists")
    return raw


def partition_words(store: Path, manifest: Manifest, name: str) -> dict[str, Any]:
    """Description of a partition in its file. Raises CorruptionError, also for other files."""
    raw = read_partition(store, manifest, name)
    path = store / partition_file(store, manifest, name)
    try:
        if is_array_file(raw):
            found = read_content(raw)
        else:
            found = parse_json(bytes(raw))
    except ValueError as error:
        raise damaged(f"partition {name}", path, "is not JSON") from error
    if not isinstance(found, dict):
        raise damaged(f"partition {name}", path, "is not a partition")
    return found


def partition_parts(
    name: str, content: Mapping[str, Any] | Sequence[Buffer]
) -> tuple[str, list[Buffer]]:
    """The path of a partition's file in the store, and the parts of its content; a mapping is written as JSON."""
    if isinstance(content, Mapping):
        return f"partitions/{name}.json", [canonical_json(dict(content))]
    return f"partitions/{name}.partition", list(content)


def is_written(store: Path, manifest: Manifest, relative: str, parts: Sequence[Buffer]) -> bool:
    """Whether a sidecar exists already, with this content."""
    path = store / relative
    digest = sha256_hex(*parts)
    return manifest.files.get(relative) == digest and path.is_file() and file_sha256(path) == digest


def write_partition(
    store: Path, manifest: Manifest, name: str, relative: str, parts: Sequence[Buffer]
) -> list[Path]:
    """Write the file of a partition and enter it in ``manifest``, which the caller writes.

    Returns:
        files of this partition with another ending, to be removed once the manifest is written.
    """
    write_sidecar(store, manifest, relative, *parts)
    replaced = []
    for suffix in PARTITION_SUFFIXES:
        other = f"partitions/{name}{suffix}"
        if other in manifest.files and other != relative:
            del manifest.files[other]
            replaced.append(store / other)
    return replaced


# Text features of a store: their entries in the manifest, and the names of their folders.


TEXT_ORDER = ("clip-rn50", "clip-vit-b-16", "clip-vit-b-32", "glyph-clip")
"""Backbones with a text tower, by priority: the first one that a store has is used."""


def find_text(
    manifest: Manifest,
    backbone: str,
    templates: Sequence[str] | None = None,
    weights: str | None = None,
) -> dict[str, Any] | None:
    """The current text features of a backbone or of its array; with these templates and weights, if they are given.

    If several entries fit, it is the one that was written or chosen last.
    """
    slug = slug_of(backbone_of(manifest, backbone))
    entry: dict[str, Any]
    for entry in reversed(manifest.texts.get(slug, [])):
        if templates is not None and entry["templates"] != list(templates):
            continue
        if weights is not None and entry["meta"].get("weights") != weights:
            continue
        return entry
    return None


def backbone_of(manifest: Manifest, name: str) -> str:
    """The name of a backbone, given by its own name or by the key of one of its arrays."""
    if slug_of(name) in manifest.texts or name not in manifest.arrays:
        return name
    return str(manifest.arrays[name].recipe.get("backbone"))


def text_of_array(manifest: Manifest, key: str) -> dict[str, Any] | None:
    """The last entry of text features with the same backbone and weights as an array.

    Ingested text features have no weights. They belong to every array with the same name of the backbone.
    """
    recipe = manifest.arrays[key].recipe
    name = str(recipe.get("backbone"))
    weights = recipe.get("weights")
    found = find_text(manifest, name, weights=weights)
    current = find_text(manifest, name)
    if found is None and current is not None and "weights" not in current["meta"]:
        return current
    return found


def read_text(store: Path, backbone: str, entry: dict[str, Any]) -> NDArray[np.float32]:
    """The matrix [C, D] of an entry, verified. Raises CorruptionError."""
    place, size = text_file(store, slug_of(backbone), entry)
    raw = read_checked(place, entry["crc"], f"text features of {backbone}", size=size)
    rows, width = entry["shape"]
    # A chunk has at least one row, also for a store without classes.
    return np.frombuffer(raw, "<f4")[: rows * width].reshape(rows, width)


def text_file(store: Path, slug: str, entry: Mapping[str, Any]) -> tuple[Path, int]:
    """The file of an entry and the bytes of its rows."""
    rows, width = entry["shape"]
    place = chunk_path(store / "text" / slug / entry["id"], 0, 2)
    return place, array_bytes((max(1, rows), width), "float32")


def write_text(
    store: Path,
    manifest: Manifest,
    backbone: str,
    templates: Sequence[str],
    matrix: NDArray[np.float32],
    meta: Mapping[str, Any],
) -> None:
    """Write a matrix [C, D] and enter it last in ``manifest``. The caller holds the manifest's lock and writes it.

    Raises CorruptionError, for values that are not finite; InternalError, for another shape.
    """
    values = np.asarray(matrix)
    if values.ndim != 2 or not values.shape[1]:
        raise InternalError(
            f"Text features of {backbone} have the wrong shape {values.shape}.",
            "Expected [classes, D]: a row of D numbers for each class, D at least 1.",
        )
    values = to_stored_dtype(values, "float32", (), 0, f"text features of {backbone}")
    slug = slug_of(backbone)
    rows = max(1, len(values))
    check_name("backbone", slug)
    entry = {"templates": list(templates), "meta": dict(meta)}
    entry_id = digest_of(entry)[:8]
    # The chunk first, then its metadata: a crash in between leaves files that no manifest lists.
    listed: dict[str, Any] = {**entry, "id": entry_id, "shape": list(values.shape)}
    place, _ = text_file(store, slug, listed)
    listed["crc"] = write_chunk_file(place, values, rows, "float32")
    for relative, raw in text_sidecars(slug, backbone, [listed]).items():
        write_sidecar(store, manifest, relative, raw)
    kept = [other for other in manifest.texts.get(slug, []) if other["id"] != entry_id]
    manifest.texts[slug] = [*kept, listed]


def text_sidecars(
    slug: str, backbone: str, entries: Sequence[Mapping[str, Any]]
) -> dict[str, bytes]:
    """``zarr.json`` of a backbone's group of text features and of the arrays in it, by path."""
    found = {f"text/{slug}/zarr.json": group_metadata({"backbone": backbone})}
    for entry in entries:
        name = entry["id"]
        shape = entry["shape"]
        found[f"text/{slug}/{name}/zarr.json"] = array_metadata(
            shape,
            "float32",
            max(1, shape[0]),
            {"templates": entry["templates"]},
            (f"class_{name}", f"feature_{name}"),
        )
    return found


def no_text_features(store: Path, backbone: str) -> FedcacheError:
    """The error for missing text features."""
    return StoreError(
        f"{store.name} has no text features of {backbone}.",
        f"fedcache extract --store {shell_word(store)} --backbones {shell_word(backbone)}, with --dataset "
        "and the other options of the first extraction",
    )


def nothing_is_added(place: Path | str) -> FedcacheError:
    """The error for a change of a published store."""
    return StoreError(
        f"{place} is a published store, which cannot be changed.",
        "Change the store that it was published from, then publish it again:  fedcache publish STORE FOLDER",
    )


def check_name(what: str, name: str) -> None:
    """Refuse a name that cannot be the name of a file. Raises UsageError."""
    if not SAFE.fullmatch(name):
        raise UsageError(
            f"{what} name {name!r} cannot be used as a file name.",
            "Use letters, digits, '.', '_' and '-', beginning with a letter or digit, at most 128.",
        )


def is_published(place: Path | str | None) -> bool:
    """Whether a place is a published store: an address, or a folder with its mark."""
    if is_store_address(place):
        return True
    return place is not None and (Path(place) / MARK).exists()


def origin_of(path: Path) -> str | None:
    """Address or folder of the published store of a mirror; None for any other store."""
    origin = read_sealed(path / ORIGIN, MIRROR)
    if origin is None:
        return None
    return str(origin.content["place"])
