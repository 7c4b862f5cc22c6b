"""The seed is the unit that is stored: a run is the set of its seeds, and more seeds train the missing ones."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from command import data_of, ok
from heard import Heard
from private_starts import CONFIG as PRIVATE
from private_starts import home
from refusal import stopped

from fedcache.config import Home, TrainConfig
from fedcache.federate.partition.partition import Partition
from fedcache.process import Stop
from fedcache.runs.directory import read_result, write_result
from fedcache.runs.loop import train
from fedcache.runs.privacy_ledger import read_releases

pytestmark = pytest.mark.usefixtures("rows")
CONFIG = TrainConfig(method="fedavg", rounds=2, seeds="0-2")
IID = "--scheme iid --clients 3 --rounds 2"


class Trained:
    """A hook that notes which seeds are trained, and not only replayed."""

    def __init__(self):
        self.seeds = []

    def __call__(self, told):
        if not told.stored and told.seed not in self.seeds:
            self.seeds.append(told.seed)


def files_of(path):
    """Everything a run promises, and its models."""
    promised = ["result.json", *read_result(path / "result.json")["files"]]
    files = [*(path / name for name in promised), *(path / "models").glob("*")]
    return {file.name: file.read_bytes() for file in files}


def with_seeds(seeds, config=CONFIG, **more):
    return train(replace(config, seeds=seeds), Home(home()), **more)


def listed():
    return data_of("runs list")["entries"]


@pytest.mark.parametrize("commands", [("0-2", "0-4"), ("4", "0,1", "3,2"), ("3,1", "0-4")])
def test_seeds_that_are_added_give_the_same_bytes_as_all_at_once(commands, tmp_path):
    hook = Trained()
    for seeds in commands:
        run = with_seeds(seeds, hooks=[hook])
    assert sorted(hook.seeds) == run.result["seeds"] == [0, 1, 2, 3, 4]
    whole = with_seeds("0-4", runs=tmp_path / "runs")
    assert whole.path.name == run.path.name
    added = files_of(run.path)
    at_once = files_of(whole.path)
    # The path of the partition is the one word of the configuration that says where it is stored.
    at_once["config.toml"] = at_once["config.toml"].replace(bytes(whole.path), bytes(run.path))
    assert added == at_once
    assert set(run.measured["per_seed"]) == set("01234")


def test_fewer_seeds_return_the_run_of_all_seeds_and_say_so():
    first = with_seeds("0-2")
    heard = Heard()
    again = with_seeds("1", observer=heard)
    assert again.reused
    assert again.result == first.result
    assert any("also trained with seeds 0,2" in note for note in heard.notes)


def test_a_grid_with_more_seeds_trains_those_that_are_missing():
    """A sweep is computed together; a configuration that was trained alone before stays one run."""
    sweep = f"grid fedavg {IID} --sweep lr=0.01,0.1 --seeds"
    ok(f"train fedavg --seeds 0 {IID} --set lr=0.1")
    ok(sweep, "0-2")
    assert sorted(len(e["seeds"]) for e in listed()) == [3, 3]
    more = data_of(sweep, "0-4")
    assert [len(e["seeds"]) for e in listed()] == [5, 5]
    assert more["reused"] == 0
    assert data_of(sweep, "0-4")["reused"] == 2


def test_a_preset_of_the_same_hyperparameters_is_the_same_run():
    first = data_of(f"train fedncm {IID}")
    again = data_of(f"train fedncm {IID} --preset tuned")
    assert again["reused"]
    assert again["path"] == first["path"]


def test_a_run_that_is_stopped_between_seeds_resumes_with_the_seeds_that_are_missing():
    stop = Stop()
    before = with_seeds("0").result
    stopped(
        lambda: with_seeds("0-3", hooks=[lambda told: told.seed == 2 and stop.ask()], stop=stop)
    )
    (path,) = home().glob("runs/*/result.json")
    assert read_result(path) == before
    hook = Trained()
    assert with_seeds("0-3", hooks=[hook]).result["seeds"] == [0, 1, 2, 3]
    assert 1 not in hook.seeds


def test_a_kill_before_the_new_result_is_written_loses_no_seed():
    (with_seeds("0-2").path / "result.json").unlink()
    hook = Trained()
    assert with_seeds("1,3", hooks=[hook]).result["seeds"] == [0, 1, 2, 3]
    assert hook.seeds == [3]


def test_two_trainings_that_add_different_seeds_at_once_give_all_of_them():
    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(with_seeds, ("0,1", "2,3")))
    (path,) = home().glob("runs/*/result.json")
    assert read_result(path)["seeds"] == [0, 1, 2, 3]
    assert {len(run.result["seeds"]) for run in runs} == {2, 4}


def test_fresh_trains_the_seeds_of_the_command_and_keeps_the_others():
    before = with_seeds("0-3")
    hook = Trained()
    again = with_seeds("1", fresh=True, hooks=[hook])
    assert hook.seeds == [1]
    assert again.result == before.result
    ok(f"predict {again.path} --store rows --seed 3")


def test_a_private_seed_is_trained_and_counted_once():
    pytest.importorskip("dp_accounting")
    with_seeds("0,1", PRIVATE)
    hook = Trained()
    run = with_seeds("0-2", PRIVATE, hooks=[hook])
    assert hook.seeds == [2]
    releases = read_releases(home() / "privacy.jsonl")
    assert sorted((r.run, r.seed) for r in releases) == [(run.path.name, s) for s in (0, 1, 2)]
    assert run.result["trust"]["privacy"]["seeds"] == 3


def test_seeds_that_draw_their_own_partitions_keep_them():
    words = "fedavg --scheme dirichlet --clients 3 --rounds 1 --repartition"
    ok(f"train {words} --seeds 0,1")
    more = data_of(f"train {words} --seeds 1,2")
    path = Path(more["path"])
    files = [Partition.load(path / f"partition-{seed}.partition").digest for seed in (0, 1, 2)]
    assert more["partition"]["digests"] == files
    assert len(set(files)) == 3


def as_an_earlier_version_stored(path, name):
    """The directory of a run as versions wrote it whose digests held the seeds: no file of a single seed stays."""
    other = shutil.copytree(path, path.with_name(name))
    for file in [*other.glob("seed-*.json"), other / "writing.lock", other / "running.lock"]:
        file.unlink(missing_ok=True)
    result = {**read_result(other / "result.json"), "digest": name + 48 * "0"}
    write_result(other / "result.json", result)
    shutil.rmtree(other / "models")
    return other


def test_results_of_earlier_versions_are_still_read():
    run = with_seeds("0-2")
    old = as_an_earlier_version_stored(run.path, "0123456789abcdef")
    more = with_seeds("0-4").accuracy["mean"]
    assert {e["name"]: e["seeds"] for e in listed()} == {
        old.name: [0, 1, 2],
        run.path.name: [0, 1, 2, 3, 4],
    }
    shown = data_of("runs show", old.name)["figures"]["accuracy"]
    assert shown == pytest.approx(run.accuracy["mean"])
    train(replace(CONFIG, method="fedprox", seeds="0"), Home(home()))
    (made,) = data_of("compare")["comparisons"]
    assert {t["name"]: t["mean"] for t in made["treatments"]}["fedavg"] == pytest.approx(more)
