"""A run of more clients than a result holds: their columns lie beside it, sealed, and are read from there."""

import sys
from pathlib import Path

import numpy as np
import pytest
from command import data_of, fedcache, ok
from damage import flip_bit
from failing_command import must_fail, must_fail_machine
from homes import made_once
from made_path import place_of
from pyarrow import parquet
from refusal import corruption, machine_error

import fedcache as fc
from fedcache.config import Home
from fedcache.errors import Exit
from fedcache.runs import loop
from fedcache.runs.directory import (
    CLIENTS_IN_RESULT,
    check_recordable,
    client_columns,
    read_result,
    rounds_of,
)
from fedcache.runs.features import StoreRows

M = CLIENTS_IN_RESULT + 200
WORDS = f"--store many --scheme iid --clients {M} --rounds 2 --participation 5"


def ingested(_place):
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 2 * M)
    x = (np.eye(3, 6)[y] + 0.6 * rng.standard_normal((2 * M, 6))).astype(np.float32)
    split = np.where(np.arange(2 * M) < M + 100, "train", "test")
    return fc.Store.from_arrays({"x": x}, labels=y, splits=split, name="many").path


store = made_once(ingested)


def test_many_clients_without_pyarrow_are_refused_before_they_are_trained(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    check_recordable(CLIENTS_IN_RESULT)
    machine_error(
        lambda: check_recordable(CLIENTS_IN_RESULT + 1), "pyarrow", "pip install 'fedcache[tables]'"
    )


@pytest.mark.slow
def test_models_that_do_not_fit_into_memory_are_refused_before_anything_is_trained(
    store, monkeypatch
):
    words = f"--method perfedavg {WORDS} --set dim=128 --set batch=1 --set bn=false"
    for command in (f"grid {words} --sweep beta=0.1,0.2", f"train {words}"):
        planned = data_of(f"{command} --dry-run")["programs"][0]["memory"]["total"]
        # as much as training needs
        for name in ("free_memory", "free_memory_on"):
            monkeypatch.setattr(loop, name, lambda *_, needed=planned: needed)
        must_fail_machine("", f"{command} --save-clients all")
        assert not list(Home.from_environment().runs.glob("*/rounds.jsonl"))
    ok(f"train {words} --save-clients client-0001,client-0002")


@pytest.mark.slow
def test_many_clients_have_a_column_of_validation_accuracy(store):
    done = data_of(
        f"train --method fedrep --seeds 0,1 --store many --scheme iid --clients {M - 150} --validation 0.4 "
        "--rounds 1 --participation 5 --set batch=1 --set bn=false"
    )
    path = Path(done["path"])
    found = done["validation"]
    # of 1,300 rows that train, 1,050 clients have one and 250 of them another
    assert found["rows"] == 250
    columns = client_columns(read_result(path / "result.json"), path)
    # As with the test rows, every client is scored on all of them.
    scored = columns.validation
    assert len(scored) == M - 150
    means = [found["client_mean"], found["pooled"]]
    assert means == pytest.approx([scored.mean()] * 2, abs=1e-12)


@pytest.mark.slow
def test_a_result_of_many_clients_has_their_columns_in_a_file(store, tmp_path):
    words = f"--eval-clients 300 --seeds 0,1 {WORDS} --set bn=false"
    path = place_of(f"train --method fedrep {words}")
    result = read_result(path / "result.json")
    assert result["clients"] is None
    assert "per_client" not in result["accuracy"]
    columns = client_columns(result, path)
    assert columns.per_seed.shape == (2, M)
    assert np.isfinite(columns.per_seed).sum(1).tolist() == [300, 300]
    both = np.isfinite(columns.per_seed).all(0)
    assert np.array_equal(columns.accuracy[both], columns.per_seed[:, both].mean(0))
    assert np.isnan(columns.accuracy[~both]).all()
    for known, seed in zip(result["accuracy"]["eval_clients"], columns.per_seed, strict=True):
        drawn = seed[np.isfinite(seed)]
        assert known["scored"] == 300
        assert known["standard_error"] == pytest.approx(
            drawn.std(ddof=1) / 300**0.5 * (1 - 300 / M) ** 0.5
        )
    table = parquet.read_table(path / "clients.parquet")
    assert " ".join(table.column_names) == (
        "client accuracy classes_owned accuracy_seed_0 accuracy_seed_1"
    )
    # What reads clients reads them there.
    page = tmp_path / "page.html"
    ok(f"train --method solo {words}")
    ok(f"report -o {page}")
    assert page.stat().st_size < 3_000_000
    ok("compare --over clients")


@pytest.mark.slow
def test_a_run_of_many_clients_is_taken_up_and_its_file_is_a_promise(store):
    words = f"train --method fedavg {WORDS}"
    path = place_of(words)
    assert data_of(words)["reused"]
    flip_bit(path / "clients.parquet")
    assert fedcache(words).code == Exit.CORRUPT
    corruption(lambda: client_columns(read_result(path / "result.json"), path), "clients.parquet")
    run = fc.train(
        "fedavg",
        "many",
        fc.partition("many", "iid", clients=M),
        rounds=2,
        participation=5,
        fresh=True,
    )
    assert np.isfinite(run.clients.accuracy).all()


@pytest.mark.slow
def test_who_takes_part_is_part_of_a_run_and_of_the_configuration_that_runs_it_again(
    store, tmp_path
):
    trace = tmp_path / "trace.csv"
    trace.write_text("client,first,last\nclient-0003,1,1\nclient-0007,1,2\n")
    plain = f"train --method fedavg {WORDS}"
    words = f"{plain} --availability {trace} --client-sampling weighted --client-dropout 0.1"
    path = place_of(words)
    first, second = rounds_of(path)
    assert set(first["clients"]) <= {3, 7}
    assert set(second["clients"]) <= {7}
    said = read_result(path / "result.json")["participants"]
    assert said["client_sampling"] == "weighted"
    assert said["client_dropout"] == 0.1
    assert data_of(f"train --config {path}/config.toml")["reused"]
    trace.write_text("client,first,last\nclient-0004,1,2\n")
    assert len({path, place_of(words), place_of(plain)}) == 3


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (f"--method fedrep --eval-clients {M + 1}", "--eval-clients"),
        ("--method fedrep --eval-clients some", "--eval-clients"),
        (f"--method fedrep --participation {M + 1}", "--participation"),
        ("--availability 1.5", "--availability 1.5"),
        ("--clusters-per-round 2", "--clusters-per-round"),
        ("--client-clusters 2.5", "--client-clusters 2.5"),
        ("--client-clusters 3 --clusters-per-round 4", "3 clusters"),
        ("--client-clusters 3 --dp-clip 1 --dp-noise 1", "--client-clusters"),
    ],
)
def test_wrong_words_of_who_takes_part_are_answered_before_features_are_read(
    store, words, named, monkeypatch
):
    monkeypatch.setattr(StoreRows, "read", lambda *_: pytest.fail("features were read"))
    must_fail(named, f"train --method fedavg {WORDS} {words}")


@pytest.mark.parametrize(
    "words", [f"--client-clusters {M + 1}", "--client-dropout 0.1 --method central"]
)
def test_who_takes_part_must_fit_the_method_and_the_clients(store, words):
    must_fail(words.split()[-1], f"train --method fedavg {WORDS} {words}")
