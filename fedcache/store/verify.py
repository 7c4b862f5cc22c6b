"""``verify``: every byte of a store against the manifest; ``repair``: drop what is damaged and can be made again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fedcache.errors import CorruptionError, FedcacheError, shell_word
from fedcache.store import chunks as files
from fedcache.store.byte_source import ByteSource, open_source
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
    chunk_files,
    journal_header,
    part_of,
    read_history,
    read_manifest,
    read_quarantine,
)
from fedcache.store.mirror import (
    array_chunk,
    checked_chunk,
    checked_file,
    published_manifest,
    small_chunks,
)
from fedcache.store.store import Store
from fedcache.store.writer import sidecars_of


@dataclass
class VerifyReport:
    """What ``verify`` found."""

    path: str  # of the store, or its address
    # {file, what} for everything that is not what the manifest says
    problems: list[dict[str, str]] = field(default_factory=list)
    # unfinished arrays and files the manifest does not know
    notes: list[str] = field(default_factory=list)
    checked: int = 0  # files read
    bytes: int = 0  # read
    published: bool = False

    @property
    def advice(self) -> str:
        """The command that continues where something is wrong."""
        if self.published:
            return "Publish it again:  fedcache publish STORE FOLDER"
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
        """For a person."""
        megabytes = self.bytes / 1e6
        found = "all match the manifest."
        shown = ["  {file}: {what}".format(**problem) for problem in self.problems]
        if self.problems:
            found = f"{len(self.problems)} problems."
            shown.append(self.advice)
        head = f"{self.path}: {self.checked:,} files, {megabytes:,.1f} MB read; {found}"
        return [head, *shown, *(f"  note: {note}" for note in self.notes)]

    def add(self, place: Path, what: str) -> None:
        """Note a problem with a file."""
        name = str(place)
        if place.is_relative_to(self.path):
            name = str(place.relative_to(self.path))
        self.problems.append({"file": name, "what": what})

    def check(self, place: Path, read: Callable[[], object]) -> None:
        """Count a file, and note a problem where ``read`` says that it is damaged."""
        self.read(place)
        try:
            read()
        except FedcacheError as error:
            self.add(place, error.message)

    def read(self, place: Path) -> None:
        """Count a file."""
        self.checked += 1
        if place.is_file():
            self.bytes += place.stat().st_size


def verify(path: Path) -> VerifyReport:
    """Read every file of a store; those of unfinished arrays count as damaged only where their journal lies.

    Raises StoreError when there is no store; CorruptionError when its manifest is damaged.
    """
    store = Store.open(path, part=True)
    if store.address is not None:
        return _verify_published(open_source(store.address))
    report = VerifyReport(str(path))
    for place, crc, size, what in chunk_files(store.path, store.manifest):
        report.check(place, partial(files.read_checked, place, crc, what, size=size))
    report.read(path / NAME)
    for relative, digest in sorted(store.manifest.files.items()):
        # The list of unreadable images is checked with its column.
        if relative == QUARANTINE:
            continue
        place = path / relative
        report.read(place)
        try:
            if file_sha256(place) != digest:
                report.add(place, "does not have the sha256 of the manifest")
        except OSError:
            report.add(place, "is missing or unreadable")
    _check_rows(store, report)
    _check_history(path, report)
    _check_journals(store, report)
    report.notes += [
        f"{file.relative_to(path)} is not part of the store" for file in leftover_files(store)
    ]
    return report


def _verify_published(source: ByteSource) -> VerifyReport:
    """Read every object of a published store from where it is; nothing is taken from its mirror."""
    raw, manifest = published_manifest(source)
    report = VerifyReport(source.place, checked=1, bytes=len(raw), published=True)

    def check(name: str, read: Callable[[], bytes]) -> None:
        report.checked += 1
        try:
            report.bytes += len(read())
        except CorruptionError as error:
            report.add(Path(name), error.message)

    for name, crc, size in small_chunks(manifest):
        check(name, partial(checked_chunk, source, name, crc, size))
    for name, digest in sorted(manifest.files.items()):
        check(name, partial(checked_file, source, name, digest))
    for key, info in manifest.arrays.items():
        for number in range(len(info.chunks)):
            name = f"features/{key}, chunk {number}"
            check(name, partial(array_chunk, source, manifest, key, number))
    return report


def leftover_files(store: Store) -> list[Path]:
    """Files inside a store that neither the manifest nor a journal speaks of, but for its locks."""
    path = store.path
    known = {path / NAME, path / HISTORY, path / QUARANTINE}
    known |= {files.chunk_path(path / "samples" / "ok", 0, 1)}
    known |= {place for place, *_ in chunk_files(path, store.manifest)}
    known |= {path / relative for relative in store.manifest.files}
    for journal in journals(path):
        known.add(journal.path)
        if journal.key not in store.arrays:
            chunks = (path / "features" / journal.key).rglob("*")
            known.update(f for f in chunks if not f.name.endswith(".partial"))
    inside = (f for f in sorted(path.rglob("*")) if not f.is_dir() and f not in known)
    return [f for f in inside if f.relative_to(path).parts[0] != "locks"]


def _check_rows(store: Store, report: VerifyReport) -> None:
    """``samples/ok`` and the list of unreadable images, which a commit in flight may be replacing."""
    place = files.chunk_path(store.path / "samples" / "ok", 0, 1)
    for where, read in ((place, store.readable), (store.path / QUARANTINE, store.quarantined)):
        report.check(where, read)


def _check_history(path: Path, report: VerifyReport) -> None:
    report.read(path / HISTORY)
    _, damaged = read_history(path)
    for number in damaged:
        report.add(
            path / HISTORY, f"line {number} is incomplete or does not match the digest at its end"
        )


def _check_journals(store: Store, report: VerifyReport) -> None:
    part = part_of(store.dataset)
    for journal in journals(store.path):
        report.read(journal.path)
        if journal.key in store.arrays:
            continue  # complete; only the removal of its journal is outstanding
        folder = store.path / "features" / journal.key
        if journal.header is None or journal.torn:
            report.add(
                journal.path,
                "has an incomplete or damaged line; the extract command recomputes its chunks",
            )
        if journal.header is None:
            continue
        shape = (journal.header["chunk_rows"], *journal.header["shape"][1:])
        size = files.array_bytes(shape, journal.header["dtype"])
        for chunk, line in sorted(journal.chunks.items()):
            place = files.chunk_path(folder, chunk, len(shape))
            what = f"chunk {chunk} of unfinished {journal.key}"
            report.check(place, partial(files.read_checked, place, line.crc, what, size=size))
        count = journal.count
        done = len(journal.chunks)
        whose = ""
        if part is not None:
            count = len(part.chunks(count))
            whose = f" in {part}"
        kept = f"{done} of {count} chunks"
        note = f"{journal.key} is unfinished{whose}: {kept}; its extract command resumes"
        if part is not None and done == count:
            note = f"{journal.key} is finished{whose}: {kept}; fedcache join assembles the parts"
        report.notes.append(note)


FORGOTTEN = {
    "partitions": "make the partition again",
    "groups": "ingest or extract makes the column again",
}
"""What is to be done where a damaged file of a folder is forgotten."""


def repair(path: Path) -> list[str]:
    """Drop what is damaged and can be made again; returns a sentence per thing done.

    A damaged feature array becomes unfinished: its journal vouches for the whole chunks, so that extraction computes
    only the others. Damaged text features, partitions and groups are forgotten, damaged lines of the history removed,
    and every ``zarr.json`` is written again. The manifest, the columns and the list of unreadable images cannot be made
    from the rest of a store: they stay as they are, and ``verify`` still names them.

    Raises:
        StoreError, also while an array to repair is being written; CorruptionError, for the manifest or the list of
            unreadable images; MachineError.
    """
    Store.open(path).need_writable()
    problems = sorted({problem["file"] for problem in verify(path).problems})
    done = []
    for key in sorted(
        {p.split("/")[1] for p in problems if p.startswith("features/") and p.count("/") > 1}
    ):
        with hold_lock(path / "locks" / f"{key}.lock", f"{key} in {path}", wait=False):
            done += _reopen(path, key)
    if HISTORY in problems:
        with hold_lock(path / "locks" / "history.lock", f"the history of {path}", wait=True):
            events, damaged = read_history(path)
            with explain_disk_errors(path, 0):
                write_atomic(path / HISTORY, *(to_signed(event) + b"\n" for event in events))
        done.append(f"{len(damaged)} damaged lines of the history were removed.")
    with lock_manifest(path):
        now = read_manifest(path)
        whole = sidecars_of(now)
        for relative in problems:
            parts = relative.split("/")
            kind = parts[0]
            if relative in whole and sha256_hex(whole[relative]) == now.files.get(relative):
                files.make_directories((path / relative).parent)
                write_atomic(path / relative, whole[relative])
                done.append(f"{relative} was written again.")
            elif kind in FORGOTTEN and relative in now.files:
                del now.files[relative]
                done.append(f"{relative} was removed: {FORGOTTEN[kind]}.")
            elif kind == "text" and parts[1] in now.texts:
                done += _forget_text(now, parts[1], parts[2])
        now.write(path)
    return done


def _forget_text(now: Manifest, slug: str, name: str) -> list[str]:
    """Forget one entry of a backbone's text features, or all when it is their group that is damaged."""
    entries = now.texts.pop(slug)
    gone = [entry["id"] for entry in entries if name in (entry["id"], "zarr.json")]
    kept = [entry for entry in entries if entry["id"] not in gone]
    if kept:
        now.texts[slug] = kept
    else:
        now.files.pop(f"text/{slug}/zarr.json", None)
    for one in gone:
        now.files.pop(f"text/{slug}/{one}/zarr.json", None)
    return [f"text features {i} of {slug} were removed: extract them again." for i in gone]


def _reopen(path: Path, key: str) -> list[str]:
    """Turn a complete array into an unfinished one. Its journal is in place before the manifest forgets it."""
    with lock_manifest(path):
        now = read_manifest(path)
        info = now.arrays.pop(key, None)
        if info is None:
            return []
        bad = read_quarantine(path, now)
        lines = [
            header_line(
                journal_header(info.recipe, info.how, info.shape, info.dtype, info.chunk_rows)
            )
        ]
        for number, crc in enumerate(info.chunks):
            place = files.chunk_path(path / "features" / key, number, len(info.shape))
            try:
                files.read_checked(place, crc, key, size=info.chunk_bytes)
            except FedcacheError:
                continue
            rows = range(number * info.chunk_rows, (number + 1) * info.chunk_rows)
            lines.append(
                chunk_line(number, crc, {row: why for row, why in bad.items() if row in rows})
            )
        write_atomic(journal_path(path, key), b"\n".join(lines) + b"\n")
        del now.files[f"features/{key}/zarr.json"]
        now.write(path)
        (path / "features" / key / "zarr.json").unlink(missing_ok=True)
    return [
        f"{key} is unfinished again, with {len(lines) - 1} of {len(info.chunks)} chunks kept: extract it again."
    ]
