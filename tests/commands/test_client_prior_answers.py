"""``evaluate --client-prior``: both accuracies on the clients' own test rows, beside figures that stay as they are."""

import csv
import json

import joblib
import numpy as np
import pytest
import torch
from arrays import around, normals, rows_ingested
from command import data_of, fedcache, ok
from failing_command import must_fail, must_fail_store
from files_now import bytes_of
from homes import made_once
from made_path import place_of, results, run_of
from refusal import refused

import fedcache as fc
from fedcache.errors import Exit
from fedcache.models.client_prior import ClientPriors

CLIENTS = "--scheme dirichlet --clients 5 --option alpha=0.3 --option test_protocol=matched"


@made_once
def store(place):
    """A store of six classes that overlap, and runs of one model, of a model per client, and of prototypes."""
    x, y = around(6, 100, 1.3)
    split = np.arange(600) // 6 % 3 == 0
    path = rows_ingested(place, x, y, split)
    ok(f"train --method fed3r {CLIENTS} --store {path}")
    ok(f"train --method solo --rounds 2 {CLIENTS} --store {path}")
    ok(f"train --method fedpcl --rounds 1 {CLIENTS} --store {path}")
    return path


def prior_of(store, method, kind, *more):
    done = data_of(f"evaluate {run_of(method)} --store {store} --client-prior {kind}", *more)
    (found,) = done["runs"]
    return found["client_prior"]


def by_hand(store, kind):
    """Right predictions of each client with its prior, from the scores of the loaded model alone."""
    held = fc.Store.open(store)
    run = run_of("fed3r")
    model = fc.load_model(run)
    X, y = held.Xy(split=None)
    (file,) = run.glob("partition-*.partition")
    clients = fc.Partition.load(file).clients
    counts = np.stack([np.bincount(y[c.train], minlength=6) for c in clients])
    logs = np.log(model.probabilities(X))
    shares = counts.astype(float)
    if kind == "classes":
        shares = (counts > 0).astype(float)
    if kind == "em":
        pooled = counts.sum(0) / counts.sum()
        shares = np.tile(pooled, (len(clients), 1))
        for i, c in enumerate(clients):
            for _ in range(500):
                joint = np.exp(logs[c.test]) * shares[i] / pooled
                shares[i] = (joint / joint.sum(1, keepdims=True)).mean(0)
        shares = shares / pooled
    if kind == "fitted":
        k = ClientPriors.of("fitted", counts).concentration
        shares = counts + k * counts.sum(0) / counts.sum()
    with np.errstate(divide="ignore"):
        prior = np.log(shares)
    return {
        c.name: int(((logs[c.test] + prior[i]).argmax(-1) == y[c.test]).sum())
        for i, c in enumerate(clients)
    }


@pytest.mark.parametrize("kind", ["classes", "counts", "fitted", "em"])
def test_the_accuracy_with_the_prior_is_that_of_the_scores_and_the_counts(store, kind, monkeypatch):
    found = prior_of(store, "fed3r", kind)
    stored = results()["fed3r"]
    assert found["kind"] == kind
    assert found["test_protocol"] == "matched"
    assert (found["concentration"] is not None) == (kind == "fitted")
    assert {n: c["right_with_prior"] for n, c in found["clients"].items()} == by_hand(store, kind)
    # Without the prior they are the accuracies that the run stored.
    each = [c["right"] / c["rows"] for c in found["clients"].values()]
    assert each == stored["accuracy"]["per_client"]
    before = found["accuracy_without_prior"]
    assert before["pooled"] == pytest.approx(stored["accuracy"]["pooled"])
    assert before["client_mean"] == pytest.approx(np.mean(each))
    assert found["accuracy_with_prior"]["client_mean"] > before["client_mean"]
    if kind == "classes":  # no matched test row is of a class that is masked
        words = f"evaluate {run_of('fed3r')} --store {store} --client-prior {kind}"
        monkeypatch.setattr("fedcache.models.client_prior.MASKED_SHARE", 0.0)
        answer = fedcache(words)
        said = f"{100 * before['client_mean']:.2f} % without"
        assert said in " ".join(answer.out.split())
        assert "concentration k" in answer.err
        assert all(c["right_with_prior"] >= c["right"] for c in found["clients"].values())


