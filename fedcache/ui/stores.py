"""Stores as the page shows them, and thumbnails of their images, which are made on request."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.config import Home, option_words
from fedcache.errors import FedcacheError
from fedcache.extract.planning.find_images import ImagePlaces, read_images
from fedcache.extract.planning.find_store import dataset_of_store
from fedcache.extract.recipe import IMAGES, held_by
from fedcache.report.render import thumbnail_uri
from fedcache.report.store_card import rows_of_classes, rows_of_splits
from fedcache.store.catalog import is_ingested, size_of
from fedcache.store.store import Store

PAGE = 24
"""Number of thumbnails on one page."""


class StoreIndex:
    """The stores of a home; a store is opened again when its manifest or a journal has changed.

    Args:
        home: the home with the stores; it also remembers where the files of their datasets are.
    """

    def __init__(self, home: Home) -> None:
        self.home = home
        # Name of a store -> its stamp when it was opened, and its line.
        self._lines: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {}
        self._places = ImagePlaces(home)

    def lines(self) -> list[dict[str, Any]]:
        """A line for every store with the facts of ``fedcache ls``; a damaged store has a ``problem``."""
        paths = self._paths()
        for name, path in paths.items():
            stamp = _stamp(path)
            if self._lines.get(name, (None,))[0] != stamp:
                self._lines[name] = stamp, _line(name, path)
        return [self._lines[name][1] for name in paths]

    def details(self, name: str) -> dict[str, Any] | None:
        """Facts of a store as ``fedcache inspect`` has them, and commands; None for an unknown name.

        Raises FedcacheError for a damaged store.
        """
        path = self._paths().get(name)
        if path is None:
            return None
        store = Store.open(path)
        groups = []
        for column in store.groups:
            count = len(store.group(column).words)
            groups.append(f"{column} ({count})")
        return {
            **_line(name, path),
            "holds": held_by(a.recipe for a in store.arrays.values()),
            "lost": store.quarantined(),
            "splits": rows_of_splits(store.samples),
            "classes": rows_of_classes(store.samples),
            "groups": groups,
            "command": extract_command(store, self.home),
        }

    def images(self, name: str, start: int) -> dict[str, Any] | None:
        """Thumbnails of ``PAGE`` readable images of a store, from number ``start`` on; None for an unknown name.

        Raises StoreError if the images are not available, UsageError for rows that are no images.
        """
        path = self._paths().get(name)
        if path is None:
            return None
        store = Store.open(path)
        samples = store.samples
        readable = np.flatnonzero(samples.ok == 1)
        rows = [int(row) for row in readable[start : start + PAGE]]
        found = read_images(store, rows, self._places)
        shown = [(row, thumbnail_uri(found[row])) for row in rows if row in found]
        return {"samples": samples, "start": start, "of": len(readable), "shown": shown}

    def _paths(self) -> dict[str, Path]:
        """Name -> directory of every store; only these names are ever opened."""
        found = sorted(self.home.stores.glob("*.zarr"))
        return {p.stem: p for p in found if p.is_dir()}


def _stamp(path: Path) -> tuple[int, ...]:
    """Modification times that show a change of a store: of its directory, its manifest and its journals."""
    stamps = []
    for place in (path, path / "manifest.json", *sorted(path.glob("journal-*.jsonl"))):
        try:
            stamps.append(place.stat().st_mtime_ns)
        except OSError:
            stamps.append(0)
    return tuple(stamps)


def _line(name: str, path: Path) -> dict[str, Any]:
    """A store's line: the opened store, its unfinished arrays and its size, or the problem of a damaged one."""
    try:
        store = Store.open(path)
        return {
            "name": name,
            "problem": "",
            "store": store,
            "unfinished": store.unfinished(),
            "bytes": size_of(path),
        }
    except (FedcacheError, OSError) as error:
        return {"name": name, "problem": str(error)}


def extract_command(store: Store, home: Home) -> str:
    """The command that makes or resumes a store; "" if it is not known."""
    if is_ingested(store):
        return ""
    known = dataset_of_store(store, home)
    recipes = [a.recipe for a in store.arrays.values()]
    if known is not None:
        words = option_words(known)
    elif held_by(recipes) == IMAGES:
        words = ["--dataset", str(store.dataset["slug"])]
    else:
        return ""
    backbones = dict.fromkeys(str(r["backbone"]) for r in recipes if "backbone" in r)
    if backbones:
        words = [*words, "--backbones", ",".join(backbones)]
    return shlex.join(["fedcache", "extract", *words])
