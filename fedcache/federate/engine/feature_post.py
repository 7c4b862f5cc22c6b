"""What is made of stored features before a method reads them: backbones side by side, brought to length or scale.

The one transformation that has numbers of its own, ``standardize``, keeps them as ``Scaling``: a trained head reads new
rows as it read the rows it was trained on.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcache.errors import FederatedRunError, StoreError, unknown
from fedcache.store.files import make_private
from fedcache.store.machine import explain_disk_errors, memory_limit

FEAT_POSTS = ("none", "l2", "l2_concat", "sign", "standardize")

LONGEST_ROWS: Mapping[str, Callable[[Sequence[int]], float]] = {
    "l2": lambda widths: math.sqrt(len(widths)),
    "l2_concat": lambda _widths: 1.0,
    "sign": lambda widths: math.sqrt(sum(widths)),
}
"""A ``feat_post`` that bounds the length of a row -> that bound, of the widths of the backbones."""


def longest_row(feat_post: str, widths: Sequence[int]) -> float | None:
    """Length that no row exceeds after ``feat_post``; None where it sets no bound."""
    bound = LONGEST_ROWS.get(feat_post)
    return None if bound is None else bound(widths)


STEP = 4096
"""Rows that are worked on at a time: what is made of them on the way stays small."""


@dataclass(frozen=True)
class Scaling:
    """What ``standardize`` subtracts from every feature and divides it by."""

    mean: NDArray[np.float64]  # [D]
    scale: NDArray[np.float64]  # [D]; 1 for a feature that is constant

    @staticmethod
    def of(features: NDArray[np.float32], train: NDArray[np.int64]) -> Scaling:
        """Mean and standard deviation of view 0 of the ``train`` rows of features [N, V, D].

        Features are taken as many at a time as the memory budget has room for; each one's sums are the same whichever.
        """
        D = features.shape[2]
        together = max(1, min(D, memory_limit() // (16 * len(train))))
        mean, scale = np.empty(D), np.empty(D)
        for start in range(0, D, together):
            known = features[train, 0, start : start + together]
            mean[start : start + together] = known.mean(0, dtype=np.float64)
            scale[start : start + together] = known.std(0, dtype=np.float64)
        scale[scale == 0.0] = 1.0  # a constant feature stays constant
        return Scaling(mean, scale)

    def apply(self, features: NDArray[np.float32]) -> None:
        """Zero mean and unit variance, in place."""
        for first in range(0, len(features), STEP):
            features[first : first + STEP] = (
                features[first : first + STEP] - self.mean
            ) / self.scale


class Blocks(Protocol):
    """Features that come in blocks of rows, such as a store's array; ``store.reader.Reader`` is one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, V, D)."""

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """(first row, rows [n, V, D]) in order."""


def prepare(
    features: Sequence[np.ndarray | Blocks],
    feat_post: str,
    train: np.ndarray | None = None,
    *,
    views: int | None = None,
    scratch: Path | None = None,
) -> Tensor:
    """The features of ``prepare_features`` without the numbers of ``standardize``."""
    return prepare_features(features, feat_post, train, views=views, scratch=scratch)[0]


def prepare_features(
    features: Sequence[np.ndarray | Blocks],
    feat_post: str,
    train: np.ndarray | None = None,
    *,
    scaling: Scaling | None = None,
    views: int | None = None,
    scratch: Path | None = None,
) -> tuple[Tensor, Scaling | None]:
    """Concatenate backbones and apply the ``feat_post`` of a run.

    Raises FedcacheError, exit 2 for an unknown ``feat_post``, exit 4 when the arrays do not fit one another, exit 6
    when the disk cannot hold what memory cannot.

    Args:
        features: one [N, V, d_k] array per backbone, any float dtype; rows may be NaN where an image is missing.
        feat_post: none; l2 (each backbone to unit length); l2_concat (the concatenation to unit length); sign (1
            where x > 0, else 0: the released FedPCL's ResNet features, D-01); standardize (zero mean and unit
            variance of every feature over view 0 of the ``train`` rows).
        train: int64 rows of the clients' training sets, needed by ``standardize``. Its mean and variance are
            statistics of all clients together, which no single client of a real federation could know.
        scaling: what ``standardize`` found on other rows, in place of ``train``.
        views: how many of each row's views to take; None takes all, and all backbones need the same number.
        scratch: where a result beyond the memory limit is mapped from a file without a name, which goes with it; None
            keeps any result in memory.

    Returns:
        [N, V, D] float32, and what ``standardize`` used; None for the others.
    """
    if feat_post not in FEAT_POSTS:
        raise unknown("feat_post", feat_post, FEAT_POSTS)
    shapes = {(f.shape[0], min(f.shape[1], views or f.shape[1])) for f in features}
    if len(shapes) != 1:
        raise StoreError(
            f"The backbones hold different rows or views: {sorted(f.shape for f in features)}.",
            "Extract them for one store with the same number of views: see fedcache inspect.",
        )
    (N, V), widths = next(iter(shapes)), [f.shape[2] for f in features]
    out = _room((N, V, sum(widths)), scratch)
    for start, part in zip(np.cumsum([0, *widths[:-1]]), features, strict=True):
        for first, rows in [(0, part)] if isinstance(part, np.ndarray) else part.blocks():
            target = out[first : first + len(rows), :, start : start + part.shape[2]]
            target[...] = rows[:, :V]
            if feat_post == "l2":
                _unit(target)
    if feat_post in ("l2_concat", "sign"):
        for first in range(0, N, STEP):
            rows = out[first : first + STEP]
            if feat_post == "l2_concat":
                _unit(rows)
            else:
                _sign(rows)
    elif feat_post == "standardize":
        rows = np.empty(0, np.int64) if train is None else np.unique(train)
        if scaling is None and not len(rows):
            raise FederatedRunError(
                "feat_post=standardize needs training rows, found none.",
                "Give the clients training rows, or choose --set feat_post=l2.",
            )
        scaling = scaling or Scaling.of(out, rows)
        scaling.apply(out)
    return torch.from_numpy(out), scaling if feat_post == "standardize" else None


def _room(shape: tuple[int, ...], scratch: Path | None) -> np.ndarray:
    """Room for float32 features: in memory, or beyond the budget in a file of ``scratch`` that has no name."""
    size = 4 * math.prod(shape)
    if scratch is None or size <= memory_limit():
        return np.empty(shape, np.float32)
    make_private(scratch)
    with explain_disk_errors(scratch, size), tempfile.TemporaryFile(dir=scratch) as file:
        file.truncate(size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(
                file.fileno(), 0, size
            )  # a full disk is an error here, and later a signal
        return np.asarray(np.memmap(file, np.float32, "r+", shape=shape))


def _unit(rows: np.ndarray) -> None:
    """Bring vectors [..., D] to unit length, in place."""
    for first in range(0, len(rows), STEP):
        part = rows[first : first + STEP]
        part /= np.maximum(np.linalg.norm(part, axis=-1, keepdims=True), 1e-12)


def _sign(rows: np.ndarray) -> None:
    """1 where a value is above 0, else 0, in place; NaN stays."""
    np.copyto(rows, rows > 0, where=~np.isnan(rows))


ROW_POSTS = {"none": None, "l2": _unit, "l2_concat": _unit, "sign": _sign}
"""What a ``feat_post`` does in place to float32 rows [.., D] of one backbone, each by itself; None for nothing."""
