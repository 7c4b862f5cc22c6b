"""Columns of a table: parquet, CSV and TSV (also .gz), and feather.

Features are one column of lists, one column of texts such as "[0.1, 0.2]", or one column for each dimension (f0 ..
f511). A table is read in batches of rows. Only the part of each column that is used is kept.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import FedcacheError, UsageError, shell_word
from fedcache.tables.foreign_files import conversion
from fedcache.tables.labels import with_names
from fedcache.tables.roles import TEXTS, has_a_meaning
from fedcache.tables.table_files import (
    EMPTY_CELLS,
    TABLES,
    Table,
    are_words,
    arrow,
    is_binary,
    is_list_text,
    is_number,
    is_number_kind,
    list_kind,
    numbers_in,
)
from fedcache.tables.words import (
    FLOAT_INTEGERS,
    Column,
    FileRows,
    Unread,
    Words,
    as_column,
    dates_of,
    ending_of,
    is_feature,
    some_names,
    stem_of,
)

LONGEST = 4096
"""Maximum number of characters in a word. A longer value is a text or a thumbnail, and cannot be a class or a group."""

FLOAT_DIGITS = 15
"""Maximum number of digits with which a float holds every integer without rounding."""

BATCH = 1 << 16
"""Number of rows in one batch, for a single column of words or numbers."""

MANY_NUMBERS = 16
"""Number of columns of numbers from which a table probably contains features, even if no name says so."""

COLUMNS = 4096
"""Maximum number of columns of words and numbers that are read in one pass over a table."""

CELLS = 16 * BATCH
"""Maximum number of cells in one batch."""

FIRST_ROWS = 64
"""Number of first rows that show whether a column contains long texts or pictures."""

NOT_FEATURES = ("y", "label", "labels", "target", "class", "category", "id", "index", "fold")
"""Beginnings of names that numbered columns of features never have; label0 and label1, for example, are labels."""


def read_table(path: Path, features: Sequence[str]) -> dict[str, Any]:
    """Columns by name; ``features`` as for ``read.read_columns``. Raises UsageError."""
    table = TABLES[ending_of(path)](path)
    meta = table.meta
    found: dict[str, Any] = {}
    for key in ("classes", "domains"):
        if key in meta:
            found[key] = Words.of(meta[key])
    for name, entry in meta.get("text", {}).items():
        found[f"text/{name}"] = _matrix(entry)
    wide = _family(table, features)
    matrices = [name for name in table.types if _is_matrix(table, name, features)]
    if not wide and not matrices:
        _refuse_almost_features(table, features)
    of_features = [*matrices, *wide]
    distinct = {*of_features}
    others = [name for name in table.types if name not in distinct]
    # At least one column is read, because the number of rows comes with it.
    columns, count = read_others(table, others or of_features[:1])
    if not count:
        raise UsageError(f"{path} has 0 rows.", "It needs at least 1 row.")
    for name in others:
        found[name] = columns[name]
    for name in matrices:
        found[name] = _list_rows(table, name, count)
    if wide:
        kinds = [_float_of(table.types[name]) for name in wide]
        dtype = np.result_type(*kinds)
        parts = partial(_wide_parts, table, wide, dtype)
        key = f"features/{stem_of(path)}"
        found[key] = FileRows(path, (count, len(wide)), dtype, parts, wide)
    return found


def _matrix(entry: dict[str, Any]) -> NDArray[np.float32]:
    """Text features [C, D] from the head of a parquet file that ``export`` wrote. Raises ValueError for bad ones."""
    rows, width = entry["shape"]
    raw = base64.b64decode(entry["float32"], validate=True)
    return np.frombuffer(raw, "<f4").reshape(rows, width)


# Which columns are features.


def _is_matrix(table: Table, name: str, features: Sequence[str]) -> bool:
    inner = list_kind(table.types[name])
    if inner is not None and arrow().types.is_floating(inner):
        return True
    # Words such as "[0.1, 0.2]", if the column has a usual name or the user named it.
    if not are_words(table.types[name]) or is_binary(table.types[name]):
        return False
    if not is_feature(name) and name not in features:
        return False
    return _first_is_list(table, name)


def _first_is_list(table: Table, name: str) -> bool:
    batch = next(table.batches([name], 64), None)
    return batch is not None and is_list_text(batch.column(0))


_DIMENSION = re.compile(r"(.*?)[_.\-\[ ]?(\d{1,9})\]?")


def _numbered(names: Iterable[str]) -> dict[str, dict[int, str]]:
    """Columns whose names are a word and then a number, such as f0, f1: word -> number -> name of the column."""
    found: dict[str, dict[int, str]] = {}
    for name in names:
        dimension = _DIMENSION.fullmatch(name)
        if dimension is not None:
            found.setdefault(dimension[1], {})[int(dimension[2])] = name
    return found


def _families(types: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Families of numeric columns whose names are a word and then 0, 1, 2, ..: word -> columns in order."""
    # Numbers without a gap are dimensions; they may begin at any number.
    families = {}
    for prefix, by_number in _numbered(types).items():
        count = len(by_number)
        without_gap = count > 1 and max(by_number) - min(by_number) == count - 1
        if without_gap and all(is_number_kind(types[name]) for name in by_number.values()):
            families[prefix] = tuple(by_number[number] for number in sorted(by_number))
    return families


