"""Ranges of chunks: what a helper in another process or on another machine computes in one call.

A range is whole chunks of every array that wants its images, so each image is decoded once and a range computed twice
has the same bytes. A helper writes chunk files under names of their own and answers with a few numbers; the process
that holds the locks puts them in place.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedcache.allocator import keep_freed_memory
from fedcache.errors import Exit, FedcacheError
from fedcache.extract.batches import Computed, How, Job, Runner, load_inputs, make_runner
from fedcache.extract.chunk_writer import Collector
from fedcache.extract.datasets import Dataset, Source
from fedcache.extract.images import BadImage
from fedcache.store.quarantine import VANISHED
from fedcache.store.worker_chunks import UncommittedChunk, WorkerArray
from fedcache.store.writer import ArrayWriter

if TYPE_CHECKING:
    from fedcache.extract.run import Tally
    from fedcache.extract.stop import Stop
    from fedcache.progress import Observer

PROBES = 8
"""Rows among which the driver looks for one that can be read, for helpers to compare."""


@dataclass(frozen=True)
class Range:
    """Some chunks, and the absolute batches that fill them.

    Attributes:
        chunks: (key, chunk).
        batches: (absolute batch, keys that want it), in order.
        images: rows of the batches.
    """

    chunks: tuple[tuple[str, int], ...]
    batches: tuple[tuple[int, tuple[str, ...]], ...]
    images: int


@dataclass(frozen=True)
class Order:
    """What every helper is told once.

    Attributes:
        jobs: the backbones.
        source: where the images are.
        uid: [N, 16], the keys of seeded views.
        rows: N.
        how: device, dtype, batch, threads.
        records: per key ``how`` with library versions, as the store keeps it.
        arrays: per key where chunks go.
        probe: (row, sha256 of its image), so that a helper without the images does not take all for unreadable.
        decoders: threads that decode beside the model; 0 decodes in turn with it.
    """

    jobs: tuple[Job, ...]
    source: Source
    uid: NDArray[np.uint8]
    rows: int
    how: How
    records: Mapping[str, Mapping[str, Any]]
    arrays: Mapping[str, WorkerArray]
    probe: tuple[int, str] | None
    decoders: int = 0


@dataclass
class Made:
    """What a helper found, without a single feature.

    Attributes:
        written: the chunk files.
        bad: reason per bad row.
        images: rows decoded.
        decode_seconds: summed over batches.
        forward_seconds: per key.
        batches: per key, computed.
        forward_images: that went through a model, summed over arrays.
    """

    written: list[UncommittedChunk] = field(default_factory=list)
    bad: dict[int, str] = field(default_factory=dict)
    images: int = 0
    decode_seconds: float = 0.0
    forward_seconds: dict[str, float] = field(default_factory=dict)
    batches: dict[str, int] = field(default_factory=dict)
    forward_images: int = 0

    def take(self, computed: Computed) -> None:
        """Count a batch."""
        self.images += computed.decoded
        self.bad.update(computed.bad)
        self.decode_seconds += computed.decode_seconds
        for key, seconds in computed.forward_seconds.items():
            self.forward_seconds[key] = self.forward_seconds.get(key, 0.0) + seconds
            self.batches[key] = self.batches.get(key, 0) + 1
            self.forward_images += len(computed.features[key]) - len(computed.bad)


class Crew(Protocol):
    """Helpers, wherever they are. A call whose helper dies is repeated by them."""

    @property
    def slots(self) -> int:
        """Calls that run at once."""

    @property
    def waiting(self) -> int:
        """Calls that have not answered."""

    def submit(self, tag: Any, *args: Any) -> None:
        """Start ``compute(helper, *args)``."""

    def wait(self, seconds: float) -> list[tuple[Any, dict[str, Any]]]:
        """(tag, answer) of the calls that have ended, after that many seconds at most."""

    def ask(self, *args: Any) -> dict[str, Any]:
        """One call and its answer."""


def plan_ranges(
    writers: Mapping[str, ArrayWriter], tasks: Sequence[tuple[int, tuple[str, ...]]], rows: int, batch: int
) -> list[Range]:
    """The missing chunks in ranges: chunks of several arrays that share an image are of one range.

    Args:
        writers: of the arrays.
        tasks: (absolute batch, keys that want it), in order.
        rows: N.
        batch: rows of an absolute batch.
    """
    spans = sorted(
        (chunk * w.chunk_rows, min((chunk + 1) * w.chunk_rows, rows), key, chunk)
        for key, w in writers.items()
        for chunk in w.missing()
    )
    groups: list[tuple[int, list[tuple[str, int]]]] = []
    for start, stop, key, chunk in spans:
        if groups and start < groups[-1][0]:
            groups[-1] = (max(stop, groups[-1][0]), [*groups[-1][1], (key, chunk)])
        else:
            groups.append((stop, [(key, chunk)]))
    made, at = [], 0
    for stop, chunks in groups:
        mine = []
        while at < len(tasks) and tasks[at][0] * batch < stop:
            mine.append(tasks[at])
            at += 1
        images = sum(min(batch, rows - b * batch) for b, _ in mine)
        made.append(Range(tuple(chunks), tuple(mine), images))
    return made


def order_of(
    jobs: Sequence[Job],
    data: Dataset,
    how: How,
    records: Mapping[str, Mapping[str, Any]],
    writers: Mapping[str, ArrayWriter],
    decoders: int,
) -> Order:
    """What helpers are told of an extraction."""
    probe = None
    for row in range(min(PROBES, len(data.names))):
        digest = _digest(data.source, row)
        if digest is not None:
            probe = (row, digest)
            break
    arrays = {key: writer.for_workers() for key, writer in writers.items() if not writer.finished}
    return Order(tuple(jobs), data.source, data.uid, len(data.names), how, dict(records), arrays, probe, decoders)


def _digest(source: Source, row: int) -> str | None:
    try:
        raw = source.read(row)
    except (BadImage, OSError):
        return None
    return hashlib.sha256(raw if isinstance(raw, bytes) else raw.tobytes()).hexdigest()


class Helper:
    """A process that computes ranges, with its backbones loaded once.

    Raises:
        FedcacheError: ENVIRONMENT, where this machine does not see the images, the store or the weights, or computes
            with other versions.
    """

    def __init__(self, order: Order) -> None:
        keep_freed_memory()
        self.order = order
        self._check()
        self.runner: Runner = make_runner(order.jobs, order.source, order.uid, order.rows, order.how)
        self._mirror = {job.key: job.mirror for job in order.jobs}

    def compute(self, range_: Range) -> dict[str, Any]:
        """Decode the images of a range, run the backbones, write the chunks."""
        made = Made()
        writers = {key: _Writer(self.order.arrays[key], made) for key, _ in range_.chunks}
        collector = Collector(writers, self.order.rows, self.order.how.batch)
        try:
            for batch, computed in self._batches(range_):
                made.take(computed)
                collector.add(batch, computed)
            collector.settle(block=True)
        finally:
            collector.thread.shutdown(wait=True)
        return {"made": made}

    def warm(self) -> dict[str, Any]:
        """Seconds per image and backbone."""
        return {"seconds": sum(self.runner.warm().values())}

    def _batches(self, range_: Range) -> Iterator[tuple[int, Computed]]:
        if not self.order.decoders:
            for batch, keys in range_.batches:
                yield batch, self.runner.compute(batch, keys)
            return
        with ThreadPoolExecutor(self.order.decoders, thread_name_prefix="decoder") as pool:
            ahead = [(b, keys, pool.submit(self._decode, b, keys)) for b, keys in range_.batches]
            for batch, keys, future in ahead:
                inputs, bad, seconds = future.result()
                yield batch, self.runner.forward(self._rows(batch), keys, inputs, bad, seconds)

    def _rows(self, batch: int) -> list[int]:
        size = self.order.how.batch
        return list(range(batch * size, min((batch + 1) * size, self.order.rows)))

    def _decode(self, batch: int, keys: Sequence[str]) -> tuple[Any, dict[int, str], float]:
        start, rows = time.perf_counter(), self._rows(batch)
        recipes = [self.runner.jobs[k].recipe for k in keys]
        uids = self.order.uid[rows[0] : rows[-1] + 1]
        inputs, bad = load_inputs(self.order.source, rows, uids, recipes, mirror=self._mirror[keys[0]])
        return inputs, bad, time.perf_counter() - start

    def _check(self) -> None:
        from fedcache.extract.backbones import lookup
        from fedcache.extract.device import how_record, resolve_device

        order, host = self.order, socket.gethostname()
        for array in order.arrays.values():
            array.check()
        if order.probe is not None and _digest(order.source, order.probe[0]) != order.probe[1]:
            raise FedcacheError(
                Exit.ENVIRONMENT,
                f"{host} does not see the images of the dataset, or sees others.",
                "The dataset must lie at the same path on all nodes.",
            )
        device, how = resolve_device(order.how.device), order.how
        for job in order.jobs:
            if job.weights.path is not None and not job.weights.path.exists():
                raise FedcacheError(
                    Exit.ENVIRONMENT,
                    f"{host} does not see the weights of {job.backbone}: {job.weights.path}.",
                    "Weights must lie at the same path on all nodes, e.g. in $FEDCACHE_HOME/weights on a shared disk.",
                )
            if job.key not in order.arrays:
                continue
            mine = how_record(device, how.dtype, how.batch, how.threads, lookup(job.backbone).provider)
            if mine != dict(order.records[job.key]):
                changed = sorted({*mine.items()} ^ {*order.records[job.key].items()}, key=str)
                raise FedcacheError(
                    Exit.ENVIRONMENT,
                    f"{host} would compute {job.key} in another way: {', '.join(f'{k} {v}' for k, v in changed)}. "
                    "Mixed rows would not be comparable.",
                    "Install the same versions on every node, and use nodes of one kind.",
                )


@dataclass
class _Writer:
    """What a collector asks of a writer, in a helper."""

    array: WorkerArray
    made: Made

    @property
    def chunk_rows(self) -> int:
        """Rows per chunk."""
        return self.array.chunk_rows

    def write(self, chunk: int, rows: NDArray[Any], bad: Mapping[int, str] | None = None) -> None:
        """Write a chunk that somebody else commits."""
        self.made.written.append(self.array.write(chunk, rows, bad))


def enter(order: Order) -> Helper:
    """Make a helper of this process."""
    return Helper(order)


def compute(helper: Helper, range_: Range | None) -> dict[str, Any]:
    """A range; with None, how fast the models are."""
    return helper.warm() if range_ is None else helper.compute(range_)


def run_ranges(
    ranges: Sequence[Range],
    crew: Crew,
    writers: Mapping[str, ArrayWriter],
    *,
    max_bad: int,
    stop: Stop,
    tally: Tally,
    observer: Observer,
) -> bool:
    """Have every range computed and commit it; False when it was stopped on request (ranges begun are finished).

    Raises:
        FedcacheError: CORRUPT, as soon as more than ``max_bad`` images are bad; what a helper raised.
    """
    from fedcache.extract.run import too_many_bad, unreadable

    todo, begun = iter(ranges), 0
    while True:
        while not stop.requested and crew.waiting < crew.slots and begun < len(ranges):
            crew.submit(begun, next(todo))
            begun += 1
        if not crew.waiting:
            return begun == len(ranges)
        for number, answer in crew.wait(1.0):
            made: Made = answer["made"]
            for written in made.written:
                writers[written.key].commit(written)
            tally.images += made.images - sum(why == VANISHED for why in made.bad.values())
            tally.decode_seconds += made.decode_seconds
            tally.forward_seconds += sum(made.forward_seconds.values())
            tally.forward_images += made.forward_images
            for key, count in made.batches.items():
                tally.forward_batches[key] = tally.forward_batches.get(key, 0) + count
            tally.bad.update(unreadable(made.bad))
            observer.advance(ranges[number].images)
            if len(tally.bad) > max_bad:
                raise too_many_bad(tally.bad, made.bad, max_bad)
