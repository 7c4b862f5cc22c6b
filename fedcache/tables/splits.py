"""Splits: which rows are training, test and validation rows, by a column, or by the names of columns and files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import UsageError
from fedcache.tables.file_rows import FileRows
from fedcache.tables.words import Unread, Words, shape_of, vector

TRAIN, TEST, VALIDATION = 0, 1, 2
SPLIT_NAMES = ("train", "test", "validation")
"""By code."""

SPLIT_WORDS = {
    **dict.fromkeys(("train", "training", "tr"), TRAIN),
    **dict.fromkeys(("test", "testing", "te", "t10k"), TEST),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval", "evaluation"), VALIDATION),
}
"""Code of a split by what it is called, in small letters."""

SPLITS = ("split", "splits", "subset")
"""Usual names of the column of splits."""

OF_TRAIN, OF_TEST = ("is_train", "train"), ("is_test", "test")
"""Usual names of columns of truth values."""

Held = TypeVar("Held")


def split_of_name(name: str) -> tuple[str, int | None]:
    """The name of a column without the split in it, and the split: ``x_train`` is x of train."""
    if name.lower() in (*SPLITS, *OF_TRAIN, *OF_TEST):
        return name, None
    for mark in ("/", "_", "-"):
        head, _, tail = name.rpartition(mark)
        if head and tail.lower() in SPLIT_WORDS:
            return head, SPLIT_WORDS[tail.lower()]
        first, _, rest = name.partition(mark)
        if rest and first.lower() in SPLIT_WORDS:
            return rest, SPLIT_WORDS[first.lower()]
    return name, None


def by_split(
    columns: Mapping[str, Held], has_rows: Callable[[Mapping[str, Held]], bool], where: str, hint: str
) -> list[tuple[int | None, dict[str, Held]]]:
    """The columns of each split, where the names of columns say it; else all of them, as one table of None.

    ``x_train``, ``y_train``, ``x_test``, ``y_test`` are two tables with the columns x and y, in the order of the names
    of the splits. A table is one that ``has_rows``: images, or features. What is left when there are splits is the last
    table, of None, and belongs to no rows.

    Raises UsageError, with ``hint``, where some rows have a split in their name and others have none.
    """
    whole: list[tuple[int | None, dict[str, Held]]] = [(None, dict(columns))]
    found: dict[int | None, dict[str, Held]] = {}
    for name, column in columns.items():
        base, split = split_of_name(name)
        found.setdefault(split, {})[base] = column
    splits = sorted(
        (split for split, held in found.items() if split is not None and has_rows(held)), key=SPLIT_NAMES.__getitem__
    )
    # A backbone may be called train: features/train alone is no split.
    if not splits or (len(splits) == 1 and f"features/{SPLIT_NAMES[splits[0]]}" in columns):
        return whole
    without_split = found.get(None, {})
    if any(name in found[splits[0]] and has_rows({name: column}) for name, column in without_split.items()):
        raise UsageError(f"{where} has rows with a split in their name and others without.", hint)
    without = {name: column for name, column in columns.items() if split_of_name(name)[1] not in splits}
    return [*((split, found[split]) for split in splits), (None, without)]


def find_split_column(
    where: str, raw: Mapping[str, Any], asked: str | None, key: str | None, count: int
) -> tuple[str | None, NDArray[np.uint8] | None, list[str]]:
    """The column that says the split, the split of each row, and what the user should know; None without one.

    Args:
        where: file, for messages.
        raw: columns by name.
        asked: the column that the user names.
        key: the column that is asked for, or has a usual name.
        count: of rows.

    Raises UsageError for words and numbers that are no splits.
    """
    if key is not None and (asked is not None or _may_be_splits(key, vector(raw[key]))):
        column = vector(raw[key])
        numbers = asked is not None and key.lower() in (*OF_TRAIN, *OF_TEST)
        truth = _truth(column, count, numbers=numbers)
        if truth is not None:
            return key, *_two_splits(key, truth)
        return key, _splits_of(where, key, column, count), []
    for name in raw:
        if name.lower() in (*OF_TRAIN, *OF_TEST):
            # A column that only sounds like a split, and holds something else, is none.
            truth = _truth(vector(raw[name]), count, numbers=True)
            if truth is not None:
                return name, *_two_splits(name, truth)
    return None, None, []


def _may_be_splits(key: str, column: Any) -> bool:
    """Whether a column of a usual name is one of splits: not if it is empty, nor a subset of something else."""
    if isinstance(column, Words):
        words = {word.strip().lower() for word in column.counts()} - {""}
        if not words:
            return False
        return key.lower() != "subset" or not words.isdisjoint({*SPLIT_WORDS, "true", "false"})
    if key.lower() == "subset":
        return len(column.shape) == 1 and _are_codes(column)
    return True


def _are_codes(column: Any) -> bool:
    if isinstance(column, Words | Unread | FileRows):
        return False
    return column.dtype.kind == "b" or set(np.unique(column).tolist()) <= {TRAIN, TEST, VALIDATION}


def _truth(column: Any, count: int, *, numbers: bool) -> NDArray[np.bool_] | None:
    """A column of truth values, also as the words true and false, or 0 and 1 where ``numbers`` may be; else None."""
    if column.shape != (count,) or isinstance(column, Unread | FileRows):
        return None
    if isinstance(column, Words):
        used = {word.strip().lower() for word in column.counts()}
        if not used <= {"true", "false"}:
            return None
        said = np.array([word.strip().lower() == "true" for word in column.words] or [False])
        return np.asarray(said[column.codes], bool)
    if column.dtype.kind == "b" or (numbers and set(np.unique(column).tolist()) <= {0, 1}):
        return np.asarray(column, bool)
    return None


def _two_splits(key: str, truth: NDArray[np.bool_]) -> tuple[NDArray[np.uint8], list[str]]:
    """Splits by truth values: true is train where the column is called so, and test elsewhere."""
    train = key.lower() in OF_TRAIN
    word = "train" if train else "test"
    note = f"{key} is true for {int(truth.sum()):,} of {len(truth):,} rows: those are the {word} rows."
    return (truth != train).astype(np.uint8), [note]


def _splits_of(where: str, key: str, column: Any, count: int) -> NDArray[np.uint8]:
    if isinstance(column, Words) and column.shape == (count,):
        rows = column.counts()
        strange = [word for word in rows if word.strip().lower() not in SPLIT_WORDS]
        if strange:
            code = column.words.index(strange[0]) if strange[0] in column.words else -1
            first = int(np.argmax(column.codes == code))
            raise UsageError(
                f"{where}: {rows[strange[0]]:,} rows have the {key} {strange[0]!r}, the first is row {first:,}.",
                f"The words are {', '.join(SPLIT_WORDS)}. --split-key NAME takes another column; without one a fifth "
                "is held out.",
            )
        codes = np.array([SPLIT_WORDS.get(word.strip().lower(), 255) for word in column.words], np.uint8)
        return codes[column.codes]
    number = not isinstance(column, Words | Unread | FileRows) and column.shape == (count,)
    if number and _are_codes(column):
        return np.asarray(column.astype(np.uint8))
    seen = f", holding {', '.join(map(str, np.unique(column)[:4]))}" if number else ""
    raise UsageError(
        f"{where}: {key} is {shape_of(column)}{seen}.",
        f"Expected {count} of 0 train, 1 test, 2 validation, or of those words; without split a fifth is held out.",
    )


def split_named(tokens: Sequence[str]) -> int | None:
    """The split that one of several words names, the first that does; None where none does."""
    return next((SPLIT_WORDS[token.lower()] for token in tokens if token.lower() in SPLIT_WORDS), None)
