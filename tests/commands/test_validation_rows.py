"""Rows to choose by, on the command line: ``--validation`` of partition, train and grid."""

from pathlib import Path

import numpy as np
import pytest
from arrays import overlapping
from command import data_of
from failing_command import must_fail
from federation import rows_trained
from homes import made_once
from refusal import refused
from sklearn.linear_model import Ridge

import fedcache as fc
from fedcache import Store
from fedcache.config import Home, TrainConfig
from fedcache.federate.engines.flower.site import SiteRequest
from fedcache.runs.directory import has_model
from fedcache.ui.server import GridIndex, RunIndex

QUARTER = "--validation 0.25"


def made(place, noise=0.9):
    """Three of five rows train, one tests, one is of split validation."""
    return overlapping(place, ["train", "train", "train", "test", "validation"], noise)


store = made_once(made)


def test_a_partition_tells_of_its_validation_rows_and_shards_hold_them(store, tmp_path):
    words = f"partition --scheme iid --clients 4 --store {store}"
    plain = data_of(words)
    done = data_of(f"{words} {QUARTER}")
    split = data_of(f"{words} --validation split")
    clients = done["clients"]
    assert (
        [c["train"] + c["validation"] for c in clients]
        == [c["train"] for c in plain["clients"]]
        == [36] * 4
    )
    assert done["validation"] == sum(c["validation"] for c in clients) == 36
    assert "validation" not in plain
    assert [c["validation"] for c in split["clients"]] == [48] * 4
    assert [c["train"] for c in split["clients"]] == [36] * 4
    paths = data_of(f"shard --partition {done['name']} --out {tmp_path}/sites --store {store}")[
        "stores"
    ]
    splits = [np.bincount(Store.open(path).samples.split, minlength=3).tolist() for path in paths]
    assert splits == [[27, 48, 9]] * 4
    refused(
        lambda: SiteRequest(Store.open(paths[0]), TrainConfig(method="fedncm")).client(None),
        "9 validation rows",
    )


def by_hand(store, parts, rows, kind):
    """Share of ``rows`` that a head makes right, which is fitted to all training rows of all clients together."""
    x, label = Store.open(store).Xy(split=None)
    x = x.astype(np.float64)
    trained = rows_trained(parts.clients)
    if kind == "fed3r":
        ridge = Ridge(0.01, fit_intercept=False)  # lam of fed3r
        scores = ridge.fit(x[trained], np.eye(3)[label[trained]]).predict(x)
    else:
        means = np.stack([x[trained][label[trained] == c].mean(0) for c in range(3)])
        scores = x @ (means / np.linalg.norm(means, axis=1, keepdims=True)).T  # metric=cos
    return float((scores.argmax(1) == label)[rows].mean())


@pytest.mark.parametrize("kind", ["fed3r", "fedncm"])
@pytest.mark.parametrize("how", ["0.25", "split"])
def test_the_validation_accuracy_is_that_of_a_head_worked_out_by_hand(store, kind, how):
    words = f"-s iid -m 4 --validation {how} --store {store} --set feat_post=none"
    done = data_of(f"train --preset paper --method {kind} {words}")
    parts = fc.partition(store, "iid", clients=4, validation=how)
    assert done["partition"]["digest"] == parts.digest
    assert parts.validation is not None
    wanted = by_hand(store, parts, parts.validation, kind)
    assert (
        done["validation"]["mean"]
        == done["validation"]["pooled"]
        == pytest.approx(wanted, abs=1e-12)
    )
    assert done["validation"]["rows"] == len(parts.validation)
    assert done["accuracy"]["mean"] == pytest.approx(
        by_hand(store, parts, parts.test, kind), abs=1e-12
    )
    # The clients share the test rows, so they share the validation rows too.
    assert done["validation"]["per_client"] == pytest.approx([wanted] * 4, abs=1e-12)


GRID = "grid --method fedavg --sweep lr=0.01,3,0.3 --rounds 3 -s dirichlet -m 4"


