"""Mirrors: the files of a published store that were read, kept in the home like a local store.

A mirror is a folder ``remote/NAME.zarr`` of the home. It has the manifest of the published store, its columns, text
features, partitions and groups, and the chunk files that were read so far, each at the same place as in a local store.
So code that reads a local store can read a mirror; only ``reader`` asks for chunk files that are still missing.
``origin.json`` names the place of the published store. The name of a mirror depends on the manifest, so a store that is
published again has another mirror.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from fedcache.config import Home, is_store_address
from fedcache.errors import CorruptionError, FedcacheError, MachineError, StoreError, shell_word
from fedcache.parsing import slug_of
from fedcache.store.byte_source import ByteSource, FolderSource, in_threads, open_source
from fedcache.store.chunks import CRC_BYTES, has_checksum
from fedcache.store.files import (
    digest_of,
    disk_free,
    explain_disk_errors,
    make_private,
    sha256_hex,
    size_in_environment,
    temporary_name,
    write_atomic,
    write_sealed,
)
from fedcache.store.manifest import (
    MARK,
    MIRROR,
    NAME,
    ORIGIN,
    Manifest,
    chunk_files,
    column_file,
    feature_file,
    parse_manifest,
)

FOLDER = "remote"
"""Folder of mirrors in the fedcache home."""

FETCHERS = 8
"""Number of requests that are sent at once."""

OTHER_ANSWERS = (b"<", b"\x1f\x8b")
"""First bytes of web pages and of gzip, which some servers return instead of a file."""

KEPT = 16
"""Number of most recently read chunk files that are never removed, however little room there is.

