"""Reads the images behind rows of a store again, from the dataset from which the rows were extracted.

A store contains neither images nor their paths; the fedcache home remembers where an extraction found its dataset. Rows
and images are matched by content alone. So all images are found in a dataset that was moved or has grown. In a dataset
with changed images, only the unchanged ones are found.
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
    # datasets that are open already, by the digest in their store
    opened: dict[str, Dataset] = field(default_factory=dict, repr=False)


def read_images(store: Store, rows: Sequence[int], places: ImagePlaces) -> dict[int, Image.Image]:
    """The images of rows of a store, RGB, by row. Images that have changed or are gone are left out.

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
        rows_of_image = np.flatnonzero((data.uid == uid).all(1))
        if not len(rows_of_image):
            continue
        # Copies of an image are equal, so the first is read.
        with suppress(BadImage):
            raw = data.source.read(int(rows_of_image[0]))
            # The file may have changed since ``data.uid`` was computed.
            if uid_of(raw) == uid.tobytes():
                found[row] = decode(raw)
    if rows and not found:
        raise _unavailable(store, f"{data.spec} does not contain the images to show")
    return found


def open_images(store: Store, places: ImagePlaces) -> Dataset:
    """The dataset of a store, or the one that ``--data`` gives for its name. It is opened only once.

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
    known = dataset_of_store(store, home)
    slug = str(store.dataset["slug"])
    name = _without_limit(slug, known)
    given = places.data.get(slug) or places.data.get(name)
    # A folder given by --data replaces the folder of the extraction, or an unknown dataset.
    is_folder = known is None or str(known.dataset).startswith("folder:")
    if given is not None and is_folder:
        known = replace(known or ExtractConfig(), dataset=f"folder:{given}")
    if known is None and name == "digits":
        known = ExtractConfig(dataset="digits")
    if known is None:
        raise _unavailable(store, "their folder is unknown")
    # Without the limit, because rows are matched by content.
    config = replace(known, data={**known.data, **places.data}, limit=None)
    try:
        found = open_dataset(str(config.dataset), context_of(config, home))
    except FedcacheError as error:
        raise _unavailable(store, error.message.rstrip(".")) from error
    places.opened[digest] = found
    return found


def _without_limit(slug: str, known: ExtractConfig | None) -> str:
    """The name of a whole dataset: ``pets`` of ``pets-100``, which ``--limit 100`` made.

    Without a known configuration every number at the end counts as a limit.
    """
    name, _, size = slug.rpartition("-")
    if not name or not size.isdecimal():
        return slug
    if known is not None and size != str(known.limit):
        return slug
    return name


def _unavailable(store: Store, why: str) -> StoreError:
    slug = str(store.dataset["slug"])
    digest = str(store.dataset["digest"])[:16]
    return StoreError(
        f"The images of dataset {slug} ({digest}) are not available: {why}.",
        f"To give the folder of the dataset: --data {shell_word(slug)}=PATH",
    )
