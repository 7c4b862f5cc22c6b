"""Extraction: dispatch absolute batches, let them be collected into chunks and journalled by the store.

At most one chunk's worth of batches per backbone is ever computed but not yet journalled, so a kill loses at most
that much.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedcache.errors import Exit, FedcacheError
from fedcache.extract.batches import How, Job
from fedcache.extract.chunk_writer import Collector, chunk_rows_for
from fedcache.extract.datasets import Dataset
from fedcache.extract.device import cores
from fedcache.extract.images import BadImage, decode
from fedcache.extract.stop import Stop
from fedcache.extract.workers.chunk_tasks import Crew, Order, order_of, plan_ranges, run_ranges
from fedcache.extract.workers.local import Compute, open_compute, worker_died
from fedcache.progress import Observer
from fedcache.store.quarantine import VANISHED
from fedcache.store.store import ArrayWriter, Store

Elsewhere = Callable[[Order], AbstractContextManager[Crew]]
"""Opens helpers for an extraction and ends them with the block."""


@dataclass
class Tally:
    """What a run did; the figures of its last line.

    Attributes:
        images: images decoded in this process tree.
        forward_batches: per key, batches computed.
        forward_images: images that went through a model, summed over arrays.
        kept_chunks: per key, chunks found finished.
        bad: reason per quarantined row, all arrays of the run.
        seconds: wall time of the extraction loop.
        decode_seconds: summed over workers.
        forward_seconds: summed over workers and backbones.
        workers: processes that computed.
    """

    images: int = 0
    forward_batches: dict[str, int] = field(default_factory=dict)
    forward_images: int = 0
    kept_chunks: dict[str, int] = field(default_factory=dict)
    bad: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0
    decode_seconds: float = 0.0
    forward_seconds: float = 0.0
    workers: int = 0

    @property
    def rate(self) -> float:
        """Images per second."""
        return self.images / self.seconds if self.seconds else 0.0

    def busy(self, cores: int) -> float:
        """Share of the cores' time that went into decoding and the models."""
        return (self.decode_seconds + self.forward_seconds) / (self.seconds * cores) if self.seconds else 0.0


def run_batches(
    tasks: Sequence[tuple[int, tuple[str, ...]]],
    compute: Compute,
    collector: Collector,
    *,
    max_bad: int,
    stop: Stop,
    tally: Tally,
    observer: Observer,
) -> bool:
    """Compute and store every task; False when it was stopped on request (chunks begun are finished).

    Args:
        tasks: (absolute batch, keys that want it), in order.

    Raises:
        FedcacheError: CORRUPT, as soon as more than ``max_bad`` images are bad; ENVIRONMENT when a worker died.
    """
    queue: Iterator[tuple[int, tuple[str, ...]]] = iter(tasks)
    waiting: dict[Future[Any], tuple[int, tuple[str, ...]]] = {}
    begun: set[tuple[str, int]] = set()
    held = next(queue, None)
    while True:
        collector.settle()
        while held is not None and len(waiting) < compute.depth:
            batch, keys = held
            chunks = {(k, collector.chunk_of(k, batch)) for k in keys}
            if stop.requested and not chunks & begun:
                held = None
                break
            if any(collector.unsaved[k] >= collector.limit(k) for k in keys):
                break
            begun |= chunks
            for k in keys:
                collector.unsaved[k] += 1
            waiting[compute.submit(batch, keys)] = held
            held = next(queue, None)
        if not waiting and held is None:
            break
        done, _ = wait([*waiting, *collector.saving], timeout=1.0, return_when=FIRST_COMPLETED)
        for future in sorted((f for f in done if f in waiting), key=lambda f: waiting[f][0]):
            batch, keys = waiting.pop(future)
            try:
                computed = compute.finish(batch, keys, future.result())
            except BrokenProcessPool as error:
                raise worker_died(error) from error
            tally.images += computed.decoded - sum(why == VANISHED for why in computed.bad.values())
            tally.decode_seconds += computed.decode_seconds
            for key, seconds in computed.forward_seconds.items():
                tally.forward_seconds += seconds
                tally.forward_batches[key] = tally.forward_batches.get(key, 0) + 1
                tally.forward_images += len(computed.features[key]) - len(computed.bad)
            tally.bad.update(unreadable(computed.bad))
            collector.add(batch, computed)
            observer.advance(computed.decoded)
            if len(tally.bad) > max_bad:
                collector.settle(block=True)
                raise too_many_bad(tally.bad, computed.bad, max_bad)
    collector.settle(block=True)
    return not stop.requested


