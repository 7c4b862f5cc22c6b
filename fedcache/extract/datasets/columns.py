"""Parses the columns that a spec names, and makes datasets of images that are rows of a file rather than files.

The package ``tables`` decides what each column means, as for embeddings. A column is found by its usual name, or named
in the spec: ``arrays:cells.npz?images=slides&label=grade&group=hospital``. The options ``--images-key``,
``--label-key`` and ``--group-key`` write these words into the spec.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import UsageError, shell_word, unknown
from fedcache.extract.datasets import dataset
from fedcache.extract.datasets.dataset import Context, Dataset, Source
from fedcache.extract.datasets.kinds import CONTENT
from fedcache.extract.recipe import IMAGES, TEXTS
from fedcache.extract.recipe import slug as safe
from fedcache.parsing import listed
from fedcache.store.samples import complete_split
from fedcache.tables.roles import (
    ColumnChoice,
    Roles,
    candidates_sentence,
    read_roles,
    unused_sentence,
)
from fedcache.tables.splits import SPLIT_NAMES, TRAIN
from fedcache.tables.words import Column, Unread, joined_columns, objects_of, some_names, stem_of

READING = 6
"""Version of the interpretation of columns. If this version is raised, fedcache reads all columns again, but remembered
digests of images stay valid. If ``dataset.READING`` is raised, these digests become invalid too."""

IMAGE_NAMES = ("images", "image", "imgs", "img", "pixels", "data", "x")
"""Usual names of the column of images, compared without case; the first name that the file has is used."""

LABEL = ".label"
"""Name of the labels that belong to no column, such as the labels of pairs (image, label)."""

OPTIONS = {
    "label": "--label-key",
    "split": "--split-key",
    "domain": "--domain-key",
    "group": "--group-key",
    "no-label": "--no-label",
    "unlabelled": "--unlabelled",
}
"""Word of a spec -> the option that writes the word, for every kind of dataset."""


@dataclass(frozen=True)
class DatasetRequest:
    """The part of a spec after its kind: a place, and the columns that it names."""

    place: str
    content: str = ""  # column of images, texts or rows; found by its usual name when empty
    choice: ColumnChoice = field(default_factory=ColumnChoice)
    given: Mapping[str, str] = field(default_factory=dict)  # every word of the spec with its value

    @property
    def facts(self) -> list[list[str]]:
        """The words of the spec, as JSON values for the facts that determine a dataset."""
        return [list(pair) for pair in sorted(self.given.items())]


@dataclass(frozen=True)
class TableRows:
    """Rows that follow one another in the files, with their columns."""

    names: Sequence[str]  # [n] names of the rows inside the dataset
    source: Source  # row -> image
    # all columns except the one of the images
    columns: Mapping[str, Column] = field(default_factory=dict)
    split: int | None = None  # split code of all rows; None if no name of a file or column gives it
    left_out: Mapping[str, Unread] = field(default_factory=dict)  # columns that belong to no rows


def request_for(parts: Sequence[TableRows]) -> DatasetRequest:
    """The request of a spec that names no columns: the labels are those that come with the rows, if there are any."""
    label = None
    if any(LABEL in part.columns for part in parts):
        label = LABEL
    return DatasetRequest("", choice=ColumnChoice(label=label))


def keys_of(kind: str) -> dict[str, str]:
    """Word of a spec -> option that writes it, or "" for none. The word for images, texts, rows or paths is first."""
    return {CONTENT[kind]: "--images-key", **OPTIONS, "name": ""}


def parse_rest(rest: str, kind: str) -> DatasetRequest:
    """``FILE?images=A&label=B&group=C,D`` as a place and columns.

    A path that exists with its question mark is a place without columns. In the name of a column ``&`` is written %26
    and ``%`` is written %25.

    Raises UsageError for a word that is not in ``keys_of``, is given twice or has no value.
    """
    keys = keys_of(kind)
    if "?" not in rest or Path(rest).expanduser().exists():
        return DatasetRequest(rest)
    place, _, tail = rest.rpartition("?")
    # Paths and values may hold question marks. The columns begin at a question mark that a word such as label= follows:
    # the first one behind an existing path, else the first one.
    words = "|".join(map(re.escape, keys))
    marks = [*re.finditer(rf"\?(?=({words})=)", rest)]
    if marks:
        behind_paths = [mark for mark in marks if Path(rest[: mark.start()]).expanduser().exists()]
        chosen = (behind_paths or marks)[0]
        place = rest[: chosen.start()]
        tail = rest[chosen.end() :]
    found = {}
    for piece in tail.split("&"):
        word, _, value = piece.partition("=")
        if word not in keys:
            first_key = next(iter(keys))
            hint = f"For example FILE?{first_key}=NAME&label=grade"
            raise unknown("key after '?'", word, keys, hint=hint)
        if word in found or not value:
            problem = "no value"
            if word in found:
                problem = "twice"
            raise UsageError(f"{rest!r} gives {word} {problem}.", "For example ?label=grade")
        found[word] = value.replace("%26", "&").replace("%25", "%")
    groups = None
    if "group" in found:
        groups = tuple(listed(found["group"]))
    choice = ColumnChoice(
        label=found.get("label"),
        split=found.get("split"),
        row_name=found.get("name"),
        domain=found.get("domain"),
        groups=groups,
        no_label=tuple(listed(found.get("no-label", ""))),
        unlabelled=found.get("unlabelled", "no") != "no",
    )
    content = found.get(CONTENT[kind], "")
    return DatasetRequest(place, content, choice, found)


def in_a_spec(column: str) -> str:
    """The name of a column as it is written in a spec: ``&`` as %26, and ``%`` as %25."""
    return column.replace("%", "%25").replace("&", "%26")


def with_keys(spec: str, options: Mapping[str, str | None]) -> str:
    """The spec, followed by the columns that ``options`` such as ``{"--label-key": "grade"}`` name.

    Raises UsageError for a kind of dataset without columns.
    """
    given = {option: value for option, value in options.items() if value}
    if not given:
        return spec
    kind, _, rest = spec.partition(":")
    # Options are refused if this kind of dataset has no word for them, because they would be ignored.
    words = {}
    if kind in CONTENT:
        words = {option: word for word, option in keys_of(kind).items() if option}
    for option in given:
        if option not in words:
            with_columns = ", ".join(f"{name}:" for name in CONTENT)
            raise UsageError(
                f"{option} applies only to a single dataset with columns ({with_columns}), not to {spec}.",
                "For several datasets as domains, give the columns of each: "
                "a=arrays:a.npz?label=grade,b=arrays:b.npz?label=y",
            )
    # A spec that names columns already gets more of them behind an &.
    mark = "?"
    if parse_rest(rest, kind).place != rest:
        mark = "&"
    written = "&".join(f"{words[option]}={in_a_spec(value)}" for option, value in given.items())
    return f"{spec}{mark}{written}"


def left_out_words(names: Sequence[str]) -> str:
    """A clause on files that are left out because their split is unknown; "" if there are none."""
    if not names:
        return ""
    return f"; these files are left out, because their split is unknown: {some_names(names, 4)}"


def refuse_without_training(
    where: Path, splits: Iterable[int | None], left_out: Sequence[str]
) -> None:
    """Raise UsageError if the names of some files give a split, none of them train, and others would be left out."""
    if left_out and TRAIN not in splits:
        names = some_names(left_out, 4)
        raise UsageError(
            f"{where}: some file names contain the name of a split, but none contains train. The other files would "
            f"be left out, because their split is unknown: {names}.",
            "Rename the files of training rows so that their names contain train, for example train-0000.",
        )


def joined_parts(
    parts: Sequence[TableRows],
) -> tuple[dict[str, Column], NDArray[np.uint8] | None, dict[str, Unread]]:
    """The columns of all parts [N], the split of each row [N], and the columns that belong to no rows.

    The splits are None if no part has a split. Otherwise, the rows of parts without a split are training rows.
    """
    lengths = []
    codes = []
    has_splits = False
    names: dict[str, None] = {}
    left_out: dict[str, Unread] = {}
    for part in parts:
        lengths.append(len(part.names))
        names |= dict.fromkeys(part.columns)
        left_out |= part.left_out
        if part.split is None:
            codes.append(TRAIN)
        else:
            codes.append(part.split)
            has_splits = True
    columns = {
        name: joined_columns([part.columns.get(name) for part in parts], lengths) for name in names
    }
    splits = None
    if has_splits:
        splits = np.repeat(np.array(codes, np.uint8), lengths)
    return columns, splits, left_out


def from_rows(
    spec: str,
    place: Path,
    names: Sequence[str],
    source: Source,
    values: Mapping[str, Sequence[Any]],
    context: Context,
    *,
    key: Sequence[Any] | None = None,
    label: str | None = None,
    groups: tuple[str, ...] | None = None,
    class_names: Sequence[str] | None = None,
    holds: str = IMAGES,
) -> Dataset:
    """Dataset of the rows that your own reader has found, in the order of their names.

    Columns have the same meaning as in every file that fedcache reads. Columns such as label, split and domain are
    found by their names, and columns with repeated values become groups. fedcache lists the other columns as not used.

    Args:
        spec: as the user wrote it.
        place: file or folder; the dataset gets its name.
        names: [N] names of the rows, all different.
        source: reads the rows, in the numbering of ``names``.
        values: column -> [N] values of any kind; None for a missing one.
        context: the context that the reader received.
        key: values that change if the content of a row may have changed. With a key, fedcache remembers the digests of
            the contents; without a key, it reads every row each time.
        label: column of labels; found by its usual names when None.
        groups: columns that become groups; None for all columns with repeated values.
        class_names: by number, for labels that are numbers.
        holds: images, texts or rows.

    Raises UsageError if columns contradict each other, if there are no rows, or if two rows have the same name.
    """
    columns = {column: objects_of(cells) for column, cells in values.items()}
    rows = TableRows(names, source, columns)
    choice = ColumnChoice(label=label, groups=groups)
    request = DatasetRequest(str(place), choice=choice)
    # Without a key nothing is remembered, so every row is read here.
    uid = None
    if key is None:
        uid, _ = dataset.contents(source, names, context)
    kind = spec.partition(":")[0]
    return assemble(
        spec,
        place,
        [rows],
        request=request,
        class_names=class_names,
        how=f"{holds} of {kind}",
        facts=list(key or ()),
        context=context,
        uid=uid,
        holds=holds,
    )


def assemble(
    spec: str,
    where: Path,
    parts: Sequence[TableRows],
    *,
    request: DatasetRequest,
    class_names: Sequence[str] | None = None,
    how: str,
    facts: list[Any],
    context: Context,
    mirror: bool = True,
    uid: NDArray[np.uint8] | None = None,
    holds: str = IMAGES,
) -> Dataset:
    """The dataset of rows found in files, in the order of their names; it always has a test set.

    Args:
        spec: as the user wrote it.
        where: file or folder; the dataset gets its name.
        parts: the rows; their names must differ.
        request: the columns that the spec names.
        class_names: by number, if the files have them outside of their columns.
        how: a clause that describes for the user how the rows were read.
        facts: values that change if the content of a row may have changed (``read_uids``).
        context: remembered digests and progress.
        mirror: whether a mirrored image keeps its class.
        uid: [N, 16] uids in the order of ``parts``, if they are known already.
        holds: images, texts or rows.

    Raises UsageError for columns that make no sense, or no rows.
    """
    names = [name for part in parts for name in part.names]
    if not names:
        raise UsageError(f"{where} holds no {holds}.", "Give a file with at least one row")
    # Columns of all parts are joined, so that one file may lack a column that others have.
    columns, splits, left_out = joined_parts(parts)
    roles = read_roles(
        where,
        columns,
        len(names),
        request.choice,
        splits=splits,
        names=names,
        classes=class_names,
        left_out=left_out,
    )
    # Rows are not copied: the joined source looks up the part of each row, and the number of the row in this part.
    source = dataset.joined_source([(part.source, len(part.names)) for part in parts])
    return dataset_of_rows(
        spec,
        where,
        source,
        roles,
        how=how,
        facts=facts,
        context=context,
        mirror=mirror,
        uid=uid,
        holds=holds,
    )


def dataset_of_rows(
    spec: str,
    where: Path,
    source: Source,
    roles: Roles,
    *,
    how: str,
    facts: list[Any],
    context: Context,
    mirror: bool = True,
    uid: NDArray[np.uint8] | None = None,
    holds: str,
) -> Dataset:
    """The dataset of rows whose columns have roles, in the order of the rows' names; arguments as of ``assemble``.

    ``source`` has the rows in the order of ``roles``. Raises UsageError for repeated names, and for no training rows.
    """
    order = dataset.order_of_names(roles.names)
    names = [roles.names[row] for row in order]
    for name, following in itertools.pairwise(names):
        if name == following:
            raise UsageError(
                f"{where} has two {holds} named {name!r}; names must differ.",
                "Rename or remove one of them",
            )
    # Most readers return rows in the order of their names. Their source is read without a table of row numbers.
    ordered = source
    if not (order[:-1] < order[1:]).all():
        ordered = dataset.RowsSource(source, order)
    if uid is None:
        uid, unreadable = dataset.read_uids(ordered, names, facts, context)
    else:
        uid = uid[order]
        unreadable = 0
    label = roles.labels[order]
    domain = dataset.domain_column(roles.domains[order], roles.domain_names)
    given = None
    if roles.splits is not None:
        given = roles.splits[order]
    all_rows = np.ones(len(label), bool)
    split, note = complete_split(given, label, domain, uid, all_rows, str(where), holds)
    if roles.label_key is None:
        how += ", no labels"
        likely = next(iter(roles.may_be_labels), None)
        if likely is not None:
            candidates = candidates_sentence(roles.may_be_labels)
            option = f"--label-key {shell_word(likely)}"
            how += f"; possible labels: {candidates}; {option}"
    elif roles.label_key != LABEL:
        how += f", labels from {roles.label_key}"
    place = where.name or str(where)
    notes = [
        f"{place}: {how}",
        dataset.counts(split, roles.classes, roles.domain_names, holds),
        note,
        _unreadable(unreadable, holds),
    ]
    for line in (*roles.notes, *unused_sentence(roles.unused)):
        notes.append(line.rstrip("."))
    stem = where.name
    if where.is_file():
        stem = stem_of(where)
    return Dataset(
        spec=spec,
        slug=safe(stem)[:64].lstrip(".") or holds,
        classes=roles.classes,
        domains=roles.domain_names,
        names=tuple(names),
        label=label,
        domain=domain,
        split=split,
        uid=uid,
        template=None,
        reading="; ".join(note for note in notes if note),
        source=ordered,
        mirror=mirror,
        groups={name: group.take(order) for name, group in roles.groups.items()},
        unused=roles.unused,
        may_be_labels=roles.may_be_labels,
        holds=holds,
    )


def _unreadable(rows: int, holds: str) -> str:
    """A note on rows that cannot be read; "" for none."""
    if not rows:
        return ""
    if holds == TEXTS:
        return f"{rows:,} without a text, which will be skipped and listed"
    return f"{rows:,} cannot be read and will be skipped and listed"


def row_names(count: int, split: int | None) -> list[str]:
    """``train/0000000``, ``train/0000001`` and so on; without a split the numbers alone.

    All numbers have the same length, so that the names sort in the order of the rows.
    """
    prefix = ""
    if split is not None:
        prefix = f"{SPLIT_NAMES[split]}/"
    width = max(7, len(str(count)))
    return [f"{prefix}{i:0{width}d}" for i in range(count)]


def columns_of_records(records: Sequence[Mapping[str, Any]]) -> dict[str, Column]:
    """The fields of N records as columns [N]; a record may lack a field that others have."""
    names = dict.fromkeys(itertools.chain.from_iterable(records))
    return {name: objects_of([record.get(name) for record in records]) for name in names}


def numbered_parts(parts: Sequence[TableRows]) -> list[TableRows]:
    """The same parts with new names; the numbers continue over the parts of one split."""
    rows = Counter[int | None]()
    for part in parts:
        rows[part.split] += len(part.names)
    unused_names = {split: iter(row_names(count, split)) for split, count in rows.items()}
    numbered = []
    for part in parts:
        names = list(itertools.islice(unused_names[part.split], len(part.names)))
        numbered.append(replace(part, names=names))
    return numbered