@pytest.mark.slow
def test_what_was_chosen_is_trained_again_and_is_the_run_without_validation(store):
    words = f"--alpha 1 --seeds 0,1 --store {store}"
    done = data_of(f"{GRID} {words} --validation 0.3 --retrain")
    best = max(done["points"], key=lambda p: p["validation"]["mean"])
    assert done["best"]["sweep"] == best["sweep"]
    (again,) = done["retrained"]
    assert again["method"] == "fedavg"
    assert again["sweep"] == best["sweep"]
    assert "validation" not in again
    rate = best["sweep"]["lr"]
    run = data_of(f"train --method fedavg --set lr={rate} --rounds 3 -s dirichlet -m 4 {words}")
    assert run["reused"]
    assert run["path"] == again["path"]
    assert run["accuracy"] == again["accuracy"]
    assert run["partition"]["digest"] == again["partition"]["digest"] != best["partition"]["digest"]
    parts = fc.partition(store, "dirichlet", clients=4, alpha=1, validation=0.3)
    in_python = fc.grid(
        "fedavg", store, parts, lr=[0.01, 3, 0.3], seeds=[0, 1], options={"rounds": 3}, retrain=True
    )
    assert [point.run.result["digest"] for point in in_python.retrained] == [again["digest"]]
    fresh = data_of(f"train --config {again['path']}/config.toml --fresh")
    assert fresh["path"] == again["path"]
    assert fresh["accuracy"] == again["accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize("words", ["lam=3,1,2", "lam=1,2,3"])
def test_of_equal_points_all_commands_take_the_same(store, words):
    asked = f"grid --method fed3r -s iid -m 3 --validation 0.3 --retrain --store {store}"
    done = data_of(f"{asked} --sweep {words}")
    assert len({p["validation"]["mean"] for p in done["points"]}) == 1, "the three points tie"
    assert done["best"]["sweep"] == {"lam": "1"}
    assert [p["sweep"] for p in done["retrained"]] == [{"lam": "1"}]
    assert {p["sweep"]["lam"] for p in done["points"] if has_model(Path(p["path"]))} == {"1"}
    (table,) = fc.compare([p["path"] for p in done["points"]]).tables
    assert table.chosen == table.reference == table.treatments[0].name == "fed3r lam=1"


def test_a_saved_partition_gives_its_rows_back_too(store):
    made = data_of(f"partition -s iid -m 3 --validation split --name mine --store {store}")
    words = f"--method fed3r --sweep lam=0.1,100 --store {store}"
    done = data_of(f"grid {words} --partition mine --retrain")
    assert done["points"][0]["partition"]["digest"] == made["digest"]
    plain = data_of(f"grid {words} -s iid -m 3")
    alike = [p for p in plain["points"] if p["sweep"] == done["best"]["sweep"]]
    assert done["retrained"][0]["digest"] == alike[0]["digest"]
    assert alike[0]["reused"]


def test_nothing_to_choose_by_is_refused_before_anything_is_trained(store):
    must_fail("--validation 0.2", f"{GRID} --alpha 1 --store {store} --retrain")
    assert not list(Home.from_environment().runs.glob("*/rounds.jsonl"))


@pytest.mark.slow
def test_one_score_chooses_in_a_grid_in_compare_and_in_a_report(tmp_path, own_home):
    """Each client is tested on all classes, so a model that knows only its client's classes is not chosen."""
    store = made(tmp_path, noise=3.0)
    words = (
        "--method fed3r,solo --scheme dirichlet --alpha 0.02 --clients 6 --validation 0.25 "
        f"--rounds 5 --store {store}"
    )
    done = data_of(f"grid {words}")
    runs = {p["method"]: p for p in done["points"]}
    held = {name: p["validation"]["client_mean"] for name, p in runs.items()}
    best = max(held, key=lambda name: held[name])
    assert best == "fed3r"
    assert runs["fed3r"]["accuracy"]["client_mean"] > runs["solo"]["accuracy"]["client_mean"]
    assert done["best"]["method"] == best
    (compared,) = data_of("compare")["comparisons"]
    assert {t["name"]: t["validation"] for t in compared["treatments"]} == pytest.approx(held)
    assert compared["chosen"] == best
    index = RunIndex(own_home / "runs")
    index.look()
    (line,) = GridIndex(own_home / "grids", index).lines()
    assert line["best"]["method"] == best
    assert line["best"]["choice"] == held[best]
