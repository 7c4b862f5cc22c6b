"""What is said of a run that does not fit into memory, by hand."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from federation import federation
from refusal import machine_error

from fedcache.federate.engine import run as engine
from fedcache.federate.engine.run import TrainingRun, choose, plan
from fedcache.federate.execution import gram
from fedcache.federate.execution.memory_estimate import (
    ExecutionPlan,
    Forecast,
    Load,
    refuse_too_little_room,
    refuse_too_much,
)
from fedcache.federate.methods import METHODS
from fedcache.federate.trust.pipeline import TrustPolicy


def test_a_run_that_does_not_fit_says_how_many_clients_at_once_would():
    # 40 MiB for 8 clients at once are 5 MiB for each; 30 MiB are needed besides, and 100 MiB for the features.
    found = Forecast(100 << 20, 2 << 20, 10 << 20, 15 << 20, 40 << 20, 3 << 20)
    load = Load(1, 8)
    plan = ExecutionPlan("batched", 8)
    assert found.total >> 20 == 170
    assert found.above >> 20 == 70

    def hint(free, loaded, plan=plan):
        return machine_error(
            lambda: refuse_too_much(found, load, plan, free << 20, loaded=loaded),
            "170 MiB ",
            f"{free} MiB",
        ).hint

    refuse_too_much(found, load, plan, 70 << 20, loaded=True)
    refuse_too_much(found, load, plan, 170 << 20, loaded=False)
    # (69 - 30) / 5 = 7.8, and (45 - 30) / 5 = 3 exactly; with the features still to be read (146 - 130) / 5 = 3.2
    for free, loaded, fits in ((69, True, 7), (45, True, 3), (146, False, 3)):
        assert f"At most {fits} clients" in hint(free, loaded)
    assert "At most" not in hint(34, True), "not one client fits"
    assert "At most" not in hint(69, True, ExecutionPlan("sequential", 1)), (
        "one at once is the least there is"
    )


def test_clients_that_keep_more_than_memory_are_told_how_many_of_them_fit():
    # 100 rounds of 10 clients at 1 MiB for each of 2 points are 2,000 MiB; all else is 30 MiB.
    found = Forecast(0, 0, 2000 << 20, 0, 20 << 20, 10 << 20)
    load = Load(1, 10, participants=1000, state_bytes=1 << 20, points=2, rounds=100)

    def hint(free):
        error = machine_error(
            lambda: refuse_too_much(found, load, ExecutionPlan("gram", 4), free << 20, loaded=True),
            "2,030 MiB",
        )
        return error.hint

    assert "--participation 9 --rounds 100" in hint(2029)  # 999 clients
    assert "--participation 1 --rounds 50" in hint(130)
    assert "--participation" not in hint(31), "not one client fits"


def test_clients_that_keep_more_than_the_disk_has_are_refused_with_the_number_that_fits(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=400 << 20))
    place = tmp_path / "runs/run"
    batched = ExecutionPlan("batched", 4)
    load = Load(1, 100, participants=1000, state_bytes=1 << 20, rounds=10)
    machine_error(
        lambda: refuse_too_little_room(load, batched, place),
        "400 MiB",
        "--participation 40 --rounds 10",
    )
    for fits in (replace(load, participants=400), replace(load, participants=256)):
        refuse_too_little_room(fits, batched, place)
    refuse_too_little_room(load, ExecutionPlan("gram", 4), place)  # in memory
    place.mkdir(parents=True)
    with (place / "states-0.table").open("wb") as file:
        file.truncate(600 << 20)  # of an earlier start, which goes on in it
    refuse_too_little_room(load, batched, place)


def test_a_server_that_keeps_too_much_of_every_client_is_refused_before_it_is_made(monkeypatch):
    data, clients = federation()
    method = METHODS["fedpcl"]
    asked = []

    def init(ctx):
        asked.append(ctx.env.clients)
        return method.init(ctx)

    # A prototype of 8 numbers and a count for each class, in float64, five times.
    each = 5 * 8 * data.classes * (8 + 1)
    monkeypatch.setattr(engine, "free_memory", lambda *_: 4 * each)
    spec = TrainingRun(replace(method, init=init), data, clients, dtype=torch.float64)
    hp = method.resolve("paper", {"dim": 8})
    machine_error(lambda: plan(spec, hp), "fedpcl", "At most 4 clients")
    assert asked == [1, 2]
    monkeypatch.setattr(engine, "free_memory", lambda *_: 9 * each)
    plan(spec, hp)


def test_coordinates_that_do_not_fit_into_memory_are_not_chosen(monkeypatch):
    method = METHODS["ditto"]
    hp = method.resolve("paper", {"opt": "sgd"})
    load = Load(1 << 20, 1000, 100, np.full(1000, 4), 1000, 64, state_bytes=1 << 20)
    monkeypatch.setattr(gram, "free_memory_on", lambda *_: 1001 << 20)
    assert choose(method, hp, load).name == "gram"
    monkeypatch.setattr(gram, "free_memory_on", lambda *_: 999 << 20)
    assert choose(method, hp, load).name != "gram"


def test_clients_with_too_many_rows_are_not_planned():
    data, clients = federation()
    spec = TrainingRun(METHODS["fedavg"], data, clients)
    hp = METHODS["fedavg"].resolve()
    every = sorted(plan(spec, hp)[1].rows)
    load = plan(replace(spec, trust=TrustPolicy(max_rows=every[-1] - 1)), hp)[1]
    assert sorted(load.rows) == every[:-1]
    assert load.clients == len(load.rows)
