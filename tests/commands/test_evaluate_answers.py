"""``fedcache evaluate``: a run's own test rows give the stored figures, and every refusal is one sentence."""

import re
import shutil

import numpy as np
import pytest
from command import data_of, ok
from failing_command import must_fail, must_fail_store
from homes import made_once
from made_path import extracted, place_of, results, run_of
from pictures import folder

import fedcache as fc
from fedcache import Store
from fedcache.config import Home
from fedcache.errors import Exit
from fedcache.store.catalog import recall_last

GLYPHS = "--backbones glyph-clip"
METHODS = {
    "fed3r": "",
    "fedavg": "--rounds 2",
    "fedpcl": "--rounds 2",
    "clip-zs": GLYPHS,
    "tip-local": GLYPHS,
}


@made_once
def store(place):
    """A store of two domains, each a client, and a run of each method."""
    path = extracted(place, "glyph-clip,random-projection", train=8, domains=("ink", "chalk"))
    for method, more in METHODS.items():
        ok(f"train --method {method} --scheme feature-shift {more}")
    return path


@pytest.mark.parametrize("method", METHODS)
def test_the_runs_own_test_rows_give_the_stored_accuracy(store, method):
    result = results()[method]
    words = f"evaluate {result['digest'][:12]} --store {store} --split test"
    if result["protocol"] != "personalised":
        figures = data_of(words)["runs"][0]["measures"]
        assert figures["accuracy"] == result["accuracy"]["per_seed"][0]
        assert figures["macro_f1"] == result["macro_f1"]["mean"]
        return
    for name, accuracy in zip(result["clients"], result["accuracy"]["per_client"], strict=True):
        figures = data_of(f"{words} --client {name}")["runs"][0]["measures"]
        assert figures["by_domain"][name]["accuracy"] == accuracy  # a client is a domain
    (whole,) = data_of(words)["runs"]
    assert set(whole["clients"]["clients"]) == set(result["clients"])
    assert whole["clients"]["mean"] == pytest.approx(whole["measures"]["accuracy"])


@pytest.mark.slow
def test_a_new_dataset_is_computed_as_the_features_of_the_run_were(
    once, own_home, tmp_path, monkeypatch
):
    """In batches of their size, of each backbone: so figures are those of what ``predict`` says of the images."""

    def made(place):
        images = folder(place / "shapes", train=6)
        words = f"extract --dataset folder:{images} --workers 0 --backbones"
        ok(f"{words} random-projection")
        return place_of(f"{words} glyph-clip --batch 1")

    once(made)
    run = place_of(
        "train --method fed3r --backbones random-projection,glyph-clip --scheme iid --clients 2"
    )
    new = folder(tmp_path / "other", train=2, test=12)
    home = Home(own_home)
    before = recall_last(home)
    words = f"evaluate {run} --dataset folder:{new} --workers 0"
    first = data_of(words)
    # what train takes by default is not what is evaluated on
    assert recall_last(home) == before
    monkeypatch.setattr("fedcache.runs.evaluate_run.extract", None)
    assert data_of(words) == first, "computed once"
    figures = first["runs"][0]["measures"]
    (path,) = own_home.glob("stores/other*.zarr")
    held = Store.open(path)
    batches = {a.recipe["backbone"]: a.how["batch"] for a in held.arrays.values()}
    assert batches == {"random-projection": 32, "glyph-clip": 1}
    images = [new / name for name in held.samples.name]
    said, other, stored = (
        data_of(f"predict {run} --top 3", *words)["rows"]
        for words in (
            (*images, "--workers", 0),
            (*images, "--workers", 0, "--batch", 32),
            ("--store", path),
        )
    )
    assert [row["top"] for row in said] == [row["top"] for row in stored]
    assert other != said, "another batch size gives other last bits"
    truth = [held.samples.classes[label] for label in held.samples.label]
    assert figures["accuracy"] == sum(
        row["class"] == name for row, name in zip(said, truth, strict=True)
    ) / len(said)


@pytest.mark.slow
def test_a_file_of_embeddings(store, tmp_path):
    held = Store.open(store)
    run = run_of("fed3r")
    columns = {
        f"features/{a.recipe['backbone']}": held.reader(key).rows(np.arange(held.rows))[:, 0]
        for key, a in held.arrays.items()
    }
    s = held.samples
    file = tmp_path / "e.npz"
    np.savez(file, labels=np.array([s.classes[i] for i in s.label]), split=s.split, **columns)
    found = data_of(f"evaluate {run} --embeddings {file} --split test")["runs"][0]["measures"]
    assert found["accuracy"] == results()["fed3r"]["accuracy"]["per_seed"][0]
    assert counted(run, "--embeddings", file) == ["48 of 72"]
    assert counted(run, "--embeddings", file, "--split", "test") == []


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), Exit.USAGE, "--embeddings"),
        (("--store", "s", "--dataset", "digits"), Exit.USAGE, "--dataset and --store"),
        (("--store", "STORE", "--split", "tests"), Exit.USAGE, "tests"),
        (("--store", "STORE", "--split", "validation"), Exit.STORE, "validation"),
        (("--store", "STORE", "--client", "ink"), Exit.USAGE, "one global model"),
        (("--store", "STORE", "-o", "x.pdf"), Exit.USAGE, ".pdf"),
    ],
)
def test_refusals(store, words, code, said):
    given = [str(store) if w == "STORE" else w for w in words]
    must_fail(said, "evaluate", run_of("fed3r"), *given, code=code)


