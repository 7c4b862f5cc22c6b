"""Publishing a store: few large files in a folder or a bucket, which fedcache, zarr and xarray read over a network.

zarr writes the features as shards of many chunks each. The chunks in a shard are the chunk files of the store, byte for
byte, so one range of a shard is one chunk and has the checksum in the manifest. The root ``zarr.json`` contains the
metadata of all arrays, because a web server does not list files.

The order of the writes makes a publication safe to interrupt. First ``publication.json`` names the store that this
place belongs to. Then come the shards, then the metadata, and the manifest last. A place without a manifest is not read
as a store, and a later call continues there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.config import is_store_address, refuse_remote
from fedcache.errors import CorruptionError, InternalError, StoreError, UsageError, shell_word
from fedcache.optional import needed_library
from fedcache.parsing import counted
from fedcache.progress import Observer
from fedcache.store.byte_source import ByteSource, in_threads, open_source
from fedcache.store.chunks import (
    CRC_BYTES,
    checksum,
    chunk_path,
    encode_strings,
    fill_of,
    has_checksum,
    read_checked,
)
from fedcache.store.files import canonical_json, parse_signed, sha256_hex, to_signed
from fedcache.store.lock import is_alive, writer_of
from fedcache.store.manifest import (
    MARK,
    NAME,
    QUARANTINE,
    ArrayInfo,
    Manifest,
    column_file,
    feature_file,
    lines_of,
    read_quarantine,
    read_sidecar,
    text_sidecars,
)
from fedcache.store.mirror import FETCHERS, normal_place, published_manifest, small_chunks
from fedcache.store.reader import Reader
from fedcache.store.store import Store
from fedcache.store.writer import description, sidecars_of
from fedcache.tables.words import numbered

SHARD_BYTES = 128 << 20
"""Bytes of the chunks in a shard file, which is made in memory: 8 files per GiB of features."""

CARD = "README.md"
ROOT = "zarr.json"
_OURS = (NAME, ROOT, CARD)
"""Files by which a store or a publication is recognised in a bucket, whose files are not listed."""


@dataclass(frozen=True)
class Published:
    """Result of publishing a store."""

    place: str  # folder or address
    files: int  # of the publication
    bytes: int  # of these files
    written: int  # files that this call wrote, without the mark ``publication.json``

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return vars(self)


def check_target(target: str) -> str:
    """A target in the form of ``normal_place``.

    Raises UsageError for an address to which nothing can be written.
    """
    refuse_remote(target, "TARGET", remote=True)
    if target.startswith(("http://", "https://")):
        raise UsageError(
            f"{target} is a web address, to which fedcache cannot write.",
            "Publish to a folder or a bucket that the web server serves:  fedcache publish STORE FOLDER",
        )
    return normal_place(target)


def publish(
    store: Store, target: str, card: str, observer: Observer, *, anonymous_names: bool = False
) -> Published:
    """Publish the complete arrays of a store with its columns, text features, partitions and groups.

    An earlier publication of this store at the target is completed; files that have changed since are replaced.

    Args:
        store: it must hold features.
        target: a folder, or the address of a bucket with a prefix.
        card: text of ``README.md``.
        observer: receives the number of finished files.
        anonymous_names: whether names of rows become numbers.

    Raises:
        StoreError for a store without features or with deleted rows, a place where something else is, or refused
        credentials; UsageError for an address to which nothing can be written; CorruptionError for a damaged store;
        MachineError without the extra ``remote``, or where writing fails.
    """
    place = check_target(target)
    if f"{place}/".startswith(f"{store.place}/"):
        raise _inside(place, store.place)
    if not store.arrays or not store.rows:
        raise StoreError(
            f"{store.place} has no features to publish.",
            "fedcache extract --dataset digits --backbones efficientnet-lite0",
        )
    gone = int(store.vanished().sum())
    if gone:
        rows = counted(gone, "row")
        raise StoreError(
            f"{store.place} still has names and features of {rows} that were deleted from the "
            "dataset. publish would make them public.",
            "Publish a new store without them:  fedcache extract --fresh --store NEW.zarr   with all options of the "
            "extraction",
        )
    zarr = needed_library("zarr", "publish", "remote")
    source = open_source(place)
    manifest, files = _publication(store, card, zarr, anonymous_names=anonymous_names)
    raw_manifest = manifest.to_bytes()
    claim = _claim(source, store, raw_manifest, anonymous_names=anonymous_names)
    unchanged = _unchanged(source, manifest, claim["replaces"])
    shards = list(_shards(manifest))
    small_files = len(files) + 1  # with the manifest
    total = len(shards) + small_files
    written = 0
    size = sum(map(len, files.values())) + len(raw_manifest)
    observer.start("publishing", total, "files")
    try:
        for key, numbers, length in shards:
            info = manifest.arrays[key]
            per_shard = manifest.shards[key]
            name = feature_file(Path(), key, numbers.start // per_shard, info.shape).as_posix()
            size += length
            # A shard that an interrupted publication of other content wrote has the same name and length.
            usable = not claim["replaces"] or key in unchanged
            if not usable or not _has_shard(source, name, length, info, numbers):
                raw = _shard(zarr, store.reader(key), numbers, per_shard)
                source.put(name, raw)
                written += 1
            observer.advance(1)
        # zarr finds arrays by the root, so the root is written after all arrays.
        root = files.pop(ROOT)
        in_threads(FETCHERS, source.put, files.keys(), files.values())
        source.put(ROOT, root)
        source.put(NAME, raw_manifest)
        if claim["replaces"]:
            source.put(MARK, to_signed({**claim, "replaces": False}))
        observer.advance(small_files)
    finally:
        observer.stop()
    mark_size = source.size(MARK) or 0
    return Published(place, total + 1, size + mark_size, written + small_files)


def _publication(
    store: Store, card: str, zarr: Any, *, anonymous_names: bool
) -> tuple[Manifest, dict[str, bytes]]:
    """The manifest of a publication, and its other files by name, without the shards. These files are small.

    Raises CorruptionError for damaged columns, texts, partitions or groups.
    """
    path = store.path
    held = store.manifest
    bad = read_quarantine(path, held)
    payloads = {}
    for name, crc, size in small_chunks(held):
        payloads[name] = read_checked(path / name, crc, name, size=size)
    samples = dict(held.samples)
    if anonymous_names:
        names = numbered(held.rows)
        raw = encode_strings(names)
        samples["name"] = checksum(raw)
        payloads[column_file(Path(), "name").as_posix()] = raw
        bad = {row: (names[row], why) for row, (_, why) in bad.items()}
    files = {}
    for name, raw in payloads.items():
        files[name] = raw + checksum(raw).to_bytes(CRC_BYTES, "little")
    for name in held.files:
        if name.startswith(("partitions/", "groups/")):
            files[name] = bytes(read_sidecar(path, held, name, name))
    if bad:
        files[QUARANTINE] = lines_of(bad)
    shards = {}
    for key, info in held.arrays.items():
        chunk_file_bytes = info.chunk_bytes + CRC_BYTES
        # Each shard has an index of all its chunks, so a small array gets a smaller shard. A power of two, so that a
        # store that grows keeps its shards for some time.
        enough = 1 << max(0, len(info.chunks) - 1).bit_length()
        shards[key] = min(enough, max(1, SHARD_BYTES // chunk_file_bytes))
    files |= _metadata(store, shards, zarr)
    digests = {name: sha256_hex(raw) for name, raw in files.items() if name not in payloads}
    manifest = replace(held, samples=samples, files=digests, shards=shards)
    # The manifest does not list the card, so it is added after the digests.
    files[CARD] = card.encode()
    return manifest, files


def _metadata(store: Store, shards: Mapping[str, int], zarr: Any) -> dict[str, bytes]:
    """Every ``zarr.json`` by its path; that of a group with consolidated metadata, as Zarr calls it."""
    held = store.manifest
    found = sidecars_of(held)
    for key, info in held.arrays.items():
        metadata, _, _ = _array(zarr, key, info, shards[key])
        found[f"features/{key}/{ROOT}"] = metadata
    for slug, entries in held.texts.items():
        backbone = str(entries[-1]["meta"].get("backbone", slug))
        found |= text_sidecars(slug, backbone, entries)
    nodes = {name.removesuffix(ROOT): json.loads(raw) for name, raw in found.items()}
    return {f"{folder}{ROOT}": _consolidated(folder, nodes) for folder in nodes}


def _consolidated(folder: str, nodes: Mapping[str, Mapping[str, Any]]) -> bytes:
    """``zarr.json`` of a node; that of a group also contains the metadata of all nodes below it.

    Args:
        folder: of the node, with ``/`` at its end; "" for the root.
        nodes: by folder.
    """
    node = dict(nodes[folder])
    if node["node_type"] == "group":
        inside = {}
        for name, inner in nodes.items():
            if name.startswith(folder) and name != folder:
                relative = name.removeprefix(folder).rstrip("/")
                inside[relative] = inner
        node["consolidated_metadata"] = {
            "kind": "inline",
            "must_understand": False,
            "metadata": inside,
        }
    return canonical_json(node)


def _array(
    zarr: Any, key: str, info: ArrayInfo, per_shard: int
) -> tuple[bytes, Any, dict[str, Any]]:
    """A new feature array of zarr in memory.

    Returns:
        the bytes of its metadata, the array, and the dictionary in which zarr keeps the files of the array, by name.
    """
    codecs = needed_library("zarr.codecs", "publish", "remote")
    objects: dict[str, Any] = {}
    attributes, dimensions = description(key, info.recipe, len(info.shape))
    endian = None
    if np.dtype(info.dtype).itemsize > 1:
        endian = "little"
    array = zarr.create_array(
        store=zarr.storage.MemoryStore(objects),
        shape=info.shape,
        dtype=info.dtype,
        chunks=(info.chunk_rows, *info.shape[1:]),
        shards=(info.chunk_rows * per_shard, *info.shape[1:]),
        filters=None,
        serializer=codecs.BytesCodec(endian=endian),
        compressors=[codecs.Crc32cCodec()],
        fill_value=fill_of(info.dtype),
        attributes=attributes,
        dimension_names=dimensions,
        # A chunk of unreadable images contains only the fill value, and must be written too.
        config={"write_empty_chunks": True},
        zarr_format=3,
    )
    metadata = canonical_json(json.loads(objects[ROOT].to_bytes()))
    return metadata, array, objects


def _shards(manifest: Manifest) -> Iterator[tuple[str, range, int]]:
    """(key, numbers of its chunks, bytes) of every shard file: the chunks, and an index with a checksum."""
    for key, info in manifest.arrays.items():
        per_shard = manifest.shards[key]
        # The index has 8 bytes for the offset of each chunk, and 8 for its length.
        index_bytes = 16 * per_shard + CRC_BYTES
        count = len(info.chunks)
        for start in range(0, count, per_shard):
            numbers = range(start, min(start + per_shard, count))
            chunks_bytes = len(numbers) * (info.chunk_bytes + CRC_BYTES)
            yield key, numbers, chunks_bytes + index_bytes


def _shard(zarr: Any, reader: Reader, numbers: range, per_shard: int) -> bytes:
    """The bytes of a shard file, made by zarr. Raises InternalError unless it holds the chunks of the manifest."""
    info = reader.info
    _, array, objects = _array(zarr, reader.key, info, per_shard)
    first = numbers.start * info.chunk_rows
    rows = np.concatenate([reader.chunk(number) for number in numbers])
    array[first : first + len(rows)] = rows
    name = chunk_path(Path(), numbers.start // per_shard, len(info.shape)).as_posix()
    raw: bytes = objects[name].to_bytes()
    if not _holds_chunks(raw, info, numbers):
        raise InternalError(
            f"zarr {zarr.__version__} writes the chunks of {reader.key} to other paths than fedcache expects.",
            "pip install 'zarr>=3.1,<3.2'",
        )
    return raw


def _holds_chunks(raw: bytes, info: ArrayInfo, numbers: range) -> bool:
    """Whether a shard file consists of these chunks and its index, each followed by its checksum."""
    size = info.chunk_bytes + CRC_BYTES
    for place, number in enumerate(numbers):
        chunk = raw[place * size : (place + 1) * size]
        if not has_checksum(chunk, info.chunks[number]):
            return False
    index = raw[len(numbers) * size :]
    return has_checksum(index, checksum(index[:-CRC_BYTES]))


def _has_shard(source: ByteSource, name: str, length: int, info: ArrayInfo, numbers: range) -> bool:
    """Whether a shard file exists: in a folder with the right chunks, in a bucket with the right length."""
    if source.size(name) != length:
        return False
    if is_store_address(source.place):
        return True
    return _holds_chunks(source.get(name), info, numbers)


def _claim(
    source: ByteSource, store: Store, raw: bytes, *, anonymous_names: bool
) -> dict[str, Any]:
    """Take a place for the publication of a store, before anything else is written there.

    Returns:
        the content of the mark. Its ``replaces`` is False if all complete files in this place belong to this
        publication, the digest of the manifest of the complete publication that this one replaces, or True if an
        interrupted publication of other content may have left files.

    Raises:
        StoreError for a place with other files; UsageError if an earlier publication left the names of rows out and
        this one contains them.
    """
    claim = {
        "kind": "publication of a fedcache store",
        "dataset": store.dataset["digest"],
        "manifest": sha256_hex(raw),
        "replaces": False,  # see "Returns"
        "anonymous_names": anonymous_names,
    }
    _need_own_place(source)
    if source.put_if_absent(MARK, to_signed(claim)):
        return claim
    try:
        existing = parse_signed(source.get(MARK))
    except ValueError as error:
        raise StoreError(
            f"{source.place} contains a {MARK} that {error}, so fedcache cannot tell which store was published there.",
            f"If it is an earlier publication, delete everything in {source.place}, and run the same command "
            f"again. {_other_place(source.place)}",
        ) from error
    if existing.get("kind") != claim["kind"] or existing.get("dataset") != claim["dataset"]:
        raise _something_else(source, "a publication of another dataset")
    if existing.get("anonymous_names") and not anonymous_names:
        raise UsageError(
            f"{source.place} was published without the names of rows, but this command would publish the names.",
            "Add --anonymous-names. To publish the names, choose another place.",
        )
    if existing.get("manifest") == claim["manifest"]:
        return {**claim, "replaces": existing["replaces"]}
    # Files of the earlier content have the same names. The mark tells later calls that a file may be one of them.
    claim["replaces"] = True
    if source.size(NAME) is not None and sha256_hex(source.get(NAME)) == existing["manifest"]:
        claim["replaces"] = existing["manifest"]
    source.put(MARK, to_signed(claim))
    return claim


def _need_own_place(source: ByteSource) -> None:
    """Refuse a place with other files than those of a publication, and a place inside a store. Raises StoreError.

    Partial files of killed publications are removed.
    """
    folder = Path(source.place)
    local = not is_store_address(source.place)
    if local:
        for above in folder.parents:
            if (above / "samples" / "uid").is_dir():
                raise _inside(folder, above)
    if local and folder.exists():
        if not folder.is_dir():
            raise _something_else(source, "a file")
        for left in folder.rglob("*.partial"):
            pid = writer_of(left)
            if pid and not is_alive(pid):
                left.unlink(missing_ok=True)
        names = [path.name for path in sorted(folder.iterdir())]
        present = [name for name in names if not name.endswith(".partial")]
    else:
        present = [name for name in _OURS if source.size(name) is not None]
    if present and source.size(MARK) is None:
        raise _something_else(source, present[0])


def _inside(place: object, store: object) -> StoreError:
    return StoreError(
        f"Nothing can be published to {place}, because it is inside the store {store}.",
        _other_place(store),
    )


def _something_else(source: ByteSource, what: str) -> StoreError:
    return StoreError(
        f"{source.place} contains {what}, not a publication of this store.",
        _other_place(source.place),
    )


def _other_place(place: object) -> str:
    """A sentence with the command that publishes to a place next to this one."""
    return f"Use another place:  fedcache publish STORE {shell_word(f'{place}-published')}"


def _unchanged(source: ByteSource, manifest: Manifest, earlier_digest: object) -> set[str]:
    """Keys of arrays that the publication whose manifest has this digest holds in the same shards.

    None if the manifest in this place has another digest.
    """
    if source.size(NAME) is None:
        return set()
    try:
        raw, earlier = published_manifest(source)
    except CorruptionError:
        return set()
    if sha256_hex(raw) != earlier_digest:
        return set()
    keys = set()
    for key, info in manifest.arrays.items():
        same_shards = earlier.shards.get(key) == manifest.shards[key]
        if same_shards and earlier.arrays.get(key) == info:
            keys.add(key)
    return keys
