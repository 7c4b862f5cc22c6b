"""The journal of an unfinished array: a header, one fsynced line per finished chunk, and the commit.

Every line ends with its own digest. A power cut or a flipped bit can leave a line whose digest is missing or wrong.
fedcache ignores this line and all after it, and the next writer cuts them off before it appends.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedcache.store.chunks import DTYPES
from fedcache.store.files import append_line, fsync_directory, parse_signed, read_whole, to_signed

PREFIX = "journal-"
SUFFIX = ".jsonl"

BadRows = dict[int, tuple[str, str]]
"""Row of the store that could not be read -> its name and the reason."""


@dataclass(frozen=True)
class JournaledChunk:
    """A chunk whose file was on disk when its line was written."""

    crc: int  # crc32c of the rows
    bad: BadRows


@dataclass
class Journal:
    """Content of a journal: the lines whose digests are right."""

    path: Path  # of the file
    # format, recipe digest, how, shape, dtype, chunk_rows; None when there is no usable header
    header: dict[str, Any] | None = None
    # per finished chunk; the last line of a chunk counts
    chunks: dict[int, JournaledChunk] = field(default_factory=dict)
    # checksums of ``samples/ok`` and ``quarantine.jsonl`` that were about to be put in place
    commits: list[dict[str, Any]] = field(default_factory=list)
    valid_bytes: int = 0  # length of the lines whose digests are right
    torn: bool = False  # whether other bytes follow them

    @property
    def key(self) -> str:
        """Name of the array."""
        return self.path.name.removeprefix(PREFIX).removesuffix(SUFFIX)

    @property
    def count(self) -> int:
        """Number of chunks of the array, by the header."""
        if self.header is None:
            return 0
        rows = int(self.header["shape"][0])
        per_chunk = int(self.header["chunk_rows"])
        return -(-rows // per_chunk)

    @property
    def bad(self) -> BadRows:
        """The bad rows of all finished chunks."""
        found: BadRows = {}
        for chunk in sorted(self.chunks):
            found |= self.chunks[chunk].bad
        return found

    def begin(self, header: dict[str, Any]) -> None:
        """Write the header of a new journal."""
        append_line(self.path, header_line(header))
        fsync_directory(self.path.parent)
        self.header = header

    def add(self, chunk: int, crc: int, bad: BadRows) -> None:
        """Vouch for a chunk whose file is on disk."""
        append_line(self.path, chunk_line(chunk, crc, bad))
        self.chunks[chunk] = JournaledChunk(crc, bad)

    def announce(self, commit: dict[str, Any]) -> None:
        """Say which sidecars are about to change, before they do."""
        append_line(self.path, to_signed({"commit": commit}))
        self.commits.append(commit)

    def cut(self) -> None:
        """Cut off the damaged end."""
        if self.torn:
            os.truncate(self.path, self.valid_bytes)
            self.torn = False


def header_line(header: dict[str, Any]) -> bytes:
    """The first line of a journal, without its newline."""
    return to_signed({"header": header})


def header_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """As ``differences_of``, for two headers of journals; the entries of ``how`` are compared one by one."""
    return differences_of(_flat(old), _flat(new))


def _flat(header: Mapping[str, Any]) -> dict[str, Any]:
    """A header with the entries of ``how`` next to its own; ``dtype`` is that of the computation."""
    return {**header, "how": None, "stored dtype": header["dtype"], **header["how"]}


def differences_of(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Differences of two mappings in words, sorted by name, such as "batch is 8 instead of 4"."""
    differences = []
    for name in sorted({*old, *new}):
        value = new.get(name, "not set")
        expected = old.get(name, "not set")
        if value != expected:
            differences.append(f"{name} is {value!r:.20} instead of {expected!r:.20}")
    return "; ".join(differences)


def chunk_line(chunk: int, crc: int, bad: BadRows) -> bytes:
    """The line that vouches for a chunk, without its newline."""
    lines = [[row, name, reason] for row, (name, reason) in sorted(bad.items())]
    return to_signed({"chunk": chunk, "crc": crc, "bad": lines})


def journal_path(store: Path, key: str) -> Path:
    """Where the journal of an array is while it is unfinished."""
    return store / f"{PREFIX}{key}{SUFFIX}"


def journals(store: Path) -> list[Journal]:
    """Every journal of a store, by name."""
    return [read_journal(path) for path in sorted(store.glob(f"{PREFIX}*{SUFFIX}"))]


def announced_checksums(store: Path, name: str) -> list[Any]:
    """Checksums of ``ok`` or ``quarantine`` in the commits of all journals: those of files that are being replaced."""
    found = []
    for journal in journals(store):
        found += [commit[name] for commit in journal.commits]
    return found


def unfinished_arrays(store: Path, complete: Collection[str]) -> list[dict[str, Any]]:
    """Arrays that have a journal and are not in ``complete``: name, chunks kept, chunks in all."""
    found = []
    for journal in journals(store):
        if journal.header is not None and journal.key not in complete:
            found.append(
                {"name": journal.key, "kept": len(journal.chunks), "chunks": journal.count}
            )
    return found


def read_journal(path: Path) -> Journal:
    """A journal up to the first line that is incomplete or was not written by fedcache."""
    journal = Journal(path)
    try:
        raw = read_whole(path)
    except OSError:
        return journal
    for line in raw.splitlines(keepends=True):
        if not line.endswith(b"\n") or not _read_line(journal, line[:-1]):
            break
        journal.valid_bytes += len(line)
    journal.torn = journal.valid_bytes < len(raw)
    return journal


def _read_line(journal: Journal, line: bytes) -> bool:
    """Enter the content of a line; False for a line that fedcache does not write."""
    try:
        entry = parse_signed(line)
    except ValueError:
        return False
    if journal.header is None:  # only the first line is a header
        if not _is_header(entry.get("header")):
            return False
        journal.header = entry["header"]
        return True
    if "commit" in entry:
        commit = entry["commit"]
        if not isinstance(commit, dict):
            return False
        if type(commit.get("ok")) is not int or type(commit.get("quarantine")) is not str:
            return False
        journal.commits.append(commit)
        return True
    chunk = entry.get("chunk")
    crc = entry.get("crc")
    bad = entry.get("bad")
    if type(chunk) is not int or not 0 <= chunk < journal.count:
        return False
    if type(crc) is not int or not isinstance(bad, list):
        return False
    rows = journal.header["chunk_rows"]
    start = chunk * rows
    stop = min(start + rows, journal.header["shape"][0])
    named = {}
    for item in bad:
        if not isinstance(item, list) or [type(value) for value in item] != [int, str, str]:
            return False
        row, name, reason = item
        # A bad row must be in the chunk, so that a damaged number does not mark another image as bad.
        if not start <= row < stop:
            return False
        named[row] = (name, reason)
    journal.chunks[chunk] = JournaledChunk(crc, named)
    return True


def _is_header(header: Any) -> bool:
    match header:
        case {
            "recipe": str(),
            "how": dict(),
            "dtype": str(dtype),
            "shape": list(shape),
            "chunk_rows": int(rows),
        }:
            # A truth value is an int for Python, but no count.
            are_counts = all(type(n) is int and 0 <= n < 1 << 40 for n in (rows, *shape))
            return are_counts and rows > 0 and len(shape) >= 2 and dtype in DTYPES
    return False
