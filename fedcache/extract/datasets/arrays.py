"""``arrays:FILE``: images in a .npz, .npy or .h5 file, or in a folder of .npy files, with labels beside them.

Images are uint8, [N, H, W], [N, H, W, 1] or [N, H, W, 3], or with the channels first, which their shape tells; other
numbers are refused, with the line that converts them, because what they mean is not known. They are found as
``images``, ``image``, ``data`` or ``x``, labels as ``labels``, ``label``, ``target`` or ``y``, in any case, or by
``--images-key`` and ``--label-key``; names with a split in them, such as ``x_train``, ``test_images`` or ``val/image``,
make the split. ``domain`` and ``split`` are columns too, ``class_names`` the names of the classes. Every other column
with a value for each row becomes a group: ``--group-key hospital,scanner`` keeps only these.

Rows are read one at a time, a compressed array in blocks; nothing is ever unpickled. Each process unpacks a compressed
array once, so that ``np.savez`` makes faster files than ``np.savez_compressed``, of which images gain little.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.errors import UsageError
from fedcache.extract.datasets import columns, tree
from fedcache.extract.datasets.array_files import SUFFIXES, FileArray, read_arrays
from fedcache.extract.datasets.columns import Asked, TableRows
from fedcache.extract.datasets.dataset import Context, Dataset
from fedcache.extract.datasets.row_sources import RowLayout, layout_of
from fedcache.extract.digests import stat_key
from fedcache.extract.inputs import IMAGES
from fedcache.tables.foreign_files import ONE_OBJECT
from fedcache.tables.roles import CLASS_NAMES, find_column, words_in
from fedcache.tables.splits import NO_SPLIT, by_split, refuse_one_split
from fedcache.tables.words import Column, Unread, as_column, refuse_empty

_Columns = Mapping[str, FileArray]


def key(rest: str, context: Context) -> list[Any]:
    """The place, the columns that the spec names, and the stat of every file."""
    return ["arrays", *facts_of(columns.parse_rest(rest), context)]


def facts_of(asked: Asked, context: Context) -> list[Any]:
    """What a dataset of arrays depends on: the columns that its spec names, and the stat of every file."""
    path = locate(asked.place)
    if path.is_dir():
        return [asked.facts, tree.listing_digest(path, context.within(path))]
    return [asked.facts, stat_key(path)]


def load(rest: str, context: Context) -> Dataset:
    """The dataset of ``arrays:FILE``.

    Raises UsageError for a missing file, columns that make no sense and numbers that are no pixels, CorruptionError for
    a damaged file.
    """
    return load_arrays(
        PIXELS, f"arrays:{rest}", columns.parse_rest(rest), key(rest, context), context
    )


@dataclass(frozen=True)
class Reading:
    """What the rows of an array are."""

    holds: str  # images or rows
    usual: tuple[str, ...]  # usual names of their column
    fits: Callable[[FileArray], bool]  # whether an array of another name can be nothing else
    layout: Callable[
        [Sequence[int], np.dtype[Any], str], RowLayout
    ]  # of its shape and dtype; UsageError for others


PIXELS = Reading(
    IMAGES,
    columns.IMAGES,
    lambda array: array.dtype == np.uint8 and len(array.shape) in (3, 4),
    layout_of,
)


def load_arrays(
    reading: Reading, spec: str, asked: Asked, facts: list[Any], context: Context
) -> Dataset:
    """The dataset of a spec, whose ``place`` holds arrays of rows that mean what ``reading`` says; errors as ``load``.

    ``facts`` are what the digests depend on.
    """
    path = locate(asked.place)
    arrays = read_arrays(path, context)
    if asked.content and asked.content in arrays:
        with_rows = [name for name, array in arrays.items() if len(array.shape) > 1]
        refuse_one_split(asked.content, with_rows, str(path), "--images-key")
        tables: list[tuple[int | None, dict[str, FileArray]]] = [(None, dict(arrays))]
    else:
        hint = "--images-key NAME says which are meant"
        tables = by_split(
            arrays, lambda held: _rows_of(held, asked, reading) is not None, str(path), hint
        )
    if _rows_of(tables[0][1], asked, reading) is None:
        shapes = ", ".join(
            f"{name} {array.dtype} {list(array.shape)}" for name, array in list(arrays.items())[:8]
        )
        like = [name for name, array in arrays.items() if reading.fits(array)]
        missing = f"no column of {reading.holds}"
        if asked.content:
            missing = f"no column {asked.content!r}"
        elif len(like) > 1:
            missing = f"several columns that may be {reading.holds}"
        raise UsageError(
            f"{path} has {missing}; it holds {shapes or 'no arrays'}.",
            f"--images-key NAME says which are {reading.holds}",
        )
    parts = []
    how = ""
    class_names = None
    left_out: dict[str, Unread] = {}
    if len(tables) > 1:
        # Where splits are in the names of columns, those without one belong to no rows, but for the class names.
        _, others = tables.pop()
        listed = find_column(path, others, None, CLASS_NAMES, "")
        if listed is not None:
            class_names = words_in(as_column(others.pop(listed).column(f"{path}, {listed}")))
        left_out = {
            name: Unread(array.shape, str(array.dtype), NO_SPLIT) for name, array in others.items()
        }
    for split, held in tables:
        part, how = _part(split, held, asked, path, reading)
        parts.append(replace(part, left_out=left_out))
    return columns.assemble(
        spec,
        path,
        columns.numbered_parts(parts),
        asked=asked,
        class_names=class_names,
        how=how,
        facts=facts,
        context=context,
        holds=reading.holds,
    )


def locate(place: str) -> Path:
    """The file or folder of arrays that a spec names; UsageError where there is none."""
    path = Path(place).expanduser()
    if not place or not path.exists():
        raise UsageError(
            f"There is no {str(path) if place else 'path'!r} (seen from {Path.cwd()}); expected a "
            f"{', '.join(SUFFIXES)} file or a folder of .npy files.",
            "Give the path of the arrays: --dataset arrays:FILE",
        )
    if not path.is_dir() and path.suffix.lower() not in SUFFIXES:
        raise UsageError(
            f"{path} is no {', '.join(SUFFIXES)} file.",
            "np.savez('images.npz', images=images, labels=labels)   makes one",
        )
    refuse_empty(path)
    return path


def _rows_of(held: _Columns, asked: Asked, reading: Reading) -> str | None:
    """The column of images or rows: named, of a usual name, or the only one that can be nothing else."""
    if asked.content:
        if asked.content in held:
            return asked.content
        return None
    usual = find_column(reading.holds, held, None, reading.usual, "--images-key")
    if usual is not None and len(held[usual].shape) > 1:
        return usual
    like = [name for name, array in held.items() if reading.fits(array)]
    if len(like) == 1:
        return like[0]
    return None


def _part(
    split: int | None, held: dict[str, FileArray], asked: Asked, path: Path, reading: Reading
) -> tuple[TableRows, str]:
    """The rows of a split, and a clause on what was read."""
    name = str(_rows_of(held, asked, reading))
    images = held.pop(name)
    layout = reading.layout(images.shape, images.dtype, f"{path}, {name}")
    count = images.shape[0]
    found: dict[str, Column] = {}
    for column, array in held.items():
        found[column] = _column(array, count, f"{path}, {column}")
    part = TableRows(columns.row_names(count, split), images.source(layout), found, split)
    return part, f"{reading.holds} {layout} from {name}"


def _column(array: FileArray, count: int, where: str) -> Column:
    """An array beside the images, as a column; one of another shape is not read."""
    if len(array.shape) != 1 and array.shape[1:] != (1,):
        what = "one value"
        if array.dtype.hasobject:
            what = ONE_OBJECT
        if array.shape and array.shape[0] == count:
            what = f"{int(np.prod(array.shape[1:])):,} values a row"
        elif array.shape:
            what = f"{array.shape[0]:,} values for {count:,} rows"
        return Unread(array.shape, str(array.dtype), what)
    try:
        return as_column(array.column(where).reshape(-1))
    except UsageError as error:
        if array.dtype.hasobject:  # which is no reason to refuse the images
            return Unread(array.shape, "objects", f"objects, which are not read: {error.message}")
        raise
