"""Labels and domains: a column as class indices and class names, the same for every command that reads a table.

The classes are the values that occur. Whole numbers are in numeric order, words in alphabetical order. A file that
lists its class names (``class_names``, Hugging Face's ClassLabel) declares all classes and their order. A row has no
label if its value is missing, or if the user says that the value means "no label" (``--no-label -1``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from fedcache.errors import UsageError, shell_word
from fedcache.parsing import counted
from fedcache.tables.groups import Group, as_a_part
from fedcache.tables.words import (
    NO_NUMBER,
    Column,
    Unread,
    Words,
    is_integer,
    shape_of,
    some_names,
    vector,
)

ANOTHER_COLUMN = "--label-key NAME selects another column."


def with_names(column: Column, names: Sequence[str], where: str) -> Words:
    """The words of a column whose values are class names of its file or indices into these names; -1 is no label.

    Raises UsageError for a number or word without a name.
    """
    group = Group.of(column)
    repeated = tuple(name for name, times in Counter(names).items() if times > 1)
    names = distinct_names(names)
    place = {name: index for index, name in enumerate(names)}
    target = []
    # A column of words may hold class names; else its values are their indices.
    are_names = isinstance(column, Words) and any(word in place for word in group.words)
    for word in group.words:
        index = len(names)
        if are_names:
            index = place.get(word, index)
        elif is_integer(word):
            index = int(word)
        else:
            # Truth values are the indices 0 and 1.
            index = {"False": 0, "True": 1}.get(word, index)
        if not -1 <= index < len(names):
            shown = some_names(names, 4) or "none"
            count = len(names)
            raise UsageError(
                f"{where} has the label {word!r}, but the file has {count:,} class names: {shown}.",
                "Give every label a class name, or leave the class names out of the file.",
            )
        target.append(index)
    codes = np.array([*target, -1], np.int32)[group.codes]
    return Words(codes, names, declared=True, repeated=repeated)


def distinct_names(names: Sequence[str]) -> tuple[str, ...]:
    """Distinct class names: a name that occurs twice gets its index, because ImageNet has two classes called crane."""
    times = Counter(names)
    distinct = []
    for index, name in enumerate(names):
        if times[name] > 1:
            name = f"{name} #{index}"
        distinct.append(name)
    return tuple(distinct)


def read_labels(
    where: str, column: Any, count: int, no_label: Sequence[str]
) -> tuple[Group, list[str]]:
    """The class of each of ``count`` rows, and notes for the user.

    Args:
        where: file and column, for messages.
        column: as it was read from the file.
        no_label: values that mean that no label is known.

    Raises UsageError for another shape, and for measurements.
    """
    column = _one_per_row(where, column, count)
    every = _coded(where, column)
    are_words = isinstance(column, Words)
    # Numbers are compared as numbers: -1.0 names the label -1.
    no_label_words = {value.strip() for value in no_label}
    if not are_words:
        no_label_words = {_as_number(value) for value in no_label_words}
    kept = tuple(word for word in every.words if word not in no_label_words)
    coded = Group(every.recoded(kept), kept)
    notes = _unlabelled(column, every, no_label_words)
    for value in sorted(no_label_words.difference(every.words)):
        notes.append(f"No row has the label {value}.")
    if not are_words or not column.declared:
        notes += _likely_missing(coded)
    elif column.repeated:
        shown = some_names(column.repeated, 4)
        notes.append(
            f"These class names are twice in the file, so a number is added to them: {shown}."
        )
    return coded, notes


def _unlabelled(column: Any, coded: Group, no_label_words: Collection[str]) -> list[str]:
    """A note on rows without a label, and how the file marks them."""
    without_value = "empty"
    if isinstance(column, Words) and column.declared:
        without_value = "with -1 or no value"
    counts = {without_value: int((coded.codes < 0).sum())}
    for code, word in enumerate(coded.words):
        if word in no_label_words:
            counts[f"with {word}"] = int((coded.codes == code).sum())
    parts = []
    for mark in sorted(counts, key=lambda mark: -counts[mark]):
        if counts[mark]:
            parts.append(f"{counts[mark]:,} {mark}")
    if not parts:
        return []
    rows = sum(counts.values())
    listed = ", ".join(parts)
    every = len(coded.codes)
    return [f"{rows:,} of {every:,} rows are unlabelled: {listed}."]


def _as_number(word: str) -> str:
    """A whole number in the spelling of labels, -1 for -1.0; other words as they are."""
    try:
        number = float(word)
    except ValueError:
        return word
    if is_integer(word) or not number.is_integer():
        return word
    return str(int(number))


def read_domains(where: str, column: Any, count: int) -> Group:
    """The domain of each row, -1 for a row without one; errors as of ``read_labels``."""
    another = "--domain-key NAME selects another column."
    column = _one_per_row(where, column, count, another)
    return _coded(where, column, another)


def _one_per_row(where: str, column: Any, count: int, another: str = ANOTHER_COLUMN) -> Any:
    """A column with one value for each of ``count`` rows. Raises UsageError for another column."""
    column = vector(column)
    unread = isinstance(column, Unread)
    if column.shape == (count,) and not unread:
        return column
    hint = "Give every row one label."
    one_hot = (
        f"{hint} If every row has exactly one 1, convert the labels with numpy: labels.argmax(1)"
    )
    if len(column.shape) == 2 and column.shape[0] == count:
        hint = one_hot
    elif unread:
        hint = another
        if column.kind == "objects":
            hint = "labels.astype(str)   converts labels to words"
        elif column.why == "lists":
            hint = one_hot
        raise UsageError(f"{where} holds {column.why}, expected {count:,} integers or words.", hint)
    raise UsageError(
        f"{where} is {shape_of(column)}, expected one integer or word for each of {count:,} rows.",
        hint,
    )


def _coded(where: str, column: Any, hint: str = ANOTHER_COLUMN) -> Group:
    """A column as a group; words that the file declares keep their order."""
    if isinstance(column, Words) and column.declared:
        return Group(column.codes, column.words)
    try:
        return Group.of(column)
    except UsageError as error:
        held = as_a_part(error.message)
        rows = column.shape[0]
        raise UsageError(
            f"{where} holds {held}, expected {rows:,} integers or words.", hint
        ) from error


def _likely_missing(coded: Group) -> list[str]:
    """Notes on classes that often mean that no label is known: words such as NA, and -1 among other numbers."""
    suspects = [word for word in coded.words if word.lower() in NO_NUMBER]
    if "-1" in coded.words and coded.words != ("-1", "1"):
        suspects.append("-1")
    notes = []
    for word in suspects:
        rows = int((coded.codes == coded.words.index(word)).sum())
        hint = f"--no-label {shell_word(word)}"
        size = counted(rows, "row")
        notes.append(f"{word} is a class of {size}. If it means that the label is unknown: {hint}")
    return notes
