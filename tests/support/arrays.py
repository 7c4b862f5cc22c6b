"""Embeddings that can be learnt, for tests that need no images."""

from pathlib import Path

import numpy as np

CLASSES = np.array(["zebra", "ant", "10"])
"""Class names in a file's own order, which is neither alphabetical nor that of numbers."""


def embeddings(rows=90, classes=3, width=8, seed=0):
    """(X float32 [N, D], y int64 [N], split [N] of words): a fifth are test rows."""
    rng = np.random.default_rng(seed)
    y = np.arange(rows) % classes
    centres = rng.normal(size=(classes, width))
    x = (centres[y] + 1.5 * rng.normal(size=(rows, width))).astype(np.float32)
    return x, y, np.where(np.arange(rows) % 5 == 4, "test", "train")


def ingested(folder, name="mine"):
    """A store of them, which commands without a store then use."""
    from command import ok

    x, y, split = embeddings()
    file = folder / f"{name}.npz"
    np.savez(file, **{"features/mine": x, "labels": CLASSES[y], "classes": CLASSES, "split": split})
    return Path(ok(f"ingest --name {name}", file).data["path"])


def small_store(place):
    """A store of 120 rows of 6 features and 3 classes below ``place``."""
    import fedcache as fc

    rng = np.random.default_rng(0)
    label = rng.integers(0, 3, 120)
    x = (rng.normal(size=(3, 6))[label] + 0.5 * rng.normal(size=(120, 6))).astype("f4")
    return fc.Store.from_arrays(
        {"mine": x}, labels=label, classes=list(CLASSES), path=place / "s.zarr"
    ).path


def overlapping(place, splits=("train", "train", "train", "test"), noise=0.9):
    """A store of 240 rows of 8 features and 3 classes that overlap; the rows are of these splits in turn."""
    import fedcache as fc

    rng = np.random.default_rng(3)
    label = rng.integers(0, 3, 240)
    x = (rng.normal(size=(3, 8))[label] + noise * rng.normal(size=(240, 8))).astype("f4")
    words = np.resize(splits, 240)
    return fc.Store.from_arrays(
        {"mine": x}, labels=label, splits=words, path=place / "points.zarr"
    ).path
