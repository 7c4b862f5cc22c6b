"""The processes of this machine that compute batches (this one, CPU workers, decoders before a GPU) and their loop.

On a CPU each worker process decodes and runs the model single-threaded: two such processes beat one process with two
threads by a quarter (docs/performance.md). On a GPU workers only decode and the model runs here. Small jobs run in
this process, since starting workers costs seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import connection, parent_process
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import FedcacheError, MachineError
from fedcache.extract.batches import BatchRunner, ComputedBatch, ComputeSettings, FeatureJob, decode_batch, make_runner
from fedcache.extract.chunk_writer import ChunkCollector
from fedcache.extract.datasets import Dataset, Source
from fedcache.extract.result import ExtractionStats
from fedcache.process import Stop, keep_freed_memory
from fedcache.progress import Observer


class BatchWorkers(ABC):
    """What computes batches, asynchronously."""

    depth: int  # batches that may be under way at once
    workers: int  # processes that compute
    runner: BatchRunner  # of the models, where they run in this process

    @abstractmethod
    def submit(self, batch: int, keys: Sequence[str]) -> Future[Any]:
        """Start a batch."""

    def finish(self, batch: int, keys: Sequence[str], result: Any) -> ComputedBatch:
        """The computed batch of a finished future."""
        computed: ComputedBatch = result
        return computed

    def warm(self) -> dict[str, float]:
        """Seconds per image and backbone of one process."""
        return self.runner.warm()

    def text(self, key: str, classes: Sequence[str], templates: Sequence[str]) -> NDArray[np.float32]:
        """Text features [C, D]."""
        return self.runner.text(key, classes, templates)

    @abstractmethod
    def close(self) -> None:
        """End the workers, at once."""


class InProcess(BatchWorkers):
    """Everything in this process; for jobs too small to pay for workers."""

    depth = 1
    workers = 1

    def __init__(self, jobs: Sequence[FeatureJob], data: Dataset, settings: ComputeSettings) -> None:
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


@contextmanager
def without_main() -> Iterator[None]:
    """Workers started in this block do not run the caller's script again.

    A spawned process imports the ``__main__`` of its parent, so a script or notebook without a ``__main__`` guard would
    start the same extraction in every worker. The workers need nothing from it: all they run lives in this package.
    """
    real = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = real


def _worker_died(error: BaseException) -> FedcacheError:
    """The error of a worker that was ended from outside."""
    return MachineError(
        f"An extraction worker ended ({error}).",
        "Out of memory? Run the same command again: it resumes. A smaller --batch or --workers 1 needs less memory.",
    )


class WorkerProcesses:
    """A process pool whose workers never import ``__main__`` and end at once when asked to."""

    def __init__(self, count: int, initializer: Callable[..., None], initargs: tuple[Any, ...]) -> None:
        self.count = count
        # spawn: a fork would copy torch's threads and locks in whatever state they are.
        context = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(count, mp_context=context, initializer=initializer, initargs=initargs)

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        """Start a call in a worker; MachineError when a worker died."""
        try:
            with without_main():
                return self.pool.submit(call, *args)
        except BrokenProcessPool as error:
            raise _worker_died(error) from error

    def ask(self, call: Callable[..., Any], *args: Any, times: int = 1) -> Any:
        """Run a call ``times`` times at once and return one answer; errors as ``submit``."""
        answers = [self.submit(call, *args) for _ in range(times)]
        try:
            return [answer.result() for answer in answers][-1]
        except BrokenProcessPool as error:
            raise _worker_died(error) from error

    def close(self) -> None:
        """End the workers without waiting for what nobody will read."""
        # shutdown() forgets the processes, so they are noted first; those that compute are ended, not waited for.
        processes = list((self.pool._processes or {}).values())
        self.pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(5)


class CpuWorkers(BatchWorkers):
    """Worker processes that each decode and run the models."""

    def __init__(self, jobs: Sequence[FeatureJob], data: Dataset, settings: ComputeSettings, workers: int) -> None:
        self.workers = workers
        self.depth = workers * 2
        self.pool = WorkerProcesses(workers, init_cpu_worker, (jobs, data.source, data.uid, len(data.names), settings))

    def submit(self, batch: int, keys: Sequence[str]) -> Future[Any]:
        return self.pool.submit(call_runner, "compute", batch, keys)

    def warm(self) -> dict[str, float]:
        """Every worker warms up, one answers."""
        rates: dict[str, float] = self.pool.ask(call_runner, "warm", times=self.workers)
        return rates

    def text(self, key: str, classes: Sequence[str], templates: Sequence[str]) -> NDArray[np.float32]:
        matrix: NDArray[np.float32] = self.pool.ask(call_runner, "text", key, classes, templates)
        return matrix

    def close(self) -> None:
        self.pool.close()


class GpuFeeder(BatchWorkers):
    """Worker processes decode; the models run on a GPU in this process, fed in the order of the batches."""

    def __init__(self, jobs: Sequence[FeatureJob], data: Dataset, settings: ComputeSettings, workers: int) -> None:
        self.workers = workers
        self.depth = workers * 2 + 2  # decoded batches that wait for the GPU, beside those being decoded
        self.pool = WorkerProcesses(workers, init_decoder, ())
        self.runner = BatchRunner(jobs, data.source, data.uid, len(data.names), settings)

    def submit(self, batch: int, keys: Sequence[str]) -> Future[Any]:
        """Decode in a worker."""
        return self.pool.submit(decode_batch, *self.runner.decoding(batch, keys))

    def finish(self, batch: int, keys: Sequence[str], result: Any) -> ComputedBatch:
        """Run the models on what a worker decoded."""
        inputs, bad, seconds = result
        return self.runner.forward(self.runner.rows_of(batch), keys, inputs, bad, seconds)

    def close(self) -> None:
        """End the decoders."""
        self.pool.close()


# What runs inside a worker process.

_runner: BatchRunner | None = None


def die_with_parent() -> None:
    """End this process when its parent ends, however that happens: an orphan would hold memory for ever."""
    parent = parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def watch() -> None:
        connection.wait([sentinel])
        os._exit(1)  # not sys.exit: the main thread may be inside the model, and nothing here is worth flushing

    threading.Thread(target=watch, daemon=True).start()


def init_cpu_worker(
    jobs: Sequence[FeatureJob], source: Source, uid: NDArray[np.uint8], rows: int, settings: ComputeSettings
) -> None:
    """Initialise a worker process: signals are the parent's business, threads are fixed, backbones are loaded."""
    init_decoder()
    keep_freed_memory()
    global _runner
    _runner = make_runner(jobs, source, uid, rows, settings)


