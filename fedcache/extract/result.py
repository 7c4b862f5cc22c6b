"""Result of an extraction: counts while it runs, and the summary at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedcache.errors import CorruptionError
from fedcache.extract.batches import ComputedBatch
from fedcache.extract.device import cores
from fedcache.extract.inputs import IMAGES
from fedcache.extract.planning.plan import PlannedArray, describe_array
from fedcache.store.manifest import VANISHED
from fedcache.store.store import Store


@dataclass
class ExtractionStats:
    """What an extraction did; the figures of its last line."""

    images: int = 0  # images decoded in this process tree
    forward_batches: dict[str, int] = field(default_factory=dict)  # per key, batches computed
    forward_images: int = 0  # images that went through a model, summed over arrays
    kept_chunks: dict[str, int] = field(default_factory=dict)  # per key, chunks found finished
    # reason per quarantined row, all arrays of the run
    bad: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0  # wall time of the extraction loop
    decode_seconds: float = 0.0  # summed over workers
    forward_seconds: float = 0.0  # summed over workers and backbones
    workers: int = 0  # processes that computed
    # per key, texts of which the model reads a part
    cut: dict[str, int] = field(default_factory=dict)
    holds: str = IMAGES  # images, texts or rows

    def add(self, batch: ComputedBatch) -> None:
        """Count a batch that was computed in this process tree."""
        self.images += batch.decoded - sum(why == VANISHED for why in batch.bad.values())
        self.decode_seconds += batch.decode_seconds
        self.bad.update(unreadable(batch.bad))
        for key, seconds in batch.forward_seconds.items():
            self.forward_seconds += seconds
            self.forward_batches[key] = self.forward_batches.get(key, 0) + 1
            self.forward_images += len(batch.features[key]) - len(batch.bad)
        self._count_cut(batch.cut)

    def _count_cut(self, cut: Mapping[str, int]) -> None:
        for key, count in cut.items():
            self.cut[key] = self.cut.get(key, 0) + count

    def merge(self, other: ExtractionStats) -> None:
        """Add the counts of a chunk task that another process computed."""
        self.images += other.images
        self.decode_seconds += other.decode_seconds
        self.forward_seconds += other.forward_seconds
        self.forward_images += other.forward_images
        self.bad.update(other.bad)
        for key, count in other.forward_batches.items():
            self.forward_batches[key] = self.forward_batches.get(key, 0) + count
        self._count_cut(other.cut)

    def check_bad(self, latest: Mapping[int, str], max_bad: int) -> None:
        """CorruptionError, with the last of ``latest`` (those found last), for more bad images than there may be."""
        if len(self.bad) > max_bad:
            row, reason = sorted((latest or self.bad).items())[-1]
            raise CorruptionError(
                f"{len(self.bad)} {self.holds} could not be read, more than --max-bad {max_bad}; the last is row "
                f"{row}: {reason}.",
                f"Mend the {self.holds}, or run again with a larger --max-bad: finished chunks are kept.",
            )

    @property
    def rate(self) -> float:
        """Images per second."""
        if self.seconds:
            return self.images / self.seconds
        return 0.0

    def busy(self, cores: int) -> float:
        """Share of the cores' time that went into decoding and the models."""
        if self.seconds:
            return (self.decode_seconds + self.forward_seconds) / (self.seconds * cores)
        return 0.0


def unreadable(bad: Mapping[int, str]) -> dict[int, str]:
    """Rows whose image is there and cannot be read; one that has vanished is no defect."""
    return {row: reason for row, reason in bad.items() if reason != VANISHED}


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
        holds: what the dataset holds: images, texts or rows.
        cut: texts of this run of which a backbone reads a part, by backbone; none where none was cut.
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
    holds: str = IMAGES
    cut: dict[str, int] = field(default_factory=dict)

    @property
    def store(self) -> Store:
        """The store, opened."""
        return Store.open(self.path)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**self.__dict__, "path": str(self.path)}

    def __repr__(self) -> str:
        names = ", ".join(a["key"] for a in self.arrays)
        return f"Extraction({self.dataset['slug']}: {self.ok:,} of {self.images:,} {self.holds}, {names}, {self.path})"


def summarise(
    store: Store,
    planned: Sequence[PlannedArray],
    states: Mapping[str, str],
    stats: ExtractionStats | None,
) -> Extraction:
    """The figures of an extraction, from the store and what was computed."""
    arrays = []
    for item in planned:
        info = store.arrays[item.recipe.key]
        arrays.append(
            {
                **describe_array(item, info.shape, info.dtype, states[item.recipe.key]),
                "kept_chunks": stats.kept_chunks.get(item.recipe.key, 0)
                if stats
                else len(info.chunks),
                "chunks": len(info.chunks),
                "forward_batches": stats.forward_batches.get(item.recipe.key, 0) if stats else 0,
            }
        )
    out = Extraction(store.path, {k: str(store.dataset[k]) for k in ("slug", "digest")}, arrays)
    out.holds = planned[0].backbone.reads if planned else IMAGES
    listed = store.quarantined()
    out.bad = [entry for entry in listed if entry["reason"] != VANISHED]
    out.vanished = len(listed) - len(out.bad)
    out.images = store.rows - out.vanished
    out.ok = store.rows_ok
    if stats is not None:
        out.decoded = stats.images
        out.seconds = stats.seconds
        out.rate = stats.rate
        out.busy = stats.busy(cores())
        out.workers = stats.workers
        out.cut = {
            item.backbone.name: n for item in planned if (n := stats.cut.get(item.recipe.key, 0))
        }
    return out
