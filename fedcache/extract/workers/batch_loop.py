"""Compute batches and store them as they come, never more ahead of the journal than one chunk per array."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from fedcache.extract.chunk_writer import ChunkCollector
from fedcache.extract.result import ExtractionStats
from fedcache.extract.stop import Stop
from fedcache.extract.workers.local import BatchWorkers, worker_died
from fedcache.progress import Observer

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
    """Compute and store every batch; False when it was stopped on request (chunks begun are finished).

    Args:
        tasks: in order.
        workers: that compute them.
        collector: that writes their chunks.
        max_bad: images that may be bad.
        stop: looked at before each batch.
        stats: counted here.
        observer: told of progress.

    Raises:
        CorruptionError, as soon as more than ``max_bad`` images are bad; MachineError when a worker died.
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
                raise worker_died(error) from error
            stats.add(computed)
            collector.add(batch, computed)
            observer.advance(computed.decoded)
            if len(stats.bad) > max_bad:
                collector.collect_writes(block=True)  # what is whole is kept before the refusal
                stats.check_bad(computed.bad, max_bad)
    collector.collect_writes(block=True)
    return not stop.requested
