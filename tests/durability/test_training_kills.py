"""kill -9 of training, ingest, partition and gc: what is left is whole, and the end is the same."""

import json
from pathlib import Path
from shlex import split

import numpy as np
import pytest
from arrays import normals
from forked import Kills, apart
from homes import made_once
from made_path import place_of
from toy_store import content

from fedcache.federate.partition.partition import Partition
from fedcache.store.verify import verify

TRAIN = split("train --method fedpcl --scheme iid --clients 5 --rounds 50 --set dim=64 --json")
GRID = split(
    "grid --method fedavg --scheme iid --clients 5 --rounds 10 --set opt=sgd "
    "--sweep lr=0.1,0.05,0.02 --sweep batch=8,16 --json"
)


def small_store(_folder):
    """A store of 600 digits in the home."""
    return place_of("extract --dataset digits --backbones random-projection --limit 600")


store = made_once(small_store)


def results_in(runs):
    return {f.parent.name: f.read_bytes() for f in runs.rglob("result.json")}


@pytest.mark.parametrize("command", [TRAIN, GRID], ids=["train", "grid"])
def test_killed_training_resumes_to_the_same_result(tmp_path, home, store, cases, command):
    where = ("--store", store, "--backbones", "random-projection", "--runs")
    kills = Kills((*command, *where, tmp_path / "whole"), home, seed=2, latest=0.95)
    expected = results_in(tmp_path / "whole")
    wanted = cases(2, 25)
    number = 0
    while kills.number < wanted:
        runs = tmp_path / f"parts-{number}"
        number += 1
        words = (*command, *where, runs)
        for _ in kills.of(words, times=2):
            pass
        again = apart(*words, home=home)
        assert again.code == 0, again.err
        assert results_in(runs) == expected


def named_by_gc(home):
    """What ``gc`` lists."""
    listed = json.loads(apart("gc --json", home=home).out)["data"]["garbage"]
    return {Path(one["path"]) for one in listed}


@pytest.mark.parametrize("what", ["ingest", "partition", "gc"])
def test_killed_commands_lose_nothing_and_gc_names_what_they_leave(
    tmp_path, home, store, cases, what
):
    features = normals(0, 20_000, 64)
    np.savez(tmp_path / "e.npz", features=features, label=np.arange(20_000) % 10)

    def line(number):
        return {
            "ingest": f"ingest {tmp_path}/e.npz --json --name mine{number}",
            "partition": f"partition --scheme dirichlet --clients 40 --json --store {store} --name p{number}",
            "gc": "gc --delete --json",
        }[what]

    def made(number):
        """What the command is for."""
        if what == "ingest":
            (found,) = store.parent.glob(f"mine{number}-*.zarr")
            return {k: v for k, v in content(found).items() if k.startswith("features/")}
        if what == "partition":
            partition = Partition.load(store / "partitions" / f"p{number}.partition")
            return partition.to_payload()["clients"]
        return content(store)

    def plant():
        for i in range(200 if what == "gc" else 0):
            (store / "features" / f".{i}.{2**22 + 1}-0.partial").write_bytes(b"x" * 1000)

    def left():
        """Files that a killed process was still writing, or was about to remove."""
        kinds = (".*.partial", "journal-*.jsonl", "locks/*.json")
        return {path for kind in kinds for path in home.rglob(kind)}

    plant()
    kills = Kills([line(0)], home, seed=4, latest=0.98)
    expected = made(0)
    wanted = cases(2, 20)
    number = 0
    while kills.number < wanted:
        number += 1
        plant()
        for _ in kills.of([line(number)], times=3):
            if kills.number % 5 == 0:
                assert {path for path in left() if "journal" not in path.name} <= named_by_gc(home)
        again = apart(line(number), home=home)
        assert again.code == 0, again.err
        assert made(number) == expected
    assert left() == named_by_gc(home)
    assert apart("gc --delete --json", home=home).code == 0
    assert left() == set()
    assert verify(store).ok
