"""Sealed lines: a file that grows by one signed line at a time, where every line names the line before it.

A changed digit, a line that is missing from the middle and a line of another file are found. A last line without its
newline is one that a power cut tore: nothing depended on it yet, so readers leave it out and the next line replaces it.
Whole lines that are missing from the end are not found, because the file is then what it was earlier.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedcache.store.files import (
    append_line,
    canonical_json,
    parse_signed,
    read_whole,
    sha256_hex,
    to_signed,
    write_atomic,
)

NUMBER = "number"
BEFORE = "before"
"""Keys of every line besides its content: its number from 1, and the sha256 of the line before it."""


def first_of(what: Mapping[str, Any]) -> bytes:
    """What the first line of a file names as the line before it: the kind of the file, and to what it belongs."""
    return canonical_json(dict(what))


def read_sealed_lines(path: Path, first: bytes = b"") -> list[dict[str, Any]]:
    """The contents of all whole lines; [] where there is no file.

    Raises ValueError, in words that follow the file's name, for a line that is not what was written; OSError.
    """
    found = []
    before = first
    for number, line in enumerate(_whole_lines(_read(path)), 1):
        found.append(_content(line, number, before))
        before = line
    return found


def write_sealed_lines(
    path: Path, contents: Iterable[Mapping[str, Any]], first: bytes = b""
) -> None:
    """Replace ``path`` by lines with these contents, whole or not at all."""
    lines = []
    before = first
    for number, content in enumerate(contents, 1):
        before = to_signed({**content, NUMBER: number, BEFORE: sha256_hex(before)})
        lines.append(before + b"\n")
    write_atomic(path, *lines)


class SealedLines:
    """A file of sealed lines to which one process appends.

    Only the last line is read, when it is opened. Raises ValueError, as ``read_sealed_lines``; OSError.

    Args:
        path: of the file, which may come with the first line.
        first: as ``first_of``.
    """

    def __init__(self, path: Path, first: bytes = b"") -> None:
        self._path = path
        raw = _read(path)
        lines = _whole_lines(raw)
        self._last = lines[-1] if lines else first
        self._whole = sum(len(line) + 1 for line in lines)
        self._torn = self._whole < len(raw)
        self.count = len(lines)
        if lines:
            number = _signed(lines[-1], "its last line").get(NUMBER)
            if number != len(lines):
                raise ValueError(
                    f"is damaged: it has {len(lines)} lines, and the last one is number {number}"
                )

    def append(self, content: Mapping[str, Any]) -> None:
        """Append one line. A torn last line is cut off first."""
        line = to_signed({**content, NUMBER: self.count + 1, BEFORE: sha256_hex(self._last)})
        if self._torn:
            with self._path.open("r+b") as file:
                file.truncate(self._whole)
            self._torn = False
        append_line(self._path, line)
        self._last = line
        self._whole += len(line) + 1
        self.count += 1


def _content(line: bytes, number: int, before: bytes) -> dict[str, Any]:
    content = _signed(line, f"line {number}")
    if (content.pop(NUMBER, 0), content.pop(BEFORE, "")) != (number, sha256_hex(before)):
        raise ValueError(f"is damaged: line {number} does not follow the one before")
    return content


def _signed(line: bytes, which: str) -> dict[str, Any]:
    try:
        return parse_signed(line)
    except ValueError as error:
        raise ValueError(f"is damaged: {which} {error}") from error


def _whole_lines(raw: bytes) -> list[bytes]:
    return raw[: raw.rfind(b"\n") + 1].split(b"\n")[:-1]


def _read(path: Path) -> bytes:
    try:
        return read_whole(path)
    except FileNotFoundError:
        return b""
