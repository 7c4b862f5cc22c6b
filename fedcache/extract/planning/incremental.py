"""Incremental extraction: of a dataset that has changed, only what an earlier store does not have is computed.

A store never changes its content, because results, partitions and shards name its digest. So new images make a new
store where a fresh one would lie, and what is saved is the work, not the directory.

- **Parent.** Of the stores next to the new one and in the home: other content, neither ingested nor a shard, at least
  half of its readable rows still there by their bytes, under whatever name. Those of the dataset's name are looked at,
  and where there is none, the latest others that have an array of those requested. The one with the most such rows is
  taken, if a whole chunk can be taken over or nothing is new.
- **Rows.** Those of the parent in their order, then the new ones in name order. A row whose image is gone or has other
  bytes is kept with ``ok`` 0 and never used; an image that comes back is a new row. Labels, domains and splits are
  those the dataset gives now.
- **Chunks.** An array of the parent with the same recipe and the same ``how`` gives its whole chunks: verified,
  hard-linked (copied across devices), and vouched for in the new journal. The partial chunk is computed again, because
  its batches were padded otherwise. From there on the array is an ordinary unfinished one.

Appending in place is no way: readers take no lock, and results would name a digest that no longer exists.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.config import Home
from fedcache.errors import CorruptionError, FedcacheError
from fedcache.extract.batches import FeatureJob
from fedcache.extract.datasets.dataset import Dataset, RowsSource, content_digest
from fedcache.progress import Observer
from fedcache.store.catalog import is_ingested
from fedcache.store.chunks import chunk_path
from fedcache.store.manifest import VANISHED, read_text
from fedcache.store.samples import Samples
from fedcache.store.store import ArrayWriter, Store

OTHERS = 8
"""Stores of other names that are looked at: the names and digests of all their rows are read."""


@dataclass(frozen=True, eq=False, kw_only=True)
class IncrementalDataset(Dataset):
    """A dataset whose rows are in another order than that of their names."""

    content: str  # digest of the dataset in its own order
    ok: NDArray[np.uint8]  # [N], 0 where the image has vanished
    known: int  # rows that the earlier store had

    def __post_init__(self) -> None:
        digest = sha256(
            content_digest(self).encode() + self.content.encode() + self.ok.tobytes()
        ).hexdigest()
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
    """Where the rows ``before`` of a store are in a dataset, int64 [N]; -1 for an image that is not there any more.

    A row is the image of its name where that has the same bytes, else an image of the same bytes under a name that no
    other row has: one that was renamed. ``gone``, bool [N], are rows that had vanished by then, which never come back.
    """
    index = {name: row for row, name in enumerate(data.names)}
    found = np.array([index.get(name, -1) for name in before.name], np.int64)
    found[gone] = -1
    # A row of the same name with other bytes is another image.
    there = np.flatnonzero(found >= 0)
    other = (data.uid[found[there]] != before.uid[there]).any(axis=1)
    found[there[other]] = -1
    lost = np.flatnonzero((found < 0) & ~gone)
    if not len(lost):
        return found
    left: dict[bytes, list[int]] = {}
    # From the last to the first, as rows are popped from the end: in the order of names.
    for row in np.setdiff1d(np.arange(len(data)), found)[::-1].tolist():
        left.setdefault(data.uid[row].tobytes(), []).append(row)
    for row in lost.tolist():
        if places := left.get(before.uid[row].tobytes()):
            found[row] = places.pop()
    return found


def in_earlier_order(
    data: Dataset, before: Samples, rows: NDArray[np.int64], *, known: int | None = None
) -> IncrementalDataset:
    """The rows of an earlier store in their order, and then the new rows.

    Args:
        data: as it is now.
        before: rows of the earlier store, which ``find_earlier_rows`` found to be ``rows`` of ``data``.
        known: of the rows of ``before``, those of the store it grew from itself; None for all.
    """
    # -1 in ``order`` picks the last row of each column; the values of lost rows are then replaced.
    rest = np.setdiff1d(np.arange(len(data)), rows)
    order = np.concatenate([rows, rest])
    lost = np.flatnonzero(rows < 0)
    label = data.label[order]
    domain = data.domain[order]
    split = data.split[order]
    uid = data.uid[order]
    label[lost] = _recoded(before.label[lost], before.classes, data.classes, -1)
    domain[lost] = _recoded(before.domain[lost], before.domains, data.domains, 0)
    split[lost] = before.split[lost]
    uid[lost] = before.uid[lost]
    # Renamed images get their new names; images that have vanished keep their last ones.
    names = [data.names[row] for row in order.tolist()]
    for row in lost.tolist():
        names[row] = before.name[row]
    if known is None:
        known = len(rows)
    return IncrementalDataset(
        spec=data.spec,
        slug=data.slug,
        classes=data.classes,
        domains=data.domains,
        names=tuple(names),
        label=label,
        domain=domain,
        split=split,
        uid=uid,
        template=data.template,
        reading=data.reading,
        source=RowsSource(data.source, order),
        mirror=data.mirror,
        holds=data.holds,
        groups={name: group.take(order) for name, group in data.groups.items()},
        content=data.digest,
        ok=(order >= 0).astype(np.uint8),
        known=known,
    )


def _recoded(
    codes: NDArray[np.integer[Any]], old: tuple[str, ...], new: tuple[str, ...], unknown: int
) -> NDArray[np.int64]:
    """Codes of one list of names as codes of another; ``unknown`` for a name that is no longer there."""
    place = {name: number for number, name in enumerate(new)}
    # code -1 picks the last: unknown
    table = np.array([*(place.get(name, unknown) for name in old), unknown], np.int64)
    found: NDArray[np.int64] = table[codes]
    return found


@dataclass
class IncrementalPlan:
    """A store in the making that takes over the work of an earlier one."""

    data: IncrementalDataset  # the dataset in the order of the rows
    parent: Store | None  # the earlier store; None when it is gone
    # per array that is taken over, rows per chunk
    chunk_rows: dict[str, int] = field(default_factory=dict)
    # per array that is taken over, its first chunks that are whole
    whole: dict[str, int] = field(default_factory=dict)
    reused: int = 0  # chunks taken over in this run

    def expected(self, keys: Iterable[str]) -> dict[str, int]:
        """Summary of the work of an extraction to come, in the words of ``Extraction.growth``."""
        left = (
            self.data.ok[self.whole.get(key, 0) * self.chunk_rows.get(key, 0) :] for key in keys
        )
        passes = sum(int(ok.sum()) for ok in left)
        return {**self.result(passes), "reused_chunks": sum(self.whole.values())}

    def result(self, forward_passes: int) -> dict[str, int]:
        """Summary of a finished extraction, given how many images went through a model."""
        return {
            "new": self.data.new,
            "vanished": len(self.data.vanished),
            "reused_chunks": self.reused,
            "forward_passes": forward_passes,
        }

    def adopt(self, writers: Mapping[str, ArrayWriter]) -> None:
        """Give open writers the chunks they lack and the parent has; one that is damaged there is left to compute."""
        for key, writer in writers.items():
            if (
                self.parent is None
                or key not in self.whole
                or writer.chunk_rows != self.chunk_rows[key]
            ):
                continue
            info = self.parent.arrays[key]
            reasons = {
                e["row"]: e["reason"] for e in self.parent.quarantined() if e["reason"] != VANISHED
            }
            for chunk in [c for c in writer.missing() if c < self.whole[key]]:
                place = chunk_path(self.parent.path / "features" / key, chunk, len(info.shape))
                try:
                    writer.adopt(chunk, place, info.chunks[chunk], self._bad(key, chunk, reasons))
                except CorruptionError:
                    continue
                self.reused += 1

    def _bad(self, key: str, chunk: int, reasons: Mapping[int, str]) -> dict[int, str]:
        """Rows of a chunk whose image this backbone could not read: unreadable rows may have features in one array."""
        assert self.parent is not None
        size = self.chunk_rows[key]
        rows = [
            r for r in range(chunk * size, (chunk + 1) * size) if r in reasons and self.data.ok[r]
        ]
        if not rows:
            return {}
        values = (
            self.parent.reader(key)
            .chunk(chunk)[np.array(rows) - chunk * size]
            .reshape(len(rows), -1)
        )
        # An image that a backbone could not read has NaN in every feature, or zero in every pixel.
        if values.dtype.kind == "f":
            empty = np.isnan(values).all(axis=1)
        else:
            empty = ~values.any(axis=1)
        return {row: reasons[row] for row, lost in zip(rows, empty, strict=True) if lost}

    def carry_text(self, store: Store) -> None:
        """Copy the parent's text features when they are of the same classes; those current there stay current."""
        if self.parent is None:
            return
        for entry in chain.from_iterable(self.parent.texts.values()):
            meta = entry["meta"]
            templates = entry["templates"]
            backbone = str(meta.get("backbone"))
            if meta.get("classes") != list(self.data.classes):
                continue
            if not store.has_text(backbone, templates, weights=meta.get("weights")):
                matrix = read_text(self.parent.path, backbone, entry)
                store.put_text(backbone, templates, matrix, meta)


