"""Columns of words from any representation: strings, bytes, Python objects, dates, categories.

A column of a million rows has few different words, or none twice: both are kept as the words and a number for each row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import eq
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import FedcacheError, UsageError

# Rows of features that stay in their file, to be read block by block as often as they are asked
# for.


Held = TypeVar("Held")

FEATURES = (
    "features",
    "embeddings",
    "x",
    "feature",
    "embedding",
    "emb",
    "embs",
    "feat",
    "feats",
    "vector",
    "vectors",
)
"""Columns that are features by default, in small letters; and ``features/NAME``."""


DATA = "data"
"""A column that is features where none of ``FEATURES`` is there."""


def last_level(name: str) -> str:
    """The last level of a column's name, in small letters: of ``train/Labels`` in an HDF5 file ``labels``."""
    name = name.strip().lower()
    if name.startswith(("features/", "text/", "group/")):
        return name
    return name.rpartition("/")[2]


def without_blanks(where: Path | str, columns: Mapping[str, Held]) -> dict[str, Held]:
    """Columns by their names without blanks around them, as after the commas of a CSV.

    Raises UsageError for two columns that are then called the same.
    """
    found: dict[str, Held] = {}
    for name, column in columns.items():
        if name.strip() in found:
            raise named_twice(where, name.strip())
        found[name.strip()] = column
    return found


def named_twice(where: Path | str, name: str) -> FedcacheError:
    """The error of a table with two columns of one name."""
    return UsageError(
        f"{where}: the column {name!r} occurs twice.", "Give every column a name of its own."
    )


def is_feature(name: str) -> bool:
    """Whether a column of this name is features, if it has the shape."""
    return last_level(name) in FEATURES or name.startswith("features/")


def ending_of(path: Path) -> str:
    """The ending that says the format, in small letters: .npz, .csv, also .csv.gz."""
    ending = path.suffix.lower()
    if ending == ".gz":
        return Path(path.stem).suffix.lower() + ending
    return ending


def stem_of(path: Path) -> str:
    """The name of a file without its ending."""
    if ending_of(path):
        return path.name[: -len(ending_of(path))]
    return path.name


def some_names(names: Iterable[str], most: int = 20) -> str:
    """The first names of columns, and how many more there are.

    >>> some_names(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    every = list(names)
    shown = ", ".join(every[:most])
    more = len(every) - most
    if more > 0:
        shown += f" and {more:,} more"
    return shown


Parts = Callable[[int], Iterator[NDArray[Any]]]
"""Rows of a column in order, in pieces of about that many."""


def refuse_empty(path: Path) -> None:
    """Raise UsageError for a file without a byte."""
    if path.is_file() and not path.stat().st_size:
        raise UsageError(f"{path} is empty.", "Write it again.")


@contextmanager
def explain_damage(path: Path) -> Iterator[None]:
    """Turn what the formats' libraries raise for damaged files, each its own kinds, into a UsageError."""
    try:
        yield
    except FedcacheError:
        raise
    except Exception as error:
        refuse_empty(path)
        reason = " ".join(str(error).split())[:160]
        ending = ending_of(path)
        kind = type(error).__name__
        hint = f"Write the whole file again as {ending}."
        if "allow_pickle" in reason:
            hint = "fedcache never reads object arrays and pickles; write plain numbers."
        message = f"{path} could not be read as {ending}: {kind}: {reason}"
        raise UsageError(message, hint) from error


def blocks_of(rows: FileRows | NDArray[Any], size: int) -> Iterator[NDArray[Any]]:
    """All rows in order, ``size`` at a time and the rest, of a file or of memory; errors as ``FileRows.blocks``."""
    if isinstance(rows, FileRows):
        return rows.blocks(size)
    return (rows[start : start + size] for start in range(0, len(rows), size))


