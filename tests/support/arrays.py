"""Embeddings that can be learnt, for tests that need no images."""

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


def normals(seed, *shape):
    """Standard normal numbers of float32."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def around(classes, each, far, width=8):
    """Rows [N, D] and their labels [N]: a class lies around a point on its axis, ``far`` from the origin."""
    y = np.tile(np.arange(classes), each)
    x = np.random.default_rng(0).normal(size=(len(y), width)) + far * np.eye(classes, width)[y]
    return x.astype(np.float32), y


def ingested(folder, name="mine"):
    """A store of them, which commands without a store then use."""
    from made_path import place_of

    x, y, split = embeddings()
    file = folder / f"{name}.npz"
    np.savez(file, **{"features/mine": x, "labels": CLASSES[y], "classes": CLASSES, "split": split})
    return place_of(f"ingest --name {name} {file}")


def rows_ingested(folder, x, y, split, more=""):
    """A store of these rows; ``more`` are words for ``ingest``."""
    from made_path import place_of

    file = folder / "rows.npz"
    np.savez(file, features=x.astype(np.float32), labels=y, split=split.astype(int))
    return place_of(f"ingest {file} --name rows {more}")


def _classes(seed, rows, width, noise):
    """Rows [N, D] of three classes with random centres and this noise, and their labels [N]."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 3, rows)
    x = rng.normal(size=(3, width))[label] + noise * rng.normal(size=(rows, width))
    return x.astype("f4"), label


def small_store(place):
    """A store of 120 rows of 6 features and 3 classes below ``place``."""
    import fedcache as fc

    x, label = _classes(0, 120, 6, 0.5)
    return fc.Store.from_arrays(
        {"mine": x}, labels=label, classes=list(CLASSES), path=place / "s.zarr"
    ).path


def overlapping(place, splits=("train", "train", "train", "test"), noise=0.9):
    """A store of 240 rows of 8 features and 3 classes that overlap; the rows are of these splits in turn."""
    import fedcache as fc

    x, label = _classes(3, 240, 8, noise)
    words = np.resize(splits, 240)
    return fc.Store.from_arrays(
        {"mine": x}, labels=label, splits=words, path=place / "points.zarr"
    ).path
