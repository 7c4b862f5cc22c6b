"""The rows of a store: uid, name, label, domain, split and ok, read from ``samples/`` and verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import UsageError, unknown
from fedcache.notebooks import data_frame
from fedcache.store.chunks import (
    array_bytes,
    checksum,
    damaged,
    decode_strings,
    pack,
    read_checked,
    unpack,
)
from fedcache.store.files import Buffer
from fedcache.store.journal import announced_checksums
from fedcache.store.manifest import COLUMNS, Manifest, column_file, column_shape, read_sidecar
from fedcache.tables.groups import Group
from fedcache.tables.splits import SPLIT_NAMES, TEST, TRAIN, VALIDATION
from fedcache.tables.words import EqualStrings

INGESTED = "ingested"
"""``source`` in the description of a dataset that came as embeddings, without images."""

HELD_OUT = "the fifth of each class with the smallest uids"
"""Words for messages: the rows that ``held_out`` chooses, 20 % of the rows of each class."""


@dataclass(frozen=True)
class Samples:
    """One entry per row of the store."""

    uid: NDArray[np.uint8]  # uint8 [N, 16], identity of the image
    # N names inside the dataset, sorted; in a store that grew, the new names follow the earlier ones
    name: Sequence[str]
    label: NDArray[np.int32]  # int32 [N], -1 unknown
    domain: NDArray[np.int16]  # int16 [N]
    split: NDArray[np.uint8]  # uint8 [N], 0 train, 1 test, 2 validation
    ok: NDArray[np.uint8]  # uint8 [N], 0 where the image could not be read
    classes: tuple[str, ...]  # names in label order
    domains: tuple[str, ...]  # names in domain order

    def checked(self) -> Samples:
        """The same rows in the stored dtypes. Raises UsageError if columns differ in length, or a code has no name."""
        rows = len(self.name)
        out = {}
        for key, dtype in COLUMNS.items():
            out[key] = np.ascontiguousarray(getattr(self, key), dtype)
        shapes = {key: value.shape for key, value in out.items()}
        wanted = {key: column_shape(key, rows) for key in COLUMNS}
        if shapes != wanted:
            raise UsageError(
                f"Every column must have {rows} rows, but the columns have shapes {shapes}.",
                f"Expected {wanted}.",
            )
        for key, names, low in (("label", self.classes, -1), ("domain", self.domains, 0)):
            if not rows:
                continue
            least = int(out[key].min())
            most = int(out[key].max())
            if least < low or most >= len(names):
                raise UsageError(
                    f"{key} refers to the names {least} to {most}, but there are {len(names)} names.",
                    f"Give a name for each {key}.",
                )
        name = self.name
        if not isinstance(name, EqualStrings):
            name = tuple(name)
        return Samples(name=name, classes=tuple(self.classes), domains=tuple(self.domains), **out)


def held_out(
    label: NDArray[np.int32],
    domain: NDArray[np.integer[Any]],
    uid: NDArray[np.uint8],
    among: NDArray[np.bool_],
    *,
    most: int | None = None,
) -> NDArray[np.bool_]:
    """The test set of a dataset that has none, bool [N]: the 20 % of each (domain, class) with the smallest uids.

    The choice depends on the content alone, so renaming files does not change which images are chosen. Adding a file
    moves at most one other image of its group to or from the test set. Copies of an image have equal uids: if the limit
    of a group falls between two copies, one of them is a test row and the other is not. A group of two to nine rows
    gives one test row, a single row gives none.

    Args:
        label: [N].
        domain: [N].
        uid: [N, 16].
        among: [N], the rows to choose from.
        most: the largest number of test rows of a group; None for no limit.
    """
    chosen = np.zeros(len(label), dtype=bool)
    rows = np.flatnonzero(among)
    if not len(rows):
        return chosen
    # Sort by domain, then label, then uid. The sixteen bytes of a uid are compared as two big-endian numbers of eight
    # bytes, whose order is the same. The last key of ``lexsort`` is the first criterion; equal rows keep their order.
    high, low = np.ascontiguousarray(uid[rows]).view(">u8").T.astype(np.uint64)
    rows = rows[np.lexsort((low, high, label[rows], domain[rows]))]
    # Rows of one (domain, label) now follow each other. A group starts where this pair changes.
    group = np.stack([domain[rows], label[rows]], axis=1).astype(np.int64)
    begins_group = np.any(group[1:] != group[:-1], axis=1)
    starts = np.concatenate([[0], np.flatnonzero(begins_group) + 1])
    sizes = np.diff(np.append(starts, len(rows)))
    # Number of test rows of each group.
    quota = np.where(sizes > 1, np.maximum(1, sizes // 5), 0)
    if most is not None:
        quota = np.minimum(quota, most)
    # Place of each row in its group: 0 for the row with the smallest uid.
    place = np.arange(len(rows)) - np.repeat(starts, sizes)
    is_chosen = place < np.repeat(quota, sizes)
    chosen[rows[is_chosen]] = True
    return chosen


def complete_split(
    splits: NDArray[np.uint8] | None,
    label: NDArray[np.int32],
    domain: NDArray[np.integer[Any]],
    uid: NDArray[np.uint8],
    ok: NDArray[np.bool_],
    where: str,
    holds: str,
) -> tuple[NDArray[np.uint8], str]:
    """The split of each row, with a test set if rows can be held out for one, and a note on how it was chosen here.

    Args:
        splits: [N] of the data; None where the data has no splits.
        label: [N].
        domain: [N].
        uid: [N, 16].
        ok: [N], the rows that can be read.
        where: the data, for messages.
        holds: name of rows in messages, such as "images".

    Returns:
        the split [N], and the note; an empty one where the data has test rows.

    Raises:
        UsageError, when there are no training rows.
    """
    # Parts of the note: "no test set: the fifth ... is taken from train", or "no split given: the fifth ... is the test
    # set".
    problem = "no test set"
    remedy = "taken from train"
    if splits is None:
        splits = np.full(len(label), TRAIN, np.uint8)
        problem = "no split given"
        remedy = "the test set"
    split = splits.copy()
    if not np.any(split == TRAIN):
        raise UsageError(
            f"{where} has {len(split):,} test or validation {holds}, but no training {holds}.",
            "Give a folder or file that also has the training rows.",
        )
    if np.any(split == TEST):
        return split, ""
    if np.any(split == VALIDATION):
        split[split == VALIDATION] = TEST
        return split, f"no test set: the validation {holds} are used as the test set"
    chosen = held_out(label, domain, uid, (split == TRAIN) & ok)
    split[chosen] = TEST
    if not chosen.any():
        return split, (
            f"{problem}, and no class of a domain has two readable training {holds}, so none can be held out"
        )
    return split, f"{problem}: {HELD_OUT} is {remedy}"


def read_samples(store: Path, manifest: Manifest) -> Samples:
    """Every column. Raises CorruptionError if a column is not the one that the manifest lists."""
    columns: dict[str, Any] = {key: read_column(store, manifest, key) for key in COLUMNS}
    place = column_file(store, "name")
    raw = _verified(store, manifest, "name", place, None)
    try:
        name = decode_strings(raw)
    except ValueError as error:
        raise damaged("samples/name", place, f"has no valid names ({error})") from error
    # Even in a store without rows each column has one row, because no chunk is empty. It is cut off below.
    if len(name) != max(1, manifest.rows):
        raise damaged("samples/name", place, f"holds {len(name)} names for {manifest.rows} rows")
    return Samples(
        name=name[: manifest.rows], classes=manifest.classes, domains=manifest.domains, **columns
    )


def read_column(store: Path, manifest: Manifest, key: str) -> NDArray[Any]:
    """One column of numbers: [N], or uint8 [N, 16] for ``uid``; errors as ``read_samples``."""
    dtype = COLUMNS[key]
    # At least one row, as in ``read_samples``.
    shape = column_shape(key, max(1, manifest.rows))
    place = column_file(store, key)
    raw = _verified(store, manifest, key, place, array_bytes(shape, dtype))
    column = np.frombuffer(raw, np.dtype(dtype).newbyteorder("<")).reshape(shape)
    return column[: manifest.rows]


def _verified(store: Path, manifest: Manifest, key: str, place: Path, size: int | None) -> bytes:
    """The bytes of a column, after its checksums were verified; ``size`` is None where it is not known.

    ``place`` is the file of the column. Raises CorruptionError.
    """
    listed = [manifest.samples[key]]  # the checksums that the column may have
    if key == "ok":
        # A writer replaces this column before the manifest. In between, the column has the checksum in the journal.
        listed += announced_checksums(store, "ok")
    raw = read_checked(place, None, f"samples/{key}", size=size)
    if checksum(raw) not in listed:
        raise damaged(
            f"samples/{key}", place, "is a valid column, but the manifest lists another one"
        )
    return raw


def select_rows(samples: Samples, split: str | None) -> NDArray[np.int64]:
    """Numbers of the readable rows of a split; of all splits for None. Raises UsageError for an unknown split."""
    if split is not None and split not in SPLIT_NAMES:
        raise unknown("split", split, SPLIT_NAMES)
    wanted = samples.ok == 1
    if split is not None:
        wanted &= samples.split == SPLIT_NAMES.index(split)
    return np.flatnonzero(wanted)


def samples_frame(s: Samples, groups: Mapping[str, Group]) -> Any:
    """A pandas table of the rows: uid, name, label, class, domain, split and ok, then a column for each group.

    A group with the name of one of these columns becomes ``group/NAME``. Raises MachineError without pandas.
    """
    classes = [*s.classes, None]  # the index -1, an unknown label, selects the last entry
    columns = {
        "uid": [row.tobytes().hex() for row in s.uid],
        "name": list(s.name),
        "label": s.label,
        "class": [classes[i] for i in s.label],
        "domain": [s.domains[i] for i in s.domain],
        "split": [SPLIT_NAMES[i] for i in s.split],
        "ok": s.ok == 1,
    }
    for name, group in groups.items():
        if name in columns:
            name = f"group/{name}"
        columns[name] = group.values()
    return data_frame(columns)


# Groups: columns that came with the data and say where each row belongs, for example to which
# hospital, writer or device.
#
# A group is no part of a dataset's content, so a column may be added or corrected without making
# another store. Each group is a sealed file of its own, ``groups/NAME.group``, with the words in
# its head and the codes as an array (FORMAT.md).

FOLDER = "groups"
SUFFIX = ".group"


def place_of(name: str) -> str:
    """The file of a group, inside the store."""
    return f"{FOLDER}/{name}{SUFFIX}"


def parts_of(name: str, group: Group) -> list[Buffer]:
    """The parts of a group's file, to be written one after another. Raises UsageError for words that are too long."""
    content = {"group": name, "words": list(group.words)}
    # In the file 0 means no value, which is -1 in a ``Group``, because ``pack`` takes no negative numbers.
    codes = group.codes.astype(np.int64) + 1
    try:
        return pack(content, {"codes": codes})
    except ValueError as error:
        raise UsageError(
            f"The group {name!r} cannot be stored: {error}.", "Give its values shorter names."
        ) from error


