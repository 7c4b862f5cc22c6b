"""The processes of this machine that compute batches (this one, CPU workers, decoders before a GPU) and their loop.

On a CPU each worker process decodes and runs the model single-threaded: two such processes beat one process with two
threads by a quarter (docs/performance.md). On a GPU workers only decode and the model runs here. Small jobs run in
this process, since starting workers costs seconds.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import CorruptionError, FedcacheError
from fedcache.extract.batches import (
    BatchRunner,
    ComputedBatch,
    ComputeSettings,
    FeatureJob,
    decode_batch,
    make_runner,
)
from fedcache.extract.datasets import Dataset, Source
from fedcache.extract.inputs import IMAGES
from fedcache.extract.workers.processes import WorkerProcesses, no_preparation
from fedcache.process import Stop, keep_freed_memory
from fedcache.progress import Observer
from fedcache.store.manifest import VANISHED

# Chunks of computed batches: how large they are, how they fill up, and the thread that writes them in order.

MAX_CHUNK_BYTES = 8 << 20
MAX_CHUNK_ROWS = 512


def chunk_rows_for(batch: int, row_bytes: int) -> int:
    """Rows of a chunk: the largest batch * 2^j with at most 512 rows and 8 MiB, at least one batch.

    Powers of two so that the chunks of all backbones of a run nest and each image is decoded once.
    """
    rows = batch
    while rows * 2 <= MAX_CHUNK_ROWS and rows * 2 * row_bytes <= MAX_CHUNK_BYTES:
        rows *= 2
    return rows


class ChunkWriter(Protocol):
    """What takes the chunks of an array."""

    @property
    def chunk_rows(self) -> int:
        """Rows per chunk."""

    def write(self, chunk: int, rows: NDArray[Any], bad: Mapping[int, str] | None = None) -> None:
        """Take one chunk."""


@dataclass
class PendingChunk:
    """A chunk being filled: its rows, the batches that are still to come, and the reason per bad row."""

    rows: NDArray[Any]
    left: int
    bad: dict[int, str] = field(default_factory=dict)


class ChunkCollector:
    """Places computed batches into chunks and hands full ones to a writing thread.

    One thread writes, so that chunks reach the journal in the order in which they became full, and computing goes on
    meanwhile.
    """

    def __init__(self, writers: Mapping[str, ChunkWriter], rows: int, batch: int) -> None:
        self.writers = writers
        self.rows = rows
        self.batch = batch
        self.pending: dict[tuple[str, int], PendingChunk] = {}
        self.unsaved = dict.fromkeys(writers, 0)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="store-writer")
        self.saving: dict[Future[None], tuple[str, int]] = {}

    def chunk_of(self, key: str, batch: int) -> int:
        """The chunk of ``key`` that holds absolute batch ``batch``."""
        return batch * self.batch // self.writers[key].chunk_rows

    def batches_in(self, key: str, chunk: int) -> int:
        """Batches of a chunk; the last one may be short."""
        size = self.writers[key].chunk_rows
        return math.ceil((min((chunk + 1) * size, self.rows) - chunk * size) / self.batch)

    def limit(self, key: str) -> int:
        """Batches of ``key`` that may be computed and not yet journalled: one chunk."""
        return math.ceil(self.writers[key].chunk_rows / self.batch)

    def add(self, batch: int, computed: ComputedBatch) -> None:
        """Place a batch; start the write of every chunk it completes."""
        first = batch * self.batch
        for key, values in computed.features.items():
            chunk = self.chunk_of(key, batch)
            size = self.writers[key].chunk_rows
            # Batches of a chunk come in any order from several workers; each has its place by its row numbers.
            part = self.pending.get((key, chunk))
            if part is None:
                length = min((chunk + 1) * size, self.rows) - chunk * size
                part = PendingChunk(
                    np.empty((length, *values.shape[1:]), values.dtype), self.batches_in(key, chunk)
                )
                self.pending[key, chunk] = part
            # Place of the batch within its chunk.
            offset = first - chunk * size
            part.rows[offset : offset + len(values)] = values
            part.bad.update(computed.bad)
            part.left -= 1
            if part.left == 0:
                del self.pending[key, chunk]
                future = self.thread.submit(self.writers[key].write, chunk, part.rows, part.bad)
                self.saving[future] = (key, self.batches_in(key, chunk))

    def collect_writes(self, *, block: bool = False) -> None:
        """Take note of finished writes; ``block`` waits for all. A failed write raises here."""
        if block and self.saving:
            wait(self.saving)
        for future in [f for f in self.saving if f.done()]:
            key, count = self.saving.pop(future)
            future.result()
            self.unsaved[key] -= count


@dataclass
class ExtractionStats:
    """What an extraction did; the figures of its last line."""

    images: int = 0  # images decoded in this process tree
    forward_batches: Counter[str] = field(default_factory=Counter)  # per key, batches computed
    forward_images: int = 0  # images that went through a model, summed over arrays
    kept_chunks: dict[str, int] = field(default_factory=dict)  # per key, chunks found finished
    # reason per quarantined row, all arrays of the run
    bad: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0  # wall time of the extraction loop
    decode_seconds: float = 0.0  # summed over workers
    forward_seconds: float = 0.0  # summed over workers and backbones
    workers: int = 0  # processes that computed
    # per key, texts of which the model reads a part
    cut: Counter[str] = field(default_factory=Counter)
    holds: str = IMAGES  # images, texts or rows

    def add(self, batch: ComputedBatch) -> None:
        """Count a batch that was computed in this process tree."""
        self.images += batch.decoded - sum(why == VANISHED for why in batch.bad.values())
        self.decode_seconds += batch.decode_seconds
        self.bad.update(unreadable(batch.bad))
        for key, seconds in batch.forward_seconds.items():
            self.forward_seconds += seconds
            self.forward_batches[key] += 1
            self.forward_images += len(batch.features[key]) - len(batch.bad)
        self.cut.update(batch.cut)

    def merge(self, other: ExtractionStats) -> None:
        """Add the counts of a chunk task that another process computed."""
        self.images += other.images
        self.decode_seconds += other.decode_seconds
        self.forward_seconds += other.forward_seconds
        self.forward_images += other.forward_images
        self.bad.update(other.bad)
        self.forward_batches.update(other.forward_batches)
        self.cut.update(other.cut)

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


class BatchWorkers(ABC):
    """What computes batches, asynchronously."""

    depth: int  # batches that may be under way at once
    workers: int  # processes that compute
    runner: BatchRunner  # of the models, where they run in this process
    pool: WorkerProcesses | None = None  # the worker processes, if there are some

    @abstractmethod
    def submit(self, batch: int, keys: Sequence[str]) -> Future[Any]:
        """Start a batch."""

    def finish(self, batch: int, keys: Sequence[str], future: Future[Any]) -> ComputedBatch:
        """The computed batch of a future that is done."""
        computed: ComputedBatch
        if self.pool is None:
            computed = future.result()
        else:
            computed = self.pool.result(future)
        return computed

    def check(self) -> None:
        """Raise if what computes has ended, so that futures will never be done."""
        if self.pool is not None:
            self.pool.check()

    def warm(self) -> dict[str, float]:
        """Seconds per image and backbone of one process."""
        return self.runner.warm()

    def text(
        self, key: str, classes: Sequence[str], templates: Sequence[str]
    ) -> NDArray[np.float32]:
        """Text features [C, D]."""
        return self.runner.text(key, classes, templates)

    def close(self) -> None:
        """End the workers, at once."""
        if self.pool is not None:
            self.pool.close()


class InProcess(BatchWorkers):
    """Everything in this process; for jobs too small to pay for workers."""

    depth = 1
    workers = 1

    def __init__(
        self, jobs: Sequence[FeatureJob], data: Dataset, settings: ComputeSettings
    ) -> None:
        import torch

        self._threads = torch.get_num_threads()
        self.runner = make_runner(jobs, data.source, data.uid, len(data.names), settings)

    def submit(self, batch: int, keys: Sequence[str]) -> Future[Any]:
        """Compute at once."""
        future: Future[Any] = Future()
        future.set_result(self.runner.compute(batch, keys))
        return future

    def close(self) -> None:
        """Give the process its threads back."""
        import torch

        torch.set_num_threads(self._threads)


class CpuWorkers(BatchWorkers):
    """Worker processes that each decode and run the models."""

    pool: WorkerProcesses

    def __init__(
        self,
        jobs: Sequence[FeatureJob],
        data: Dataset,
        settings: ComputeSettings,
        workers: int,
        stop: Stop,
    ) -> None:
        self.workers = workers
        self.depth = workers * 2
        needed = (jobs, data.source, data.uid, len(data.names), settings)
        self.pool = WorkerProcesses(workers, init_cpu_worker, needed, stop)

    def submit(self, batch: int, keys: Sequence[str]) -> Future[Any]:
        return self.pool.submit(call_runner, "compute", batch, keys)

    def warm(self) -> dict[str, float]:
        """Every worker warms up, one answers."""
        rates: dict[str, float] = self.pool.ask(call_runner, "warm", times=self.workers)
        return rates

    def text(
        self, key: str, classes: Sequence[str], templates: Sequence[str]
    ) -> NDArray[np.float32]:
        matrix: NDArray[np.float32] = self.pool.ask(call_runner, "text", key, classes, templates)
        return matrix


class GpuFeeder(BatchWorkers):
    """Worker processes decode; the models run on a GPU in this process, fed in the order of the batches."""

    pool: WorkerProcesses

    def __init__(
        self,
        jobs: Sequence[FeatureJob],
        data: Dataset,
        settings: ComputeSettings,
        workers: int,
        stop: Stop,
    ) -> None:
        self.workers = workers
        # decoded batches that wait for the GPU, beside those being decoded
        self.depth = workers * 2 + 2
        self.pool = WorkerProcesses(workers, no_preparation, (), stop)
        self.runner = BatchRunner(jobs, data.source, data.uid, len(data.names), settings)

    def submit(self, batch: int, keys: Sequence[str]) -> Future[Any]:
        """Decode in a worker."""
        return self.pool.submit(decode_batch, *self.runner.decoding(batch, keys))

    def finish(self, batch: int, keys: Sequence[str], future: Future[Any]) -> ComputedBatch:
        """Run the models on what a worker decoded."""
        inputs, bad, seconds = self.pool.result(future)
        return self.runner.forward(self.runner.rows_of(batch), keys, inputs, bad, seconds)


# What runs inside a worker process.

_runner: BatchRunner | FedcacheError | None = None
"""What computes in this worker, or why nothing can."""


def init_cpu_worker(
    jobs: Sequence[FeatureJob],
    source: Source,
    uid: NDArray[np.uint8],
    rows: int,
    settings: ComputeSettings,
) -> None:
    """Prepare a worker process that decodes and computes: threads are fixed, backbones are loaded."""
    keep_freed_memory()
    global _runner
    try:
        _runner = make_runner(jobs, source, uid, rows, settings)
    except FedcacheError as error:
        # told by the first call: an initializer that raises ends the pool with a traceback
        _runner = error


def call_runner(method: str, *args: Any) -> Any:
    """A method of this worker process's ``BatchRunner``; raises what kept it from being made."""
    if isinstance(_runner, FedcacheError):
        raise _runner
    return getattr(_runner, method)(*args)


