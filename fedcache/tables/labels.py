"""Labels and domains: turns a column into class indices and class names, in the same way for all commands.

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
    """The class name of each row. Values of ``column`` are class names, or indices into ``names``; -1 is no label.

    Raises UsageError for a number or word without a name.
    """
    group = Group.of(column)
    repeated = tuple(name for name, times in Counter(names).items() if times > 1)
    names = distinct_names(names)
    index_of = {name: index for index, name in enumerate(names)}
    indices = []
    # If the column holds a class name, its words are class names; otherwise, they are indices of class names.
    are_names = isinstance(column, Words) and any(word in index_of for word in group.words)
    for word in group.words:
        # This index is illegal. It stays if the word has no meaning.
        index = len(names)
        if are_names:
            index = index_of.get(word, index)
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
                "Add the missing class names, or remove all class names from the file.",
            )
        indices.append(index)
    # A row without a value has code -1, which selects the last entry, -1.
    codes = np.array([*indices, -1], np.int32)[group.codes]
    return Words(codes, names, declared=True, repeated=repeated)


def distinct_names(names: Sequence[str]) -> tuple[str, ...]:
    """Distinct class names: a repeated name is followed by its index. ImageNet has two classes called crane."""
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
        column: the labels as they were read from the file.
        count: number of rows.
        no_label: values that mean that no label is known.

    Raises UsageError for another shape, and for measurements.
    """
    column = _one_per_row(where, column, count)
    all_values = _coded(where, column)
    are_words = isinstance(column, Words)
    # Numbers are compared as numbers: -1.0 names the label -1.
    no_label_words = {value.strip() for value in no_label}
    if not are_words:
        no_label_words = {_as_number(value) for value in no_label_words}
    classes = tuple(word for word in all_values.words if word not in no_label_words)
    coded = Group(all_values.recoded(classes), classes)
    notes = _unlabelled(column, all_values, no_label_words)
    for value in sorted(no_label_words.difference(all_values.words)):
        notes.append(f"No row has the label {value}.")
    if not are_words or not column.declared:
        notes += _likely_missing(coded)
    elif column.repeated:
        shown = some_names(column.repeated, 4)
        notes.append(
            f"These class names occur more than once in the file, so a number is added to them: {shown}."
        )
    return coded, notes


def _unlabelled(column: Any, coded: Group, no_label_words: Collection[str]) -> list[str]:
    """A note on rows without a label, and how the file marks them; [] if all rows have labels."""
    # Mark of unlabelled rows, in words -> number of rows.
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
    """A whole number as labels are spelled, such as -1 for -1.0; any other word as it is."""
    try:
        number = float(word)
    except ValueError:
        return word
    if is_integer(word) or not number.is_integer():
        return word
    return str(int(number))


def read_domains(where: str, column: Any, count: int) -> Group:
    """The domain of each row, -1 for a row without one; errors as of ``read_labels``."""
    hint = "--domain-key NAME selects another column."
    column = _one_per_row(where, column, count, hint)
    return _coded(where, column, hint)


def _one_per_row(where: str, column: Any, count: int, another_column: str = ANOTHER_COLUMN) -> Any:
    """The column as [N], with one value for each of ``count`` rows. Raises UsageError if its shape does not fit."""
    column = vector(column)
    is_unread = isinstance(column, Unread)
    if column.shape == (count,) and not is_unread:
        return column
    hint = "Give every row one label."
    one_hot = (
        f"{hint} If every row has exactly one 1, convert the labels with numpy: labels.argmax(1)"
    )
    if len(column.shape) == 2 and column.shape[0] == count:
        hint = one_hot
    elif is_unread:
        hint = another_column
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
    """A column as a group; words keep their order if the file lists them."""
    if isinstance(column, Words) and column.declared:
        return Group(column.codes, column.words)
    try:
        return Group.of(column)
    except UsageError as error:
        content = as_a_part(error.message)
        rows = column.shape[0]
        raise UsageError(
            f"{where} holds {content}, expected {rows:,} integers or words.", hint
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
        notes.append(
            f"{word} is read as a class, with {size}. If it means that the label is unknown: {hint}"
        )
    return notes
