"""The journal of an array in flight: a header, one fsynced line per finished chunk, and the commit.

A torn last line (power cut) vouches for nothing; the next writer cuts it off before it appends.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedcache.store.files import append_line, canonical_json, fsync_directory


@dataclass
class Journal:
    """What a journal vouches for.

    Attributes:
        path: of the file.
        header: format, recipe digest, how, shape, dtype, chunk_rows; None when there is no usable header.
        chunks: crc32c per finished chunk.
        bad: (name, reason) per row found bad.
        commit: checksums of ``samples/ok`` and ``quarantine.jsonl`` that are about to be in place, or None.
    """

    path: Path
    header: dict[str, Any] | None = None
    chunks: dict[int, int] = field(default_factory=dict)
    bad: dict[int, tuple[str, str]] = field(default_factory=dict)
    commit: dict[str, Any] | None = None
    valid_bytes: int = 0

    def begin(self, header: dict[str, Any]) -> None:
        """Write the header of a new journal."""
        self.header = header
        append_line(self.path, canonical_json({"header": header}))
        fsync_directory(self.path.parent)

    def add(self, chunk: int, crc: int, rows: int, bad: dict[int, tuple[str, str]]) -> None:
        """Vouch for a chunk whose file is on disk."""
        lines = [[row, name, reason] for row, (name, reason) in sorted(bad.items())]
        append_line(self.path, canonical_json({"chunk": chunk, "crc": crc, "rows": rows, "bad": lines}))
        self.chunks[chunk] = crc
        self.bad.update(bad)

    def announce(self, commit: dict[str, Any]) -> None:
        """Say which sidecars are about to change, before they do."""
        append_line(self.path, canonical_json({"commit": commit}))
        self.commit = commit

    def cut(self) -> None:
        """Cut off a torn last line."""
        if self.path.exists() and self.path.stat().st_size > self.valid_bytes:
            with self.path.open("r+b") as file:
                file.truncate(self.valid_bytes)


def read_journal(path: Path) -> Journal:
    """A journal up to the first line that is torn or is not what fedcache writes."""
    journal = Journal(path)
    try:
        raw = path.read_bytes()
    except OSError:
        return journal
    for line in raw.splitlines(keepends=True):
        if not line.endswith(b"\n") or not _take(journal, line):
            break
        journal.valid_bytes += len(line)
    return journal


def _take(journal: Journal, line: bytes) -> bool:
    try:
        entry = json.loads(line)
        if "header" in entry:
            journal.header = dict(entry["header"])
        elif "commit" in entry:
            journal.commit = dict(entry["commit"])
        else:
            bad = {int(row): (str(name), str(reason)) for row, name, reason in entry["bad"]}
            journal.chunks[int(entry["chunk"])] = int(entry["crc"])
            journal.bad.update(bad)
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
    return True
