"""Incremental extraction: if a dataset has changed, only the features that an earlier store lacks are computed.

A store never changes its content, because results, partitions and shards name its digest. So a changed dataset gets a
new store, at the path that a fresh one would have, and the work for the earlier store, the parent, is reused.

- **Parent.** Candidates are the stores next to the new one and in the home that have other content and are neither
  ingested nor a shard. At least half of the rows of the parent must be in the dataset with the same bytes, under any
  name. Stores with the dataset's name are tried. If there are none, the latest stores of other names are tried that
  have one of the requested arrays. Of the candidates with a chunk that can be reused, the one with the most such rows
  is taken.
- **Rows.** The rows of the parent come in their order, then the new rows in the order of their names. A row whose image
  is gone or has other bytes is kept with ``ok`` 0 and never used; an image that comes back is a new row. Labels,
  domains and splits are those of the dataset now.
- **Chunks.** If an array of the parent has the same recipe and ``how``, its whole chunks are reused. They are
  verified, hard-linked (copied across devices), and entered into the new journal. The last, partial chunk is computed
  again, because the padding of its batches differs. The array is then an ordinary unfinished one.

Rows are not appended in place: readers take no lock, and results would name a digest that no longer exists.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
"""Maximum number of stores of other names that are compared. The names and digests of all their rows are read."""


@dataclass(frozen=True, eq=False, kw_only=True)
class IncrementalDataset(Dataset):
    """A dataset whose rows are in the order of an earlier store and not in that of their names."""

    content: str  # digest of the dataset in its own order
    ok: NDArray[np.uint8]  # [N], 0 where the image has vanished
    known: int  # how many of the first rows the earlier store had

    def __post_init__(self) -> None:
        digest = sha256(content_digest(self).encode())
        digest.update(self.content.encode())
        digest.update(self.ok.tobytes())
        object.__setattr__(self, "digest", digest.hexdigest())

    @property
    def vanished(self) -> dict[int, str]:
        """The reason per row that has vanished."""
        return dict.fromkeys(np.flatnonzero(self.ok == 0).tolist(), VANISHED)

    @property
    def new(self) -> int:
        """Number of rows that the earlier store did not have."""
        return len(self.names) - self.known


def find_earlier_rows(data: Dataset, before: Samples, gone: NDArray[np.bool_]) -> NDArray[np.int64]:
    """For each of the N rows of a store, the row of the dataset with the same image, int64 [N]; -1 if it has none.

    The row of the same name is taken if it has the same bytes. Otherwise the image may have been renamed, so a row with
    the same bytes is taken, unless another row of the store has taken it. ``gone``, bool [N], marks rows of the store
    whose image had vanished already; they stay -1.
    """
    row_of = {name: row for row, name in enumerate(data.names)}
    found = np.array([row_of.get(name, -1) for name in before.name], np.int64)
    found[gone] = -1
    # A row of the same name with other bytes is another image.
    same_name = np.flatnonzero(found >= 0)
    differs = (data.uid[found[same_name]] != before.uid[same_name]).any(axis=1)
    found[same_name[differs]] = -1
    lost = np.flatnonzero((found < 0) & ~gone)
    if not len(lost):
        return found
    free = np.setdiff1d(np.arange(len(data)), found)
    # Rows are collected from the last to the first and taken from the end. So of several copies of an image, the one
    # with the first name is taken first.
    rows_of_uid: dict[bytes, list[int]] = {}
    for row in free[::-1].tolist():
        rows_of_uid.setdefault(data.uid[row].tobytes(), []).append(row)
    for row in lost.tolist():
        rows = rows_of_uid.get(before.uid[row].tobytes())
        if rows:
            found[row] = rows.pop()
    return found


def in_earlier_order(
    data: Dataset, before: Samples, rows: NDArray[np.int64], *, known: int | None = None
) -> IncrementalDataset:
    """The rows of an earlier store in their order, and then the new rows.

    Args:
        data: the dataset as it is now.
        before: rows of the earlier store, or of the new store if it was begun already.
        rows: for each of them its row in ``data``, as ``find_earlier_rows`` gives it.
        known: number of leading rows of ``before`` that come from the earlier store; None for all.
    """
    new = np.setdiff1d(np.arange(len(data)), rows)
    order = np.concatenate([rows, new])
    lost = np.flatnonzero(rows < 0)
    # -1 in ``order`` picks the last row of each column; the values of lost rows are replaced below.
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
    """Codes of the names ``old`` as codes of the names ``new``; ``unknown`` for a name that is not among the new."""
    code_of = {name: code for code, name in enumerate(new)}
    new_codes = [code_of.get(name, unknown) for name in old]
    # Code -1 picks the last: unknown.
    table = np.array([*new_codes, unknown], np.int64)
    found: NDArray[np.int64] = table[codes]
    return found


@dataclass
class IncrementalPlan:
    """What a new store reuses of an earlier one."""

    data: IncrementalDataset  # the dataset in the row order of the new store
    parent: Store | None  # the earlier store; None if it no longer exists or must not be used
    # key of each reused array -> rows per chunk
    chunk_rows: dict[str, int] = field(default_factory=dict)
    # key of each reused array -> number of its first chunks that are reused
    whole: dict[str, int] = field(default_factory=dict)
    reused: int = 0  # chunks reused in this run

    def result(self, forward_passes: int) -> dict[str, int]:
        """Summary of an extraction in which ``forward_passes`` images go through a model, for ``Extraction.growth``."""
        return {
            "new": self.data.new,
            "vanished": len(self.data.vanished),
            "reused_chunks": self.reused,
            "forward_passes": forward_passes,
        }

    def adopt(self, writers: Mapping[str, ArrayWriter]) -> None:
        """Give open writers the missing chunks that the parent has; a chunk that is damaged there stays missing."""
        if self.parent is None:
            return
        for key, writer in writers.items():
            if key not in self.whole or writer.chunk_rows != self.chunk_rows[key]:
                continue
            info = self.parent.arrays[key]
            folder = self.parent.path / "features" / key
            reasons = {
                entry["row"]: entry["reason"]
                for entry in self.parent.quarantined()
                if entry["reason"] != VANISHED
            }
            reusable = [chunk for chunk in writer.missing() if chunk < self.whole[key]]
            for chunk in reusable:
                file = chunk_path(folder, chunk, len(info.shape))
                with suppress(CorruptionError):
                    bad = self._bad(key, chunk, reasons)
                    writer.adopt(chunk, file, info.chunks[chunk], bad)
                    self.reused += 1

    def _bad(self, key: str, chunk: int, reasons: Mapping[int, str]) -> dict[int, str]:
        """For each row of a chunk that the backbone of ``key`` could not read, the reason.

        ``reasons`` has all rows that some backbone could not read. The backbone of ``key`` may have features of them.
        """
        assert self.parent is not None
        size = self.chunk_rows[key]
        start = chunk * size
        rows = [row for row in range(start, start + size) if row in reasons and self.data.ok[row]]
        if not rows:
            return {}
        features = self.parent.reader(key).chunk(chunk)
        values = features[np.array(rows) - start].reshape(len(rows), -1)
        # An image that a backbone could not read has NaN in every feature, or zero in every pixel.
        if values.dtype.kind == "f":
            empty = np.isnan(values).all(axis=1)
        else:
            empty = ~values.any(axis=1)
        bad = np.array(rows)[empty].tolist()
        return {row: reasons[row] for row in bad}

    def carry_text(self, store: Store) -> None:
        """Copy the parent's text features of the same classes to a store, the current ones last: they stay current."""
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
    """What a new or resumed store of ``data`` at ``path`` reuses of an earlier one; None if no earlier one is used.

    Nothing is reused with ``fresh``. Earlier stores are next to ``path`` and in the home; the observer reports a store
    whose arrays were computed under other conditions.
    """
    keys = {job.key for job in jobs}
    with suppress(FedcacheError):
        # A store that was begun before: the order of its rows and its parent are fixed.
        store = Store.open(path)
        # Only a store that was planned by this function has ``grown``.
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
        return _plan_reuse(made, parent, jobs, chunk_rows)
    if fresh or path.exists():
        return None
    best = None
    best_rank = (0, 0.0)  # number of rows that are kept, and time of the store
    # A store that has a requested array, but no chunk that can be reused.
    unusable = None
    for parent in earlier_stores(path, data.slug, home, keys):
        with suppress(FedcacheError):
            if parent.content == data.digest:
                continue  # nothing has changed: the user wants the same content in another place
            rows = find_earlier_rows(data, parent.samples, parent.vanished())
            kept = int((rows >= 0).sum())
            if 2 * kept < max(1, parent.rows):
                continue
            made = in_earlier_order(data, parent.samples, rows)
            plan = _plan_reuse(made, parent, jobs, chunk_rows)
            if not plan.whole and keys & parent.arrays.keys():
                unusable = parent
            rank = (kept, (parent.path / "manifest.json").stat().st_mtime)
            # ``whole`` has only arrays with a chunk to reuse.
            if plan.whole and rank > best_rank:
                best = plan
                best_rank = rank
    if best is None and unusable is not None:
        observer.note(
            f"{unusable.path.name} has most of these rows. fedcache computes all rows again, because every chunk has "
            "a changed row or was computed with another device, dtype, batch or version (see fedcache inspect)."
        )
    return best


