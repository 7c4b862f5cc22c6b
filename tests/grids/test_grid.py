"""Grids as one program: every point is the run alone, a killed grid goes on, and a point that fails ends alone."""

import json
import multiprocessing
from concurrent.futures import wait
from functools import partial
from pathlib import Path

import pytest
import torch
from arrays import ingested
from command import data_of, fedcache, ok
from failing_command import must_fail, must_fail_machine
from homes import made_once
from made_path import extracted
from refusal import stopped
from setting_lines import set_to, swept
from stops import StopsAfter

from fedcache.config import Home, PartitionConfig, TrainConfig
from fedcache.errors import Exit
from fedcache.grids import train_grid
from fedcache.grids.points import combinations, sampled
from fedcache.grids.train_grid import grid, request_grid

IID = "--scheme iid --clients 3"
SGD = "fedavg --set head=linear --set opt=sgd --set batch=8"
SWEEP = "--sweep lr=0.1,0.02 --sweep wd=0,0.01"


def two_domains(place):
    """Two domains of three classes, 24 training images of each, with features of one backbone."""
    words = "random-projection:128 --batch 4 --chunk-rows 8"
    return extracted(place, words, domains=("ink", "chalk"))


store = made_once(two_domains)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "execution"),
    [
        (SGD, "gram"),
        ("fedavg --set head=linear --set batch=8", "batched"),
        ("fedpcl --set opt=sgd --set dim=6 --set batch=8", "gram"),
    ],
)
def test_every_point_of_a_program_is_its_single_run(store, method, execution):
    words = f"{method} {IID} --rounds 3 --participation all --seeds 0,1 --dtype float64"
    done = data_of(f"grid {words} {SWEEP}")
    assert len(done["points"]) == 4
    for point in done["points"]:
        assert point["execution"] == execution
        assert point["points"] == 4
        alone = data_of(f"train {words}", *settings_of(point))
        assert not alone["reused"], (
            "a point that was computed with others is no substitute for the run alone"
        )
        for key in ("accuracy", "macro_f1", "fairness", "traffic", "clients", "parameters"):
            assert alone[key] == point[key], key
    assert data_of(f"grid {words} {SWEEP}")["reused"] == 4


def settings_of(point):
    return [w for k, v in point["sweep"].items() for w in ("--set", f"{k}={v}")]


def test_exact_points_have_the_bits_and_the_digest_of_single_runs(store):
    words = f"{SGD} {IID} --rounds 2"
    done = data_of(f"grid {words} --sweep lr=0.1,0.02 --exact")
    for point in done["points"]:
        alone = data_of(f"train {words}", *settings_of(point))
        assert alone["reused"]
        assert alone["digest"] == point["digest"]
    together = data_of(f"grid {words} --sweep lr=0.1,0.02")
    assert together["reused"] == 2, "what was trained alone is not trained again"


@pytest.mark.slow
@pytest.mark.parametrize("after", [2, 7, 12])
def test_a_stopped_grid_is_resumed_to_the_same_results(store, tmp_path, after):
    config = TrainConfig(
        method="solo",
        store=str(store),
        rounds=4,
        seeds="0,1",
        dtype="float64",
        set=set_to('head=linear opt=sgd batch="8" reset_opt="false"'),
    )
    home = Home.from_environment()
    sweeps = {"lr": ("0.1", "0.02")}
    dealt = PartitionConfig("iid", 3)

    def train(name, observer):
        request = request_grid(
            ["solo"], sweeps, config, home, partition=dealt, runs=tmp_path / name
        )
        return grid(request, observer=observer, stop=observer.flag)

    def files(done):
        names = ("result.json", "rounds.jsonl")
        return [(point.run.path / name).read_bytes() for point in done.points for name in names]

    whole = files(train("whole", StopsAfter()))
    # A kill between two checkpoints leaves points of different rounds, which are then resumed apart.
    for place, lost in (("cut", 0), ("apart", 1), ("alone", 2)):
        stopped(partial(train, place, StopsAfter(after)))
        for path in sorted((tmp_path / place).glob("*/checkpoint-*.safetensors"))[:lost]:
            path.unlink()
        assert files(train(place, StopsAfter())) == whole


