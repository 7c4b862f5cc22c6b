"""Chunk tasks: what a worker in another process or on another machine computes in one call.

A task is whole chunks of every array that wants its images, so each image is decoded once, and a task computed twice
has the same bytes. A worker writes chunk files under names of their own and answers with a few numbers; the process
that holds the locks puts them in place.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
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
from fedcache.store.writer import ArrayWriter, UncommittedChunk, WorkerArray

PROBES = 8
"""Rows among which the driver looks for one that can be read, for workers to compare: one that does not see the images
must not take all of them for unreadable."""


@dataclass(frozen=True)
class ChunkTask:
    """Some chunks (key, chunk), and the absolute batches that fill them, in order, each with the keys that want it."""

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
    arrays: Mapping[str, WorkerArray]  # per key where chunks go
    probe: tuple[int, bytes] | None  # (row, uid of its image), which a worker must see too
    decoders: int = 0  # threads that decode in addition to the model; 0 decodes in turn with it


@dataclass
class TaskResult:
    """Answer of a worker, without features: the chunk files that it wrote, and its counts."""

    chunks: list[UncommittedChunk] = field(default_factory=list)
    stats: ExtractionStats = field(default_factory=ExtractionStats)


class WorkerPool(Protocol):
    """Workers, wherever they are. A call whose worker dies is repeated by the pool."""

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
    """Where chunk tasks are computed instead of in this process and its workers: ``--engine``."""

    def check_extraction(self, workers: int | None) -> None:
        """Refuse a number of workers that it cannot have, with UsageError, before any work."""

    def extraction_workers(
        self, spec: TaskSpec, workers: int | None, observer: Observer
    ) -> AbstractContextManager[WorkerPool]:
        """A pool for the tasks of ``spec``, of ``workers`` at once (None chooses), that ends with the block."""


def plan_tasks(
    writers: Mapping[str, ArrayWriter], batches: Sequence[BatchTask], rows: int, batch: int
) -> list[ChunkTask]:
    """The missing chunks as tasks: chunks of several arrays that share an image are of one task."""
    spans = []
    for key, writer in writers.items():
        for chunk in writer.missing():
            start = chunk * writer.chunk_rows
            spans.append((start, min(start + writer.chunk_rows, rows), key, chunk))
    # Sweep over the rows: a chunk that begins before the last group ends shares images with it and joins it. A group
    # is its end and its chunks.
    groups: list[tuple[int, list[tuple[str, int]]]] = []
    for start, stop, key, chunk in sorted(spans):
        if groups and start < groups[-1][0]:
            end, chunks = groups[-1]
            groups[-1] = (max(stop, end), [*chunks, (key, chunk)])
        else:
            groups.append((stop, [(key, chunk)]))
    # Batches and groups are both in the order of rows, so each group takes the batches up to its end.
    tasks = []
    at = 0
    for stop, chunks in groups:
        first = at
        while at < len(batches) and batches[at][0] * batch < stop:
            at += 1
        mine = tuple(batches[first:at])
        count = sum(min(batch, rows - number * batch) for number, _ in mine)
        tasks.append(ChunkTask(tuple(chunks), mine, count))
    return tasks


def make_spec(
    jobs: Sequence[FeatureJob],
    data: Dataset,
    settings: ComputeSettings,
    writers: Mapping[str, ArrayWriter],
) -> TaskSpec:
    """The data of an extraction that workers need."""
    digests = ((row, _digest(data.source, row)) for row in range(min(PROBES, len(data.names))))
    probe = next(((row, digest) for row, digest in digests if digest is not None), None)
    arrays = {key: writer.for_workers() for key, writer in writers.items() if not writer.finished}
    return TaskSpec(tuple(jobs), data.source, data.uid, len(data.names), settings, arrays, probe)


def _digest(source: Source, row: int) -> bytes | None:
    """The uid of an image; None for one that cannot be read."""
    try:
        return uid_of(source.read(row))
    except (BadImage, OSError):
        return None


class ChunkWorker:
    """A process that computes chunk tasks, with its backbones loaded once.

    MachineError where the machine does not see the images, the store or the weights, or computes with other versions.
    """

    def __init__(self, spec: TaskSpec) -> None:
        keep_freed_memory()
        self.spec = spec
        _check_machine(spec)
        self.runner: BatchRunner = make_runner(
            spec.jobs, spec.source, spec.uid, spec.rows, spec.settings
        )

    def compute(self, task: ChunkTask) -> TaskResult:
        """Decode the images of a task, run the backbones, write the chunks."""
        result = TaskResult()
        writers = {key: _TaskWriter(self.spec.arrays[key], result) for key, _ in task.chunks}
        collector = ChunkCollector(writers, self.spec.rows, self.spec.settings.batch)
        try:
            for batch, computed in self._batches(task):
                result.stats.add(computed)
                collector.add(batch, computed)
            collector.collect_writes(block=True)
        finally:
            collector.thread.shutdown(wait=True)
        return result

    def _batches(self, task: ChunkTask) -> Iterator[tuple[int, ComputedBatch]]:
        """The computed batches of a task; with ``decoders``, decoded ahead while the model runs."""
        if not self.spec.decoders:
            for batch, keys in task.batches:
                yield batch, self.runner.compute(batch, keys)
            return
        with ThreadPoolExecutor(self.spec.decoders, thread_name_prefix="decoder") as pool:
            ahead = [
                (b, keys, pool.submit(decode_batch, *self.runner.decoding(b, keys)))
                for b, keys in task.batches
            ]
            for batch, keys, future in ahead:
                inputs, bad, seconds = future.result()
                yield (
                    batch,
                    self.runner.forward(self.runner.rows_of(batch), keys, inputs, bad, seconds),
                )


def _check_machine(spec: TaskSpec) -> None:
    """Refuse to work where the store, the images or the weights are not seen, or other versions would compute."""
    host = socket.gethostname()
    for array in spec.arrays.values():
        array.check()
    if spec.probe is not None and _digest(spec.source, spec.probe[0]) != spec.probe[1]:
        raise MachineError(
            f"{host} does not see the images of the dataset, or sees different ones.",
            "The dataset must be at the same path on all nodes.",
        )
    device = resolve_device(spec.settings.device)
    settings = spec.settings
    for job in spec.jobs:
        if job.weights.path is not None and not job.weights.path.exists():
            raise MachineError(
                f"{host} does not see the weights of {job.backbone.name}: {job.weights.path}.",
                "Weights must be at the same path on all nodes, e.g. in $FEDCACHE_HOME/weights on a "
                "shared disk.",
            )
        if job.key not in spec.arrays:
            continue
        mine = how_record(
            device, settings.dtype, settings.batch, settings.threads, job.backbone.provider
        )
        if mine != dict(job.how):
            # Entries that only one of the two records has.
            changed = sorted({*mine.items()} ^ {*job.how.items()}, key=str)
            raise MachineError(
                f"{host} would compute {job.key} differently: "
                f"{', '.join(f'{k} {v}' for k, v in changed)}. Mixed rows would not be comparable.",
                "Install the same versions on every node, and use nodes of one kind.",
            )


@dataclass
class _TaskWriter:
    """The chunk writer of a worker: chunks go to files that the driver commits."""

    array: WorkerArray
    result: TaskResult

    @property
    def chunk_rows(self) -> int:
        return self.array.chunk_rows

    def write(self, chunk: int, rows: NDArray[Any], bad: Mapping[int, str] | None = None) -> None:
        self.result.chunks.append(self.array.write(chunk, rows, bad))


def compute(worker: ChunkWorker, task: ChunkTask | None) -> dict[str, Any]:
    """A task; with None, the seconds per image of the models."""
    if task is None:
        return {"seconds": sum(worker.runner.warm().values())}
    return {"result": worker.compute(task)}


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
    """Have every task computed and commit its chunks; False when it was stopped on request (tasks begun are finished).

    Raises CorruptionError as soon as more than ``max_bad`` images are bad; what a worker raised.
    """
    begun = 0
    while True:
        while not stop.requested and pool.waiting < pool.slots and begun < len(tasks):
            pool.submit(begun, tasks[begun])
            begun += 1
        if not pool.waiting:
            return begun == len(tasks)
        for number, answer in pool.wait(1.0):
            result: TaskResult = answer["result"]
            for chunk in result.chunks:
                writers[chunk.key].commit(chunk)
            stats.merge(result.stats)
            observer.advance(tasks[number].images)
            stats.check_bad(result.stats.bad, max_bad)
