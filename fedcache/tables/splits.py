"""Splits: which rows are training, test and validation rows, by a column, or by the names of columns and files."""

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
"""Names of columns that give the split if all their values are names of splits. Otherwise, the column is a group."""

BARE_FLAGS = ("train", "test", "val", "validation")
"""Names of columns of truth values for one split. Such a column may also be something else, such as a medical test."""

BESIDE_OTHERS = ("is_valid", "val", "validation")
"""Columns that mark validation rows only if another column marks training or test rows: "valid" can mean "usable"."""

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
"""Code of a row whose value gives no split and no truth value."""

_FLAG = re.compile(rf"(?i:is|in)(?:[ _.-]|(?=[A-Z][a-z]))(?i:{'|'.join(SPLIT_WORDS)})")
"""Pattern of names of columns of truth values for one split, such as is_test and inTrain."""

_BETWEEN_WORDS = re.compile(r"[^0-9A-Za-z]+|(?<=[a-z])(?=[A-Z])")

Held = TypeVar("Held")


def split_of_name(name: str) -> tuple[str, str]:
    """A column's name without the word of a split, and that word: x and train for ``x_train``; "" if it has none."""
    if sounds_like_a_split(name):
        return name, ""
    for mark in ("/", "_", "-"):
        head, _, tail = name.rpartition(mark)
        first, _, rest = name.partition(mark)
        # train_is_test is the column is_test of train, and x_test is the column x of test.
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
    """Tables of columns with the code of their split, if the names of columns give it; else one table with None.

    ``x_train``, ``y_train``, ``x_test``, ``y_test`` become two tables with the columns x and y, in the order of the
    names of the splits. ``x_val`` and ``x_dev`` become two tables of one split, in the order of the file. The columns
    of a split are a table only if they have rows, which are images or features: ``has_rows`` says so. If there are
    splits, the last table has None and the remaining columns, which belong to no rows.

    Raises UsageError, with ``hint``, if some rows have a split in their name and others have none; also if it is not
    clear to which rows a column belongs.
    """
    tables: dict[str, dict[str, Held]] = {}
    without: dict[str, Held] = {}
    unclear: list[str] = []
    for name, column in columns.items():
        base, word = split_of_name(name)
        held = without
        if word:
            held = tables.setdefault(word, {})
        if word and base in held:
            unclear.append(name)
        held[base] = column
    # Only a split with images or features of its own is a table.
    with_rows = [word for word, held in tables.items() if has_rows(held)]
    # A backbone may be called train: features/train alone is no split.
    is_backbone = len(with_rows) == 1 and f"features/{with_rows[0]}" in columns
    if not with_rows or is_backbone:
        return [(None, dict(columns))]
    for name, column in without.items():
        in_a_split = any(name in tables[word] for word in with_rows)
        if in_a_split and has_rows({name: column}):
            raise UsageError(
                f"{where} has columns of rows with a split in their name, and others without a split.",
                hint,
            )
    for name in columns:
        base, word = split_of_name(name)
        if not word or word in with_rows:
            continue
        # y_validation belongs to X_val, if that is the only array of the split.
        partners = [other for other in with_rows if SPLIT_WORDS[other] == SPLIT_WORDS[word]]
        if not partners:
            without[name] = columns[name]
            continue
        partner = tables[partners[0]]
        if len(partners) > 1 or base in partner:
            unclear.append(name)
        else:
            partner[base] = columns[name]
    if unclear:
        listed = ", ".join(unclear)
        raise UsageError(
            f"{where}: the names do not show to which rows these columns belong: {listed}.",
            "Use one word for a split in all of its columns, as in X_val and y_val.",
        )
    of_splits: list[tuple[int | None, dict[str, Held]]] = []
    for word in sorted(with_rows, key=lambda word: SPLIT_NAMES[SPLIT_WORDS[word]]):
        of_splits.append((SPLIT_WORDS[word], tables[word]))
    return [*of_splits, (None, without)]


