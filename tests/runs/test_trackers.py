"""What hooks, observers and trackers hear of a run; each tracker by the real library writing on this machine."""

import json
import struct
import time
import types
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from arrays import ingested
from command import apart, data_of, ok
from failing_command import must_fail_machine
from stops import StopsAfter

import fedcache as fc
from fedcache.config import Home, PartitionConfig, TrainConfig
from fedcache.progress import Silent
from fedcache.runs import loop, trackers
from fedcache.runs.directory import read_result, rounds_of
from fedcache.runs.trackers import EventFile


@pytest.fixture(autouse=True)
def mine(tmp_path):
    return ingested(tmp_path)


TRAIN = "train --method fedavg --scheme iid --clients 3 --participation all"


@dataclass
class Tracked:
    """What a library has of one seed."""

    parameters: dict[str, Any]
    group: str = ""
    ended: bool = True
    # name -> (round, value)
    figures: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    final: dict[str, float] = field(default_factory=dict)


def read_mlflow(place):
    from mlflow.tracking import MlflowClient

    from fedcache.runs.trackers import quiet

    with quiet():
        client = MlflowClient(f"sqlite:///{place / 'mlflow.db'}")
        runs = client.search_runs([client.get_experiment_by_name("fedcache").experiment_id])
        groups = {run.info.run_id: run.info.run_name for run in runs}
        found = {}
        for run in runs:
            parent = run.data.tags.get("mlflow.parentRunId", "")
            if not run.data.metrics:
                continue  # of a group
            one = Tracked(run.data.params, groups.get(parent, ""), run.info.status == "FINISHED")
            for name in run.data.metrics:
                points = [
                    (m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)
                ]
                if name.startswith("final/"):
                    ((_, one.final[name]),) = points
                else:
                    one.figures[name] = sorted(points)
            assert run.data.tags["fedcache.key"] not in found
            found[run.data.tags["fedcache.key"]] = one
    return found


