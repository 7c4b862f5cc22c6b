"""Opens tables, to be read in batches of rows: parquet, CSV and TSV (also .gz), feather, and JSON."""

from __future__ import annotations

import codecs
import gzip
import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from fedcache.errors import FedcacheError, UsageError, shell_word
from fedcache.optional import need_arrow
from fedcache.parsing import parse_json, whole_number
from fedcache.tables.foreign_files import conversion
from fedcache.tables.words import Words, as_words, ending_of, named_twice, objects_of, stem_of

TEXT_BLOCK = 8 << 20
"""Bytes of a CSV file that are parsed at a time; also the limit for one row."""

EMPTY_CELLS = ["", "NA", "N/A", "n/a", "nan", "NaN", "NAN", "null", "NULL", "None", "<NA>", "?"]
"""Cells of a CSV file that mean NaN in columns of numbers."""


class Batches(Protocol):
    """Reads a table from its beginning."""

    def __call__(self, columns: Sequence[str], rows: int, *, floats: bool = False) -> Iterator[Any]:
        """Batches of at most ``rows`` rows of ``columns``; cells of a CSV are words, or floats with ``floats``."""


@dataclass(frozen=True)
class Table:
    """A file of rows and named columns."""

    path: Path
    types: dict[str, Any]  # column -> arrow's type; for a CSV, the type in its first block
    batches: Batches
    count: int | None  # number of rows; None if the file has to be read to count them
    meta: dict[str, Any] = field(default_factory=dict)  # what ``export`` wrote next to the columns
    is_text: bool = False  # whether it is a CSV, whose cells are words until the whole file is read
    # column that is a ClassLabel of Hugging Face -> its class names
    class_names: dict[str, list[str]] = field(default_factory=dict)
    # columns of a CSV whose first rows hold floats that are not whole
    measured: frozenset[str] = frozenset()
    separator: str = ""  # between the cells of a CSV
    encoding: str = "utf8"  # of a CSV: utf8 or utf-16


def arrow() -> Any:
    """The module pyarrow, with its submodules that read tables. Raises MachineError if it is not installed."""
    need_arrow("A table (parquet, feather, Arrow or CSV)")
    import pyarrow
    import pyarrow.compute
    import pyarrow.csv
    import pyarrow.feather
    import pyarrow.parquet

    return pyarrow


def _checked(path: Path, schema: Any) -> dict[str, Any]:
    """Types by column. Raises UsageError for repeated names, and for extension types, which may name code to run."""
    pa = arrow()
    for column in schema:
        metadata = column.metadata or {}
        has_extension = b"ARROW:extension:name" in metadata
        if has_extension or isinstance(column.type, pa.BaseExtensionType):
            raise UsageError(
                f"{path}: column {column.name} has an extension type.",
                "Write plain numbers, words and lists of numbers.",
            )
    types: dict[str, Any] = {}
    for column in schema:
        if column.name in types:
            raise named_twice(path, column.name)
        types[column.name] = column.type
    return types


def hugging_face_features(schema: Any) -> dict[str, dict[str, Any]]:
    """Hugging Face's description of each column of a file, by name; {} if there is none or it is damaged."""
    metadata = schema.metadata or {}
    try:
        content = parse_json(metadata.get(b"huggingface", b"{}"))
    except ValueError:
        return {}
    match content:
        case {"info": {"features": features}}:
            return usable_features(features)
    return {}


def usable_features(found: Any) -> dict[str, dict[str, Any]]:
    """Descriptions of columns as Hugging Face writes them; class names that are not words are left out."""
    if not isinstance(found, dict):
        return {}
    features = {name: feature for name, feature in found.items() if isinstance(feature, dict)}
    for feature in features.values():
        names = feature.get("names")
        # If each row has a list of one value, the description of the values.
        inner = feature.get("feature")
        if isinstance(inner, dict):
            names = inner.get("names")
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            feature["names"] = names
        else:
            feature.pop("names", None)
    return features


