"""``grid --sampler optuna``: what is searched, that trials are runs like any, and that a killed search goes on."""

import json
import math
import os
import signal
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from arrays import embeddings, ingested
from command import data_of, ok, start
from draws import one_of_each
from failing_command import must_fail, must_fail_corrupt, must_fail_machine
from files_now import files_now
from homes import made_once
from made_path import place_of
from refusal import refused
from setting_lines import set_to, swept
from text_tables import rows_of

import fedcache as fc
from fedcache.grids import points as spaces
from fedcache.grids.points import Range, search_of
from fedcache.grids.record import FOLDER
from fedcache.grids.sampling import Sampling
from fedcache.store.files import first_of, read_sealed_lines, write_sealed_lines
from fedcache.store.lock import this_process
from fedcache.ui.server import GridIndex, RunIndex

RUN = "fedavg --scheme iid --clients 3 --participation all --rounds 4 --validation 0.25"
SEARCH = f"grid {RUN} --sampler optuna --sweep lr=log:1e-3..1 --sweep batch=4,8,16"


store = made_once(ingested, autouse=True)


def searched(sweeps):
    return search_of(Sampling("optuna"), ["fedavg"], swept(sweeps))


def points(done):
    """Swept values of the finished trials in their order, and what they gave on validation rows."""
    return [(p["sweep"], p["validation"]["mean"]) for p in done["points"]]


def test_lists_are_categories_and_ranges_are_numbers():
    space = searched("lr=log:1e-4..1 momentum=0..0.9 batch=8..64 head=mlp,linear rounds=2..5").space
    assert space == {
        "lr": Range(1e-4, 1.0, log=True, whole=False),
        "momentum": Range(0.0, 0.9, log=False, whole=False),
        "batch": Range(8, 64, log=False, whole=True),
        "head": ("mlp", "linear"),
        "rounds": Range(2, 5, log=False, whole=True),
    }


def test_a_drawn_number_can_be_typed_and_lies_in_its_range():
    fine = Range(0.00123456, 0.9999999, log=True, whole=False)
    assert fine.word(0.0371234567) == "0.03712"
    assert all(fine.low <= float(fine.word(v)) <= fine.high for v in (fine.low, 0.5, fine.high))
    assert fine.word(fine.high) == "0.9999999", "which four digits would round up to 1"


def test_the_size_of_a_space_and_its_points():
    finite = searched("batch=8..10 head=mlp,linear")
    assert finite.size == 6
    assert [dict(values) for _, values in finite.every_point()][:2] == [
        {"batch": "8", "head": "mlp"},
        {"batch": "8", "head": "linear"},
    ]
    assert searched("lr=0.1..1").size == math.inf
    assert [sweep for _, sweep in finite.corners()] == [
        {"batch": b, "head": h} for b in ("8", "10") for h in ("mlp", "linear")
    ]


UNSEARCHABLE = rows_of(
    """
    optuna:tqe |          | lr=0.1,1       | optuna
    optuna     | trials=0 | lr=0.1,1       | at least 1
    grid       | trials=3 | lr=0.1,1       | --trials
    grid       |          | lr=log:1e-4..1 | range
    optuna     |          |                | nothing to search
    optuna     |          | lr=0.1,1..2    | mixes
    optuna     |          | lr=log:0..1    | above 0
    optuna     |          | batch=0.5..8   | whole numbers
    optuna     |          | head=0..1      | words
    optuna     |          | lrr=0.1..8     | lrr
    """
)


@pytest.mark.parametrize(("sampler", "trials", "sweeps", "words"), UNSEARCHABLE)
def test_what_cannot_be_searched_is_refused(sampler, trials, sweeps, words):
    sampling = Sampling(sampler, **set_to(trials))
    refused(lambda: search_of(sampling, ["fedavg"], swept(sweeps)), words)


def test_a_search_without_optuna_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(
        spaces, "find_spec", lambda name: None if name == "optuna" else find_spec(name)
    )
    must_fail_machine("pip install 'fedcache[optuna]'", SEARCH)


def test_a_search_needs_rows_to_choose_by_rounds_to_prune_by_and_one_process(own_home):
    for words, hint in (
        (SEARCH.replace("--validation 0.25", ""), "--validation"),
        (f"{SEARCH} --pruner median", "--eval-every"),
        (f"{SEARCH} --jobs 2", "--jobs"),
    ):
        assert hint in must_fail("", words)["hint"]
    assert not list((own_home / "runs").glob("*/result.json"))


