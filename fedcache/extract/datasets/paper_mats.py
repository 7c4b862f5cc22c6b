"""Layouts whose lists are MATLAB files: the official splits of Oxford Flowers and Stanford Cars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedcache.errors import Exit, FedcacheError
from fedcache.extract.datasets.layout import SPLITS
from fedcache.extract.datasets.paper import Place
from fedcache.extract.datasets.paper_arrays import damaged
from fedcache.extract.datasets.paper_rows import Item, Rows, of_files


def flowers_parts(place: Place) -> list[Path]:
    """The files that the answer depends on."""
    return [place.base / name for name in ("imagelabels.mat", "setid.mat", "jpg")]


def flowers_rows(place: Place) -> Rows:
    """``jpg/image_00001.jpg`` with ``imagelabels.mat`` (classes from 1) and ``setid.mat`` (images of each split)."""
    path = place.base / "setid.mat"
    labels = _column(place.base / "imagelabels.mat", "labels", len(place.paper.classes))
    items = []
    for split, key in (("train", "trnid"), ("val", "valid"), ("test", "tstid")):
        for i in _column(path, key, len(labels)):
            image = f"image_{i:05d}.jpg"
            items.append(Item(image, image, labels[i - 1] - 1, 0, SPLITS[split]))
    return of_files(place.base / "jpg", items, path)


_CARS = (("train", "devkit/cars_train_annos.mat"), ("test", "cars_test_annos_withlabels.mat"))


def cars_parts(place: Place) -> list[Path]:
    """The files that the answer depends on."""
    return [place.base / name for name in ("cars_train", "cars_test", *(file for _, file in _CARS))]


def cars_rows(place: Place) -> Rows:
    """The development kit: ``annotations`` with ``fname`` and ``class`` (from 1) for each of the two folders."""
    items = []
    for split, file in _CARS:
        path = place.base / file
        try:
            table = _mat(path)["annotations"].reshape(-1)
            pairs = [(str(row["fname"].item()), int(row["class"].item())) for row in table]
        except (KeyError, ValueError, TypeError, AttributeError, IndexError):
            raise damaged(path, "it does not hold annotations with fname and class") from None
        for image, label in pairs:
            if not 1 <= label <= len(place.paper.classes):
                raise damaged(path, f"{image[:40]!r} has the class {label}; expected 1 to {len(place.paper.classes)}")
            items.append(Item(f"cars_{split}/{image}", f"cars_{split}/{image}", label - 1, 0, SPLITS[split]))
    return of_files(place.base, items, place.base)


def _column(path: Path, key: str, high: int) -> list[int]:
    held = _mat(path).get(key)
    if held is None or not np.issubdtype(held.dtype, np.number):
        raise damaged(path, f"it holds no numbers {key!r}")
    values: list[int] = held.reshape(-1).astype(np.int64).tolist()
    for value in values:
        if not 1 <= value <= high:
            raise damaged(path, f"{key} has {value}; expected 1 to {high:,}")
    return values


def _mat(path: Path) -> dict[str, Any]:
    import scipy.io

    try:
        held: dict[str, Any] = scipy.io.loadmat(path)
    except FileNotFoundError:
        raise FedcacheError(Exit.ENVIRONMENT, f"{path} is missing.", "Download or unpack it again") from None
    except Exception as error:  # scipy raises what its parsers meet: ValueError, TypeError, zlib.error, ...
        raise damaged(path, f"scipy cannot read it ({type(error).__name__}: {str(error)[:80]})") from None
    return held
