"""Workers that compute batches: this process, or worker processes on the CPU; decoders before a GPU are in ``gpu``.

On a CPU each worker process decodes and runs the model single-threaded: two such processes beat one process with two
threads by a quarter (docs/performance.md). Small jobs run in this process, since starting workers costs seconds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import FedcacheError
from fedcache.extract.batches import (
    BatchRunner,
    ComputedBatch,
    ComputeSettings,
    FeatureJob,
    make_runner,
)
from fedcache.extract.datasets import Dataset
from fedcache.extract.workers.processes import WorkerProcesses
from fedcache.process import Stop, keep_freed_memory

IN_PROCESS_BATCHES = 12
IN_PROCESS_ROWS = 384
"""Jobs with fewer batches and at most this many rows run in the main process: starting workers would take as long."""


def worker_count(
    jobs: Sequence[FeatureJob],
    settings: ComputeSettings,
    *,
    workers: int | None,
    tasks: int,
    cores: int,
) -> int:
    """Number of worker processes for ``tasks`` batches; 0 if this process computes them.

    ``workers`` is the requested number; None chooses.
    """
    small = tasks < IN_PROCESS_BATCHES and tasks * settings.batch <= IN_PROCESS_ROWS
    too_small = small and workers is None and settings.device == "cpu"
    # No other process can load a module that is only in the memory of this one. With a GPU, all models run in this one.
    here_only = settings.device == "cpu" and any(job.backbone.here_only for job in jobs)
    if workers == 0 or too_small or here_only:
        return 0
    if settings.device == "cuda":
        return workers or max(1, cores - 1)
    return workers or max(1, cores // settings.threads)


AHEAD_BYTES = 1 << 30
"""Limit in bytes for batches that wait for a worker, or for the writer that takes its results."""


def depth_of(workers: int, batch_bytes: int) -> int:
    """Batches that may be under way at once: one for each worker, and some that wait.

    ``workers`` + 2 batches wait if ``AHEAD_BYTES`` hold them, else fewer, but at least two. ``batch_bytes`` is the
    memory of a batch.
    """
    fitting = AHEAD_BYTES // max(1, batch_bytes)
    waiting = max(2, min(workers + 2, fitting))
    return workers + waiting


def feature_bytes(jobs: Sequence[FeatureJob], batch: int) -> int:
    """Bytes of the features of a batch, all arrays together, as they are computed: float32, or pixels."""
    total = 0
    for job in jobs:
        recipe = job.recipe
        row = 4 * job.backbone.width
        if recipe.dtype == "uint8":
            row = 3 * recipe.size**2
        total += batch * recipe.views * row
    return total


class BatchWorkers(ABC):
    """Workers that compute batches asynchronously."""

    depth: int  # batches that may be under way at once
    workers: int  # processes that compute
    runner: BatchRunner  # of the models, where they run in this process
    pool: WorkerProcesses | None = None  # the worker processes, if there are some
    notes: Sequence[str] = ()  # sentences about how the models run, after ``warm``

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
        """Raise if a worker process has ended, because its futures will never be done."""
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
        """End the workers at once, without waiting for their batches."""
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
        try:
            self.runner = make_runner(jobs, data.source, data.uid, len(data.names), settings)
        except BaseException:
            # ``make_runner`` has changed the number of threads, and there is no object to close.
            self.close()
            raise

    def submit(self, batch: int, keys: Sequence[str]) -> Future[Any]:
        """Compute at once."""
        future: Future[Any] = Future()
        future.set_result(self.runner.compute(batch, keys))
        return future

    def close(self) -> None:
        """Restore the number of threads of this process."""
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
        self.depth = depth_of(workers, feature_bytes(jobs, settings.batch))
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


# Functions that run inside a worker process.

_runner: BatchRunner | FedcacheError | None = None
"""The runner of this worker process, or the error that prevented it."""


def init_cpu_worker(*arguments: Any) -> None:
    """Prepare a worker process that decodes and computes; ``arguments`` are those of ``make_runner``."""
    keep_freed_memory()
    global _runner
    try:
        _runner = make_runner(*arguments)
    except FedcacheError as error:
        # The first call raises the error. An initializer that raises would end the pool with a traceback.
        _runner = error


def call_runner(method: str, *args: Any) -> Any:
    """Call a method of this worker process's ``BatchRunner``; raises the error with which creating it failed."""
    if isinstance(_runner, FedcacheError):
        raise _runner
    return getattr(_runner, method)(*args)