@pytest.mark.slow
def test_processes_give_what_one_gives(store, tmp_path):
    words = f"grid fedavg --set batch=8 {IID} --rounds 2 --sweep lr=0.01,0.02 --dtype float64"
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(6)
        one = data_of(f"{words} --runs {tmp_path}/one")["points"]
        two = data_of(f"{words} --runs {tmp_path}/two --jobs 2")["points"]
    finally:
        torch.set_num_threads(before)
    assert [p["accuracy"] for p in one] == [p["accuracy"] for p in two]
    # The first point is trained before the others, alone; the second in one of two processes, with half the threads.
    told = [
        json.loads((Path(p["path"]) / "measured.json").read_text())["content"]["threads"]
        for p in two
    ]
    assert told == [6, 3]
    # A method of one round has one run for all numbers of rounds; several processes make it at the same time.
    done = data_of(f"grid fed3r {IID} --sweep rounds=1,2,3,4,5,6,7 --jobs 2 --seeds 0-4")
    assert len({p["digest"] for p in done["points"]}) == 1


@pytest.mark.slow
def test_processes_that_are_killed_end_a_grid_with_one_sentence(store, monkeypatch):
    def killed(waiting, **how):
        for child in multiprocessing.active_children():
            child.kill()
        return wait(waiting, **how)

    words = f"grid fedavg --set batch=8 {IID} --rounds 2 --sweep lr=0.01,0.02,0.03 --jobs 2"
    with monkeypatch.context() as patch:
        patch.setattr(train_grid, "wait", killed)
        must_fail_machine("was killed", words)
    assert len(data_of(words)["points"]) == 3


@pytest.mark.parametrize("rates", ["0.1,1e38", "1e38,0.1"])
def test_a_point_that_diverges_ends_alone(store, rates):
    words = f"{SGD} {IID} --rounds 4 --set epochs=3"
    done = fedcache(f"grid {words} --sweep lr={rates} --json")
    assert done.code == Exit.FEDERATED
    data = done.data
    assert [p["sweep"]["lr"] for p in data["points"]] == ["0.1"]
    (lost,) = data["failed"]
    assert lost["sweep"] == {"lr": "1e38"}
    assert "learning rate" in lost["hint"]
    (kept,) = data["points"]
    alone = data_of(f"train {words} --set lr=0.1")
    assert kept["accuracy"]["mean"] == pytest.approx(alone["accuracy"]["mean"], abs=1e-3)


def test_points_are_drawn_without_repeats():
    every = combinations(["fedavg", "solo"], swept("lr=0.1,0.2,0.3 wd=0,1"))
    assert sampled("grid", every) == every
    some = sampled("random:5", every)
    assert len({str(p) for p in some}) == 5
    assert sampled("random:5", every) == some
    assert any(sampled(f"random:5:{seed}", every) != some for seed in range(1, 5))


@pytest.mark.parametrize("word", ["randm:3", "random", "random:0", "random:x", "grid:2", ""])
def test_a_wrong_sampler_is_refused(word):
    must_fail("", "grid --method fedavg --sweep lr=0.1 --sampler", word)


@pytest.mark.slow
def test_ridges_and_partitions_of_a_grid_share_the_statistics(store):
    words = "fed3r --clients 3 --dtype float64"
    sweep = "--sweep lam=0.01,0.1,1,10,100 --sweep scheme=iid,shards"
    done = ok(f"grid {words} {sweep} -v")
    assert done.err.count("Clients' statistics are computed once") == 1, "said once"
    for point in done.data["points"]:
        lam = point["sweep"]["lam"]
        scheme = point["sweep"]["scheme"]
        alone = data_of(f"train {words} --set lam={lam} --scheme {scheme}")
        assert not alone["reused"], "sums in another order are no substitute for the run alone"
        for key in ("accuracy", "macro_f1", "traffic", "parameters"):
            assert alone[key] == point[key], key
    assert data_of(f"grid {words} {sweep} --exact")["reused"] == 10


@pytest.mark.parametrize("jobs", ["", "--jobs 2"])
@pytest.mark.parametrize("scheme", ["", "--scheme iid"])
def test_methods_of_a_grid_train_on_the_partition_of_the_first(store, scheme, jobs):
    # The papers of these methods have other schemes and numbers of clients.
    done = data_of(f"grid fedpcl,fed3r,fedavg --rounds 1 {scheme} {jobs}")
    first = data_of(f"train fedpcl --rounds 1 {scheme}")["partition"]
    assert [point["partition"] for point in done["points"]] == [first] * 3


@pytest.mark.parametrize(
    ("words", "shared"),
    [
        # sums of everybody's rows are those of any partition
        ("fed3r --sweep scheme=iid,shards", 1),
        # one point of each method: nobody to share with
        ("fed3r,fedncm,fedavg --rounds 1", 0),
    ],
)
def test_statistics_are_shared_by_the_points_that_can_use_them(tmp_path, words, shared):
    ingested(tmp_path)
    done = ok(f"grid {words} --clients 3 -v")
    assert done.err.count("Clients' statistics are computed once") == shared
