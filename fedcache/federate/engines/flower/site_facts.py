"""What a site says of itself: names, counts and digests, each a claim that is checked before anything is made of it.

A site says no feature, no label and no row. What it says must fit the table of limits below and itself (no more rows
than its store has); whether a number of rows can be believed beside those of other sites is asked in ``sites``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from fedcache.store.files import sha256_hex

COUNTS = {
    "train": (0, 2**53),
    "test": (0, 2**53),
    "owned": (0, 100_000),
    "views": (1, 10_000),
    "rows": (0, 2**53),
    "ok": (0, 2**53),
}
"""Fact -> the smallest and the largest number that it may be; float64 holds every whole number up to 2^53."""

TEXTS = {
    "name": 200,
    "tests": 200,
    "text": 200,
    "feat_post": 40,
    "dataset": 200,
    "parent": 200,
    "slug": 200,
    "code": 200,
    "version": 100,
}
"""Fact -> the most characters that it may have."""

LISTS = {
    "classes": (100_000, 1000),
    "domains": (10_000, 1000),
    "keys": (100, 1000),
    "backbones": (100, 1000),
    "recipes": (100, 200),
    "made_from": (100, 20_000),
    "templates": (1000, 10_000),
}
"""Fact -> the most texts that it may hold, and the most characters of each."""

WIDTHS, WIDEST = 100, 1_000_000
"""The most arrays of a site, and the most features of one."""


@dataclass(frozen=True)
class SiteFacts:
    """What a site says of itself."""

    name: str  # of its client; keys its random streams
    number: int | None  # its place among the shards of one store; None for a store of its own
    train: int  # rows it trains on
    test: int  # rows it is scored on
    owned: int  # classes among its training rows
    tests: str  # digest of which rows those of ``test`` are; sites with the same have the same test set
    classes: tuple[str, ...]  # names, in order
    domains: tuple[str, ...]  # names, in the order in which it counts
    keys: tuple[str, ...]  # arrays it would train on
    backbones: tuple[str, ...]  # their names
    recipes: tuple[str, ...]  # their recipes' digests, in that order
    made_from: tuple[str, ...]  # these recipes, as canonical JSON
    widths: tuple[int, ...]  # features of each
    views: int  # stored views per row
    text: str  # digest of the class text features, "" for none
    templates: tuple[str, ...]  # what they were made from
    feat_post: str  # what is done to features
    dataset: str  # digest of its own content
    parent: str  # digest of the store it was cut from; "" for a store of its own
    slug: str  # name of the dataset
    rows: int  # of its store
    ok: int  # rows without a defect
    code: str  # digest of the code its uploads depend on
    version: str  # of fedcache

    @classmethod
    def from_words(cls, words: object) -> SiteFacts:
        """Facts as a message tells them. Raises ValueError, naming the fact, for what cannot be."""
        if not isinstance(words, Mapping):
            raise ValueError("they are no table")
        values = {f.name: _fact(f.name, words.get(f.name)) for f in fields(cls)}
        made = cls(**values)
        if not made.name or "/" in made.name or not made.name.isprintable():
            raise ValueError(
                f"name is {made.name!r:.60}, expected printable characters without '/'"
            )
        if (
            not made.keys
            or len({len(made.keys), len(made.backbones), len(made.recipes), len(made.widths)}) > 1
        ):
            raise ValueError("it does not have one backbone, recipe and width for each array")
        if made.recipes != tuple(sha256_hex(text.encode()) for text in made.made_from):
            raise ValueError("its recipes do not have the digests that it says")
        if made.train + made.test > made.ok or made.ok > made.rows:
            raise ValueError(
                f"it trains on {made.train:,} rows and is scored on {made.test:,}, of a store of {made.rows:,}, "
                f"{made.ok:,} of them sound"
            )
        if made.owned > min(made.train, len(made.classes)):
            raise ValueError(
                f"it owns {made.owned} classes of {len(made.classes)} with {made.train} rows"
            )
        return made

    def to_words(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def _fact(name: str, value: Any) -> Any:
    """One fact as its type. Raises ValueError for one outside its limits."""
    if name == "number":
        if value is not None and not _is_whole(value, 0, 2**53):
            raise ValueError(f"number is {value!r:.60}, expected a whole number or none")
        return value
    if name in COUNTS:
        low, high = COUNTS[name]
        if not _is_whole(value, low, high):
            raise ValueError(
                f"{name} is {value!r:.60}, expected a whole number from {low} to {high:,}"
            )
        return value
    if name in TEXTS:
        if not isinstance(value, str) or len(value) > TEXTS[name]:
            raise ValueError(
                f"{name} is {value!r:.60}, expected a text of at most {TEXTS[name]} characters"
            )
        return value
    if name == "widths":
        known = isinstance(value, list | tuple) and len(value) <= WIDTHS
        if not known or not all(_is_whole(n, 1, WIDEST) for n in value):
            raise ValueError(
                f"widths is {value!r:.60}, expected at most {WIDTHS} numbers from 1 to {WIDEST:,}"
            )
        return tuple(value)
    most, longest = LISTS[name]
    known = isinstance(value, list | tuple) and len(value) <= most
    if not known or not all(isinstance(text, str) and len(text) <= longest for text in value):
        raise ValueError(
            f"{name} is {value!r:.60}, expected at most {most:,} texts of {longest:,} characters"
        )
    return tuple(value)


def _is_whole(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high  # a bool is no number here


@dataclass(frozen=True, eq=False)
class RowCounts:
    """A client as the server knows it: its name, and how many rows it has. It has no row."""

    name: str
    train: np.ndarray
    test: np.ndarray


def rows_of(facts: SiteFacts) -> RowCounts:
    """The client of a site, for ``RunState``; its rows take no memory."""
    return RowCounts(
        facts.name, np.broadcast_to(np.int64(0), (facts.train,)), np.empty(0, np.int64)
    )


SAME = {
    "classes": "its classes are {}, and the others' {}",
    "recipes": "its features come from recipe {}, and the others' from {}",
    "widths": "its features are {} wide, and the others' {}",
    "views": "it stores {} views of an image, and the others {}",
    "text": "its class text features have digest {}, and the others' {}",
    "feat_post": "it would do {} to its features, and the others {}",
    "code": "its fedcache computes this method with code {}, and the others' with {}",
}
"""What all sites must have in common, in the order in which differences are told."""

MEND = {
    "classes": "Cut all shards from one store, or extract with the same class names.",
    "recipes": "Extract there with the same backbone and recipe: fedcache extract --help, fedcache inspect.",
    "widths": "Extract there with the same backbone and recipe: fedcache extract --help, fedcache inspect.",
    "views": "Extract there with the same --views.",
    "text": "Extract there with the same --text templates.",
    "feat_post": "Say which: fedcache flower app --set feat_post=none",
    "code": "Install the same fedcache on all machines: pip install fedcache==VERSION",
}


def difference(mine: SiteFacts, theirs: SiteFacts) -> tuple[str, str] | None:
    """The first thing in which a site differs from one it would be taken together with, in words, and a hint."""
    for what, words in SAME.items():
        values = getattr(mine, what), getattr(theirs, what)
        if values[0] != values[1]:
            return words.format(*map(_short, values)), MEND[what]
    return None


def _short(value: Any) -> str:
    """A value as a message shows it: digests by their first digits."""
    if isinstance(value, tuple):
        return " + ".join(_short(v) for v in value[:4]) + (" .." if len(value) > 4 else "")
    text = str(value) or "none"
    return text[:12] if len(text) > 40 else text