def _family(table: Table, requested: Sequence[str]) -> tuple[str, ...]:
    """The columns, in order, of the features of a table with one column per dimension; () for another table.

    Raises UsageError if several families of columns may be the features.
    """
    families = _families(table.types)
    for word in requested:
        for prefix, names in families.items():
            # The word is a column of the family, or its prefix if no column is called so.
            is_prefix = word not in table.types and word.rstrip("_.- ") == prefix
            if word in names or is_prefix:
                return names
    features = {name: kind for name, kind in table.types.items() if is_feature(name)}
    if requested or any(list_kind(kind) is not None for kind in features.values()):
        return ()
    words = [name for name, kind in features.items() if kind == arrow().string()]
    if any(_first_is_list(table, name) for name in words):
        return ()
    for prefix in list(families):
        if prefix.lower() in NOT_FEATURES:
            del families[prefix]
    usual = {prefix: names for prefix, names in families.items() if _are_usual(prefix)}
    chosen = usual or families
    if len(chosen) > 1:
        ranges = [f"{names[0]} .. {names[-1]}" for names in chosen.values()]
        shown = ", ".join(ranges)
        first = next(iter(chosen)) or "0"
        hint = f"Choose one: --features-key {shell_word(first)}"
        raise UsageError(f"{table.path}: {shown} could all be features.", hint)
    return next(iter(chosen.values()), ())


def _are_usual(prefix: str) -> bool:
    """Whether numbered columns with this prefix are usually the dimensions of features."""
    return prefix.lower() in ("", "f", "x", "dim", "d") or is_feature(prefix)


def _refuse_almost_features(table: Table, requested: Sequence[str]) -> None:
    """Refuse numbered columns that are no features only because one of them is missing or holds words.

    Raises UsageError that names this column, and the row of its first word.
    """
    path = table.path
    types = table.types
    if not requested and any(name.lower() in TEXTS for name in types):
        return  # a table of texts, which has no features
    if all(map(arrow().types.is_null, types.values())):
        return  # a first line and no rows, which ``read_table`` refuses
    prefixes = {word.rstrip("_.- ") for word in requested}
    for prefix, by_number in _numbered(types).items():
        if requested:
            meant = prefix in prefixes
        else:
            meant = _are_usual(prefix)
        if len(by_number) < 2 or not meant:
            continue
        names = [by_number[number] for number in sorted(by_number)]
        for name in names:
            if not is_number_kind(types[name]):
                raise _no_numbers(table, name)
        lacking = set(range(min(by_number), max(by_number))) - set(by_number)
        if not lacking:
            continue
        first = names[0]
        gone = re.sub(r"\d+(?=\]?$)", str(min(lacking)), first)
        raise UsageError(
            f"{path}: {gone} is missing between {first} and {names[-1]}, so these columns are not used as "
            "features.",
            f"Add the column {gone}, or number the columns without a gap.",
        )
    numeric = [name for name, kind in types.items() if is_number_kind(kind)]
    unnamed = [name for name in numeric if not has_a_meaning(name)]
    if not requested and len(unnamed) >= MANY_NUMBERS:
        raise _named_dimensions(table, numeric, unnamed)


