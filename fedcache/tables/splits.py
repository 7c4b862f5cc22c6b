"""Splits: finds the training, test and validation rows, by a column, or by the names of columns and files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import FedcacheError, UsageError, shell_word
from fedcache.parsing import in_a_list
from fedcache.tables.groups import RESERVED, Group
from fedcache.tables.words import FileRows, Unread, Words, last_level, shape_of, vector

TRAIN = 0
TEST = 1
VALIDATION = 2
SPLIT_NAMES = ("train", "test", "validation")
"""Code of a split -> its name."""

SPLIT_WORDS = {
    **dict.fromkeys(("train", "training", "tr"), TRAIN),
    **dict.fromkeys(("test", "testing", "te", "t10k"), TEST),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval", "evaluation"), VALIDATION),
}
"""Name of a split in lower case -> its code."""

SPLITS = ("split", "splits")
"""Usual names of the column of splits."""

MAYBE_SPLITS = ("subset", "set", "fold", "partition", "phase")
"""Names of columns that may give the split. Such a column is a group if none of its values is a name of a split, and it
is refused if only some of them are."""

BARE_FLAGS = ("train", "test", "val", "validation")
"""Names of columns of truth values for one split. Such a column may also be something else, such as a medical test."""

BESIDE_OTHERS = ("is_valid", "val", "validation")
"""Columns that mark validation rows only if another column marks training or test rows: "valid" can mean "usable"."""

# Word in a column of splits, in lower case -> code of the split.
CODES = {"0": TRAIN, "1": TEST, "2": VALIDATION}
CODES_AND_WORDS = CODES | SPLIT_WORDS
TRUTH = {
    **dict.fromkeys(("1", "true", "t", "yes", "y"), 1),
    **dict.fromkeys(("0", "false", "f", "no", "n"), 0),
}
"""Word for a truth value, in lower case -> the value."""

NO_SPLIT = "no split in its name"
"""Reason why a column belongs to no rows, if the names of other columns contain a split."""

UNKNOWN = -1
"""Code of a row whose value is neither a split nor a truth value."""

_FLAG = re.compile(rf"(?i:is|in)(?:[ _.-]|(?=[A-Z][a-z]))(?i:{'|'.join(SPLIT_WORDS)})")
"""Pattern of names of columns of truth values for one split, such as is_test and inTrain."""

# What separates the words of a name: other characters, or a change from small to capital letters, as in isTest.
_BETWEEN_WORDS = re.compile(r"[^0-9A-Za-z]+|(?<=[a-z])(?=[A-Z])")

Held = TypeVar("Held")


def split_of_name(name: str) -> tuple[str, str]:
    """A column's name without the word of a split, and this word: (x, train) for ``x_train``; (x, "") for ``x``."""
    if sounds_like_a_split(name):
        return name, ""
    for mark in ("/", "_", "-"):
        head, _, tail = name.rpartition(mark)
        first, _, rest = name.partition(mark)
        # x_test is the column x of the split test; but train_is_test is the column is_test of the split train.
        if head and tail.lower() in SPLIT_WORDS and not _FLAG.fullmatch(rest):
            return head, tail.lower()
        if rest and first.lower() in SPLIT_WORDS:
            return rest, first.lower()
    return name, ""


