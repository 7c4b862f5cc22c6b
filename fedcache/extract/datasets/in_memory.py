"""Images that a program holds: a list of (image, label), a torch ``Dataset``, or {"train": ..., "test": ...} of them.

An item is a pair, or a dictionary as a Hugging Face dataset gives it, whose other values are groups. An image is a
Pillow image, an encoded file as bytes, a uint8 array or tensor, or a tensor of floats in [0, 1] as ``ToTensor`` makes
it; anything else has no known meaning and is refused. Every item is read once to name it by its content, so that a
program that is run again finds its store, and a dataset that gives other pixels each time is noticed.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedcache.errors import UsageError
from fedcache.extract.datasets import HELD, columns
from fedcache.extract.datasets.columns import LABEL, DatasetRequest, TableRows
from fedcache.extract.datasets.dataset import Context, Dataset, uid_of
from fedcache.extract.datasets.row_sources import layout_of
from fedcache.extract.image_files import BadImage
from fedcache.extract.images import from_pillow
from fedcache.optional import reason
from fedcache.tables.roles import LABELS, find_column
from fedcache.tables.splits import SPLIT_NAMES, SPLIT_WORDS
from fedcache.tables.words import Column, objects_of

"""Kind of the spec of such a dataset, which names no place."""

LOOKED_AT_TWICE = 8
"""First rows that are read twice, to see whether they stay the same."""

_EXPECTED = "a list of (image, label), a torch Dataset, or {'train': ..., 'test': ...} of them"


class ItemSource:
    """The images of a sequence of items."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def read(self, row: int) -> bytes | NDArray[np.uint8]:
        """The image of an item; raises ``BadImage``, and UsageError for what is no image."""
        return pixels_of(_split_item(self.items[row], row)[0], row)


def load(source: Any, context: Context) -> Dataset:
    """The dataset of images in memory; ``context.progress`` is called with the number of images read.

    Raises UsageError for what is no such thing, with the number of the row and what to do.
    """
    parts = []
    uids = []
    how = ""
    # Splits of a dictionary are read one after the other; each keeps the order of its items.
    for split, items in _by_split(source):
        part, uid = _read(items, split, context)
        parts.append(part)
        uids.append(uid)
        how = f"images of a {type(items).__name__}"
    first = next(iter(_by_split(source)))[1]
    class_names = None
    named = getattr(first, "classes", ())
    if isinstance(named, list | tuple) and named and all(isinstance(n, str) for n in named):
        class_names = tuple(named)
    return columns.assemble(
        f"{HELD}:images",
        Path("images"),
        columns.numbered_parts(parts),
        request=columns.with_label(DatasetRequest(""), parts),
        class_names=class_names,
        how=how,
        facts=[],
        context=context,
        uid=np.concatenate(uids),
    )


def can_travel(source: Any) -> str | None:
    """Why items cannot be sent to worker processes; None when they can."""
    if getattr(type(source), "__module__", "") == "__main__":
        return (
            f"{type(source).__name__} is defined in the main program, which workers cannot import"
        )
    try:
        ForkingPickler.dumps(source)
    except Exception as error:  # whatever the objects of a user raise
        return f"{type(source).__name__} cannot be pickled: {error}"[:200]
    return None


def _by_split(source: Any) -> list[tuple[int | None, Any]]:
    """The items of each split, in the order of the splits' words; of None where none is named."""
    if isinstance(source, Mapping):
        wrong = [name for name in source if str(name).lower() not in SPLIT_WORDS]
        if wrong or not source:
            keys = ", ".join(map(repr, list(source)[:5]))
            raise UsageError(
                f"The dictionary has the keys {keys}, which are not all splits.",
                f"Expected {_EXPECTED}",
            )
        parts = [
            (SPLIT_WORDS[str(name).lower()], _checked(items)) for name, items in source.items()
        ]
        parts.sort(key=lambda part: SPLIT_NAMES[part[0]])
        return [*parts]
    return [(None, _checked(source))]


def _checked(items: Any) -> Any:
    if isinstance(items, str | bytes | numbers.Number) or not (
        hasattr(items, "__len__") and hasattr(items, "__getitem__")
    ):
        if hasattr(items, "dataset"):
            hint = "Give its .dataset"
        else:
            hint = f"Expected a spec such as folder:PATH, or {_EXPECTED}"
        raise UsageError(f"A {type(items).__name__} has no rows that can be read by number.", hint)
    return items