def group_names(manifest: Manifest) -> list[str]:
    """Names of the groups of a store, sorted."""
    names = []
    for path in manifest.files:
        if path.startswith(f"{FOLDER}/") and path.endswith(SUFFIX):
            names.append(path.removeprefix(f"{FOLDER}/").removesuffix(SUFFIX))
    return sorted(names)


def read_group(path: Path, manifest: Manifest, name: str) -> Group:
    """A group of a store. Raises UsageError for an unknown name; CorruptionError for a damaged file."""
    names = group_names(manifest)
    if name not in names:
        columns = [*names, "domain", "class"]
        hint = (
            f"{path.name} has the groups and columns {', '.join(columns)}. A group comes from a column of an "
            "ingested file or of a CSV file of images, or from a folder level (--layout client/class)."
        )
        raise unknown("column", name, columns, hint=hint)
    raw = read_sidecar(path, manifest, place_of(name), f"group {name}")
    try:
        content, arrays = unpack(raw)
        words = content["words"]
        codes = arrays["codes"]
        if not isinstance(words, list) or not all(type(word) is str for word in words):
            raise ValueError("contains values that are not words")
        # The code of a word is its number plus 1, so it may equal the number of words.
        highest = int(codes.max(initial=0))
        if len(codes) != manifest.rows or highest > len(words):
            raise ValueError(
                f"has {len(codes):,} values for {manifest.rows:,} rows, and a row with word number {highest:,} of "
                f"{len(words):,} words"
            )
    except (ValueError, KeyError) as error:
        why = str(error)
        if isinstance(error, KeyError):
            why = f"lacks {error}"
        raise damaged(
            f"group {name}", path / place_of(name), f"is not a group: it {why}"
        ) from error
    return Group(codes.astype(np.int32) - np.int32(1), tuple(words))


def group_digests(manifest: Manifest) -> dict[str, str]:
    """sha256 of the file of every group, by name. Equal digests mean that the rows have the same values."""
    return {name: manifest.files[place_of(name)] for name in group_names(manifest)}
