"""The way from decoders to a device and back, on a device whose streams sleep: what is given, overlapped and freed."""

import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import pytest
from command import fedcache
from fake_device import SleepingDevice
from pictures import folder
from refusal import machine_error
from test_batches import SETTINGS, data, job
from toy_store import content

from fedcache.errors import Exit, MachineError
from fedcache.extract import compute_features
from fedcache.extract.workers import gpu
from fedcache.extract.workers.batch_workers import InProcess
from fedcache.extract.workers.gpu import GpuFeeder
from fedcache.process import Stop

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="slots are anonymous files of Linux, as CUDA is there alone"
)

PATIENCE = 60.0


class HereInstead:
    """Decoders in this process, so that no process starts: each call is done when it is submitted."""

    def __init__(self, count, initializer, needed, stop):
        initializer(*needed)
        self.closed = False

    def submit(self, call, *args):
        done = Future()
        try:
            done.set_result(call(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def result(self, answer):
        return answer.result()

    def check(self): ...

    def close(self):
        self.closed = True


JOBS = [job(size=8, views=2), job("random-projection:6", "b", size=4), job("pixels", "p", size=4)]


@pytest.fixture
def feeder(monkeypatch):
    made = []

    def make(jobs=JOBS, workers=2, device=SleepingDevice, gpus=()):
        monkeypatch.setattr(gpu, "WorkerProcesses", HereInstead)
        one = GpuFeeder(jobs, data(), replace(SETTINGS, gpus=gpus), workers, Stop(), device)
        made.append(one)
        return one

    yield make
    for one in made:
        if not one.lines[0].closed:
            one.close()


def test_a_device_gives_what_one_process_gives(feeder):
    there = feeder()
    here = InProcess(JOBS, data(), SETTINGS)
    assert there.warm() == {"a": 0.5, "b": 0.5, "p": 0.5}
    assert there.notes == ["the fake device records no graphs"]
    keys = ["a", "b", "p"]
    answers = [(batch, there.submit(batch, keys)) for batch in (0, 1, 2)]
    for batch, answer in answers:
        one = here.finish(batch, keys, here.submit(batch, keys))
        two = there.finish(batch, keys, answer)
        for key in keys:
            assert one.features[key].dtype == two.features[key].dtype
            assert np.array_equal(one.features[key], two.features[key], equal_nan=key != "p")
        assert one.bad == two.bad
        assert one.decoded == two.decoded
        assert one.cut == two.cut
        assert two.forward_seconds.keys() == set(keys)
    here.close()


def test_copies_run_while_the_device_computes(feeder):
    """The features of a batch are only given out once the next batch was copied in: in turn, they would never be."""
    last = 9
    ready = [threading.Event() for _ in range(last + 2)]

    class Watched(SleepingDevice):
        def load(self, images):
            ready[self.loaded].set()
            return super().load(images)

    def wait_for_next(number):
        if number < last:
            assert ready[number + 1].wait(PATIENCE)

    there = feeder([job(size=8)], device=lambda r: Watched(r, (0.001, 0.001, 0.001), wait_for_next))
    answers = [there.submit(number % 3, ["a"]) for number in range(last + 1)]
    for answer in answers:
        assert answer.result(PATIENCE).decoded
    assert there.lines[0].device.most_held <= gpu.HELD


def test_several_devices_share_the_batches(feeder):
    """No device gives its first batch out before the other has one too."""
    meeting = threading.Barrier(2, timeout=PATIENCE)

    def meet(number):
        if number == 0:
            meeting.wait()

    there = feeder(
        [job(size=8)], device=lambda r: SleepingDevice(r, before_fetch=meet), gpus=(0, 2)
    )
    assert [str(line.runner.device) for line in there.lines] == ["cpu:0", "cpu:2"]
    assert there.warm() == {"a": 0.5}
    answers = [there.submit(1, ["a"]) for _ in range(there.depth)]
    assert len({answer.result(PATIENCE).features["a"].tobytes() for answer in answers}) == 1
    devices = [line.device for line in there.lines]
    assert sum(device.fetched for device in devices) == len(answers)


def test_an_error_on_the_device_is_the_answer_of_its_batch_and_ends_no_other(feeder):
    there = feeder([job(size=8)])
    device = there.lines[0].device
    run = device.run

    def failing(key, loaded):
        device.run = run
        raise MachineError("The GPU's memory is too small.", "--batch 2")

    device.run = failing
    first, second = (there.submit(batch, ["a"]) for batch in (0, 1))
    machine_error(lambda: first.result(PATIENCE), "memory is too small")
    assert second.result(PATIENCE).decoded == 4


def test_closing_waits_for_nothing_that_nobody_will_take(feeder):
    def wait_for_the_end(_):
        while not line.closed:
            time.sleep(0.001)

    there = feeder([job(size=8)], 4, lambda r: SleepingDevice(r, before_fetch=wait_for_the_end))
    (line,) = there.lines
    for _ in range(there.depth):
        there.submit(1, ["a"])
    there.close()
    assert line.device.fetched <= 1, "the one that was waited for"
    assert not any(thread.is_alive() for thread in line.threads)


def open_memory():
    """Files of batches that this process holds or maps."""
    found = Path("/proc/self/maps").read_text().count("fedcache-batches")
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the file of the loop itself is gone
            found += "fedcache-batches" in str(link.readlink())
    return found


@pytest.mark.slow
def test_a_store_has_the_same_bytes_whichever_way_its_batches_took(tmp_path, monkeypatch):
    images = folder(tmp_path / "shapes", train=30, test=9)
    (images / "train/zebra/000.png").write_bytes(b"no image")
    words = (
        f"extract --dataset folder:{images} --backbones random-projection,pixels --size 16 --views 2 "
        "--batch 8 --chunk-rows 16 --device cpu"
    )
    alone = fedcache(f"{words} --workers 0 --store {tmp_path}/alone.zarr")
    assert alone.code == Exit.QUARANTINED
    assert "repeats at most 40 images" in alone.err  # a batch of 8 and two chunks of 16

    def devices(*given, stop, **_):
        jobs, rows, settings = given
        made = GpuFeeder(jobs, rows, replace(settings, gpus=(0, 1)), 2, stop, SleepingDevice)
        assert open_memory() > before
        return made

    before = open_memory()
    monkeypatch.setattr(compute_features, "open_workers", devices)
    done = fedcache(f"{words} --store {tmp_path}/piped.zarr")
    assert done.code == Exit.QUARANTINED
    assert "the fake device records no graphs" in done.err
    assert content(tmp_path / "piped.zarr") == content(tmp_path / "alone.zarr")
    assert open_memory() == before


def test_a_device_that_cannot_be_opened_leaves_no_decoder_and_no_memory():
    def lost(_):
        raise MachineError("The device is lost.", "Try again.")

    before = open_memory()
    workers = set(active_children())
    machine_error(lambda: GpuFeeder([job(size=8)], data(), SETTINGS, 2, Stop(), lost), "lost")
    assert open_memory() == before
    assert set(active_children()) == workers


@pytest.mark.slow
def test_a_decoder_that_is_killed_is_one_sentence_and_leaves_no_memory():
    before = open_memory()
    feeder = GpuFeeder([job(size=8)], data(), SETTINGS, 2, Stop(), SleepingDevice)
    assert feeder.submit(0, ["a"]).result(PATIENCE).decoded == 4
    for process in list((feeder.pool.pool._processes or {}).values()):
        process.kill()

    def go_on(decoders):
        while True:
            decoders.submit(1, ["a"]).result(PATIENCE)

    machine_error(lambda: go_on(feeder), "worker ended")
    feeder.close()
    assert open_memory() == before
