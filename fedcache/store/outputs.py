"""Files that a user names with ``-o``: whole or absent, and without leftovers of killed processes.

On Linux a file has no name before it is complete. Elsewhere it has a temporary name, which a killed process cannot
remove. The next command that writes the same file removes it. While a file is being written, a note in ``outputs/`` of
the home says where, so that ``fedcache gc`` finds what nobody writes again.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from fedcache.config import Home
from fedcache.errors import CorruptionError
from fedcache.store.files import Buffer, make_private, size_of, written_unnamed
from fedcache.store.lock import is_alive, writer_of
from fedcache.store.sealed import read_sealed, write_sealed

NOTES = "outputs"
"""Folder of the home: one note for each file that is being written outside."""

WHAT = {"kind": "file that is being written"}


@contextmanager
def output_file(path: Path, needed: int = 0) -> Iterator[BinaryIO]:
    """A file to write that takes the place of ``path`` when the block ends, as ``written_unnamed``.

    Args:
        path: of the file.
        needed: bytes that will be written, for the message of a full disk; 0 where that is not known.
    """
    with _noted(path), written_unnamed(path, needed) as file:
        yield file


def write_output(path: Path, *parts: Buffer) -> None:
    """Replace ``path`` by the concatenated parts, as ``output_file``."""
    with output_file(path, size_of(parts)) as file:
        for part in parts:
            file.write(part)


def leftover_outputs(home: Home) -> Iterator[Path]:
    """Temporary files of killed processes that were writing outputs, and the notes of these."""
    for note in sorted((home.root / NOTES).glob("*.json")):
        try:
            found = read_sealed(note, WHAT)
        except CorruptionError:
            yield note
            continue
        if found is None or is_alive(int(found.content["pid"])):
            continue
        yield from _partials(Path(found.content["path"]), str(found.content["pid"]))
        yield note


@contextmanager
def _noted(path: Path) -> Iterator[None]:
    """Remove what killed processes left of an output, and note in the home that it is being written now."""
    home = Home.from_environment()
    for left in _partials(path, "*"):
        with suppress(OSError):
            if not is_alive(writer_of(left)):
                left.unlink(missing_ok=True)
    note = home.root / NOTES / f"{os.getpid()}-{os.urandom(4).hex()}.json"
    if home.root.is_dir():
        with suppress(OSError):
            make_private(note.parent)
            write_sealed(note, WHAT, {"path": str(path.absolute()), "pid": os.getpid()})
    try:
        yield
    finally:
        with suppress(OSError):
            note.unlink(missing_ok=True)


def _partials(path: Path, pid: str) -> list[Path]:
    """Temporary files of an output, of the process of that number or, for ``*``, of any."""
    return sorted(path.parent.glob(f".{glob.escape(path.name)}.{pid}-{'[0-9a-f]' * 8}.partial"))
