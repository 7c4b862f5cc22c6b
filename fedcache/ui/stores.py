"""Stores as the page shows them, and thumbnails of their images, which are made when they are asked for."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.config import Home
from fedcache.errors import FedcacheError, shell_word
from fedcache.extract.inputs import IMAGES, held_by
from fedcache.extract.planning.find_images import read_images
from fedcache.extract.planning.find_store import dataset_of_store, extract_arguments
from fedcache.extract.planning.image_places import ImagePlaces
from fedcache.report.galleries import SIDE, thumbnail_uri
from fedcache.store.catalog import is_ingested, size_of
from fedcache.store.groups import count_words
from fedcache.store.manifest import VANISHED
from fedcache.store.samples import SPLITS
from fedcache.store.store import Store

PAGE = 24
"""Thumbnails at a time."""


class StoreIndex:
    """The stores of a home, each opened again when its manifest changed.

    Args:
        home: where they are, and what remembers where their datasets lie.
    """

    def __init__(self, home: Home) -> None:
        self.home = home
        self._lines: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {}
        self._places = ImagePlaces(home)

    def lines(self) -> list[dict[str, Any]]:
        """Every store as a line: what ``fedcache ls`` knows; a damaged one has ``problem`` and ``hint``."""
        paths = self._paths()
        for name, path in paths.items():
            stamp = _stamp(path)
            if self._lines.get(name, (None,))[0] != stamp:
                self._lines[name] = stamp, _line(name, path)
        return [self._lines[name][1] for name in paths]

    def details(self, name: str) -> dict[str, Any] | None:
        """What ``fedcache inspect`` knows of a store, and the commands about it; None for a name that is none."""
        path = self._paths().get(name)
        if path is None:
            return None
        try:
            return {"name": name, "path": str(path), **_details(Store.open(path), self.home)}
        except (FedcacheError, OSError) as error:
            problem, hint = getattr(error, "message", str(error)), getattr(error, "hint", "")
            return {"name": name, "path": str(path), "problem": problem, "hint": hint}

    def images(self, name: str, start: int) -> dict[str, Any] | None:
        """``PAGE`` readable images of a store from number ``start`` on, as thumbnails; None for a name that is none.

        Raises StoreError where the images are not at hand, UsageError for rows that are no images.
        """
        path = self._paths().get(name)
        if path is None:
            return None
        store = Store.open(path)
        samples = store.samples
        readable = np.flatnonzero(samples.ok == 1)
        rows = [int(row) for row in readable[max(0, start) : max(0, start) + PAGE]]
        found = read_images(store, rows, self._places)
        shown = [
            {
                "row": row,
                "uri": thumbnail_uri(found[row]),
                "split": SPLITS[samples.split[row]],
                "class": samples.classes[samples.label[row]]
                if samples.label[row] >= 0
                else "no label",
            }
            for row in rows
            if row in found
        ]
        return {
            "start": max(0, start),
            "of": len(readable),
            "page": PAGE,
            "side": SIDE,
            "images": shown,
        }

    def _paths(self) -> dict[str, Path]:
        """Name -> directory of every store; only these names are ever opened."""
        try:
            return {
                p.name.removesuffix(".zarr"): p
                for p in sorted(self.home.stores.glob("*.zarr"))
                if p.is_dir()
            }
        except OSError:
            return {}


def _stamp(path: Path) -> tuple[int, ...]:
    """Times of what says that a store changed: its manifest, and the journals of arrays under way."""
    stamps = []
    for place in (path, path / "manifest.json", *sorted(path.glob("journal-*.jsonl"))):
        try:
            stamps.append(place.stat().st_mtime_ns)
        except OSError:
            stamps.append(0)
    return tuple(stamps)


def _line(name: str, path: Path) -> dict[str, Any]:
    try:
        store = Store.open(path)
        return {
            "name": name,
            "dataset": store.dataset["slug"],
            "rows": store.rows,
            "ok": store.rows_ok,
            "holds": held_by(a.recipe for a in store.arrays.values()),
            "arrays": sorted(store.arrays),
            "text": sorted(store.texts),
            "partitions": sorted(store.partitions),
            "unfinished": store.unfinished(),
            "bytes": size_of(path),
        }
    except (FedcacheError, OSError) as error:
        return {
            "name": name,
            "problem": getattr(error, "message", str(error)),
            "hint": getattr(error, "hint", ""),
        }


def _details(store: Store, home: Home) -> dict[str, Any]:
    samples = store.samples
    ok = samples.ok == 1
    listed = store.quarantined()
    counts = np.bincount(samples.label[ok & (samples.label >= 0)], minlength=len(samples.classes))
    return {
        "dataset": dict(store.dataset),
        "rows": store.rows,
        "ok": store.rows_ok,
        "holds": held_by(a.recipe for a in store.arrays.values()),
        "unreadable": [e for e in listed if e["reason"] != VANISHED][:100],
        "vanished": sum(e["reason"] == VANISHED for e in listed),
        "splits": {
            name: int((ok & (samples.split == code)).sum()) for code, name in enumerate(SPLITS)
        },
        "classes": [
            [name, int(count)] for name, count in zip(samples.classes, counts, strict=True)
        ],
        "domains": list(samples.domains),
        "groups": {name: count_words(store.path, store.manifest, name) for name in store.groups},
        "partitions": sorted(store.partitions),
        "text": sorted(store.texts),
        "arrays": [
            {
                "name": key,
                "backbone": info.recipe.get("backbone"),
                "shape": list(info.shape),
                "dtype": info.dtype,
                "recipe": _words(info.recipe),
                "how": _words(info.how),
            }
            for key, info in sorted(store.arrays.items())
        ],
        "unfinished": store.unfinished(),
        "commands": commands(store, home),
    }


def commands(store: Store, home: Home) -> list[list[str]]:
    """What makes a store and what is done with it: title and line."""
    name = store.path.stem
    backbones = ",".join(
        dict.fromkeys(
            str(a.recipe["backbone"]) for a in store.arrays.values() if "backbone" in a.recipe
        )
    )
    made = []
    if not is_ingested(store):
        known = dataset_of_store(store, home)
        words = (
            ["--dataset", str(store.dataset["slug"])] if known is None else extract_arguments(known)
        )
        if held_by(a.recipe for a in store.arrays.values()) == IMAGES or known is not None:
            extra = ["--backbones", backbones] if backbones else []
            made.append(
                ["Extract it again, or go on", shlex.join(["fedcache", "extract", *words, *extra])]
            )
    return [
        *made,
        ["Train on it", f"fedcache train --method fed3r --store {shell_word(name)}"],
        [
            "Deal its rows to clients",
            f"fedcache partition --store {shell_word(name)} --scheme dirichlet --alpha 0.1",
        ],
        ["Look at it", f"fedcache inspect {shell_word(name)}"],
        ["Check every byte", f"fedcache verify {shell_word(name)}"],
    ]


def _words(table: Mapping[str, Any]) -> dict[str, str]:
    return {str(k): str(v) for k, v in table.items() if not isinstance(v, dict | list)}
