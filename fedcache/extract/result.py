"""What an extraction did, or would do, as figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedcache.extract.device import cores
from fedcache.extract.planning.plan import PlannedArray
from fedcache.extract.stats import ExtractionStats
from fedcache.store.quarantine import VANISHED
from fedcache.store.store import Store


@dataclass
class Extraction:
    """What ``extract`` did.

    Attributes:
        path: the store.
        dataset: spec, slug and digest.
        arrays: per array {key, backbone, recipe, shape, state before, kept chunks, forward batches}.
        images: of the dataset; rows of images that have vanished are not counted.
        ok: rows whose image was readable.
        bad: {row, name, reason} of every unreadable image of the store, found in this run or before.
        decoded: images decoded in this run.
        seconds: wall time of decoding and the models (0 when nothing was to do).
        rate: images per second.
        busy: share of the cores' time spent in decoding and the models.
        skipped: backbones left out by ``skip_missing``.
        text: per backbone with text {backbone, templates, state}: computed | made current | current, and in a plan
            to compute | complete.
        growth: where the dataset had changed: images ``new`` and ``vanished``, ``reused_chunks`` and
            ``forward_passes`` (images, summed over arrays) of this run, or of the plan.
        vanished: rows kept for images that are no longer in the dataset.
    """

    path: Path
    dataset: dict[str, str]
    arrays: list[dict[str, Any]]
    images: int = 0
    ok: int = 0
    bad: list[dict[str, Any]] = field(default_factory=list)
    decoded: int = 0
    seconds: float = 0.0
    rate: float = 0.0
    busy: float = 0.0
    workers: int = 0
    skipped: list[str] = field(default_factory=list)
    text: list[dict[str, Any]] = field(default_factory=list)
    growth: dict[str, Any] | None = None
    vanished: int = 0

    @property
    def store(self) -> Store:
        """The store, opened."""
        return Store.open(self.path)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**self.__dict__, "path": str(self.path)}

    def __repr__(self) -> str:
        names = ", ".join(a["key"] for a in self.arrays)
        return f"Extraction({self.dataset['slug']}: {self.ok:,} of {self.images:,} images, {names}, {self.path})"


def summarise(
    store: Store, planned: Sequence[PlannedArray], states: Mapping[str, str], stats: ExtractionStats | None
) -> Extraction:
    """The figures of an extraction, from the store and what was computed."""
    arrays = []
    for item in planned:
        info = store.arrays[item.recipe.key]
        arrays.append(
            {
                "key": item.recipe.key,
                "backbone": item.backbone.name,
                "recipe": item.recipe.to_dict(),
                "digest": item.recipe.digest,
                "shape": list(info.shape),
                "dtype": info.dtype,
                "state": states[item.recipe.key],
                "kept_chunks": stats.kept_chunks.get(item.recipe.key, 0) if stats else len(info.chunks),
                "chunks": len(info.chunks),
                "forward_batches": stats.forward_batches.get(item.recipe.key, 0) if stats else 0,
            }
        )
    out = Extraction(store.path, {k: str(store.dataset[k]) for k in ("slug", "digest")}, arrays)
    listed = store.quarantined()
    out.bad = [entry for entry in listed if entry["reason"] != VANISHED]
    out.vanished = len(listed) - len(out.bad)
    out.images, out.ok = store.rows - out.vanished, store.rows_ok
    if stats is not None:
        out.decoded, out.seconds, out.rate = stats.images, stats.seconds, stats.rate
        out.busy, out.workers = stats.busy(cores()), stats.workers
    return out
