"""The laws that every dataset reader must keep, on a dataset that it reads."""

from __future__ import annotations

import json
import pickle
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.extract import datasets
from fedcache.extract.datasets.dataset import Context, Dataset, Source, uid_of
from fedcache.extract.digests import DigestMemory
from fedcache.extract.image_files import BadImage
from fedcache.extract.recipe import IMAGES
from fedcache.tables.splits import TRAIN
from fedcache.testing.law import by_name, require

ROWS = 64
"""Approximate number of evenly spaced rows of a dataset that the laws read."""

THREADS = 4


def open_dataset(spec: str) -> Dataset:
    """The dataset of a spec, read without remembered digests.

    Raises UsageError for a spec that names no dataset, and the errors of its reader.
    """
    with tempfile.TemporaryDirectory() as folder:
        return datasets.open_dataset(spec, Context(DigestMemory(Path(folder))))


def _digests(source: Source, rows: Iterable[np.integer]) -> list[bytes | None]:
    """The digest of the content of each of these rows; None for a row that cannot be read."""
    return [_digest(source, int(row)) for row in rows]


def _digest(source: Source, row: int) -> bytes | None:
    try:
        return uid_of(source.read(row))
    except BadImage:
        return None


def _some_rows(found: Dataset) -> np.ndarray:
    """Row numbers, evenly spaced over the dataset."""
    return np.arange(0, len(found), max(1, len(found) // ROWS))


def a_second_reading_is_the_same_dataset(spec: str) -> None:
    """Reading a dataset twice gives the same digest, name of the store and groups."""
    first = open_dataset(spec)
    second = open_dataset(spec)
    same = first.digest == second.digest
    require(same, "a second reading gives other names, labels, splits or contents")
    same = first.slug == second.slug
    require(same, f"the store is called {first.slug!r} and then {second.slug!r}")
    require(list(first.groups) == list(second.groups), "a second reading gives other groups")


def columns_have_a_value_for_every_row(spec: str) -> None:
    """Labels, domains and splits have one legal code for each row, and at least one row is for training."""
    found = open_dataset(spec)
    rows = len(found)
    # Each column with its least and its greatest code; -1 is the label of an unlabelled row.
    columns = (
        ("label", found.label, -1, len(found.classes) - 1),
        ("domain", found.domain, 0, len(found.domains) - 1),
        ("split", found.split, 0, 2),
    )
    for name, codes, least, greatest in columns:
        shape = codes.shape
        require(shape == (rows,), f"{name} has shape {shape}, but there are {rows} rows")
        legal = (codes >= least) & (codes <= greatest)
        require(bool(legal.all()), f"{name} has codes outside of {least} to {greatest}")
    require(len(set(found.classes)) == len(found.classes), "two classes have the same name")
    require(bool((found.split == TRAIN).any()), "no row is for training")


def a_row_is_known_by_its_content(spec: str) -> None:
    """``uid`` of a row is the digest of the result of ``read``, so that changed content is extracted again."""
    found = open_dataset(spec)
    rows = _some_rows(found)
    for row, digest in zip(rows, _digests(found.source, rows), strict=True):
        if digest is not None:
            same = digest == found.uid[row].tobytes()
            require(same, f"the uid of row {row} is not the digest of its content")


def rows_are_of_the_kind_that_it_holds(spec: str) -> None:
    """At least one row can be read, and an image is the bytes of its file or uint8 pixels."""
    found = open_dataset(spec)
    some = _some_rows(found).tolist()
    rows = [row for row in some if _digest(found.source, row) is not None]
    require(bool(rows), "no row can be read")
    if found.holds == IMAGES:
        item: Any = found.source.read(rows[0])
        pixels = isinstance(item, np.ndarray) and item.dtype == np.uint8 and item.ndim in (2, 3)
        kind = type(item).__name__
        legal = isinstance(item, bytes) or pixels
        require(legal, f"an image is a {kind}, not bytes or uint8 pixels")


def workers_read_the_same(spec: str) -> None:
    """A pickled copy of the source, read by several threads in any order, gives the same contents."""
    found = open_dataset(spec)
    rows = _some_rows(found)
    copy = pickle.loads(pickle.dumps(found.source))  # nosec B301
    # Threads read the rows backwards, so a source that depends on its last position fails.
    with ThreadPoolExecutor(THREADS) as pool:
        backwards = list(pool.map(lambda row: _digest(copy, int(row)), rows[::-1]))
    same = backwards[::-1] == _digests(found.source, rows)
    require(same, "a pickled copy of the source reads other contents")


def a_part_has_the_rows_of_the_whole(spec: str) -> None:
    """The rows that ``--limit`` keeps have the same contents and labels as in the whole dataset."""
    found = open_dataset(spec)
    part = found.part(max(1, len(found) // 2))
    # The part may have its rows in any order, so they are found in the whole by their names.
    row_of = {name: row for row, name in enumerate(found.names)}
    rows = np.array([row_of[name] for name in part.names])
    same = (part.uid == found.uid[rows]).all()
    require(bool(same), "a part has other contents than the whole")
    same = (part.label == found.label[rows]).all()
    require(bool(same), "a part has other labels than the whole")


def the_key_is_plain_and_stays(spec: str) -> None:
    """``key`` gives plain JSON values, which do not change while the files do not change."""
    with tempfile.TemporaryDirectory() as folder:
        context = Context(DigestMemory(Path(folder)))
        first = json.dumps(datasets.facts_of(spec, context))
        second = json.dumps(datasets.facts_of(spec, context))
    require(first == second, "the key of the same files differs between two calls")


DATASET_LAWS = by_name(
    a_second_reading_is_the_same_dataset,
    columns_have_a_value_for_every_row,
    a_row_is_known_by_its_content,
    rows_are_of_the_kind_that_it_holds,
    workers_read_the_same,
    a_part_has_the_rows_of_the_whole,
    the_key_is_plain_and_stays,
)
"""All laws of datasets by name."""