def by_split(
    columns: Mapping[str, Held],
    has_rows: Callable[[Mapping[str, Held]], bool],
    where: str,
    hint: str,
) -> list[tuple[int | None, dict[str, Held]]]:
    """(split code, columns) of each split that the names of columns give; if they give none, all columns with None.

    ``x_train``, ``y_train``, ``x_test``, ``y_test`` become two tables with the columns x and y, in the order of the
    names of the splits. ``x_val`` and ``x_dev`` become two tables of one split, in the order of the file. The columns
    of a split are a table only if ``has_rows`` says that they have rows, which are images or features. If there are
    splits, the last table has None instead of a code, and the remaining columns, which belong to no rows.

    Raises UsageError, with ``hint``, if only some of the columns of rows have a split in their name; also if it is not
    clear to which rows a column belongs.
    """
    tables: dict[str, dict[str, Held]] = {}
    without_split: dict[str, Held] = {}
    unclear = []
    for name, column in columns.items():
        base, word = split_of_name(name)
        table = without_split
        if word:
            table = tables.setdefault(word, {})
        if word and base in table:
            unclear.append(name)
        table[base] = column
    # A split is a table only if it has its own images or features.
    with_rows = [word for word, table in tables.items() if has_rows(table)]
    # A backbone may be called train: if no other split has rows and features/train is a column, train is no split.
    is_backbone = len(with_rows) == 1 and f"features/{with_rows[0]}" in columns
    if not with_rows or is_backbone:
        return [(None, dict(columns))]
    for name, column in without_split.items():
        in_a_split = any(name in tables[word] for word in with_rows)
        if in_a_split and has_rows({name: column}):
            raise UsageError(
                f"{where} has a column {name!r}, and also columns of {name!r} for single splits (as X_train is for X). "
                "fedcache cannot tell which of these columns to read.",
                hint,
            )
    for name in columns:
        base, word = split_of_name(name)
        if not word or word in with_rows:
            continue
        # The split of this column has no rows under this word. y_validation belongs to X_val, if only X_val has rows.
        partners = [other for other in with_rows if SPLIT_WORDS[other] == SPLIT_WORDS[word]]
        if not partners:
            without_split[name] = columns[name]
            continue
        partner = tables[partners[0]]
        if len(partners) > 1 or base in partner:
            unclear.append(name)
        else:
            partner[base] = columns[name]
    if unclear:
        listed = ", ".join(unclear)
        raise UsageError(
            f"{where}: fedcache cannot tell from the names to which rows these columns belong: {listed}.",
            "Use the same word for a split in the names of all its columns, as in X_val and y_val.",
        )
    of_splits: list[tuple[int | None, dict[str, Held]]] = []
    for word in sorted(with_rows, key=lambda word: SPLIT_NAMES[SPLIT_WORDS[word]]):
        of_splits.append((SPLIT_WORDS[word], tables[word]))
    return [*of_splits, (None, without_split)]


def refuse_one_split(chosen: str, names: Sequence[str], where: str, option: str) -> None:
    """Refuse a ``chosen`` column with the rows of one split if other columns of ``names`` have rows of other splits.

    Raises UsageError with the name that these columns have in common, which ``option`` should name. Columns called
    features/train and features/test are accepted, because backbones may be called train and test.
    """
    base, word = split_of_name(chosen)
    of_other_splits = [name for name in names if name != chosen and split_of_name(name)[0] == base]
    is_part = word and of_other_splits and base not in of_other_splits
    if is_part and not base.startswith("features"):
        left_out = ", ".join(of_other_splits)
        raise UsageError(
            f"{where}: {chosen} has the rows of only one split, so the rows of {left_out} would be lost.",
            f"{option} {shell_word(base)} uses the rows of all splits.",
        )


@dataclass(frozen=True)
class FoundSplits:
    """Splits of a table: the code of each row, the columns that give it, and notes."""

    keys: tuple[str, ...]  # columns that give the split; () for none
    codes: NDArray[np.uint8] | None  # [N], None if no column gives the split
    notes: list[str]  # sentences for the user