It is larger than ``FETCHERS``, so that the files of current requests stay.
"""


def mirrored(published: Path | str) -> Path:
    """The folder of the home in which a published store can be read.

    The manifest is always read from the source. All other files except chunks of features are read from the source if
    the mirror does not have them, or has damaged ones.

    Raises:
        StoreError for a place without a published store, or without access to it; CorruptionError for a damaged store;
        MachineError without the extra ``remote``, the network or room on the disk.
    """
    place = normal_place(published)
    home = Home.from_environment()
    if home.offline and is_store_address(place):
        raise MachineError(
            f"{place} cannot be read, because downloads are disabled.", "unset FEDCACHE_OFFLINE"
        )
    source = open_source(place)
    raw, manifest = published_manifest(source)
    slug = slug_of(manifest.dataset["slug"])[:80]
    version = digest_of([place, sha256_hex(raw)])[:16]
    path = home.root / FOLDER / f"{slug}-{version}.zarr"
    copy = FolderSource(path)
    with explain_disk_errors(path):
        for folder in (home.root, path.parent, path):
            make_private(folder)
        _bring_small_files(source, copy, manifest)
        # Its time is when the mirror was opened last.
        write_sealed(path / ORIGIN, MIRROR, {"place": place})
        if copy.size(NAME) is None or copy.get(NAME) != raw:
            write_atomic(path / NAME, raw)
    return path


def normal_place(published: Path | str) -> str:
    """An absolute path, or an address without a slash at its end."""
    if is_store_address(published):
        return published.rstrip("/")
    return str(Path(published).resolve())


def idle_mirrors(home: Home, idle_days: float) -> Iterator[tuple[Path, str]]:
    """(folder, reason) of the mirrors that were not opened for ``idle_days``."""
    for path in sorted((home.root / FOLDER).glob("*.zarr")):
        opened = path / ORIGIN
        if not opened.exists():
            opened = path
        days = (time.time() - opened.stat().st_mtime) / 86_400
        if days >= idle_days:
            yield path, f"copy of a published store; not opened for {days:,.0f} days"


def published_manifest(source: ByteSource) -> tuple[bytes, Manifest]:
    """The manifest at a source, as bytes and parsed. Raises StoreError without a manifest; CorruptionError."""
    try:
        raw = source.get(NAME)
    except FileNotFoundError as error:
        what = f"{source.place} is not a store: it has no {NAME}."
        if source.size(MARK) is not None:
            what = f"The publication at {source.place} was not completed."
        raise StoreError(what, publish_again(source)) from error
    if raw.lstrip().startswith(OTHER_ANSWERS):
        raise StoreError(
            f"The server of {source.place} returned a web page or compressed bytes instead of {NAME}.",
            "Check the address. The server must return each file unchanged.",
        )
    try:
        return raw, parse_manifest(raw, source.place)
    except CorruptionError as error:
        raise CorruptionError(error.message, publish_again(source)) from error


def publish_again(source: ByteSource) -> str:
    """A sentence with the command that publishes to a source; the folder behind a web address is not known."""
    if source.place.startswith(("http://", "https://")):
        return "To publish a store to the folder or bucket behind this address:  fedcache publish STORE FOLDER"
    return f"To publish a store there:  fedcache publish STORE {shell_word(source.place)}"


def checked_chunk(
    source: ByteSource, name: str, crc: int, size: int | None = None, start: int | None = None
) -> bytes:
    """A chunk with its checksum, which must be ``crc``, from a source.

    Args:
        source: of the store.
        name: of the object.
        crc: crc32c that the manifest lists.
        size: bytes of the chunk without its checksum; None where that is not known.
        start: of the chunk within a shard; None for an object of its own.

    Raises:
        CorruptionError for a missing chunk or another checksum; errors of the source.
    """
    try:
        if start is None:
            raw = source.get(name)
        else:
            assert size is not None
            raw = source.get_range(name, start, size + CRC_BYTES)
    except FileNotFoundError as error:
        raise _other_bytes(source, f"{name} is missing") from error
    is_whole = size is None or len(raw) == size + CRC_BYTES
    if not is_whole or not has_checksum(raw, crc):
        raise _other_bytes(source, f"{name} does not have the checksum that the manifest lists")
    return raw


def checked_file(source: ByteSource, name: str, digest: str) -> bytes:
    """A file from a source, which must have the sha256 ``digest``. Raises CorruptionError; errors of the source."""
    try:
        raw = source.get(name)
    except FileNotFoundError as error:
        raise _other_bytes(source, f"{name} is missing") from error
    if sha256_hex(raw) != digest:
        raise _other_bytes(source, f"{name} does not have the sha256 that the manifest lists")
    return raw


def _other_bytes(source: ByteSource, what: str) -> FedcacheError:
    """The error for an object with other bytes than the manifest lists."""
    hint = "If someone is publishing the store right now, run the same command again later. "
    if is_store_address(source.place):
        hint += "Otherwise delete this file first, because publish keeps a file that has the right length. "
    return CorruptionError(f"{source.place}: {what}.", hint + publish_again(source))


def array_chunk(source: ByteSource, manifest: Manifest, key: str, number: int) -> bytes:
    """A chunk of a feature array with its checksum, from a source. Raises as ``checked_chunk``."""
    info = manifest.arrays[key]
    crc = info.chunks[number]
    size = info.chunk_bytes
    if key not in manifest.shards:
        name = feature_file(Path(), key, number, info.shape).as_posix()
        return checked_chunk(source, name, crc, size)
    shard, place = divmod(number, manifest.shards[key])
    name = feature_file(Path(), key, shard, info.shape).as_posix()
    return checked_chunk(source, name, crc, size, place * (size + CRC_BYTES))


def small_chunks(manifest: Manifest) -> Iterator[tuple[str, int, int | None]]:
    """(name, crc32c, bytes) of every chunk that is an object of its own: columns and text features."""
    for place, crc, size, _ in chunk_files(Path(), manifest):
        if place.parts[0] != "features":
            yield place.as_posix(), crc, size
    ok = column_file(Path(), "ok")
    yield ok.as_posix(), manifest.samples["ok"], max(1, manifest.rows)


def small_objects(
    source: ByteSource, manifest: Manifest
) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """The name of every object except the manifest and features, and a function that reads and checks the object."""
    for name, crc, size in small_chunks(manifest):
        yield name, partial(checked_chunk, source, name, crc, size)
    for name, digest in sorted(manifest.files.items()):
        yield name, partial(checked_file, source, name, digest)


def _bring_small_files(source: ByteSource, copy: FolderSource, manifest: Manifest) -> None:
    """Fetch the missing and damaged files of a mirror, except features and the ``zarr.json`` files.

    Only other readers than fedcache need a ``zarr.json``.
    """
    published = dict(small_objects(source, manifest))

    def bring(item: tuple[str, Callable[[], bytes]]) -> None:
        name, read_copy = item
        if name.endswith("zarr.json"):
            return
        try:
            read_copy()
        except CorruptionError:
            _write(copy.folder / name, published[name]())

    in_threads(FETCHERS, bring, small_objects(copy, manifest))


def _write(path: Path, raw: bytes) -> None:
    """Write a file of a mirror, whole or not at all, without fsync: readers verify its checksum."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    try:
        temporary.write_bytes(raw)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class Mirror:
    """The mirror at ``path`` of the store that is published at ``place``."""

    def __init__(self, path: Path, place: str, manifest: Manifest) -> None:
        self.path = path
        self.place = place
        self.manifest = manifest
        self.room = Room(path.parent)
        self._source: ByteSource | None = None

    def bring(self, key: str, number: int) -> None:
        """Fetch the file of a chunk if it is missing. Raises as ``checked_chunk``, or MachineError for a full disk."""
        info = self.manifest.arrays[key]
        file = feature_file(self.path, key, number, info.shape)
        with suppress(OSError):
            os.utime(file)  # its time is when it was read last; OSError for a missing file
            return
        if self._source is None:
            self._source = open_source(self.place)
        raw = array_chunk(self._source, self.manifest, key, number)
        self.room.take(len(raw))
        with explain_disk_errors(file, len(raw)):
            _write(file, raw)

    def bring_all(self, key: str) -> bool:
        """Fetch all missing chunks of an array; False without room for all of its chunks."""
        info = self.manifest.arrays[key]
        if info.chunk_bytes * len(info.chunks) > self.room.limit():
            return False
        in_threads(FETCHERS, partial(self.bring, key), range(len(info.chunks)))
        return True


