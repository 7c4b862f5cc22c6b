"""What is chosen on a GPU, and how much at once: by what the device is, not by whether there is one here."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from heard import Heard
from pretend_gpu import pretended_gpu
from refusal import machine_error

from fedcache.federate.engine.client_data import Data, StoredRows
from fedcache.federate.engine.run import choose
from fedcache.federate.execution import gram
from fedcache.federate.execution.memory_estimate import GPU_SET, Load
from fedcache.federate.methods import METHODS
from fedcache.runs import features
from fedcache.testing.method_laws import make_federation

SMALL = Load(
    head_bytes=40_000, clients=100, outputs=10, rows=np.full(100, 50), participants=100, width=1024
)
GPU = replace(SMALL, device="cuda")


def plan(load, name="fedavg", **settings):
    method = METHODS[name]
    settings = {"head": "linear", "opt": "sgd", **settings} if name == "fedavg" else settings
    return choose(method, method.resolve("paper", settings), load)


def test_a_run_alone_is_batched_whole_on_a_gpu():
    assert plan(SMALL).name == "gram"
    assert plan(GPU).name == "batched"
    assert plan(GPU).chunk == 100


def test_points_of_a_grid_are_columns_of_the_same_products_on_a_gpu_too(monkeypatch):
    monkeypatch.setattr(gram, "free_memory_on", lambda device: 8 << 30 if device == "cuda" else 0)
    found = plan(replace(GPU, points=240))
    assert found.name == "gram"
    assert found.points == 240


@pytest.mark.parametrize("heads", [1, 1000])
def test_large_heads_are_batched_on_a_gpu_as_far_as_four_copies_fit(heads):
    large = replace(GPU, head_bytes=GPU_SET // 4 // heads, rows=np.full(100, 4000))
    assert plan(replace(large, device="cpu")).name == ("batched" if heads == 1000 else "sequential")
    assert plan(large).name == "batched"
    assert plan(large).chunk == min(100, heads)


def test_what_takes_no_steps_is_computed_client_by_client_on_a_gpu_too():
    assert plan(GPU, "fed3r").name == "sequential"
    assert plan(replace(GPU, clients=1)).name == "sequential"


class Inputs:
    """What a command has of its data."""

    def __init__(self, data):
        self.data = data

    def with_data(self, data):
        return Inputs(data)


@pytest.mark.parametrize("stored", [False, True])
def test_features_that_a_gpu_has_no_room_for_are_refused_with_both_numbers(monkeypatch, stored):
    x = torch.zeros(3 << 18, 1, 4)  # 12 MiB, or 6 in float16
    data = Data(StoredRows(x.half()) if stored else x, torch.zeros(3 << 18, dtype=torch.int64), 2)
    monkeypatch.setattr(
        features, "free_memory_on", lambda device: 5 << 20 if device == "cuda" else 1 << 60
    )

    inputs = Inputs(data)
    machine_error(
        lambda: features.on_device(inputs, "cuda"), f"{6 if stored else 12} MiB", "--device cpu"
    )
    assert features.on_device(inputs, "cpu") is inputs


def test_features_that_fit_are_moved_to_the_gpu(monkeypatch):
    monkeypatch.setattr(
        features, "free_memory_on", lambda device: 1 << 30 if device == "cuda" else 0
    )
    data, _ = make_federation()

    with pretended_gpu():
        moved = features.on_device(Inputs(data), "cuda").data
        assert [t.device.type for t in (moved.x, moved.y, moved.text, moved.domain)] == ["cuda"] * 4
        assert torch.equal(moved.x.cpu(), data.x)


@pytest.mark.parametrize("there", [False, True])
def test_training_is_on_the_cpu_unless_a_gpu_is_asked_for_or_encoders_are_live(monkeypatch, there):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    said = Heard()
    assert features.training_device("auto", said) == "cpu"
    assert [("--device cuda" in text) for text in said.notes] == [True] * there
    assert features.training_device("cpu", said) == "cpu"
    assert features.training_device("auto", said, live=True) == ("cuda" if there else "cpu")
    if there:
        assert features.training_device("cuda", said) == "cuda"
    else:
        machine_error(lambda: features.training_device("cuda", said), "--device cuda")
    assert len(said.notes) == there, "nothing is said of what was asked for"
