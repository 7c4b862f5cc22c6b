"""Runs whose clients keep too much for memory: stopped, damaged and on a full disk, they end with the same bits."""

import os
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
from refusal import machine_error, stopped
from stops import StopsAfter

from fedcache.config import Home, PartitionConfig, TrainConfig
from fedcache.federate.execution import memory_estimate
from fedcache.runs import loop

CONFIG = TrainConfig(method="ditto", rounds=5, seeds="0", participation="2")


@pytest.fixture
def home(shapes, monkeypatch):
    monkeypatch.setattr(memory_estimate, "STATES", 0)
    monkeypatch.setattr(loop, "CHECKPOINT_EVERY", -1.0)
    monkeypatch.setattr(loop, "CHECKPOINT_SHARE", 1e9)
    return Home(Path(os.environ["FEDCACHE_HOME"]))


def train(home, runs, listener):
    return loop.train(
        CONFIG,
        home,
        partition=PartitionConfig("iid", 4),
        runs=home.root / runs,
        observer=listener,
        stop=listener.flag,
    )


@contextmanager
def no_file_above(size):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def result_of(run):
    return (run.path / "result.json").read_bytes()


@pytest.mark.slow
def test_a_run_ends_with_the_same_bits_wherever_its_clients_are(home, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(memory_estimate, "STATES", 1 << 30)
        expected = result_of(train(home, "plain", StopsAfter()))

    stops = StopsAfter(3)
    stopped(lambda: train(home, "stopped", stops))
    (table,) = (home.root / "stopped").rglob("states-0.table")
    checkpoint = table.with_name("checkpoint-0.safetensors")
    model = table.stat().st_size // 4
    assert checkpoint.stat().st_size < 2 * model  # the server's model, and none of the clients'
    raw = table.read_bytes()

    goes_on = StopsAfter()
    assert result_of(train(home, "stopped", goes_on)) == expected
    assert "Seed 0: resuming after round 3." in goes_on.notes
    assert not list((home.root / "stopped").rglob("states-*")), "dropped with the checkpoint"

    stopped(lambda: train(home, "damaged", StopsAfter(3)))
    (table,) = (home.root / "damaged").rglob("states-0.table")
    assert table.read_bytes() == raw
    table.write_bytes(raw[:-1])
    again = StopsAfter()
    assert result_of(train(home, "damaged", again)) == expected
    assert "states-0.table is missing or was changed" in "".join(again.warnings)

    with no_file_above(len(raw) - 1):
        error = machine_error(lambda: train(home, "full", StopsAfter()))
    (table,) = (home.root / "full").rglob("states-0.table")
    assert str(table) in error.message
    room = StopsAfter()
    assert result_of(train(home, "full", room)) == expected
    assert "Seed 0: resuming after round " in "".join(room.notes)
