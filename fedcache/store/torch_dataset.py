"""A store as a ``torch.utils.data.Dataset``. This file imports torch, so it is imported only when it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from fedcache.store.manifest import read_manifest
from fedcache.store.reader import Reader, open_reader


class FeatureRows(Dataset[tuple[Tensor, int]]):
    """(x float32 [D], y) of some rows of a store; a row is read and verified when it is requested.

    It is pickled as a path and row numbers, so every worker of a ``DataLoader``, spawned or forked, maps the files
    itself.

    Args:
        path: of the store.
        keys: arrays whose features are concatenated.
        rows: [N] numbers of the store's rows.
        labels: [N], -1 unknown.
    """

    def __init__(
        self, path: Path, keys: Sequence[str], rows: NDArray[np.int64], labels: NDArray[np.int64]
    ) -> None:
        self.path = path
        self.keys = tuple(keys)
        self.rows = rows
        self.labels = labels
        self._readers: list[Reader] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self._readers is None:
            manifest = read_manifest(self.path)
            self._readers = [open_reader(self.path, manifest, key) for key in self.keys]
        row = int(self.rows[index])
        parts = []
        for reader in self._readers:
            number, row_in_chunk = divmod(row, reader.info.chunk_rows)
            first_view = reader.chunk(number)[row_in_chunk, 0]
            parts.append(np.asarray(first_view, np.float32))
        features = torch.from_numpy(np.concatenate(parts))
        return features, int(self.labels[index])

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_readers": None}

    def __repr__(self) -> str:
        return f"FeatureRows({len(self):,} rows of {' + '.join(self.keys)}, {self.path})"
