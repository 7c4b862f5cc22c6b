"""What observers, hooks and trackers are told of the rounds of a run, and what happens where one of them fails."""

import time
import types
from unittest import mock

import pytest
from arrays import ingested

import fedcache as fc
from fedcache.config import Home
from fedcache.progress import Silent
from fedcache.runs import loop
from fedcache.runs.trackers import choose


@pytest.fixture
def mine(tmp_path):
    return ingested(tmp_path)


@pytest.fixture
def dealt(mine):
    return fc.partition(mine, "iid", clients=3)


def test_on_round_is_told_what_the_result_says(mine, dealt):
    told = []

    def train():
        told.clear()
        return fc.train(
            "fedavg", mine, dealt, rounds=3, seeds=range(2), eval_every=1, on_round=told.append
        )

    run = train()
    assert [(r.seed, r.round, r.stored) for r in told] == [
        (s, n, False) for s in (0, 1) for n in (1, 2, 3)
    ]
    assert [told[2].accuracy, told[5].accuracy] == run.accuracy["per_seed"]
    assert told[2].sent_bytes + told[5].sent_bytes == run.traffic["exact"]["up_bytes"]
    assert told[0].settings["lr"] == run.result["hyperparameters"]["lr"]
    before = [(r.accuracy, True) for r in told]
    assert train().reused
    assert [(r.accuracy, r.stored) for r in told] == before


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_hook_and_observer_of_a_grid_are_told_which_point(mine, dealt, jobs):
    told = []
    observer, heard = Silent(), []
    observer.told = heard.append
    options = {"rounds": 2, "execution": "sequential"}
    how = {"on_round": told.append, "observer": observer, "options": options, "jobs": jobs}
    grid = fc.grid("fedavg", mine, dealt, lr=[0.1, 0.02], **how)
    for rounds in (told, heard):
        found = sorted((str(r.path), r.point, r.round) for r in rounds)
        names = [(str(point.run.path), f"lr={point.sweep['lr']}") for point in grid.points]
        assert found == sorted((*name, number) for name in names for number in (1, 2))
        assert {r.points for r in rounds} == {2}


def test_a_hook_that_raises_is_named_and_the_run_continues(mine, dealt):
    def breaks(round_):
        if round_.round == 2:
            raise ValueError("no such dashboard")

    def train(hook):
        return fc.train("fedavg", mine, dealt, rounds=4, on_round=hook)

    with pytest.warns(RuntimeWarning, match="breaks failed in round 2 of seed 0") as caught:
        train(breaks)
    assert "no such dashboard" in str(caught.list[0].message)
    told = []
    assert train(told.append).reused
    assert len(told) == 4


def test_a_tracker_is_closed_however_the_run_ends(tmp_path, monkeypatch):
    made = mock.Mock()
    monkeypatch.setattr(choose, "tracker", lambda *_: made)
    home = Home(tmp_path)
    with choose.tracking("tensorboard", home, None, None) as hooks:
        assert [hook.tracker for hook in hooks] == [made]
        assert not made.close.called
    with pytest.raises(KeyError), choose.tracking("tensorboard:x", home, tmp_path / "r", None):
        raise KeyError
    assert made.close.call_count == 2


def test_the_time_of_those_who_listen_is_no_training(mine, dealt, monkeypatch):
    clock = [0.0]
    clocks = {"monotonic": time.monotonic, "time": time.time, "perf_counter": lambda: clock[0]}
    monkeypatch.setattr(loop, "time", types.SimpleNamespace(**clocks))

    def slow(_round):
        clock[0] += 100.0

    run = fc.train("fedavg", mine, dealt, rounds=3, on_round=slow)
    assert clock[0] == 300.0
    assert run.measured["seconds"]["train"] == 0.0