def refuse_one_split(chosen: str, names: Sequence[str], where: str, option: str) -> None:
    """Refuse a ``chosen`` column with the rows of one split, if other columns of ``names`` hold those of other splits.

    Raises UsageError with the name that these columns have in common. Backbones may be called features/train.
    """
    base, word = split_of_name(chosen)
    others = [name for name in names if name != chosen and split_of_name(name)[0] == base]
    is_part = word and others and base not in others
    if is_part and not base.startswith("features"):
        rest = ", ".join(others)
        raise UsageError(
            f"{where}: {chosen} has the rows of only one split; the rows of {rest} would be left out.",
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
    """The split of each row: of the column that the user names, of a column of splits, or of columns of truth values.

    Args:
        where: file, for messages.
        raw: columns by name, without those of labels and domains.
        chosen: column that the user names.
        usual: column with a usual name.
        groups: columns that the user names as groups. Such a column is ignored if its values are not splits.
        count: of rows.

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
    """Columns such as is_test that are not used, because the split is known already; ``reason`` says how.

    ``splits`` are the split codes [N] of the rows.
    """
    found: dict[str, Unread] = {}
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
    """Refuse a column that holds only names of splits and is not called like a split: it would be ignored."""
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
                f"{where}: {key} contains only names of splits ({_rows_of_splits(codes)}), but its "
                "name does not say that it gives the split.",
                f"To use it as the split: --split-key {option}. To keep it as a group: --group-key "
                f"{listed}",
            )


def sounds_like_a_split(name: str) -> bool:
    """Whether a column of this name may give the split of each row."""
    return name.lower() in (*SPLITS, *MAYBE_SPLITS) or _flag_of(name) is not None


def _flag_of(name: str) -> int | None:
    """The split whose rows a column of truth values marks: is_test, inTrain, test; None for another name."""
    bare = name.strip()
    if _FLAG.fullmatch(bare) or bare.lower() in BARE_FLAGS:
        return _meaning_of(bare)
    return None


def _meaning_of(name: str) -> int | None:
    """The split that the words of a name mean; None if they mean none, several, or the opposite, as in not_train."""
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
    """The code in ``meanings`` of each row's value; ``UNKNOWN`` for another value and for a row without one."""
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
    """The code of each row's value in ``meanings``; None for a column that is empty or holds other values.

    A column is refused if some of its values have a meaning and others have none. If ``every`` value must have a
    meaning, a column without such a value is refused too. Raises UsageError with the first row.
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
    meanings: dict[str, int] = {}
    # Columns that count only next to others come last.
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
    """The splits of a table in which each flag column marks the rows of one split, its code in ``meanings``.

    Rows without a mark belong to the first split that has no column. Raises UsageError if columns mark a row
    differently, and if a row has no mark although every split has a column.
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
            one = next(iter(flags))
            raise UsageError(
                f"{where}: {names} contradict each other, first in row {row:,}.",
                f"Mark every row once, or use only one column: --split-key {shell_word(one)}",
            )
        codes[truth] = code
    free = [code for code in (TRAIN, TEST, VALIDATION) if code not in meanings.values()]
    without = codes == UNKNOWN
    if without.any() and not free:
        rows = int(without.sum())
        row = int(np.argmax(without))
        raise UsageError(
            f"{where}: {rows:,} rows are marked in none of {names}; the first is row {row:,}.",
            "Mark every row once, or use only one column: --split-key NAME",
        )
    if free:
        codes[without] = free[0]
    marked = ", ".join(f"{SPLIT_NAMES[code]} where {key} is true" for key, code in meanings.items())
    note = f"Splits: {marked}; {_rows_of_splits(codes)}."
    return FoundSplits(tuple(flags), codes.astype(np.uint8), [note])


def _splits_by_option(where: str, key: str, column: Any, count: int) -> FoundSplits:
    """The splits of the column that the user names; its name gives the split that truth values mark."""
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
            f"{where}: {key} holds {shown}, but its name does not show which of them are the test rows.",
            "Call the column is_test or is_train (--split-key is_test), or write the words train and test into it.",
        )
    if not is_code:
        raise _strange(where, key, group, codes, CODES_AND_WORDS)
    return _found_in(key, codes)


def _found_in(key: str, codes: NDArray[np.int64]) -> FoundSplits:
    note = f"The split is in {key}: {_rows_of_splits(codes)}."
    return FoundSplits((key,), codes.astype(np.uint8), [note])


def _is_called_split(name: str) -> bool:
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
    """The error of a column of splits with a value that is not a split."""
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
    """The error of a column of splits that has no word or whole number for each row."""
    what = shape_of(column)
    if isinstance(column, Unread):
        what = column.why
    elif isinstance(column, np.ndarray) and column.shape == (count,):
        what = "numbers with decimals"
    return UsageError(
        f"{where}: {key} is {what}, expected a split for each of {count:,} rows.",
        f"Write 0 for train, 1 for test and 2 for validation, or these words. {_otherwise(key)}",
    )


def _otherwise(key: str) -> str:
    """A hint for a column that is called like a column of splits and holds other values."""
    another = "--split-key NAME selects another column"
    if key.lower() in RESERVED:
        return f"{another}; without a split column, a fifth of the rows is held out."
    listed = in_a_list([key])
    return f"{another}; --group-key {shell_word(listed)} keeps this column as a group."


def split_named(tokens: Sequence[str]) -> int | None:
    """The split of the first word that is a name of a split; None if no word is."""
    for token in tokens:
        split = SPLIT_WORDS.get(token.lower())
        if split is not None:
            return split
    return None