@pytest.mark.slow
def test_every_trial_is_the_run_that_training_its_point_alone_gives(tmp_path):
    done = data_of(f"{SEARCH} --trials 4")
    counts = {"trials": 4, "finished": 4, "pruned": 0, "failed": 0}
    assert done["search"].items() >= {**counts, "sampler": "tpe", "pruner": "none"}.items()
    (tmp_path / "alone").mkdir()
    for point in done["points"]:
        train = trained_alone(point)
        path = place_of(train)
        assert str(path) == point["path"]
        apart = place_of(f"{train} --runs {tmp_path}/alone")
        assert (apart / "result.json").read_bytes() == (path / "result.json").read_bytes()
    best, _ = max(points(done), key=lambda p: p[1])
    assert best == done["best"]["sweep"]


def test_another_score_is_another_search_that_ranks_by_it():
    plain = data_of(f"{SEARCH.replace('fedavg', 'fedper')} --trials 2 ")
    pooled = data_of(f"{SEARCH.replace('fedavg', 'fedper')} --trials 2 --score pooled")
    assert plain["score"] == "own"
    assert pooled["score"] == "pooled"
    assert plain["search"]["study"] != pooled["search"]["study"]


def trained_alone(point):
    return f"train {RUN} " + " ".join(f"--set {k}={v}" for k, v in point["sweep"].items())


@pytest.mark.slow
@pytest.mark.parametrize("sampler", one_of_each(["tpe", "random", "gp"], bool))
def test_more_trials_go_on_and_are_those_of_an_unbroken_search(tmp_path, sampler):
    words = SEARCH.replace("optuna", f"optuna:{sampler}:3")
    (tmp_path / "whole").mkdir()
    first = data_of(f"{words} --trials 3")
    more = data_of(f"{words} --trials 13")
    whole = data_of(f"{words} --trials 13 --runs {tmp_path}/whole")
    assert first["reused"] == 0
    assert more["reused"] == 3
    assert whole["reused"] == 0
    assert points(more) == points(whole)
    assert points(more)[:3] == points(first)
    assert len({json.dumps(sweep) for sweep, _ in points(whole)}) == 13


@pytest.mark.slow
def test_a_killed_search_goes_on_with_the_same_trials(tmp_path, own_home):
    words = f"{SEARCH} --trials 6 --rounds 25"
    killed = start(words, home=own_home)
    began = time.monotonic()
    while time.monotonic() - began < 120:
        found = files_now(own_home / "runs", "search-*/trials.jsonl")
        if found and found[0].read_text().count("\n") >= 2:
            break
        time.sleep(0.02)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    had = len(list((own_home / "runs").glob("*/result.json")))
    assert 0 < had < 6
    done = data_of(words)
    assert had <= done["reused"] + 1
    (tmp_path / "whole").mkdir()
    assert points(done) == points(data_of(f"{words} --runs {tmp_path}/whole"))


@pytest.mark.slow
@pytest.mark.parametrize("pruner", ["median", "asha"])
def test_a_pruned_trial_is_marked_never_ranked_and_can_be_trained_to_its_end(pruner):
    words = f"{SEARCH} --eval-every 1 --trials 14 --pruner {pruner}"
    done = data_of(words)
    pruned = done["pruned"]
    assert done["search"]["pruned"] == len(pruned) > 0
    assert len(done["points"]) + len(pruned) == 14
    for one in pruned:
        path = Path(one["path"])
        assert one["round"] < one["rounds"] == 4
        assert json.loads((path / "pruned.json").read_text())["content"]["round"] == one["round"]
        assert not (path / "result.json").exists()
    paths = {p["path"] for p in done["points"]}
    assert paths.isdisjoint(one["path"] for one in pruned)
    again = data_of(words)
    assert again["pruned"] == pruned
    assert points(again) == points(done)
    assert again["reused"] == len(paths)
    path = place_of(f"{trained_alone(pruned[0])} --eval-every 1")
    assert str(path) == pruned[0]["path"]
    assert not (path / "pruned.json").exists()


@pytest.mark.slow
def test_a_space_with_few_points_is_tried_whole_and_chosen_as_a_grid_chooses():
    words = f"grid {RUN} --sweep lr=0.3,0.01,1e-9 --sweep batch=4,8"
    done = data_of(f"{words} --sampler optuna --trials 50 --retrain")
    assert done["search"]["trials"] == len(done["points"]) == 6
    full = data_of(f"{words} --exact")
    assert full["reused"] == 6
    assert done["best"] == full["best"]
    assert done["retrained"][0]["sweep"] == full["best"]["sweep"]


