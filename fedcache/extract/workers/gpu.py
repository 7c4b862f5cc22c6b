"""Extraction on GPUs: processes decode, and threads copy batches to each device, run the models and copy results back.

    decoders -> slots of shared memory -> load -> run -> fetch -> the loop over batches

Each arrow is a queue, so while the models run on one batch, the next is copied in and the one before is copied out.
Each of several devices has its own last three stages and takes the next batch that is decoded. ``DeviceStages`` is the
interface of a device; ``cuda`` implements it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedcache.extract.batches import (
    BatchRunner,
    ComputedBatch,
    ComputeSettings,
    FeatureJob,
    decode_batch,
    filled_up,
    input_key,
)
from fedcache.extract.datasets import Dataset
from fedcache.extract.recipe import IMAGES
from fedcache.extract.workers.batch_workers import BatchWorkers, depth_of
from fedcache.extract.workers.processes import WorkerProcesses
from fedcache.extract.workers.slots import Inputs, OpenSlots, Slots, open_slots
from fedcache.process import Stop

HELD = 3
"""Batches on a device at once: one that is copied in, one that is computed and one that is copied out."""


class DeviceStages(Protocol):
    """A device that copies in, computes and copies out at the same time. Each of the three has its own thread."""

    notes: list[str]  # sentences about how the models run, after ``warm``

    def warm(self) -> dict[str, float]:
        """Seconds per image of every model that reads images, at the size of a batch; called first."""

    def load(self, images: NDArray[np.uint8]) -> Any:
        """Begin to copy a whole batch [B, V, H, W, 3] to the device; ``images`` may change when this returns."""

    def run(self, key: str, loaded: Any) -> Any:
        """Begin to compute the features of a batch that ``load`` returned."""

    def fetch(self, started: Any) -> tuple[NDArray[np.float32], float]:
        """Wait for a batch that ``run`` returned: its features [B, V, D], and the seconds that the device took."""

    def close(self) -> None:
        """Restore the global settings of torch. Several devices are closed in the reverse order of their creation."""


@dataclass
class BatchUnderWay:
    """A batch on its way from the decoder to the loop; the stages add their results."""

    keys: Sequence[str]
    rows: range
    slot: int
    decoded: Future[Any]  # of ``decode_into``
    answer: Future[Any]  # of its ``ComputedBatch``
    inputs: Inputs = field(default_factory=dict)  # on the device, or texts and rows
    bad: dict[int, str] = field(default_factory=dict)
    decode_seconds: float = 0.0
    started: dict[str, Any] = field(default_factory=dict)  # per key the return value of ``run``
    features: dict[str, NDArray[Any]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # per key, time of its model
    # per key, texts that the model reads only in part
    cut: dict[str, int] = field(default_factory=dict)

    @property
    def blank(self) -> list[int]:
        """Places in the batch of rows without an image."""
        return [index for index, row in enumerate(self.rows) if row in self.bad]


@dataclass(eq=False)
class DeviceLine:
    """The three threads of one device: load, run and fetch.

    All devices take batches from one queue ``decoded``. The decoders of ``pool`` wrote them into ``slots``.
    """

    runner: BatchRunner
    device: DeviceStages
    decoded: SimpleQueue[BatchUnderWay | None]
    pool: WorkerProcesses
    slots: Slots
    closed: bool = False  # true after ``close``: batches pass without any work

    def __post_init__(self) -> None:
        self.room = threading.Semaphore(HELD)
        to_run = SimpleQueue[BatchUnderWay | None]()
        to_fetch = SimpleQueue[BatchUnderWay | None]()
        stages = [
            partial(self._stage, self._next_decoded, self._load, to_run),
            partial(self._stage, to_run.get, self._run, to_fetch),
            partial(self._stage, to_fetch.get, self._fetch, None),
        ]
        self.threads = [threading.Thread(target=stage, daemon=True) for stage in stages]
        for thread in self.threads:
            thread.start()

    def _next_decoded(self) -> BatchUnderWay | None:
        """Wait until the device has room, then for the next decoded batch; other devices may take batches meanwhile."""
        self.room.acquire()
        return self.decoded.get()

    def _stage(
        self,
        next_batch: Callable[[], BatchUnderWay | None],
        work_on: Callable[[BatchUnderWay], None],
        outgoing: SimpleQueue[BatchUnderWay | None] | None,
    ) -> None:
        """A thread that does one stage of every batch, until None comes. An error becomes the answer of its batch."""
        while (work := next_batch()) is not None:
            try:
                if not self.closed:
                    work_on(work)
            except BaseException as error:
                work.answer.set_exception(error)
                self.room.release()
                continue
            if outgoing is None:
                self.room.release()
            else:
                outgoing.put(work)
        if outgoing is not None:
            outgoing.put(None)

    def _load(self, work: BatchUnderWay) -> None:
        """Take what was decoded, begin its copy to the device and free its slot."""
        try:
            placed, work.bad, work.decode_seconds = self.pool.result(work.decoded)
            inputs = self.slots.get(work.slot, placed)
            for key in work.keys:
                job = self.runner.jobs[key]
                key_of_input = input_key(job.recipe)
                given = inputs[key_of_input]
                if job.recipe.dtype == "uint8":
                    # The feature of ``pixels`` is the input, and bad rows are zero already.
                    work.features[key] = given.copy()
                elif job.backbone.reads != IMAGES:
                    work.inputs[key_of_input] = given
                elif key_of_input not in work.inputs:
                    whole = filled_up(given, self.runner.settings.batch)
                    work.inputs[key_of_input] = self.device.load(whole)
        finally:
            self.slots.free(work.slot)

    def _run(self, work: BatchUnderWay) -> None:
        """Begin the models of images, one after another. Texts and rows are encoded before this returns."""
        for key in work.keys:
            if key in work.features:
                continue
            job = self.runner.jobs[key]
            given = work.inputs[input_key(job.recipe)]
            if job.backbone.reads == IMAGES:
                work.started[key] = self.device.run(key, given)
                continue
            start = time.perf_counter()
            work.features[key], work.cut[key] = self.runner.encode_items(key, given, work.blank)
            work.seconds[key] = time.perf_counter() - start
        work.inputs = {}  # frees their memory

    def _fetch(self, work: BatchUnderWay) -> None:
        """Wait for the features, and answer with the ``ComputedBatch``."""
        for key, started in work.started.items():
            features, work.seconds[key] = self.device.fetch(started)
            features = features[: len(work.rows)]
            features[work.blank] = np.nan
            work.features[key] = features
        seconds = {key: work.seconds.get(key, 0.0) for key in work.keys}
        in_order = {key: work.features[key] for key in work.keys}
        computed = ComputedBatch(
            in_order,
            work.bad,
            decoded=len(work.rows),
            decode_seconds=work.decode_seconds,
            forward_seconds=seconds,
            cut=work.cut,
        )
        work.answer.set_result(computed)


class GpuFeeder(BatchWorkers):
    """Worker processes decode; the models run on one or several GPUs, in threads of this process.

    ``make_stages`` returns the stages of a device for a runner. Each device of ``settings.gpus`` has its own models.
    """

    pool: WorkerProcesses

    def __init__(
        self,
        jobs: Sequence[FeatureJob],
        data: Dataset,
        settings: ComputeSettings,
        workers: int,
        stop: Stop,
        make_stages: Callable[[BatchRunner], DeviceStages],
    ) -> None:
        self.workers = workers
        batch_bytes = input_bytes(jobs, settings.batch)
        self.depth = depth_of(workers, batch_bytes)
        # Without numbers of GPUs, there is one runner, on torch's current GPU.
        settings_of_devices = [replace(settings, gpus=(gpu,)) for gpu in settings.gpus]
        runners = [
            BatchRunner(jobs, data.source, data.uid, len(data.names), of_device)
            for of_device in settings_of_devices or [settings]
        ]
        self.runner = runners[0]
        self.slots = Slots(self.depth, batch_bytes)
        self.pool = WorkerProcesses(workers, init_decoder, self.slots.address, stop)
        self.decoded = SimpleQueue[BatchUnderWay | None]()
        self.lines: list[DeviceLine] = []
        try:
            for runner in runners:
                stages = make_stages(runner)
                line = DeviceLine(runner, stages, self.decoded, self.pool, self.slots)
                self.lines.append(line)
        except BaseException:
            self.close()
            raise

    def warm(self) -> dict[str, float]:
        """Seconds per image and backbone on the first device; all of them warm up."""
        rates = self.runner.warm()
        # Reversed, so that the rates of the first device are written last.
        for line in reversed(self.lines):
            rates |= line.device.warm()
        self.notes = self.lines[0].device.notes
        return rates

    def submit(self, batch: int, keys: Sequence[str]) -> Future[Any]:
        """Decode in a worker; the first device that is free takes it from there."""
        slot = self.slots.take()
        decoded = self.pool.submit(decode_into, slot, *self.runner.decoding(batch, keys))
        work = BatchUnderWay(keys, self.runner.rows_of(batch), slot, decoded, Future())
        decoded.add_done_callback(lambda _: self.decoded.put(work))
        return work.answer

    def close(self) -> None:
        """End the decoders and the devices' threads, without waiting for batches that are no longer needed."""
        for line in self.lines:
            line.closed = True
        self.pool.close()
        # Each None ends the threads of one device.
        for _ in self.lines:
            self.decoded.put(None)
        for line in self.lines:
            for thread in line.threads:
                thread.join()
        for line in reversed(self.lines):
            line.device.close()
        self.slots.close()


def input_bytes(jobs: Sequence[FeatureJob], batch: int) -> int:
    """Bytes of the decoded images of a batch; an input that several recipes share is counted once.

    Images of native size, texts and rows count 0.
    """
    row_bytes = {}
    for job in jobs:
        recipe = job.recipe
        if job.backbone.reads == IMAGES:
            row_bytes[input_key(recipe)] = recipe.views * recipe.size**2 * 3
    return batch * sum(row_bytes.values())


# Functions that run inside a decoding process.

_slots: OpenSlots | None = None
"""The shared memory into which this process writes decoded images."""


def init_decoder(path: str, size: int, slot_bytes: int) -> None:
    """Prepare a worker that only decodes."""
    global _slots
    _slots = open_slots(path, size, slot_bytes)


def decode_into(slot: int, *decoding: Any) -> tuple[Inputs, dict[int, str], float]:
    """``decode_batch`` with the images in a slot."""
    inputs, bad, seconds = decode_batch(*decoding)
    assert _slots is not None
    return _slots.put(slot, inputs), bad, seconds
