"""The features of a run in memory: read, post-processed, with text features; or the images it trains on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fedcache.config import Home
from fedcache.errors import UsageError
from fedcache.federate.engine.client_data import Data, prepare
from fedcache.federate.engine.hyperparameters import Hp
from fedcache.federate.engine.method import Method
from fedcache.progress import Observer
from fedcache.store.files import sha256_hex
from fedcache.store.store import Store


@dataclass(frozen=True)
class RunFeatures:
    """What a run reads, and what that was made from.

    Attributes:
        arrays: keys of the arrays, in the order in which they are concatenated.
        data: all rows.
        digests: of the arrays' recipes, of the text features, and of live encoders.
        templates: of the text that is used.
    """

    arrays: tuple[str, ...]
    data: Data
    digests: tuple[str, ...]
    templates: tuple[str, ...] = ()


def read_store(
    method: Method,
    hp: Hp,
    store: Store,
    keys: Sequence[str],
    feat_post: str,
    train: NDArray[np.int64],
    observer: Observer,
) -> RunFeatures:
    """Read arrays of a store, apply ``feat_post``, and take the text features of a backbone that has some.

    Backbones with different numbers of views are read as far as all have them.

    Args:
        method: says whether text features are read.
        hp: likewise.
        store: whose rows are read.
        keys: of its arrays.
        feat_post: what is done to features.
        train: [n] rows of which ``standardize`` takes mean and variance.
        observer: told of views that are left out.

    Raises:
        UsageError for an array of images.
    """
    arrays = [store.reader(key) for key in keys]
    for key, array in zip(keys, arrays, strict=True):
        if len(array.shape) != 3:
            raise UsageError(f"{key} holds images, and {method.name} needs features.", "Choose other --backbones.")
    views = [array.shape[1] for array in arrays]
    if len(set(views)) > 1:
        observer.note(f"Views: {min(views)} of each backbone, as all of them have ({', '.join(map(str, views))}).")
    x = prepare(arrays, feat_post, train, views=min(views), scratch=Home.from_environment().root / "scratch")
    samples, widths = store.samples, tuple(a.shape[2] for a in arrays)
    label, domain = samples.label.astype(np.int64), samples.domain.astype(np.int64)
    return with_text(method, hp, store, keys, x, label, domain, widths)


def read_client_stores(
    method: Method,
    hp: Hp,
    stores: Sequence[Store],
    keys: Sequence[str],
    rows: Sequence[NDArray[np.int64]],
    feat_post: str,
    train: NDArray[np.int64],
) -> RunFeatures:
    """Features of many stores as one matrix; a row that several of them hold (a shared test row) is taken once.

    Args:
        method: says whether text features are read.
        hp: likewise.
        stores: one per client, which have the same arrays.
        keys: of their arrays.
        rows: for each store the rows of the matrix that its rows are.
        feat_post: what is done to features.
        train: [n] rows of which ``standardize`` takes mean and variance.
    """
    first, count = stores[0], max(int(places.max(initial=-1)) for places in rows) + 1
    arrays = []
    for key in keys:
        info = first.arrays[key]
        whole = np.full((count, *info.shape[1:]), np.nan, np.dtype(info.dtype))
        for store, places in zip(stores, rows, strict=True):
            whole[places] = store.reader(key).all()
        arrays.append(whole)
    label, domain = np.full(count, -1, np.int64), np.zeros(count, np.int64)
    for store, places in zip(stores, rows, strict=True):
        label[places], domain[places] = store.samples.label, store.samples.domain
    x = prepare(arrays, feat_post, train)
    return with_text(method, hp, first, keys, x, label, domain, tuple(a.shape[2] for a in arrays))


def with_text(
    method: Method,
    hp: Hp,
    store: Store,
    keys: Sequence[str],
    x: torch.Tensor,
    label: NDArray[np.int64],
    domain: NDArray[np.int64],
    widths: tuple[int, ...],
) -> RunFeatures:
    """Features [N, V, D] with labels, domains, and the text features of the backbone where the method reads some."""
    text, templates = text_of(method, hp, store, keys)
    digests = [str(store.arrays[key].digest) for key in keys]
    if text is not None:
        digests.append(sha256_hex(text.tobytes()))
    data = Data(
        x=x,
        y=torch.from_numpy(label),
        classes=len(store.samples.classes),
        text=None if text is None else torch.from_numpy(text),
        widths=widths,
        domain=torch.from_numpy(domain),
    )
    return RunFeatures(tuple(keys), data, tuple(digests), tuple(templates))


def text_of(method: Method, hp: Hp, store: Store, keys: Sequence[str]) -> tuple[NDArray[np.float32] | None, list[str]]:
    """The current text features of a run's only backbone, float32 [C, D], where the method reads some, and the
    templates they were made from.
    """
    backbone = str(store.arrays[keys[0]].recipe.get("backbone"))
    how = "text" if hp.get("init") == "auto" and hp.get("head") == "linear" else hp.get("init")
    if len(keys) > 1 or not store.has_text(backbone) or not ("text" in method.needs or how == "text"):
        return None, []
    return np.array(store.text(backbone), np.float32), store.templates(backbone) or []


def read_images(store: Store, keys: Sequence[str]) -> RunFeatures:
    """View 0 of every image of a store, uint8 [N, 1, H W 3], with labels.

    Args:
        store: whose images are read.
        keys: arrays of the run, of which the last holds the images.
    """
    images = store.reader(keys[-1]).all()[:, 0]
    N, H, W, channels = images.shape
    samples = store.samples
    data = Data(
        x=torch.from_numpy(np.ascontiguousarray(images)).view(N, 1, H * W * channels),
        y=torch.from_numpy(samples.label.astype(np.int64)),
        classes=len(samples.classes),
        domain=torch.from_numpy(samples.domain.astype(np.int64)),
        image=(H, W),
    )
    return RunFeatures(tuple(keys), data, tuple(str(store.arrays[key].digest) for key in keys))
