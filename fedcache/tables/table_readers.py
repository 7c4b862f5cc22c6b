"""Reads the columns of a table (``table_files``) in batches of rows: features, and all other columns.

Features are one column of lists, one column of texts such as "[0.1, 0.2]", or one column for each dimension (f0 ..
f511). Features stay in the file. Of the other columns, only the values that fedcache can use are kept in memory.
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
"""Every integer with at most this many digits fits into a float without rounding."""

BATCH = 1 << 16
"""Number of rows in one batch, for a single column of words or numbers."""

MANY_NUMBERS = 16
"""A table with at least this many columns of numbers probably contains features, even if no name says so."""

COLUMNS = 4096
"""Maximum number of columns of words and numbers that are read in one pass over a table."""

CELLS = 16 * BATCH
"""Maximum number of cells in one batch."""

FIRST_ROWS = 64
"""Number of rows, the first ones, that show whether a column contains long texts or pictures."""

NOT_FEATURES = ("y", "label", "labels", "target", "class", "category", "id", "index", "fold")
"""Words before the numbers of numbered columns that are never features: label0 and label1, for example, are labels."""


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
    # The columns of the features if there is one for each dimension; otherwise ().
    wide = _family(table, features)
    matrices = [name for name in table.types if _is_matrix(table, name, features)]
    if not wide and not matrices:
        _refuse_almost_features(table, features)
    of_features = [*matrices, *wide]
    distinct = {*of_features}
    others = [name for name in table.types if name not in distinct]
    # If all columns are features, one of them is read, because ``read_others`` also counts the rows.
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
    """Text features [C, D] from the metadata of a parquet file that ``export`` wrote.

    Raises ValueError for damaged metadata.
    """
    rows, width = entry["shape"]
    raw = base64.b64decode(entry["float32"], validate=True)
    return np.frombuffer(raw, "<f4").reshape(rows, width)


# Which columns are features.


def _is_matrix(table: Table, name: str, features: Sequence[str]) -> bool:
    """Whether a column holds features: lists of floats, or texts of lists under a usual or a requested name."""
    inner = list_kind(table.types[name])
    if inner is not None and arrow().types.is_floating(inner):
        return True
    # Words such as "[0.1, 0.2]" are features only if the column has a usual name or the user names it.
    if not are_words(table.types[name]) or is_binary(table.types[name]):
        return False
    if not is_feature(name) and name not in features:
        return False
    return _first_is_list(table, name)


def _first_is_list(table: Table, name: str) -> bool:
    batch = next(table.batches([name], 64), None)
    return batch is not None and is_list_text(batch.column(0))


# Name of a numbered column, such as f0, emb_1 or x[2]: a word and a number.
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
    """Families of numeric columns whose names are a word and then 0, 1, 2, ..: word -> columns in order.

    The numbers may begin with any number, but must not have a gap.
    """
    families = {}
    for prefix, by_number in _numbered(types).items():
        count = len(by_number)
        without_gap = count > 1 and max(by_number) - min(by_number) == count - 1
        if without_gap and all(is_number_kind(types[name]) for name in by_number.values()):
            families[prefix] = tuple(by_number[number] for number in sorted(by_number))
    return families


def _family(table: Table, requested: Sequence[str]) -> tuple[str, ...]:
    """The columns of the features, in order, if the table has one column per dimension; otherwise ().

    Raises UsageError if several families of columns may be the features.
    """
    families = _families(table.types)
    for word in requested:
        for prefix, names in families.items():
            # The word is one column of the family, or the prefix of the family if no column has this name.
            is_prefix = word not in table.types and word.rstrip("_.- ") == prefix
            if word in names or is_prefix:
                return names
    # A column of lists, or of texts of lists, that is called like features comes before numbered columns.
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
        raise UsageError(
            f"{table.path} has several columns that could be the features: {shown}.", hint
        )
    return next(iter(chosen.values()), ())


def _are_usual(prefix: str) -> bool:
    """Whether numbered columns with this prefix are usually the dimensions of features."""
    return prefix.lower() in ("", "f", "x", "dim", "d") or is_feature(prefix)


def _refuse_almost_features(table: Table, requested: Sequence[str]) -> None:
    """Raise UsageError for numbered columns that would be features if none were missing and none held words.

    The error names the missing column, or the column that holds words and the row of its first word. Many columns of
    numbers whose names give no role are refused too.
    """
    path = table.path
    types = table.types
    if not requested and any(name.lower() in TEXTS for name in types):
        return  # a table of texts, which has no features
    if all(map(arrow().types.is_null, types.values())):
        return  # the table has no rows, so ``read_table`` refuses it
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
        # The name of the first column with the number of the missing one.
        missing = re.sub(r"\d+(?=\]?$)", str(min(lacking)), first)
        raise UsageError(
            f"{path}: {missing} is missing between {first} and {names[-1]}, so these columns are not used as "
            "features.",
            f"Add the column {missing}, or number the columns without a gap.",
        )
    numeric = [name for name, kind in types.items() if is_number_kind(kind)]
    unnamed = [name for name in numeric if not has_a_meaning(name)]
    if not requested and len(unnamed) >= MANY_NUMBERS:
        raise _named_dimensions(table, numeric, unnamed)


def _named_dimensions(
    table: Table, numeric: Sequence[str], unnamed: Sequence[str]
) -> FedcacheError:
    """The error for a table whose dimensions have names of their own, such as genes, with code that numbers them.

    ``numeric`` are all columns of numbers, and ``unnamed`` those of them whose names give no role.
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
    with_roles = [name for name in numeric if has_a_meaning(name)]
    count = len(unnamed)
    return UsageError(
        f"{path} has {count:,} columns of numbers, and their names are not numbered: {some_names(unnamed, 3)}. "
        "fedcache cannot tell which are dimensions of the features.",
        conversion(
            [
                "import pandas",
                f"table = pandas.read_{reader}({str(path)!r}{options})",
                f"numbers = table.select_dtypes('number').columns.drop({with_roles!r})  # or a list of columns",
                "table = table.rename(columns={name: f'f{i}' for i, name in enumerate(numbers)})",
                f"table.to_parquet({str(out)!r})",
            ],
            f"fedcache ingest {shell_word(out)} --name NAME",
        ),
    )


