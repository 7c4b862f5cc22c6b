"""Where batches are computed.

On a CPU each worker process decodes and runs the model single-threaded: two such processes beat one process with two
threads by a quarter (docs/performance.md). On a GPU workers only decode and the model runs here. Small jobs run in
this process, since starting workers costs seconds.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedcache.extract import batches as work
from fedcache.extract.batches import Computed, How, Job, Runner
from fedcache.extract.datasets import Dataset


class Compute(Protocol):
    """Where batches are computed."""

    depth: int
    workers: int

    def submit(self, batch: int, keys: Sequence[str]) -> Future[Any]:
        """Start a batch."""

    def finish(self, batch: int, keys: Sequence[str], result: Any) -> Computed:
        """The computed batch of a finished future."""

    def warm(self) -> dict[str, float]:
        """Seconds per image and backbone of one process."""

    def text(self, key: str, classes: Sequence[str], templates: Sequence[str]) -> NDArray[np.float32]:
        """Text features [C, D]."""

    def close(self) -> None:
        """End the workers, at once."""


class Inline:
    """Everything in this process; for jobs too small to pay for workers."""

    depth = 1
    workers = 1

    def __init__(self, jobs: Sequence[Job], data: Dataset, how: How) -> None:
        import torch

        self._threads = torch.get_num_threads()
        self.runner = work.make_runner(jobs, data.source, data.uid, len(data.names), how)

    def submit(self, batch: int, keys: Sequence[str]) -> Future[Any]:
        """Compute at once."""
        future: Future[Any] = Future()
        future.set_result(self.runner.compute(batch, keys))
        return future

    def finish(self, batch: int, keys: Sequence[str], result: Any) -> Computed:
        """The result itself."""
        computed: Computed = result
        return computed

    def warm(self) -> dict[str, float]:
        """See ``Compute``."""
        return self.runner.warm()

    def text(self, key: str, classes: Sequence[str], templates: Sequence[str]) -> NDArray[np.float32]:
        """See ``Compute``."""
        return self.runner.text(key, classes, templates)

    def close(self) -> None:
        """Give the process its threads back."""
        import torch

        torch.set_num_threads(self._threads)


class Pool:
    """Workers that decode and run the models: the CPU arrangement."""

    def __init__(self, jobs: Sequence[Job], data: Dataset, how: How, workers: int) -> None:
        self.workers = workers
        self.depth = workers * 2
        self.pool = ProcessPoolExecutor(
            workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=work.enter_worker,
            initargs=(jobs, data.source, data.uid, len(data.names), how),
        )

    def submit(self, batch: int, keys: Sequence[str]) -> Future[Any]:
        """See ``Compute``."""
        return self.pool.submit(work.worker_compute, batch, keys)

    def finish(self, batch: int, keys: Sequence[str], result: Any) -> Computed:
        """The result itself."""
        computed: Computed = result
        return computed

    def warm(self) -> dict[str, float]:
        """See ``Compute``; every worker warms up, one answers."""
        answers = [self.pool.submit(work.worker_warm) for _ in range(self.workers)]
        rates = [answer.result() for answer in answers]
        return rates[0]

    def text(self, key: str, classes: Sequence[str], templates: Sequence[str]) -> NDArray[np.float32]:
        """See ``Compute``."""
        return self.pool.submit(work.worker_text, key, classes, templates).result()

    def close(self) -> None:
        """End the workers without waiting for batches nobody will read."""
        processes = list((self.pool._processes or {}).values())
        self.pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(5)


class Split:
    """Workers decode, the model runs here on a GPU."""

    def __init__(self, jobs: Sequence[Job], data: Dataset, how: How, workers: int) -> None:
        self.workers, self.how, self.data = workers, how, data
        self.depth = workers * 2 + 2
        self.jobs = {job.key: job for job in jobs}
        self.pool = ProcessPoolExecutor(
            workers, mp_context=multiprocessing.get_context("spawn"), initializer=work.enter_decoder
        )
        self.runner = Runner(jobs, data.source, data.uid, len(data.names), how)

    def _rows(self, batch: int) -> range:
        return range(batch * self.how.batch, min((batch + 1) * self.how.batch, len(self.data.names)))

    def submit(self, batch: int, keys: Sequence[str]) -> Future[Any]:
        """Decode in a worker."""
        rows = self._rows(batch)
        recipes = [self.jobs[k].recipe for k in keys]
        return self.pool.submit(
            work.decode_batch,
            self.data.source,
            list(rows),
            self.data.uid[rows.start : rows.stop],
            recipes,
            self.data.mirror,
        )

    def finish(self, batch: int, keys: Sequence[str], result: Any) -> Computed:
        """Run the models on what a worker decoded."""
        inputs, bad, seconds = result
        return self.runner.forward(list(self._rows(batch)), keys, inputs, bad, seconds)

    def warm(self) -> dict[str, float]:
        """See ``Compute``."""
        return self.runner.warm()

    def text(self, key: str, classes: Sequence[str], templates: Sequence[str]) -> NDArray[np.float32]:
        """See ``Compute``."""
        return self.runner.text(key, classes, templates)

    def close(self) -> None:
        """End the decoders."""
        self.pool.shutdown(wait=False, cancel_futures=True)


INLINE_BATCHES = 12
"""Jobs of fewer batches run in this process: starting workers costs about as much."""


def open_compute(jobs: Sequence[Job], data: Dataset, how: How, workers: int | None, tasks: int, cores: int) -> Compute:
    """The arrangement for a device and a job size; ``workers`` 0 forces this process."""
    if workers == 0 or (workers is None and how.device == "cpu" and tasks < INLINE_BATCHES):
        return Inline(jobs, data, how)
    if how.device == "cuda":
        return Split(jobs, data, how, workers or max(1, cores - 1))
    return Pool(jobs, data, how, workers or max(1, cores // how.threads))
