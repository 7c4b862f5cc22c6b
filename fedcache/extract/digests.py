"""Remembers the digests of large files and of fedcache's own code.

Hashing an archive of 60,000 images takes half a second, a checkpoint of 400 MB two seconds, and fedcache's own code one
second. Every run needs all of them. So a digest is remembered by (path, size, mtime_ns, inode), which changes with the
file on any ordinary file system; ``--rehash`` ignores the remembered digests of the user's files.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from fedcache.config import Home
from fedcache.errors import CorruptionError
from fedcache.store.files import (
    canonical_json,
    digest_of,
    file_sha256,
    make_private,
    read_sealed,
    sha256_hex,
    write_sealed,
)
from fedcache.store.own_code import INSTALLED, ROOT

T = TypeVar("T")


def stat_key(path: Path) -> list[Any]:
    """[absolute path, size, mtime_ns, inode] of a file, by which ``DigestMemory`` identifies it."""
    stat = path.stat()
    return [str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino]


@dataclass(eq=False)
class DigestMemory:
    """Remembered facts, each in a small sealed file under ``root``, so that concurrent writers do not lose facts.

    With ``rehash``, remembered facts are ignored; new facts are still stored.
    """

    root: Path
    rehash: bool = False

    def recall(self, key: Any) -> Any | None:
        """The fact remembered for ``key`` (any JSON value), or None. A damaged file counts as none."""
        if self.rehash:
            return None
        try:
            found = read_sealed(self._path(key), _identity(key))
        except CorruptionError:
            return None
        if found is None:
            return None
        return found.content

    def remember(self, key: Any, fact: Any) -> None:
        """Store ``fact`` (any JSON value) for ``key``. If it cannot be written, it is computed again the next time."""
        with suppress(OSError):
            make_private(self.root)
            write_sealed(self._path(key), _identity(key), fact)

    def sha256(self, path: Path) -> str:
        """sha256 of a file, from memory when the file has not changed."""
        key = ["sha256", *stat_key(path)]
        known = self.recall(key)
        if isinstance(known, str):
            return known
        value = file_sha256(path)
        self.remember(key, value)
        return value

    def _path(self, key: Any) -> Path:
        return self.root / f"{digest_of(key)[:32]}.json"


def _identity(key: Any) -> dict[str, Any]:
    """The identity in the seal of a fact's file: ``key`` as JSON returns it, with lists instead of tuples."""
    plain: dict[str, Any] = json.loads(canonical_json({"kind": "fact", "key": key}))
    return plain


def remembered_of_package(key: Sequence[str], read: Callable[[], T]) -> T:
    """The fact that ``read`` returns about fedcache's own code (any JSON value).

    It is remembered while no file of the package changes, unless the home does not exist yet or cannot be written.
    """
    home = Home.from_environment()
    memory = DigestMemory(home.digests)
    fact_key = ["of the package", *key]
    known = memory.recall(fact_key)
    if known is not None and known["state"] == package_state():
        found: T = known["fact"]
        return found
    fact = read()
    if home.root.is_dir():
        memory.remember(fact_key, {"state": package_state(), "fact": fact})
    return fact


@cache
def package_state() -> str:
    """Digest of the code that runs: the files of the package, Python, and when packages were installed."""
    places = [(str(place), place.stat().st_mtime_ns) for place in INSTALLED if place.is_dir()]
    state = [sys.version, places, list(files_below(ROOT))]
    return sha256_hex(repr(state).encode())


def files_below(place: Path) -> Iterator[tuple[str, int, int, int, int]]:
    """(path, size, mtime_ns, ctime_ns, inode) of a file, or of all files below a folder, in the order of their paths.

    Compiled files of Python are left out.
    """
    root = place.resolve()
    found = []
    if root.is_file():
        found = [root]
    # For a file, os.walk yields nothing.
    for folder, subfolders, names in os.walk(root, followlinks=True):
        subfolders[:] = [name for name in subfolders if name != "__pycache__"]
        found += [Path(folder, name) for name in names]
    for path in sorted(found):
        stat = path.stat()
        yield str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino
