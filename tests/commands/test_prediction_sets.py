"""``evaluate --coverage``: the threshold of federated conformal prediction, and the sets on the clients' test rows."""

import json
import shlex

import numpy as np
import pytest
from arrays import around, normals, rows_ingested
from command import data_of, fedcache, ok
from failing_command import must_fail, must_fail_store
from homes import made_once
from made_path import place_of, run_of

import fedcache as fc
from fedcache.models.evaluate import threshold


@made_once
def store(place):
    """A store of six classes that overlap, one without rows of the test split, and runs of one client per class."""
    x, y = around(6, 100, 1.3)
    block = np.arange(600) // 6
    split = np.where(block % 12 == 1, 2, (block % 3 == 0) & (y < 5))
    path = rows_ingested(place, x, y, split)
    ok(f"train --method fed3r --by class --validation 0.3 --store {path}")
    ok(f"train --method solo --rounds 1 --by class --store {path}")
    ok(f"train --method fedncm --by class --store {path}")
    ok(f"train --method afl --scheme iid --clients 3 --validation split --store {path}")
    return path


@pytest.mark.parametrize(
    ("rows", "clients", "coverage", "rank"),
    [
        (8, 2, 0.7, 7),
        (8, 2, 0.71, 8),
        (8, 2, 0.8, 8),
        (8, 2, 0.81, np.inf),  # rank 9 of 8 scores
        (93, 7, 0.07, 7),  # 100 * 0.07 is above 7 in float64
        (1, 1, 1e-12, 1),
    ],
)
def test_the_threshold_is_the_score_of_this_rank(rows, clients, coverage, rank):
    scores = np.random.default_rng(0).permutation(np.arange(1.0, rows + 1))
    assert threshold(scores, clients, coverage) == rank


def test_a_row_of_one_of_several_unlike_clients_is_covered():
    """The row is of client k with probability (n_k + 1) / (N + K); a rank of fewer scores covers too little."""
    rng = np.random.default_rng(0)
    sizes = np.array([1, 2, 3, 4, 30])
    owner = np.repeat(np.arange(5), sizes)
    tests = rng.choice(5, 4_000, p=(sizes + 1) / (sizes + 1).sum())
    covered = [
        rng.normal(-5 * client) <= threshold(rng.normal(-5 * owner), 5, 0.8) for client in tests
    ]
    error = np.sqrt(0.8 * 0.2 / len(tests))
    assert 0.8 - 3 * error <= np.mean(covered) <= 0.8 + 6 / 45 + 3 * error


