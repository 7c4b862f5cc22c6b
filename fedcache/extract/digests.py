"""Digests of large files, remembered.

A 60,000-image archive takes half a second to hash and a 400 MB checkpoint two; both are asked for on every run. The
answer is remembered by (path, size, mtime_ns, inode), which changes whenever the file does on any ordinary file
system; ``--rehash`` forgets it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedcache.errors import CorruptionError
from fedcache.store.files import canonical_json, digest_of, file_sha256, make_private
from fedcache.store.sealed import read_sealed, write_sealed


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
        """What was remembered for ``key`` (any JSON value), or None; a damaged file is forgotten, and made again."""
        if self.rehash:
            return None
        try:
            found = read_sealed(self._path(key), _what(key))
        except CorruptionError:
            return None
        return None if found is None else found.content

    def remember(self, key: Any, fact: Any) -> None:
        """Store ``fact`` (any JSON value) for ``key``."""
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
    """What the file of a fact is; as JSON gives it back, so that tuples equal lists."""
    plain: dict[str, Any] = json.loads(canonical_json({"kind": "fact", "key": key}))
    return plain
