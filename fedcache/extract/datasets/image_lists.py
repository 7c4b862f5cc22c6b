"""Reads lists of images: files of CSV, TSV or JSON lines whose rows name image files.

A list is given by the user, or found among the images (``TABLES`` below).

The column of paths has one of the usual names (``PATHS``), or is named by ``--images-key``. Paths are relative to the
folder of the list and stay below it. They are also the names of the rows, so they must not depend on the place of the
data. Backslashes of Windows are read as slashes, and a name without an ending is completed if one file alone has it.
Every other column has the same meaning as in any other table (``tables.roles``).
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import FedcacheError, UsageError, unknown
from fedcache.extract.datasets.tree import is_plain, name_of
from fedcache.extract.image_files import EXTENSIONS
from fedcache.parsing import parse_json
from fedcache.tables.roles import LABELS, ColumnChoice
from fedcache.tables.splits import SPLIT_WORDS
from fedcache.tables.table_files import decoded
from fedcache.tables.words import Column, Words, joined_columns, named_twice, objects_of, some_names

ENDINGS = (".csv", ".tsv", ".jsonl")
"""Endings of files that can list images."""

PATHS = (
    "path",
    "file_path",
    "filepath",
    "image_path",
    "img_path",
    "sample_path",
    "file_name",
    "filename",
    "file",
    "image_file",
    "image_name",
    "image",
    "img",
    "image_id",
    "img_id",
    "id",
)
"""Usual names of the column of paths, compared without case. The first column whose files exist is used."""

FIRST_LINE = "Its first line should be: path,label,domain,split"

_DRIVE = re.compile(r"[A-Za-z]:[\\/]")


@dataclass(frozen=True)
class ImageList:
    """Content of a list, in the order of its file."""

    paths: list[str]  # [N] relative to the list, with slashes
    column: str  # the column of paths
    columns: dict[str, Column]  # all other columns [N], by name

    def taken(self, rows: Sequence[int]) -> dict[str, Column]:
        """The columns, reduced to these rows."""
        at = np.array(rows, dtype=np.int64)
        found = {}
        for name, column in self.columns.items():
            if isinstance(column, Words):
                column = Words(column.codes[at], column.words)
            elif isinstance(column, np.ndarray):
                column = column[at]
            found[name] = column
        return found


def read_list(path: Path, path_column: str) -> ImageList:
    """The list in a file, whose images are below the folder of the file; ``path_column`` is the column of paths.

    Raises UsageError for a wrong or repeated path, with its row, and if none of the images exists.
    """
    folder = path.parent

    def exists(name: str) -> bool:
        return (folder / name).is_file()

    stems = Stems(lambda inside: _listed(folder / inside))
    found = parse_list(str(path), path.read_bytes(), path_column, exists, stems)
    if not any(map(exists, found.paths)):
        count = len(found.paths)
        example = folder / found.paths[0]
        raise UsageError(
            f"None of the {count:,} images of {path} exists, for example {example}.",
            "Paths are relative to the folder of the CSV file",
        )
    return found


def _listed(folder: Path) -> list[str]:
    """The names of the files in a folder; empty if the folder does not exist."""
    if folder.is_dir():
        return [file.name for file in folder.iterdir()]
    return []


class Stems:
    """Completes names of images that lack their ending; each folder is listed only once."""

    def __init__(self, names_in: Callable[[str], Sequence[str]]) -> None:
        self._names_in = names_in  # names of the files of a folder
        # folder -> name without ending -> files of images with this name
        self._images_of: dict[str, dict[str, list[str]]] = {}

    def completed(self, name: str) -> str:
        """The name with its ending, if exactly one image has this name; otherwise the same name."""
        folder, slash, last = name.rpartition("/")
        if folder not in self._images_of:
            by_stem: dict[str, list[str]] = {}
            for file in self._names_in(folder):
                stem, dot, ending = file.rpartition(".")
                if dot and f".{ending.lower()}" in EXTENSIONS:
                    by_stem.setdefault(stem, []).append(file)
            self._images_of[folder] = by_stem
        images = self._images_of[folder].get(last, [])
        if len(images) == 1:
            return f"{folder}{slash}{images[0]}"
        return name


def parse_list(
    where: str, raw: bytes, path_column: str, exists: Callable[[str], bool], stems: Stems
) -> ImageList:
    """A list from its bytes; errors as ``read_list``.

    ``exists`` says whether an image exists at a path relative to the list.
    """
    if where.lower().endswith(".jsonl"):
        columns = _records(where, raw)
    else:
        columns = _cells(where, raw)
    count = len(next(iter(columns.values()), []))
    if path_column:
        if path_column not in columns:
            raise unknown(
                f"column of {where}",
                path_column,
                columns,
                hint="Choose one of these columns with --images-key NAME",
            )
        possible = [path_column]
    else:
        # Reversed, so that the first of several names that differ only in capital letters is taken.
        lowered = {name.lower(): name for name in reversed([*columns])}
        possible = [lowered[name] for name in PATHS if name in lowered]
    if not possible or not count:
        names = some_names(columns) or "(none)"
        raise UsageError(
            f"{where} has the columns {names} and {count:,} rows; expected a path column and at least one row.",
            f"{FIRST_LINE}   or choose the column of paths with --images-key NAME",
        )
    # The first column that names an existing image is used; if no column does, the first of these possible columns.
    chosen = ""
    paths = []
    for column in possible:
        found = [_spelt(str(value).strip(), exists, stems) for value in columns[column]]
        names_images = any(map(exists, found))
        if names_images or not chosen:
            chosen = column
            paths = found
        if names_images:
            break
    _check(where, paths)
    others = {name: _typed(where, values) for name, values in columns.items() if name != chosen}
    return ImageList(paths, chosen, others)


def _spelt(path: str, exists: Callable[[str], bool], stems: Stems) -> str:
    """A path with slashes instead of backslashes, without a leading ``./``, completed by the ending of its file."""
    path = path.removeprefix("./")
    if exists(path):
        return path
    if "\\" in path and not _DRIVE.match(path):
        path = path.replace("\\", "/").removeprefix("./")
    _, dot, ending = path.rpartition(".")
    has_ending = (dot + ending).lower() in EXTENSIONS
    if exists(path) or not path or has_ending:
        return path
    return stems.completed(path)


def _check(where: str, paths: Sequence[str]) -> None:
    """Raise UsageError for invalid paths, paths that lead out of the folder of the list, and repeated paths."""
    seen: dict[str, int] = {}
    for number, image in enumerate(paths, start=1):
        if not is_plain(image) or _DRIVE.match(image):
            raise _wrong(
                where,
                number,
                f"has the path {image!r}; expected a relative path to a file below {Path(where).parent}",
                "Put the CSV file into the folder of the images and use relative paths",
            )
        # Paths are the names of the rows, so they are compared as names.
        first = seen.setdefault(name_of(image), number)
        if first != number:
            raise _wrong(
                where,
                number,
                f"repeats the path {image!r} of row {first:,}",
                "List every image once",
            )


def _wrong(where: str, number: int, problem: str, hint: str) -> FedcacheError:
    return UsageError(f"Row {number:,} of {where} {problem}.", hint)


def _cells(where: str, raw: bytes) -> dict[str, list[str]]:
    """Columns of words by name, from the cells of a CSV. Raises UsageError for uneven rows and repeated names."""
    text, dialect = decoded(raw, Path(where))
    stream = io.StringIO(text, newline="")
    try:
        cells = csv.reader(stream, delimiter=dialect.separator, strict=True)
        lines = [line for line in cells if line]
    except csv.Error as error:
        raise UsageError(f"{where} is not a CSV: {error}.", FIRST_LINE) from None
    # Some programs write lines before the line that names the columns.
    lines = lines[dialect.skip :]
    names = []
    if lines:
        names = [name.strip() for name in lines[0]]
    for name in names:
        if names.count(name) > 1:
            raise named_twice(where, name)
    rows = lines[1:]
    for number, row in enumerate(rows, start=1):
        if len(row) != len(names):
            problem = f"has {len(row)} fields; expected {len(names)}"
            hint = "Put fields that contain a comma in double quotes"
            raise _wrong(where, number, problem, hint)
    return {name: [row[at].strip() for row in rows] for at, name in enumerate(names)}


def _records(where: str, raw: bytes) -> dict[str, list[Any]]:
    """Columns of values by name, from one JSON object on each line. Raises UsageError for any other line."""
    records = []
    # Bytes are split only at line breaks; a text would also be split at U+2028, which a JSON string may contain.
    for number, line in enumerate(raw.splitlines(), start=1):
        try:
            text = line.decode("utf-8-sig")
            if text.strip():
                records.append(parse_json(text))
        except ValueError as error:
            raise UsageError(
                f"Line {number:,} of {where} is not JSON: {error}.",
                "Write one JSON object per line.",
            ) from None
    if not all(isinstance(record, Mapping) for record in records):
        raise UsageError(
            f"{where} contains lines that are not JSON objects.",
            'For example {"file_name": "1.png", "label": 3}',
        )
    names = dict.fromkeys(name for record in records for name in record)
    return {name: [record.get(name) for record in records] for name in names}


def _typed(where: str, values: Sequence[Any]) -> Column:
    """A column with the types of its JSON values, or, from a CSV, with the type that its words show."""
    if where.lower().endswith(".jsonl"):
        return objects_of(values)
    return Words.of(values).typed()


# The rest of this module reads folders of images that also contain tables of their labels (Hugging Face's ImageFolder).
# A table has a column ``file_name`` with paths relative to its own folder, and a column of labels. The names of folders
# give the splits: there is one table in each of train/ and test/, or one table at the top, with paths such as
# ``train/0001.png``.

TABLES = ("metadata.csv", "metadata.jsonl")
"""Names of tables of labels in a folder of images, compared without case."""

FOLDER_CLASS = "folder"
"""Column with the folder of each image, which gives the classes if the tables have no labels."""


@dataclass(frozen=True)
class ListedImages:
    """The images that tables list, in the order of the tables and their rows."""

    rows: list[int]  # [N] index into the names that ``listed_images`` received
    columns: dict[str, Column]  # [N] by name, without the paths
    splits: NDArray[np.uint8] | None  # [N] split codes; None if the folders do not give them
    ignored: Counter[str]  # number of images without a row, and of rows without an image
    label: str | None  # column of labels, if it has no usual name


def tables_among(others: Sequence[str]) -> list[str]:
    """The tables of labels among files that are no images."""
    return sorted(name for name in others if name.rpartition("/")[2].lower() in TABLES)


def listed_images(
    where: str,
    names: Sequence[str],
    tables: Mapping[str, bytes],
    choice: ColumnChoice,
    path_column: str,
) -> ListedImages:
    """The images called ``names`` that ``tables`` list, with the columns of the tables; ``tables`` has their bytes.

    Raises UsageError for tables that name none of the images, and for invalid paths.
    """
    row_of = {name: row for row, name in enumerate(names)}
    by_folder: dict[str, list[str]] = {}
    for name in names:
        folder, _, last = name.rpartition("/")
        by_folder.setdefault(folder, []).append(last)
    parts: list[dict[str, Column]] = []
    lengths: list[int] = []
    examples: list[str] = []
    listed_rows: list[int] = []
    ignored = Counter[str]()
    for table, raw in tables.items():
        # Paths of a table are relative to its own folder, which is "" or ends with a slash.
        folder = table[: table.rfind("/") + 1]

        # The default values bind the folder of this pass of the loop.
        def exists(path: str, folder: str = folder) -> bool:
            return f"{folder}{path}" in row_of

        def names_in(inside: str, folder: str = folder) -> list[str]:
            return by_folder.get(f"{folder}{inside}".rstrip("/"), [])

        images = parse_list(f"{where}/{table}", raw, path_column, exists, Stems(names_in))
        rows = [row for row, path in enumerate(images.paths) if exists(path)]
        ignored["listed but missing"] += len(images.paths) - len(rows)
        listed_rows += [row_of[f"{folder}{images.paths[row]}"] for row in rows]
        parts.append(images.taken(rows))
        lengths.append(len(rows))
        examples.append(images.paths[0])
    if not listed_rows:
        table = next(iter(tables))
        raise UsageError(
            f"None of the images in {where}/{table} exists, for example {examples[0]}.",
            "Its paths are relative to the folder of the table.",
        )
    # An image that two lines list would have two labels.
    for row, count in Counter(listed_rows).items():
        if count > 1:
            raise UsageError(
                f"Two tables of {where} list the image {names[row]}.", "List every image once"
            )
    ignored["not listed"] += len(names) - len(listed_rows)
    # Each column has the values of all tables, one table after another.
    columns = {
        name: joined_columns([part.get(name) for part in parts], lengths)
        for name in dict.fromkeys(name for part in parts for name in part)
    }
    listed = [names[row] for row in listed_rows]
    splits = splits_of_folders(listed)
    # If there is no column of labels, folders below the splits may be the classes.
    label = None
    has_labels = any(name.lower() in LABELS for name in columns)
    if choice.label is None and not choice.unlabelled and not has_labels:
        classes = _folders_below_splits(listed)
        if len(set(classes)) > 1 and FOLDER_CLASS not in columns:
            columns[FOLDER_CLASS] = Words.of(classes)
            label = FOLDER_CLASS
    # A unary plus removes reasons with a count of 0.
    return ListedImages(listed_rows, columns, splits, +ignored, label)


def splits_of_folders(names: Sequence[str]) -> NDArray[np.uint8] | None:
    """The split of each image by its first folder that is named like a split; None if an image has no such folder."""
    found = []
    for name in names:
        folders = name.lower().split("/")[:-1]
        codes = [SPLIT_WORDS[folder] for folder in folders if folder in SPLIT_WORDS]
        if not codes:
            return None
        found.append(codes[0])
    return np.array(found, dtype=np.uint8)


def _folders_below_splits(names: Sequence[str]) -> list[str]:
    """For each image, the last of its folders that is not named like a split; "" for none."""
    found = []
    for name in names:
        last = ""
        for folder in name.split("/")[:-1]:
            if folder.lower() not in SPLIT_WORDS:
                last = folder
        found.append(last)
    return found