@pytest.mark.slow
def test_every_other_figure_and_the_stored_run_stay_as_they_are(store):
    run = run_of("fed3r")
    before = bytes_of(run)
    plain, none, counts = (
        data_of(f"evaluate {run} --store {store} --split test {more}")["runs"][0]
        for more in ("", "--client-prior none", "--client-prior counts")
    )
    assert none == plain
    assert plain.pop("client_prior") is None
    assert counts.pop("client_prior") is not None
    assert counts == plain
    assert bytes_of(run) == before


@pytest.mark.parametrize("kind", ["classes", "counts", "fitted"])
def test_predictions_and_exports_of_a_client_are_those_that_evaluate_scores(store, tmp_path, kind):
    run = run_of("fed3r")
    held = fc.Store.open(store)
    (file,) = run.glob("partition-*.partition")
    client = fc.Partition.load(file).clients[1]
    X, y = (a[client.test] for a in held.Xy(split=None))
    prior = ("--client", client.name, "--client-prior", kind)
    model = fc.load_model(run, client.name, client_prior=kind)
    p = model.probabilities(X)
    wanted = model.predict(X)
    right = sum(name == held.samples.classes[i] for name, i in zip(wanted, y, strict=True))
    assert right == by_hand(store, kind)[client.name]
    assert f"{kind} of {client.name}" in repr(model)
    refused(lambda: model.save(tmp_path / "m.safetensors"))
    # A temperature divides the scores and leaves the weight of the prior as it is.
    weight = model.probabilities(X, 3.0) / fc.load_model(run).probabilities(X, 3.0)
    expected = p / fc.load_model(run).probabilities(X)
    scale = [w.max(1, keepdims=True) for w in (weight, expected)]
    assert weight / scale[0] == pytest.approx(expected / scale[1])

    np.save(tmp_path / "X.npy", X)
    found = data_of(f"predict {run} --embeddings {tmp_path}/X.npy", *prior)
    assert [row["class"] for row in found["rows"]] == wanted
    for name in ("m.pt2", "m.joblib"):
        ok(f"export-model {run} -o {tmp_path}/{name}", *prior)
    program = torch.export.load(tmp_path / "m.pt2").module()
    _, exported = program(torch.from_numpy(X))
    assert exported.numpy() == pytest.approx(p, abs=1e-5)
    assert joblib.load(tmp_path / "m.joblib").predict_proba(X) == pytest.approx(p, abs=1e-5)


def test_train_keeps_accuracy_with_the_prior_apart_and_compare_has_columns_of_its_own(store):
    plain = results()["fed3r"]
    words = f"train --method fed3r {CLIENTS} --store {store} --client-prior"
    for kind in ("counts", "em"):
        run = place_of(f"{words} {kind}")
        kept = json.loads((run / "result.json").read_text())
        found = kept["accuracy"].pop("client_prior")
        assert kept["accuracy"] == plain["accuracy"]
        assert kept["digest"] != plain["digest"]
        (told,) = data_of(f"evaluate {run} --store {store} --client-prior {kind}")["runs"]
        for name, key in (("", "without"), ("_with_prior", "with")):
            expected = told["client_prior"][f"accuracy_{key}_prior"]["client_mean"]
            assert found[f"own_rows{name}"] == pytest.approx(expected)
        assert found["all_rows_with_prior"] < found["all_rows"], "test rows of all classes"
    table = fedcache("compare --format markdown").out
    (line,) = (line for line in table.splitlines() if "=em |" in line and "pp" not in line)
    assert f"{100 * found['all_rows_with_prior']:.2f}" in line
    assert "own rows with prior %" in table


def test_predictions_with_a_prior_need_a_client_and_class_counts(store, tmp_path):
    np.save(tmp_path / "X.npy", np.zeros((2, 8), np.float32))
    words = f"predict {run_of('fed3r')} --embeddings {tmp_path}/X.npy --client-prior"
    must_fail("no client was given", f"{words} counts")
    must_fail("only `fedcache evaluate`", f"{words} em")
    must_fail("nobody", f"{words} counts --client nobody")


