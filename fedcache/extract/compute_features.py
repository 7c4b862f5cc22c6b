"""Extract arrays into a store: plan the missing batches, have them computed, complete the arrays.

If the process is killed, some batches are lost: the batches that are being computed, and all batches of chunks that are
being filled or written. ``ChunkCollector.limit`` bounds their number, and the first line of output gives the rows.
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
    fresh: bool  # discard stored arrays
    stop: Stop  # set by a signal handler
    observer: Observer  # receives progress messages
    # computes chunk tasks instead of this process and its workers, at most ``workers`` at once
    engine: ExtractionEngine | None = None


def extract_arrays(
    store: Store,
    data: Dataset,
    jobs: Sequence[FeatureJob],
    settings: ComputeSettings,
    options: ExtractionOptions,
    *,
    earlier: IncrementalPlan | None,
    text: Mapping[str, Sequence[str]],
    when_open: Callable[[], None] | None = None,
) -> ExtractionStats:
    """Compute the missing chunks of every job's array, and write the text features requested.

    Args:
        store: the store of ``data``, with its rows in the same order.
        data: the dataset.
        jobs: one for each array.
        settings: how features are computed.
        options: of the extraction.
        earlier: plan to take over chunks of an earlier store; None when there is none.
        text: array key -> templates whose text features are written.
        when_open: called when the arrays are open for writing, before anything is computed.

    Raises:
        StoppedError after a stop; CorruptionError over ``max_bad``; StoreError when locked.
    """
    with ExitStack() as stack:
        writers = make_writers(store, data, jobs, settings, options, earlier)
        for writer in writers.values():
            stack.enter_context(writer)
        if when_open is not None:
            when_open()
        if earlier is not None:
            earlier.adopt(writers)
        tasks = plan_batches(writers, len(data.names), settings.batch)
        kept = {key: len(writer.kept) for key, writer in writers.items()}
        bad: dict[int, str] = {}
        for writer in writers.values():
            bad |= unreadable(writer.bad)
        stats = ExtractionStats(kept_chunks=kept, bad=bad, holds=data.holds, names=data.names)
        run = _Run(data, jobs, settings, options, writers, tasks, stats)
        if tasks and options.engine is not None:
            run.on_engine(options.engine)
            run = replace(run, tasks=[])
        if run.tasks or text:
            run.on_this_machine(stack, store, text)
        for writer in writers.values():
            writer.complete()
    return stats


def make_writers(
    store: Store,
    data: Dataset,
    jobs: Sequence[FeatureJob],
    settings: ComputeSettings,
    options: ExtractionOptions,
    earlier: IncrementalPlan | None,
) -> dict[str, ArrayWriter]:
    """A writer per array, which holds no lock yet; sorted by key so that two runs cannot wait for each other."""
    writers = {}
    for job in sorted(jobs, key=lambda job: job.key):
        shape = feature_shape(job, data)
        row_bytes = math.prod(shape[1:]) * np.dtype(job.recipe.dtype).itemsize
        rows = options.chunk_rows
        if not rows and earlier is not None:
            rows = earlier.chunk_rows.get(job.key)
        if not rows:
            rows = chunk_rows_for(settings.batch, row_bytes, settings.device)
        check_chunk_rows(rows, settings.batch, job.key)
        writers[job.key] = store.writer(
            job.key,
            shape=shape,
            dtype=job.recipe.dtype,
            chunk_rows=rows,
            recipe=job.recipe.to_dict(),
            how=dict(job.how),
            wait=options.wait,
            fresh=options.fresh,
        )
    return writers


def report_kept(writers: Mapping[str, ArrayWriter], observer: Observer) -> None:
    """Report each array that is resumed, with its number of stored chunks."""
    for key, writer in writers.items():
        kept = len(writer.kept)
        if kept:
            chunks = kept + len(writer.missing())
            observer.note(f"{key}: resuming, {kept} of {chunks} chunks are already stored.")


@dataclass(frozen=True)
class _Run:
    """An extraction whose writers are open: the missing batches, and methods that have them computed."""

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
            # At worst, the largest tasks are computed at the same time.
            images_of_tasks = sorted(task.images for task in tasks)
            most_under_way = sum(images_of_tasks[-pool.slots :])
            seconds = pool.ask(None)["seconds"]  # without a task, a worker measures its models
            self._announce(seconds, pool.slots, pool.slots, most_under_way)
            self._timed(partial(run_tasks, tasks, pool, self.writers))
        # A task that the pool repeated, because its worker died, may have left chunk files that are never committed.
        for writer in self.writers.values():
            writer.remove_uncommitted()

    def on_this_machine(
        self, stack: ExitStack, store: Store, text: Mapping[str, Sequence[str]]
    ) -> None:
        """Compute the batches and then the text features of ``text``, in this process or its workers."""
        if self.tasks:
            needed = self.jobs
        else:
            needed = [job for job in self.jobs if job.key in text]
        options = self.options
        workers = open_workers(
            needed,
            self.data,
            self.settings,
            workers=options.workers,
            tasks=len(self.tasks),
            cores=cores(),
            stop=options.stop,
        )
        stack.callback(workers.close)
        # After an engine only text features are left; the workers that count are those of the engine.
        self.stats.workers = self.stats.workers or workers.workers
        if self.tasks:
            parallel = max(1, len(self.settings.gpus))
            if self.settings.device == "cpu":
                parallel = workers.workers
            rows = len(self.data.names)
            collector = ChunkCollector(self.writers, rows, self.settings.batch, workers.depth)
            most_under_way = min(collector.most_under_way, self._rows_to_compute)
            if self.settings.compiled and any(job.backbone.is_torch_model for job in self.jobs):
                options.observer.note("Compiling takes up to a minute for each model.")
            seconds = sum(workers.warm().values())
            self._announce(seconds, workers.workers, parallel, most_under_way)
            for note in workers.notes:
                options.observer.note(note)
            stack.callback(collector.thread.shutdown, wait=True)
            self._timed(partial(run_batches, self.tasks, workers, collector))
        jobs = {job.key: job for job in self.jobs}
        classes = self.data.classes
        for key, templates in text.items():
            job = jobs[key]
            backbone = job.backbone.name
            meta = {
                "backbone": backbone,
                "weights": job.recipe.weights,
                "classes": list(classes),
            }
            if job.backbone.reads != IMAGES:
                meta["pooling"] = job.recipe.pooling
            matrix = workers.text(key, classes, templates)
            store.put_text(backbone, list(templates), matrix, meta)

    def _timed(self, compute: Callable[..., bool]) -> None:
        """Call ``run_batches`` or ``run_tasks`` with a progress bar, and note the seconds that it took.

        Raises StoppedError if it was stopped on request.
        """
        begin = time.perf_counter()
        options = self.options
        observer = options.observer
        observer.start("extracting", self._rows_to_compute, self.data.holds)
        try:
            finished = compute(
                max_bad=options.max_bad, stop=options.stop, stats=self.stats, observer=observer
            )
        finally:
            self.stats.seconds = time.perf_counter() - begin
            observer.stop()
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
        """Report device, dtype, batch, the expected rate of the models, and the rows that a kill costs.

        ``seconds`` is the time of an image through all models, and ``parallel`` images go through them at once. A kill
        costs at most ``under_way`` rows. Each array that is resumed is reported too.
        """
        settings = self.settings
        names = " + ".join(job.recipe.label for job in self.jobs)
        holds = self.data.holds
        processes = counted(workers, "process")
        rate = "no model is run"
        # Images of ``pixels`` (uint8) pass no model. A first batch without a readable item passed none either, so the
        # rate of the models is not known.
        has_models = any(job.recipe.dtype != "uint8" for job in self.jobs)
        if seconds > 0 and has_models:
            per_second = parallel / max(seconds, 1e-9)
            rate = f"expect about {per_second:,.0f} {holds}/s"
            if holds == IMAGES:
                rate += " before decoding"
        self.options.observer.note(
            f"{names} on {settings.device}, {settings.dtype}, batch {settings.batch}, {processes} (threads each: "
            f"{settings.threads}): {rate}. If the command is killed, a second run repeats at most {under_way:,} "
            f"{holds}."
        )
        report_kept(self.writers, self.options.observer)


def plan_batches(writers: Mapping[str, ArrayWriter], rows: int, batch: int) -> list[BatchTask]:
    """The absolute batches still to compute, each with the keys of the arrays that need it."""
    missing = {key: set(writer.missing()) for key, writer in writers.items()}
    tasks = []
    for index in range(math.ceil(rows / batch)):
        first_row = index * batch
        keys = [
            key for key, writer in writers.items() if first_row // writer.chunk_rows in missing[key]
        ]
        if keys:
            tasks.append((index, tuple(keys)))
    return tasks


def check_chunk_rows(chunk_rows: int, batch: int, key: str) -> None:
    """Raise UsageError for chunks that would end within a batch."""
    if chunk_rows % batch:
        multiple = max(1, chunk_rows // batch) * batch
        raise UsageError(
            f"--chunk-rows {chunk_rows} is not a multiple of the batch {batch} ({key}).",
            f"For example --chunk-rows {multiple}",
        )


def feature_shape(job: FeatureJob, data: Dataset) -> tuple[int, ...]:
    """The shape of an array: [N, V, D], or [N, V, H, W, 3] for pixels.

    Pixels without a size in the recipe have the size of the first good image. Raises CorruptionError if there is none.
    """
    rows = len(data.names)
    views = job.recipe.views
    size = job.recipe.size
    if job.recipe.dtype != "uint8":
        return (rows, views, job.backbone.width)
    if size:
        return (rows, views, size, size, 3)
    for row in range(rows):
        try:
            width, height = decode(data.source.read(row)).size
        except BadImage:
            continue
        return (rows, views, height, width, 3)
    raise CorruptionError(
        "None of the images of the dataset can be read.", "Check the dataset's path and format."
    )
