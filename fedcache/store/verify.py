"""``verify`` compares every byte of a store with the manifest; ``repair`` removes damage that can be made again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fedcache.errors import CorruptionError, FedcacheError, shell_word
from fedcache.store.byte_source import ByteSource, open_source
from fedcache.store.chunks import array_bytes, read_checked
from fedcache.store.files import (
    explain_disk_errors,
    file_sha256,
    sha256_hex,
    to_signed,
    write_atomic,
)
from fedcache.store.journal import chunk_line, header_line, journal_path, journals
from fedcache.store.lock import hold_lock, lock_manifest
from fedcache.store.manifest import (
    HISTORY,
    NAME,
    QUARANTINE,
    Manifest,
    StorePart,
    chunk_files,
    column_file,
    feature_file,
    part_of,
    read_history,
    read_manifest,
    read_quarantine,
    write_sidecar,
)
from fedcache.store.mirror import array_chunk, published_manifest, small_objects
from fedcache.store.store import Store
from fedcache.store.writer import sidecars_of


@dataclass
class VerifyReport:
    """What ``verify`` found."""

    path: str  # of the store, or its address
    # {file, what} of everything that differs from the manifest
    problems: list[dict[str, str]] = field(default_factory=list)
    # unfinished arrays, and files that the manifest does not list
    notes: list[str] = field(default_factory=list)
    checked: int = 0  # files read
    bytes: int = 0  # read
    published: bool = False
    part: StorePart | None = None  # of an extraction

    @property
    def advice(self) -> str:
        """The command to run after problems were found."""
        if self.published:
            return "Publish it again:  fedcache publish STORE FOLDER"
        if self.part is not None:
            place = shell_word(self.path)
            return (
                f"fedcache repair {place}   removes damaged text features; then run the extract "
                f"command of {self.part} again, which recomputes only the damaged files."
            )
        return (
            f"fedcache repair {shell_word(self.path)}   removes damaged files; the extract command then "
            "recomputes only those."
        )

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "path": self.path,
            "ok": self.ok,
            "problems": self.problems,
            "notes": self.notes,
            "files": self.checked,
            "bytes": self.bytes,
        }

    def lines(self) -> list[str]:
        """The report as lines of text."""
        megabytes = self.bytes / 1e6
        found = "all match the manifest."
        shown = ["  {file}: {what}".format(**problem) for problem in self.problems]
        if self.problems:
            found = f"{len(self.problems)} problems."
            shown.append(self.advice)
        head = f"{self.path}: {self.checked:,} files, {megabytes:,.1f} MB read; {found}"
        notes = [f"  note: {note}" for note in self.notes]
        return [head, *shown, *notes]

    def add(self, place: Path, what: str) -> None:
        """Note a problem with a file."""
        name = str(place)
        if place.is_relative_to(self.path):
            name = str(place.relative_to(self.path))
        self.problems.append({"file": name, "what": what})

    def check(self, place: Path, read: Callable[[], object]) -> None:
        """Count a file, and note a problem if ``read`` raises a FedcacheError."""
        self.count(place)
        try:
            read()
        except FedcacheError as error:
            self.add(place, error.message)

    def count(self, place: Path) -> None:
        """Count a file."""
        self.checked += 1
        if place.is_file():
            self.bytes += place.stat().st_size


def verify(path: Path) -> VerifyReport:
    """Read every file of a store. A chunk of an unfinished array is damaged if it differs from its journal line.

    Raises StoreError when there is no store; CorruptionError when its manifest is damaged.
    """
    store = Store.open(path, part=True)
    if store.address is not None:
        return _verify_published(open_source(store.address))
    report = VerifyReport(str(path), part=part_of(store.dataset))
    for place, crc, size, what in chunk_files(store.path, store.manifest):
        report.check(place, partial(read_checked, place, crc, what, size=size))
    report.count(path / NAME)
    for relative, digest in sorted(store.manifest.files.items()):
        # The list of unreadable images is checked with its column.
        if relative == QUARANTINE:
            continue
        place = path / relative
        report.count(place)
        try:
            if file_sha256(place) != digest:
                report.add(place, "does not have the sha256 of the manifest")
        except OSError:
            report.add(place, "is missing or unreadable")
    # A commit may be replacing these two files at this moment.
    report.check(column_file(path, "ok"), store.readable)
    report.check(path / QUARANTINE, store.quarantined)
    report.count(path / HISTORY)
    _, damaged = read_history(path)
    for number in damaged:
        report.add(
            path / HISTORY,
            f"line {number} is incomplete or does not match the digest at its end",
        )
    _check_journals(store, report)
    for file in leftover_files(store):
        report.notes.append(f"{file.relative_to(path)} is not part of the store")
    return report


def _verify_published(source: ByteSource) -> VerifyReport:
    """Read every object of a published store from its source, never from its mirror."""
    raw, manifest = published_manifest(source)
    report = VerifyReport(source.place, checked=1, bytes=len(raw), published=True)

    def check(name: str, read: Callable[[], bytes]) -> None:
        report.checked += 1
        try:
            report.bytes += len(read())
        except CorruptionError as error:
            report.add(Path(name), error.message)

    for name, read in small_objects(source, manifest):
        check(name, read)
    for key, info in manifest.arrays.items():
        for number in range(len(info.chunks)):
            name = f"features/{key}, chunk {number}"
            check(name, partial(array_chunk, source, manifest, key, number))
    return report


def leftover_files(store: Store) -> list[Path]:
    """Files inside a store that neither the manifest nor a journal mentions; without those in its folder of locks."""
    path = store.path
    known = {path / NAME, path / HISTORY, path / QUARANTINE}
    known.add(column_file(path, "ok"))
    known |= {place for place, *_ in chunk_files(path, store.manifest)}
    known |= {path / relative for relative in store.manifest.files}
    for journal in journals(path):
        known.add(journal.path)
        if journal.key not in store.arrays:
            for file in (path / "features" / journal.key).rglob("*"):
                if not file.name.endswith(".partial"):
                    known.add(file)
    found = []
    for file in sorted(path.rglob("*")):
        is_lock = file.relative_to(path).parts[0] == "locks"
        if not is_lock and not file.is_dir() and file not in known:
            found.append(file)
    return found


def _check_journals(store: Store, report: VerifyReport) -> None:
    part = part_of(store.dataset)
    for journal in journals(store.path):
        report.count(journal.path)
        if journal.key in store.arrays:
            continue  # complete; only the removal of its journal is outstanding
        if journal.header is None or journal.torn:
            report.add(
                journal.path,
                "has an incomplete or damaged line; the extract command recomputes its chunks",
            )
        if journal.header is None:
            continue
        shape = (journal.header["chunk_rows"], *journal.header["shape"][1:])
        size = array_bytes(shape, journal.header["dtype"])
        for chunk, line in sorted(journal.chunks.items()):
            place = feature_file(store.path, journal.key, chunk, shape)
            what = f"chunk {chunk} of unfinished {journal.key}"
            report.check(place, partial(read_checked, place, line.crc, what, size=size))
        count = journal.count
        done = len(journal.chunks)
        whose = ""
        if part is not None:
            count = len(part.chunks(count))
            whose = f" in {part}"
        kept = f"{done} of {count} chunks"
        note = (
            f"{journal.key} is unfinished{whose}: {kept}; run its extract command again to resume"
        )
        if part is not None and done == count:
            note = f"{journal.key} is finished{whose}: {kept}; fedcache join assembles the parts"
        report.notes.append(note)


FORGOTTEN = {
    "partitions": "make the partition again",
    "groups": "ingest or extract makes the column again",
}
"""Folder of a damaged file that ``repair`` removed from the manifest -> what to do."""


def repair(path: Path) -> list[str]:
    """Remove damage that can be made again; returns a sentence for each change.

    A damaged feature array becomes unfinished: its journal vouches for the undamaged chunks, so that extraction
    computes only the others. The array of a part of a store is unfinished anyway. Damaged text features, partitions
    and groups are removed from the manifest, damaged lines are removed from the history, and every ``zarr.json`` is
    written again. The manifest, the columns and the list of unreadable images cannot be made from the rest of a store.
    They stay unchanged, and ``verify`` still reports them.

    Raises:
        StoreError, also while an array to repair is being written; CorruptionError, for the manifest or the list of
            unreadable images; MachineError.
    """
    Store.open(path, part=True).need_writable()
    problems = sorted({problem["file"] for problem in verify(path).problems})
    done = []
    damaged_arrays = set()
    for relative in problems:
        folder, *inside = relative.split("/")
        # A file of an array is deeper than ``features/zarr.json``.
        if folder == "features" and len(inside) > 1:
            damaged_arrays.add(inside[0])
    for key in sorted(damaged_arrays):
        with hold_lock(path / "locks" / f"{key}.lock", f"{key} in {path}", wait=False):
            done += _reopen(path, key)
    if HISTORY in problems:
        with hold_lock(path / "locks" / "history.lock", f"the history of {path}", wait=True):
            events, damaged = read_history(path)
            lines = [to_signed(event) + b"\n" for event in events]
            with explain_disk_errors(path):
                write_atomic(path / HISTORY, *lines)
        done.append(f"{len(damaged)} damaged lines of the history were removed.")
    with lock_manifest(path):
        now = read_manifest(path)
        sidecars = sidecars_of(now)
        for relative in problems:
            parts = relative.split("/")
            kind = parts[0]
            raw = sidecars.get(relative)
            if raw is not None and sha256_hex(raw) == now.files.get(relative):
                write_sidecar(path, now, relative, raw)
                done.append(f"{relative} was restored.")
            elif kind in FORGOTTEN and relative in now.files:
                del now.files[relative]
                done.append(f"{relative} was removed: {FORGOTTEN[kind]}.")
            elif kind == "text" and parts[1] in now.texts:
                done += _forget_text(now, parts[1], parts[2])
        now.write(path)
    return done


def _forget_text(now: Manifest, slug: str, name: str) -> list[str]:
    """Remove one entry of a backbone's text features, or all if ``name`` is the ``zarr.json`` of their group."""
    entries = now.texts.pop(slug)
    removed = [entry["id"] for entry in entries if name in (entry["id"], "zarr.json")]
    kept = [entry for entry in entries if entry["id"] not in removed]
    if kept:
        now.texts[slug] = kept
    else:
        now.files.pop(f"text/{slug}/zarr.json", None)
    done = []
    for entry_id in removed:
        now.files.pop(f"text/{slug}/{entry_id}/zarr.json", None)
        done.append(f"text features {entry_id} of {slug} were removed: extract them again.")
    return done


def _reopen(path: Path, key: str) -> list[str]:
    """Turn a complete array into an unfinished one. Its journal is in place before it leaves the manifest."""
    with lock_manifest(path):
        now = read_manifest(path)
        info = now.arrays.pop(key, None)
        if info is None:
            return []
        bad = read_quarantine(path, now)
        lines = [header_line(info.header)]
        for number, crc in enumerate(info.chunks):
            place = feature_file(path, key, number, info.shape)
            try:
                read_checked(place, crc, key, size=info.chunk_bytes)
            except FedcacheError:
                continue
            rows = range(number * info.chunk_rows, (number + 1) * info.chunk_rows)
            bad_of_chunk = {row: why for row, why in bad.items() if row in rows}
            lines.append(chunk_line(number, crc, bad_of_chunk))
        write_atomic(journal_path(path, key), b"\n".join(lines) + b"\n")
        metadata = f"features/{key}/zarr.json"
        del now.files[metadata]
        now.write(path)
        (path / metadata).unlink(missing_ok=True)
    kept = len(lines) - 1
    return [
        f"{key} is unfinished again, with {kept} of {len(info.chunks)} chunks kept: extract it again."
    ]