def plan_incremental(
    path: Path,
    data: Dataset,
    jobs: Sequence[FeatureJob],
    home: Home,
    *,
    chunk_rows: int | None,
    fresh: bool,
    observer: Observer,
) -> IncrementalPlan | None:
    """The rows that a new or resumed store of ``data`` at ``path`` takes over from an earlier one; None without one.

    Nothing is taken over when it is to be ``fresh``. Earlier stores are next to ``path`` and in the home; the
    observer reports an array that was computed otherwise.
    """
    keys = {job.key for job in jobs}
    with suppress(FedcacheError):
        store = Store.open(path)
        if store.content != data.digest or "grown" not in store.dataset:
            return None
        before = store.samples
        gone = store.vanished()
        rows = find_earlier_rows(data, before, gone)
        parent = None
        known = None
        for earlier in earlier_stores(path, data.slug, home, keys):
            if earlier.dataset["digest"] == store.dataset["grown"]:
                parent = earlier
                known = earlier.rows
                break
        made = in_earlier_order(data, before, rows, known=known)
        if fresh:
            parent = None
        return _take_over(IncrementalPlan(made, parent), jobs, chunk_rows)
    if fresh or path.exists():
        return None
    best: tuple[int, float, IncrementalPlan] | None = None
    otherwise: Store | None = None
    for parent in earlier_stores(path, data.slug, home, keys):
        with suppress(FedcacheError):
            if parent.content == data.digest:
                continue  # nothing has changed: a store of its own was requested, elsewhere
            rows = find_earlier_rows(data, parent.samples, parent.vanished())
            kept = int((rows >= 0).sum())
            if 2 * kept < max(1, parent.rows):
                continue
            plan = _take_over(
                IncrementalPlan(in_earlier_order(data, parent.samples, rows), parent),
                jobs,
                chunk_rows,
            )
            if not plan.whole and keys & parent.arrays.keys():
                otherwise = parent
            rank = (kept, (parent.path / "manifest.json").stat().st_mtime)
            if any(plan.whole.values()) and (best is None or rank > best[:2]):
                best = (*rank, plan)
    if best is None and otherwise is not None:
        observer.note(
            f"{otherwise.path.name} has most of these rows, but all are computed again, because every "
            "chunk has a changed row or was computed differently (device, dtype, batch or versions; see "
            "fedcache inspect)."
        )
    if best is None:
        return None
    return best[2]


