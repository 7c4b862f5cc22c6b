"""The stages of a GPU without one: streams and events are counted, and tensors stay on the CPU.

That each tensor of another stream is waited for is what can be seen here; ``tests/gpu`` compares features on a GPU.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from make_images import random_bytes
from refusal import machine_error
from test_batches import SETTINGS, data, job

from fedcache.extract.batches import BatchRunner
from fedcache.extract.workers.cuda import CudaStages, StagingBuffers


class Trace:
    """Streams and events that write down what is done with them, in order."""

    def __init__(self):
        self.lines = []
        self.current = "default"
        self.made = 0
        self.locked = 0
        """Tensors in page-locked memory."""

    def stream(self, device):
        name = ("incoming", "computing", "outgoing")[self.made]
        self.made += 1
        return SimpleNamespace(
            name=name, synchronize=lambda: self.lines.append(f"synchronize {name}")
        )

    @contextmanager
    def entered(self, stream):
        before = self.current
        self.current = stream.name
        try:
            yield
        finally:
            self.current = before

    def event(self, enable_timing=False):
        held = SimpleNamespace(on="nothing")

        def record():
            held.on = self.current
            self.lines.append(f"record {self.current}")

        held.record = record
        held.wait = lambda: self.lines.append(f"{self.current} waits for {held.on}")
        held.synchronize = lambda: self.lines.append(f"wait for {held.on}")
        held.elapsed_time = lambda end: 250.0
        return held


@pytest.fixture
def trace(monkeypatch):
    made = Trace()
    monkeypatch.setattr(torch.cuda, "Stream", made.stream)
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "stream", made.entered)
    empty = torch.empty

    def pageable(*shape, pin_memory=False, **how):
        made.locked += pin_memory
        return empty(*shape, **how)

    def lent(tensor, stream):
        made.lines.append(f"lent to {stream.name}")

    monkeypatch.setattr(torch, "empty", pageable)
    monkeypatch.setattr(torch.Tensor, "record_stream", lent)
    return made


@pytest.fixture
def stages(trace):
    made = CudaStages(BatchRunner([job(size=8, views=2)], data().source, data().uid, 10, SETTINGS))
    yield made
    made.close()


def test_each_stage_waits_for_the_one_before(stages, trace):
    images = random_bytes(0, 4, 2, 8, 8, 3)
    loaded = stages.load(images)
    given = images.copy()
    images[:] = 0  # the slot is overwritten
    features, seconds = stages.fetch(stages.run("a", loaded))
    encoder = stages.runner.encoders["a"]
    expected = [encoder.image(torch.from_numpy(given[:, view])).numpy() for view in range(2)]
    assert np.array_equal(features, np.stack(expected, axis=1))
    assert seconds == 0.25
    assert trace.locked == 2 + 1, "two staging buffers, and what comes back"
    assert trace.lines == [
        "wait for nothing",  # the staging buffer has not been used
        "record incoming",
        "record incoming",
        "computing waits for incoming",
        "lent to computing",
        "record computing",
        "record computing",
        "outgoing waits for computing",
        "lent to outgoing",
        "record outgoing",
        "wait for outgoing",
    ]


def test_a_model_that_cannot_be_recorded_runs_without_and_a_note_says_so(stages, monkeypatch):
    def refuse():
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", refuse)
    assert stages.warm().keys() == {"a"}
    assert stages.notes == [
        "random-projection:4@8 runs without CUDA graphs: operation not permitted when stream is capturing"
    ]
    assert not stages.captured


class Recorded:
    """A graph that was recorded of a model: replayed, it does nothing, as of a model that decided something once."""

    def replay(self): ...


def test_a_recorded_model_that_gives_other_features_is_not_used(stages, monkeypatch):
    @contextmanager
    def recording(*_, **__):
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    stages.warm()
    assert not stages.captured
    assert "different features" in stages.notes[0]


def test_a_full_gpu_is_one_sentence_with_the_batch_that_may_fit(stages, monkeypatch):
    def full(x):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(stages.runner.encoders["a"], "image", full)
    machine_error(stages.warm, "batch of 4 images", "--batch 2")


def test_a_staging_buffer_is_not_overwritten_before_its_copy_has_ended(trace):
    staging = StagingBuffers()
    used = []
    for _ in range(4):
        buffer, copied = staging.next((2, 3))
        copied.record()
        used.append(buffer.data_ptr())
    assert used[0] == used[2] != used[1] == used[3]
    assert trace.lines.count("wait for default") == 2
    assert staging.next((3, 2))[0].shape == (3, 2)
