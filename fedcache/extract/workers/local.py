"""Where batches are computed.

On a CPU each worker process decodes and runs the model single-threaded: two such processes beat one process with two
threads by a quarter (docs/performance.md). On a GPU workers only decode and the model runs here. Small jobs run in
this process, since starting workers costs seconds.
"""

from __future__ import annotations

import multiprocessing
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import Exit, FedcacheError
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


def worker_died(error: BaseException) -> FedcacheError:
    """The error of a worker that was ended from outside."""
    return FedcacheError(
        Exit.ENVIRONMENT,
        f"An extraction worker ended ({error}).",
        "Out of memory? Run the same command again: it resumes. A smaller --batch or --workers 1 needs less memory.",
    )


class Workers:
    """A process pool whose workers never import ``__main__`` and end at once when asked to."""

    def __init__(self, count: int, initializer: Callable[..., None], initargs: tuple[Any, ...]) -> None:
        self.count = count
        context = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(count, mp_context=context, initializer=initializer, initargs=initargs)

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        """Start a call in a worker.

        Raises:
            FedcacheError: ENVIRONMENT, when a worker died.
        """
        try:
            with without_main():
                return self.pool.submit(call, *args)
        except BrokenProcessPool as error:
            raise worker_died(error) from error

    def ask(self, call: Callable[..., Any], *args: Any, times: int = 1) -> Any:
        """Run a call ``times`` times at once and return one answer; errors as ``submit``."""
        answers = [self.submit(call, *args) for _ in range(times)]
        try:
            return [answer.result() for answer in answers][-1]
        except BrokenProcessPool as error:
            raise worker_died(error) from error

    def close(self) -> None:
        """End the workers without waiting for what nobody will read."""
        processes = list((self.pool._processes or {}).values())
        self.pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(5)


class Pool:
    """Workers that decode and run the models: the CPU arrangement."""

    def __init__(self, jobs: Sequence[Job], data: Dataset, how: How, workers: int) -> None:
        self.workers = workers
        self.depth = workers * 2
        self.pool = Workers(workers, work.enter_worker, (jobs, data.source, data.uid, len(data.names), how))

    def submit(self, batch: int, keys: Sequence[str]) -> Future[Any]:
        """See ``Compute``."""
        return self.pool.submit(work.worker_compute, batch, keys)

    def finish(self, batch: int, keys: Sequence[str], result: Any) -> Computed:
        """The result itself."""
        computed: Computed = result
        return computed

    def warm(self) -> dict[str, float]:
        """See ``Compute``; every worker warms up, one answers."""
        rates: dict[str, float] = self.pool.ask(work.worker_warm, times=self.workers)
        return rates

    def text(self, key: str, classes: Sequence[str], templates: Sequence[str]) -> NDArray[np.float32]:
        """See ``Compute``."""
        matrix: NDArray[np.float32] = self.pool.ask(work.worker_text, key, classes, templates)
        return matrix

    def close(self) -> None:
        """See ``Compute``."""
        self.pool.close()


class Split:
    """Workers decode, the model runs here on a GPU."""

    def __init__(self, jobs: Sequence[Job], data: Dataset, how: How, workers: int) -> None:
        self.workers, self.how, self.data = workers, how, data
        self.depth = workers * 2 + 2
        self.jobs = {job.key: job for job in jobs}
        self.pool = Workers(workers, work.enter_decoder, ())
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
        self.pool.close()


INLINE_BATCHES = 12
"""Jobs of fewer batches run in this process: starting workers costs about as much."""


def open_compute(jobs: Sequence[Job], data: Dataset, how: How, workers: int | None, tasks: int, cores: int) -> Compute:
    """The arrangement for a device and a job size; ``workers`` 0 forces this process."""
    if workers == 0 or (workers is None and how.device == "cpu" and tasks < INLINE_BATCHES):
        return Inline(jobs, data, how)
    if how.device == "cuda":
        return Split(jobs, data, how, workers or max(1, cores - 1))
    return Pool(jobs, data, how, workers or max(1, cores // how.threads))
