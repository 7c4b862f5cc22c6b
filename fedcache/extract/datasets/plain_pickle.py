"""Datasets that are pickles of plain data: the content of one, and the images in it.

What a pickle may hold, and why nothing in it is run, is in ``tables/plain_pickle.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import CorruptionError, FedcacheError, MachineError
from fedcache.extract.datasets.paper import damaged
from fedcache.extract.image_files import BadImage
from fedcache.tables.plain_pickle import load_plain


def load(path: Path) -> Any:
    """The content of a pickle of plain data; CorruptionError for a damaged one, or one that names anything else."""
    try:
        with path.open("rb") as file:
            return load_plain(file)
    except FileNotFoundError:
        raise MachineError(
            f"{path} is missing.", "Unpack the dataset again, or copy the file there"
        ) from None
    except (OSError, ValueError) as error:
        why = str(error)
    raise CorruptionError(
        f"{path} is not a pickle of arrays, lists and texts alone: {why[:200]}. Nothing in it was run.",
        "Download it again from the address that `fedcache datasets info` gives",
    )


def read_images(path: Path, labels_key: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """(images uint8 [n, H, W] or [n, H, W, 3], labels int64 [n]) of a pickle.

    It holds ``{"data": uint8 [n, 3072], labels_key: [n]}`` (channels first, as CIFAR has them), or, where
    ``labels_key`` is empty, the pair (images, labels).
    """
    held = load(path)
    if labels_key:
        if not isinstance(held, dict) or "data" not in held or labels_key not in held:
            raise damaged(path, f"it does not hold 'data' and {labels_key!r}")
        flat = np.asarray(held["data"])
        raw = held[labels_key]
        if flat.dtype != np.uint8 or flat.ndim != 2 or flat.shape[1] != 3072:
            raise damaged(
                path, f"its data are {flat.dtype} {list(flat.shape)}; expected uint8 [n, 3072]"
            )
        images = flat.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    else:
        if not isinstance(held, tuple | list) or len(held) != 2:
            raise damaged(path, "it does not hold the pair (images, labels)")
        images = np.asarray(held[0])
        raw = held[1]
        if images.dtype != np.uint8 or not (
            images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3)
        ):
            shape = list(images.shape)
            raise damaged(
                path,
                f"its images are {images.dtype} {shape}; expected uint8 [n, H, W] or [n, H, W, 3]",
            )
    try:
        labels = np.asarray(raw).astype(np.int64).reshape(-1)
    except (TypeError, ValueError):
        raise damaged(path, "its labels are not numbers") from None
    if len(labels) != len(images):
        raise damaged(path, f"it has {len(images):,} images and {len(labels):,} labels")
    return images, labels


_OPEN = 2  # files kept in memory: rows are read in order, by threads that may be a batch apart


class StackSource:
    """Images that follow each other in pickled arrays; a process unpickles a file when it reads its first row."""

    def __init__(self, files: Sequence[str], counts: Sequence[int], labels: str) -> None:
        self.files = tuple(files)  # in the order of the rows
        self.counts = tuple(counts)  # rows of each file
        self.labels = labels  # see ``read_images``
        self._starts = np.cumsum([0, *self.counts])
        self._open: dict[int, NDArray[np.uint8]] = {}
        self._lock = threading.Lock()

    def read(self, row: int) -> NDArray[np.uint8]:
        """uint8 [H, W] or [H, W, 3]; raises ``BadImage`` when the file has changed."""
        part = int(np.searchsorted(self._starts, row, side="right")) - 1
        with self._lock:
            images = self._open.get(part)
            if images is None:
                try:
                    images = read_images(Path(self.files[part]), self.labels)[0]
                except FedcacheError as error:
                    raise BadImage(error.message) from None
                while len(self._open) >= _OPEN:
                    del self._open[next(iter(self._open))]  # the one opened first
                self._open[part] = images
        at = row - int(self._starts[part])
        if at >= len(images):
            raise BadImage(
                f"{self.files[part]} has {len(images):,} images, fewer than when it was listed"
            )
        return np.ascontiguousarray(images[at])

    def __getstate__(self) -> dict[str, Any]:
        return {"files": self.files, "counts": self.counts, "labels": self.labels}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]
