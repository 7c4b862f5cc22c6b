"""The rows of a dataset of the papers, before uids are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from fedcache.errors import Exit, FedcacheError
from fedcache.extract.datasets.dataset import Source
from fedcache.extract.datasets.tree import FilesSource, name_of


@dataclass(frozen=True)
class Rows:
    """Rows sorted by name.

    Attributes:
        names: [N].
        label: [N] class numbers.
        domain: [N] domain numbers.
        split: [N] split codes; without any test row, a fifth of each class becomes the test set.
        source: where the images are.
        notes: what a reader of the results should know.
    """

    names: list[str]
    label: list[int]
    domain: list[int]
    split: list[int]
    source: Source
    notes: tuple[str, ...] = ()


class Item(NamedTuple):
    """One image file: its name as a row, its path below the images, and what is known of it."""

    name: str
    path: str
    label: int
    domain: int
    split: int


def of_files(images: Path, items: Sequence[Item], what: Path, notes: tuple[str, ...] = ()) -> Rows:
    """The rows of image files.

    Args:
        images: the folder below which the paths lie.
        items: in any order.
        what: the list they come from, for messages.
        notes: see ``Rows``.

    Raises:
        FedcacheError: CORRUPT, for no image, a path that leaves the folder, or an image listed twice.
    """
    if not items:
        raise FedcacheError(
            Exit.CORRUPT, f"{what} names no image of these classes.", "Download or unpack it again, and check its path"
        )
    items = sorted(items, key=lambda item: name_of(item.name))
    for item in items:
        if {"", ".", ".."} & set(item.path.split("/")) or "\0" in item.path or "\\" in item.path:
            raise FedcacheError(
                Exit.CORRUPT,
                f"{what} names {item.path[:80]!r}; expected a plain path below {images}.",
                "Download it again from its authors; nothing was read",
            )
    for a, b in pairwise(items):
        if a.name == b.name:
            raise FedcacheError(
                Exit.CORRUPT, f"{what} names {a.name!r} twice.", "Download it again, or list every image once"
            )
    return Rows(
        names=[name_of(item.name) for item in items],
        label=[item.label for item in items],
        domain=[item.domain for item in items],
        split=[item.split for item in items],
        source=FilesSource(images.absolute(), [item.path for item in items]),
        notes=notes,
    )