def _no_numbers(table: Table, name: str) -> FedcacheError:
    """The error for a dimension of features that does not hold numbers, with the row of its first word."""
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
    problem = f"contains {table.types[name]}, not numbers"
    if arrow().types.is_null(table.types[name]):
        problem = "is empty in all rows"
    return UsageError(f"{path}: {name} {problem}.", "Write numbers there, or drop the column.")


_DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+([eE][+-]?\d+)?")


# Features, block by block.


def _float_of(kind: Any) -> np.dtype[Any]:
    """The dtype to which features of arrow's type ``kind`` are converted."""
    if arrow().types.is_floating(kind):
        dtype: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
        return dtype
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
    """The features in a column of lists, or of texts of lists; they stay in the file."""
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
    """The length of the first list that is not empty; 0 if all are empty."""
    if list_kind(column.type) is not None:
        return next(filter(None, column.value_lengths().to_pylist()), 0)
    return next((len(numbers_in(word)) for word in column.to_pylist() if word), 0)


def _list_parts(
    table: Table, name: str, shape: tuple[int, ...], rows: int
) -> Iterator[NDArray[Any]]:
    """Blocks [n, *shape] of a column of lists, or of texts of lists. Empty rows and empty values become NaN."""
    width = math.prod(shape)
    for batch in table.batches([name], rows):
        column = batch.column(0)
        if list_kind(column.type) is not None:
            values = _lists(table.path, name, column, width)
        else:
            values = _texts(table.path, name, column, width)
        yield values.reshape(len(column), *shape)


def _lists(path: Path, name: str, column: Any, width: int) -> NDArray[Any]:
    """The values [n, width] of a column of lists; UsageError unless each list has ``width`` numbers."""
    is_empty = np.asarray(column.is_null())
    lengths = np.asarray(column.value_lengths().fill_null(width))
    if (lengths != width).any():
        raise _uneven(path, name, {width, *lengths.tolist()})
    # ``flatten`` leaves out empty rows, so ``values`` has only the values of the other rows.
    values = np.asarray(column.flatten().to_numpy(zero_copy_only=False))
    if not is_empty.any():
        return values.reshape(len(column), width)
    out = np.full((len(column), width), np.nan, values.dtype)
    out[~is_empty] = values.reshape(-1, width)
    return out


