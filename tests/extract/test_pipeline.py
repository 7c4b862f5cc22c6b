"""The loop over batches: it keeps every worker busy for every size of batch and chunk, and bounds what a kill costs.

The workers here are threads that wait for each other, so what is counted depends on no clock.
"""

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fedcache.extract.batches import ComputedBatch
from fedcache.extract.planning.cost import BatchCost, pipeline_seconds
from fedcache.extract.workers.batch_workers import BatchWorkers, depth_of
from fedcache.extract.workers.local import (
    ChunkCollector,
    ExtractionStats,
    chunk_rows_for,
    run_batches,
)
from fedcache.process import Stop
from fedcache.progress import Silent

PATIENCE = 60.0
"""Seconds after which a test that waits has failed."""

BATCHES = 48


class Kept:
    """A writer that keeps chunks, each once it may."""

    shape = (0, 1, 1)

    def __init__(self, chunk_rows):
        self.chunk_rows = chunk_rows
        self.chunks = {}
        self.open = threading.Event()
        self.open.set()

    def write(self, chunk, rows, bad=None):
        assert self.open.wait(PATIENCE)
        self.chunks[chunk] = rows

    @property
    def rows(self):
        return np.concatenate([self.chunks[chunk] for chunk in sorted(self.chunks)])


class Threads(BatchWorkers):
    """Threads whose feature of a row is its number; ``meet`` is called by each before it answers."""

    def __init__(self, workers, rows, batch, meet):
        self.workers = workers
        self.depth = depth_of(workers, 4 * batch)
        self.rows = rows
        self.batch = batch
        self.meet = meet
        self.submitted = 0
        self.threads = ThreadPoolExecutor(workers)

    def submit(self, batch, keys):
        self.submitted += 1
        return self.threads.submit(self._compute, batch, tuple(keys))

    def _compute(self, batch, keys):
        self.meet()
        first = batch * self.batch
        rows = np.arange(first, min(first + self.batch, self.rows), dtype=np.float32)
        features = dict.fromkeys(keys, rows[:, None, None])
        return ComputedBatch(features, {}, len(rows), 0.0, dict.fromkeys(keys, 0.0))

    def close(self):
        self.threads.shutdown()


def run(workers, writers):
    tasks = [(number, tuple(writers)) for number in range(math.ceil(workers.rows / workers.batch))]
    collector = ChunkCollector(writers, workers.rows, workers.batch, workers.depth)
    try:
        whole = run_batches(
            tasks,
            workers,
            collector,
            max_bad=0,
            stop=Stop(),
            stats=ExtractionStats(),
            observer=Silent(),
        )
    finally:
        collector.thread.shutdown()
        workers.close()
    return whole, collector


def until(happened):
    """Whether it has happened, after ``PATIENCE`` at most."""
    end = time.monotonic() + PATIENCE
    while not happened():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


@pytest.mark.parametrize("batch", [32, 256, 512, 1024])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_as_many_batches_are_computed_at_once_as_there_are_workers(count, batch):
    """Every batch waits until as many are being computed as there are workers, and one more waits for a worker."""
    met = 0

    def fed():
        """Called once ``count`` batches are being computed, before any of them ends."""
        nonlocal met
        met += 1
        assert until(lambda: workers.submitted > min(count * met, BATCHES - 1))

    barrier = threading.Barrier(count, fed, timeout=PATIENCE)
    rows = BATCHES * batch - batch // 2
    workers = Threads(count, rows, batch, barrier.wait)
    writers = {
        "default": Kept(chunk_rows_for(batch, 2)),
        "small": Kept(batch),
        "large": Kept(8 * batch),
    }
    whole, _ = run(workers, writers)
    assert whole
    assert met == BATCHES // count
    for kept in writers.values():
        assert np.array_equal(kept.rows[:, 0, 0], np.arange(rows))


def test_a_kill_never_costs_more_than_the_first_line_says():
    """With a disk that answers nothing the loop begins exactly as many batches as the limit allows, and then waits."""
    kept = Kept(4 * 8)
    kept.open.clear()
    workers = Threads(2, 100 * 8, 8, lambda: None)
    expected = workers.depth + 2 * 4

    def release():
        assert until(lambda: workers.submitted == expected)
        time.sleep(0.02)  # time to begin one too many
        seen.append(workers.submitted)
        kept.open.set()

    seen = []
    helper = threading.Thread(target=release)
    helper.start()
    whole, collector = run(workers, {"a": kept})
    helper.join()
    assert whole
    assert seen == [expected]
    assert collector.most_under_way == expected * 8
    assert np.array_equal(kept.rows[:, 0, 0], np.arange(800))


@pytest.mark.parametrize(
    ("workers", "batch_bytes", "depth"),
    [(1, 0, 4), (8, 4096, 18), (8, 1 << 28, 12), (8, 1 << 40, 10)],
)
def test_what_waits_is_bounded_by_memory(workers, batch_bytes, depth):
    assert depth_of(workers, batch_bytes) == depth


@pytest.mark.parametrize(
    ("batch", "row_bytes", "device", "rows"),
    [
        (32, 2560, "cpu", 512),
        (48, 2560, "cpu", 384),
        (32, 1 << 20, "cpu", 32),
        (1024, 2560, "cpu", 1024),
        (256, 2560, "cuda", 8 * 256),
        (32, 2560, "cuda", 512),
        (1024, 2560, "cuda", 8 * 1024),
        (256, 150_528, "cuda", 256),  # pixels of 224 px: 38 MB a batch
    ],
)
def test_chunks_have_eight_batches_of_a_gpu_and_512_rows_on_a_cpu(batch, row_bytes, device, rows):
    assert chunk_rows_for(batch, row_bytes, device) == rows


SLEEPS = BatchCost(decode=0.0, forward=1.0, processor=0.001)
WORKS = BatchCost(decode=0.5, forward=1.5, processor=2.0)
DECODES = BatchCost(decode=4.0, forward=1.0, processor=5.0)


@pytest.mark.parametrize(
    ("cost", "batches", "device", "workers", "cores", "seconds"),
    [
        (SLEEPS, 32, "cpu", 4, 2, 8.0),
        (SLEEPS, 32, "cpu", 8, 2, 4.0),
        (SLEEPS, 33, "cpu", 8, 2, 5.0),  # the last batch is computed alone
        (SLEEPS, 3, "cpu", 0, 2, 3.0),  # in this process
        (WORKS, 32, "cpu", 2, 2, 32.0),
        (WORKS, 32, "cpu", 8, 2, 32.0),  # more processes than cores compute no more
        (WORKS, 10, "cuda", 4, 8, 15.5),  # the device sets the pace after the first batch
        (DECODES, 16, "cuda", 4, 8, 20.0),
        (DECODES, 16, "cuda", 2, 8, 33.0),  # the decoders do, and the last batch is computed after
        (DECODES, 16, "cuda", 8, 2, 33.0),
        (DECODES, 16, "cuda", 0, 2, 80.0),
    ],
)
def test_the_estimate_counts_workers_cores_and_the_device(
    cost, batches, device, workers, cores, seconds
):
    found = pipeline_seconds(cost, batches, device=device, workers=workers, cores=cores)
    assert found == pytest.approx(seconds)


def test_the_estimate_shares_batches_among_gpus():
    found = pipeline_seconds(WORKS, 10, device="cuda", workers=8, cores=8, gpus=2)
    assert found == pytest.approx(0.5 + 5 * 1.5)