def _named_dimensions(
    table: Table, numeric: Sequence[str], unnamed: Sequence[str]
) -> FedcacheError:
    """The error of a table whose dimensions have names of their own, such as genes, with code that numbers them.

    ``numeric`` are its columns of numbers, and ``unnamed`` those whose names do not give them a role.
    """
    path = table.path
    out = path.with_name(f"{stem_of(path)}-numbered.parquet")
    readers = {".parquet": "parquet", ".feather": "feather", ".arrow": "feather"}
    reader = readers.get(ending_of(path), "csv")
    options = ""
    if table.separator not in ("", ","):
        options += f", sep={table.separator!r}"
    if table.encoding != "utf8":
        options += f", encoding={table.encoding!r}"
    kept = [name for name in numeric if has_a_meaning(name)]
    count = len(unnamed)
    return UsageError(
        f"{path} has {count:,} columns of numbers with names of their own, {some_names(unnamed, 3)}. "
        "fedcache cannot tell which are dimensions of the features.",
        conversion(
            [
                "import pandas",
                f"table = pandas.read_{reader}({str(path)!r}{options})",
                f"numbers = table.select_dtypes('number').columns.drop({kept!r})  # or a list of columns",
                "table = table.rename(columns={name: f'f{i}' for i, name in enumerate(numbers)})",
                f"table.to_parquet({str(out)!r})",
            ],
            f"fedcache ingest {shell_word(out)} --name NAME",
        ),
    )


def _no_numbers(table: Table, name: str) -> FedcacheError:
    """The error of a dimension that does not hold numbers, with the row of the first word in it."""
    path = table.path
    row = 0
    if are_words(table.types[name]) and not is_binary(table.types[name]):
        for batch in table.batches([name], BATCH):
            for number, word in enumerate(batch.column(0).to_pylist(), start=row):
                if word is None or word in EMPTY_CELLS or is_number(word):
                    continue
                hint = "Write a number there, or leave the cell empty for NaN. Rows are counted from 0."
                if _DECIMAL_COMMA.fullmatch(word.strip()):
                    hint = (
                        "Write numbers with a point; pandas: "
                        "read_csv(FILE, sep=';', decimal=',').to_csv(FILE, index=False)"
                    )
                first = word[:40]
                return UsageError(
                    f"{path}: {name} contains words, first in row {number:,}: {first!r}.", hint
                )
            row += len(batch)
        return UsageError(
            f"{path}: {name} contains numbers that are stored as words.",
            "Write numbers; pandas: .astype('float32')",
        )
    what = f"contains {table.types[name]}, not numbers"
    if arrow().types.is_null(table.types[name]):
        what = "is empty in all rows"
    return UsageError(f"{path}: {name} {what}.", "Write numbers there, or drop the column.")


_DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+([eE][+-]?\d+)?")


# Features, block by block.


def _float_of(kind: Any) -> np.dtype[Any]:
    """The dtype that features of one arrow type are read as."""
    if arrow().types.is_floating(kind):
        found: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
        return found
    return np.dtype("f8")


def _wide_parts(
    table: Table, names: Sequence[str], dtype: np.dtype[Any], rows: int
) -> Iterator[NDArray[Any]]:
    """Blocks [n, D] of features with one column for each dimension; an empty value is NaN."""
    for batch in table.batches(names, rows, floats=True):
        out = np.empty((len(batch), len(names)), dtype)
        for number, name in enumerate(names):
            out[:, number] = batch.column(name).to_numpy(zero_copy_only=False)
        yield out


def _list_rows(table: Table, name: str, count: int) -> FileRows:
    shape = table.meta.get("shapes", {}).get(name)
    kind = table.types[name]
    inner = list_kind(kind)
    if shape is None:
        # The first list that is not empty shows the width; 0 if all are empty.
        batches = table.batches([name], 1024)
        widths = (_first_width(batch.column(0)) for batch in batches)
        width = next(filter(None, widths), 0)
        shape = (width,)
    dtype = np.dtype("f8")
    if inner is not None:
        dtype = _float_of(inner)
    parts = partial(_list_parts, table, name, tuple(shape))
    return FileRows(table.path, (count, *shape), dtype, parts)


def _first_width(column: Any) -> int:
    if list_kind(column.type) is not None:
        return next(filter(None, column.value_lengths().to_pylist()), 0)
    return next((len(numbers_in(word)) for word in column.to_pylist() if word), 0)


def _list_parts(
    table: Table, name: str, shape: tuple[int, ...], rows: int
) -> Iterator[NDArray[Any]]:
    """Blocks [n, *shape] of a column of lists, or of texts of lists; rows and values that are empty are NaN."""
    width = math.prod(shape)
    for batch in table.batches([name], rows):
        column = batch.column(0)
        if list_kind(column.type) is not None:
            values = _lists(table.path, name, column, width)
        else:
            values = _texts(table.path, name, column, width)
        yield values.reshape(len(column), *shape)