def find_splits(
    where: str,
    raw: Mapping[str, Any],
    chosen: str | None,
    usual: str | None,
    groups: Sequence[str],
    count: int,
) -> FoundSplits:
    """The split of each row, from a column that the user names, a column of splits, or columns of truth values.

    Args:
        where: file, for messages.
        raw: columns by name, without those of labels and domains.
        chosen: column that the user names.
        usual: column with a usual name of columns of splits.
        groups: columns that the user names as groups. Such a column is ignored if its values are not splits.
        count: number of rows.

    Raises UsageError if a column is called like a column of splits and has values that are not splits.
    """
    if chosen is not None:
        return _splits_by_option(where, chosen, raw[chosen], count)
    if usual is not None:
        codes = _codes_of(where, usual, raw[usual], CODES_AND_WORDS, groups, count, every=True)
        if codes is not None:
            return FoundSplits((usual,), codes.astype(np.uint8), [])
    for name in MAYBE_SPLITS:
        meanings = SPLIT_WORDS
        if name == "subset":
            meanings = CODES_AND_WORDS
        for key in raw:
            if last_level(key) != name:
                continue
            codes = _codes_of(where, key, raw[key], meanings, groups, count, every=False)
            if codes is not None:
                return _found_in(key, codes)
    found = _flags(where, raw, groups, count)
    if found.codes is None:
        _refuse_unused_splits(where, raw, groups, count)
    return found


def unused_flags(
    raw: Mapping[str, Any], splits: NDArray[np.uint8], reason: str, count: int
) -> dict[str, Unread]:
    """Columns such as is_test that are not used because the split is known already.

    ``reason`` says how it is known. ``splits`` are the split codes [N] of the rows.
    """
    found = {}
    for key, column in raw.items():
        group = _values(column, count)
        is_flag = _FLAG.fullmatch(key) and key.lower() not in BESIDE_OTHERS
        if not is_flag or group is None:
            continue
        truth = _read(group, TRUTH)
        if (truth >= 0).all():
            why = reason
            if not np.array_equal(truth == 1, splits == _meaning_of(key)):
                why += ", and contradicts it"
            found[key] = Unread((count,), "", why)
    return found


def _refuse_unused_splits(
    where: str, raw: Mapping[str, Any], groups: Sequence[str], count: int
) -> None:
    """Refuse a column that holds only names of splits but is not called like one, because it would be ignored."""
    for key, column in raw.items():
        is_group = key in groups or key.startswith("group/")
        if is_group or not isinstance(vector(column), Words):
            continue
        values = _values(column, count)
        if values is None:
            continue
        codes = _read(values, SPLIT_WORDS)
        distinct = set(np.unique(codes).tolist())
        if {TRAIN, TEST} <= distinct and UNKNOWN not in distinct:
            option = shell_word(key)
            listed = shell_word(in_a_list([key]))
            raise UsageError(
                f"{where}: the values of {key} are names of splits ({_rows_of_splits(codes)}), but its own name does "
                "not say that it is the split column.",
                f"To use it as the split: --split-key {option}. To keep it as a group: --group-key {listed}",
            )


def sounds_like_a_split(name: str) -> bool:
    """Whether the name of a column suggests that it gives the split of each row."""
    return name.lower() in (*SPLITS, *MAYBE_SPLITS) or _flag_of(name) is not None


def _flag_of(name: str) -> int | None:
    """The split whose rows a column of truth values marks, by its name (is_test, inTrain, test); None if none."""
    bare = name.strip()
    if _FLAG.fullmatch(bare) or bare.lower() in BARE_FLAGS:
        return _meaning_of(bare)
    return None


def _meaning_of(name: str) -> int | None:
    """The split that the words of a name mean; None if they mean none or several, or negate it, as in not_train."""
    words = [word.lower() for word in _BETWEEN_WORDS.split(name)]
    codes = {SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS}
    if len(codes) != 1 or not {"not", "no", "non"}.isdisjoint(words):
        return None
    return codes.pop()


def _values(column: Any, count: int) -> Group | None:
    """The values of a column as words; None for measurements, and for a column without one value for each row."""
    column = vector(column)
    if isinstance(column, Unread | FileRows) or column.shape != (count,):
        return None
    try:
        return Group.of(column)
    except UsageError:
        return None


