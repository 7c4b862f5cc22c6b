"""Writing one array: chunk files, one journal line each, the manifest last.

The order of the writes makes an array safe to interrupt. A chunk file is whole on disk before its journal line is
written. When every chunk has its line, the sidecars (``samples/ok``, ``quarantine.jsonl``, ``zarr.json``) are written,
and then the manifest. The journal is removed last. If the writer is killed between two of these steps, the array is
either complete or unfinished, and then it continues from its journal. Workers hold no lock and write chunk files that
nothing refers to; the one writer commits them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import FedcacheError, InternalError, MachineError, StoreError
from fedcache.store.chunks import (
    CRC_BYTES,
    DTYPES,
    array_bytes,
    array_metadata,
    encode_strings,
    group_metadata,
    make_directories,
    read_checked,
    to_stored_dtype,
    write_chunk_file,
    write_payload,
)
from fedcache.store.files import (
    HOST,
    digest_of,
    explain_disk_errors,
    fsync_directory,
    link_atomic,
    temporary_name,
)
from fedcache.store.journal import Journal, header_differences, journal_path, read_journal
from fedcache.store.lock import hold_lock, is_alive, lock_manifest, writer_of
from fedcache.store.manifest import (
    COLUMNS,
    FORMAT,
    PART,
    ArrayInfo,
    Manifest,
    column_file,
    column_shape,
    commit_of,
    feature_file,
    nothing_is_added,
    part_of,
    read_manifest,
    read_quarantine,
    replace_sidecars,
    was_store,
    write_sidecar,
)
from fedcache.store.samples import Samples
from fedcache.tables.splits import SPLIT_NAMES

AXES = {2: ("feature",), 3: ("view", "feature"), 5: ("view", "height", "width", "channel")}
"""Number of all axes -> names of the axes after the axis of rows."""


@dataclass(frozen=True)
class WorkerArray:
    """An array as a worker in another process or on another host writes it: chunk files that nothing refers to yet.

    A worker holds no lock. It writes each chunk as a ``.partial`` file next to the place of the chunk and reports its
    checksum. The process that holds the array's lock commits the file. The next writer removes uncommitted files of
    earlier writers.
    """

    store: Path  # the store's directory, on a path that all workers share
    key: str  # name of the array
    shape: tuple[int, ...]  # (N, V, D)
    dtype: str  # stored dtype
    chunk_rows: int  # rows per chunk file
    header: str  # digest of the journal's header, so that another array at this path is not taken for this one

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk's rows; the checksum in its file comes on top."""
        return array_bytes((self.chunk_rows, *self.shape[1:]), self.dtype)

    def chunk_file(self, chunk: int) -> Path:
        """The file of a chunk after it was committed."""
        return feature_file(self.store, self.key, chunk, self.shape)

    def check(self) -> None:
        """Raise MachineError if the journal of the writer is not visible on this machine."""
        header = read_journal(journal_path(self.store, self.key)).header
        if header is None or digest_of(header) != self.header:
            raise MachineError(
                f"The node {os.uname().nodename} has no access to the store {self.store}, into which it should write.",
                "Put the store on a path that all nodes share, e.g. NFS, with --store or FEDCACHE_HOME.",
            )

    def prepare(
        self, chunk: int, rows: NDArray[Any], bad: Mapping[int, str] | None
    ) -> tuple[NDArray[Any], dict[int, str]]:
        """A chunk's rows [n, V, D] in the stored dtype, and the reason per bad row among them.

        Raises FedcacheError, as ``ArrayWriter.write``.
        """
        start = chunk * self.chunk_rows
        # The last chunk of an array has the remaining rows; its file is padded to full size when it is written.
        count = max(0, min(self.chunk_rows, self.shape[0] - start))
        expected = (count, *self.shape[1:])
        if chunk < 0 or count == 0 or rows.shape != expected:
            raise InternalError(
                f"{self.key}: chunk {chunk} has shape {rows.shape}, expected {expected}.",
                f"A chunk has {self.chunk_rows} rows; the last chunk has the rest.",
            )
        reasons = {}
        for row, reason in (bad or {}).items():
            if start <= row < start + count:
                reasons[int(row)] = str(reason)
        lost = [row - start for row in reasons]
        values = to_stored_dtype(rows, self.dtype, lost, start, self.key)
        return values, reasons

    def write(
        self, chunk: int, rows: NDArray[Any], bad: Mapping[int, str] | None = None
    ) -> UncommittedChunk:
        """Write a chunk next to its place, under a name of its own; errors as ``ArrayWriter.write``."""
        values, reasons = self.prepare(chunk, rows, bad)
        place = self.chunk_file(chunk)
        file = temporary_name(place)
        with explain_disk_errors(place, self.chunk_bytes):
            crc = write_chunk_file(file, values, self.chunk_rows, self.dtype)
        return UncommittedChunk(self.key, chunk, crc, file, reasons)


