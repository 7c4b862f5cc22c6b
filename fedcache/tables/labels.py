"""Labels and domains: a column as class indices and class names, the same for every command that reads a table.

The classes are the values that occur, whole numbers in the order of numbers and words in the order of letters. A file
that lists its class names (``class_names``, Hugging Face's ClassLabel) declares all classes and their order. A row has
no label where the file has no value, or one that the user says means none (``--no-label -1``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import UsageError, shell_word
from fedcache.tables.groups import Group
from fedcache.tables.words import NO_NUMBER, Column, Unread, Words, is_integer, shape_of, vector

ANOTHER_COLUMN = "--label-key NAME takes another column."


@dataclass(frozen=True)
class Coded:
    """A column as indices into its distinct values."""

    codes: NDArray[np.int32]  # [N], -1 where a row has no value
    words: tuple[str, ...]  # what the codes mean
    # rows without a value, by what stands there
    without: Mapping[str, int] = field(default_factory=dict)


def with_names(column: Column, names: Sequence[str], where: str) -> Words:
    """A column whose numbers index the class names of its file, or whose words are among them; -1 is no label.

    Raises UsageError for a number or word without a name.
    """
    group = Group.of(column)
    repeated = tuple(name for name, times in Counter(names).items() if times > 1)
    names = distinct_names(names)
    place = {name: index for index, name in enumerate(names)}
    if isinstance(column, Words) and all(word in place for word in group.words):
        target = [place[word] for word in group.words]
    else:
        target = []
        are_names = isinstance(column, Words) and any(word in place for word in group.words)
        for word in group.words:
            if are_names:
                index = place.get(word, len(names))
            else:
                index = (
                    int(word) if is_integer(word) else {"False": 0, "True": 1}.get(word, len(names))
                )
            if not -1 <= index < len(names):
                shown = ", ".join(names[:4]) + (", .." if len(names) > 4 else "")
                raise UsageError(
                    f"{where} has the label {word!r}, and the file has {len(names):,} class names: {shown or 'none'}.",
                    "Give every label a class name, or leave the class names out of the file.",
                )
            target.append(index)
    codes = np.array([*target, -1], np.int32)[group.codes]
    return Words(codes, names, declared=True, repeated=repeated)


def distinct_names(names: Sequence[str]) -> tuple[str, ...]:
    """Class names; those that occur twice get their index, as ImageNet has two classes called crane."""
    times = Counter(names)
    return tuple(
        f"{name} #{index}" if times[name] > 1 else name for index, name in enumerate(names)
    )


def read_labels(
    where: str, column: Any, count: int, no_label: Sequence[str]
) -> tuple[Coded, list[str]]:
    """The class of each of ``count`` rows, and what the user should know of it.

    Args:
        where: file and column, for messages.
        column: as the file has it.
        no_label: values that mean that no label is known.

    Raises UsageError for another shape, and for measurements.
    """
    column = _one_per_row(where, column, count)
    coded = _coded(where, column)
    said = {value.strip() for value in no_label}
    if not isinstance(column, Words):
        said = {_as_number(value) for value in said}
    dropped = [index for index, word in enumerate(coded.words) if word in said]
    notes = [f"No row has the label {value}." for value in sorted(said - set(coded.words))]
    coded = _without_words(coded, dropped)
    if not coded.words and not isinstance(column, Words):
        return coded, notes
    if not (isinstance(column, Words) and column.declared):
        notes += _likely_missing(coded)
    elif column.repeated:
        shown = ", ".join(column.repeated[:4]) + (", .." if column.repeated[4:] else "")
        notes.append(
            f"Class names that the file has twice, {shown}, have their numbers behind them."
        )
    return coded, notes


def _as_number(word: str) -> str:
    """A whole number as labels that are numbers are written, -1.0 as -1; other words as they are."""
    try:
        number = float(word)
    except ValueError:
        return word
    if is_integer(word) or not number.is_integer():
        return word
    return str(int(number))


def read_domains(where: str, column: Any, count: int) -> Coded:
    """The domain of each row, -1 where it has none; errors as of ``read_labels``."""
    hint = "--domain-key NAME takes another column."
    return _coded(where, _one_per_row(where, column, count, hint), hint)


def unlabelled_sentence(coded: Coded) -> list[str]:
    """How many rows have no label, and what the file has in its place."""
    rows = sum(coded.without.values())
    if not rows:
        return []
    parts = [
        f"{n:,} {what}" for what, n in sorted(coded.without.items(), key=lambda item: -item[1])
    ]
    return [f"{rows:,} of {len(coded.codes):,} rows are unlabelled: {', '.join(parts)}."]


def _one_per_row(where: str, column: Any, count: int, another: str = ANOTHER_COLUMN) -> Any:
    column = vector(column)
    hint = "Give every row one label."
    one_hot = f"{hint} Where every row has exactly one 1, in numpy: labels.argmax(1)"
    if len(column.shape) == 2 and column.shape[0] == count:
        hint = one_hot
    elif isinstance(column, Unread):
        hint = another
        if column.kind == "objects":
            hint = "labels.astype(str)   makes plain words"
        elif column.why == "lists":
            hint = one_hot
        raise UsageError(f"{where} holds {column.why}, expected {count:,} integers or words.", hint)
    elif column.shape == (count,):
        return column
    raise UsageError(
        f"{where} is {shape_of(column)}, expected one integer or word for each of {count:,} rows.",
        hint,
    )


def _coded(where: str, column: Any, hint: str = ANOTHER_COLUMN) -> Coded:
    if isinstance(column, Words) and column.declared:
        return Coded(column.codes, column.words, _empty_rows(column.codes, "with -1 or no value"))
    try:
        group = Group.of(column)
    except UsageError as error:
        held = error.message[:1].lower() + error.message[1:].removesuffix(" sort no rows.")
        raise UsageError(
            f"{where} holds {held}, expected {column.shape[0]:,} integers or words.", hint
        ) from error
    return Coded(group.codes, group.words, _empty_rows(group.codes, "empty"))


def _empty_rows(codes: NDArray[np.int32], what: str) -> dict[str, int]:
    empty = int((codes < 0).sum())
    if empty:
        return {what: empty}
    return {}


def _without_words(coded: Coded, dropped: Sequence[int]) -> Coded:
    """The same without some words: their rows have no value, and the others are numbered anew."""
    if not dropped:
        return coded
    without = dict(coded.without)
    target = np.full(len(coded.words) + 1, -1, np.int32)
    kept: list[str] = []
    for index, word in enumerate(coded.words):
        if index in dropped:
            without[f"with {word}"] = int((coded.codes == index).sum())
        else:
            target[index] = len(kept)
            kept.append(word)
    return Coded(target[coded.codes], tuple(kept), without)


def _likely_missing(coded: Coded) -> list[str]:
    """Name the classes that often mean that no label is known: -1 beside other numbers, and words such as NA."""
    suspects = [word for word in coded.words if word.lower() in NO_NUMBER]
    if "-1" in coded.words and coded.words != ("-1", "1"):
        suspects.append("-1")
    notes = []
    for word in suspects:
        rows = int((coded.codes == coded.words.index(word)).sum())
        counted = f"{rows:,} row{'' if rows == 1 else 's'}"
        notes.append(
            f"{word} is a class, of {counted}. If it means that no label is known: --no-label {shell_word(word)}"
        )
    return notes
