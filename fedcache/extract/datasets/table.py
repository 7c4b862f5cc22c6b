"""A CSV that lists images: columns path, and as wanted label, domain and split.

Paths are relative to the folder of the CSV and stay below it, because they are also the names of the rows, and a
name must not depend on where the data lies. An empty label means unknown.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from fedcache.errors import FedcacheError, UsageError, unknown
from fedcache.extract.datasets.dataset import ONE_DOMAIN
from fedcache.extract.datasets.layout import SPLITS, Labels
from fedcache.extract.datasets.tree import name_of

_COLUMNS = ("path", "label", "domain", "split")
_FIRST_LINE = "Its first line should be: path,label,domain,split"


@dataclass(frozen=True)
class Table:
    """The rows of a CSV, sorted by name.

    Attributes:
        paths: [N] relative paths as written.
        names: [N] the same as names of rows.
        labels: what the other columns say; an empty class is unknown.
    """

    paths: list[str]
    names: list[str]
    labels: Labels


def read(path: Path) -> Table:
    """The table in a CSV file.

    Raises:
        UsageError, with the line, for a wrong column, path or split, or a path given twice.
    """
    rows = sorted(_rows(path), key=lambda row: name_of(row["path"]))
    used = [c for c in _COLUMNS[1:] if any(row.get(c) for row in rows)]
    splits = None
    if "split" in used:
        splits = []
        for row in rows:
            if row["split"].lower() not in SPLITS:
                raise unknown("split", row["split"], SPLITS, hint=f"Give every row of {path} a split, or none of them")
            splits.append(SPLITS[row["split"].lower()])
    labels = Labels(
        layout=f"columns {', '.join(['path', *used])}",
        classes=[row.get("label", "") for row in rows],
        domains=[row.get("domain", "") or ONE_DOMAIN for row in rows],
        splits=splits,
    )
    paths = [row["path"] for row in rows]
    if not any((path.parent / p).is_file() for p in paths):
        raise UsageError(
            f"None of the {len(rows):,} images of {path} exists, for example {path.parent / paths[0]}.",
            "Paths are relative to the folder of the CSV: put it there, or write the paths from there",
        )
    return Table(paths, [name_of(p) for p in paths], labels)


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = [line for line in csv.reader(file, strict=True) if line]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path} is not a CSV in UTF-8: {error}.", _FIRST_LINE) from None
    columns = [c.strip().lower() for c in lines[0]] if lines else []
    for column in columns:
        if column not in _COLUMNS:
            raise unknown("CSV column", column, _COLUMNS, hint=_FIRST_LINE)
    if "path" not in columns or len(set(columns)) != len(columns) or len(lines) < 2:
        raise UsageError(
            f"{path} has the columns {', '.join(columns) or '(none)'} and {max(0, len(lines) - 1):,} rows; "
            "expected a path column, no column twice, and at least one row.",
            _FIRST_LINE,
        )
    rows = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines[1:], start=1):
        if len(line) != len(columns):
            raise _wrong(path, number, f"has {len(line)} fields; expected {len(columns)}", "Quote fields with commas")
        row = {column: field.strip() for column, field in zip(columns, line, strict=True)}
        image = row["path"]
        if {"", ".", ".."} & set(image.split("/")) or "\0" in image:
            raise _wrong(
                path,
                number,
                f"has the path {image!r}; expected a plain path below {path.parent}",
                "Put the CSV into the folder that contains the images and write relative paths",
            )
        first = seen.setdefault(name_of(image), number)
        if first != number:
            raise _wrong(path, number, f"repeats the path {image!r} of row {first:,}", "List every image once")
        rows.append(row)
    return rows


def _wrong(path: Path, number: int, what: str, hint: str) -> FedcacheError:
    return UsageError(f"Row {number:,} of {path} {what}.", hint)