def too_many_bad(bad: Mapping[int, str], latest: Mapping[int, str], max_bad: int) -> FedcacheError:
    """The error of an extraction with more bad images than it may have."""
    row, reason = sorted(latest.items())[-1]
    return FedcacheError(
        Exit.CORRUPT,
        f"{len(bad)} images could not be read, more than --max-bad {max_bad}; the last is row {row}: {reason}.",
        "Mend the images, or run again with a larger --max-bad: finished chunks are kept.",
    )


def unreadable(bad: Mapping[int, str]) -> dict[int, str]:
    """Rows whose image is there and cannot be read; one that has vanished is no defect."""
    return {row: reason for row, reason in bad.items() if reason != VANISHED}


def open_writers(
    stack: ExitStack,
    store: Store,
    jobs: Sequence[Job],
    shapes: Mapping[str, tuple[int, ...]],
    chunk_rows: Mapping[str, int],
    records: Mapping[str, Mapping[str, Any]],
    *,
    wait_for: bool,
    fresh: bool,
) -> dict[str, ArrayWriter]:
    """A writer per array, locked until the stack closes; sorted by key so that two runs cannot wait for each other."""
    writers = {}
    for job in sorted(jobs, key=lambda j: j.key):
        writers[job.key] = stack.enter_context(
            store.writer(
                job.key,
                shape=shapes[job.key],
                dtype=job.recipe.dtype,
                chunk_rows=chunk_rows[job.key],
                recipe=job.recipe.to_dict(),
                how=dict(records[job.key]),
                wait=wait_for,
                fresh=fresh,
            )
        )
    return writers