def _lists(path: Path, name: str, column: Any, width: int) -> NDArray[Any]:
    """The values of lists of ``width`` numbers, [n, width]."""
    empty = np.asarray(column.is_null())
    lengths = np.asarray(column.value_lengths().fill_null(width))
    if (lengths != width).any():
        raise _uneven(path, name, {width, *lengths.tolist()})
    # ``flatten`` leaves out empty rows, so the values are those of the other rows.
    values = np.asarray(column.flatten().to_numpy(zero_copy_only=False))
    if not empty.any():
        return values.reshape(len(column), width)
    out = np.full((len(column), width), np.nan, values.dtype)
    out[~empty] = values.reshape(-1, width)
    return out


def _texts(path: Path, name: str, column: Any, width: int) -> NDArray[Any]:
    """The values of texts of ``width`` numbers, [n, width]."""
    # All rows at once if they are regular, else row by row.
    whole = _all_texts(column, width)
    if whole is not None:
        return whole
    out = np.full((len(column), width), np.nan)
    for row, word in enumerate(column.to_pylist()):
        if word is None or not word.strip():
            continue
        numbers = numbers_in(word)
        if len(numbers) != width:
            raise _uneven(path, name, {width, len(numbers)})
        out[row] = numbers
    return out


def _all_texts(column: Any, width: int) -> NDArray[np.float64] | None:
    """Texts "[0.1, 0.2]" with ``width`` numbers each, as [n, width]; None if a text is different.

    This is five times as fast as reading one text after another.
    """
    pa = arrow()
    compute = pa.compute
    bare = compute.utf8_trim_whitespace(column)
    inner = compute.utf8_slice_codeunits(bare, 1, -1)
    framed = compute.and_(compute.starts_with(bare, "["), compute.ends_with(bare, "]"))
    parts = compute.split_pattern(inner, ",")
    of_width = compute.equal(parts.value_lengths(), width)
    regular = compute.and_(framed, of_width)
    if not compute.all(regular, skip_nulls=False).as_py():
        return None
    words = compute.utf8_trim_whitespace(parts.flatten())
    try:
        values = words.cast(pa.float64())
    except ValueError:  # raised by arrow for a word that is no number
        return None
    return np.asarray(values).reshape(len(column), width)


def _uneven(path: Path, name: str, lengths: set[int]) -> FedcacheError:
    some = sorted(lengths)[:4]
    return UsageError(
        f"{path}: the rows of {name} have lengths {some}.",
        "Every row needs the same number of values.",
    )


# All other columns.


@dataclass
class GatheredColumn:
    """One column while its batches are read: numbers, dates, or words as codes."""

    place: dict[str, int] = field(default_factory=dict)  # code of each word, by first occurrence
    parts: list[NDArray[Any]] = field(default_factory=list)  # values or codes of each batch
    # where integers have a value, by batch; they have no NaN
    known: list[NDArray[np.bool_]] = field(default_factory=list)
    rows: int = 0
    kind: str = "null"  # arrow's, for messages
    words: bool = False  # whether ``parts`` are codes of words
    why: str = ""  # why the column is of no use; its values are not kept after this is known

    def add(self, column: Any) -> None:
        """Add the next rows."""
        self.rows += len(column)
        if self.why:
            return
        pa = arrow()
        types = pa.types
        kind = column.type
        self.kind = str(kind)
        if types.is_dictionary(kind) and not are_words(kind.value_type):
            column = column.dictionary_decode()
        if types.is_string_view(column.type):
            column = column.cast(pa.string())
        elif types.is_binary_view(column.type):
            column = column.cast(pa.binary())
        kind = column.type
        if types.is_decimal(kind) and kind.scale == 0 and kind.precision > FLOAT_DIGITS:
            column = column.cast(pa.string())  # a float would round these integers
        kind = column.type
        if types.is_dictionary(kind):
            self._add_words(column, str)
        elif are_words(kind):
            self._add_words(column.dictionary_encode(), str)
        elif types.is_boolean(kind):
            words = column.cast(pa.string())
            self._add_words(words.dictionary_encode(), str.capitalize)
        elif types.is_floating(kind) or types.is_decimal(kind):
            floats = column.cast(pa.float64())
            values = np.asarray(floats.to_numpy(zero_copy_only=False))
            known = values[~np.isnan(values)]
            whole = np.isfinite(known) & (known == np.rint(known))
            if not whole.all():
                self.why = "numbers with decimals"
            self.parts.append(values)
        elif types.is_integer(kind):
            self.parts.append(np.asarray(column.fill_null(0)))
            self.known.append(np.asarray(column.is_valid()))
        elif types.is_date(kind) or types.is_timestamp(kind):
            times = column.cast(pa.timestamp("us"))
            self.parts.append(times.to_numpy(zero_copy_only=False))
        elif _are_single(column):
            self.rows -= len(column)  # the next call counts these rows again
            self.add(column.flatten())
        elif not types.is_null(kind):
            self.why = self.kind
            if list_kind(kind) is not None:
                self.why = "lists"

    def _add_words(self, encoded: Any, written: Callable[[str], str]) -> None:
        """Add the rows of a dictionary-encoded column; ``written`` gives the spelling of a word."""
        pa = arrow()
        compute = pa.compute
        words = encoded.dictionary
        self.words = True
        if is_binary(words.type):
            longest = compute.max(compute.binary_length(words)).as_py() or 0
            try:
                words = words.cast(pa.string())
            except ValueError:  # raised by arrow for bytes that are not UTF-8
                words = None
            if words is None or longest > LONGEST:
                self.why = "bytes"
                return
        longest = compute.max(compute.utf8_length(words)).as_py() or 0
        if longest > LONGEST:
            self.why = f"texts of more than {LONGEST:,} characters"
            return
        # The codes of a batch index its own words. They are translated to the codes of all words.
        translated = []
        for word in words.to_pylist():
            code = -1
            if word is not None:
                code = self.place.setdefault(written(word), len(self.place))
            translated.append(code)
        codes = np.asarray(encoded.indices.fill_null(len(translated)))
        translated.append(-1)  # of rows without a word
        self.parts.append(np.array(translated, np.int32)[codes])

    def column(self, *, text: bool) -> Column:
        """The column of parsed cells; words of a ``text`` file may be numbers."""
        if self.why:
            return Unread((self.rows,), self.kind, self.why)
        if not self.parts:
            return Words(np.full(self.rows, -1, np.int32), ())
        values = np.concatenate(self.parts)
        if self.words:
            found = Words(values, tuple(self.place))
            if text:
                return found.typed()
            return found
        if self.known:
            known = np.concatenate(self.known)
            if not known.all():
                return _integers_with_gaps(values, known)
        if values.dtype.kind == "M":
            return dates_of(values)
        return as_column(values)


