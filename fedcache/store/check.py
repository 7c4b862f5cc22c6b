"""``verify``: every byte of a store against the manifest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedcache.errors import FedcacheError
from fedcache.store import chunks as files
from fedcache.store.files import file_sha256
from fedcache.store.journal import read_journal
from fedcache.store.store import COLUMNS, Store

UNCHECKED = ("history.jsonl", "manifest.json")


@dataclass
class Report:
    """What ``verify`` found.

    Attributes:
        path: of the store.
        problems: {file, what} for everything that is not what the manifest says.
        notes: unfinished arrays and files the manifest does not know.
        checked: files read.
        bytes: read.
    """

    path: Path
    problems: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checked: int = 0
    bytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "path": str(self.path),
            "ok": self.ok,
            "problems": self.problems,
            "notes": self.notes,
            "files": self.checked,
            "bytes": self.bytes,
        }

    def lines(self) -> list[str]:
        """For a person."""
        head = f"{self.path}: {self.checked:,} files, {self.bytes / 1e6:,.1f} MB read; "
        head += "all as the manifest says." if self.ok else f"{len(self.problems)} problems."
        shown = [f"  {p['file']}: {p['what']}" for p in self.problems]
        if self.problems:
            shown.append(
                "Remove the folder of a damaged array and run its fedcache extract command again; "
                "everything else of the store is kept."
            )
        return [head, *shown, *(f"  note: {note}" for note in self.notes)]


def verify(path: Path) -> Report:
    """Read every file of a store.

    Raises:
        FedcacheError: STORE when there is no store; CORRUPT when its manifest is damaged.
    """
    store = Store.open(path)
    report = Report(path)
    known = {path / name for name in UNCHECKED}
    journals = [read_journal(p) for p in sorted(path.glob("journal-*.jsonl"))]
    announced = [j.commit for j in journals if j.commit]
    for place, crc, what in chunk_files(store):
        known.add(place)
        try:
            report.bytes += len(files.read_checked(place, crc, what))
        except FedcacheError as error:
            if what == "samples/ok" and any(_is(place, c.get("ok")) for c in announced):
                continue
            report.problems.append({"file": str(place.relative_to(path)), "what": error.message})
        report.checked += 1
    for relative, digest in sorted(store.manifest.files.items()):
        place = path / relative
        known.add(place)
        report.checked += 1
        try:
            report.bytes += place.stat().st_size
            found = file_sha256(place)
        except OSError:
            report.problems.append({"file": relative, "what": "is missing or unreadable"})
            continue
        if found != digest and not any(c.get("quarantine") == found for c in announced):
            report.problems.append({"file": relative, "what": "does not have the sha256 of the manifest"})
    report.checked += 1
    flying = {u["name"]: u for u in store.unfinished()}
    for name, state in flying.items():
        report.notes.append(
            f"{name} is unfinished: {state['kept']} of {state['chunks']} chunks; its extract command goes on"
        )
    for file in sorted(path.rglob("*")):
        inside = file.relative_to(path)
        if file.is_dir() or file in known or inside.parts[0] == "locks" or inside.name.startswith("journal-"):
            continue
        if inside.parts[0] == "features" and len(inside.parts) > 1 and inside.parts[1] in flying:
            continue
        report.notes.append(f"{inside} is not part of the store")
    return report


def _is(place: Path, crc: int | None) -> bool:
    try:
        files.read_checked(place, crc, "")
    except FedcacheError:
        return False
    return crc is not None


def chunk_files(store: Store) -> Iterator[tuple[Path, int, str]]:
    """(file, crc32c, what) of every chunk file the manifest lists."""
    for key in (*COLUMNS, "name"):
        axes = 2 if key == "uid" else 1
        place = files.chunk_path(store.path / "samples" / key, 0, axes)
        yield place, store.manifest.samples.get(key, -1), f"samples/{key}"
    for key, info in store.arrays.items():
        for number, crc in enumerate(info.chunks):
            place = files.chunk_path(store.path / "features" / key, number, len(info.shape))
            yield place, crc, f"chunk {number} of {key}"
    for slug, entries in store.texts.items():
        for entry in entries:
            place = files.chunk_path(store.path / "text" / slug / entry["id"], 0, 2)
            yield place, entry["crc"], f"text features of {slug}"