@dataclass(frozen=True)
class FileRows:
    """A column of numbers that stays in its file.

    >>> rows = FileRows(Path("x.npy"), (3, 2), np.dtype("f4"), lambda n: iter(np.ones((1, 3, 2), "f4")))
    >>> [block.shape for block in rows.with_views().blocks(2)]
    [(2, 1, 2), (1, 1, 2)]
    """

    path: Path  # for messages
    shape: tuple[int, ...]  # (N, D) or (N, V, D)
    dtype: np.dtype[Any]
    parts: Parts
    columns: tuple[str, ...] = ()  # of a table with one column per dimension

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def with_views(self) -> FileRows:
        """The same as [N, V, D]; a matrix has one view."""
        if self.ndim == 3:
            return self
        return replace(self, shape=(self.shape[0], 1, self.shape[1]))

    def blocks(self, rows: int) -> Iterator[NDArray[Any]]:
        """All rows in order, ``rows`` at a time and the rest; raises UsageError for a damaged file."""
        with explain_damage(self.path):
            found = 0
            rest = np.empty((0, *self.shape[1:]), self.dtype)
            for part in self.parts(rows):
                part = part.reshape(len(part), *self.shape[1:])
                if len(rest):
                    part = np.concatenate([rest, part])
                rest = part
                # Parts of any size become blocks of one size; what is left waits for the next part.
                while len(rest) >= rows:
                    found += rows
                    yield rest[:rows]
                    rest = rest[rows:]
            there = found + len(rest)
            if there != len(self):
                raise ValueError(f"{there:,} rows are there of {len(self):,}")
            if len(rest):
                yield rest

    def whole(self) -> NDArray[Any]:
        """All rows in memory."""
        out = np.empty(self.shape, self.dtype)
        start = 0
        for block in self.blocks(1 << 16):
            out[start : start + len(block)] = block
            start += len(block)
        return out


def joined_rows(path: Path, name: str, parts: Sequence[FileRows | NDArray[Any]]) -> FileRows:
    """Matrices of several splits, one after another, which stay in their file.

    Raises UsageError for rows of different shapes.
    """
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        listed = " and ".join(str(list(shape)) for shape in sorted(shapes))
        raise UsageError(
            f"{path}: the rows of {name} have the shapes {listed}.",
            "All splits need the same features.",
        )
    count = sum(len(part) for part in parts)

    def rows(size: int) -> Iterator[NDArray[Any]]:
        for part in parts:
            yield from blocks_of(part, size)

    dtype = np.result_type(*(part.dtype for part in parts))
    return FileRows(path, (count, *shapes.pop()), dtype, rows)


NO_NUMBER = frozenset({"", "na", "n/a", "nan", "null", "none", "nat", "<na>", "?"})
"""Words, in small letters, that stand for a missing value where all other words of a text file's column are numbers.

In a column of words they are words: a class may be called none, and a country NA.
"""

_INTEGER = re.compile(r"0|-?[1-9]\d*")
_SHORT = 18
"""Digits that always fit an integer of 64 bits."""

_DIGITS = re.compile(r"-?\d+")
_FLOAT = re.compile(r"[+-]?((\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?|inf)")
_LIST = re.compile(r"\[[-+.,\seE\d]*\]")


@dataclass(frozen=True, eq=False)
class Coded:
    """A column as the different words in it and a number for each row."""

    codes: NDArray[np.int32]  # [N], index into ``words``; -1 where there is nothing
    words: tuple[str, ...]  # distinct

    def values(self) -> list[str | None]:
        """The word of each row; None where there is none."""
        words = [*self.words, None]
        return [words[code] for code in self.codes.tolist()]

    def recoded(
        self, names: Sequence[str], words: Sequence[str] | None = None
    ) -> NDArray[np.int32]:
        """The codes as indices into ``names``, -1 for a word that is none of them.

        ``words`` take the place of the words of the column.
        """
        place = {name: index for index, name in enumerate(names)}
        target = [place.get(word, -1) for word in words or self.words]
        return np.array([*target, -1], np.int32)[self.codes]


