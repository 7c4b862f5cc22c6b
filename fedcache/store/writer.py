"""Writing one array: chunk files, one journal line each, the manifest last."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from fedcache.errors import Exit, FedcacheError
from fedcache.store import chunks as files
from fedcache.store.disk_errors import writing
from fedcache.store.files import digest_of, fsync_directory, link_atomic, sha256_hex, write_atomic
from fedcache.store.journal import Journal, journal_path, read_journal
from fedcache.store.lock import held
from fedcache.store.manifest import FORMAT, ArrayInfo, Manifest, read_manifest
from fedcache.store.quarantine import commit_of, read_quarantine, replace_sidecars

if TYPE_CHECKING:
    from fedcache.store.store import Store


@dataclass(frozen=True)
class Apart:
    """An array as a helper in another process or on another host writes it: chunk files that nothing refers to yet.

    A helper holds no lock and puts nothing in place. What it leaves, also of a writer that is gone, is a ``.partial``
    file that the next writer sweeps; the lock's holder commits the others.

    Attributes:
        store: the store's directory, on a path that all helpers share.
        key: name of the array.
        shape: (N, V, D).
        dtype: stored dtype.
        chunk_rows: rows per chunk file.
        header: digest of the journal's header, so that another array at this path is not taken for this one.
    """

    store: Path
    key: str
    shape: tuple[int, ...]
    dtype: str
    chunk_rows: int
    header: str

    @property
    def path(self) -> Path:
        """The array's directory."""
        return self.store / "features" / self.key

    @property
    def bytes(self) -> int:
        """Of a chunk's payload."""
        return files.array_bytes((self.chunk_rows, *self.shape[1:]), self.dtype)

    def place(self, chunk: int) -> Path:
        """Where a chunk lies once it is committed."""
        return files.chunk_path(self.path, chunk, len(self.shape))

    def check(self) -> None:
        """Refuse to write where the writer's journal is not.

        Raises:
            FedcacheError: ENVIRONMENT.
        """
        header = read_journal(journal_path(self.store, self.key)).header
        if header is None or digest_of(header) != self.header:
            raise FedcacheError(
                Exit.ENVIRONMENT,
                f"{os.uname().nodename} does not see the store {self.store} that is being written.",
                "The store must lie on a path that all nodes share, e.g. NFS: give it with --store or FEDCACHE_HOME.",
            )

    def prepare(
        self, chunk: int, rows: NDArray[Any], bad: Mapping[int, str] | None
    ) -> tuple[NDArray[Any], dict[int, str]]:
        """A chunk's rows as they are stored, and the reasons of its bad rows; errors as ``ArrayWriter.write``."""
        start = chunk * self.chunk_rows
        expected = (max(0, min(self.chunk_rows, self.shape[0] - start)), *self.shape[1:])
        if chunk < 0 or rows.shape != expected or not expected[0]:
            raise FedcacheError(
                Exit.BUG,
                f"{self.key}: chunk {chunk} was given shape {rows.shape}, expected {expected}.",
                f"Chunks are numbered 0 to {-(-self.shape[0] // self.chunk_rows) - 1} and have {self.chunk_rows} rows, "
                "the last one the rest.",
            )
        reasons = {int(row): str(why) for row, why in (bad or {}).items() if start <= row < start + expected[0]}
        return files.stored(rows, self.dtype, [row - start for row in reasons], start, self.key), reasons

    def write(self, chunk: int, rows: NDArray[Any], bad: Mapping[int, str] | None = None) -> Written:
        """Write a chunk beside its place, under a name of its own; errors as ``ArrayWriter.write``."""
        values, reasons = self.prepare(chunk, rows, bad)
        place = self.place(chunk)
        file = place.with_name(f".{place.name}.{os.getpid()}-{secrets.token_hex(6)}.partial")
        with writing(place, self.bytes):
            crc = files.write_chunk_file(file, values, self.chunk_rows, self.dtype)
        return Written(self.key, chunk, crc, file, reasons)


