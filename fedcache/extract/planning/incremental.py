"""Extraction of a dataset that has changed: which earlier store it grows from, and what it takes over from there.

docs/design/step-3-incremental.md says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedcache.config import Home
from fedcache.errors import Exit, FedcacheError
from fedcache.extract.datasets.grown import Grown, grown, places
from fedcache.extract.planning.plan import Planned
from fedcache.progress import Observer
from fedcache.store.chunks import chunk_path
from fedcache.store.exchange import is_ingested
from fedcache.store.quarantine import VANISHED
from fedcache.store.store import Store

if TYPE_CHECKING:
    from fedcache.extract.datasets import Dataset
    from fedcache.store.store import ArrayWriter


@dataclass
class Growth:
    """A store in the making that takes over the work of an earlier one.

    Attributes:
        data: the dataset in the order of the rows.
        parent: the earlier store; None when it is gone.
        chunk_rows: per array that is taken over, rows per chunk.
        whole: per array that is taken over, its first chunks that are whole.
        reused: chunks taken over in this run.
    """

    data: Grown
    parent: Store | None
    chunk_rows: dict[str, int] = field(default_factory=dict)
    whole: dict[str, int] = field(default_factory=dict)
    reused: int = 0

    def meta(self) -> dict[str, Any]:
        """What the manifest says of the dataset besides slug, digest and template."""
        return {"content": self.data.content, "grown": self.parent.dataset["digest"] if self.parent else None}

    def plan(self, planned: Sequence[Planned]) -> dict[str, int]:
        """What an extraction would do: images new and vanished, chunks reused, forward passes (images, all arrays)."""
        todo = (p.recipe.key for p in planned)
        return {
            "new": self.data.new,
            "vanished": len(self.data.vanished),
            "reused_chunks": sum(self.whole.values()),
            "forward_passes": sum(
                int(self.data.ok[self.whole.get(key, 0) * self.chunk_rows.get(key, 0) :].sum()) for key in todo
            ),
        }

    def done(self, forward_passes: int) -> dict[str, int]:
        """What an extraction did, given how many images went through a model."""
        return {
            "new": self.data.new,
            "vanished": len(self.data.vanished),
            "reused_chunks": self.reused,
            "forward_passes": forward_passes,
        }

    def adopt(self, writers: Mapping[str, ArrayWriter]) -> None:
        """Give open writers the chunks they lack and the parent has; one that is damaged there is left to compute."""
        for key, writer in writers.items():
            if self.parent is None or key not in self.whole or writer.chunk_rows != self.chunk_rows[key]:
                continue
            info = self.parent.arrays[key]
            reasons = {e["row"]: e["reason"] for e in self.parent.quarantined() if e["reason"] != VANISHED}
            for chunk in [c for c in writer.missing() if c < self.whole[key]]:
                place = chunk_path(self.parent.path / "features" / key, chunk, len(info.shape))
                try:
                    writer.adopt(chunk, place, info.chunks[chunk], self._bad(key, chunk, reasons))
                except FedcacheError as error:
                    if error.code is not Exit.CORRUPT:
                        raise
                else:
                    self.reused += 1

    def _bad(self, key: str, chunk: int, reasons: Mapping[int, str]) -> dict[int, str]:
        """Rows of a chunk whose image this backbone could not read: unreadable rows may have features in one array."""
        assert self.parent is not None
        size = self.chunk_rows[key]
        rows = [r for r in range(chunk * size, (chunk + 1) * size) if r in reasons and self.data.ok[r]]
        if not rows:
            return {}
        values = self.parent.reader(key).chunk(chunk)[np.array(rows) - chunk * size].reshape(len(rows), -1)
        empty = np.isnan(values).all(axis=1) if values.dtype.kind == "f" else ~values.any(axis=1)
        return {row: reasons[row] for row, lost in zip(rows, empty, strict=True) if lost}

    def carry_text(self, store: Store) -> None:
        """Copy the parent's text features when they are of the same classes; those current there stay current."""
        for entries in self.parent.texts.values() if self.parent else ():
            for entry in entries:
                meta, templates = entry["meta"], entry["templates"]
                backbone = str(meta.get("backbone"))
                if meta.get("classes") != list(self.data.classes) or self.parent is None:
                    continue
                if not store.has_text(backbone, templates, weights=meta.get("weights")):
                    store.put_text(backbone, templates, self.parent.text(backbone, templates), meta)