@dataclass(frozen=True, eq=False)
class Words(Coded):
    """One word for each row, or none; the words are in the order in which they come.

    >>> Words.of(["b", None, "a", "b"]).codes.tolist()
    [0, -1, 1, 0]
    """

    # whether the file itself lists the words, in this order, with those that no row has
    declared: bool = False
    # words that the file lists twice, which have their numbers behind them here
    repeated: tuple[str, ...] = ()

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
            raise ValueError("a column has values that are not words, or repeated words")
        if codes.ndim != 1 or codes.dtype.kind not in "iu":
            raise ValueError("the numbers of a column of words are none")
        if len(codes) and not (int(codes.min()) >= -1 and int(codes.max()) < len(words)):
            raise ValueError(f"numbers {codes.min()} to {codes.max()} of {len(words)} words")
        return cls(codes.astype(np.int32), tuple(words))

    @property
    def shape(self) -> tuple[int, ...]:
        """(N,)."""
        return self.codes.shape

    def typed(self) -> Column:
        """Cells of a text file, which has no types, as numbers, lists or words.

        They are numbers only if all of them are written as a program writes numbers, so that no two words become one
        number: 1e5 next to 100000 stays a word. Floats hold NaN for rows without a value. Integers that a float or 64
        bits would change stay words.
        """
        numbers: dict[str, str] = {}
        for word in self.words:
            if word.strip().lower() not in NO_NUMBER:
                numbers[word] = word.strip()
        if not numbers:
            return self
        if all(_LIST.fullmatch(word) for word in numbers.values()):
            return Unread(self.shape, "lists", "lists")
        gone = len(numbers) < len(self.words) or bool((self.codes < 0).any())
        convert: Callable[[str], float] = float
        if all(map(is_integer, numbers.values())):
            longest = max(map(len, numbers.values()))
            # Integers that a float, or 64 bits, would change.
            if longest > _SHORT or (gone and max(abs(int(w)) for w in numbers.values()) >= 1 << 53):
                return self._only(numbers)
            convert = int
        elif not _are_floats(set(numbers.values())):
            return self
        # Rows whose word stands for a missing value hold NaN.
        known = {word: convert(number) for word, number in numbers.items()}
        values = [known.get(word, math.nan) for word in self.words]
        if gone:
            values.append(math.nan)  # the last one is the value of rows without a word
        return np.array(values)[self.codes]

    def _only(self, kept: Collection[str]) -> Words:
        """The same, where rows with another word than those kept have none."""
        words = tuple(word for word in self.words if word in kept)
        return Words(self.recoded(words), words)


@dataclass(frozen=True)
class Unread:
    """A column that is there and was not read."""

    shape: tuple[int, ...]  # () where it is not known
    kind: str  # "int64", "bytes", "lists"
    why: str  # it is of no use: "bytes", "a matrix"


Column = NDArray[Any] | Words | Unread


def is_integer(word: str) -> bool:
    """Whether a word is a whole number as Python writes it."""
    return _INTEGER.fullmatch(word) is not None


def _are_floats(words: set[str]) -> bool:
    """Whether words are floats: measurements, or whole numbers that are all written in one way."""
    if all(map(_DIGITS.fullmatch, words)) or not all(map(_FLOAT.fullmatch, words)):
        return False  # numbers of patients and postal codes with zeros before them are words
    # Measurements are floats in any writing. Whole numbers are only if one way of writing gives all of them back.
    values = {word: float(word) for word in words}
    finite = [value for value in values.values() if math.isfinite(value)]
    if not finite or any(value != round(value) for value in finite):
        return bool(finite)
    if len(set(values.values())) < len(words):
        return False
    after_point = min(words).partition(".")[2].lower()
    decimals = len(after_point.partition("e")[0])
    writings: list[Callable[[float], str]] = [
        repr,
        f"{{:.{decimals}f}}".format,
        f"{{:.{decimals}e}}".format,
    ]

    def gives_back(write: Callable[[float], str]) -> bool:
        return all(write(value) == word for word, value in values.items())

    return any(map(gives_back, writings))


def is_missing(value: Any) -> bool:
    """Whether a Python value is none: None, NaN, and what pandas has in their place."""
    return (
        value is None
        or type(value).__name__ in ("NAType", "NaTType")
        or (isinstance(value, float | np.floating) and bool(value != value))
    )


def as_column(values: NDArray[Any]) -> Column:
    """An array as a column: numbers stay, what means words becomes ``Words``, and the rest is ``Unread``.

    [N, 1] is a column of N values; of floats it may also be a feature, and stays as it is.
    """
    if values.ndim == 2 and values.shape[1] == 1 and values.dtype.kind != "f":
        values = values[:, 0]
    kind = values.dtype.kind
    shape = values.shape
    if kind in "iufb" and values.ndim == 1:
        return values
    if values.ndim == 0:
        return Unread(shape, str(values.dtype), "one value")
    if values.ndim > 1 and kind == "f":
        return values
    if values.ndim > 1:
        sizes = " x ".join(map(str, shape))
        return Unread(shape, str(values.dtype), f"a table of {sizes}")
    if kind == "U":
        return Words.of(values.tolist())
    if kind == "M":
        return dates_of(values)
    if kind in "SO":
        return objects_of(values.tolist())
    return Unread(shape, str(values.dtype), f"values of type {values.dtype}")