def earlier_stores(path: Path, slug: str, home: Home, keys: Collection[str]) -> list[Store]:
    """Other stores of the dataset ``slug``, next to ``path`` and in the home, without shards and embeddings.

    If there are none: the latest ``OTHERS`` stores of any name that have one of the arrays ``keys``, because the folder
    of the dataset may have been renamed.
    """
    places = {}
    for folder in (path.parent, home.stores):
        for place in sorted(folder.glob("*.zarr")):
            places[place.resolve()] = place
    places.pop(path.resolve(), None)
    same_name = []
    other_names = []
    for place in places.values():
        with suppress(FedcacheError, OSError):
            store = Store.open(place)
            if is_ingested(store) or "shard" in store.dataset:
                continue
            if store.dataset["slug"] == slug:
                same_name.append(store)
            elif store.arrays.keys() & set(keys):
                modified = (place / "manifest.json").stat().st_mtime
                other_names.append((modified, place, store))
    if same_name:
        return same_name
    other_names.sort(key=lambda other: other[:2], reverse=True)
    return [store for _, _, store in other_names[:OTHERS]]


def _plan_reuse(
    data: IncrementalDataset,
    parent: Store | None,
    jobs: Sequence[FeatureJob],
    chunk_rows: int | None,
) -> IncrementalPlan:
    """The plan that reuses arrays of the parent with the recipe, the ``how`` and the chunk size of those requested.

    ``chunk_rows`` is the requested number of rows per chunk; None for any.
    """
    plan = IncrementalPlan(data, parent)
    if parent is None:
        return plan
    for job in jobs:
        info = parent.arrays.get(job.key)
        if info is None or info.how != dict(job.how):
            continue
        if chunk_rows is not None and chunk_rows != info.chunk_rows:
            continue
        whole = len(info.chunks)
        # The last batch is padded with its last row, so it stays the same only if no row follows.
        if data.new:
            whole = info.shape[0] // info.chunk_rows
        if whole:
            plan.chunk_rows[job.key] = info.chunk_rows
            plan.whole[job.key] = whole
    return plan
