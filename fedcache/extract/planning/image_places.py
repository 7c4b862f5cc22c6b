"""Folders that hold the images of stores, found without opening a dataset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fedcache.config import Home

if TYPE_CHECKING:
    from fedcache.extract.datasets.dataset import Dataset


@dataclass(frozen=True)
class ImagePlaces:
    """Where the images of stores are looked for."""

    home: Home  # remembers where extractions found their datasets
    # ``--data NAME=PATH``; NAME may be the name of a store
    data: Mapping[str, str] = field(default_factory=dict)
    # by digest of a store's dataset
    opened: dict[str, Dataset] = field(default_factory=dict, repr=False)