def objects_of(values: Sequence[Any]) -> Column:
    """Python values of N rows: words and bytes, numbers, or words and numbers, None and NaN among them."""
    shape = (len(values),)
    if any(isinstance(v, list | tuple) for v in values):
        # [N, 1] is read as [N].
        single: list[Any] = []
        for v in values:
            if isinstance(v, list | tuple) and len(v) == 1:
                single.append(v[0])
            elif is_missing(v):
                single.append(None)
            else:
                return Unread(shape, "lists", "lists")
        return objects_of(single)
    kinds = {type(v) for v in values if not is_missing(v)}
    if dict in kinds:
        return Unread(shape, "objects", "objects")
    if kinds and all(
        issubclass(k, int | float | np.integer | np.floating) and k is not bool for k in kinds
    ):
        whole = all(issubclass(k, int | np.integer) for k in kinds)
        if not whole or all(abs(int(v)) < 1 << 53 for v in values if not is_missing(v)):
            numbers = [math.nan if is_missing(v) else float(v) for v in values]
            return np.array(numbers)
    readable = str | bytes | int | float | np.generic
    odd = [k.__name__ for k in kinds if not issubclass(k, readable)]
    if odd:
        return Unread(shape, "objects", f"objects of type {min(odd)}")
    try:
        return Words.of([None if is_missing(v) else _word(v) for v in values])
    except UnicodeDecodeError:
        return Unread(shape, "bytes", "bytes")


