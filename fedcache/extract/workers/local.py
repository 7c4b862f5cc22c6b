"""The loop of an extraction on this machine: workers compute batches, and their features fill chunks.

The module contains, in this order: the chunks, the counts of an extraction, the choice of workers, and the loop.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import CorruptionError
from fedcache.extract.batches import ComputedBatch, ComputeSettings, FeatureJob, sizes_differ
from fedcache.extract.datasets import Dataset
from fedcache.extract.recipe import IMAGES
from fedcache.extract.workers.batch_workers import BatchWorkers, CpuWorkers, InProcess, worker_count
from fedcache.extract.workers.cuda import CudaStages
from fedcache.extract.workers.gpu import GpuFeeder
from fedcache.process import Stop
from fedcache.progress import Observer
from fedcache.store.manifest import VANISHED

# Chunks of computed batches: how large they are, how they fill up, and the thread that writes them in order.

MAX_CHUNK_BYTES = 8 << 20
MAX_CHUNK_ROWS = 512
GPU_CHUNK_BATCHES = 8
GPU_CHUNK_BYTES = 64 << 20


def chunk_rows_for(batch: int, row_bytes: int, device: str = "cpu") -> int:
    """Rows of a chunk: the largest batch * 2^j with at most 512 rows and 8 MiB, at least one batch.

    On a GPU, whose batches are large, a chunk has at least 8 batches if they have at most 64 MiB. With powers of two
    the chunks of all backbones nest, so that each image is decoded once.
    """
    rows = batch
    while rows * 2 <= MAX_CHUNK_ROWS and rows * 2 * row_bytes <= MAX_CHUNK_BYTES:
        rows *= 2
    if device == "cuda":
        while rows < GPU_CHUNK_BATCHES * batch and rows * 2 * row_bytes <= GPU_CHUNK_BYTES:
            rows *= 2
    return rows


class ChunkWriter(Protocol):
    """Receiver of the chunks of an array."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole array."""

    @property
    def chunk_rows(self) -> int:
        """Rows per chunk."""

    def write(self, chunk: int, rows: NDArray[Any], bad: Mapping[int, str] | None = None) -> Any:
        """Take one chunk."""


@dataclass
class PendingChunk:
    """A chunk that is being filled."""

    rows: NDArray[Any]
    left: int  # batches that are still missing
    bad: dict[int, str] = field(default_factory=dict)  # reason per bad row


@dataclass(eq=False)
class ChunkCollector:
    """Places computed batches into chunks, and hands full chunks to a writing thread. Several chunks fill at once.

    One thread writes, so that chunks reach the journal in the order in which they became full, and computing continues
    meanwhile. ``depth`` is the largest number of batches that are computed at once.
    """

    writers: Mapping[str, ChunkWriter]
    rows: int
    batch: int
    depth: int = 1

    def __post_init__(self) -> None:
        self.pending: dict[tuple[str, int], PendingChunk] = {}  # by key and number of the chunk
        self.unsaved = dict.fromkeys(self.writers, 0)  # per key, batches that are not written yet
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="store-writer")
        self.saving: dict[Future[Any], tuple[str, int]] = {}  # write of a chunk -> key, batches
        self.written: list[Any] = []  # what the writers returned

    def chunk_of(self, key: str, batch: int) -> int:
        """The chunk of ``key`` that holds absolute batch ``batch``."""
        return batch * self.batch // self.writers[key].chunk_rows

    def rows_in(self, key: str, chunk: int) -> int:
        """Rows of a chunk; the last chunk may be short."""
        size = self.writers[key].chunk_rows
        return min(size, self.rows - chunk * size)

    def batches_in(self, key: str, chunk: int) -> int:
        """Batches of a chunk; the last chunk may have fewer."""
        return math.ceil(self.rows_in(key, chunk) / self.batch)

    def limit(self, key: str) -> int:
        """Maximum number of batches of ``key`` that are being computed, collected or written. A kill loses them.

        There is room for a chunk that fills and one that is written, so that no worker waits at the end of a chunk.
        """
        return self.depth + 2 * math.ceil(self.writers[key].chunk_rows / self.batch)

    @property
    def most_under_way(self) -> int:
        """Maximum number of rows that a kill loses."""
        batches = max(map(self.limit, self.writers))
        return min(self.rows, self.batch * batches)

    def add(self, batch: int, computed: ComputedBatch) -> None:
        """Place a batch; start the write of every chunk it completes."""
        for key, values in computed.features.items():
            writer = self.writers[key]
            chunk = self.chunk_of(key, batch)
            row_shape = writer.shape[1:]
            # Without a readable image the values of a batch have another size, and are not used.
            if values.shape[1:] != row_shape and len(computed.bad) < len(values):
                raise sizes_differ(values.shape[1:], row_shape)
            pending = self.pending.get((key, chunk))
            if pending is None:
                rows = np.empty((self.rows_in(key, chunk), *row_shape), values.dtype)
                pending = PendingChunk(rows, self.batches_in(key, chunk))
                self.pending[key, chunk] = pending
            # Workers return the batches of a chunk in any order, so the row numbers give the place of a batch.
            start = batch * self.batch - chunk * writer.chunk_rows
            pending.rows[start : start + len(values)] = values
            pending.bad.update(computed.bad)
            pending.left -= 1
            if pending.left == 0:
                del self.pending[key, chunk]
                future = self.thread.submit(writer.write, chunk, pending.rows, pending.bad)
                self.saving[future] = (key, self.batches_in(key, chunk))

    def collect_writes(self, *, block: bool = False) -> None:
        """Count finished writes as saved; with ``block``, wait for all writes. Raises the error of a failed write."""
        if block and self.saving:
            wait(self.saving)
        finished = [future for future in self.saving if future.done()]
        for future in finished:
            key, count = self.saving.pop(future)
            self.written.append(future.result())
            self.unsaved[key] -= count