def test_a_store_without_the_models_features_is_refused(store, tmp_path):
    new = folder(tmp_path / "other", train=2, test=2)
    path = place_of(f"extract -d folder:{new} -b random-projection --workers 0")
    must_fail_store("glyph-clip", f"evaluate {run_of('fed3r')} --store {path}")


def counted(*words):
    """How many rows a warning says that the model was trained on."""
    warnings = ok("evaluate", *words).warnings
    return [found[0] for warning in warnings if (found := re.search(r"\d+ of \d+", warning))]


@pytest.mark.slow
def test_rows_that_a_model_was_trained_on_are_told_wherever_model_and_rows_lie(store, tmp_path):
    run = run_of("fed3r")
    file = run / "models/seed-0.safetensors"
    copied = tmp_path / "mine.safetensors"
    shutil.copy(file, copied)
    moved = shutil.copytree(store, tmp_path / "moved.zarr")
    for model in (run, file, copied):
        for rows in (store, moved):
            assert counted(model, "--store", rows) == ["48 of 72"]
            assert counted(model, "--store", rows, "--split", "test") == []
    # Copies of training images of the run in the test split of another dataset, beside others.
    other = folder(tmp_path / "other", train=1, test=5)
    again = folder(tmp_path / "again", train=8, test=0)
    for path in (again / "train/zebra").iterdir():
        shutil.copy(path, other / f"test/zebra/seen-{path.name}")
    assert "8 of 23" in counted(copied, "-d", f"folder:{other}", "--workers", 0, "--split", "test")
    shutil.rmtree(run)
    # nothing says what it was trained on: nothing is claimed
    assert counted(copied, "--store", store) == []


@pytest.mark.slow
def test_only_rows_that_clients_were_dealt_count_as_trained_on(store, tmp_path):
    words = f"--store {store} --scheme iid --clients 3 --domain ink"
    run = place_of(f"train --method fed3r {words}")
    held = Store.open(store)
    (parts,) = run.glob("partition-*.partition")
    dealt = np.concatenate([c.train for c in fc.Partition.load(parts).clients])
    assert 0 < len(dealt) < 48
    assert counted(run, "--store", store) == [f"{len(dealt)} of 72"]
    # One client's store, cut with a partition of other rows: those that both hold.
    site = sorted(
        fc.shard(held, fc.partition(held, "iid", clients=2), tmp_path / "sites").glob("*.zarr")
    )[0]
    rows = np.array(Store.open(site).dataset["shard"]["rows"])
    both = np.isin(rows, dealt).sum()
    assert 0 < both < len(dealt)
    assert counted(run, "--store", site) == [f"{both} of {len(rows)}"]


@pytest.mark.slow
def test_one_saved_client_is_measured_as_one_and_of_some_it_is_said_how_many(store):
    test_rows = f"--store {store} --split test"
    words = f"train --method fedpcl --store {store} --scheme feature-shift --rounds 1"
    run = place_of(f"{words} --save-clients ink")
    (alone,) = data_of(f"evaluate {run} {test_rows}")["runs"]
    (named,) = data_of(f"evaluate {run} {test_rows} --client ink")["runs"]
    assert alone == named
    assert alone["clients"] is None


def test_beside_clients_models_one_for_all_is_measured_as_what_the_client_uses(store):
    pair = [run_of(name) for name in ("fedpcl", "fed3r")]
    words = f"evaluate --store {store} --split test"
    done = data_of(f"{words} --client ink", *pair)["runs"]
    assert [e["model"] for e in done] == ["of client ink", "the global model"]
    assert done[1] == data_of(words, pair[1])["runs"][0]


def test_no_file_of_a_store_or_of_a_run_is_written_over(store, tmp_path):
    """Whether it is named or found by its dataset."""
    run = run_of("fed3r")
    other = run_of("fedavg")
    images = folder(tmp_path / "again", train=8, domains=("ink", "chalk"))
    mine = place_of(f"extract -d folder:{images} -b glyph-clip,random-projection")
    for _ in range(2):  # its own evaluations are written again
        ok(f"evaluate {run} --store {store} -o {run}/e.json")
    for out in (mine / "manifest.json", other / "result.json", run / "models/models.json"):
        before = out.read_bytes()
        for rows in (f"-d folder:{images}", f"--store {store}"):
            must_fail("", f"evaluate {run} {rows} -o {out}")
            assert out.read_bytes() == before
