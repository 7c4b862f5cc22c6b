"""Layouts whose images are arrays in pickles: CIFAR's Python batches, and the digits of FedBN's release.

A row is named by its place in its files, ``train/00017`` or ``svhn/test/00017``, so "the first n of each class" means
the order in which the files hold them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import FedcacheError
from fedcache.extract.datasets import plain_pickle
from fedcache.extract.datasets.layout import SPLITS
from fedcache.extract.datasets.paper import FoundLayout, PaperIndex, damaged
from fedcache.extract.images import BadImage

_OPEN = 2  # files kept in memory: rows are read in order, by threads that may be a batch apart


class StackSource:
    """Images that follow each other in pickled arrays; a process unpickles a file when it first reads one of its rows.

    Args:
        files: paths, in the order of the rows.
        counts: rows of each file.
        labels: see ``_contents``.
    """

    def __init__(self, files: Sequence[str], counts: Sequence[int], labels: str) -> None:
        self.files = tuple(files)
        self.counts = tuple(counts)
        self.labels = labels
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
                    images = _contents(Path(self.files[part]), self.labels)[0]
                except FedcacheError as error:
                    raise BadImage(error.message) from None
                for old in list(self._open)[: len(self._open) - _OPEN + 1]:
                    del self._open[old]
                self._open[part] = images
        at = row - int(self._starts[part])
        if at >= len(images):
            raise BadImage(f"{self.files[part]} has {len(images):,} images, fewer than when it was listed")
        return np.ascontiguousarray(images[at])

    def __getstate__(self) -> dict[str, Any]:
        return {"files": self.files, "counts": self.counts, "labels": self.labels}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def read_arrays(place: FoundLayout) -> PaperIndex:
    """Every row of a layout of format ``arrays``.

    Raises:
        MachineError for a missing file, CorruptionError for one that does not hold what it should.
    """
    labels_key = str(place.layout.options.get("labels", ""))
    limit = place.layout.options.get("first")
    found: dict[tuple[str, int], list[tuple[Path, NDArray[np.int64]]]] = {}
    for domain, split, path in array_files(place):
        labels = _contents(path, labels_key)[1]
        if limit is not None and split == "train":
            labels = labels[: int(limit)]
        wrong = labels[(labels < 0) | (labels >= len(place.paper.classes))]
        if len(wrong):
            raise damaged(path, f"it has the label {int(wrong[0])}; expected 0 to {len(place.paper.classes) - 1}")
        found.setdefault((split, domain), []).append((path, labels))
    one = len(place.paper.domains) == 1
    named = sorted((f"{s}/" if one else f"{place.paper.domains[d]}/{s}/", s, d) for s, d in found)
    names: list[str] = []
    label: list[int] = []
    domain_of: list[int] = []
    split_of: list[int] = []
    files: list[tuple[Path, int]] = []
    for prefix, split, domain in named:
        whole = np.concatenate([labels for _, labels in found[split, domain]])
        width = max(5, len(str(len(whole) - 1)))
        names += [f"{prefix}{i:0{width}d}" for i in range(len(whole))]
        label += whole.tolist()
        domain_of += [domain] * len(whole)
        split_of += [SPLITS[split]] * len(whole)
        files += [(path, len(labels)) for path, labels in found[split, domain]]
    source = StackSource([str(path.absolute()) for path, _ in files], [count for _, count in files], labels_key)
    return PaperIndex(names, label, domain_of, split_of, source)


def array_files(place: FoundLayout) -> Iterator[tuple[int, str, Path]]:
    """(domain, split, file) of every file, in the order of the rows within a domain and split."""
    options = place.layout.options
    folders = options.get("folders", {})
    for number, domain in enumerate(place.paper.domains):
        for split in ("train", "test"):
            for name in options[split]:
                yield number, split, place.base / folders.get(domain, "") / name


def _contents(path: Path, labels_key: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """(images uint8 [n, H, W] or [n, H, W, 3], labels int64 [n]) of a file.

    Args:
        path: a pickle of ``{"data": uint8 [n, 3072], labels_key: [n]}`` (channels first, as CIFAR has them), or,
            without ``labels_key``, of the pair (images, labels).
        labels_key: name of the labels, or empty.
    """
    held = plain_pickle.load(path)
    if labels_key:
        if not isinstance(held, dict) or "data" not in held or labels_key not in held:
            raise damaged(path, f"it does not hold 'data' and {labels_key!r}")
        flat, raw = np.asarray(held["data"]), held[labels_key]
        if flat.dtype != np.uint8 or flat.ndim != 2 or flat.shape[1] != 3072:
            raise damaged(path, f"its data are {flat.dtype} {list(flat.shape)}; expected uint8 [n, 3072]")
        images = flat.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    else:
        if not isinstance(held, tuple | list) or len(held) != 2:
            raise damaged(path, "it does not hold the pair (images, labels)")
        images, raw = np.asarray(held[0]), held[1]
        if images.dtype != np.uint8 or not (images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3)):
            shape = list(images.shape)
            raise damaged(path, f"its images are {images.dtype} {shape}; expected uint8 [n, H, W] or [n, H, W, 3]")
    try:
        labels = np.asarray(raw).astype(np.int64).reshape(-1)
    except (TypeError, ValueError):
        raise damaged(path, "its labels are not numbers") from None
    if len(labels) != len(images):
        raise damaged(path, f"it has {len(images):,} images and {len(labels):,} labels")
    return images, labels
