"""Groups: columns of the data that divide its rows, such as by hospital, writer or device."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import UsageError
from fedcache.parsing import SAFE, slug_of
from fedcache.tables.words import (
    FLOAT_INTEGERS,
    Coded,
    Unread,
    Words,
    as_column,
    sorted_words,
)

RESERVED = ("domain", "class", "split")
"""Columns that every store has. A group cannot have one of these names, because it would hide the column."""


@dataclass(frozen=True, eq=False)
class Group(Coded):
    """One value for each row, or none; the K distinct values are words, sorted.

    >>> Group.of(["b", "a", "", "b"]).words
    ('a', 'b')
    """

    @classmethod
    def of(cls, values: Any) -> Group:
        """The group of a column of N words or numbers. An empty word, None and NaN are no value.

        Raises UsageError for other shapes, and for measurements, which are floats that are not whole.
        """
        column = values
        if not isinstance(values, Words):
            column = np.asarray(values)
        if len(column.shape) != 1:
            raise UsageError(
                f"A group needs one value per row, but the column has the shape {column.shape}.",
                "Give one column.",
            )
        if isinstance(column, Words):
            return cls.of_words(column)
        if column.dtype.kind == "f":
            known = ~np.isnan(column)
            values = column[known]
            hint = "Convert the values to words or integers."
            are_whole = np.isfinite(values) & (values == np.rint(values))
            if not are_whole.all():
                raise UsageError("Numbers with decimals cannot be a group.", hint)
            if not (np.abs(values) < FLOAT_INTEGERS).all():
                raise UsageError(
                    "Floats of 2^53 or more (they may be rounded) cannot be a group.",
                    hint,
                )
            # Whole floats become integers. A missing value may be any integer, because it is not used.
            column = np.where(known, column, 0).astype(np.int64)
        elif column.dtype.kind in "iub":
            known = np.ones(len(column), bool)
        else:
            words = as_column(column)
            if isinstance(words, Unread):
                raise UsageError(
                    f"A group needs a word or a whole number per row, but the column contains {words.why}.",
                    "Give words.",
                )
            return cls.of(words)
        # Numbers are sorted as numbers (writer 2 before writer 10).
        distinct, inverse = np.unique(column[known], return_inverse=True)
        codes = np.full(len(column), -1, np.int32)
        codes[known] = inverse
        return cls(codes, tuple(map(str, distinct.tolist())))

    @classmethod
    def of_words(cls, column: Words) -> Group:
        """The group of a column of words. An empty word is no value, and surrounding space is removed."""
        used = np.unique(column.codes).tolist()
        clean = [word.strip() for word in column.words]
        words = sorted_words(clean[code] for code in used if code >= 0 and clean[code])
        return cls(column.recoded(words, clean), tuple(words))

    def take(self, rows: NDArray[np.int64]) -> Group:
        """The values of some rows, with the same words; row -1 has no value."""
        codes = np.append(self.codes, np.int32(-1))[rows]  # row -1 selects the appended code
        return Group(codes, self.words)

    def equals(self, other: Group) -> bool:
        """Whether every row has the same value."""
        return self.words == other.words and np.array_equal(self.codes, other.codes)


def as_a_part(message: str) -> str:
    """The message of an error that ``Group.of`` raised, as a part of another sentence.

    >>> as_a_part("Numbers with decimals cannot be a group.")
    'numbers with decimals'
    """
    in_a_sentence = message[:1].lower() + message[1:]
    return re.sub(r" cannot be a group\.$|\.$", "", in_a_sentence)


def joined(parts: Sequence[Mapping[str, Group]], rows: Sequence[int]) -> dict[str, Group]:
    """The groups of several datasets, whose rows follow one another.

    ``rows`` has the number of rows of each dataset. If a dataset lacks a group, its rows have no value in the group.
    """
    groups = {}
    for name in dict.fromkeys(chain(*parts)):
        words: dict[str, None] = {}
        for part in parts:
            if name in part:
                words |= dict.fromkeys(part[name].words)
        codes = [np.full(count, -1, np.int32) for count in rows]
        for index, part in enumerate(parts):
            if name in part:
                codes[index] = part[name].recoded(tuple(words))
        groups[name] = Group(np.concatenate(codes), tuple(words))
    return groups


def differs_in_every_row(group: Group) -> bool:
    """Whether the number of different values is more than nine tenths of the number of rows with a value."""
    known = int((group.codes >= 0).sum())
    return known > 1 and 10 * len(group.words) > 9 * known


def usable_group_name(name: str) -> str:
    """The name of a column as the name of a group: characters other than a-z, A-Z, 0-9, '.', '_' and '-' become '_'.

    Raises UsageError for a reserved name, and for a name that is too long or has none of these letters and digits.
    """
    if not name.strip():
        raise UsageError("A column has no name.", "Give every column a name.")
    slug = slug_of(name.strip()).lstrip("_")
    if slug.lower() in RESERVED:
        reserved = ", ".join(RESERVED)
        raise UsageError(
            f"A group cannot have the name {name!r}, because every store has the columns {reserved}.",
            "Rename the column.",
        )
    if not SAFE.fullmatch(slug):
        raise UsageError(
            f"A group cannot have the name {name!r}.",
            "Rename the column. The name of a group has the characters a-z, A-Z, 0-9, '.', '_' and '-', at least one "
            "letter or digit, and at most 128 characters.",
        )
    return slug
