"""Part i of n of a store: some chunks of every array, in a folder of their own until ``join`` assembles all parts.

A part is a store whose arrays stay unfinished: it has the rows of the whole dataset, and its journals vouch for the
chunks that it holds. Its manifest lists no array, so nothing trains on it, and names the part in ``dataset``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcache.errors import StoreError, shell_word

PART = "part"
"""Key of the manifest's ``dataset``: {number, of, recipes}. ``recipes`` are those of the arrays that are finished."""

PLACE = re.compile(r"(.+)\.part-(\d+)-of-(\d+)\.zarr")
"""The name of a part's folder."""


@dataclass(frozen=True)
class StorePart:
    """Part ``number`` of ``of``."""

    number: int  # from 1
    of: int  # how many parts there are

    def __str__(self) -> str:
        return f"part {self.number} of {self.of}"

    @property
    def option(self) -> str:
        """The value of ``--part`` that means it."""
        return f"{self.number}/{self.of}"

    def chunks(self, count: int) -> range:
        """The numbers of this part's chunks, of an array of ``count``; none where there are more parts than chunks."""
        return range(count * (self.number - 1) // self.of, count * self.number // self.of)

    def place(self, store: Path) -> Path:
        """The folder of this part, beside the place of the store."""
        return store.with_name(
            f"{store.name.removesuffix('.zarr')}.part-{self.number}-of-{self.of}.zarr"
        )

    def record(self) -> dict[str, Any]:
        """What the manifest of a new part says of it."""
        return {"number": self.number, "of": self.of, "recipes": {}}


def part_of(dataset: Mapping[str, Any]) -> StorePart | None:
    """Which part a store is, by ``dataset`` of its manifest; None for a whole store. Raises ValueError for nonsense."""
    if PART not in dataset:
        return None
    record = dataset[PART]
    numbers = (record["number"], record["of"])
    if [type(n) for n in numbers] != [int, int] or not 1 <= numbers[0] <= numbers[1]:
        raise ValueError(f"part {numbers}")
    if not all(isinstance(recipe, dict) for recipe in record["recipes"].values()):
        raise ValueError("recipes of a part")
    return StorePart(*numbers)


def join_command(path: Path) -> str:
    """The command that joins a part with the others beside it."""
    found = PLACE.fullmatch(path.name)
    if found is None:
        return "fedcache join PART PART .. -o STORE"
    # The star is for the shell, so it is not quoted.
    stem = shell_word(path.with_name(found[1]))
    whole = shell_word(path.with_name(f"{found[1]}.zarr"))
    return " ".join(["fedcache", "join", f"{stem}.part-*-of-{found[3]}.zarr", "-o", whole])


def no_store(path: Path, dataset: Mapping[str, Any]) -> StoreError:
    """The error of a part where a whole store is meant."""
    return StoreError(
        f"{path} is {part_of(dataset)} of a store, and no store by itself.",
        f"Join the parts when all are finished:  {join_command(path)}",
    )