IN_PROCESS_BATCHES = 12
"""Jobs of fewer batches run in this process: starting workers costs about as much."""


def open_workers(
    jobs: Sequence[FeatureJob],
    data: Dataset,
    settings: ComputeSettings,
    *,
    workers: int | None,
    tasks: int,
    cores: int,
    stop: Stop,
) -> BatchWorkers:
    """The workers for a device and ``tasks`` batches; ``workers`` None chooses their number, 0 forces this process.

    Once ``stop`` was asked for, their end is a StoppedError; else it is a MachineError.
    """
    few = workers is None and settings.device == "cpu" and tasks < IN_PROCESS_BATCHES
    # A module in this process's memory can be loaded by no other.
    here_only = settings.device == "cpu" and any(job.backbone.here_only for job in jobs)
    if workers == 0 or few or here_only:
        return InProcess(jobs, data, settings)
    if settings.device == "cuda":
        return GpuFeeder(jobs, data, settings, workers or max(1, cores - 1), stop)
    return CpuWorkers(jobs, data, settings, workers or max(1, cores // settings.threads), stop)


BatchTask = tuple[int, tuple[str, ...]]
"""An absolute batch and the keys of the arrays that want it."""


def run_batches(
    tasks: Sequence[BatchTask],
    workers: BatchWorkers,
    collector: ChunkCollector,
    *,
    max_bad: int,
    stop: Stop,
    stats: ExtractionStats,
    observer: Observer,
) -> bool:
    """Compute and store every batch, in order; False when it was stopped on request (chunks begun are finished).

    Never more ahead of the journal than one chunk per array. Raises CorruptionError as soon as more than ``max_bad``
    images are bad; MachineError when a worker died, StoppedError when it died of a signal that asked to stop.
    """
    queue: Iterator[BatchTask] = iter(tasks)
    waiting: dict[Future[Any], BatchTask] = {}
    begun: set[tuple[str, int]] = set()  # chunks of which a batch was submitted
    following = next(queue, None)
    while True:
        collector.collect_writes()
        # Submit while workers have room and no array is a whole chunk ahead of its journal.
        while following is not None and len(waiting) < workers.depth:
            batch, keys = following
            chunks = {(k, collector.chunk_of(k, batch)) for k in keys}
            if stop.requested and not chunks & begun:
                following = (
                    None  # nothing new is begun, but the chunks under way get the batches they lack
                )
                break
            if any(collector.unsaved[k] >= collector.limit(k) for k in keys):
                break
            begun |= chunks
            for k in keys:
                collector.unsaved[k] += 1
            waiting[workers.submit(batch, keys)] = following
            following = next(queue, None)
        if not waiting and following is None:
            break
        # Wake when a batch is computed or a chunk is saved, and once a second to see a request to stop.
        done, _ = wait([*waiting, *collector.saving], timeout=1.0, return_when=FIRST_COMPLETED)
        if not done:
            workers.check()
        for future in sorted((f for f in done if f in waiting), key=lambda f: waiting[f][0]):
            batch, keys = waiting.pop(future)
            computed = workers.finish(batch, keys, future)
            stats.add(computed)
            collector.add(batch, computed)
            observer.advance(computed.decoded)
            if len(stats.bad) > max_bad:
                collector.collect_writes(block=True)  # what is whole is kept before the refusal
                stats.check_bad(computed.bad, max_bad)
    collector.collect_writes(block=True)
    return not stop.requested
