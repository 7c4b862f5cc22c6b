"""Features of a file of embeddings, as a saved model reads them: they stay in the file and come block by block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import StoreError, UsageError
from fedcache.models.saved_model import SavedModel
from fedcache.tables.words import FileRows, blocks_of

BLOCK = 1 << 14
"""Rows that are read at once."""

Rows = NDArray[Any]


@dataclass(frozen=True)
class FileFeatures:
    """Features in the order of a model's backbones, which can be read as often as they are asked for.

    >>> whole = np.arange(12.0).reshape(4, 1, 3)
    >>> [[a.shape for a in arrays] for arrays in FileFeatures((whole,), (2,)).of_rows(np.array([0, 3]))]
    [[(2, 2), (2, 1)]]
    """

    columns: tuple[FileRows | Rows, ...]  # [N, V, d] each; view 0 is what a model reads
    cuts: tuple[int, ...] = ()  # where the one matrix of all backbones is cut

    def blocks(self) -> Iterator[list[Rows]]:
        """[n, d] of each backbone, all rows in order. Raises UsageError for a damaged file."""
        for parts in zip(*(blocks_of(column, BLOCK) for column in self.columns), strict=True):
            first = [part[:, 0] for part in parts]
            yield [*np.split(first[0], self.cuts, axis=-1)] if self.cuts else first

    def of_rows(self, rows: NDArray[np.int64]) -> Iterator[list[Rows]]:
        """The same of some rows, int [n] ascending; a block without any of them is passed over."""
        start = 0
        for arrays in self.blocks():
            end = start + len(arrays[0])
            part = rows[slice(*np.searchsorted(rows, (start, end)))] - start
            start = end
            if len(part):
                yield [array[part] for array in arrays]


def features_of_file(model: SavedModel, columns: Mapping[str, Any], path: Path) -> FileFeatures:
    """The features that a model reads: one column per backbone, or one matrix of all of them side by side.

    Args:
        model: whose backbones say which and in which order.
        columns: [N, V, d] by name.
        path: of the file, for messages.

    Raises UsageError for a model of images, StoreError for another number of features.
    """
    facts = model.facts
    if facts.image is not None:
        raise UsageError(
            f"{facts.method} reads images, not embeddings.", "fedcache predict RUN photo.jpg"
        )
    for known in (facts.keys, facts.backbones):
        if known and all(name in columns for name in known):
            return FileFeatures(tuple(columns[name] for name in known))
    if len(columns) == 1:
        (whole,) = columns.values()
        if whole.shape[-1] == facts.width:
            return FileFeatures((whole,), tuple(map(int, np.cumsum(facts.widths)[:-1])))
    if len(columns) == len(facts.widths):
        return FileFeatures(tuple(columns.values()))
    raise StoreError(
        f"{path} has features {', '.join(f'{n} [{v.shape[-1]}]' for n, v in columns.items())}, the model reads "
        f"{', '.join(f'{n} [{w}]' for n, w in zip(facts.backbones or facts.keys, facts.widths, strict=True))}.",
        "Name the columns features/<backbone>, or give one matrix of all backbones side by side.",
    )
