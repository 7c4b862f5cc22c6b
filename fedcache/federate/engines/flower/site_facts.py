"""Who takes part: what sites say of themselves, and whether they can be taken together.

A site says names, counts and digests, never a feature, a label or a row. Features of different recipes must never be
averaged, so sites that differ from the most of them are refused by digest, with what differs in words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from fedcache.errors import FedcacheError, FederatedRunError

MOST_NAME = 200
"""Characters of a site's name."""


@dataclass(frozen=True)
class SiteFacts:
    """What a site says of itself.

    Attributes:
        name: of its client; keys its random streams.
        number: its place among the shards of one store; None for a store of its own.
        train: rows it trains on.
        test: rows it is scored on.
        owned: classes among its training rows.
        tests: digest of which rows those of ``test`` are; sites with the same have the same test set.
        classes: names, in order.
        domains: names, in the order in which it counts.
        keys: arrays it would train on.
        backbones: their names.
        recipes: their recipes' digests, in that order.
        widths: features of each.
        views: stored views per row.
        text: digest of the class text features, "" for none.
        templates: what they were made from.
        feat_post: what is done to features.
        dataset: digest of its own content.
        parent: digest of the store it was cut from; "" for a store of its own.
        slug: name of the dataset.
        rows: of its store.
        ok: rows without a defect.
        code: digest of the code its uploads depend on.
        version: of fedcache.
    """

    name: str
    number: int | None
    train: int
    test: int
    owned: int
    tests: str
    classes: tuple[str, ...]
    domains: tuple[str, ...]
    keys: tuple[str, ...]
    backbones: tuple[str, ...]
    recipes: tuple[str, ...]
    widths: tuple[int, ...]
    views: int
    text: str
    templates: tuple[str, ...]
    feat_post: str
    dataset: str
    parent: str
    slug: str
    rows: int
    ok: int
    code: str
    version: str

    @classmethod
    def from_words(cls, words: Mapping[str, Any]) -> SiteFacts:
        """Facts as a message tells them; ValueError for what cannot be."""
        values = {f.name: words[f.name] for f in fields(cls)}
        for f in fields(cls):
            if str(f.type).startswith("tuple"):
                values[f.name] = tuple(values[f.name])
        made = cls(**values)
        numbers = (made.train, made.test, made.owned, made.views, made.rows, made.ok, *made.widths)
        if not all(type(n) is int and n >= 0 for n in numbers) or not (made.number is None or type(made.number) is int):
            raise ValueError("its counts are no numbers")
        if not isinstance(made.name, str) or not made.name or len(made.name) > MOST_NAME or "/" in made.name:
            raise ValueError("it has no name")
        return made

    def to_words(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Member:
    """A site that takes part, and the node it can be reached at."""

    node: int
    facts: SiteFacts


@dataclass(frozen=True, eq=False)
class RowCounts:
    """A client as the server knows it: its name, and how many rows it has. It has no row."""

    name: str
    train: np.ndarray
    test: np.ndarray


def rows_of(facts: SiteFacts) -> RowCounts:
    """The client of a site, for ``RunState``; its rows take no memory."""
    return RowCounts(facts.name, np.broadcast_to(np.int64(0), (facts.train,)), np.empty(0, np.int64))


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


def compatible_sites(members: Sequence[Member]) -> tuple[list[Member], list[tuple[Member, str, str]]]:
    """The largest group of sites that can be taken together, in client order, and the others, each with why and a hint.

    Of equal groups the one with the first site is taken.
    """
    ordered = in_client_order(members)
    kinds = [tuple(getattr(m.facts, what) for what in SAME) for m in ordered]
    if not kinds:
        return [], []
    usual = ordered[kinds.index(Counter(kinds).most_common(1)[0][0])]
    kept, refused = [], []
    for member in ordered:
        found = difference(member.facts, usual.facts)
        if found is None:
            kept.append(member)
        else:
            refused.append((member, *found))
    return kept, refused


def in_client_order(members: Sequence[Member]) -> list[Member]:
    """Client order: the numbers of shards, then names."""
    return sorted(members, key=lambda m: (m.facts.number is None, m.facts.number or 0, m.facts.name))


def duplicate_name_error(members: Sequence[Member]) -> FedcacheError | None:
    """Two sites of one name: an error that names them."""
    names = Counter(m.facts.name for m in members)
    twice = next((name for name, count in names.items() if count > 1), None)
    if twice is None:
        return None
    return FederatedRunError(
        f"{names[twice]} sites say that they are {twice!r}: names key the random draws and must differ.",
        "Stop all but one of them, or give each a name: fedcache flower site --name NAME",
    )


def _short(value: Any) -> str:
    """A value as a message shows it: digests by their first digits."""
    if isinstance(value, tuple):
        return " + ".join(_short(v) for v in value[:4]) + (" .." if len(value) > 4 else "")
    text = str(value) or "none"
    return text[:12] if len(text) > 40 else text