def class_names_of(features: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """The class names of every column that lists them."""
    return {name: feature["names"] for name, feature in features.items() if feature.get("names")}


def _table(path: Path, schema: Any, batches: Batches, count: int | None) -> Table:
    """A table with the types and descriptions of its columns that arrow's schema holds."""
    metadata = schema.metadata or {}
    meta = dict(parse_json(metadata.get(b"fedcache", b"{}")))
    names = class_names_of(hugging_face_features(schema))
    return Table(path, _checked(path, schema), batches, count, meta, class_names=names)


def _parquet(path: Path) -> Table:
    pa = arrow()

    def batches(columns: Sequence[str], rows: int, *, floats: bool = False) -> Iterator[Any]:
        with pa.parquet.ParquetFile(path) as file:
            # pyarrow never holds more than one row group in memory.
            yield from file.iter_batches(rows, columns=list(columns))

    with pa.parquet.ParquetFile(path) as file:
        return _table(path, file.schema_arrow, batches, file.metadata.num_rows)


def _feather(path: Path) -> Table:
    pa = arrow()

    def batches(columns: Sequence[str], rows: int, *, floats: bool = False) -> Iterator[Any]:
        numbers = [names.index(column) for column in columns]
        options = pa.ipc.IpcReadOptions(included_fields=numbers)
        with pa.OSFile(str(path)) as raw, pa.ipc.open_file(raw, options=options) as file:
            for number in range(file.num_record_batches):
                batch = file.get_batch(number)
                batch.validate(full=True)
                for first in range(0, len(batch), rows):
                    yield batch.slice(first, rows)

    with pa.OSFile(str(path)) as raw, pa.ipc.open_file(raw) as file:
        table = _table(path, file.schema, batches, None)
    # All columns in the order of the file. The function ``batches`` above reads this variable.
    names = list(table.types)
    return table


def _text(path: Path) -> Table:
    """A CSV. Dimensions of features are read as floats, other cells as words, whose type is found when all are read."""
    pa = arrow()
    csv = pa.csv
    dialect = dialect_of(path)
    parsing = csv.ParseOptions(delimiter=dialect.separator, newlines_in_values=True)
    reading = csv.ReadOptions(
        block_size=TEXT_BLOCK, encoding=dialect.encoding, skip_rows=dialect.skip
    )

    def opened_csv(types: dict[str, Any], columns: Sequence[str] | None) -> Any:
        converting = csv.ConvertOptions(
            column_types=types,
            include_columns=columns,
            strings_can_be_null=False,
            null_values=EMPTY_CELLS,
        )
        return csv.open_csv(
            path, read_options=reading, parse_options=parsing, convert_options=converting
        )

    def batches(columns: Sequence[str], rows: int, *, floats: bool = False) -> Iterator[Any]:
        kind = pa.string()
        if floats:
            kind = pa.float64()
        with opened_csv(dict.fromkeys(columns, kind), columns) as file:
            for batch in file:
                for start in range(0, len(batch), rows):
                    yield batch.slice(start, rows)

    # Only the first block is read, to find the names and types of the columns. {}: pyarrow chooses the types; None: all
    # columns.
    with opened_csv({}, None) as file:
        schema = file.schema
        first = next(iter(file), None)
    # A first line of numbers is a row, except for numbers without a gap, which can be the names of dimensions.
    are_numbers = all(is_number(name) for name in schema.names)
    if are_numbers and not _are_consecutive(sorted(schema.names, key=float)):
        raise UsageError(
            f"{path} begins with a row of numbers, but the first line must name the columns.",
            "The first line must name the columns, for example f0,f1,f2,label",
        )
    types = _checked(path, schema)
    measured = set()
    if first is not None:
        for name, kind in types.items():
            column = first.column(name)
            if pa.types.is_floating(kind):
                values = column.drop_null().to_numpy(zero_copy_only=False)
                fractions = values[np.isfinite(values)] % 1
                if fractions.any():
                    measured.add(name)
            elif pa.types.is_string(kind) and is_list_text(column):
                types[name] = pa.list_(pa.float64())
    return Table(
        path,
        types,
        batches,
        None,
        is_text=True,
        measured=frozenset(measured),
        separator=dialect.separator,
        encoding=dialect.encoding,
    )


def is_number(word: str) -> bool:
    """Whether a word is a finite number."""
    try:
        return math.isfinite(float(word))
    except ValueError:
        return False


def _are_consecutive(words: Sequence[str]) -> bool:
    """Whether the words are consecutive whole numbers in order."""
    numbers = [whole_number(word) for word in words]
    first = numbers[0]
    return first is not None and numbers == [*range(first, first + len(words))]


def is_list_text(column: Any) -> bool:
    """Whether the first word of a column that is not empty is a list of numbers in brackets."""
    word = next(filter(None, column.to_pylist()), "")
    try:
        return bool(numbers_in(word))
    except ValueError:
        # Lists that numpy shortened are refused when they are read.
        return word.strip().startswith("[") and "..." in word


def is_number_kind(kind: Any) -> bool:
    """Whether a column of arrow's type ``kind`` holds integers or floats."""
    types = arrow().types
    return bool(types.is_floating(kind) or types.is_integer(kind))


def list_kind(kind: Any) -> Any:
    """The type of the values in lists of arrow's type ``kind``; None if it is no type of lists."""
    types = arrow().types
    if types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind):
        return kind.value_type
    return None


