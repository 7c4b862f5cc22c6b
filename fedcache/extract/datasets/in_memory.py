"""Reads images that a program holds: a list of (image, label), a torch ``Dataset``, or {"train": ..., "test": ...}.

An item is a pair, or a dictionary as in Hugging Face datasets. The values of a dictionary other than image and label
become groups. An image is a Pillow image, an encoded file as bytes, a uint8 array or tensor, or a tensor of floats in
[0, 1] as ``ToTensor`` makes it; anything else is refused. Every item is read once, because its content identifies it.
So a program that is run again finds its store, and fedcache refuses a dataset whose pixels change each time it is read.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedcache.errors import UsageError
from fedcache.extract.datasets import HELD, columns
from fedcache.extract.datasets.columns import LABEL, TableRows
from fedcache.extract.datasets.dataset import Context, Dataset, uid_of, uid_rows
from fedcache.extract.datasets.row_sources import layout_of
from fedcache.extract.image_files import BadImage
from fedcache.extract.images import from_pillow
from fedcache.optional import reason
from fedcache.tables.roles import LABELS, find_column
from fedcache.tables.splits import SPLIT_NAMES, SPLIT_WORDS
from fedcache.tables.words import objects_of

LOOKED_AT_TWICE = 8
"""Number of rows, the first ones, that are read twice to check that they stay the same."""

_EXPECTED = "a list of (image, label), a torch Dataset, or {'train': ..., 'test': ...} of them"


@dataclass(eq=False, repr=False)
class ItemSource:
    """The images of a sequence of items."""

    items: Any

    def read(self, row: int) -> bytes | NDArray[np.uint8]:
        """The image of an item; raises ``BadImage``, and UsageError for an item without an image."""
        image, _, _ = _split_item(self.items[row], row)
        return pixels_of(image, row)


def load(source: Any, context: Context) -> Dataset:
    """The dataset of images in memory; ``context.progress`` is called with the number of images read.

    Raises UsageError for other objects, with the number of the row and a hint.
    """
    parts = []
    uids = []
    how = ""
    splits = _by_split(source)
    # Splits of a dictionary are read one after the other; each keeps the order of its items.
    for split, items in splits:
        part, uid = _read(items, split, context)
        parts.append(part)
        uids.append(uid)
        how = f"images of a {type(items).__name__}"  # the last split stands for all
    _, first = splits[0]
    class_names = None
    classes = getattr(first, "classes", None)
    if isinstance(classes, list | tuple) and classes and all(isinstance(c, str) for c in classes):
        class_names = tuple(classes)
    return columns.assemble(
        f"{HELD}:images",
        Path("images"),
        columns.numbered_parts(parts),
        request=columns.request_for(parts),
        class_names=class_names,
        how=how,
        facts=[],
        context=context,
        uid=np.concatenate(uids),
    )


def can_travel(source: Any) -> str | None:
    """The reason why ``source`` cannot be sent to worker processes; None if it can."""
    name = type(source).__name__
    if getattr(type(source), "__module__", "") == "__main__":
        return f"{name} is defined in the main program, which workers cannot import"
    try:
        ForkingPickler.dumps(source)
    except Exception as error:  # objects of a user may raise anything
        return f"{name} cannot be pickled: {error}"[:200]
    return None


def _by_split(source: Any) -> list[tuple[int | None, Any]]:
    """(split code, items) of each split, sorted by the name of the split; (None, items) if there are no splits.

    Raises UsageError for an empty dictionary, and for keys that are no splits.
    """
    if not isinstance(source, Mapping):
        return [(None, _checked(source))]
    wrong = [name for name in source if str(name).lower() not in SPLIT_WORDS]
    if wrong or not source:
        keys = ", ".join(map(repr, wrong[:5])) or "an empty dictionary"
        raise UsageError(
            f"Every key of the dictionary must be the name of a split, but got {keys}.",
            f"Expected {_EXPECTED}",
        )
    parts = []
    for name, items in source.items():
        code = SPLIT_WORDS[str(name).lower()]
        parts.append((code, _checked(items)))
    parts.sort(key=lambda part: SPLIT_NAMES[part[0]])
    return [*parts]


def _checked(items: Any) -> Any:
    """The same items. Raises UsageError unless they can be read by number."""
    is_plain = isinstance(items, str | bytes | numbers.Number)
    is_sequence = hasattr(items, "__len__") and hasattr(items, "__getitem__")
    if is_plain or not is_sequence:
        if hasattr(items, "dataset"):  # such as a DataLoader
            hint = "Give the attribute .dataset of this object."
        else:
            hint = f"Expected a spec such as folder:PATH, or {_EXPECTED}"
        raise UsageError(f"A {type(items).__name__} has no rows that can be read by number.", hint)
    return items


def _read(items: Any, split: int | None, context: Context) -> tuple[TableRows, NDArray[np.uint8]]:
    """The rows of a sequence, and their uids, uint8 [N, 16]."""
    count = len(items)
    labels = []
    fields = []
    uids = bytearray()
    names = columns.row_names(count, split)
    for row, name in enumerate(names):
        image, label, other_fields = _item(items, row)
        uid = _uid(image, row, name)
        uids += uid
        # The first rows are read twice, because a random transform gives other pixels each time.
        if row < LOOKED_AT_TWICE:
            again, _, _ = _item(items, row)
            if uid != _uid(again, row, name):
                raise UsageError(
                    f"Image {row} of the {type(items).__name__} changes each time it is read.",
                    "Remove random transforms; fc.extract(..., views=2) makes seeded views",
                )
        labels.append(_plain(label, row))
        fields.append(other_fields)
        if context.progress is not None:
            context.progress(row + 1, count)
    found = columns.columns_of_records(fields)
    if any(label is not None for label in labels):
        found[LABEL] = objects_of(labels)
    part = TableRows(names, ItemSource(items), found, split)
    return part, uid_rows(uids)


def _item(items: Any, row: int) -> tuple[Any, Any, Mapping[str, Any]]:
    """Image, label and other fields of an item. Raises UsageError with the item's number if it cannot be read."""
    try:
        item = items[row]
    except Exception as error:
        raise UsageError(
            f"Item {row} of the dataset cannot be read: {reason(error)}",
            "Fix the dataset, so that this item can be read.",
        ) from error
    return _split_item(item, row)


