"""Result of an extraction: counts while it runs, and the summary at its end."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedcache.config import ExtractConfig, Home
from fedcache.errors import MachineError, StoreError
from fedcache.extract.datasets.dataset import Dataset
from fedcache.extract.device import cores
from fedcache.extract.how import jobs_of, resolve_compute
from fedcache.extract.planning.cost import expected_seconds
from fedcache.extract.planning.incremental import plan_incremental
from fedcache.extract.planning.plan import (
    PlannedArray,
    array_bytes,
    describe_array,
    missing_text,
    wanted_text,
)
from fedcache.extract.recipe import IMAGES, one_of
from fedcache.extract.workers.local import ExtractionStats
from fedcache.progress import Observer
from fedcache.store.join import finished_arrays, rows_of_part
from fedcache.store.manifest import VANISHED, StorePart, part_of
from fedcache.store.store import Store
from fedcache.tables.words import counted


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
        part: ``part 1 of 4`` where one part was computed; ``path`` is then its folder, and images, ok and bad are
            of its rows. None for all of a dataset.
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
    part: str | None = None

    @property
    def store(self) -> Store:
        """The store, or the part of one, opened."""
        return Store.open(self.path, part=True)

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
    held = finished_arrays(store)
    for item in planned:
        key = item.recipe.key
        info = held[key]
        kept = len(info.chunks)
        computed = 0
        if stats is not None:
            kept = stats.kept_chunks.get(key, 0)
            computed = stats.forward_batches[key]
        arrays.append(
            {
                **describe_array(item, info.shape, info.dtype, states[key]),
                "kept_chunks": kept,
                "chunks": len(info.chunks),
                "forward_batches": computed,
            }
        )
    out = Extraction(store.path, {k: str(store.dataset[k]) for k in ("slug", "digest")}, arrays)
    out.holds = planned[0].backbone.reads if planned else IMAGES
    listed = store.quarantined()
    out.bad = [entry for entry in listed if entry["reason"] != VANISHED]
    out.vanished = len(listed) - len(out.bad)
    out.images = store.rows - out.vanished
    out.ok = store.rows_ok
    if (part := part_of(store.dataset)) is not None:
        out.part = str(part)
        out.images, out.bad = rows_of_part(store)
        out.ok = out.images - len(out.bad)
    if stats is not None:
        out.decoded = stats.images
        out.seconds = stats.seconds
        out.rate = stats.rate
        out.busy = stats.busy(cores())
        out.workers = stats.workers
        cut = {item.backbone.name: stats.cut[item.recipe.key] for item in planned}
        out.cut = {name: count for name, count in cut.items() if count}
    return out


FULL_DISK_MARGIN = 64 << 20


def check_disk(
    path: Path, data: Dataset, planned: Sequence[PlannedArray], part: StorePart | None
) -> None:
    """Refuse before any work what the disk cannot hold of the arrays, or of a part of them."""
    parent = next(folder for folder in (path, *path.parents) if folder.exists())
    free = shutil.disk_usage(parent).free
    need = sum(array_bytes(len(data.names), p) for p in planned)
    if part is not None:
        need = math.ceil(need / part.of)
    if need + FULL_DISK_MARGIN > free:
        raise MachineError(
            f"The features need {need:,} bytes and {FULL_DISK_MARGIN:,} to spare, and {parent} has {free:,} free.",
            "Free some space, choose another place with --store or FEDCACHE_HOME, or extract fewer backbones or views.",
        )


def describe_growth(growth: Mapping[str, int], holds: str = IMAGES) -> str:
    """What is new, gone, taken over and to compute, in one clause."""
    chunks = counted(growth["reused_chunks"], "chunk")
    passes = counted(growth["forward_passes"], "forward pass")
    return f"{counted(growth['new'], one_of(holds))} new, {growth['vanished']:,} vanished, {chunks} reused, {passes}"


def estimate(
    path: Path,
    data: Dataset,
    planned: Sequence[PlannedArray],
    config: ExtractConfig,
    home: Home,
    observer: Observer,
    skipped: list[str],
    *,
    fresh: bool,
) -> Extraction:
    """``--dry-run``: what would be computed, its bytes, and the time by timing a few batches here."""
    try:
        store: Store | None = Store.open(path)
    except StoreError:
        store = None
    jobs = jobs_of(planned, data, *resolve_compute(config, [p.backbone for p in planned]))
    earlier = plan_incremental(
        path, data, jobs, home, chunk_rows=config.chunk_rows, fresh=fresh, observer=observer
    )
    present = len(data.names)
    if earlier is not None:
        data = earlier.data
    todo = [p for p in planned if store is None or p.recipe.key not in store.arrays]
    arrays = []
    for p in planned:
        shape = (len(data.names), p.recipe.views, p.backbone.width)
        state = "complete"
        if p in todo:
            state = "to compute"
        size = array_bytes(len(data.names), p)
        arrays.append({**describe_array(p, shape, p.recipe.dtype, state), "bytes": size})
    out = Extraction(
        path, {"slug": data.slug, "digest": data.digest}, arrays, images=present, skipped=skipped
    )
    out.holds = data.holds
    if store is not None and not todo:
        out.ok = store.rows_ok
    images = len(todo) * present
    if earlier is not None and earlier.parent is not None:
        out.growth = earlier.expected(p.recipe.key for p in todo)
        out.vanished = len(earlier.data.vanished)
        images = out.growth["forward_passes"]
        observer.note(
            f"Would grow from {earlier.parent.path.name}: {describe_growth(out.growth, data.holds)}."
        )
    wanted = wanted_text(store, planned, data.classes, data.template, config, keep=False)
    lacking = missing_text(store, planned, wanted)
    for p in planned:
        if p.recipe.key in wanted:
            state = "complete"
            if p.recipe.key in lacking:
                state = "to compute"
            templates = list(wanted[p.recipe.key])
            out.text.append({"backbone": p.backbone.name, "templates": templates, "state": state})
    ready = all(p.weights.path is not None or not p.backbone.files for p in todo)
    if ready and images:
        rows = math.ceil(images / len(todo))
        out.seconds = expected_seconds(data, todo, config, rows)
        if out.seconds:
            out.rate = rows / out.seconds
        observer.note(
            f"A few batches timed here: about {out.rate:,.0f} {data.holds}/s, {math.ceil(out.seconds):,} s in all."
        )
    return out