def _texts(path: Path, name: str, column: Any, width: int) -> NDArray[Any]:
    """The values [n, width] of a column of texts of lists; UsageError unless each text has ``width`` numbers."""
    # All rows are read at once if all texts have the same form, otherwise row by row.
    at_once = _all_texts(column, width)
    if at_once is not None:
        return at_once
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
    """The values [n, width] of texts "[0.1, 0.2]" with ``width`` numbers each; None if a text has another form.

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
    """The error for a column of lists of different ``lengths``."""
    shown = sorted(lengths)[:4]
    return UsageError(
        f"{path}: the rows of {name} have lengths {shown}.",
        "Every row needs the same number of values.",
    )


# All other columns.


@dataclass
class GatheredColumn:
    """One column while its batches are read: numbers, dates, or words as codes."""

    code_of: dict[str, int] = field(default_factory=dict)  # word -> code, by first occurrence
    parts: list[NDArray[Any]] = field(default_factory=list)  # values or codes of each batch
    # for each batch of integers: which rows have a value, because integers have no NaN
    known: list[NDArray[np.bool_]] = field(default_factory=list)
    rows: int = 0  # number of rows so far
    kind: str = "null"  # arrow's type, for messages
    words: bool = False  # whether ``parts`` are codes of words
    why: str = ""  # why the column is of no use. After this is known, no values are kept.

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
            are_whole = np.isfinite(known) & (known == np.rint(known))
            if not are_whole.all():
                self.why = "numbers with decimals"
            self.parts.append(values)
        elif types.is_integer(kind):
            self.parts.append(np.asarray(column.fill_null(0)))
            self.known.append(np.asarray(column.is_valid()))
        elif types.is_date(kind) or types.is_timestamp(kind):
            times = column.cast(pa.timestamp("us"))
            self.parts.append(times.to_numpy(zero_copy_only=False))
        elif _are_single(column):
            self.rows -= len(column)  # ``add`` counts these rows again
            self.add(column.flatten())
        elif not types.is_null(kind):
            self.why = self.kind
            if list_kind(kind) is not None:
                self.why = "lists"

    def _add_words(self, encoded: Any, spelling: Callable[[str], str]) -> None:
        """Add the rows of a dictionary-encoded column; ``spelling`` converts each word, such as true to True."""
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
                code = self.code_of.setdefault(spelling(word), len(self.code_of))
            translated.append(code)
        # A row without a word gets an index of its own, which is translated to -1.
        codes = np.asarray(encoded.indices.fill_null(len(translated)))
        translated.append(-1)
        self.parts.append(np.array(translated, np.int32)[codes])

    def column(self, *, text: bool) -> Column:
        """The column of all rows; in a ``text`` file, which has no types, its words may become numbers."""
        if self.why:
            return Unread((self.rows,), self.kind, self.why)
        if not self.parts:
            return Words(np.full(self.rows, -1, np.int32), ())
        values = np.concatenate(self.parts)
        if self.words:
            column = Words(values, tuple(self.code_of))
            if text:
                return column.typed()
            return column
        if self.known:
            known = np.concatenate(self.known)
            if not known.all():
                return _integers_with_gaps(values, known)
        if values.dtype.kind == "M":
            return dates_of(values)
        return as_column(values)


def _integers_with_gaps(values: NDArray[Any], known: NDArray[np.bool_]) -> Column:
    """Integers [N], some of them missing, as floats with NaN, or as words if a float would round an integer."""
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
    # Measurements are of no use here. If all columns are measurements, one is read to count the rows.
    needed = [name for name in names if name not in table.measured] or list(names)[:1]
    columns = {name: GatheredColumn() for name in needed}
    # Every pass opens the table and reads the description of all its columns; a pass over a CSV reads the whole file.
    if table.is_text:
        to_read = needed
        width = max(1, len(to_read))
    else:
        to_read = _of_use(table, columns)
        width = COLUMNS
    count = table.count
    for start in range(0, len(to_read), width):
        of_pass = to_read[start : start + width]
        rows = max(1, CELLS // len(of_pass))
        for batch in table.batches(of_pass, rows):
            for name in of_pass:
                columns[name].add(batch.column(name))
            # The rest of the pass is skipped if no column is of use, unless it has to count the rows.
            if count is not None and all(columns[name].why for name in of_pass):
                break
        if count is None:
            count = columns[of_pass[0]].rows
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
    """The columns that may be of use, judged by their first rows: not long texts or pictures.

    Replaces each of them in ``columns``, so that it is read from its first row again.
    """
    for batch in table.batches([*columns], FIRST_ROWS):
        for name, column in columns.items():
            column.add(batch.column(name))
        break
    useful = [name for name, column in columns.items() if not column.why]
    if table.count is None and not useful:
        useful = [*columns][:1]  # one column has to be read to count the rows
    for name in useful:
        columns[name] = GatheredColumn()
    return useful
