"""Folders of images whose labels are in tables among them, ``metadata.csv`` or ``metadata.jsonl`` of Hugging Face.

A table has a column ``file_name`` with paths relative to its own folder, and a column of labels. The splits are in the
names of the folders: one table in each of train/ and test/, or one at the top with paths such as ``train/0001.png``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import UsageError
from fedcache.extract.datasets.image_lists import ImageList, Stems, parse_list
from fedcache.tables.roles import LABELS, ColumnChoice
from fedcache.tables.splits import SPLIT_WORDS
from fedcache.tables.words import Column, Words, joined_columns

TABLES = ("metadata.csv", "metadata.jsonl")
"""Names of tables among images, compared without case."""

FOLDER_CLASS = "folder"
"""Column that holds the folder of an image, where the tables have no labels."""


@dataclass(frozen=True)
class ListedImages:
    """The images that tables name, in the order of their names."""

    rows: list[int]  # [N] index into the names that were given
    columns: dict[str, Column]  # [N] by name, without the paths
    splits: NDArray[np.uint8] | None  # [N], None where folders do not say it
    ignored: Counter[str]  # images without a row, and rows without an image
    tables: list[str]  # names of the tables
    label: str | None  # column of labels, where it is not one of a usual name


def tables_among(others: Sequence[str]) -> list[str]:
    """The tables of labels among files that are no images."""
    return sorted(name for name in others if name.rpartition("/")[2].lower() in TABLES)


def listed_images(
    where: str,
    names: Sequence[str],
    tables: Sequence[str],
    read: Callable[[str], bytes],
    choice: ColumnChoice,
    path_column: str,
) -> ListedImages:
    """What tables say of images. ``names`` are those of the images, and ``read`` gives the bytes of a table.

    Raises UsageError for a table that names none of the images, and for paths that make no sense.
    """
    place = {name: row for row, name in enumerate(names)}
    by_folder: dict[str, list[str]] = {}
    for name in names:
        folder, _, last = name.rpartition("/")
        by_folder.setdefault(folder, []).append(last)
    lists: list[tuple[str, ImageList]] = []
    for table in tables:
        folder = table[: table.rfind("/") + 1]

        def exists(path: str, folder: str = folder) -> bool:
            return f"{folder}{path}" in place

        def names_in(inside: str, folder: str = folder) -> list[str]:
            return by_folder.get(f"{folder}{inside}".rstrip("/"), [])

        lists.append(
            (
                folder,
                parse_list(f"{where}/{table}", read(table), path_column, exists, Stems(names_in)),
            )
        )
    found: list[int] = []
    kept: list[list[int]] = []
    ignored: Counter[str] = Counter()
    for folder, one in lists:
        rows = [row for row, path in enumerate(one.paths) if f"{folder}{path}" in place]
        ignored["listed and not there"] += len(one.paths) - len(rows)
        found += [place[f"{folder}{one.paths[row]}"] for row in rows]
        kept.append(rows)
    if not found:
        raise UsageError(
            f"None of the images that {where}/{tables[0]} names is there, for example {lists[0][1].paths[0]}.",
            "Its paths are relative to the folder of the table.",
        )
    repeated = next((row for row, count in Counter(found).items() if count > 1), None)
    if repeated is not None:
        raise UsageError(
            f"Two tables of {where} name the image {names[repeated]}.", "List every image once"
        )
    ignored["not listed"] += len(names) - len(found)
    columns = _joined([one for _, one in lists], kept)
    splits = splits_of_folders([names[row] for row in found])
    label = None
    if (
        choice.label is None
        and not choice.unlabelled
        and not any(name.lower() in LABELS for name in columns)
    ):
        classes = _folders_below_splits([names[row] for row in found])
        if len(set(classes)) > 1 and FOLDER_CLASS not in columns:
            columns[FOLDER_CLASS] = Words.of(classes)
            label = FOLDER_CLASS
    return ListedImages(found, columns, splits, +ignored, list(tables), label)


def _joined(lists: Sequence[ImageList], kept: Sequence[Sequence[int]]) -> dict[str, Column]:
    """The columns of all lists one after another, of the rows that are kept."""
    lengths = [len(rows) for rows in kept]
    joined: dict[str, Column] = {}
    for name in dict.fromkeys(name for one in lists for name in one.columns):
        parts: list[Column | None] = []
        for one, rows in zip(lists, kept, strict=True):
            column = one.columns.get(name)
            parts.append(None if column is None else taken(column, rows))
        joined[name] = joined_columns(parts, lengths)
    return joined


def taken(column: Column, rows: Sequence[int]) -> Column:
    """Some rows of a column."""
    at = np.array(rows, dtype=np.int64)
    if isinstance(column, Words):
        return Words(column.codes[at], column.words)
    if isinstance(column, np.ndarray):
        return column[at]
    return column


def splits_of_folders(names: Sequence[str]) -> NDArray[np.uint8] | None:
    """The split of each image by the first of its folders that is named like one; None where one has no such folder."""
    found: list[int] = []
    for name in names:
        codes = [
            SPLIT_WORDS[folder.lower()]
            for folder in name.split("/")[:-1]
            if folder.lower() in SPLIT_WORDS
        ]
        if not codes:
            return None
        found.append(codes[0])
    return np.array(found, dtype=np.uint8)


def _folders_below_splits(names: Sequence[str]) -> list[str]:
    """The last folder of each image that is not named like a split; "" for none."""
    found = []
    for name in names:
        folders = [folder for folder in name.split("/")[:-1] if folder.lower() not in SPLIT_WORDS]
        found.append(folders[-1] if folders else "")
    return found
