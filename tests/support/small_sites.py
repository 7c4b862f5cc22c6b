"""Sites that tests of federations share: shards of one small store, and an observer that keeps the story."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from command import ok

from fedcache.progress import Silent
from fedcache.store.store import Store


class Heard(Silent):
    """Notes and warnings, in the order in which they were told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)

    warn = note

    def said(self, words: str) -> bool:
        return any(words in line for line in self.lines)


def sharded(place: Path, clients: int, *, rows: int, classes: int = 3, width: int = 6) -> Path:
    """Stores of so many clients, which share the rows of one store evenly."""
    draw = np.random.default_rng(3)
    y = draw.integers(0, classes, rows)
    x = (
        1.1 * draw.standard_normal((classes, width))[y] + draw.standard_normal((rows, width))
    ).astype(np.float32)
    store = Store.from_arrays(
        {"mine": x}, labels=y, classes=list("abcd")[:classes], path=place / "whole.zarr"
    )
    ok(
        "partition",
        "--store",
        store.path,
        "--scheme",
        "iid",
        "--clients",
        clients,
        "--name",
        "even",
    )
    ok("shard", "--store", store.path, "-p", "even", "--out", place / "sites")
    return place / "sites"
