"""The journal of an array in flight: a header, one fsynced line per finished chunk, and the commit.

Every line ends with its own digest. A power cut or a flipped bit can leave a line whose digest is missing or wrong.
fedcache ignores this line and all after it, and the next writer cuts them off before it appends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedcache.store.chunks import DTYPES
from fedcache.store.files import append_line, fsync_directory, parse_signed, read_whole, to_signed

PREFIX = "journal-"
SUFFIX = ".jsonl"


@dataclass(frozen=True)
class JournaledChunk:
    """A chunk whose file was on disk when its line was written."""

    crc: int  # crc32c of the rows
    bad: dict[int, tuple[str, str]]  # (name, reason) per row of the store that could not be read


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
    def bad(self) -> dict[int, tuple[str, str]]:
        """(name, reason) per bad row, over all finished chunks."""
        found: dict[int, tuple[str, str]] = {}
        for chunk in sorted(self.chunks):
            found |= self.chunks[chunk].bad
        return found

    def begin(self, header: dict[str, Any]) -> None:
        """Write the header of a new journal."""
        append_line(self.path, header_line(header))
        fsync_directory(self.path.parent)
        self.header = header

    def add(self, chunk: int, crc: int, bad: dict[int, tuple[str, str]]) -> None:
        """Vouch for a chunk whose file is on disk."""
        append_line(self.path, chunk_line(chunk, crc, bad))
        self.chunks[chunk] = JournaledChunk(crc, dict(bad))

    def announce(self, commit: dict[str, Any]) -> None:
        """Say which sidecars are about to change, before they do."""
        append_line(self.path, to_signed({"commit": commit}))
        self.commits.append(commit)

    def cut(self) -> None:
        """Cut off the damaged end."""
        if self.torn:
            with self.path.open("r+b") as file:
                file.truncate(self.valid_bytes)
            self.torn = False


def header_line(header: dict[str, Any]) -> bytes:
    """The first line of a journal, without its newline."""
    return to_signed({"header": header})


def header_differences(
    one: Mapping[str, Any], other: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    """What differs between two headers of journals: (name, value of the one, value of the other), sorted by name."""
    # The entries of ``how`` are compared one by one.
    left = {**one["how"], **one, "how": None}
    right = {**other["how"], **other, "how": None}
    names = sorted({*left, *right})
    pairs = [(name, left.get(name), right.get(name)) for name in names]
    return [(name, a, b) for name, a, b in pairs if a != b]


def chunk_line(chunk: int, crc: int, bad: dict[int, tuple[str, str]]) -> bytes:
    """The line that vouches for a chunk, without its newline."""
    lines = [[row, name, reason] for row, (name, reason) in sorted(bad.items())]
    return to_signed({"chunk": chunk, "crc": crc, "bad": lines})


def journal_path(store: Path, key: str) -> Path:
    """Where the journal of an array is while it is unfinished."""
    return store / f"{PREFIX}{key}{SUFFIX}"


def journals(store: Path) -> list[Journal]:
    """Every journal of a store, by name."""
    return [read_journal(path) for path in sorted(store.glob(f"{PREFIX}*{SUFFIX}"))]


def unfinished_arrays(store: Path, complete: Collection[str]) -> list[dict[str, Any]]:
    """Arrays in flight, of those that are not ``complete``: name, chunks kept, chunks in all."""
    return [
        {"name": j.key, "kept": len(j.chunks), "chunks": j.count}
        for j in journals(store)
        if j.header is not None and j.key not in complete
    ]


def read_journal(path: Path) -> Journal:
    """A journal up to the first line that is torn or is not what fedcache writes."""
    journal = Journal(path)
    try:
        raw = read_whole(path)
    except OSError:
        return journal
    # Up to the first line that is torn or wrong; the lines after it are not read.
    for line in raw.splitlines(keepends=True):
        if not line.endswith(b"\n") or not _read_line(journal, line[:-1]):
            break
        journal.valid_bytes += len(line)
    journal.torn = journal.valid_bytes < len(raw)
    return journal


def _read_line(journal: Journal, line: bytes) -> bool:
    """Enter what a line says; False for one that fedcache does not write."""
    try:
        entry = parse_signed(line)
    except ValueError:
        return False
    if journal.header is None:  # the first line is the header, and the only one
        if not _is_header(entry.get("header")):
            return False
        journal.header = entry["header"]
        return True
    if "commit" in entry:
        commit = entry["commit"]
        if not (
            isinstance(commit, dict)
            and type(commit.get("ok")) is int
            and type(commit.get("quarantine")) is str
        ):
            return False
        journal.commits.append(commit)
        return True
    chunk = entry.get("chunk")
    crc = entry.get("crc")
    bad = entry.get("bad")
    if (
        type(chunk) is not int
        or not 0 <= chunk < journal.count
        or type(crc) is not int
        or not isinstance(bad, list)
    ):
        return False
    # Bad rows must be in the chunk whose line names them: a damaged number must not blame another image.
    rows = journal.header["chunk_rows"]
    low = chunk * rows
    high = min((chunk + 1) * rows, journal.header["shape"][0])
    for item in bad:
        if not (
            isinstance(item, list)
            and [type(v) for v in item] == [int, str, str]
            and low <= item[0] < high
        ):
            return False
    journal.chunks[chunk] = JournaledChunk(crc, {row: (name, reason) for row, name, reason in bad})
    return True


def _is_header(header: Any) -> bool:
    if not isinstance(header, dict):
        return False
    shape = header.get("shape")
    rows = header.get("chunk_rows")
    if not isinstance(shape, list) or len(shape) < 2:
        return False
    if type(rows) is not int or not 0 < rows < 1 << 40:
        return False
    return (
        all(type(n) is int and 0 <= n < 1 << 40 for n in shape)
        and header.get("dtype") in DTYPES
        and isinstance(header.get("how"), dict)
        and isinstance(header.get("recipe"), str)
    )