def plan_tasks(writers: Mapping[str, ArrayWriter], rows: int, batch: int) -> list[tuple[int, tuple[str, ...]]]:
    """Absolute batches still to compute and the keys that want each."""
    missing = {key: set(writer.missing()) for key, writer in writers.items()}
    tasks = []
    for index in range(math.ceil(rows / batch)):
        keys = tuple(k for k, w in writers.items() if index * batch // w.chunk_rows in missing[k])
        if keys:
            tasks.append((index, keys))
    return tasks


def check_chunk_rows(chunk_rows: int, batch: int, key: str) -> None:
    """Refuse chunks that would end within a batch.

    Raises:
        FedcacheError: USAGE.
    """
    if chunk_rows % batch:
        raise FedcacheError(
            Exit.USAGE,
            f"--chunk-rows {chunk_rows} is not a multiple of the batch {batch} ({key}).",
            f"For example --chunk-rows {max(1, chunk_rows // batch) * batch}",
        )


def extract_arrays(
    store: Store,
    data: Dataset,
    jobs: Sequence[Job],
    how: How,
    records: Mapping[str, Mapping[str, Any]],
    *,
    workers: int | None,
    chunk_rows: int | None,
    as_before: Mapping[str, int],
    adopt: Callable[[Mapping[str, ArrayWriter]], None] | None,
    max_bad: int,
    text: Mapping[str, Sequence[str]],
    wait_for: bool,
    fresh: bool,
    stop: Stop,
    observer: Observer,
    elsewhere: Elsewhere | None = None,
) -> Tally:
    """Compute what is missing of every job's array and write the text features asked for.

    Args:
        store: of ``data``.
        jobs: the backbones to run.
        how: device, dtype, batch, threads.
        records: per key ``how`` with library versions, as the store keeps it.
        workers: processes; None chooses, 0 means this process.
        chunk_rows: rows per chunk for every array; None chooses per backbone.
        as_before: per key rows per chunk of the array it grows from, instead of a choice.
        adopt: called with the open writers before anything is computed, to give them chunks that are there already.
        max_bad: images that may be bad.
        text: templates per key whose text features are to be written.
        wait_for: wait for another writer of the same array instead of exit 4.
        fresh: discard unfinished arrays.
        stop: set by a signal handler.
        elsewhere: opens helpers that compute ranges of chunks in the place of ``workers``, and says how many at once.

    Raises:
        FedcacheError: INTERRUPTED after a stop; CORRUPT over ``max_bad``; STORE when locked.
    """
    from fedcache.extract.backbones import lookup

    rows = len(data.names)
    tally = Tally()
    shapes = {job.key: feature_shape(job, data, lookup(job.backbone).width) for job in jobs}
    sizes = {
        job.key: chunk_rows
        or as_before.get(job.key)
        or chunk_rows_for(how.batch, math.prod(shapes[job.key][1:]) * np.dtype(job.recipe.dtype).itemsize)
        for job in jobs
    }
    for key, size in sizes.items():
        check_chunk_rows(size, how.batch, key)
    with ExitStack() as stack:
        writers = open_writers(stack, store, jobs, shapes, sizes, records, wait_for=wait_for, fresh=fresh)
        if adopt is not None:
            adopt(writers)
        tasks = plan_tasks(writers, rows, how.batch)
        tally.kept_chunks = {key: len(writer.kept) for key, writer in writers.items()}
        tally.bad = {row: why for writer in writers.values() for row, why in unreadable(writer.bad).items()}
        tally.forward_batches = dict.fromkeys(writers, 0)
        if tasks and elsewhere is not None:
            with elsewhere(order_of(jobs, data, how, records, writers, 0)) as crew:
                tally.workers = crew.slots
                announce(crew.ask(None)["seconds"], crew.slots, crew.slots, jobs, how, writers, observer)
                ranges = plan_ranges(writers, tasks, rows, how.batch)

                def ranged() -> bool:
                    return run_ranges(ranges, crew, writers, max_bad=max_bad, stop=stop, tally=tally, observer=observer)

                _run(tasks, ranged, rows, how, tally, observer)
            for writer in writers.values():
                writer.remove_uncommitted()
            tasks = []
        if tasks or text:
            needed = jobs if tasks else [job for job in jobs if job.key in text]
            compute = open_compute(needed, data, how, workers, len(tasks), cores())
            stack.callback(compute.close)
            tally.workers = tally.workers or compute.workers
            if tasks:
                parallel = compute.workers if how.device == "cpu" else 1
                announce(sum(compute.warm().values()), compute.workers, parallel, jobs, how, writers, observer)
                collector = Collector(writers, rows, how.batch)
                stack.callback(collector.thread.shutdown, wait=True)

                def here() -> bool:
                    return run_batches(
                        tasks, compute, collector, max_bad=max_bad, stop=stop, tally=tally, observer=observer
                    )

                _run(tasks, here, rows, how, tally, observer)
            for key, templates in text.items():
                job = next(j for j in jobs if j.key == key)
                matrix = compute.text(key, data.classes, templates)
                store.put_text(
                    job.backbone,
                    list(templates),
                    matrix,
                    {"backbone": job.backbone, "weights": job.recipe.weights, "classes": list(data.classes)},
                )
        for writer in writers.values():
            writer.complete()
    return tally


def _run(
    tasks: Sequence[tuple[int, tuple[str, ...]]],
    call: Callable[[], bool],
    rows: int,
    how: How,
    tally: Tally,
    observer: Observer,
) -> None:
    """``run_batches`` or ``run_ranges`` with a clock, the progress bar and the message of an interruption."""
    begin = time.perf_counter()
    observer.start("extracting", sum(min(how.batch, rows - b * how.batch) for b, _ in tasks), "images")
    try:
        finished = call()
    finally:
        tally.seconds = time.perf_counter() - begin
        observer.stop()
    if not finished:
        raise FedcacheError(
            Exit.INTERRUPTED,
            f"Stopped on request after {tally.images:,} images; every finished chunk is kept.",
            "Run the same command again to go on.",
        )


def feature_shape(job: Job, data: Dataset, width: int) -> tuple[int, ...]:
    """[N, V, D], or [N, V, H, W, 3] for pixels; the native size of pixels is that of the first good image."""
    rows, views = len(data.names), job.recipe.views
    if job.recipe.dtype != "uint8":
        return (rows, views, width)
    if job.recipe.size:
        return (rows, views, job.recipe.size, job.recipe.size, 3)
    for row in range(rows):
        try:
            side = decode(data.source.read(row)).size
        except BadImage:
            continue
        return (rows, views, side[1], side[0], 3)
    raise FedcacheError(Exit.CORRUPT, "No image of the dataset can be read.", "Check the dataset's path and format.")


def announce(
    seconds: float,
    workers: int,
    parallel: int,
    jobs: Sequence[Job],
    how: How,
    writers: Mapping[str, ArrayWriter],
    observer: Observer,
) -> None:
    """The first line of an extraction: device, dtype, batch and the rate to expect of the models alone, if any."""
    names = " + ".join(job.recipe.label for job in jobs)
    models = any(job.recipe.dtype != "uint8" for job in jobs)  # images are decoded and kept as they are
    rate = f"expect about {parallel / max(seconds, 1e-9):,.0f} images/s before decoding" if models else "no model runs"
    observer.note(
        f"{names} on {how.device}, {how.dtype}, batch {how.batch}, {workers} "
        f"{'process' if workers == 1 else 'processes'} of {how.threads} thread: {rate}."
    )
    for key, writer in writers.items():
        if writer.kept:
            observer.note(
                f"{key}: {len(writer.kept)} of {len(writer.kept) + len(writer.missing())} chunks kept, resuming."
            )
