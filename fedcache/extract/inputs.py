"""Kinds of input that a backbone reads and a dataset holds: images, texts, rows of numbers, or sounds.

The ``decoder`` of a recipe gives the kind: ``pillow`` makes pixels of a file, ``utf-8`` makes a text of bytes,
``numpy`` leaves a row as it is, and ``soundfile`` makes samples of a WAV or FLAC file. Only images have views; encoders
of the other kinds receive each item as it was read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedcache.extract.image_files import BadImage
from fedcache.extract.recipe import SOUNDS, TEXTS

if TYPE_CHECKING:
    from torch import Tensor


MAX_TEXT = 16 << 20
"""Limit of a text in bytes."""

Items = list[Any] | NDArray[Any]
"""B texts, B encoded sound files, or rows [B, ...] of any type."""


class Prepared(Protocol):
    """B items as an encoder's ``prepare`` made them ready for its model, such as tokens; picklable."""

    @property
    def bad(self) -> Mapping[int, str]:
        """Why an item has no feature, by its place in the batch."""

    def __len__(self) -> int:
        """B."""


Prepare = Callable[[list[Any]], Prepared]
"""Items as they were read -> items as the encoder receives them. It must be picklable, because it runs in the process
that reads the items, not in the process that runs the model."""


class ItemEncoder(Protocol):
    """A loaded backbone of texts, rows or sounds."""

    def items(self, items: Items | Any) -> tuple[Tensor, NDArray[np.bool_]]:
        """Features [B, D] float32 of texts or rows, and bool [B], true for items that the model reads only in part.

        An encoder with an attribute ``prepare`` receives the items that ``prepare`` returned.
        """


def text_of(raw: bytes) -> str:
    """The text of a row; raises ``BadImage`` for one that is empty, too long or no UTF-8."""
    if len(raw) > MAX_TEXT:
        raise BadImage(f"the text has {len(raw):,} bytes; the limit is {MAX_TEXT:,}")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise BadImage("the text is not UTF-8") from None
    if not text.strip():
        raise BadImage("the text is empty")
    return text


def described_row(row: Any) -> str:
    """The type and shape of a row, for messages: ``float32 [800]``."""
    return f"{str(row.dtype).removeprefix('torch.')} {list(row.shape)}"


def read_items(source: Any, rows: Sequence[int], kind: str) -> tuple[Items, dict[int, str]]:
    """The texts, rows or sound files of a batch, and the reason per bad row.

    A bad text is empty, a bad sound file is None and a bad row is zeros; their features are dropped later. If a batch
    has no good row, the rows are [B, 0].
    """
    found = []
    bad = {}
    for row in rows:
        try:
            item = source.read(row)
            if kind == TEXTS:
                item = text_of(item)
        except BadImage as error:
            bad[row] = str(error)
            item = None
            if kind == TEXTS:
                item = ""
        found.append(item)
    if kind in (TEXTS, SOUNDS):
        return found, bad
    good = next((item for item in found if item is not None), np.zeros(0, np.float32))
    for place, item in enumerate(found):
        if item is None:
            found[place] = np.zeros_like(good)
    return np.stack(found), bad


def encode_items(
    encoder: ItemEncoder, items: Items | Prepared, batch: int, blank: Sequence[int], width: int
) -> tuple[NDArray[np.float32], int]:
    """Features [n, 1, D] of n texts or rows, NaN at the places in ``blank``, and how many items were cut.

    The last batch is filled up with copies of its last item, like the last batch of images. Prepared items are not
    filled up, because their encoder computes them in groups of its own. A batch without a readable item does not reach
    the model.
    """
    count = len(items)
    if len(blank) == count:
        return np.full((count, 1, width), np.nan, np.float32), 0
    padded = items
    if isinstance(items, list):
        padded = items + items[-1:] * (batch - count)
    elif isinstance(items, np.ndarray):
        padded = np.concatenate([items, np.repeat(items[-1:], batch - count, axis=0)])
    features, cut = encoder.items(padded)
    kept = features[:count].to("cpu").numpy().astype(np.float32, copy=False)
    out = kept[:, None].copy()
    out[list(blank)] = np.nan
    return out, int(cut[:count].sum())