def grow(
    path: Path,
    data: Dataset,
    planned: Sequence[Planned],
    records: Mapping[str, Mapping[str, Any]],
    home: Home,
    *,
    chunk_rows: int | None,
    fresh: bool,
    observer: Observer,
) -> Growth | None:
    """How a store of ``data`` at ``path`` grows from an earlier one; None when it does not.

    Args:
        path: of the store to make, or to go on with.
        data: as it is now.
        planned: the arrays asked for.
        records: ``how`` of each, by key.
        home: with the stores among which earlier ones are.
        chunk_rows: asked for, or None.
        fresh: take nothing over.
        observer: told when an earlier store was computed otherwise.
    """
    with suppress(FedcacheError):
        store = Store.open(path)
        if store.content != data.digest or "grown" not in store.dataset:
            return None
        before, gone = store.samples, vanished(store)
        rows = places(data, before, gone)
        origin = store.dataset["grown"]
        parent = next((s for s in earlier(path, data.slug, home) if s.dataset["digest"] == origin), None)
        made = grown(data, before, rows, known=None if parent is None else parent.rows)
        return _take_over(Growth(made, None if fresh else parent), planned, records, chunk_rows)
    if fresh or path.exists():
        return None
    best: tuple[int, float, Growth] | None = None
    otherwise: Store | None = None
    for parent in earlier(path, data.slug, home):
        with suppress(FedcacheError):
            if parent.content == data.digest:
                continue  # nothing has changed: a store of its own was asked for, elsewhere
            rows = places(data, parent.samples, vanished(parent))
            kept = int((rows >= 0).sum())
            if 2 * kept < max(1, parent.rows):
                continue
            growth = _take_over(Growth(grown(data, parent.samples, rows), parent), planned, records, chunk_rows)
            if not growth.whole and any(p.recipe.key in parent.arrays for p in planned):
                otherwise = parent
            rank = (kept, (parent.path / "manifest.json").stat().st_mtime)
            if any(growth.whole.values()) and (best is None or rank > best[:2]):
                best = (*rank, growth)
    if best is None and otherwise is not None:
        observer.note(
            f"{otherwise.path.name} has most of these images, computed otherwise or in no whole chunk (device, dtype, "
            "batch, versions: see fedcache inspect): all are computed again."
        )
    return None if best is None else best[2]


def earlier(path: Path, slug: str, home: Home) -> list[Store]:
    """The other stores of a name, beside ``path`` and in the home; shards and embeddings are none."""
    places = {p.resolve(): p for folder in (path.parent, home.stores) for p in sorted(folder.glob("*.zarr"))}
    places.pop(path.resolve(), None)
    found = []
    for place in places.values():
        with suppress(FedcacheError):
            store = Store.open(place)
            if store.dataset["slug"] == slug and not is_ingested(store) and "shard" not in store.dataset:
                found.append(store)
    return found


def vanished(store: Store) -> NDArray[np.bool_]:
    """bool [N], the rows of a store whose image had vanished when it was made."""
    gone = np.zeros(store.rows, bool)
    gone[[e["row"] for e in store.quarantined() if e["reason"] == VANISHED]] = True
    return gone


def _take_over(
    growth: Growth, planned: Sequence[Planned], records: Mapping[str, Mapping[str, Any]], chunk_rows: int | None
) -> Growth:
    """Which arrays of the parent have the recipe, the ``how`` and the chunks of those asked for."""
    for key in (p.recipe.key for p in planned):
        info = growth.parent.arrays.get(key) if growth.parent is not None else None
        if info is None or info.how != dict(records[key]) or chunk_rows not in (None, info.chunk_rows):
            continue
        # The last batch is padded with its last row: it is the same only where no row follows.
        whole = info.shape[0] // info.chunk_rows if growth.data.new else len(info.chunks)
        if whole:
            growth.chunk_rows[key], growth.whole[key] = info.chunk_rows, whole
    return growth
