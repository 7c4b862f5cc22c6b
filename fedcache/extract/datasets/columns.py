"""Images that come as rows of files rather than as files: which column is what, and the dataset that the rows make.

A column is found by its usual name or named in the spec, ``arrays:cells.npz?images=slides&label=grade&group=hospital``,
which is what ``--images-key``, ``--label-key`` and ``--group-key`` write. Every other column that sorts the rows is
kept as a group; one that cannot be a group is left out, and the reading says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import UsageError, unknown
from fedcache.extract import inputs
from fedcache.extract.datasets import dataset
from fedcache.extract.datasets.class_labels import coded_labels, end_to_end, joined_labels
from fedcache.extract.datasets.dataset import ONE_DOMAIN, SPLIT_WORDS, TEST, TRAIN, VALIDATION, Context, Dataset, Source
from fedcache.extract.recipe import slug as safe
from fedcache.store.samples import HELD_OUT, held_out
from fedcache.tables.groups import Group, usable_group_name

IMAGES = ("images", "image", "imgs", "img", "pixels", "data", "x")
LABELS = ("labels", "label", "targets", "target", "y", "fine_labels", "fine_label", "class", "cls", "category")
DOMAINS = ("domain", "domains")
SPLITS = ("split", "splits")
CLASS_NAMES = ("class_names", "classes", "label_names")
"""Usual names of columns, compared without case; the first that is there is taken."""

SPLIT_CODES = {
    "train": TRAIN, "training": TRAIN, "test": TEST, "testing": TEST, "t10k": TEST,
    "val": VALIDATION, "valid": VALIDATION, "validation": VALIDATION, "dev": VALIDATION,
}  # fmt: skip
"""Words for a split in the names of files, folders and columns, and in a column of splits, compared without case."""

KEYS = {"images": "--images-key", "label": "--label-key", "group": "--group-key"}
"""Word of a spec -> option that writes it."""

ROW_KEYS = {"rows": "--images-key", "label": "--label-key", "group": "--group-key"}
TEXT_KEYS = {"text": "--images-key", "label": "--label-key", "group": "--group-key"}
TEXT_KEYS |= dict.fromkeys(("split", "name", "domain"), "")
"""The same of rows of numbers, and of texts; a word without an option is written in the spec alone."""

MOST_NAMED = 12
"""Columns that are named where they are not used."""

WITH_COLUMNS = {"arrays": KEYS, "hf": KEYS, "webdataset": KEYS, "texts": TEXT_KEYS, "rows": ROW_KEYS}
"""Kinds of datasets whose columns can be named, and by which words."""


@dataclass(frozen=True)
class Asked:
    """The part of a spec after its kind: a place, and the columns that it names."""

    place: str
    images: str = ""  # column of images; found by its usual name when empty
    label: str = ""  # likewise
    groups: tuple[str, ...] | None = None  # the columns kept as groups; None for all that can be
    said: Mapping[str, str] = field(default_factory=dict)  # every word of the spec with its value


@dataclass(frozen=True)
class TableRows:
    """Rows that follow one another in the files, with their columns."""

    names: Sequence[str]  # [n] of the rows inside the dataset
    source: Source  # row -> image
    label: Any = None  # [n] numbers or words; None where none is known
    split: int | None = None  # code of all rows; None when nothing says it
    splits: Any = None  # [n] words, numbers or booleans, where a column says it
    domain: Any = None  # [n] words or numbers
    groups: Mapping[str, Any] = field(default_factory=dict)  # name -> [n] words or numbers
    unused: Mapping[str, str] = field(default_factory=dict)  # name of a column that has no value for each row -> why


def parse_rest(rest: str, keys: Mapping[str, str] = KEYS) -> Asked:
    """``FILE?images=A&label=B&group=C,D``; a path that exists as it is written has no columns behind a question mark.

    Raises UsageError for another word than those of ``keys``, or one given twice.
    """
    place, mark, tail = rest.rpartition("?")
    if not mark or Path(rest).expanduser().exists():
        return Asked(rest)
    found: dict[str, str] = {}
    for piece in tail.split("&"):
        word, _, value = piece.partition("=")
        if word not in keys:
            raise unknown("word behind '?'", word, keys, hint=f"For example FILE?{next(iter(keys))}=NAME&label=grade")
        if word in found or not value:
            raise UsageError(
                f"{rest!r} gives {word} {'twice' if word in found else 'no value'}.", "For example ?label=grade"
            )
        found[word] = value
    groups = tuple(g.strip() for g in found["group"].split(",") if g.strip()) if "group" in found else None
    return Asked(place, found.get(next(iter(keys)), ""), found.get("label", ""), groups, found)


def with_keys(spec: str, images: str | None, label: str | None, group: str | None) -> str:
    """A spec with the columns that options name written behind it. Raises UsageError where there are none to name."""
    kind, _, rest = spec.partition(":")
    keys = WITH_COLUMNS.get(kind, KEYS)
    given = dict(zip([word for word, option in keys.items() if option], (images, label, group), strict=True))
    words = [f"{word}={value}" for word, value in given.items() if value]
    if not words:
        return spec
    option = next(keys[word] for word, value in given.items() if value)
    if kind not in WITH_COLUMNS:
        raise UsageError(
            f"{option} names a column, and {spec} is not one of {', '.join(f'{k}:' for k in WITH_COLUMNS)}.",
            "Of several datasets as domains each says its own: a=arrays:a.npz?label=grade,b=arrays:b.npz?label=class",
        )
    return f"{spec}{'&' if parse_rest(rest, keys).place != rest else '?'}{'&'.join(words)}"


def choose(
    names: Sequence[str], usual: Sequence[str], asked: str = "", where: str = "", option: str = ""
) -> str | None:
    """The column that is meant: the one asked for, else the first of a usual name, else None.

    Raises UsageError when the one asked for is not there.
    """
    if asked:
        if asked not in names:
            raise unknown(f"column of {where}", asked, names, hint=f"{option} NAME takes one of these")
        return asked
    lowered = {name.lower().rpartition("/")[2]: name for name in reversed(names)}  # of an HDF5 file the last level
    return next((lowered[word] for word in usual if word in lowered), None)


def coded_splits(values: Any, where: str) -> NDArray[np.uint8]:
    """Split codes [N] of words, of the numbers 0 train, 1 test and 2 validation, or of booleans: true is the test set.

    Raises UsageError for another word or number.
    """
    column = np.asarray(values)
    if column.dtype.kind == "b":
        return np.where(column, TEST, TRAIN).astype(np.uint8)
    if column.dtype.kind in "iu":
        if not np.isin(column, (TRAIN, TEST, VALIDATION)).all():
            raise UsageError(
                f"The splits of {where} are other numbers than 0, 1 and 2.", "0 train, 1 test, 2 validation"
            )
        return column.astype(np.uint8)
    words, index = dataset.index_of([str(value).strip().lower() for value in column.tolist()])
    for word in words:
        if word not in SPLIT_CODES:
            raise unknown(
                "split", word, SPLIT_CODES, hint=f"Every row of {where} needs one, or the column another name"
            )
    return np.array([SPLIT_CODES[word] for word in words], dtype=np.uint8)[index]


def complete_split(
    splits: NDArray[np.uint8] | None,
    label: NDArray[np.int32],
    domain: NDArray[np.int16],
    uid: NDArray[np.uint8],
    where: Path | str,
    *,
    holds: str = inputs.IMAGES,
) -> tuple[NDArray[np.uint8], str]:
    """The split column with a test set in any case, and a note on what was chosen where the data does not say.

    Raises UsageError where there is nothing to train on.
    """
    if splits is None:
        split = np.full(len(label), TRAIN, dtype=np.uint8)
        split[held_out(label, domain, uid, split == TRAIN)] = TEST
        return split, f"no split given: {HELD_OUT} is the test set"
    split = splits.copy()
    if not np.any(split == TRAIN):
        raise UsageError(
            f"{where} has {len(split):,} test or validation {holds} and no training {holds}.",
            "Give the directory above, or the file that holds train and test",
        )
    if np.any(split == TEST):
        return split, ""
    if np.any(split == VALIDATION):
        split[split == VALIDATION] = TEST
        return split, f"no test set: the validation {holds} are used as the test set"
    split[held_out(label, domain, uid, split == TRAIN)] = TEST
    return split, f"no test set: {HELD_OUT} is taken from train"


def made_groups(
    parts: Sequence[TableRows], asked: tuple[str, ...] | None, where: str
) -> tuple[dict[str, Group], dict[str, str]]:
    """The groups of all rows, and why other columns are none; a part without a column has no value of it.

    Raises UsageError for a column that was asked for and is not there or cannot be one.
    """
    names = list(dict.fromkeys(name for part in parts for name in part.groups))
    left = {name: why for part in parts for name, why in part.unused.items() if name not in names}
    for name in asked or ():
        if name in left:
            raise UsageError(
                f"The column {name!r} of {where} is no group: it has {left[name]}.", "A group has one value a row."
            )
        if name not in names:
            raise unknown(f"column of {where}", name, names, hint="--group-key NAME,NAME takes these")
    found: dict[str, Group] = {}
    left = left if asked is None else {}
    for name in names if asked is None else asked:
        pieces = [part.groups.get(name, [None] * len(part.names)) for part in parts]
        try:
            one = np.asarray(pieces[0]) if len(pieces) == 1 else end_to_end(pieces)
            slug = usable_group_name(name)
            if slug in found:
                raise UsageError(f"There is a group {slug!r} already.", "Rename the column.")
            found[slug] = Group.of(one)
        except UsageError as error:
            if asked is not None:
                raise UsageError(f"The column {name!r} of {where} is no group: {error.message}", error.hint) from None
            left[name] = error.message.rstrip(".").lower()
    return found, left


def assemble(
    spec: str,
    where: Path,
    parts: Sequence[TableRows],
    *,
    asked: Asked,
    class_names: Sequence[str],
    how: str,
    facts: list[Any],
    context: Context,
    mirror: bool = True,
    uid: NDArray[np.uint8] | None = None,
    holds: str = inputs.IMAGES,
) -> Dataset:
    """The dataset of rows found in files: labels numbered, rows in the order of their names, a test set in any case.

    Args:
        spec: as the user wrote it.
        where: file or folder; its name is that of the dataset.
        parts: the rows; their names must differ.
        asked: the columns that the spec names.
        class_names: by number, where the files have them.
        how: a clause on how they were read.
        facts: what the digests depend on (``read_uids``).
        context: remembered digests and progress.
        mirror: whether a mirrored image keeps its class.
        uid: [N, 16] of the rows as ``parts`` have them, where they are known already.
        holds: images or rows.

    Raises UsageError for columns that make no sense, or no rows.
    """
    names = [name for part in parts for name in part.names]
    if not names:
        raise UsageError(f"{where} holds no {holds}.", "Give a file with at least one row")
    lengths = [len(part.names) for part in parts]
    label, classes = coded_labels(joined_labels([part.label for part in parts], lengths), class_names, str(where))
    words = [
        word.strip() or ONE_DOMAIN
        for part in parts
        for word in (
            [ONE_DOMAIN] * len(part.names) if part.domain is None else map(str, np.asarray(part.domain).tolist())
        )
    ]
    domains, domain_index = dataset.index_of(words)
    groups, left = made_groups(parts, asked.groups, str(where))
    # Rows are in the order of their names, for ever; most readers name them in order already.
    order = np.array(sorted(range(len(names)), key=names.__getitem__), dtype=np.int64)
    names = [names[i] for i in order]
    if twice := next((a for a, b in pairwise(names) if a == b), None):
        raise UsageError(f"{where} has two {holds} named {twice!r}; names must differ.", "Rename or remove one of them")
    source = dataset.JoinedSource(
        [part.source for part in parts],
        np.repeat(np.arange(len(parts)), lengths)[order],
        np.concatenate([np.arange(n) for n in lengths])[order],
    )
    uid, unreadable = (uid[order], 0) if uid is not None else dataset.read_uids(source, names, facts, context)
    label, domain = label[order], dataset.domain_column(domain_index[order], domains)
    given = None
    if any(part.splits is not None or part.split is not None for part in parts):
        given = np.concatenate([_splits_of(part, str(where)) for part in parts])[order]
    split, note = complete_split(given, label, domain, uid, where, holds=holds)
    notes = [f"{where.name or where}: {how}", dataset.counts(split, classes, domains, holds), note]
    notes += _notes(label, groups, left, unreadable)
    return Dataset(
        spec=spec,
        slug=safe(where.stem if where.is_file() else where.name)[:64].lstrip(".") or holds,
        classes=classes,
        domains=domains,
        names=tuple(names),
        label=label,
        domain=domain,
        split=split,
        uid=uid,
        template=None,
        reading="; ".join(note for note in notes if note),
        source=source,
        mirror=mirror,
        groups={name: group.take(order) for name, group in groups.items()},
        holds=holds,
    )


def _notes(
    label: NDArray[np.int32], groups: Mapping[str, Group], left: Mapping[str, str], unreadable: int
) -> list[str]:
    """What else there is to say of rows: those without a label or image, groups, and columns that are none."""
    unlabelled = int((label < 0).sum())
    unused = [f"{name} ({why})" for name, why in left.items()]
    unused = [*unused[:MOST_NAMED], f"{len(unused) - MOST_NAMED:,} more"] if len(unused) > MOST_NAMED else unused
    return [
        f"{unlabelled:,} without a label" if unlabelled else "",
        ", ".join(f"{name}: {len(group.words):,} values" for name, group in groups.items()),
        f"not used: {', '.join(unused)}" if unused else "",
        f"{unreadable:,} cannot be read and will be quarantined" if unreadable else "",
    ]


def _splits_of(part: TableRows, where: str) -> NDArray[np.uint8]:
    if part.splits is not None:
        return coded_splits(part.splits, where)
    return np.full(len(part.names), TRAIN if part.split is None else part.split, dtype=np.uint8)


def row_names(count: int, split: int | None) -> list[str]:
    """``train/0000000`` and on, or without the word; numbers of one length, so that their order is that of the rows."""
    prefix = "" if split is None else f"{SPLIT_WORDS[split]}/"
    width = max(7, len(str(count)))
    return [f"{prefix}{i:0{width}d}" for i in range(count)]