@dataclass
class ExtractionStats:
    """Counts of an extraction: the figures of its last line."""

    images: int = 0  # images decoded by this process and its workers
    forward_batches: Counter[str] = field(default_factory=Counter)  # per key, batches computed
    forward_images: int = 0  # images that went through a model, summed over arrays
    kept_chunks: dict[str, int] = field(default_factory=dict)  # per key, chunks found finished
    # reason per quarantined row, all arrays of the run
    bad: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0  # wall time of the extraction loop
    decode_seconds: float = 0.0  # summed over workers
    forward_seconds: float = 0.0  # summed over workers and backbones
    workers: int = 0  # processes that computed
    # per key, texts that the model reads only in part
    cut: Counter[str] = field(default_factory=Counter)
    holds: str = IMAGES  # images, texts, rows or sounds
    names: Sequence[str] = ()  # of all rows

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
        """Raise CorruptionError if there are more than ``max_bad`` bad images; ``latest`` are those found last."""
        if len(self.bad) > max_bad:
            row, reason = max((latest or self.bad).items())
            raise CorruptionError(
                f"{len(self.bad)} {self.holds} could not be read, more than --max-bad {max_bad} allows. The last is "
                f"{self.names[row]}, row {row}: {reason}.",
                f"Fix the {self.holds}, or run again with a larger --max-bad. Finished chunks are kept.",
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
    """The bad rows, without rows whose image has vanished: a vanished image is no defect."""
    return {row: reason for row, reason in bad.items() if reason != VANISHED}


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
    """The workers for a device and ``tasks`` batches; as many as ``worker_count`` gives.

    The death of a worker raises StoppedError once ``stop`` was requested, else MachineError.
    """
    count = worker_count(jobs, settings, workers=workers, tasks=tasks, cores=cores)
    if not count:
        return InProcess(jobs, data, settings)
    if settings.device == "cuda":
        # With fewer batches than GPUs, the other GPUs load no models.
        settings = replace(settings, gpus=settings.gpus[:tasks])
        return GpuFeeder(jobs, data, settings, count, stop, CudaStages)
    return CpuWorkers(jobs, data, settings, count, stop)


BatchTask = tuple[int, tuple[str, ...]]
"""Number of a batch within the dataset, and keys of the arrays that need the batch."""


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
    """Compute and store every batch. Returns False if it was stopped on request, after the chunks that were begun.

    Batches begin in order, and at most ``collector.limit`` batches per array are ahead of the journal. Raises
    CorruptionError as soon as more than ``max_bad`` images are bad; MachineError when a worker died, StoppedError when
    it died of a signal that asked to stop.
    """
    queue = iter(tasks)
    waiting: dict[Future[Any], BatchTask] = {}
    begun: set[tuple[str, int]] = set()  # chunks with a batch that was submitted
    next_task = next(queue, None)
    while True:
        collector.collect_writes()
        # Submit batches while workers have room. Batches begin in order, so all chunks of an array except the last one
        # begun become full without further batches. So a write that makes room never waits for a batch that the limit
        # holds back.
        while next_task is not None and len(waiting) < workers.depth:
            batch, keys = next_task
            chunks = {(key, collector.chunk_of(key, batch)) for key in keys}
            if stop.requested and not chunks & begun:
                # No new chunk is begun, but the chunks that were begun get their missing batches.
                next_task = None
                break
            if any(collector.unsaved[key] >= collector.limit(key) for key in keys):
                break
            begun |= chunks
            for key in keys:
                collector.unsaved[key] += 1
            waiting[workers.submit(batch, keys)] = next_task
            next_task = next(queue, None)
        if not waiting and next_task is None:
            break
        # Wake when a batch is computed or a chunk is saved, and once a second to see a request to stop.
        done, _ = wait([*waiting, *collector.saving], timeout=1.0, return_when=FIRST_COMPLETED)
        if not done:
            workers.check()
        computed_futures = [future for future in done if future in waiting]
        computed_futures.sort(key=lambda future: waiting[future][0])
        for future in computed_futures:
            batch, keys = waiting.pop(future)
            computed = workers.finish(batch, keys, future)
            stats.add(computed)
            collector.add(batch, computed)
            observer.advance(computed.decoded)
            if len(stats.bad) > max_bad:
                collector.collect_writes(block=True)  # full chunks are kept before the error
                stats.check_bad(computed.bad, max_bad)
    collector.collect_writes(block=True)
    return not stop.requested
