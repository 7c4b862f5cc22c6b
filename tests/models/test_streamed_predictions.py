"""Rows are predicted and measured block by block: any block size gives the same answer, and a stop leaves nothing."""

import numpy as np
import pyarrow as pa
import pytest
from command import fedcache, ok
from draws import examples
from homes import made_once
from hypothesis import given
from hypothesis import strategies as st
from made_path import place_of
from pyarrow import parquet
from refusal import stopped

import fedcache as fc
from fedcache.config import ExtractConfig, Home
from fedcache.errors import Exit
from fedcache.models import evaluate, predictor
from fedcache.models.predictor import best_of, write_predictions
from fedcache.models.saved_model import ModelOptions, PredictOptions
from fedcache.process import Stop
from fedcache.progress import Silent
from fedcache.runs import evaluate_run
from fedcache.runs import predict_run as running

ROWS = 300
EXACT = ("rows", "right", "confusion")
APPROXIMATE = ("nll", "ece")


def columns():
    """Embeddings of two backbones."""
    rng = np.random.default_rng(0)
    label = rng.integers(0, 4, ROWS)
    a, b = ((label[:, None] + rng.standard_normal((ROWS, d))).astype(np.float32) for d in (5, 3))
    return {"features/a": a, "features/b": b, "label": label}


@made_once
def run(place):
    np.savez(place / "e.npz", **columns())
    ok(f"ingest --name e {place}/e.npz")
    return place_of("train --method fed3r -d e --scheme iid --clients 2")


@pytest.mark.parametrize("ending", [".npz", ".parquet"])
def test_blocks_of_rows_change_no_prediction_and_no_measure(
    run, own_home, tmp_path, monkeypatch, ending
):
    store = fc.Store.open(next((own_home / "stores").iterdir()))
    all_rows = np.arange(ROWS)
    path = tmp_path / f"lost{ending}"
    held = columns()
    told = []
    held["features/a"][7] = np.nan
    if ending == ".npz":
        np.savez(path, **held)
    else:
        table = pa.table({k: v.tolist() for k, v in held.items()})
        parquet.write_table(table, path, row_group_size=64)
    for block in (1 << 14, 17):
        for module in (predictor, running, evaluate_run):
            monkeypatch.setattr(module, "BLOCK", block)
        monkeypatch.setattr(predictor, "FILE_BLOCK", block)
        done = fedcache(f"predict --top 2 --json {run} --embeddings {path}")
        assert done.code == Exit.QUARANTINED
        rows = done.data["rows"]
        assert [i for i, row in enumerate(rows) if row["reason"]] == [7]
        both = [
            ok(f"evaluate {run} {words}") for words in (f"--embeddings {path}", "-d e --split all")
        ]
        of_file, of_store = (answer.data["runs"][0] for answer in both)
        warnings = [answer.warnings for answer in both]
        assert of_file["left_out"]["unreadable"] == 1
        likely = [p for row in rows for _, p in row["top"]]
        close = [m[key] for m in (of_file["measures"], of_store["measures"]) for key in APPROXIMATE]
        same = [(row["name"], row["class"], row["reason"]) for row in rows], of_file["left_out"]
        exact = [m[key] for m in (of_file["measures"], of_store["measures"]) for key in EXACT]
        wrong = evaluate.find_mistakes(store, [(None, fc.load_model(run).predictor, all_rows)])
        most = [(m.row, m.truth, m.predicted) for m in wrong.most]
        told.append((likely + close, same, exact, warnings, wrong.wrong, wrong.rows, most))
    assert told[0][0] == pytest.approx(told[1][0])
    assert told[0][1:] == told[1][1:]


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_a_prediction_that_is_stopped_between_blocks_leaves_no_file(
    run, tmp_path, monkeypatch, ending
):
    np.savez(tmp_path / "e.npz", **columns())
    monkeypatch.setattr(running, "BLOCK", 100)
    stop = Stop()
    out = tmp_path / f"out/classes{ending}"
    out.parent.mkdir()
    home = Home.from_environment()
    rows = PredictOptions(embeddings=f"{tmp_path}/e.npz")
    asked = ModelOptions()
    opened = running.open_predictor(run, asked, home, Silent())
    found = running.predict_rows(opened, [], asked, rows, ExtractConfig(), home, Silent(), stop)
    stop.ask()
    stopped(lambda: write_predictions(out, found, 1), "100 of 300")
    assert not list(out.parent.iterdir())


@given(st.integers(0, 10_000), st.integers(1, 5))
@examples(15, 200)
def test_the_best_classes_are_the_predicted_one_and_then_those_of_the_highest_scores(seed, top):
    rng = np.random.default_rng(seed)
    ranking = rng.integers(-2, 3, (20, 5)).astype(float)
    ranking[rng.random(ranking.shape) < 0.2] = -np.inf
    ranking[3] = np.nan
    predicted = np.where(np.isnan(ranking).any(1), -1, rng.integers(0, 5, 20))
    shares = rng.random((20, 5))
    names = [str(i) for i in range(20)]
    found = list(best_of(names, "abcde", predicted, shares, ranking, top, {5: "torn"}))
    assert [row.name for row in found] == names
    assert {i: row.reason for i, row in enumerate(found) if row.reason} == {
        3: "some of its features are not finite",
        5: "torn",
    }
    for i in set(range(20)) - {3, 5}:
        others = sorted(set(range(5)) - {predicted[i]}, key=lambda c: (-ranking[i, c], c))
        order = [predicted[i], *others][:top]
        assert found[i].classes == tuple("abcde"[c] for c in order)
        assert found[i].probabilities == tuple(shares[i, order])
