"""``--limit N``: rows evenly spaced over a dataset, which make another dataset with another digest.

Evenly spaced over the sorted names, so that every split, domain and class of any size keeps its share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedcache.extract import datasets
from fedcache.extract.datasets.dataset import Dataset, Source
from fedcache.extract.digests import DigestMemory


class PartSource:
    """Reads the rows of a part from the whole."""

    def __init__(self, source: Source, rows: NDArray[np.int64]) -> None:
        self.source, self.rows = source, rows

    def read(self, row: int) -> bytes | NDArray[np.uint8]:
        """The image of a row; raises ``BadImage``."""
        return self.source.read(int(self.rows[row]))


def part(data: Dataset, limit: int) -> Dataset:
    """``limit`` evenly spaced rows of a dataset; itself when it has no more."""
    if limit >= len(data):
        return data
    rows = np.arange(limit, dtype=np.int64) * len(data) // limit
    return replace(
        data,
        slug=f"{data.slug}-{limit}",
        names=tuple(data.names[r] for r in rows),
        label=data.label[rows],
        domain=data.domain[rows],
        split=data.split[rows],
        uid=data.uid[rows],
        reading=f"{data.reading}; {limit:,} rows of it, evenly spaced",
        source=PartSource(data.source, rows),
    )


def open_limited(
    spec: str, limit: int | None, *, memory: DigestMemory, roots: Mapping[str, Path], data: Path, layout: str | None
) -> Dataset:
    """``open_dataset`` and ``part`` of it; see there for what is raised."""
    whole = datasets.open_dataset(spec, memory=memory, roots=roots, data=data, layout=layout)
    if limit is None:
        return whole
    made = part(whole, limit)
    memory.remember(["limited", whole.digest, limit], [made.slug, made.digest])
    return made


def peek_limited(
    spec: str, limit: int | None, *, memory: DigestMemory, roots: Mapping[str, Path], data: Path, layout: str | None
) -> tuple[str, str] | None:
    """(slug, digest) of what ``open_limited`` would give, from memory alone."""
    whole = datasets.peek(spec, memory=memory, roots=roots, data=data, layout=layout)
    if whole is None or limit is None:
        return whole
    fact = memory.recall(["limited", whole[1], limit])
    return (str(fact[0]), str(fact[1])) if isinstance(fact, list) and len(fact) == 2 else None