def numbers_in(word: str) -> list[float]:
    """The numbers of a text in brackets, with commas (JSON) or without (numpy). Raises ValueError for another text."""
    inner = word.strip()
    if not (inner.startswith("[") and inner.endswith("]")):
        raise ValueError(f"{word[:40]!r} is not a list of numbers")
    words = inner[1:-1].replace(",", " ").split()
    if "..." in words:
        raise ValueError(
            "numpy shortened the rows when it wrote them as text; write lists: x.tolist()"
        )
    return [math.nan if word in ("null", "None") else float(word) for word in words]


def is_binary(kind: Any) -> bool:
    """Whether a column of arrow's type ``kind`` holds bytes."""
    types = arrow().types
    return bool(
        types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)
    )


def are_words(kind: Any) -> bool:
    """Whether a column of arrow's type ``kind`` holds words, or bytes, which may be words."""
    types = arrow().types
    return bool(
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_string_view(kind)
        or is_binary(kind)
    )


def _json(path: Path) -> Table:
    """A file of records, one per line or in a list, or LEAF's JSON with ``users`` and ``user_data``.

    The whole file is read into memory.
    """
    with path.open("rb") as file:
        start = file.read(4096).lstrip()
    whole = None
    if path.suffix.lower() != ".jsonl":
        whole = _whole_json(path, start)
    if whole is None:
        with path.open("rb") as file:
            table = _table_of_records([parse_json(line) for line in file if line.strip()])
    elif isinstance(whole, dict):
        table = _table_of_columns(_leaf_columns(path, whole))
    else:
        table = _table_of_records(whole)
    types = _checked(path, table.schema)

    def batches(columns: Sequence[str], rows: int, *, floats: bool = False) -> Iterator[Any]:
        yield from table.select(list(columns)).combine_chunks().to_batches(rows)

    return Table(path, types, batches, table.num_rows)


def _whole_json(path: Path, start: bytes) -> Any:
    """A list of records, or a dict of LEAF; None for a file with one record per line. Raises UsageError for others."""
    try:
        found = parse_json(path.read_bytes())
    except ValueError:
        if start.startswith(b"{"):
            return None  # the file is no single value, so it has one record per line
        raise
    if isinstance(found, list) and all(isinstance(record, dict) for record in found):
        return found
    if isinstance(found, dict):
        if isinstance(found.get("user_data"), dict):
            return found
        if not any(isinstance(value, dict | list) for value in found.values()):
            return [found]
    out = path.with_name(f"{path.stem}.parquet")
    lines = ["import pandas", f"pandas.read_json({str(path)!r}).to_parquet({str(out)!r})"]
    raise UsageError(
        f"{path} cannot be read. It must contain a list of records, as pandas writes with to_json(FILE, "
        "orient='records'), or the users of a LEAF dataset.",
        conversion(lines, f"fedcache ingest {shell_word(out)} --name NAME"),
    )


def _table_of_records(records: Sequence[dict[str, Any]]) -> Any:
    columns: dict[str, list[Any]] = {}
    for name in dict.fromkeys(chain.from_iterable(records)):
        columns[name] = [record.get(name) for record in records]
    return _table_of_columns(columns)


def _table_of_columns(columns: Mapping[str, Sequence[Any]]) -> Any:
    """Python values as a table. A column becomes words if it mixes words and numbers, or if floats would round it."""
    pa = arrow()
    found = {}
    for name, values in columns.items():
        column = objects_of(values)
        if isinstance(column, Words):
            values = as_words(column)
        found[name] = pa.array(values)
    return pa.table(found)


def _leaf_columns(path: Path, content: dict[str, Any]) -> dict[str, list[Any]]:
    """The rows of all users of LEAF as columns; ``x`` is renamed ``text`` if it holds texts.

    Raises UsageError for a user whose x and y are not lists of the same length.
    """
    found: dict[str, list[Any]] = {"x": [], "y": [], "client": []}
    for user, rows in content["user_data"].items():
        x = rows.get("x")
        y = rows.get("y")
        if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
            raise UsageError(
                f"{path}: x and y of the user {user!r} are missing, or differ in length.",
                "Write the file with LEAF again.",
            )
        found["x"] += x
        found["y"] += y
        found["client"] += [user] * len(x)
    if found["x"] and isinstance(found["x"][0], str):
        return {"text": found["x"], "y": found["y"], "client": found["client"]}
    return found