@dataclass(frozen=True)
class UncommittedChunk:
    """A chunk file that waits to be committed."""

    key: str  # its array
    chunk: int  # its number
    crc: int  # of its rows
    file: Path  # temporary
    bad: dict[int, str]  # reason per bad row of the store


class OpenStore(Protocol):
    """The parts of a store that a writer of its arrays needs."""

    path: Path

    @property
    def rows(self) -> int:
        """N."""

    @property
    def dataset(self) -> dict[str, Any]:
        """Description of the dataset in the manifest; for a part of a store, with its number."""

    @property
    def samples(self) -> Samples:
        """The columns; names of rows are copied into the list of unreadable images."""

    def refresh(self) -> None:
        """Read the manifest again."""


@dataclass(eq=False, kw_only=True)
class ArrayWriter:
    """The one writer of an array, holding its lock from ``with`` to the end of the block."""

    store: OpenStore  # to which the array belongs
    key: str  # name of the array
    shape: tuple[int, ...]  # (N, V, D)
    dtype: str  # stored dtype
    chunk_rows: int  # rows per chunk file
    recipe: dict[str, Any]  # settings that determine the values
    how: dict[str, Any]  # how they are computed; must not change while the array is unfinished
    wait: bool  # wait for another writer
    fresh: bool  # discard the array, also a finished one

    def __post_init__(self) -> None:
        rows = self.store.rows
        shape_fits = len(self.shape) >= 2 and self.shape[0] == rows
        if not shape_fits or self.dtype not in DTYPES or self.chunk_rows < 1:
            dtypes = ", ".join(DTYPES)
            raise InternalError(
                f"{self.key} cannot be written to a store of {rows} rows: the shape is {self.shape}, the dtype is "
                f"{self.dtype}, and the number of rows per chunk is {self.chunk_rows}.",
                f"Expected: the shape ({rows}, ...), a dtype of {dtypes}, and at least 1 row per chunk.",
            )
        self.shape = tuple(self.shape)
        self.path = self.store.path / "features" / self.key
        self.journal = Journal(journal_path(self.store.path, self.key))
        self.finished = False
        self._stack = ExitStack()

    @property
    def count(self) -> int:
        """Number of chunks."""
        return -(-self.shape[0] // self.chunk_rows)

    @property
    def kept(self) -> list[int]:
        """Chunks in the journal whose files have the right checksum; all chunks of a finished array."""
        if self.finished:
            return list(range(self.count))
        return sorted(self.journal.chunks)

    @property
    def own(self) -> range:
        """Chunks that this store has when the array is finished: all of them, or those of its part."""
        part = part_of(self.store.dataset)
        if part is None:
            return range(self.count)
        return part.chunks(self.count)

    @property
    def bad(self) -> dict[int, str]:
        """Reason per bad row, of the chunks kept and written."""
        return {row: reason for row, (_, reason) in self.journal.bad.items()}

    def missing(self) -> list[int]:
        """Chunks still to be written; none when the array was complete already."""
        if self.finished:
            return []
        return [chunk for chunk in self.own if chunk not in self.journal.chunks]

    def _info(self, crcs: tuple[int, ...] = ()) -> ArrayInfo:
        """The array's entry in the manifest, with the checksums of its chunks."""
        return ArrayInfo(self.recipe, self.how, self.shape, self.dtype, self.chunk_rows, crcs)

    def __enter__(self) -> ArrayWriter:
        lock = self.store.path / "locks" / f"{self.key}.lock"
        self._stack.enter_context(
            hold_lock(lock, f"{self.key} in {self.store.path}", wait=self.wait)
        )
        try:
            with explain_disk_errors(self.store.path):
                self._open()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def look(self) -> None:
        """Find out whether the array is finished, begun or new, without changing a file.

        Chunk files are not read. Raises StoreError if the array was begun with other settings.
        """
        finished = None
        if not self.fresh:
            finished = read_manifest(self.store.path).arrays.get(self.key)
        if finished is not None:
            # An earlier writer completed it, and may have chosen another number of rows per chunk.
            self.finished = True
            self.chunk_rows = finished.chunk_rows
        elif not self.fresh:
            found = read_journal(self.journal.path)
            # An array is continued only if everything on which the values of its rows depend is equal.
            if found.header == self._info().header:
                self.journal = found
            elif found.chunks or found.commits:
                raise self._differs(found)

    def _open(self) -> None:
        """Find out, under the lock, whether the array is finished, begun or new, and prepare its journal."""
        # Partial files of a killed writer or its workers. This writer holds their lock, so no process writes them.
        self.remove_uncommitted()
        for left in self.store.path.glob(f".{self.journal.path.name}.*.partial"):
            left.unlink(missing_ok=True)
        self.look()
        if self.finished:
            # If its writer was killed after it had written the manifest, its journal still exists.
            self.journal.path.unlink(missing_ok=True)
            return
        if self.journal.header is None:
            # The journal is missing, has a damaged first line, lists no chunk or is to be discarded (``fresh``), so it
            # vouches for no file here.
            self._discard()
            self.journal.begin(self._info().header)
        self.journal.cut()  # remove an incomplete last line before the next line is appended
        self._confirm()

    def _discard(self) -> None:
        """Remove an array: journal, chunks and metadata, after its entry in the manifest if it is finished."""
        with lock_manifest(self.store.path):
            manifest = read_manifest(self.store.path)
            if manifest.arrays.pop(self.key, None) is not None:
                del manifest.files[f"features/{self.key}/zarr.json"]
                manifest.write(self.store.path)
        if read_journal(self.journal.path).commits:
            self._enter_sidecars()
        self.journal.path.unlink(missing_ok=True)
        if self.path.exists():
            shutil.rmtree(self.path)

    def _enter_sidecars(self) -> None:
        """Enter the sidecars that a killed ``complete`` replaced into the manifest, before their journal is removed.

        Until then, only the commit line of that journal has their checksums.
        """
        path = self.store.path
        with lock_manifest(path):
            manifest = read_manifest(path)
            replace_sidecars(path, manifest, read_quarantine(path, manifest))
            manifest.write(path)
            self.store.refresh()

    def _differs(self, begun: Journal) -> FedcacheError:
        """The error for an unfinished array whose rows were computed with other settings."""
        assert begun.header is not None
        listed = header_differences(begun.header, self._info().header)
        return StoreError(
            f"The extraction of {self.key} was started with other settings or versions: {listed}. Old and new rows "
            "would not be comparable.",
            "Resume with the earlier settings and versions ('code' is the version of fedcache's code), or discard "
            "the unfinished features. To discard them, add all options of the extraction to this command:  fedcache "
            "extract --fresh",
        )

    def _confirm(self) -> None:
        """Keep only chunks whose file has the checksum in the journal."""
        array = self.for_workers()
        for chunk, line in list(self.journal.chunks.items()):
            try:
                read_checked(array.chunk_file(chunk), line.crc, self.key, size=array.chunk_bytes)
            except FedcacheError:
                del self.journal.chunks[chunk]

    def write(self, chunk: int, rows: NDArray[Any], bad: Mapping[int, str] | None = None) -> None:
        """Write one chunk and vouch for it; the same chunk may be written again.

        Args:
            chunk: its number.
            rows: [n, V, D] of any float dtype (or uint8); rows of bad images are NaN (0 for uint8).
            bad: reason per row of the store whose image could not be read; rows of other chunks are ignored.

        Raises:
            CorruptionError, for non-finite values in any other row, before or after the cast; MachineError, when
                the disk refuses; InternalError, for a shape, dtype or bad row that does not fit.
        """
        array = self.for_workers()
        values, reasons = array.prepare(chunk, rows, bad)
        self._refuse_finished(chunk)
        place = array.chunk_file(chunk)
        with explain_disk_errors(place, array.chunk_bytes):
            # on disk when this returns
            crc = write_chunk_file(place, values, self.chunk_rows, self.dtype)
            self.add_to_journal(chunk, crc, reasons)

    def for_workers(self) -> WorkerArray:
        """Data that a worker in another process needs to write chunks of this array."""
        header = ""
        if self.journal.header is not None:
            header = digest_of(self.journal.header)
        return WorkerArray(
            self.store.path.resolve(), self.key, self.shape, self.dtype, self.chunk_rows, header
        )

    def commit(self, made: UncommittedChunk) -> None:
        """Put a worker's chunk file in its place. Raises MachineError, when it is missing here or not whole."""
        self._refuse_finished(made.chunk)
        array = self.for_workers()
        place = array.chunk_file(made.chunk)
        size = array.chunk_bytes + CRC_BYTES
        found = -1  # bytes of the file; -1 if it is missing
        # A network file system may show a new file of another host late.
        for seconds in (0.0, 0.2, 0.8, 2.0):
            time.sleep(seconds)
            with suppress(OSError):
                found = made.file.stat().st_size
            if found == size:
                break
        if found != size:
            what = f"has {found:,} bytes instead of {size:,}"
            if found < 0:
                what = "is missing"
            raise MachineError(
                f"{self.key}: a worker wrote chunk {made.chunk} to the file {made.file}, but on this machine this "
                f"file {what}.",
                "Put the store on a path that all nodes share, e.g. NFS, with --store or FEDCACHE_HOME.",
            )
        with explain_disk_errors(place):
            made.file.replace(place)
            fsync_directory(place.parent)  # the name is on disk before its journal line
            self.add_to_journal(made.chunk, made.crc, made.bad)

    def remove_uncommitted(self) -> None:
        """Remove uncommitted files of workers."""
        for left in self.path.rglob("*.partial"):
            left.unlink(missing_ok=True)

    def _refuse_finished(self, chunk: int) -> None:
        if self.finished:
            raise InternalError(
                f"{self.key} is complete, but chunk {chunk} was written again.",
                "Write only the chunks of missing().",
            )

    def adopt(self, chunk: int, source: Path, crc: int, bad: Mapping[int, str]) -> None:
        """Take a chunk from another array of the same recipe and ``how``, as a hard link, or as a copy across devices.

        ``source`` is its file in the other store, and ``crc`` its checksum there. Raises CorruptionError, when that
        file is damaged; MachineError, when the disk refuses.
        """
        array = self.for_workers()
        payload = read_checked(source, crc, self.key, size=array.chunk_bytes)
        place = array.chunk_file(chunk)
        with explain_disk_errors(place, array.chunk_bytes):
            make_directories(place.parent)
            if not link_atomic(source, place):
                write_payload(place, payload)
            self.add_to_journal(chunk, crc, bad)

    def add_to_journal(self, chunk: int, crc: int, bad: Mapping[int, str]) -> None:
        """Append the journal line of a chunk file that is on disk; ``bad`` is the reason per bad row of the store."""
        named = {}
        for row, why in bad.items():
            named[row] = (self.store.samples.name[row], why)
        self.journal.add(chunk, crc, named)

    def complete(self) -> None:
        """Make the array part of the store: write sidecars, then the manifest, then remove the journal.

        After a crash between two steps, the store can be read correctly, and the journal lets this run again. In part i
        of n of a store, the array stays unfinished, and the manifest notes that its chunks are complete. Raises
        InternalError while chunks are missing; CorruptionError when the quarantine list is damaged.
        """
        if self.finished:
            return
        missing = self.missing()
        if missing:
            raise InternalError(
                f"{self.key} is incomplete: of its {self.count} chunks, these are missing: {missing[:5]}.",
                "Write the missing chunks first.",
            )
        # ``samples/ok`` has a byte for each row.
        with lock_manifest(self.store.path, self.store.rows):
            # Read again, because other writers may have completed arrays since the store was opened.
            manifest = read_manifest(self.store.path)
            if PART in manifest.dataset:
                manifest.dataset[PART]["recipes"][self.key] = self.recipe
                manifest.write(self.store.path)
                self.store.refresh()
                return
            # 1. Rows that could not be read, in samples/ok and the list of them.
            self._quarantine(manifest)
            # 2. The metadata that makes the folder an array for other Zarr readers.
            attributes, dimensions = description(self.key, self.recipe, len(self.shape))
            metadata = array_metadata(
                self.shape, self.dtype, self.chunk_rows, attributes, dimensions
            )
            write_sidecar(self.store.path, manifest, f"features/{self.key}/zarr.json", metadata)
            # 3. The manifest: the array is complete once this file is replaced.
            crcs = tuple(self.journal.chunks[chunk].crc for chunk in range(self.count))
            manifest.arrays[self.key] = self._info(crcs)
            manifest.write(self.store.path)
            self.store.refresh()
            # 4. The journal, which is no longer needed. If this process is killed here, the next writer removes it.
            self.journal.path.unlink(missing_ok=True)
        self.finished = True

    def _quarantine(self, manifest: Manifest) -> None:
        """Mark bad rows in ``samples/ok`` and list them in ``quarantine.jsonl``, announced in the journal first.

        ``ok`` is computed from the list alone, because a writer that was killed may have replaced the file of ``ok``.
        """
        known = read_quarantine(self.store.path, manifest)
        # A row that is listed already keeps its first reason.
        union = {**self.journal.bad, **known}
        rows_ok = manifest.rows - len(known)
        if union.keys() == known.keys() and manifest.rows_ok == rows_ok:
            return
        # Announced first: until the manifest is replaced, this line vouches for the two files written next.
        self.journal.announce(commit_of(manifest, union))
        replace_sidecars(self.store.path, manifest, union)


def description(
    key: str, recipe: dict[str, Any], axes: int
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Attributes of a feature array for other Zarr readers, and the names of its axes."""
    attributes = {"name": recipe.get("backbone", key), "recipe": digest_of(recipe)}
    names = [f"{axis}_{key}" for axis in AXES[axes]]
    return attributes, ("row", *names)


# A new store on disk: the rows and nothing else.


def create_store(
    path: Path, samples: Samples, dataset: dict[str, Any], reasons: Mapping[int, str]
) -> Manifest:
    """A new store without features at ``path``, or the existing one of the same dataset.

    It is built next to its place and renamed, so that it exists whole or not at all. ``dataset`` is the description of
    the dataset for the manifest, ``reasons`` the reason per row that is not ok. Raises StoreError, when another dataset
    is at ``path``; CorruptionError for a store that is damaged; MachineError, when the disk refuses.
    """
    occupied = path.exists() and (not path.is_dir() or any(path.iterdir()))
    # After ``occupied``, because another process may put a whole store here at any moment.
    found = stored_manifest(path, dataset)
    if found is not None:
        return found
    if occupied:
        raise StoreError(
            f"{path} exists and is not a fedcache store.",
            "Choose another place, or remove the existing files.",
        )
    samples = samples.checked()
    # About 64 bytes a row with its name, for the message of a full disk.
    with explain_disk_errors(path, 64 * len(samples.name)):
        temporary = _building_place(path)
        try:
            _write_samples(temporary, samples, dataset, reasons)
            temporary.rename(path)  # fails unless the place is free or an empty directory
        except OSError:
            found = stored_manifest(path, dataset)
            if found is not None:  # another process was faster
                return found
            raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        fsync_directory(path.parent)
    return read_manifest(path)


def stored_manifest(path: Path, dataset: Mapping[str, Any]) -> Manifest | None:
    """The manifest of the store of a dataset at ``path``; None without a store.

    Raises StoreError for another dataset or another part of it; CorruptionError for a store without a manifest.
    """
    if not (path / "manifest.json").exists() and not was_store(path):
        return None
    found = read_manifest(path)
    if found.shards:
        raise nothing_is_added(path)
    if found.dataset["digest"] != dataset["digest"]:
        words = "{slug} with digest {digest:.12}"
        there = words.format(**found.dataset)
        wanted = words.format(**dataset)
    elif part_of(found.dataset) != part_of(dataset):
        there = str(part_of(found.dataset) or "a whole store")
        wanted = str(part_of(dataset) or "a whole store")
    else:
        return found
    raise StoreError(
        f"{path} contains {there}, not {wanted}.",
        "Choose another place, or remove the existing files.",
    )


def _write_samples(
    path: Path, samples: Samples, dataset: dict[str, Any], reasons: Mapping[int, str]
) -> None:
    """Write all files of a store without features into an empty directory; ``reasons`` are those of rows not ok."""
    rows = len(samples.name)
    (path / "locks").mkdir(mode=0o700)
    crcs = {}
    for key, dtype in COLUMNS.items():
        values = getattr(samples, key)
        crcs[key] = write_chunk_file(column_file(path, key), values, max(1, rows), dtype)
    names = encode_strings(samples.name or [""])
    crcs["name"] = write_payload(column_file(path, "name"), names)
    manifest = Manifest(dataset, rows, rows, samples.classes, samples.domains, crcs)
    for relative, raw in sidecars_of(manifest).items():
        write_sidecar(path, manifest, relative, raw)
    unread = {}
    for row in np.flatnonzero(samples.ok == 0).tolist():
        unread[row] = (samples.name[row], reasons.get(row, "given as unreadable"))
    if unread:
        replace_sidecars(path, manifest, unread)
    manifest.write(path)


def sidecars_of(manifest: Manifest) -> dict[str, bytes]:
    """``zarr.json`` of the groups and of the columns, by path."""
    codes = {
        "label": {"classes": list(manifest.classes)},
        "domain": {"domains": list(manifest.domains)},
    }
    found = {
        "zarr.json": group_metadata({"fedcache": FORMAT, "dataset": manifest.dataset["slug"]}),
        "samples/zarr.json": group_metadata({"splits": list(SPLIT_NAMES)}),
        "features/zarr.json": group_metadata({}),
        "text/zarr.json": group_metadata({}),
    }
    rows = manifest.rows
    for key, dtype in {**COLUMNS, "name": "string"}.items():
        shape = column_shape(key, rows)
        dimensions = ("row", "byte")[: len(shape)]
        found[f"samples/{key}/zarr.json"] = array_metadata(
            shape, dtype, max(1, rows), codes.get(key, {}), dimensions
        )
    return found


def _building_place(path: Path) -> Path:
    """A new private directory next to ``path`` in which to build it; directories of killed builders are removed."""
    for left in path.parent.glob(f".{path.name}.*.partial"):
        pid = writer_of(left)
        if pid and not is_alive(pid):
            shutil.rmtree(left, ignore_errors=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The name contains the process for this cleanup, and a random part for several threads of a process.
    prefix = f".{path.name}.{os.getpid()}-{HOST}-"
    return Path(tempfile.mkdtemp(prefix=prefix, suffix=".partial", dir=path.parent))