def _integers_with_gaps(values: NDArray[Any], known: NDArray[np.bool_]) -> Column:
    """Integers [N], some without a value: floats with NaN, or words where a float would round a large integer."""
    if int(np.abs(values).max()) < FLOAT_INTEGERS:
        return np.where(known, values.astype(np.float64), np.nan)
    words: list[str | None] = [str(value) for value in values.tolist()]
    for row in np.flatnonzero(~known).tolist():
        words[row] = None
    return Words.of(words)


def _are_single(column: Any) -> bool:
    """Whether every row of a column is a list of one value."""
    if list_kind(column.type) is None or column.null_count:
        return False
    compute = arrow().compute
    single = compute.equal(column.value_lengths(), 1)
    return bool(compute.all(single).as_py())


def read_others(table: Table, names: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Columns by name, and the number of rows. A CSV is read once, other tables once for every ``COLUMNS`` columns."""
    # Measurements are of no use here. If all columns are measurements, one is read for the number of rows.
    needed = [name for name in names if name not in table.measured] or list(names)[:1]
    columns = {name: GatheredColumn() for name in needed}
    # Every pass opens the table and reads the description of all its columns; a pass over a CSV reads the whole file.
    if table.is_text:
        left = needed
        width = max(1, len(left))
    else:
        left = _of_use(table, columns)
        width = COLUMNS
    count = table.count
    for start in range(0, len(left), width):
        some = left[start : start + width]
        rows = max(1, CELLS // len(some))
        for batch in table.batches(some, rows):
            for name in some:
                columns[name].add(batch.column(name))
            if count is not None and all(columns[name].why for name in some):
                break
        if count is None:
            count = columns[some[0]].rows
    found: dict[str, Any] = {}
    for name, column in columns.items():
        column.rows = count or 0
        found[name] = column.column(text=table.is_text)
    for name, class_names in table.class_names.items():
        if isinstance(found.get(name), np.ndarray):
            found[name] = with_names(found[name], class_names, f"{table.path}: {name}")
    for name in table.measured.intersection(names):
        found[name] = Unread((count or 0,), "float64", "numbers with decimals")
    return found, count or 0


def _of_use(table: Table, columns: dict[str, GatheredColumn]) -> list[str]:
    """The columns that may be of use, judged by their first rows. Long texts and pictures are not among them."""
    for batch in table.batches([*columns], FIRST_ROWS):
        for name, column in columns.items():
            column.add(batch.column(name))
        break
    left = [name for name, column in columns.items() if not column.why]
    if table.count is None and not left:
        left = [*columns][:1]  # one column has to be read for the number of rows
    for name in left:
        columns[name] = GatheredColumn()
    return left
