"""Columns of words, whatever they were written as: strings, bytes, Python objects, dates, categories.

A column of a million rows has few different words, or none twice: both are kept as the words and a number for each row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

NO_VALUE = frozenset({"", "nan", "NaN", "None", "NaT", "<NA>"})
"""What Python and pandas write where there is no value; ``MISSING`` is what people write."""

MISSING = frozenset({"", "nan", "none", "nat", "<na>", "na", "n/a", "null", "?"})
"""Labels, in small letters, that say that none is known."""

_INTEGER = re.compile(r"0|-?[1-9]\d{0,17}")
_DIGITS = re.compile(r"-?\d+")
_FLOAT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?")


@dataclass(frozen=True, eq=False)
class Words:
    """One word for each row, or none.

    >>> Words.of(["b", None, "a", "b"]).codes.tolist()
    [0, -1, 1, 0]
    """

    codes: NDArray[np.int32]  # [N], index into ``words``; -1 where there is nothing
    words: tuple[str, ...]  # distinct, in the order in which they come

    @classmethod
    def of(cls, values: Sequence[str | None]) -> Words:
        """A word or None for each row."""
        place: dict[str, int] = {}
        numbers = (-1 if v is None else place.setdefault(v, len(place)) for v in values)
        codes = np.fromiter(numbers, np.int32, len(values))
        return cls(codes, tuple(place))

    @classmethod
    def coded(cls, codes: NDArray[Any], words: Sequence[str]) -> Words:
        """Numbers [N] and what they stand for. Raises ValueError for those that do not fit each other."""
        if not all(isinstance(w, str) for w in words) or len(set(words)) != len(words):
            raise ValueError("the words of a column are no words, or some are there twice")
        if codes.ndim != 1 or codes.dtype.kind not in "iu":
            raise ValueError("the numbers of a column of words are none")
        if len(codes) and not (int(codes.min()) >= -1 and int(codes.max()) < len(words)):
            raise ValueError(f"numbers {codes.min()} to {codes.max()} of {len(words)} words")
        return cls(codes.astype(np.int32), tuple(words))

    @property
    def shape(self) -> tuple[int, ...]:
        """(N,)."""
        return self.codes.shape

    def every(self) -> list[str]:
        """The word of each row; "" where there is none."""
        words = [*self.words, ""]
        return [words[code] for code in self.codes.tolist()]

    def counts(self) -> dict[str, int]:
        """How many rows have each word, those that none has left out; "" counts rows without a word as well."""
        found = np.bincount(self.codes + 1, minlength=len(self.words) + 1).tolist()
        told = {word: n for word, n in zip(self.words, found[1:], strict=True) if n}
        return {**told, "": told.get("", 0) + found[0]} if found[0] else told

    def typed(self) -> NDArray[Any] | Words:
        """Numbers or truth values where every word is one, as a text file means them; else itself.

        Floats hold NaN for rows without a value. Integers that a float would round stay words.
        """
        known = {w: w.strip() for w in self.words if w.strip().lower() not in MISSING}
        gone = len(known) < len(self.words) or bool((self.codes < 0).any())
        values: list[Any]
        if not known:
            return self
        if all(_INTEGER.fullmatch(w) for w in known.values()):
            largest = max(abs(int(w)) for w in known.values())
            if gone and largest >= 1 << 53:
                return self
            values = [int(known[w]) if w in known else math.nan for w in self.words]
        elif all(_DIGITS.fullmatch(w) for w in known.values()):
            return self  # numbers of patients and postal codes: longer than an integer, or with zeros before them
        elif all(_FLOAT.fullmatch(w) for w in known.values()):
            values = [float(known[w]) if w in known else math.nan for w in self.words]
        elif not gone and {w.lower() for w in known.values()} <= {"true", "false"}:
            values = [w.strip().lower() == "true" for w in self.words]
        else:
            return self
        # The last one is the value of rows without a word.
        return np.array([*values, math.nan] if gone else values)[self.codes]


@dataclass(frozen=True)
class Unread:
    """A column that is there and was not read."""

    shape: tuple[int, ...]  # () where it is not known
    kind: str  # "int64", "bytes", "lists"
    why: str  # it is of no use: "bytes", "a matrix"


Column = NDArray[Any] | Words | Unread


def is_integer(word: str) -> bool:
    """Whether a word is a whole number as Python writes it, and fits 64 bits."""
    return _INTEGER.fullmatch(word) is not None


def is_missing(value: Any) -> bool:
    """Whether a Python value is none: None, NaN, and what pandas has in their place."""
    return (
        value is None
        or type(value).__name__ in ("NAType", "NaTType")
        or (isinstance(value, float | np.floating) and bool(value != value))
    )


def as_column(values: NDArray[Any]) -> Column:
    """An array as a column: numbers stay, what means words becomes ``Words``, and the rest is ``Unread``."""
    kind, shape = values.dtype.kind, values.shape
    if kind in "iufb" and values.ndim == 1:
        return values
    if values.ndim != 1:
        what = "one value" if values.ndim == 0 else f"a table of {' x '.join(map(str, shape))}"
        return values if kind == "f" and values.ndim else Unread(shape, str(values.dtype), what)
    if kind == "U":
        return Words.of(values.tolist())
    if kind == "S":
        return objects_of(values.tolist())
    if kind == "M":
        return dates_of(values)
    if kind == "O":
        return objects_of(values.tolist())
    return Unread(shape, str(values.dtype), f"values of type {values.dtype}")


def objects_of(values: Sequence[Any]) -> Column:
    """Python values of N rows: words and bytes, numbers, or words and numbers, None and NaN among them."""
    shape = (len(values),)
    kinds = {type(v) for v in values if not is_missing(v)}
    if kinds and all(issubclass(k, int | float | np.integer | np.floating) and k is not bool for k in kinds):
        whole = all(issubclass(k, int | np.integer) for k in kinds)
        if not whole or all(abs(int(v)) < 1 << 53 for v in values if not is_missing(v)):
            numbers = [math.nan if is_missing(v) else float(v) for v in values]
            return np.array(numbers)
    if not all(issubclass(k, str | bytes | int | float | np.generic) for k in kinds):
        odd = min(k.__name__ for k in kinds if not issubclass(k, str | bytes | int | float | np.generic))
        return Unread(shape, "objects", f"objects of type {odd}")
    try:
        return Words.of([None if is_missing(v) else _word(v) for v in values])
    except UnicodeDecodeError:
        return Unread(shape, "bytes", "bytes")


def _word(value: Any) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def dates_of(values: NDArray[Any]) -> Words:
    """Dates [N] as ISO words: days where every time is midnight, seconds where no time has a fraction."""
    known = ~np.isnat(values)
    unit = next((u for u in ("D", "s", "us") if (values[known].astype(f"M8[{u}]") == values[known]).all()), "ns")
    words = np.datetime_as_string(values[known].astype(f"M8[{unit}]")).tolist()
    rows: list[str | None] = [None] * len(values)
    for row, word in zip(np.flatnonzero(known).tolist(), words, strict=True):
        rows[row] = word
    return Words.of(rows)


def sorted_words(words: Iterable[str]) -> list[str]:
    """Different words in order: as numbers where all are whole (writer 2 before writer 10), else as letters."""
    distinct = set(words)
    return sorted(distinct, key=int) if all(map(is_integer, distinct)) else sorted(distinct)


def signs_alone(values: NDArray[Any]) -> bool:
    """Whether labels are -1 and 1 and nothing else, as those of two classes often are: -1 is then no missing label."""
    return values.dtype.kind in "if" and bool(np.array_equal(np.unique(values), [-1, 1]))