@pytest.mark.slow
def test_clients_with_models_of_their_own_are_scored_by_these(store):
    found = prior_of(store, "solo", "classes")
    stored = results()["solo"]
    each = [c["right"] / c["rows"] for c in found["clients"].values()]
    assert each == stored["accuracy"]["per_client"]
    name = stored["clients"][2]
    alone = prior_of(store, "solo", "classes", "--client", name)
    assert alone["clients"] == {name: found["clients"][name]}


@pytest.mark.slow
def test_python_and_files_give_what_the_command_gives(store, tmp_path):
    run = run_of("fed3r")
    made = tmp_path / "e.csv"
    found = fc.evaluate(run, store=store, client_prior="fitted", out=made)
    told = prior_of(store, "fed3r", "fitted")
    assert json.loads(json.dumps(found.client_prior.to_dict())) == told
    with made.open(newline="") as file:
        lines = {
            line["name"]: float(line["accuracy"])
            for line in csv.DictReader(file)
            if line["scope"] == "own test rows"
        }
    assert lines == {
        "no prior": told["accuracy_without_prior"]["pooled"],
        "prior fitted": told["accuracy_with_prior"]["pooled"],
    }
    (sentence,) = (s for s in found.sentences() if s.startswith("Client prior fitted"))
    assert f"{100 * told['accuracy_with_prior']['client_mean']:.2f} %" in sentence
    refused(lambda: fc.evaluate(run, store=store, client_prior="count"))


def test_what_has_no_client_prior_is_refused_by_name(store, tmp_path):
    # Rows of other data are no client's.
    some = normals(1, 6, 8)
    np.savez(tmp_path / "other.npz", features=some, labels=np.arange(6))
    other = place_of(f"ingest {tmp_path}/other.npz --name other")
    for said, method, rows, code in (
        ("No client has a test row", "fed3r", f"{store} --split train", Exit.STORE),
        ("fedpcl predicts by similarity", "fedpcl", store, Exit.USAGE),
        ("the store that the run was trained on", "fed3r", other, Exit.USAGE),
    ):
        words = f"evaluate {run_of(method)} --client-prior counts --store {rows}"
        must_fail(said, words, code=code)


@pytest.mark.slow
def test_a_model_whose_run_is_gone_is_refused(store, tmp_path):
    run = run_of("fed3r")
    fc.load_model(run).save(tmp_path / "m.safetensors")
    words = f"evaluate {tmp_path}/m.safetensors --store {store} --client-prior counts"
    assert data_of(words)["runs"][0]["client_prior"] == prior_of(store, "fed3r", "counts")
    run.rename(tmp_path / "run")
    must_fail_store("no longer exists", words)


def test_a_concentration_of_a_private_run_is_refused(store, monkeypatch):
    monkeypatch.setattr("fedcache.runs.predict_run.is_private", lambda _result: True)
    monkeypatch.setattr("fedcache.models.client_prior.MASKED_SHARE", 0.0)
    words = f"evaluate {run_of('fed3r')} --store {store} --client-prior"
    assert "concentration k" not in ok(f"{words} classes").err
    for kind in ("fitted", "em"):
        must_fail(f"--client-prior {kind} reads the class counts", f"{words} {kind}")


@pytest.mark.slow
def test_seeds_with_one_partition_are_an_ensemble_and_others_are_refused(store):
    words = f"train --method fedncm --seeds 0,1 {CLIENTS} --store {store}"
    prior = f"evaluate --store {store} --client-prior counts --seed"
    run = place_of(words)
    one, both = (data_of(f"{prior} {seed} {run}")["runs"][0]["client_prior"] for seed in (0, "all"))
    assert one == both, "fedncm is the same for every seed"
    run = place_of(f"{words} --repartition")
    must_fail("single seed", f"{prior} all {run}")
    assert data_of(f"{prior} 1 {run}")["runs"][0]["client_prior"] != one


def test_unlabelled_test_rows_give_no_figures_of_a_prior(tmp_path):
    y = np.tile(np.arange(3), 20)
    test = np.arange(60) % 4 == 0
    label = np.where(test, -1, y)
    path = rows_ingested(tmp_path, np.eye(3, 8)[y], label, test, "--no-label=-1")
    for kind in ("counts", "em"):
        words = (
            f"train --method fed3r --scheme iid --clients 3 --store {path} --client-prior {kind}"
        )
        assert "client_prior" not in data_of(words)["accuracy"]
