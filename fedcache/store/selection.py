"""Which rows and arrays of a store somebody means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import Exit, FedcacheError, StoreError, unknown
from fedcache.store.manifest import ArrayInfo
from fedcache.store.samples import Samples

SPLITS = ("train", "test", "validation")


def names_of(key: str, info: ArrayInfo) -> tuple[str, str, str]:
    """What an array is called: its key, its backbone, and ``backbone@size``."""
    backbone = str(info.recipe.get("backbone", key))
    return key, backbone, f"{backbone}@{info.recipe.get('size', 0)}"


def match_arrays(arrays: Mapping[str, ArrayInfo], name: str) -> list[str]:
    """Keys of the arrays that a name may mean."""
    return [key for key, info in arrays.items() if name in names_of(key, info)]


def select_arrays(arrays: Mapping[str, ArrayInfo], backbones: str | Sequence[str] | None, store: str) -> list[str]:
    """Keys of the arrays of features that are named; all of them for None.

    Args:
        arrays: of the store.
        backbones: one name or several, as ``names_of`` spells them.
        store: its name, for messages.

    Raises:
        StoreError, for one that the store does not hold; UsageError, for a name of several, and for images.
    """
    names = [backbones] if isinstance(backbones, str) else list(backbones or [])
    features = {k: a for k, a in arrays.items() if a.dtype != "uint8"}
    if not names:
        if not features:
            raise StoreError(f"{store} holds no features yet.", "fedcache extract --help")
        return list(features)
    chosen = []
    for name in names:
        found = match_arrays(features, name)
        if len(found) != 1:
            listed = ", ".join(features) or "no features"
            what = "no features" if not found else f"{len(found)} arrays"
            raise FedcacheError(
                Exit.USAGE if found else Exit.STORE,
                f"{store} has {what} of {name!r}.",
                f"It has {listed}; each of these names means one array.",
            )
        chosen.append(found[0])
    return list(dict.fromkeys(chosen))


def select_rows(samples: Samples, split: str | None) -> NDArray[np.int64]:
    """Numbers of the readable rows of a split, ascending; of every split for None.

    Raises:
        UsageError, for a split that is none.
    """
    if split is not None and split not in SPLITS:
        raise unknown("split", split, SPLITS)
    wanted = samples.ok == 1
    if split is not None:
        wanted = wanted & (samples.split == SPLITS.index(split))
    return np.flatnonzero(wanted)