class Room:
    """Disk space that the chunk files of all mirrors may take: ``FEDCACHE_REMOTE_CACHE``, else half of the free disk.

    The files that were read longest ago are removed to make room for new ones, in the mirrors of all stores and
    processes. A process that still needs a removed file fetches it again.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._written = 0  # bytes since files were counted last
        self._limit: int | None = None

    def limit(self) -> int:
        """Bytes. Raises UsageError for a ``FEDCACHE_REMOTE_CACHE`` that is not a size."""
        if self._limit is None:
            limit = size_in_environment("FEDCACHE_REMOTE_CACHE")
            if limit is None:
                held = sum(size for _, size, _ in self._files())
                limit = (disk_free(self.root) + held) // 2
            self._limit = limit
        return self._limit

    def take(self, size: int) -> None:
        """Make room for a file of so many bytes."""
        limit = self.limit()
        with self._lock:
            # Files are counted each time a sixteenth of the limit was written, so they may exceed it by as much.
            was_counted = self._written > 0
            self._written += size
            if was_counted and self._written < limit // 16:
                return
            self._written = size
            files = sorted(self._files())
            held = sum(file_size for _, file_size, _ in files)
            excess = held + size - limit
            for _, freed, file in files[:-KEPT]:
                if excess <= 0:
                    break
                file.unlink(missing_ok=True)
                excess -= freed

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """(time when it was read last, bytes, file) of the chunk files of all mirrors."""
        for file in self.root.glob("*.zarr/features/*/c/**/*"):
            with suppress(OSError):  # another process may have removed it
                state = file.stat()
                if file.is_file() and not file.name.startswith("."):
                    yield state.st_mtime, state.st_size, file