@dataclass(frozen=True)
class Written:
    """A chunk file that waits to be committed.

    Attributes:
        key: its array.
        chunk: its number.
        crc: of its rows.
        file: where it lies.
        bad: reason per bad row of the store.
    """

    key: str
    chunk: int
    crc: int
    file: Path
    bad: dict[int, str]


class ArrayWriter:
    """The one writer of an array, holding its lock from ``with`` to the end of the block.

    Args:
        store: that the array belongs to.
        key: name of the array.
        shape: (N, V, D).
        dtype: stored dtype.
        chunk_rows: rows per chunk file.
        recipe: what determines the values.
        how: how they are computed; must not change while the array is unfinished.
        wait: wait for another writer.
        fresh: discard what is unfinished.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        *,
        shape: tuple[int, ...],
        dtype: str,
        chunk_rows: int,
        recipe: dict[str, Any],
        how: dict[str, Any],
        wait: bool = False,
        fresh: bool = False,
    ) -> None:
        if tuple(shape)[:1] != (store.rows,) or len(shape) < 2 or dtype not in files.DTYPES or chunk_rows < 1:
            raise FedcacheError(
                Exit.BUG,
                f"{key}: shape {tuple(shape)}, {dtype}, {chunk_rows} rows a chunk, in a store of {store.rows} rows.",
                f"Expected shape ({store.rows}, ...), one of {', '.join(files.DTYPES)}, and at least 1 row a chunk.",
            )
        self.store, self.key, self.shape, self.dtype = store, key, tuple(shape), dtype
        self.chunk_rows, self.recipe, self.how = chunk_rows, recipe, how
        self._wait, self._fresh = wait, fresh
        self.path = store.path / "features" / key
        self.journal = Journal(journal_path(store.path, key))
        self.finished = False
        self._stack = ExitStack()

    @property
    def count(self) -> int:
        """Number of chunks."""
        return -(-self.shape[0] // self.chunk_rows)

    @property
    def kept(self) -> list[int]:
        """Chunks the journal vouches for and whose files confirm it; all of a finished array."""
        return list(range(self.count)) if self.finished else sorted(self.journal.chunks)

    @property
    def bad(self) -> dict[int, str]:
        """Reason per bad row, of the chunks kept and written."""
        return {row: reason for row, (_, reason) in self.journal.bad.items()}

    def missing(self) -> list[int]:
        """Chunks still to be written; none when the array was complete already."""
        return [] if self.finished else [k for k in range(self.count) if k not in self.journal.chunks]

    def __enter__(self) -> ArrayWriter:
        lock = self.store.path / "locks" / f"{self.key}.lock"
        self._stack.enter_context(held(lock, f"{self.key} in {self.store.path}", wait=self._wait))
        try:
            with writing(self.store.path, 0):
                self._open()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _open(self) -> None:
        for left in (*self.path.rglob("*.partial"), *self.store.path.glob(f".{self.journal.path.name}.*.partial")):
            left.unlink(missing_ok=True)  # of a writer that was killed; we hold its lock now
        known = read_manifest(self.store.path).arrays.get(self.key)
        if known is not None:
            # Finished, by us or by the writer we waited for. Its chunk size may differ from what we would choose.
            self.finished = True
            self.chunk_rows = known.chunk_rows
            self.journal.path.unlink(missing_ok=True)
            return
        if self._fresh:
            self._discard()
        header = {
            "format": FORMAT,
            "recipe": digest_of(self.recipe),
            "how": self.how,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "chunk_rows": self.chunk_rows,
        }
        self.journal = read_journal(self.journal.path)
        if self.journal.header is None:
            self._discard()
            self.journal = Journal(self.journal.path)
            self.journal.begin(header)
        elif self.journal.header != header:
            raise self._differs(header)
        self.journal.cut()
        self._confirm()

    def _discard(self) -> None:
        if read_journal(self.journal.path).commits:
            self._settle()
        self.journal.path.unlink(missing_ok=True)
        if self.path.exists():
            shutil.rmtree(self.path)

    def _settle(self) -> None:
        """Let the manifest list the sidecars a dead commit replaced, before the journal that vouches for them goes."""
        with held(self.store.path / "locks" / "manifest.lock", f"the manifest of {self.store.path}", wait=True):
            manifest = read_manifest(self.store.path)
            replace_sidecars(self.store.path, manifest, read_quarantine(self.store.path, manifest))
            manifest.write(self.store.path)
            self.store.refresh()

    def _metadata(self) -> bytes:
        attributes = {"name": self.recipe.get("backbone", self.key), "recipe": digest_of(self.recipe)}
        return files.array_metadata(self.shape, self.dtype, self.chunk_rows, attributes)

    def _differs(self, header: dict[str, Any]) -> FedcacheError:
        before = self.journal.header or {}
        flat = {**before["how"], **{k: v for k, v in before.items() if k != "how"}}
        now = {**header["how"], **{k: v for k, v in header.items() if k != "how"}}
        changed = [
            f"{k} was {flat.get(k)!r}, now {now.get(k)!r}" for k in sorted({*flat, *now}) if flat.get(k) != now.get(k)
        ]
        return FedcacheError(
            Exit.STORE,
            f"{self.key} was begun in another way: {'; '.join(changed)}. Mixed rows would not be comparable.",
            "Go on with the settings it was begun with, or discard the unfinished part with --fresh.",
        )

    def _confirm(self) -> None:
        """Keep only chunks whose file has the checksum the journal vouches for."""
        size = files.array_bytes((self.chunk_rows, *self.shape[1:]), self.dtype)
        for chunk, vouched in list(self.journal.chunks.items()):
            try:
                files.read_checked(
                    files.chunk_path(self.path, chunk, len(self.shape)), vouched.crc, self.key, size=size
                )
            except FedcacheError:
                del self.journal.chunks[chunk]

    def write(self, chunk: int, rows: NDArray[Any], bad: Mapping[int, str] | None = None) -> None:
        """Write one chunk and vouch for it; the same chunk may be written again.

        Args:
            chunk: its number.
            rows: [n, V, D] of any float dtype (or uint8); rows of bad images are NaN (0 for uint8).
            bad: reason per row of the store whose image could not be read; rows of other chunks are ignored.

        Raises:
            FedcacheError: CORRUPT, for non-finite values in any other row, before or after the cast; ENVIRONMENT, when
                the disk refuses; BUG, for a shape, dtype or bad row that does not fit.
        """
        apart = self.apart()
        values, reasons = apart.prepare(chunk, rows, bad)
        self._refuse_finished(chunk)
        place = apart.place(chunk)
        with writing(place, apart.bytes):
            self.vouch(chunk, files.write_chunk_file(place, values, self.chunk_rows, self.dtype), reasons)

    def apart(self) -> Apart:
        """What a helper in another process needs to write chunks of this array."""
        header = digest_of(self.journal.header) if self.journal.header is not None else ""
        return Apart(self.store.path.resolve(), self.key, self.shape, self.dtype, self.chunk_rows, header)

    def commit(self, written: Written) -> None:
        """Put a helper's chunk file in its place and vouch for it.

        Raises:
            FedcacheError: ENVIRONMENT, when the file is not here or not whole; BUG, when the array is complete.
        """
        self._refuse_finished(written.chunk)
        apart = self.apart()
        place, size = apart.place(written.chunk), apart.bytes + files.CRC_BYTES
        found = -1
        for patience in (0.0, 0.2, 0.8, 2.0):  # a network file system may show a new file of another host late
            time.sleep(patience)
            with suppress(OSError):
                found = written.file.stat().st_size
            if found == size:
                break
        else:
            raise FedcacheError(
                Exit.ENVIRONMENT,
                f"{self.key}: a helper wrote chunk {written.chunk} as {written.file}, and here that file "
                f"{'is missing' if found < 0 else f'has {found:,} bytes instead of {size:,}'}.",
                "The store must lie on a path that all nodes share, e.g. NFS: give it with --store or FEDCACHE_HOME.",
            )
        with writing(place, 0):
            written.file.replace(place)
            fsync_directory(place.parent)
            self.vouch(written.chunk, written.crc, written.bad)

    def sweep(self) -> None:
        """Remove what helpers wrote that nobody committed."""
        for left in self.path.rglob("*.partial"):
            left.unlink(missing_ok=True)

    def _refuse_finished(self, chunk: int) -> None:
        if self.finished:
            raise FedcacheError(
                Exit.BUG, f"{self.key} is complete; chunk {chunk} was written again.", "Write missing() chunks only."
            )

    def adopt(self, chunk: int, source: Path, crc: int, bad: Mapping[int, str]) -> None:
        """Take a chunk over from an array of the same recipe and ``how``: a hard link, or a copy across devices.

        Args:
            chunk: its number, in both.
            source: its file in the other store.
            crc: checksum the other store's manifest lists.
            bad: reason per row of it without a value.

        Raises:
            FedcacheError: CORRUPT, when the other store's file is damaged; ENVIRONMENT, when the disk refuses.
        """
        size = files.array_bytes((self.chunk_rows, *self.shape[1:]), self.dtype)
        payload = files.read_checked(source, crc, self.key, size=size)
        place = files.chunk_path(self.path, chunk, len(self.shape))
        with writing(place, size):
            files.make_directories(place.parent)
            if not link_atomic(source, place):
                files.write_payload(place, payload)
            self.vouch(chunk, crc, bad)

    def vouch(self, chunk: int, crc: int, bad: Mapping[int, str]) -> None:
        """Append the journal line of a chunk file that is on disk, here or by a helper in another process.

        Args:
            chunk: its number.
            crc: what ``write_chunk_file`` returned.
            bad: reason per bad row of the store.
        """
        names = self.store.samples.name if bad else ()
        self.journal.add(chunk, crc, {row: (names[row], why) for row, why in bad.items()})

    def complete(self) -> None:
        """Make the array part of the store: sidecars, then the manifest, then the journal goes.

        A crash between any two steps leaves a store that reads correctly and a journal from which this runs again.

        Raises:
            FedcacheError: BUG while chunks are missing; CORRUPT when the quarantine list is damaged.
        """
        if self.finished:
            return
        if self.missing():
            raise FedcacheError(
                Exit.BUG, f"{self.key} lacks chunks {self.missing()[:5]} of {self.count}.", "Write them first."
            )
        lock = self.store.path / "locks" / "manifest.lock"
        with held(lock, f"the manifest of {self.store.path}", wait=True), writing(self.store.path, self.store.rows):
            manifest = read_manifest(self.store.path)
            self._quarantine(manifest)
            metadata = self._metadata()
            files.make_directories(self.path)
            write_atomic(self.path / "zarr.json", metadata)
            manifest.files[f"features/{self.key}/zarr.json"] = sha256_hex(metadata)
            manifest.arrays[self.key] = ArrayInfo(
                self.recipe,
                self.how,
                self.shape,
                self.dtype,
                self.chunk_rows,
                tuple(self.journal.chunks[k].crc for k in range(self.count)),
            )
            manifest.write(self.store.path)
            self.store.refresh()
            self.journal.path.unlink(missing_ok=True)
        self.finished = True

    def _quarantine(self, manifest: Manifest) -> None:
        """Mark bad rows in ``samples/ok`` and list them in ``quarantine.jsonl``, announced in the journal first.

        ``ok`` is always the complement of the list, so nothing is taken from the ``ok`` that another writer may have
        been replacing when it died.
        """
        known = read_quarantine(self.store.path, manifest)
        union = {**self.journal.bad, **known}
        if union.keys() == known.keys() and manifest.rows_ok == manifest.rows - len(known):
            return
        self.journal.announce(commit_of(manifest, union))
        replace_sidecars(self.store.path, manifest, union)
