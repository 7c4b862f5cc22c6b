"""Groups: columns that came with the data and sort its rows, such as a hospital, a writer or a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import UsageError
from fedcache.parsing import SAFE, slug_of
from fedcache.tables.words import Coded, Unread, Words, as_column, sorted_words

RESERVED = ("domain", "class", "split")
"""Columns every store has; a group of such a name would hide them."""


@dataclass(frozen=True, eq=False)
class Group(Coded):
    """One value for each row, or none; the K distinct values are words, sorted.

    >>> Group.of(["b", "a", "", "b"]).words
    ('a', 'b')
    """

    @classmethod
    def of(cls, values: Any) -> Group:
        """A column of N words or numbers; an empty word, None and NaN are no value, and whole floats are integers.

        Raises UsageError for other shapes, and for numbers that are measurements: floats that are not whole.
        """
        column = values
        if not isinstance(values, Words):
            column = np.asarray(values)
        if len(column.shape) != 1:
            raise UsageError(
                f"A group needs one value per row, not {column.shape}.", "Give one column."
            )
        if isinstance(column, Words):
            return cls.of_words(column)
        if column.dtype.kind == "f":
            known = ~np.isnan(column)
            if not (np.isfinite(column[known]) & (column[known] == np.rint(column[known]))).all():
                raise UsageError(
                    "Numbers with decimals cannot be a group.", "Give words, or integers."
                )
            if not (np.abs(column[known]) < 1 << 53).all():
                raise UsageError(
                    "Rounded numbers above 2^53 cannot be a group.", "Give words, or integers."
                )
            # Whole floats are integers, and a missing value is any number: it is not looked at.
            column = np.where(known, column, 0).astype(np.int64)
        elif column.dtype.kind in "iub":
            known = np.ones(len(column), bool)
        else:
            made = as_column(column)
            if isinstance(made, Unread):
                raise UsageError(
                    f"A group needs a word or a number per row, not {made.why}.", "Give words."
                )
            return cls.of(made)
        # Numbers are sorted as numbers (writer 2 before writer 10).
        distinct, inverse = np.unique(column[known], return_inverse=True)
        codes = np.full(len(column), -1, np.int32)
        codes[known] = inverse
        return cls(codes, tuple(map(str, distinct.tolist())))

    @classmethod
    def of_words(cls, column: Words) -> Group:
        """A group of words; an empty word is no value, and surrounding space is removed."""
        used = np.unique(column.codes).tolist()
        clean = [w.strip() for w in column.words]
        words = sorted_words(clean[i] for i in used if i >= 0 and clean[i])
        return cls(column.recoded(words, clean), tuple(words))

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
        words = tuple(
            dict.fromkeys(word for part in parts if name in part for word in part[name].words)
        )
        codes = [np.full(count, -1, np.int32) for count in rows]
        for at, part in enumerate(parts):
            if name in part:
                codes[at] = part[name].recoded(words)
        made[name] = Group(np.concatenate(codes), words)
    return made


def differs_in_every_row(group: Group) -> bool:
    """Whether nine of ten rows, or more, have a value of their own."""
    known = int((group.codes >= 0).sum())
    return known > 1 and 10 * len(group.words) > 9 * known


def usable_group_name(name: str) -> str:
    """The name of a column as that of a group: other characters than a-z, A-Z, 0-9, '.', '_' and '-' become '_'.

    Raises UsageError for a name that is taken, and for one without such a letter or digit.
    """
    if not name.strip():
        raise UsageError("A column has no name.", "Give every column a name.")
    slug = slug_of(name.strip()).lstrip("_")
    if slug.lower() in RESERVED:
        raise UsageError(
            f"A group cannot be called {name!r}: {', '.join(RESERVED)} are columns of every store.",
            "Rename the column.",
        )
    if not SAFE.fullmatch(slug):
        raise UsageError(
            f"A group cannot be called {name!r}.",
            "Rename the column. The name of a group has the characters a-z, A-Z, 0-9, '.', '_' and '-', at least one "
            "letter or digit, and at most 128 characters.",
        )
    return slug