def _word(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8")
    return str(value)


def dates_of(values: NDArray[Any]) -> Words:
    """Dates [N] as ISO words: days where every time is midnight, seconds where no time has a fraction."""
    known = ~np.isnat(values)
    # The coarsest unit that loses nothing.
    times = values[known]
    for unit in ("D", "s", "us", "ns"):
        rounded = times.astype(f"M8[{unit}]")
        if (rounded == times).all():
            break
    words = np.datetime_as_string(rounded).tolist()
    rows: list[str | None] = [None] * len(values)
    for row, word in zip(np.flatnonzero(known).tolist(), words, strict=True):
        rows[row] = word
    return Words.of(rows)


def sorted_words(words: Iterable[str]) -> list[str]:
    """Different words in order: as numbers where all are whole (writer 2 before writer 10), else as letters."""
    distinct = set(words)
    if all(map(is_integer, distinct)):
        return sorted(distinct, key=int)
    return sorted(distinct)


def vector(column: Any) -> Any:
    """A column [N, 1] as [N], which is the same column; others as they are."""
    if isinstance(column, Words | Unread) or len(column.shape) != 2 or column.shape[1] != 1:
        return column
    if isinstance(column, FileRows):
        column = column.whole()
    return column[:, 0]


def shape_of(column: Any) -> str:
    """A column for messages: ``int64 with shape (3, 2)``."""
    kind = "words"
    if isinstance(column, Unread):
        kind = column.kind
    elif not isinstance(column, Words):
        kind = str(column.dtype)
    return f"{kind} with shape {column.shape}"


def joined_columns(parts: Sequence[Column | None], lengths: Sequence[int]) -> Column:
    """A column of several tables, one after another; a table without the column is None, and has no values.

    Numbers stay numbers where a number can say all of them, else they become words.
    """
    if len(parts) == 1 and parts[0] is not None:
        return parts[0]
    for part, length in zip(parts, lengths, strict=True):
        if isinstance(part, Unread):
            return Unread((sum(lengths),), part.kind, part.why)
        if part is not None and part.shape != (length,):
            return Unread(
                (sum(lengths),),
                shape_of(part),
                f"{part.shape[0]:,} values for {length:,} rows of a split",
            )
    # A column of words without a word is one without values, which numbers can be joined with.
    parts = [None if isinstance(part, Words) and not part.words else part for part in parts]
    numbers = [part for part in parts if isinstance(part, np.ndarray)]
    if len(numbers) == len(parts) and len({number.dtype.kind for number in numbers}) == 1:
        return np.concatenate(numbers)
    # Numbers of different kinds, or a table without the column: floats, with NaN for the missing rows.
    if all(part is None or _fits_float(part) for part in parts):
        floats = []
        for part, length in zip(parts, lengths, strict=True):
            if part is None:
                floats.append(np.full(length, np.nan))
            else:
                floats.append(np.asarray(part, np.float64))
        return np.concatenate(floats)
    words: list[str | None] = []
    for part, length in zip(parts, lengths, strict=True):
        if part is None:
            words += [None] * length
        else:
            words += as_words(part)
    # Words that every table declares stay declared; else the words that occur are the column.
    lists = [part for part in parts if isinstance(part, Words) and part.declared]
    if len(lists) < sum(part is not None for part in parts):
        return Words.of(words)
    # Each table may list other class names, or the same in another order: a row keeps the name that its own says.
    names = tuple(dict.fromkeys(word for part in lists for word in part.words))
    repeated = tuple(dict.fromkeys(word for part in lists for word in part.repeated))
    place = {word: index for index, word in enumerate(names)}
    codes = [-1 if word is None else place[word] for word in words]
    return Words(np.array(codes, np.int32), names, declared=True, repeated=repeated)


def _fits_float(column: Column) -> bool:
    """Whether a column holds numbers that a float does not round."""
    if not isinstance(column, np.ndarray) or column.dtype.kind not in "iuf":
        return False
    return (
        column.dtype.kind == "f"
        or not len(column)
        or int(np.abs(column.astype(np.float64)).max()) < 1 << 53
    )


def as_words(column: Column) -> list[str | None]:
    """The values of a column as words; None where there is none."""
    if isinstance(column, Unread):
        return [None] * column.shape[0]
    if isinstance(column, Words):
        return column.values()
    if column.dtype.kind != "f":
        return [str(value) for value in column.tolist()]
    found: list[str | None] = []
    for value in column.tolist():
        if math.isnan(value):
            found.append(None)
        elif math.isfinite(value) and value == round(value):
            found.append(str(int(value)))
        else:
            found.append(str(value))
    return found


# Many strings of one length in one text, as the names of numbered rows are.


class EqualStrings(Sequence[str]):
    """Strings of one length, sliced from one text when they are requested: ten million names in a tenth of the memory.

    >>> words = EqualStrings("0001", 2)
    >>> words[1], words[:1], list(words), words == ("00", "01")
    ('01', ('00',), ['00', '01'], True)
    """

    def __init__(self, text: str, length: int) -> None:
        self.text = text
        self.length = length

    def __len__(self) -> int:
        return len(self.text) // self.length

    @overload
    def __getitem__(self, place: int) -> str: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[str]: ...

    def __getitem__(self, place: int | slice) -> str | Sequence[str]:
        if isinstance(place, slice):
            if place == slice(len(self)):
                return self
            return tuple(self._at(number) for number in range(*place.indices(len(self))))
        return self._at(range(len(self))[place])  # IndexError, and places from the end

    def _at(self, number: int) -> str:
        return self.text[number * self.length : (number + 1) * self.length]

    def __iter__(self) -> Iterator[str]:
        text = self.text
        length = self.length
        return (text[at : at + length] for at in range(0, len(text), length))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, tuple | list | EqualStrings)
            and len(self) == len(other)
            and all(map(eq, self, other))
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def increasing(self) -> bool:
        """Whether each is greater than the one before."""
        if not self.text.isascii():
            return all(a < b for a, b in pairwise(self))
        raw = np.frombuffer(self.text.encode("ascii"), f"S{self.length}")
        return bool((raw[:-1] < raw[1:]).all())

    def __repr__(self) -> str:
        return repr(tuple(self))


def numbered(count: int) -> EqualStrings:
    """0 to ``count`` - 1, filled up with zeros, so that they are in the order of their letters.

    >>> numbered(11)[9:]
    ('09', '10')
    """
    width = len(str(count - 1))
    numbers = np.arange(count)
    digits = np.empty((count, width), np.uint8)
    for place in range(width - 1, -1, -1):
        numbers, digits[:, place] = np.divmod(numbers, 10)
    return EqualStrings((digits + ord("0")).tobytes().decode("ascii"), width)
