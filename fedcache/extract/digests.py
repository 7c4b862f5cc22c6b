"""Digests of large files and of fedcache's own code, remembered.

A 60,000-image archive takes half a second to hash, a 400 MB checkpoint two and fedcache's own code one; all are
requested on every run. The answer is remembered by (path, size, mtime_ns, inode), which changes whenever the file does
on any ordinary file system; ``--rehash`` forgets those of the user's files.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
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
    """[absolute path, size, mtime_ns, inode] of a file: its identity for the memory below."""
    stat = path.stat()
    return [str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino]


class DigestMemory:
    """One small sealed file per remembered fact, under ``root``; concurrent writers cannot lose each other's.

    With ``rehash``, what is remembered is ignored; new facts are still stored.
    """

    def __init__(self, root: Path, *, rehash: bool = False) -> None:
        self.root = root
        self.rehash = rehash

    def recall(self, key: Any) -> Any | None:
        """The fact remembered for ``key`` (any JSON value), or None. A damaged file counts as none."""
        if self.rehash:
            return None
        try:
            found = read_sealed(self._path(key), _what(key))
        except CorruptionError:
            return None
        if found is None:
            return None
        return found.content

    def remember(self, key: Any, fact: Any) -> None:
        """Store ``fact`` (any JSON value) for ``key``. If it cannot be written, it is computed again the next time."""
        with suppress(OSError):
            make_private(self.root)
            write_sealed(self._path(key), _what(key), fact)

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


def _what(key: Any) -> dict[str, Any]:
    """The identity of the file of a fact, as JSON reads it back, so that tuples equal lists."""
    plain: dict[str, Any] = json.loads(canonical_json({"kind": "fact", "key": key}))
    return plain


def remembered_of_package(key: Sequence[str], read: Callable[[], T]) -> T:
    """What ``read`` finds in fedcache's own code (any JSON value), remembered while no file of the package changes.

    A home that is not there yet, or cannot be written, remembers nothing.
    """
    home = Home.from_environment()
    memory = DigestMemory(home.digests)
    known = memory.recall(["of the package", *key])
    if known is not None and known["state"] == package_state():
        found: T = known["fact"]
        return found
    fact = read()
    if home.root.is_dir():
        memory.remember(["of the package", *key], {"state": package_state(), "fact": fact})
    return fact


@cache
def package_state() -> str:
    """Digest of what computes: the files of the package, Python, and the times at which packages were installed."""
    places = [(str(place), place.stat().st_mtime_ns) for place in INSTALLED if place.is_dir()]
    return sha256_hex(repr([sys.version, places, list(files_below(ROOT))]).encode())


def files_below(place: Path) -> Iterator[tuple[str, int, int, int, int]]:
    """Path, size, times and inode of a file, or of all files below a folder, sorted; compiled files are left out."""
    root = place.resolve()
    found = []
    if root.is_file():
        found = [root]
    for folder, below, names in os.walk(root, followlinks=True):
        below[:] = [name for name in below if name != "__pycache__"]
        found += [Path(folder, name) for name in names]
    for path in sorted(found):
        stat = path.stat()
        yield str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino
