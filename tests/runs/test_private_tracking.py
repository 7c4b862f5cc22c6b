"""Trackers of private runs: no library learns when a round ended, unless who took part is told anyway."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from private_starts import CONFIG, ingested

from fedcache.config import Home
from fedcache.process import Stop
from fedcache.runs.loop import train
from fedcache.runs.trackers import choose
from fedcache.runs.trackers.seeds import SeedTracker


@pytest.fixture(autouse=True)
def store(once):
    pytest.importorskip("dp_accounting")
    return once(ingested)


class Record:
    """What a tracking library is given, in the order in which it is given it, between the rounds as they end."""

    def __init__(self):
        self.order = []

    def begin(self, _first):
        return self

    def write(self, _round):
        self.order.append("tracked")

    def end(self, figures):
        pass


def tracked(name, config, monkeypatch, stop_after=99):
    """Which of ``trained`` and ``tracked`` happened, in order, with a library whose runs are a ``Record``."""
    record, stop = Record(), Stop()
    kind = type(choose.tracker(f"{name}:there", Path()))
    assert issubclass(kind, SeedTracker)
    monkeypatch.setattr(kind, "begin", lambda _self, first: record.begin(first))

    def trained(_round):
        record.order.append("trained")
        if len(record.order) == stop_after:
            stop.ask()

    home = Home.from_environment()
    with choose.tracking(f"{name}:there", home, None, None) as hooks:
        try:
            train(config, home, hooks=[trained, *hooks], stop=stop, fresh=True)
        except BaseException:
            assert stop.requested
    return record.order


@pytest.mark.slow
@pytest.mark.parametrize("name", choose.TRACKERS)
def test_a_tracker_is_told_of_a_private_run_when_all_its_rounds_have_ended(name, monkeypatch):
    pytest.importorskip(name)
    order = tracked(name, CONFIG, monkeypatch)
    assert order == 8 * ["trained"] + 8 * ["tracked"]


def test_a_private_run_that_is_stopped_is_tracked_when_it_stops(monkeypatch):
    pytest.importorskip("tensorboard")
    assert tracked("tensorboard", CONFIG, monkeypatch, stop_after=3) == 3 * ["trained"] + 3 * [
        "tracked"
    ]


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"dp_allow": "evaluation,participants"}, id="participants are allowed"),
        pytest.param({"dp_seed": 0, "dp_allow": None}, id="a simulation"),
        pytest.param({"dp_clip": None, "dp_noise": None, "dp_allow": None}, id="no noise"),
    ],
)
def test_other_runs_are_tracked_round_by_round(config, monkeypatch):
    pytest.importorskip("tensorboard")
    assert tracked("tensorboard", replace(CONFIG, **config), monkeypatch) == 8 * [
        "trained",
        "tracked",
    ]


def test_all_events_of_a_private_run_in_tensorboard_have_one_time(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    home = Home(Path(os.environ["FEDCACHE_HOME"]))
    with choose.tracking(f"tensorboard:{tmp_path / 'boards'}", home, None, None) as hooks:
        run = train(CONFIG, home, hooks=hooks)
    for seed in (0, 1):
        read = EventAccumulator(str(tmp_path / "boards" / run.path.name / f"seed-{seed}"))
        read.Reload()
        assert (
            len({e.wall_time for name in ("accuracy", "bytes/up") for e in read.Scalars(name)}) == 1
        )
