"""Runs whose clients keep too much for memory: stopped, damaged and on a full disk, they end with the same bits."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pictures import folder

from fedcache.config import Home, PartitionConfig, TrainConfig
from fedcache.errors import Exit, FedcacheError
from fedcache.federate.execution import memory_estimate
from fedcache.process import Stop
from fedcache.progress import Silent
from fedcache.runs import loop
from fedcache.runs.run import Run

CONFIG = TrainConfig(method="ditto", rounds=5, seeds="0", participation="2")


class Listener(Silent):
    """What is told, and a request to stop after a round."""

    def __init__(self, stop_after: int = 0) -> None:
        self.stop_after, self.rounds, self.flag, self.said = stop_after, 0, Stop(), list[str]()

    def advance(self, units: int) -> None:
        self.rounds += units
        if self.rounds == self.stop_after:
            self.flag.ask()

    def warn(self, text: str) -> None:
        self.said.append(text)

    def note(self, text: str) -> None:
        self.said.append(text)


def extracted(place: Path) -> Path:
    from command import ok

    images = folder(place / "shapes", train=12, test=4)
    done = ok("extract", "--dataset", f"folder:{images}", "--backbones", "random-projection", "--workers", 0)
    return Path(done.data["path"])


@pytest.fixture
def home(once: Callable[[Callable[[Path], Path]], Path], monkeypatch: pytest.MonkeyPatch) -> Home:
    once(extracted)
    monkeypatch.setattr(memory_estimate, "STATES", 0)
    monkeypatch.setattr(loop, "CHECKPOINT_EVERY", -1.0)
    monkeypatch.setattr(loop, "CHECKPOINT_SHARE", 1e9)
    return Home(Path(os.environ["FEDCACHE_HOME"]))


def train(home: Home, runs: str, listener: Listener) -> Run:
    return loop.train(CONFIG, home, partition=PartitionConfig("iid", 4), runs=home.root / runs,
                      observer=listener, stop=listener.flag)  # fmt: skip


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
def test_a_run_ends_with_the_same_bits_wherever_its_clients_are(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(memory_estimate, "STATES", 1 << 30)
        plain = train(home, "plain", Listener())
    expected = (plain.path / "result.json").read_bytes()

    stops = Listener(stop_after=3)
    with pytest.raises(FedcacheError) as caught:
        train(home, "stopped", stops)
    assert caught.value.code is Exit.INTERRUPTED
    (table,) = (home.root / "stopped").rglob("states-0.table")
    checkpoint = table.with_name("checkpoint-0.safetensors")
    model = table.stat().st_size // 4
    assert checkpoint.stat().st_size < 2 * model  # the server's model, and none of the clients'
    raw = table.read_bytes()

    goes_on = Listener()
    run = train(home, "stopped", goes_on)
    assert "Seed 0: going on after round 3." in goes_on.said
    assert (run.path / "result.json").read_bytes() == expected
    assert not list((home.root / "stopped").rglob("states-*")), "dropped with the checkpoint"

    with pytest.raises(FedcacheError):
        train(home, "damaged", Listener(stop_after=3))
    (table,) = (home.root / "damaged").rglob("states-0.table")
    assert table.read_bytes() == raw
    table.write_bytes(raw[:-1])
    again = Listener()
    run = train(home, "damaged", again)
    assert [s for s in again.said if "states-0.table is missing or not what was written. Seed 0 begins again." in s]
    assert (run.path / "result.json").read_bytes() == expected

    with no_file_above(len(raw) - 1), pytest.raises(FedcacheError) as caught:
        train(home, "full", Listener())
    assert caught.value.code is Exit.ENVIRONMENT
    (table,) = (home.root / "full").rglob("states-0.table")
    assert caught.value.message == f"{table} cannot be written: File too large."
    assert "run the same command again: what is finished is kept" in caught.value.hint
    room = Listener()
    run = train(home, "full", room)
    assert [s for s in room.said if s.startswith("Seed 0: going on after round ")], room.said
    assert (run.path / "result.json").read_bytes() == expected
