"""Groups: columns that came with the data and sort its rows, such as a hospital, a writer or a device.

A group is no part of a dataset's content, so that a column may be added or corrected without another store: each is a
sealed file of its own, ``groups/NAME.group``, with the words in its head and the codes as an array (FORMAT.md).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedcache.errors import UsageError, unknown
from fedcache.store.array_file import pack, unpack
from fedcache.store.chunks import damaged
from fedcache.store.files import Buffer
from fedcache.store.manifest import Manifest, read_sidecar
from fedcache.tables.groups import Group

FOLDER = "groups"
SUFFIX = ".group"


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


def read_group(path: Path, manifest: Manifest, name: str) -> Group:
    """A group of a store. Raises UsageError for none of that name; CorruptionError for a damaged one."""
    have = group_names(manifest)
    if name not in have:
        sorters = [*have, "domain", "class"]
        hint = (
            f"Rows of {path.name} can be sorted by {', '.join(sorters)}. The columns of an ingested file and of a CSV "
            "of images become groups; --layout client/class makes one of a level of folders."
        )
        raise UsageError(unknown("column", name, sorters).message, hint)
    raw = read_sidecar(path, manifest, place_of(name), f"group {name}")
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
        raise damaged(f"group {name}", path / place_of(name), f"is no group: it {error}") from error
    return Group(codes.astype(np.int32) - np.int32(1), tuple(words))


def group_digests(manifest: Manifest) -> dict[str, str]:
    """sha256 of the file of every group, by name: equal where the rows have the same values."""
    return {name: manifest.files[place_of(name)] for name in group_names(manifest)}
