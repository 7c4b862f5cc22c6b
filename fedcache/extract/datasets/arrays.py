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
from fedcache.extract.datasets.dataset import SPLIT_WORDS, Context, Dataset
from fedcache.extract.datasets.row_sources import RowLayout, layout_of
from fedcache.extract.digests import stat_key
from fedcache.extract.inputs import IMAGES

_Columns = Mapping[str, FileArray]


def key(rest: str, context: Context) -> list[Any]:
    """The place, the columns that the spec names, and the stat of every file."""
    return ["arrays", *facts_of(columns.parse_rest(rest), context)]


def facts_of(asked: Asked, context: Context) -> list[Any]:
    """What a dataset of arrays depends on: the columns that its spec names, and the stat of every file."""
    path = locate(asked.place)
    named = [asked.images, asked.label, None if asked.groups is None else list(asked.groups)]
    if path.is_dir():
        return [*named, tree.listing_digest(path, context.within(path))]
    return [*named, stat_key(path)]


def load(rest: str, context: Context) -> Dataset:
    """The dataset of ``arrays:FILE``.

    Raises UsageError for a missing file, columns that make no sense and numbers that are no pixels, CorruptionError for
    a damaged file.
    """
    return load_arrays(PIXELS, f"arrays:{rest}", columns.parse_rest(rest), key(rest, context), context)


@dataclass(frozen=True)
class Reading:
    """What the rows of an array are."""

    holds: str  # images or rows
    usual: tuple[str, ...]  # usual names of their column
    fits: Callable[[FileArray], bool]  # whether an array of another name can be nothing else
    layout: Callable[[Sequence[int], np.dtype[Any], str], RowLayout]  # of its shape and dtype; UsageError for others


PIXELS = Reading(
    IMAGES, columns.IMAGES, lambda array: array.dtype == np.uint8 and len(array.shape) in (3, 4), layout_of
)