def records(path):
    """The records of a file of W&B: blocks of 32 KiB of pieces with a checksum, a length and a kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    raw = path.read_bytes()
    at = 7
    whole = b""
    assert raw.startswith(b":W&B")
    while at + 7 <= len(raw):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = struct.unpack("<HB", raw[at + 4 : at + 7])
        whole += raw[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def read_wandb(place):
    import wandb

    wandb.teardown()  # as a process does at its end: what is in flight is written
    found = {}
    for path in (place / "wandb").glob("offline-run-*/*.wandb"):
        one = Tracked({}, ended=False)
        for record in records(path):
            if record.HasField("run"):
                one.parameters = {u.key: json.loads(u.value_json) for u in record.run.config.update}
                one.group, key = record.run.run_group, record.run.run_id
            if record.HasField("history"):
                for item in record.history.item:
                    name = item.key or "/".join(item.nested_key)
                    if not name.startswith("_"):
                        one.figures.setdefault(name, []).append(
                            (record.history.step.num, json.loads(item.value_json))
                        )
            if record.HasField("summary"):
                values = {
                    u.key or "/".join(u.nested_key): json.loads(u.value_json)
                    for u in record.summary.update
                }
                one.final |= {n: value for n, value in values.items() if n.startswith("final/")}
            if record.HasField("exit"):
                one.ended = record.exit.exit_code == 0
        assert key not in found
        found[key] = one
    return found


def read_trackio(place):
    import sqlite3

    found = {}
    database = sqlite3.connect(place / "fedcache.db")
    names = {name for (name,) in database.execute("select distinct run_name from metrics")}
    for name in names:
        rows = database.execute(
            "select step, metrics from metrics where run_name = ? order by id", (name,)
        ).fetchall()
        ((config,),) = database.execute(
            "select config from configs where run_name = ?", (name,)
        ).fetchall()
        given = json.loads(config)
        one = found[name] = Tracked(
            {k: v for k, v in given.items() if not k.startswith("_")}, given["_Group"] or ""
        )
        for step, metrics in rows:
            for key, value in json.loads(metrics).items():
                if key.startswith("final/"):
                    assert key not in one.final
                    one.final[key] = value
                else:
                    one.figures.setdefault(key, []).append((step, value))
    database.close()
    return found


def read_tensorboard(place):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for folder in place.glob("*/seed-*"):
        read = EventAccumulator(str(folder))
        read.Reload()
        text = read.Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()
        rows = [line.strip("| ").split(" | ") for line in text.splitlines()[2:]]
        one = found[f"{folder.parent.name}-{folder.name}"] = Tracked(
            {row[0]: row[-1] for row in rows}
        )
        for name in read.Tags()["scalars"]:
            points = [(e.step, e.value) for e in read.Scalars(name)]
            if name.startswith("final/"):
                ((_, one.final[name]),) = points
            elif not name.startswith("hparam/"):
                one.figures[name] = points
        one.ended = bool(one.final)
    return found


READ = {
    "mlflow": read_mlflow,
    "wandb": read_wandb,
    "trackio": read_trackio,
    "tensorboard": read_tensorboard,
}


def told(name, line, place, home):
    """The command line with a tracker; trackio reads its folder once in a process."""
    line = f"{line} --track {name}:{place}"
    if name != "trackio":
        return ok(line)
    done = apart(line, "--json", home=home)
    assert done.code == 0
    return done


def is_that_of(one, path, seed):
    """A tracked run holds what ``rounds.jsonl`` and ``result.json`` of a run say of a seed."""
    result = read_result(path / "result.json")
    mine = [line for line in rounds_of(path) if line["seed"] == seed]
    measured = {r["round"]: r["accuracy"] for r in mine if r["accuracy"] is not None}
    assert dict(one.figures["accuracy"]) == pytest.approx(measured)
    assert len(one.figures["accuracy"]) == len(measured)
    up = accumulate(r["traffic"]["up_bytes"] for r in mine)
    assert one.figures["bytes/up"] == [(n, pytest.approx(sent)) for n, sent in enumerate(up, 1)]
    for name, value in mine[-1]["diagnostics"].items():
        if value is not None:
            assert one.figures[f"diagnostics/{name}"][-1][1] == pytest.approx(value)
    place = result["seeds"].index(seed)
    assert one.ended
    for name in ("accuracy", "macro_f1"):
        assert one.final[f"final/{name}"] == pytest.approx(result[name]["per_seed"][place])
    given = {key: str(value) for key, value in one.parameters.items()}
    wanted = {"seed": seed, "run": path.name, "partition.scheme": "iid", "eval_every": 2}
    wanted |= {key: result[key] for key in ("method", "digest", "code", "rounds")}
    shown = {k: "auto" if v is None else v for k, v in result["hyperparameters"].items()}
    for key, value in (wanted | shown).items():
        assert given[key] == str(value), key


SLOW = pytest.mark.slow
ALL = [
    "tensorboard",
    pytest.param("mlflow", marks=SLOW),
    pytest.param("wandb", marks=SLOW),
    pytest.param("trackio", marks=[SLOW, pytest.mark.full]),
]


@pytest.mark.parametrize("name", ALL)
def test_every_round_parameter_and_final_figure_is_there_once_also_when_it_is_told_again(
    tmp_path, own_home, name
):
    pytest.importorskip(name)
    words = f"{TRAIN} --rounds 4 --seeds 0-1 --eval-every 2"
    place = tmp_path / "tracked"
    first = told(name, words, place, own_home).data
    path = Path(first["path"])
    for reused in (False, True):
        if reused:
            assert told(name, words, place, own_home).data["reused"]
        found = READ[name](place)
        assert sorted(found) == [f"{path.name}-seed-{seed}" for seed in (0, 1)]
        for seed in (0, 1):
            one = found[f"{path.name}-seed-{seed}"]
            is_that_of(one, path, seed)
            assert one.group == ("" if name == "tensorboard" else f"fedavg-{path.name}")
    assert data_of(words)["digest"] == first["digest"], "a tracker is no part of what a run is"


RESUMED = ["tensorboard", *(pytest.param(name, marks=SLOW) for name in ("mlflow", "wandb"))]


@pytest.mark.parametrize("name", RESUMED)
def test_points_of_a_grid_are_a_group_also_beyond_the_seeds_that_are_written_at_a_time(
    tmp_path, own_home, name, monkeypatch
):
    pytest.importorskip(name)
    monkeypatch.setattr(trackers, "OPEN", 1)
    grid = f"{TRAIN} --rounds 2 --sweep lr=0.1,0.05".replace("train", "grid")
    done = told(name, grid, tmp_path / "g", own_home).data
    found = READ[name](tmp_path / "g")
    assert sorted(found) == sorted(f"{Path(p['path']).name}-seed-0" for p in done["points"])
    assert {str(one.parameters["point"]) for one in found.values()} == {"lr=0.1", "lr=0.05"}
    for one in found.values():
        assert [number for number, _ in one.figures["bytes/up"]] == [1, 2]
    (group,) = {one.group for one in found.values()}
    assert group == "" if name == "tensorboard" else group.startswith("grid-")


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_that_is_resumed_or_begins_anew_is_tracked_once(tmp_path, name):
    pytest.importorskip(name)
    config = TrainConfig(method="fedavg", rounds=4, participation="all", eval_every=2)
    home = Home.from_environment()

    def track(**more):
        with trackers.tracking(f"{name}:{tmp_path / 'r'}", home, None, None) as hooks:
            stops = (
                pytest.raises(fc.FedcacheError, match="Stopped")
                if "stop" in more
                else nullcontext()
            )
            with stops:
                loop.train(config, home, partition=PartitionConfig("iid", 3), hooks=hooks, **more)
        (one,) = READ[name](tmp_path / "r").values()
        return one

    observer = StopsAfter(3)
    stopped = track(observer=observer, stop=observer.flag)
    assert not stopped.ended
    assert [number for number, _ in stopped.figures["bytes/up"]] == [1, 2, 3]
    for more in ({}, {"fresh": True}):
        whole = track(**more)
        (path,) = home.runs.glob("*/result.json")
        is_that_of(whole, path.parent, 0)


@pytest.mark.parametrize("name", trackers.TRACKERS)
def test_what_is_not_installed_is_refused_before_any_work(own_home, monkeypatch, name):
    package = {"mlflow": "sqlalchemy"}.get(name, name)
    monkeypatch.setattr(
        trackers, "find_spec", lambda asked: None if asked == package else find_spec(asked)
    )
    must_fail_machine(f"pip install 'fedcache[{name}]'", f"{TRAIN} --track {name}")
    assert not (own_home / "runs").exists()


def test_several_trackers_are_asked_for_at_once_and_none_twice(tmp_path):
    place = tmp_path / "place"
    both = [f"wandb:{place}", f"tensorboard:{place}"]
    with trackers.tracking(both, Home(tmp_path), None, None) as hooks:
        assert [type(hook.tracker).__name__ for hook in hooks] == ["WandB", "TensorBoard"]
    twice = trackers.tracking([f"wandb:{place}", "wandb"], Home(tmp_path), None, None)
    with pytest.raises(fc.FedcacheError, match="twice"), twice:
        pass


def test_the_environment_of_a_library_says_where_and_what_the_option_says_goes_before_it(
    tmp_path, monkeypatch
):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    runs = tmp_path / "runs"

    def uri(spec):
        return trackers.tracker(spec, runs).uri

    assert uri("mlflow") == f"sqlite:///{runs / 'mlflow' / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker:5000")
    assert uri("mlflow") == "http://tracker:5000"
    assert uri(f"mlflow:{tmp_path / 'x'}") == f"sqlite:///{tmp_path / 'x' / 'mlflow.db'}"
    assert uri("mlflow:https://other/mlflow") == "https://other/mlflow"


@pytest.mark.parametrize("where", ["write", "end"])
def test_a_library_that_fails_is_one_warning_and_the_run_continues(tmp_path, monkeypatch, where):
    def fails(*_):
        raise RuntimeError("the tracker is down")

    pytest.importorskip("tensorboard")
    monkeypatch.setattr(EventFile, where, fails)
    done = ok(f"{TRAIN} --rounds 2 --track tensorboard:{tmp_path}/tracked")
    assert not done.data["reused"]
    (warning,) = done.warnings
    assert "the tracker is down" in warning


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
    observer = Silent()
    heard = []
    observer.round_done = heard.append
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
    monkeypatch.setattr(trackers, "tracker", lambda *_: made)
    home = Home(tmp_path)
    with trackers.tracking("tensorboard", home, None, None) as hooks:
        assert [hook.tracker for hook in hooks] == [made]
        assert not made.close.called
    with pytest.raises(KeyError), trackers.tracking("tensorboard:x", home, tmp_path / "r", None):
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