def _read(group: Group, meanings: Mapping[str, int]) -> NDArray[np.int64]:
    """The code that ``meanings`` has for each row's value; ``UNKNOWN`` for a missing value and any other value."""
    codes = [meanings.get(word.lower(), UNKNOWN) for word in group.words]
    return np.array([*codes, UNKNOWN], np.int64)[group.codes]


def _codes_of(
    where: str,
    key: str,
    column: Any,
    meanings: Mapping[str, int],
    groups: Sequence[str],
    count: int,
    *,
    every: bool,
) -> NDArray[np.int64] | None:
    """The code that ``meanings`` has for each row's value; None for a column that is empty or has no such value.

    Raises UsageError, with the first row, if some values have a meaning and others have none. If ``every`` value must
    have a meaning, a column in which no value has one is refused too. A column in ``groups`` is never refused.
    """
    group = _values(column, count)
    if group is None:
        if every and key not in groups:
            raise _unreadable(where, key, column, count)
        return None
    if not group.words:
        return None
    codes = _read(group, meanings)
    known = codes >= 0
    if known.all():
        return codes
    if key in groups or not (every or known.any()):
        return None
    raise _strange(where, key, group, codes, meanings)


def _flags(where: str, raw: Mapping[str, Any], groups: Sequence[str], count: int) -> FoundSplits:
    """The splits of columns of truth values, such as is_test and is_val."""
    flags: dict[str, NDArray[np.bool_]] = {}
    meanings = {}
    # Columns that count only if another column marks rows come last.
    for key in sorted(raw, key=lambda key: key.lower() in BESIDE_OTHERS):
        name = key.lower()
        meaning = _flag_of(key)
        alone = name in BESIDE_OTHERS and not flags
        if meaning is None or alone:
            continue
        every = name not in BARE_FLAGS
        codes = _codes_of(where, key, raw[key], TRUTH, groups, count, every=every)
        if codes is not None:
            flags[key] = codes == 1
            meanings[key] = meaning
    if flags:
        return _of_flags(where, flags, meanings, count)
    return FoundSplits((), None, [])


def _of_flags(
    where: str, flags: Mapping[str, NDArray[np.bool_]], meanings: Mapping[str, int], count: int
) -> FoundSplits:
    """The splits of a table in which columns of truth values mark rows.

    ``flags`` has these columns, and ``meanings`` the code of the split whose rows each column marks. Rows without a
    mark belong to the first of train, test and validation that has no column. Raises UsageError if columns contradict
    each other, and if a row has no mark although every split has a column.
    """
    names = ", ".join(flags)
    # Every column writes its split into the rows that it marks; two different marks of a row are an error.
    codes = np.full(count, UNKNOWN, np.int64)
    for key, truth in flags.items():
        code = meanings[key]
        clash = truth & (codes != UNKNOWN) & (codes != code)
        # Two columns that mark the same split must mark the same rows.
        same = [other for other in flags if other != key and meanings[other] == code]
        if same:
            clash = clash | (truth != flags[same[0]])
        if clash.any():
            row = int(np.argmax(clash))
            example = next(iter(flags))
            raise UsageError(
                f"{where}: {names} contradict each other, first in row {row:,}.",
                f"Mark every row once, or use only one column: --split-key {shell_word(example)}",
            )
        codes[truth] = code
    free = [code for code in (TRAIN, TEST, VALIDATION) if code not in meanings.values()]
    without = codes == UNKNOWN
    if without.any() and not free:
        rows = int(without.sum())
        row = int(np.argmax(without))
        raise UsageError(
            f"{where}: {rows:,} rows have no mark in any of {names}; the first is row {row:,}.",
            "Mark every row once, or use only one column: --split-key NAME",
        )
    if free:
        codes[without] = free[0]
    marked = ", ".join(f"{SPLIT_NAMES[code]} where {key} is true" for key, code in meanings.items())
    note = f"Splits: {marked}; {_rows_of_splits(codes)}."
    return FoundSplits(tuple(flags), codes.astype(np.uint8), [note])