def _read(items: Any, split: int | None, context: Context) -> tuple[TableRows, NDArray[np.uint8]]:
    """The rows of a sequence, and their uids."""
    count = len(items)
    labels = []
    fields = []
    uid = bytearray()
    names = columns.row_names(count, split)
    for row in range(count):
        image, label, others = _item(items, row)
        uid += _uid(image, row, names[row])
        # Random transforms would give other pixels than those that were digested: the first rows are read twice.
        if row < LOOKED_AT_TWICE and uid[-16:] != _uid(_item(items, row)[0], row, names[row]):
            raise UsageError(
                f"Image {row} of the {type(items).__name__} changes each time it is read.",
                "Remove random transforms; fc.extract(..., views=2) makes seeded views",
            )
        labels.append(_plain(label, row))
        fields.append(others)
        if context.progress is not None:
            context.progress(row + 1, count)
    # An item may lack a field that others have.
    fields_of_all = dict.fromkeys(name for held in fields for name in held)
    found: dict[str, Column] = {
        name: objects_of([held.get(name) for held in fields]) for name in fields_of_all
    }
    if any(label is not None for label in labels):
        found[LABEL] = objects_of(labels)
    return (
        TableRows(names, ItemSource(items), found, split),
        np.frombuffer(bytes(uid), dtype=np.uint8).reshape(-1, 16),
    )


def _item(items: Any, row: int) -> tuple[Any, Any, Mapping[str, Any]]:
    """Image, label and other values of an item. Raises UsageError with its number for what reading it raises."""
    try:
        item = items[row]
    except Exception as error:
        raise UsageError(
            f"Item {row} of the dataset cannot be read: {reason(error)}",
            "Fix the dataset; the error above shows where",
        ) from error
    return _split_item(item, row)


def _split_item(item: Any, row: int) -> tuple[Any, Any, Mapping[str, Any]]:
    if isinstance(item, tuple | list):
        if len(item) != 2:
            raise UsageError(f"Item {row} has {len(item)} parts.", "Expected (image, label)")
        return item[0], item[1], {}
    if isinstance(item, Mapping):
        names = [str(name) for name in item]
        image = _named(names, columns.IMAGE_NAMES)
        label = _named(names, LABELS)
        if image is None:
            keys = ", ".join(names[:8])
            raise UsageError(
                f"Item {row} has the keys {keys}.", "Expected the keys image and label"
            )
        # Fields that are no plain values, such as tensors, are of no use as columns.
        others = {}
        for name, value in item.items():
            if name not in (image, label) and isinstance(value, str | int | float | bool):
                others[name] = value
        return item[image], item.get(label), others
    return item, None, {}


def _named(names: Sequence[str], usual: Sequence[str]) -> str | None:
    """The key of an item that has a usual name."""
    return find_column("An item", dict.fromkeys(names), None, usual, "")


def pixels_of(image: Any, row: int) -> bytes | NDArray[np.uint8]:
    """An image as bytes of a file, or as uint8 [H, W] or [H, W, 3].

    Raises UsageError for what is no image, BadImage for a Pillow image that cannot be read.
    """
    if isinstance(image, bytes):
        return image
    if isinstance(image, Image.Image):
        return np.asarray(from_pillow(image))
    found = image
    if hasattr(image, "detach"):  # a tensor
        found = image.detach().cpu().numpy()
        if found.dtype.kind == "f":
            # Written so that NaN is refused too. ToTensor divides by 255, which this undoes to the very bytes.
            if not (found.size and found.min() >= 0 and found.max() <= 1):
                raise UsageError(
                    f"Image {row} is a tensor of floats outside [0, 1], whose meaning is unknown.",
                    "Leave Normalize out; fedcache normalises for each backbone",
                )
            found = np.rint(found * 255).astype(np.uint8)
    if not isinstance(found, np.ndarray):
        raise UsageError(
            f"Image {row} is a {type(image).__name__}.",
            "Expected a Pillow image, bytes of a file, a uint8 array or tensor, or a tensor of floats in [0, 1]",
        )
    return np.ascontiguousarray(
        layout_of((1, *found.shape), found.dtype, f"row {row}").image(found)
    )


def _uid(image: Any, row: int, name: str) -> bytes:
    try:
        return uid_of(pixels_of(image, row))
    except BadImage:
        return uid_of(b"unreadable\0" + name.encode())


def _plain(label: Any, row: int) -> Any:
    """A label as a number, a word or None."""
    if hasattr(label, "item") and getattr(label, "ndim", 1) == 0:  # of numpy or torch
        label = label.item()
    if label is None or isinstance(label, str | int | float):
        return label
    raise UsageError(
        f"The label of item {row} is a {type(label).__name__}.", "Expected a number, a word or None"
    )