TABLES: dict[str, Callable[[Path], Table]] = {
    ".parquet": _parquet,
    ".csv": _text,
    ".csv.gz": _text,
    ".tsv": _text,
    ".tsv.gz": _text,
    ".feather": _feather,
    ".arrow": _feather,
    ".jsonl": _json,
    ".json": _json,
}


# The rest of this module finds the dialect of a CSV, its separator and encoding, for every command that reads a CSV.
#
# Excel writes semicolons as separators in countries with decimal commas. Its format "Unicode text" has tabs, in UTF-16.
# A first line ``sep=;`` may name the separator.


PIECE = 64 << 10
"""Bytes of a text file that are decoded at a time."""

DIALECT_BYTES = 8 << 20
"""Bytes of a file that are decoded to find its dialect; also the limit for its first line."""

SEPARATORS = (",", ";", "\t")
MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
"""Possible first bytes of a file in UTF-16, which Excel writes."""

_CODECS = {"utf8": "utf-8-sig", "utf-16": "utf-16"}
"""Encoding of a CSV file -> Python's name of it."""

# A first line that names the separator.
_NAMED = re.compile(r"sep=(.)\s*", re.IGNORECASE)
_QUOTED = re.compile(r'"[^"]*"')


@dataclass(frozen=True)
class Dialect:
    """How a CSV is written."""

    separator: str
    encoding: str  # utf8 or utf-16
    skip: int  # lines before the one that names the columns


def dialect_of(path: Path) -> Dialect:
    """The dialect of a CSV or TSV, also of .gz. Raises UsageError for an empty file and for another encoding."""
    with open_bytes(path) as file:
        return _dialect(file, path)


def decoded(raw: bytes, path: Path) -> tuple[str, Dialect]:
    """The text and the dialect of a CSV that is not compressed; errors as ``dialect_of``."""
    dialect = _dialect(io.BytesIO(raw), path)
    try:
        return raw.decode(_CODECS[dialect.encoding]), dialect
    except UnicodeDecodeError:
        raise other_encoding(path) from None


def _dialect(file: IO[bytes], path: Path) -> Dialect:
    piece = file.read(PIECE)
    if not piece:
        raise UsageError(
            f"{path} is empty.", "The first line must name the columns, for example f0,f1,f2,label"
        )
    encoding = "utf8"
    if piece.startswith(MARKS):
        encoding = "utf-16"
    decoder = codecs.getincrementaldecoder(_CODECS[encoding])()
    head = ""
    # Much more than the first line is decoded, so that another encoding is refused before an error says that columns
    # are missing.
    for _ in range(DIALECT_BYTES // PIECE):
        try:
            text = decoder.decode(piece)
        except UnicodeDecodeError:
            raise other_encoding(path) from None
        if "\n" not in head:
            head += text
        piece = file.read(PIECE)
        if not piece:
            break
    # The first line that is not empty.
    head = next(iter(head.lstrip("\r\n").splitlines()), "")
    named = _NAMED.fullmatch(head)
    if named is not None:
        return Dialect(named[1], encoding, 1)
    if ending_of(path).startswith(".tsv"):
        return Dialect("\t", encoding, 0)
    # The separator is the most frequent one of ``SEPARATORS`` in the first line, outside of quotes.
    bare = _QUOTED.sub("", head)
    separator = max(SEPARATORS, key=bare.count)
    return Dialect(separator, encoding, 0)


def open_bytes(path: Path) -> IO[bytes]:
    """The bytes of a file, decompressed if its name ends in .gz."""
    if ending_of(path).endswith(".gz"):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    return path.open("rb")


def other_encoding(path: Path) -> FedcacheError:
    """The error for a CSV that is neither UTF-8 nor UTF-16, with the lines that convert it."""
    ending = ending_of(path)
    out = path.with_name(f"{stem_of(path)}-utf8{ending.removesuffix('.gz')}")
    raw = f"pathlib.Path({str(path)!r}).read_bytes()"
    modules = "pathlib"
    if ending.endswith(".gz"):
        modules = "gzip, pathlib"
        raw = f"gzip.decompress({raw})"
    lines = [
        f"import {modules}",
        f"text = {raw}.decode('cp1252')  # of Excel in Western Europe",
        f"pathlib.Path({str(out)!r}).write_text(text, 'utf-8', newline='')",
    ]
    return UsageError(
        f"{path} is not in UTF-8.", conversion(lines, f"give {out} instead of {path.name}")
    )
