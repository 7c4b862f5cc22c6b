"""The images behind rows of a store, read again from the dataset that they were extracted from.

A store holds no images and says nothing of places; the home remembers where an extraction found its dataset. An image
is taken for that of a row by its content alone, so a dataset that has moved or grown gives the right ones, and one that
has changed gives fewer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
from PIL import Image

from fedcache.config import ExtractConfig, Home
from fedcache.errors import FedcacheError, StoreError, UsageError, shell_word
from fedcache.extract.datasets import open_dataset
from fedcache.extract.datasets.dataset import Dataset, uid_of
from fedcache.extract.image_files import BadImage
from fedcache.extract.images import decode
from fedcache.extract.planning.find_store import dataset_of_store
from fedcache.extract.planning.plan import context_of
from fedcache.extract.recipe import IMAGES, held_by
from fedcache.store.catalog import is_ingested
from fedcache.store.store import Store


@dataclass(frozen=True)
class ImagePlaces:
    """Where the images of stores are looked for."""

    home: Home  # remembers where extractions found their datasets
    # ``--data NAME=PATH``; NAME may be the name of a store
    data: Mapping[str, str] = field(default_factory=dict)
    # by digest of a store's dataset
    opened: dict[str, Dataset] = field(default_factory=dict, repr=False)


def read_images(store: Store, rows: Sequence[int], places: ImagePlaces) -> dict[int, Image.Image]:
    """The images of rows of a store, RGB, by row; those whose content is not there any more are left out.

    Raises StoreError, with the dataset that is needed, when none of them is available; UsageError for texts and rows.
    """
    kind = held_by(array.recipe for array in store.arrays.values())
    if kind != IMAGES:
        raise UsageError(
            f"{store.path.name} contains {kind}, which cannot be shown as pictures.",
            "Leave --with-images out.",
        )
    data = open_images(store, places)
    found = {}
    for row in rows:
        uid = store.samples.uid[row]
        for place in np.flatnonzero((data.uid == uid).all(1))[:1]:
            with suppress(BadImage):
                raw = data.source.read(int(place))
                if uid_of(raw) == uid.tobytes():
                    found[row] = decode(raw)
    if rows and not found:
        raise _not_at_hand(store, f"{data.spec} contains none of the images to show")
    return found


def open_images(store: Store, places: ImagePlaces) -> Dataset:
    """The dataset of a store, or one that has its name under ``--data``; it is opened once.

    Raises StoreError, with the dataset that is needed, when it cannot be opened.
    """
    digest = str(store.dataset["digest"])
    if digest in places.opened:
        return places.opened[digest]
    if is_ingested(store):
        raise StoreError(
            f"{store.path.name} was made from embeddings, so its images are unknown.",
            "fedcache extract --dataset DATASET   makes a store of images.",
        )
    home = places.home
    known = dataset_of_store(store, places.home)
    slug = str(store.dataset["slug"])
    given = places.data.get(slug) or places.data.get(_whole(slug, known))
    if given is not None and (known is None or str(known.dataset).startswith("folder:")):
        known = replace(known or ExtractConfig(), dataset=f"folder:{given}")
    if known is None and _whole(slug, known) == "digits":
        known = ExtractConfig(dataset="digits")
    if known is None:
        raise _not_at_hand(store, "their folder is unknown")
    config = replace(known, data={**known.data, **places.data}, limit=None)
    try:
        found = open_dataset(str(config.dataset), context_of(config, home))
    except FedcacheError as error:
        raise _not_at_hand(store, error.message.rstrip(".")) from error
    places.opened[digest] = found
    return found


def _whole(slug: str, known: ExtractConfig | None) -> str:
    """The name of a dataset without the limit of ``--limit``, which rows are taken of it."""
    name, _, size = slug.rpartition("-")
    limit = size
    if known is not None:
        limit = str(known.limit)
    if name and size == limit and size.isdecimal():
        return name
    return slug


def _not_at_hand(store: Store, why: str) -> StoreError:
    slug = str(store.dataset["slug"])
    return StoreError(
        f"The images of dataset {slug} ({str(store.dataset['digest'])[:16]}) are not available: {why}.",
        f"To give the folder of the dataset: --data {shell_word(slug)}=PATH",
    )
