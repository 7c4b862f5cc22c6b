"""Groups: columns that came with the data and sort its rows, such as a hospital, a writer or a device.

A group is no part of a dataset's content, so that a column may be added or corrected without another store: each is a
sealed file of its own, ``groups/NAME.group``, with the words in its head and the codes as an array (FORMAT.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import CorruptionError, FedcacheError, UsageError, shell_word, unknown
from fedcache.store import chunks as files
from fedcache.store.array_file import mapped, pack, read_content, unpack
from fedcache.store.files import Buffer, sha256_hex, write_atomic
from fedcache.store.manifest import Manifest
from fedcache.tables.groups import Group, usable_group_name

FOLDER = "groups"
SUFFIX = ".group"


class GroupStore(Protocol):
    """What groups ask of a store; ``Store`` is one."""

    path: Path

    @property
    def rows(self) -> int:
        """N."""

    @property
    def manifest(self) -> Manifest:
        """Everything the manifest says."""

    def edit(self) -> AbstractContextManager[Manifest]:
        """The manifest as it is now, to change under its lock."""

    def column(self, key: str) -> NDArray[Any]:
        """A column of numbers."""

    def group(self, name: str) -> Group:
        """The value of every row."""


def place_of(name: str) -> str:
    """The file of a group, inside the store."""
    return f"{FOLDER}/{name}{SUFFIX}"


def parts_of(name: str, group: Group) -> list[Buffer]:
    """The parts of a group's file, which follow one another. Raises UsageError for words that fit no file."""
    try:
        # Codes are unsigned in such a file: 0 is no value.
        return pack(
            {"group": name, "words": list(group.words)}, {"codes": group.codes.astype(np.int64) + 1}
        )
    except ValueError as error:
        raise UsageError(
            f"No file holds the group {name!r}: {error}.", "Give its values shorter names."
        ) from error


def group_names(manifest: Manifest) -> list[str]:
    """Names of the groups of a store, sorted."""
    found = (p for p in manifest.files if p.startswith(f"{FOLDER}/") and p.endswith(SUFFIX))
    return sorted(p.removeprefix(f"{FOLDER}/").removesuffix(SUFFIX) for p in found)


def group_bytes(path: Path, manifest: Manifest, name: str) -> memoryview:
    """The file of a group, mapped. Raises UsageError for none of that name; CorruptionError for a damaged one."""
    have = group_names(manifest)
    if name not in have:
        sorters = [*have, "domain", "class"]
        hint = (
            f"Rows of {path.name} can be sorted by {', '.join(sorters)}. The columns of an ingested file and of a CSV "
            "of images become groups; --layout client/class makes one of a level of folders."
        )
        raise UsageError(unknown("column", name, sorters).message, hint)
    place = path / place_of(name)
    try:
        raw = mapped(place)
    except OSError as error:
        raise _damaged(name, place, "is missing or unreadable") from error
    if sha256_hex(raw) != manifest.files[place_of(name)]:
        raise _damaged(name, place, "does not have the sha256 of the manifest")
    return raw


def read_group(path: Path, manifest: Manifest, name: str) -> Group:
    """A group of a store; errors as of ``group_bytes``."""
    raw = group_bytes(path, manifest, name)
    place = path / place_of(name)
    try:
        content, arrays = unpack(raw)
        words = content["words"]
        codes = arrays["codes"]
        if not isinstance(words, list) or not all(type(word) is str for word in words):
            raise ValueError("holds words that are none")
        if len(codes) != manifest.rows or (len(codes) and int(codes.max()) > len(words)):
            raise ValueError(
                f"holds {len(codes):,} codes for {manifest.rows:,} rows and {len(words):,} words"
            )
    except (ValueError, KeyError) as error:
        raise _damaged(name, place, f"is no group: it {error}") from error
    return Group(codes.astype(np.int32) - np.int32(1), tuple(words))


def count_words(path: Path, manifest: Manifest, name: str) -> int:
    """How many values a group has; only the head of its file is looked at. Errors as of ``group_bytes``."""
    raw = group_bytes(path, manifest, name)
    place = path / place_of(name)
    try:
        return len(read_content(raw)["words"])
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(name, place, "is no group") from error


def put_groups(store: GroupStore, groups: Mapping[str, Group]) -> list[str]:
    """Keep groups of the rows of a store, each in the place of one of that name; equal ones are not written.

    Returns:
        the names of those that took the place of other values.

    Raises:
        UsageError for a group of another number of rows, or a name that cannot be one.
    """
    packed = {}
    for name, group in groups.items():
        if len(group.codes) != store.rows:
            raise UsageError(
                f"The group {name!r} has {len(group.codes):,} values for {store.rows:,} rows.",
                "Give one per row.",
            )
        packed[usable_group_name(name)] = parts_of(name, group)
    digests = {place_of(name): sha256_hex(*parts) for name, parts in packed.items()}
    held = store.manifest.files
    new = {
        n: p
        for n, p in packed.items()
        if held.get(place_of(n)) != digests[place_of(n)] or _gone(store, n)
    }
    if not new:
        return []
    with store.edit() as manifest:
        changed = [
            n
            for n in new
            if manifest.files.get(place_of(n), digests[place_of(n)]) != digests[place_of(n)]
        ]
        files.make_directories(store.path / FOLDER)
        for name, parts in new.items():
            write_atomic(store.path / place_of(name), *parts)
            manifest.files[place_of(name)] = digests[place_of(name)]
    return changed


def replace_groups(store: GroupStore, groups: Mapping[str, Group]) -> tuple[list[str], list[str]]:
    """As ``put_groups``, and the store keeps no others.

    Returns:
        the names of those that are new or have other values, and of those that were removed.
    """
    before = set(group_names(store.manifest))
    changed = put_groups(store, groups)
    names = {usable_group_name(name) for name in groups}
    if gone := sorted(before - names):
        with store.edit() as manifest:
            for name in gone:
                manifest.files.pop(place_of(name), None)
        for name in gone:  # after the manifest, which no longer names them
            (store.path / place_of(name)).unlink(missing_ok=True)
    return sorted({*changed, *(names - before)}), gone


def group_digests(manifest: Manifest) -> dict[str, str]:
    """sha256 of the file of every group, by name: equal where the rows have the same values."""
    return {name: manifest.files[place_of(name)] for name in group_names(manifest)}


def _gone(store: GroupStore, name: str) -> bool:
    return not (store.path / place_of(name)).is_file()


def _damaged(name: str, place: Path, why: str) -> FedcacheError:
    return CorruptionError(
        f"group {name}: {place} {why}.",
        f"fedcache repair {shell_word(place.parents[1])}   forgets it; then ingest or extract brings the column again.",
    )


def column_of(store: GroupStore, name: str) -> Group:
    """A group of a store; ``domain`` and ``class`` are those columns. Errors as of ``group_bytes``."""
    if name == "domain":
        return Group(store.column("domain").astype(np.int32), store.manifest.domains)
    if name == "class":
        return Group(store.column("label").astype(np.int32), store.manifest.classes)
    return store.group(name)
