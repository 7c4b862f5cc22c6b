"""Chunk tasks: what a worker in another process or on another machine computes in one call.

A task has whole chunks of all arrays that need its images. So each image is decoded once, and a task that is computed
twice has the same bytes. A worker writes chunk files under temporary names and answers with a few numbers; the process
that holds the locks moves the files into place.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import MachineError
from fedcache.extract.batches import (
    BatchRunner,
    ComputedBatch,
    ComputeSettings,
    FeatureJob,
    decode_batch,
    make_runner,
)
from fedcache.extract.datasets import Dataset, Source
from fedcache.extract.datasets.dataset import uid_of
from fedcache.extract.device import resolve_device
from fedcache.extract.how import how_record
from fedcache.extract.image_files import BadImage
from fedcache.extract.workers.local import BatchTask, ChunkCollector, ExtractionStats
from fedcache.process import Stop, keep_freed_memory
from fedcache.progress import Observer
from fedcache.store.writer import ArrayWriter, WorkerArray

PROBES = 8
"""Number of first rows among which the driver looks for a readable image. Each worker compares this image with what it
reads itself. A worker without access to the images must not report all images as unreadable."""


@dataclass(frozen=True)
class ChunkTask:
    """Some chunks (key, chunk), and the absolute batches that fill them, in order, each with the keys that need it."""

    chunks: tuple[tuple[str, int], ...]
    batches: tuple[BatchTask, ...]
    images: int  # rows of the batches


@dataclass(frozen=True)
class TaskSpec:
    """Data that every worker needs once, for all its tasks."""

    jobs: tuple[FeatureJob, ...]  # the backbones
    source: Source  # where the images are
    uid: NDArray[np.uint8]  # [N, 16], the keys of seeded views
    rows: int  # N
    settings: ComputeSettings  # device, dtype, batch, threads
    arrays: Mapping[str, WorkerArray]  # per key, writes its chunks
    probe: tuple[int, bytes] | None  # (row, uid of its image), which workers compare
    decoders: int = 0  # threads that decode while the model runs; 0 to decode and compute in turn


class WorkerPool(Protocol):
    """Workers in other processes or on other machines. If a worker dies, the pool repeats its call."""

    @property
    def slots(self) -> int:
        """Calls that run at once."""

    @property
    def waiting(self) -> int:
        """Calls that have not answered."""

    def submit(self, tag: Any, *args: Any) -> None:
        """Start ``compute(worker, *args)``."""

    def wait(self, seconds: float) -> list[tuple[Any, dict[str, Any]]]:
        """(tag, answer) of the calls that have ended, after that many seconds at most."""

    def ask(self, *args: Any) -> dict[str, Any]:
        """One call and its answer."""


class ExtractionEngine(Protocol):
    """Computes chunk tasks elsewhere instead of in this process and its workers: ``--engine``."""

    def check_extraction(self, workers: int | None) -> None:
        """Refuse a number of workers that the engine cannot have, with UsageError, before any work."""

    def extraction_workers(
        self, spec: TaskSpec, workers: int | None, observer: Observer
    ) -> AbstractContextManager[WorkerPool]:
        """A pool that computes ``workers`` tasks of ``spec`` at once (None chooses); its workers end with the block."""


def plan_tasks(
    writers: Mapping[str, ArrayWriter], batches: Sequence[BatchTask], rows: int, batch: int
) -> list[ChunkTask]:
    """The missing chunks as tasks; chunks of several arrays that share an image are in one task."""
    spans = []
    for key, writer in writers.items():
        for chunk in writer.missing():
            start = chunk * writer.chunk_rows
            stop = min(start + writer.chunk_rows, rows)
            spans.append((start, stop, key, chunk))
    # Sweep over the rows: a chunk that begins before the last group ends shares images with it and joins it. A group
    # is the row at which it ends, and its chunks.
    groups: list[tuple[int, list[tuple[str, int]]]] = []
    for start, stop, key, chunk in sorted(spans):
        chunks: list[tuple[str, int]] = []
        if groups and start < groups[-1][0]:
            end, chunks = groups.pop()
            stop = max(stop, end)
        groups.append((stop, [*chunks, (key, chunk)]))
    # Batches and groups are both in the order of rows, so each group takes the batches up to its end.
    tasks = []
    first = 0
    for stop, chunks in groups:
        next_first = first
        while next_first < len(batches) and batches[next_first][0] * batch < stop:
            next_first += 1
        of_group = tuple(batches[first:next_first])
        images = sum(min(batch, rows - number * batch) for number, _ in of_group)
        tasks.append(ChunkTask(tuple(chunks), of_group, images))
        first = next_first
    return tasks


def make_spec(
    jobs: Sequence[FeatureJob],
    data: Dataset,
    settings: ComputeSettings,
    writers: Mapping[str, ArrayWriter],
) -> TaskSpec:
    """The data of an extraction that workers need."""
    rows = len(data.names)
    probe = None
    for row in range(min(PROBES, rows)):
        uid = _uid_or_none(data.source, row)
        if uid is not None:
            probe = (row, uid)
            break
    arrays = {key: writer.for_workers() for key, writer in writers.items() if not writer.finished}
    return TaskSpec(tuple(jobs), data.source, data.uid, rows, settings, arrays, probe)


def _uid_or_none(source: Source, row: int) -> bytes | None:
    """The uid of an image; None for one that cannot be read."""
    try:
        return uid_of(source.read(row))
    except (BadImage, OSError):
        return None


class ChunkWorker:
    """A process that computes chunk tasks, with its backbones loaded once.

    Raises MachineError if the machine has no access to the images, the store or the weights, or has other versions.
    """

    def __init__(self, spec: TaskSpec) -> None:
        keep_freed_memory()
        self.spec = spec
        _check_machine(spec)
        self.runner: BatchRunner = make_runner(
            spec.jobs, spec.source, spec.uid, spec.rows, spec.settings
        )

    def compute(self, task: ChunkTask) -> dict[str, Any]:
        """Decode the images of a task, run the backbones, write the chunks.

        Returns the chunk files and the counts, without features.
        """
        stats = ExtractionStats()
        writers = {key: self.spec.arrays[key] for key, _ in task.chunks}
        collector = ChunkCollector(writers, self.spec.rows, self.spec.settings.batch)
        try:
            for batch, computed in self._batches(task):
                stats.add(computed)
                collector.add(batch, computed)
            collector.collect_writes(block=True)
        finally:
            collector.thread.shutdown(wait=True)
        return {"chunks": collector.written, "stats": stats}

    def _batches(self, task: ChunkTask) -> Iterator[tuple[int, ComputedBatch]]:
        """The computed batches of a task. With ``decoders``, threads decode the next batches while the model runs."""
        if not self.spec.decoders:
            for batch, keys in task.batches:
                yield batch, self.runner.compute(batch, keys)
            return
        with ThreadPoolExecutor(self.spec.decoders, thread_name_prefix="decoder") as pool:
            decoded = [
                pool.submit(decode_batch, *self.runner.decoding(batch, keys))
                for batch, keys in task.batches
            ]
            for (batch, keys), future in zip(task.batches, decoded, strict=True):
                rows = self.runner.rows_of(batch)
                yield batch, self.runner.forward(rows, keys, *future.result())


def _check_machine(spec: TaskSpec) -> None:
    """Raise MachineError if the store, the images or the weights are not accessible here, or if versions differ."""
    host = socket.gethostname()
    for array in spec.arrays.values():
        array.check()
    if spec.probe is not None:
        row, uid = spec.probe
        if _uid_or_none(spec.source, row) != uid:
            raise MachineError(
                f"The node {host} has no access to the images of the dataset, or finds other images at their path.",
                "Make the dataset available at the same path on all nodes.",
            )
    settings = spec.settings
    device = resolve_device(settings.device)
    for job in spec.jobs:
        if job.weights.path is not None and not job.weights.path.exists():
            raise MachineError(
                f"The node {host} has no access to the weights of {job.backbone.name}: {job.weights.path}.",
                "Weights must be at the same path on all nodes, e.g. in $FEDCACHE_HOME/weights on a shared disk.",
            )
        # Finished arrays are not in ``arrays``; nothing is added to them.
        if job.key not in spec.arrays:
            continue
        how_here = how_record(device, settings, job.backbone)
        if how_here != dict(job.how):
            # Entries that only one of the two records has.
            changed = sorted({*how_here.items()} ^ {*job.how.items()}, key=str)
            listed = ", ".join(f"{name} {value}" for name, value in changed)
            raise MachineError(
                f"The node {host} would compute {job.key} differently: {listed}. Rows from different nodes would not "
                "be comparable.",
                "Install the same versions on every node, and use nodes of one kind.",
            )


def compute(worker: ChunkWorker, task: ChunkTask | None) -> dict[str, Any]:
    """The result of a task; for None, the seconds that the models take for an image."""
    if task is None:
        return {"seconds": sum(worker.runner.warm().values())}
    return worker.compute(task)


def run_tasks(
    tasks: Sequence[ChunkTask],
    pool: WorkerPool,
    writers: Mapping[str, ArrayWriter],
    *,
    max_bad: int,
    stop: Stop,
    stats: ExtractionStats,
    observer: Observer,
) -> bool:
    """Have every task computed, and commit its chunks. Returns False if it was stopped on request.

    Tasks that were begun are finished. Raises CorruptionError as soon as more than ``max_bad`` images are bad, and the
    errors of workers.
    """
    begun = 0
    while True:
        while not stop.requested and pool.waiting < pool.slots and begun < len(tasks):
            pool.submit(begun, tasks[begun])
            begun += 1
        if not pool.waiting:
            return begun == len(tasks)
        for number, answer in pool.wait(1.0):
            for chunk in answer["chunks"]:
                writers[chunk.key].commit(chunk)
            found: ExtractionStats = answer["stats"]
            stats.merge(found)
            observer.advance(tasks[number].images)
            stats.check_bad(found.bad, max_bad)
