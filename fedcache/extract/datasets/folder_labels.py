"""Class, domain and split of every image, from what the levels of its folders mean, or from a CSV that lists images.

A level whose names are all in {train, test, val, valid, validation} is the split, the last level left is the class,
and what remains is the domain. A single top folder is entered first, because archives usually have one and the
directory they were made from does not; a split or a lone class is not entered, since it means something.

A layout may give a level another name, such as client: the level is then a group of that name, as is every column of a
CSV that is none of the four.

A CSV has the columns path, and as wanted label, domain and split. Paths are relative to the folder of the CSV and stay
below it, because they are also the names of the rows, and a name must not depend on where the data lies.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedcache.errors import FedcacheError, UsageError, closest, unknown
from fedcache.extract.datasets.dataset import ONE_DOMAIN, TEST, TRAIN, VALIDATION
from fedcache.extract.datasets.tree import name_of
from fedcache.parsing import SAFE
from fedcache.tables.groups import usable_group_name
from fedcache.tables.roles import has_a_meaning

SPLITS = {"train": TRAIN, "test": TEST, "val": VALIDATION, "valid": VALIDATION, "validation": VALIDATION}
"""Split names, compared without case."""

_ROLES = ("split", "domain", "class", "*")
_COLUMNS = ("path", "label", "domain", "split")
MISSPELT = 0.75
"""Likeness from which on a word is taken for a known one that was misspelt: lable is label, client is not split."""
_FIRST_LINE = "Its first line should be: path,label,domain,split"


@dataclass(frozen=True)
class Labels:
    """What is known of each row."""

    layout: str  # role of each folder level, joined by ``/``, or the columns that are used
    classes: list[str]  # [N] class name of each row; empty unknown
    domains: list[str]  # [N] domain name of each row
    splits: list[int] | None  # [N] split codes, or None when nothing says what they are
    groups: dict[str, list[str]] = field(default_factory=dict)  # [N] words by the name of a group; empty unknown


def parse_layout(text: str) -> tuple[str, ...]:
    """``split/domain/class`` as roles, ``*`` for a level without meaning and any other word for a group of that name.

    Raises UsageError for all but one class and one split, for a level named twice, and for what is no name.
    """
    roles = tuple(text.strip("/").split("/"))
    for role in roles:
        if role in _ROLES:
            continue
        if near := closest(role, _ROLES, MISSPELT):
            raise UsageError(
                f"Unknown layout level {role!r}. Did you mean {near!r}?",
                "Levels are split, domain, class and *; another word, such as client, makes a group of that name.",
            )
        if not SAFE.fullmatch(role) or roles.count(role) > 1:
            raise UsageError(
                f"The layout {text!r} has a level {role!r}: names are letters, digits, '.', '_' and '-', each once.",
                "--layout client/class",
            )
        usable_group_name(role)
    if roles.count("class") != 1 or roles.count("split") > 1:
        raise UsageError(
            f"The layout {text!r} has {roles.count('class')} class levels and {roles.count('split')} split levels; "
            "expected exactly one class and at most one split.",
            "For example --layout domain/class",
        )
    return roles


def enter_top_folder(names: Sequence[str], keep: int = 1) -> int:
    """How many characters of names belong to single top folders that are entered, leaving ``keep`` folder levels."""
    if not names:
        return 0
    depth = min(name.count("/") for name in names)
    first = names[0].split("/")
    length = 0
    for folder in first[: max(0, depth - keep)]:
        prefix = f"{folder}/"
        if folder.lower() in SPLITS or not all(name.startswith(prefix, length) for name in names):
            break
        length += len(prefix)
    return length


def infer(names: Sequence[str], layout: str | None, *, where: str) -> Labels:
    """Class, domain and split of every image of ``where``, from the folders below the entered top folder.

    Raises UsageError when images lie at different depths, or directly at the top, or there is one class.
    """
    roles = parse_layout(layout) if layout is not None else None
    folders = [tuple(name.split("/")[:-1]) for name in names]
    depths = {len(f): name for name, f in zip(names, folders, strict=True)}
    wanted = f"{len(roles)} (--layout {layout})" if roles else "the same number for every image, at least 1"
    if len(depths) > 1 or 0 in depths or (roles is not None and len(roles) not in depths):
        found = "; ".join(f"{n} above {name!r}" for n, name in sorted(depths.items())[:3])
        raise UsageError(
            f"The images of {where} do not lie in one folder per class: folders found: {found}; expected {wanted}.",
            "Move the odd ones out, give --layout (for example domain/class), "
            "or list the images in a CSV with the columns path,label,domain,split and use folder:FILE.csv",
        )
    levels = [set(level) for level in zip(*set(folders), strict=True)]
    if roles is None:
        roles = _guess(levels)
    labels = _labels(folders, roles, where)
    if len(set(labels.classes)) < 2:
        raise UsageError(
            f"{where} was read as {labels.layout} and has one class, {labels.classes[0]!r}; expected at least two.",
            "If the folders mean something else, say so with --layout; images without classes can be listed in a CSV "
            "with an empty label column",
        )
    return labels


def _guess(levels: Sequence[set[str]]) -> tuple[str, ...]:
    roles = ["domain"] * len(levels)
    splits = [i for i, level in enumerate(levels) if all(name.lower() in SPLITS for name in level)]
    if splits and len(levels) > 1:
        roles[splits[0]] = "split"
    last = max(i for i, role in enumerate(roles) if role == "domain")
    roles[last] = "class"
    return tuple(roles)


def _labels(folders: Sequence[tuple[str, ...]], roles: tuple[str, ...], where: str) -> Labels:
    at_class = roles.index("class")
    at_split = roles.index("split") if "split" in roles else None
    at_domain = [i for i, role in enumerate(roles) if role == "domain"]
    splits = None
    if at_split is not None:
        hint = f"{where} was read as {'/'.join(roles)}; correct --layout"
        splits = _split_codes([folder[at_split] for folder in folders], hint)
    domains = ["/".join(f[i] for i in at_domain) for f in folders] if at_domain else [ONE_DOMAIN] * len(folders)
    groups = {role: [f[i] for f in folders] for i, role in enumerate(roles) if role not in _ROLES}
    return Labels("/".join(roles), [f[at_class] for f in folders], domains, splits, groups)


def _split_codes(words: Sequence[str], hint: str) -> list[int]:
    for word in words:
        if word.lower() not in SPLITS:
            raise unknown("split", word, SPLITS, hint=hint)
    return [SPLITS[word.lower()] for word in words]


def read_csv(path: Path) -> tuple[list[str], dict[str, list[str]]]:
    """The relative paths that a CSV lists, in order of their names, and its other columns by name.

    Raises UsageError with the line, for a wrong column or path, or a path given twice.
    """
    rows = sorted(_rows(path), key=lambda row: name_of(row["path"]))
    paths = [row["path"] for row in rows]
    if not any((path.parent / p).is_file() for p in paths):
        raise UsageError(
            f"None of the {len(rows):,} images of {path} exists, for example {path.parent / paths[0]}.",
            "Paths are relative to the folder of the CSV: put it there, or write the paths from there",
        )
    return paths, {name: [row[name] for row in rows] for name in rows[0] if name != "path"}


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = [line for line in csv.reader(file, strict=True) if line]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path} is not a CSV in UTF-8: {error}.", _FIRST_LINE) from None
    columns = [c.strip() for c in lines[0]] if lines else []
    columns = ["path" if c.lower() == "path" else c for c in columns]
    lowered = {c.lower() for c in columns}
    for column in columns:
        # Another column is a group, unless it looks like one of the four that is missing.
        if not has_a_meaning(column) and (near := closest(column.lower(), set(_COLUMNS) - lowered, MISSPELT)):
            raise UsageError(f"Unknown CSV column {column!r}. Did you mean {near!r}?", _FIRST_LINE)
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