def _splits_by_option(where: str, key: str, column: Any, count: int) -> FoundSplits:
    """The splits in the column that the user names. The name of a column of truth values gives the split they mark."""
    group = _values(column, count)
    if group is None:
        raise _unreadable(where, key, column, count)
    # 0 and 1 are codes of splits, or truth values if the name of the column gives a split.
    meaning = _meaning_of(key)
    truth = _read(group, TRUTH)
    codes = _read(group, CODES_AND_WORDS)
    is_code = bool((codes >= 0).all())
    is_truth = bool((truth >= 0).all())
    if is_truth and meaning is not None:
        return _of_flags(where, {key: truth == 1}, {key: meaning}, count)
    if is_truth and not (is_code and _is_called_split(key)):
        shown = " and ".join(group.words)
        raise UsageError(
            f"{where}: {key} contains {shown}, but its name does not show which value marks the test rows.",
            "Rename the column to is_test or is_train (--split-key is_test), or use the words train and test as its "
            "values.",
        )
    if not is_code:
        raise _strange(where, key, group, codes, CODES_AND_WORDS)
    return _found_in(key, codes)


def _found_in(key: str, codes: NDArray[np.int64]) -> FoundSplits:
    note = f"The split is in {key}: {_rows_of_splits(codes)}."
    return FoundSplits((key,), codes.astype(np.uint8), [note])


def _is_called_split(name: str) -> bool:
    """Whether a column is called like a column of splits, in which 0 and 1 are codes and not truth values."""
    words = {word.lower() for word in _BETWEEN_WORDS.split(name)}
    return not words.isdisjoint((*SPLITS, "subset"))


def _rows_of_splits(codes: NDArray[np.int64]) -> str:
    """Number of rows of each split: ``8 train, 4 test rows``."""
    rows = []
    for code, name in enumerate(SPLIT_NAMES):
        count = int((codes == code).sum())
        if count:
            rows.append(f"{count:,} {name}")
    return ", ".join(rows) + " rows"


def _strange(
    where: str, key: str, group: Group, codes: NDArray[np.int64], meanings: Mapping[str, int]
) -> FedcacheError:
    """The error for a column of splits with a value that is not one of ``meanings``."""
    first = int(np.argmax(codes == UNKNOWN))
    code = int(group.codes[first])
    rows = int((group.codes == code).sum())
    have = f"have no value of {key}"
    if code >= 0:
        have = f"have the {key} {group.words[code]!r}"
    expected = ", ".join(meanings)
    return UsageError(
        f"{where}: {rows:,} rows {have}; the first is row {first:,}.",
        f"Each row needs one of {expected}. {_otherwise(key)}",
    )


def _unreadable(where: str, key: str, column: Any, count: int) -> FedcacheError:
    """The error for a column of splits that does not have a word or whole number for each row."""
    content = shape_of(column)
    if isinstance(column, Unread):
        content = column.why
    elif isinstance(column, np.ndarray) and column.shape == (count,):
        content = "numbers with decimals"
    return UsageError(
        f"{where}: {key} is {content}, expected a split for each of {count:,} rows.",
        f"Write 0 for train, 1 for test and 2 for validation, or these words. {_otherwise(key)}",
    )


def _otherwise(key: str) -> str:
    """A hint for a column that is called like a column of splits but holds other values."""
    another_column = "--split-key NAME selects another column"
    # A group cannot have a reserved name, so --group-key would not help.
    if key.lower() in RESERVED:
        return f"{another_column}; without a split column, a fifth of the rows is held out."
    listed = in_a_list([key])
    return f"{another_column}; --group-key {shell_word(listed)} keeps this column as a group."


def split_named(words: Sequence[str]) -> int | None:
    """The split of the first word that is a name of a split; None if no word is one."""
    for word in words:
        split = SPLIT_WORDS.get(word.lower())
        if split is not None:
            return split
    return None