def earlier_stores(path: Path, slug: str, home: Home, keys: Collection[str]) -> list[Store]:
    """The other stores of a name, in addition to ``path`` and in the home; shards and embeddings are none.

    Where no store has that name, the latest ``OTHERS`` that have one of the arrays ``keys``: the folder may have been
    renamed.
    """
    places = {
        p.resolve(): p
        for folder in (path.parent, home.stores)
        for p in sorted(folder.glob("*.zarr"))
    }
    places.pop(path.resolve(), None)
    found = []
    others = []
    for place in places.values():
        with suppress(FedcacheError, OSError):
            store = Store.open(place)
            if is_ingested(store) or "shard" in store.dataset:
                continue
            if store.dataset["slug"] == slug:
                found.append(store)
            elif store.arrays.keys() & set(keys):
                others.append(((place / "manifest.json").stat().st_mtime, place, store))
    others.sort(key=lambda one: one[:2], reverse=True)
    return found or [store for _, _, store in others[:OTHERS]]


def _take_over(
    plan: IncrementalPlan, jobs: Sequence[FeatureJob], chunk_rows: int | None
) -> IncrementalPlan:
    """Which arrays of the parent have the recipe, the ``how`` and the chunks of those requested."""
    if plan.parent is None:
        return plan
    for job in jobs:
        info = plan.parent.arrays.get(job.key)
        if info is None or info.how != dict(job.how) or chunk_rows not in (None, info.chunk_rows):
            continue
        whole = len(info.chunks)
        # The last batch is padded with its last row: it is the same only where no row follows.
        if plan.data.new:
            whole = info.shape[0] // info.chunk_rows
        if whole:
            plan.chunk_rows[job.key] = info.chunk_rows
            plan.whole[job.key] = whole
    return plan