def call_runner(method: str, *args: Any) -> Any:
    """A method of this worker process's ``BatchRunner``."""
    return getattr(_runner, method)(*args)


def init_decoder() -> None:
    """Initialise a worker that only decodes (the model runs elsewhere)."""
    # Ctrl-C reaches the whole process group: the parent stops after the chunks under way, which need their workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent()


IN_PROCESS_BATCHES = 12
"""Jobs of fewer batches run in this process: starting workers costs about as much."""


def open_workers(
    jobs: Sequence[FeatureJob], data: Dataset, settings: ComputeSettings, workers: int | None, tasks: int, cores: int
) -> BatchWorkers:
    """The workers for a device and ``tasks`` batches; ``workers`` None chooses their number, 0 forces this process."""
    if workers == 0 or (workers is None and settings.device == "cpu" and tasks < IN_PROCESS_BATCHES):
        return InProcess(jobs, data, settings)
    if settings.device == "cuda":
        return GpuFeeder(jobs, data, settings, workers or max(1, cores - 1))
    return CpuWorkers(jobs, data, settings, workers or max(1, cores // settings.threads))


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
    images are bad; MachineError when a worker died.
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
                following = None  # nothing new is begun, but the chunks under way get the batches they lack
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
        for future in sorted((f for f in done if f in waiting), key=lambda f: waiting[f][0]):
            batch, keys = waiting.pop(future)
            try:
                computed = workers.finish(batch, keys, future.result())
            except BrokenProcessPool as error:
                raise _worker_died(error) from error
            stats.add(computed)
            collector.add(batch, computed)
            observer.advance(computed.decoded)
            if len(stats.bad) > max_bad:
                collector.collect_writes(block=True)  # what is whole is kept before the refusal
                stats.check_bad(computed.bad, max_bad)
    collector.collect_writes(block=True)
    return not stop.requested