def _split_item(item: Any, row: int) -> tuple[Any, Any, Mapping[str, Any]]:
    if isinstance(item, tuple | list):
        if len(item) != 2:
            raise UsageError(f"Item {row} has {len(item)} parts.", "Expected (image, label)")
        return item[0], item[1], {}
    if isinstance(item, Mapping):
        names = [str(name) for name in item]
        image_key = _named(names, columns.IMAGE_NAMES)
        label_key = _named(names, LABELS)
        if image_key is None:
            keys = ", ".join(names[:8])
            raise UsageError(
                f"Item {row} has the keys {keys}.", "Expected the keys image and label"
            )
        # Fields that are no plain values, such as tensors, are of no use as columns.
        others = {
            name: value
            for name, value in item.items()
            if name not in (image_key, label_key) and isinstance(value, str | int | float | bool)
        }
        return item[image_key], item.get(label_key), others
    return item, None, {}


def _named(names: Sequence[str], usual: Sequence[str]) -> str | None:
    """The first of an item's keys that has a usual name; None if no key has one."""
    # None: the user names no key. "": no option of the command line would choose one.
    return find_column("An item", dict.fromkeys(names), None, usual, "")


def pixels_of(image: Any, row: int) -> bytes | NDArray[np.uint8]:
    """An image as bytes of a file, or as uint8 [H, W] or [H, W, 3].

    Raises UsageError for other objects, BadImage for a Pillow image that cannot be read.
    """
    if isinstance(image, bytes):
        return image
    if isinstance(image, Image.Image):
        return np.asarray(from_pillow(image))
    pixels = image
    if hasattr(image, "detach"):  # a tensor
        pixels = image.detach().cpu().numpy()
        if pixels.dtype.kind == "f":
            # Comparisons with NaN are false, so NaN is refused too.
            if not (pixels.size and pixels.min() >= 0 and pixels.max() <= 1):
                raise UsageError(
                    f"Image {row} is a tensor of floats outside [0, 1], whose meaning is unknown.",
                    "Remove Normalize from the transforms; fedcache normalises for each backbone",
                )
            # ToTensor divided the bytes by 255; this restores the same bytes.
            pixels = np.rint(pixels * 255).astype(np.uint8)
    if not isinstance(pixels, np.ndarray):
        raise UsageError(
            f"Image {row} is a {type(image).__name__}.",
            "Expected a Pillow image, bytes of a file, a uint8 array or tensor, or a tensor of floats in [0, 1]",
        )
    # 1: ``layout_of`` expects the shape of an array of images.
    layout = layout_of((1, *pixels.shape), pixels.dtype, f"row {row}")
    return np.ascontiguousarray(layout.image(pixels))


def _uid(image: Any, row: int, name: str) -> bytes:
    """The uid of an image, 16 bytes; a uid made from the name of the row if the image cannot be read."""
    try:
        return uid_of(pixels_of(image, row))
    except BadImage:
        return uid_of(b"unreadable\0" + name.encode())


def _plain(label: Any, row: int) -> Any:
    """A label as a number, a word or None."""
    if hasattr(label, "item") and getattr(label, "ndim", 1) == 0:  # one value of numpy or torch
        label = label.item()
    if label is None or isinstance(label, str | int | float):
        return label
    raise UsageError(
        f"The label of item {row} is a {type(label).__name__}.", "Expected a number, a word or None"
    )