def test_a_trial_that_diverges_is_found_out_and_no_error():
    words = f"grid {RUN} --set opt=sgd --set head=linear --sampler optuna --sweep lr=1e38,0.1,0.2"
    done = data_of(f"{words} --trials 3")
    assert [f["sweep"] for f in done["failed"]] == [{"lr": "1e38"}]
    assert done["search"]["finished"] == 2
    assert done["search"]["failed"] == 1
    assert data_of(f"{words} --trials 3")["failed"] == done["failed"]


def trials_shown(home):
    """The only grid of a home as its page shows it: what its line counts, and every point's swept values and state."""
    runs = RunIndex(home / "runs")
    runs.look()
    while runs.waiting:
        runs.look()
    index = GridIndex(home / FOLDER, runs)
    (line,) = index.lines()
    shown = [(p["sweep"], p["state"]) for p in index.grid(line["name"])["points"]]
    return [line[key] for key in ("state", "of", "done")], shown


@pytest.mark.slow
def test_a_search_is_shown_as_a_grid_of_its_trials_and_with_more_of_them_it_is_the_same(own_home):
    for trials in (2, 3):
        done = data_of(f"{SEARCH} --trials {trials} --pruner median --eval-every 4")
        counts, shown = trials_shown(own_home)
        assert shown == [(p["sweep"], "finished") for p in done["points"]]
        assert counts == ["finished", trials, trials]
    # While it is at work, trials that are still to be drawn count.
    (path,) = (own_home / FOLDER).iterdir()
    sealed_for = first_of({"kind": "record of a grid", "grid": path.stem})
    first, *rest = read_sealed_lines(path, sealed_for)
    write_sealed_lines(path, [{**first, "process": this_process()}, *rest[:2]], sealed_for)
    counts, shown = trials_shown(own_home)
    assert counts == ["running", 3, 1]
    assert len(shown) == 1


def values_for_optuna(answer):
    """Values of the trials as the tools of Optuna read them."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    storage = JournalStorage(JournalFileBackend(answer["search"]["study"]))
    return [
        trial.value for trial in optuna.load_study(study_name="fedcache", storage=storage).trials
    ]


@pytest.mark.slow
def test_a_study_of_other_rows_is_not_gone_on_with(tmp_path):
    first = data_of(f"{SEARCH} --trials 3")
    x, y, split = embeddings(seed=7)
    np.savez(tmp_path / "mine.npz", **{"features/mine": x, "labels": y, "split": split})
    ok(f"ingest --name mine --replace {tmp_path}/mine.npz")
    done = ok(f"{SEARCH} --trials 3")
    assert "Trial 1 was made from other data" in done.err
    assert done.data["search"]["study"] == first["search"]["study"]
    assert points(done.data) != points(first)
    assert done.data["reused"] <= 1  # the first trial, which was read to be compared
    assert values_for_optuna(done.data) == [pytest.approx(v) for _, v in points(done.data)]


@pytest.mark.slow
def test_a_torn_last_trial_is_made_again_and_other_damage_is_refused_with_what_to_do(own_home):
    words = f"{SEARCH} --trials 3"
    first = data_of(words)
    (trials,) = (own_home / "runs").glob("search-*/trials.jsonl")
    whole = trials.read_bytes()
    lines = whole.splitlines(keepends=True)
    for torn in (whole[:-1], whole[:-20], whole[:-200]):
        trials.write_bytes(torn)
        again = data_of(words)
        assert points(again) == points(first)
        assert again["reused"] == 3
        assert trials.read_bytes().count(b"\n") == 3
    damaged = (
        whole.replace(b"batch", b"match", 1),
        lines[0] + lines[2],
        whole[:50] + b"\x00" + whole[51:],
    )
    for raw in damaged:
        trials.write_bytes(raw)
        must_fail_corrupt("Remove the file and run the same command again", words)
    assert data_of(f"{words} --fresh")["search"]["finished"] == 3
    trials.unlink()
    assert points(data_of(words)) == points(first)


@pytest.mark.slow
def test_the_journal_for_the_tools_of_optuna_is_whole_and_never_read():
    first = data_of(f"{SEARCH} --trials 2")
    Path(first["search"]["study"]).write_bytes(b"\xff damaged")
    more = data_of(f"{SEARCH} --trials 3")
    assert points(more)[:2] == points(first)
    assert values_for_optuna(more) == [pytest.approx(value) for _, value in points(more)]


def test_python_searches_too(store):
    dealt = fc.partition(store, "iid", clients=3, validation=0.25)
    grid = fc.grid(
        "fedavg", store, dealt, lr="log:1e-3..1", rounds=[2, 3], sampler="optuna:random", trials=3
    )
    assert len(grid.points) == 3
    assert all(0.001 <= float(p.sweep["lr"]) <= 1 for p in grid.points)