def load_arrays(reading: Reading, spec: str, asked: Asked, facts: list[Any], context: Context) -> Dataset:
    """The dataset of a spec, whose ``place`` holds arrays of rows that mean what ``reading`` says; errors as ``load``.

    ``facts`` are what the digests depend on.
    """
    path = locate(asked.place)
    arrays = read_arrays(path, context)
    parts, names, how = [], list[str](), ""
    tables = _by_split(arrays, asked, path, reading)
    # Where splits are in the names of columns, those without one belong to no rows.
    other = {n: "no split in its name" for n in arrays if tables[0][0] is not None and _bare(n)[1] is None
             and n.lower() not in columns.CLASS_NAMES}  # fmt: skip
    for split, held in tables:
        part, classes, how = _part(split, held, asked, path, reading)
        part = replace(part, unused={**part.unused, **other})
        parts.append(part)
        names = names or classes
    return columns.assemble(
        spec, path, parts, asked=asked, class_names=names, how=how, facts=facts, context=context, holds=reading.holds
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
    return path


def _by_split(
    arrays: _Columns, asked: Asked, path: Path, reading: Reading
) -> list[tuple[int | None, dict[str, FileArray]]]:
    """The columns of each split whose name they have, under their names without it; of None those without a split.

    Splits that have no images are left out, as are columns without a split where images have one. Images that are named
    whole (``x_test``) make a table of their own.
    """
    if asked.images in arrays:
        return [(None, dict(arrays))]
    found: dict[int | None, dict[str, FileArray]] = {}
    for name, array in arrays.items():
        base, split = _bare(name)
        found.setdefault(split, {})[base] = array
    wanted = [(split, held) for split, held in found.items() if _rows_of(held, asked, reading) is not None]
    if not wanted:
        shapes = ", ".join(f"{name} {array.dtype} {list(array.shape)}" for name, array in list(arrays.items())[:8])
        missing = f"no column {asked.images!r}" if asked.images else f"no column of {reading.holds}"
        raise UsageError(
            f"{path} has {missing}; it holds {shapes or 'no arrays'}.", "--images-key NAME says which are images"
        )
    if len(wanted) > 1 and any(split is None for split, _ in wanted):
        raise UsageError(
            f"{path} has {reading.holds} with a split in their name and others without.",
            "--images-key NAME says which are meant",
        )
    shared = {n: array for n, array in found.get(None, {}).items() if n.lower() in columns.CLASS_NAMES}
    wanted = [(split, {**shared, **held}) for split, held in wanted]  # one list of names is that of every split
    return sorted(wanted, key=lambda pair: "" if pair[0] is None else SPLIT_WORDS[pair[0]])


def _bare(name: str) -> tuple[str, int | None]:
    """A column's name without the split in it, and that split: ``x_train`` is x of train."""
    for mark in ("/", "_", "-"):
        head, _, tail = name.rpartition(mark)
        first, _, rest = name.partition(mark)
        if head and tail.lower() in columns.SPLIT_CODES:
            return head, columns.SPLIT_CODES[tail.lower()]
        if rest and first.lower() in columns.SPLIT_CODES:
            return rest, columns.SPLIT_CODES[first.lower()]
    return name, None


def _rows_of(held: _Columns, asked: Asked, reading: Reading) -> str | None:
    """The column of images or rows: named, of a usual name, or the only one that can be nothing else."""
    if asked.images:
        return asked.images if asked.images in held else None
    usual = columns.choose(list(held), reading.usual)
    if usual is not None and len(held[usual].shape) > 1:
        return usual
    like = [name for name, array in held.items() if reading.fits(array)]
    return like[0] if len(like) == 1 else None


def _part(
    split: int | None, held: dict[str, FileArray], asked: Asked, path: Path, reading: Reading
) -> tuple[TableRows, list[str], str]:
    """The rows of a split, the class names beside them, and a clause on what was read."""
    name = str(_rows_of(held, asked, reading))
    images = held.pop(name)
    layout = reading.layout(images.shape, images.dtype, f"{path}, {name}")
    count = images.shape[0]
    classes = columns.choose(list(held), columns.CLASS_NAMES)
    named = held.pop(classes) if classes is not None and _is_words(held[classes], count) else None
    rows = {n: a for n, a in held.items() if a.shape in ((count,), (count, 1))}
    label = columns.choose(list(held if asked.label else rows), columns.LABELS, asked.label, str(path), "--label-key")
    domain, given = (columns.choose(list(rows), usual) for usual in (columns.DOMAINS, columns.SPLITS))
    for n, a in held.items():
        if n.lower() in columns.LABELS and label is None and len(a.shape) in (1, 2) and not asked.label:
            raise UsageError(
                f"{path} has {count:,} {reading.holds} in {name}, and {n} has the shape {list(a.shape)}.",
                "Give every row one label; of one column per class, labels.argmax(1)",
            )

    def column(name: str | None) -> Any:
        return None if name is None else held[name].column(f"{path}, {name}")

    taken = {label, domain, given}
    unused = {n: _why_unused(a, count) for n, a in held.items() if n not in taken and n not in rows}
    groups = {n: _column_or_none(a, f"{path}, {n}") for n, a in rows.items() if n not in taken}
    unused |= {n: "objects, which are not read" for n, values in groups.items() if values is None}
    groups = {n: values for n, values in groups.items() if values is not None}
    labels = column(label)
    if labels is not None and len(labels) != count:
        raise UsageError(
            f"{path} has {count:,} {reading.holds} and {len(labels):,} labels.", "Give every row one label"
        )
    part = TableRows(
        columns.row_names(count, split),
        images.source(layout),
        labels,
        split,
        column(given),
        column(domain),
        groups,
        unused,
    )
    kinds = [] if named is None else [str(word) for word in named.column(f"{path}, {classes}").tolist()]
    return part, kinds, f"{reading.holds} {layout} from {name}" + (f", labels from {label}" if label else ", no labels")


def _why_unused(array: FileArray, count: int) -> str:
    """Why an array is no column of ``count`` rows."""
    if not array.shape or array.shape[0] != count:
        return f"{array.shape[0] if array.shape else 1:,} values for {count:,} rows"
    return f"{int(np.prod(array.shape[1:])):,} values a row"


def _column_or_none(array: FileArray, where: str) -> Any:
    """A column [N]; None for one of objects that cannot be read, which is no reason to refuse the images."""
    try:
        return array.column(where).reshape(-1)
    except UsageError:
        if array.dtype.hasobject:
            return None
        raise


def _is_words(array: FileArray, count: int) -> bool:
    """Whether a column holds names of classes and not a value for each row."""
    return len(array.shape) == 1 and array.dtype.kind in "US" and (array.shape[0] != count or count < 2)
