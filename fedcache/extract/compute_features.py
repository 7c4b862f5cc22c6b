"""Extract arrays into a store: plan the missing batches, have them computed, complete the arrays.

A kill costs what is under way: the batches that are being computed, and those of the chunks that fill or are being
written. ``ChunkCollector.limit`` bounds it, and the first line says how many rows that is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from fedcache.errors import CorruptionError, StoppedError, UsageError
from fedcache.extract.batches import ComputeSettings, FeatureJob
from fedcache.extract.datasets import Dataset
from fedcache.extract.device import cores
from fedcache.extract.image_files import BadImage
from fedcache.extract.images import decode
from fedcache.extract.planning.incremental import IncrementalPlan
from fedcache.extract.recipe import IMAGES
from fedcache.extract.workers.chunk_tasks import ExtractionEngine, make_spec, plan_tasks, run_tasks
from fedcache.extract.workers.local import (
    BatchTask,
    ChunkCollector,
    ExtractionStats,
    chunk_rows_for,
    open_workers,
    run_batches,
    unreadable,
)
from fedcache.parsing import counted
from fedcache.process import Stop
from fedcache.progress import Observer
from fedcache.store.store import ArrayWriter, Store


@dataclass(frozen=True)
class ExtractionOptions:
    """Options of running an extraction; none of them changes a feature."""

    workers: int | None  # processes; None chooses, 0 means this process
    chunk_rows: int | None  # rows per chunk for every array; None chooses per backbone
    max_bad: int  # images that may be bad
    wait: bool  # wait for another writer of the same array instead of exit 4
    fresh: bool  # discard unfinished arrays
    stop: Stop  # set by a signal handler
    observer: Observer  # receives progress messages
    engine: ExtractionEngine | None = (
        None  # computes chunk tasks instead, at most ``workers`` at once
    )


def extract_arrays(
    store: Store,
    data: Dataset,
    jobs: Sequence[FeatureJob],
    settings: ComputeSettings,
    options: ExtractionOptions,
    *,
    earlier: IncrementalPlan | None,
    text: Mapping[str, Sequence[str]],
) -> ExtractionStats:
    """Compute what is missing of every job's array, and write the text features requested.

    Args:
        store: of ``data``, whose rows are in its order.
        earlier: the store whose chunks are taken over; None when there is none.
        text: templates per key whose text features are to be written.

    Raises:
        StoppedError after a stop; CorruptionError over ``max_bad``; StoreError when locked.
    """
    with ExitStack() as stack:
        writers = _open_writers(stack, store, data, jobs, settings, options, earlier)
        if earlier is not None:
            earlier.adopt(writers)
        tasks = plan_batches(writers, len(data.names), settings.batch)
        kept = {key: len(writer.kept) for key, writer in writers.items()}
        bad: dict[int, str] = {}
        for writer in writers.values():
            bad |= unreadable(writer.bad)
        stats = ExtractionStats(kept_chunks=kept, bad=bad, holds=data.holds)
        run = _Run(data, jobs, settings, options, writers, tasks, stats)
        if tasks and options.engine is not None:
            run.on_engine(options.engine)
            run = replace(run, tasks=[])
        if run.tasks or text:
            run.on_this_machine(stack, store, text)
        for writer in writers.values():
            writer.complete()
    return stats


def _open_writers(
    stack: ExitStack,
    store: Store,
    data: Dataset,
    jobs: Sequence[FeatureJob],
    settings: ComputeSettings,
    options: ExtractionOptions,
    earlier: IncrementalPlan | None,
) -> dict[str, ArrayWriter]:
    """A writer per array, locked until the stack closes; sorted by key so that two runs cannot wait for each other."""
    shapes = {}
    chunk_rows = {}
    for job in jobs:  # all checked before the first lock is taken
        shapes[job.key] = feature_shape(job, data)
        row_bytes = math.prod(shapes[job.key][1:]) * np.dtype(job.recipe.dtype).itemsize
        as_before = None
        if earlier:
            as_before = earlier.chunk_rows.get(job.key)
        chunk_rows[job.key] = (
            options.chunk_rows
            or as_before
            or chunk_rows_for(settings.batch, row_bytes, settings.device)
        )
        check_chunk_rows(chunk_rows[job.key], settings.batch, job.key)
    writers = {}
    for job in sorted(jobs, key=lambda job: job.key):
        writer = store.writer(
            job.key,
            shape=shapes[job.key],
            dtype=job.recipe.dtype,
            chunk_rows=chunk_rows[job.key],
            recipe=job.recipe.to_dict(),
            how=dict(job.how),
            wait=options.wait,
            fresh=options.fresh,
        )
        writers[job.key] = stack.enter_context(writer)
    return writers


@dataclass(frozen=True)
class _Run:
    """An extraction whose writers are open: the batches that are missing, and where they are computed."""

    data: Dataset
    jobs: Sequence[FeatureJob]
    settings: ComputeSettings
    options: ExtractionOptions
    writers: Mapping[str, ArrayWriter]
    tasks: Sequence[BatchTask]
    stats: ExtractionStats

    def on_engine(self, engine: ExtractionEngine) -> None:
        """Have every batch computed by the workers of an engine, as chunk tasks."""
        spec = make_spec(self.jobs, self.data, self.settings, self.writers)
        with engine.extraction_workers(spec, self.options.workers, self.options.observer) as pool:
            self.stats.workers = pool.slots
            tasks = plan_tasks(self.writers, self.tasks, len(self.data.names), self.settings.batch)
            under_way = sum(sorted(task.images for task in tasks)[-pool.slots :])
            self._announce(pool.ask(None)["seconds"], pool.slots, pool.slots, under_way)
            self._timed(partial(run_tasks, tasks, pool, self.writers))
        for writer in self.writers.values():
            writer.remove_uncommitted()  # of calls that were repeated: their first file is not needed

    def on_this_machine(
        self, stack: ExitStack, store: Store, text: Mapping[str, Sequence[str]]
    ) -> None:
        """Compute the batches in this process or its workers, which then write the text features of ``text``."""
        if self.tasks:
            needed = self.jobs
        else:
            needed = [job for job in self.jobs if job.key in text]
        o = self.options
        workers = open_workers(
            needed,
            self.data,
            self.settings,
            workers=o.workers,
            tasks=len(self.tasks),
            cores=cores(),
            stop=o.stop,
        )
        stack.callback(workers.close)
        self.stats.workers = self.stats.workers or workers.workers
        if self.tasks:
            parallel = max(1, len(self.settings.gpus))
            if self.settings.device == "cpu":
                parallel = workers.workers
            collector = ChunkCollector(
                self.writers, len(self.data.names), self.settings.batch, workers.depth
            )
            under_way = min(collector.most_under_way, self._rows_to_compute)
            self._announce(sum(workers.warm().values()), workers.workers, parallel, under_way)
            for note in workers.notes:
                o.observer.note(note)
            stack.callback(collector.thread.shutdown, wait=True)
            self._timed(partial(run_batches, self.tasks, workers, collector))
        jobs = {job.key: job for job in self.jobs}
        for key, templates in text.items():
            backbone = jobs[key].backbone.name
            classes = self.data.classes
            meta = {
                "backbone": backbone,
                "weights": jobs[key].recipe.weights,
                "classes": list(classes),
            }
            if jobs[key].backbone.reads != IMAGES:
                meta["pooling"] = jobs[key].recipe.pooling
            store.put_text(backbone, list(templates), workers.text(key, classes, templates), meta)

    def _timed(self, compute: Callable[..., bool]) -> None:
        """``run_batches`` or ``run_tasks`` with a clock, the progress bar and the message of an interruption."""
        begin = time.perf_counter()
        o = self.options
        o.observer.start("extracting", self._rows_to_compute, self.data.holds)
        try:
            finished = compute(
                max_bad=o.max_bad, stop=o.stop, stats=self.stats, observer=o.observer
            )
        finally:
            self.stats.seconds = time.perf_counter() - begin
            o.observer.stop()
        if not finished:
            raise StoppedError(
                f"Stopped on request after {self.stats.images:,} {self.data.holds}; finished chunks are "
                "kept.",
                "Run the same command again to resume.",
            )

    @property
    def _rows_to_compute(self) -> int:
        """Rows of the batches of this run."""
        rows = len(self.data.names)
        batch = self.settings.batch
        return sum(min(batch, rows - number * batch) for number, _ in self.tasks)

    def _announce(self, seconds: float, workers: int, parallel: int, under_way: int) -> None:
        """The first line: device, dtype, batch, the rate to expect of the models alone, if any, and the cost of a kill.

        The rate is from the ``seconds`` of an image through every model, ``parallel`` of which go through them at once.
        A kill costs ``under_way`` rows at most.
        """
        s = self.settings
        names = " + ".join(job.recipe.label for job in self.jobs)
        holds = self.data.holds
        rate = "no model is run"
        # Images of ``pixels`` (uint8) pass no model. A first batch without a readable item passed none either, so the
        # rate of the models is not known.
        if seconds > 0 and any(job.recipe.dtype != "uint8" for job in self.jobs):
            rate = f"expect about {parallel / max(seconds, 1e-9):,.0f} {holds}/s"
            if holds == IMAGES:
                rate += " before decoding"
        self.options.observer.note(
            f"{names} on {s.device}, {s.dtype}, batch {s.batch}, {counted(workers, 'process')} of "
            f"{s.threads} thread: {rate}. If the command is killed, at most {under_way:,} {holds} are "
            "computed again."
        )
        for key, writer in self.writers.items():
            if writer.kept:
                self.options.observer.note(
                    f"{key}: {len(writer.kept)} of {len(writer.kept) + len(writer.missing())} chunks kept, resuming."
                )


def plan_batches(writers: Mapping[str, ArrayWriter], rows: int, batch: int) -> list[BatchTask]:
    """Absolute batches still to compute and the keys that want each."""
    # A batch is computed for the arrays whose chunk that holds it is missing.
    missing = {key: set(writer.missing()) for key, writer in writers.items()}
    tasks = []
    for index in range(math.ceil(rows / batch)):
        keys = tuple(k for k, w in writers.items() if index * batch // w.chunk_rows in missing[k])
        if keys:
            tasks.append((index, keys))
    return tasks


def check_chunk_rows(chunk_rows: int, batch: int, key: str) -> None:
    """Refuse chunks that would end within a batch; UsageError."""
    if chunk_rows % batch:
        raise UsageError(
            f"--chunk-rows {chunk_rows} is not a multiple of the batch {batch} ({key}).",
            f"For example --chunk-rows {max(1, chunk_rows // batch) * batch}",
        )


def feature_shape(job: FeatureJob, data: Dataset) -> tuple[int, ...]:
    """[N, V, D], or [N, V, H, W, 3] for pixels; the native size of pixels is that of the first good image."""
    rows = len(data.names)
    views = job.recipe.views
    if job.recipe.dtype != "uint8":
        return (rows, views, job.backbone.width)
    if job.recipe.size:
        return (rows, views, job.recipe.size, job.recipe.size, 3)
    for row in range(rows):
        try:
            side = decode(data.source.read(row)).size
        except BadImage:
            continue
        return (rows, views, side[1], side[0], 3)
    raise CorruptionError(
        "None of the images of the dataset can be read.", "Check the dataset's path and format."
    )