@pytest.mark.parametrize("coverage", [0.3, 0.8, 0.99])
def test_all_figures_are_those_of_the_probabilities_of_the_loaded_model(store, tmp_path, coverage):
    run = run_of("fed3r")
    X, y = fc.Store.open(store).Xy(split=None)
    score = 1 - fc.load_model(run).probabilities(X)
    (file,) = run.glob("partition-*.partition")
    clients = fc.Partition.load(file).clients
    held = np.concatenate([c.validation for c in clients])
    q = np.inf
    if coverage < 0.99:
        rank = np.ceil((len(held) + 6) * coverage).astype(int)
        q = np.sort(score[held, y[held]])[rank - 1]
    tests = {c.name: [row for row in c.test if row // 6 % 3 == 0] for c in clients}
    assert tests.pop("5")
    sizes = {name: (score[rows] <= q).sum(1) for name, rows in tests.items()}
    covered = {name: score[rows, y[rows]] <= q for name, rows in tests.items()}
    each = [c.mean() for c in covered.values()]
    size = np.concatenate(list(sizes.values()))
    wanted = {
        "target": coverage,
        "threshold": q,
        "calibration_rows": len(held),
        "calibration_clients": 6,
        "without_rows": 1,
        "rows": len(size),
        "client_mean": np.mean(each),
        "lowest": min(each),
        "clients_below": np.sum(np.less(each, coverage)),
        "pooled": np.concatenate(list(covered.values())).mean(),
        "mean_size": size.mean(),
        "single_share": (size == 1).mean(),
        "empty_share": (size == 0).mean(),
    }
    found = fc.evaluate(run, store=store, split="test", coverage=coverage, out=tmp_path / "e.json")
    told = found.prediction_sets.to_dict()
    (kept,) = json.loads((tmp_path / "e.json").read_text())
    if coverage < 0.99:  # JSON has no infinity
        assert kept["prediction_sets"] == told
    for name, counts in told.pop("clients").items():
        assert counts["covered"] == covered[name].sum()
        assert counts["classes"] == sizes[name].sum()
    assert told.pop("test_protocol") == "within"
    assert told == pytest.approx(wanted, rel=1e-12)


def test_validation_rows_that_all_clients_share_are_those_of_one_client(store):
    done = data_of(f"evaluate {run_of('afl')} --store {store} --split test --coverage 0.8")
    found = done["runs"][0]["prediction_sets"]
    assert found["calibration_clients"] == 1
    assert found["calibration_rows"] == 54
    first, *others = found["clients"].values()
    assert others == [first, first], "they share the test rows too"


def test_a_score_that_equals_the_threshold_is_in_the_set(tmp_path):
    """All rows of a class are equal, and the threshold is the highest score."""
    y = np.tile(np.arange(3), 200)
    path = rows_ingested(tmp_path, np.eye(3, 8)[y], y, np.arange(600) % 4 == 0)
    run = place_of(f"train --method fed3r --scheme iid --clients 3 --validation 0.3 --store {path}")
    found = fc.evaluate(run, store=path, split="test", coverage=0.95).prediction_sets
    assert found.total.rows == found.total.covered == found.total.single


def test_validation_rows_without_labels_are_none(tmp_path):
    split = np.arange(60) % 3
    y = np.where(split == 2, -1, np.arange(60) % 4)
    path = rows_ingested(tmp_path, normals(0, 60, 8), y, split, "--no-label=-1")
    words = "train --method fed3r --scheme iid --clients 2 --validation split"
    run = place_of(f"{words} --store {path}")
    words = f"evaluate {run} --store {path} --split test --coverage 0.5"
    must_fail_store("needs labelled validation rows", words)


def test_the_page_and_the_terminal_have_the_same_sentences(store, tmp_path):
    words = f"evaluate {run_of('fed3r')} --store {store} --split test --coverage 0.99"
    out = " ".join(fedcache(f"{words} -o {tmp_path}/e.html").out.split())
    page = (tmp_path / "e.html").read_text()
    for said in (
        "the threshold is inf, from 106 validation rows of 6 clients",
        "this coverage needs 594 validation rows",
        "Clients without test rows, left out: 1.",
    ):
        assert said in out
        assert said in page


@pytest.mark.parametrize(
    ("method", "more", "said"),
    [
        ("fed3r", "--coverage 1", "above 0 and below 1"),
        ("fed3r", "--coverage nan", "above 0 and below 1"),
        ("fed3r", "--client-prior counts", "cannot be combined"),
        ("solo", "", "one global model"),
    ],
)
def test_what_has_no_prediction_sets_is_refused_by_name(store, method, more, said):
    must_fail(said, f"evaluate {run_of(method)} --store {store} --coverage 0.8 {more}")


def test_the_hint_for_a_run_without_validation_rows_trains_one_with_them(store):
    words = f"evaluate --store {store} --coverage 0.8"
    error = must_fail_store("needs labelled validation rows", words, run_of("fedncm"))
    hint = shlex.split(error["hint"].partition("  fedcache ")[2])
    run = place_of(*hint, "--scheme", "iid")
    assert data_of(f"{words} {run}")["runs"][0]["prediction_sets"]["calibration_rows"] > 0
    must_fail_store("No client has a test row", f"{words} --split train {run}")
    (run / "partition-0.partition").unlink()
    must_fail_store("partition of the run", f"{words} {run}")


def test_validation_rows_of_a_private_run_are_not_read(store, monkeypatch):
    monkeypatch.setattr("fedcache.runs.predict_run.is_private", lambda _result: True)
    words = f"evaluate {run_of('fed3r')} --store {store} --coverage 0.8"
    must_fail("(epsilon) does not cover these rows", words)
