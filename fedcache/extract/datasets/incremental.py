"""A dataset in the row order of a store of an earlier state of it: the rows there were, then the new ones.

A row whose image is gone, or is another one now, keeps its place and can no longer be read.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.extract.datasets.dataset import Dataset, Source, _content_digest
from fedcache.extract.images import BadImage
from fedcache.store.quarantine import VANISHED
from fedcache.store.samples import Samples


@dataclass(frozen=True)
class IncrementalSource:
    """Reads the rows that are still there.

    Attributes:
        source: of the dataset as it is now.
        rows: int64 [N] row of ``source``, -1 where the image has vanished.
    """

    source: Source
    rows: NDArray[np.int64]

    def read(self, row: int) -> bytes | NDArray[np.uint8]:
        """The image of a row; raises ``BadImage``."""
        if self.rows[row] < 0:
            raise BadImage(VANISHED)
        return self.source.read(int(self.rows[row]))


@dataclass(frozen=True, eq=False, kw_only=True)
class IncrementalDataset(Dataset):
    """A dataset whose rows are in another order than that of their names.

    Attributes:
        content: digest of the dataset in its own order.
        ok: uint8 [N], 0 where the image has vanished.
        known: rows that the earlier store had.
    """

    content: str
    ok: NDArray[np.uint8]
    known: int

    def __post_init__(self) -> None:
        digest = sha256(_content_digest(self).encode() + self.content.encode() + self.ok.tobytes()).hexdigest()
        object.__setattr__(self, "digest", digest)

    @property
    def vanished(self) -> dict[int, str]:
        """The reason per row that has vanished."""
        return dict.fromkeys(np.flatnonzero(self.ok == 0).tolist(), VANISHED)

    @property
    def new(self) -> int:
        """Rows the earlier store did not have."""
        return len(self.names) - self.known


def find_earlier_rows(data: Dataset, before: Samples, gone: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Where the rows of a store are in a dataset, int64 [N]; -1 for another image under the name, or none.

    Args:
        data: as it is now.
        before: rows of the store.
        gone: bool [N] rows that had vanished by then, which never come back.
    """
    index = {name: row for row, name in enumerate(data.names)}
    found = np.array([-1 if g else index.get(n, -1) for n, g in zip(before.name, gone, strict=True)], np.int64)
    there = np.flatnonzero(found >= 0)
    other = (data.uid[found[there]] != before.uid[there]).any(axis=1)
    found[there[other]] = -1
    return found


def in_earlier_order(
    data: Dataset, before: Samples, rows: NDArray[np.int64], *, known: int | None = None
) -> IncrementalDataset:
    """The rows of an earlier store in their order, and then the new rows.

    Args:
        data: as it is now.
        before: rows of the earlier store.
        rows: where these are in ``data``; from ``find_earlier_rows``.
        known: of the rows of ``before``, those of the store it grew from itself; None for all.
    """
    rest = np.setdiff1d(np.arange(len(data)), rows)
    order = np.concatenate([rows, rest])
    lost = np.flatnonzero(rows < 0)
    label, domain, split, uid = (column[order] for column in (data.label, data.domain, data.split, data.uid))
    label[lost] = _recoded(before.label[lost], before.classes, data.classes, -1)
    domain[lost] = _recoded(before.domain[lost], before.domains, data.domains, 0)
    split[lost], uid[lost] = before.split[lost], before.uid[lost]
    return IncrementalDataset(
        spec=data.spec,
        slug=data.slug,
        classes=data.classes,
        domains=data.domains,
        names=(*before.name, *(data.names[r] for r in rest)),
        label=label,
        domain=domain,
        split=split,
        uid=uid,
        template=data.template,
        reading=data.reading,
        source=IncrementalSource(data.source, order),
        mirror=data.mirror,
        content=data.digest,
        ok=(order >= 0).astype(np.uint8),
        known=len(rows) if known is None else known,
    )


def _recoded(
    codes: NDArray[np.integer[Any]], old: tuple[str, ...], new: tuple[str, ...], unknown: int
) -> NDArray[np.int64]:
    """Codes of one list of names as codes of another; ``unknown`` for a name that is no longer there."""
    table = [new.index(name) if name in new else unknown for name in old]
    return np.array([table[c] if c >= 0 else unknown for c in codes.tolist()], np.int64)
