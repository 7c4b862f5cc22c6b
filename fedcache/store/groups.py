"""Groups: columns that came with the data and sort its rows, such as a hospital, a writer or a device.

A group is no part of a dataset's content, so that a column may be added or corrected without another store: each is a
sealed file of its own, ``groups/NAME.group``, with the words in its head and the codes as an array (FORMAT.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import CorruptionError, FedcacheError, UsageError, unknown
from fedcache.store import chunks as files
from fedcache.store.array_file import mapped, pack, read_content, unpack
from fedcache.store.files import Buffer, sha256_hex, write_atomic
from fedcache.store.manifest import SAFE, Manifest
from fedcache.store.text_features import slug_of
from fedcache.store.words import NO_VALUE, Unread, Words, as_column, sorted_words

FOLDER, SUFFIX = "groups", ".group"

RESERVED = ("domain", "class", "split")
"""Columns every store has; a group of such a name would hide them."""


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


@dataclass(frozen=True, eq=False)
class Group:
    """One value for each row, or none.

    >>> Group.of(["b", "a", "", "b"]).words
    ('a', 'b')
    """

    codes: NDArray[np.int32]  # [N], index into ``words``; -1 where no value is known
    words: tuple[str, ...]  # K distinct values as words, sorted

    @classmethod
    def of(cls, values: Any) -> Group:
        """A column of N words or numbers; an empty word, None and NaN are no value, and whole floats are integers.

        Raises UsageError for other shapes, and for numbers that are measurements: floats that are not whole.
        """
        column = values if isinstance(values, Words) else np.asarray(values)
        if len(column.shape) != 1:
            raise UsageError(f"A group is one value for each row, not {column.shape}.", "Give a column.")
        if isinstance(column, Words):
            return cls.of_words(column)
        if column.dtype.kind == "f":
            known = ~np.isnan(column)
            # Beyond 2^53 a float no longer tells whole numbers apart.
            if not ((np.abs(column[known]) < 1 << 53) & (column[known] == np.rint(column[known]))).all():
                raise UsageError("Floats that are not whole sort no rows.", "Give words, or integers.")
            column = np.where(known, column, 0).astype(np.int64)
        elif column.dtype.kind in "iub":
            known = np.ones(len(column), bool)
        else:
            made = as_column(column)
            if isinstance(made, Unread):
                raise UsageError(f"A group is a word or number for each row, not {made.why}.", "Give words.")
            return cls.of(made)
        # Numbers are sorted as numbers (writer 2 before writer 10).
        distinct, inverse = np.unique(column[known], return_inverse=True)
        codes = np.full(len(column), -1, np.int32)
        codes[known] = inverse
        return cls(codes, tuple(map(str, distinct.tolist())))

    @classmethod
    def of_words(cls, column: Words) -> Group:
        """The same of words; what Python writes for no value is none, and space around a word no part of it."""
        used = np.unique(column.codes).tolist()
        clean = [w.strip() for w in column.words]
        words = sorted_words(clean[i] for i in used if i >= 0 and clean[i] not in NO_VALUE)
        place = {word: i for i, word in enumerate(words)}
        to = np.array([*(place.get(word, -1) for word in clean), -1], np.int32)  # the last: rows without a word
        return cls(to[column.codes], tuple(words))

    def values(self) -> list[str | None]:
        """The value of each row, None where none is known."""
        words = [*self.words, None]
        return [words[code] for code in self.codes.tolist()]

    def take(self, rows: NDArray[np.int64]) -> Group:
        """The values of some rows; -1 is a row without a value. The words stay."""
        codes = np.append(self.codes, np.int32(-1))[rows]  # -1 picks the last
        return Group(codes, self.words)

    def equals(self, other: Group) -> bool:
        """Whether every row has the same value."""
        return self.words == other.words and np.array_equal(self.codes, other.codes)


def joined(parts: Sequence[Mapping[str, Group]], rows: Sequence[int]) -> dict[str, Group]:
    """Groups of several datasets, one after another; rows of a dataset without a group have no value of it.

    ``rows`` are the rows of each dataset.
    """
    made = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        words = tuple(dict.fromkeys(word for part in parts if name in part for word in part[name].words))
        place = {word: i for i, word in enumerate(words)}
        codes = [np.full(count, -1, np.int32) for count in rows]
        for at, part in enumerate(parts):
            if name in part:
                to = np.array([*(place[word] for word in part[name].words), -1], np.int32)
                codes[at] = to[part[name].codes]
        made[name] = Group(np.concatenate(codes), words)
    return made


def usable_group_name(name: str) -> str:
    """The name of a column as that of a group. Raises UsageError for one that is taken or has no letter."""
    slug = slug_of(name.strip())
    if slug.lower() in RESERVED or not SAFE.fullmatch(slug):
        raise UsageError(
            f"A group cannot be called {name!r}: {', '.join(RESERVED)} are columns of every store."
            if slug.lower() in RESERVED
            else f"A group cannot be called {name!r}.",
            "A name begins with a letter or digit and has at most 128 characters.",
        )
    return slug


def place_of(name: str) -> str:
    """The file of a group, inside the store."""
    return f"{FOLDER}/{name}{SUFFIX}"


def parts_of(name: str, group: Group) -> list[Buffer]:
    """The parts of a group's file, which follow one another. Raises UsageError for words that fit no file."""
    try:
        # Codes are unsigned in such a file: 0 is no value.
        return pack({"group": name, "words": list(group.words)}, {"codes": group.codes.astype(np.int64) + 1})
    except ValueError as error:
        raise UsageError(f"No file holds the group {name!r}: {error}.", "Give its values shorter names.") from error


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
        words, codes = content["words"], arrays["codes"]
        if not isinstance(words, list) or not all(type(word) is str for word in words):
            raise ValueError("holds words that are none")
        if len(codes) != manifest.rows or (len(codes) and int(codes.max()) > len(words)):
            raise ValueError(f"holds {len(codes):,} codes for {manifest.rows:,} rows and {len(words):,} words")
    except (ValueError, KeyError) as error:
        raise _damaged(name, place, f"is no group: it {error}") from error
    return Group(codes.astype(np.int32) - np.int32(1), tuple(words))


def count_words(path: Path, manifest: Manifest, name: str) -> int:
    """How many values a group has; only the head of its file is looked at. Errors as of ``group_bytes``."""
    raw, place = group_bytes(path, manifest, name), path / place_of(name)
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
                f"The group {name!r} has {len(group.codes):,} values for {store.rows:,} rows.", "Give one per row."
            )
        packed[usable_group_name(name)] = parts_of(name, group)
    digests = {place_of(name): sha256_hex(*parts) for name, parts in packed.items()}
    held = store.manifest.files
    new = {n: p for n, p in packed.items() if held.get(place_of(n)) != digests[place_of(n)] or _gone(store, n)}
    if not new:
        return []
    with store.edit() as manifest:
        changed = [n for n in new if manifest.files.get(place_of(n), digests[place_of(n)]) != digests[place_of(n)]]
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
        f"fedcache repair {place.parents[1]}   forgets it; then ingest or extract brings the column again.",
    )


def column_of(store: GroupStore, name: str) -> Group:
    """A group of a store; ``domain`` and ``class`` are those columns. Errors as of ``group_bytes``."""
    if name == "domain":
        return Group(store.column("domain").astype(np.int32), store.manifest.domains)
    if name == "class":
        return Group(store.column("label").astype(np.int32), store.manifest.classes)
    return store.group(name)
