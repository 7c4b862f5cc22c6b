"""``fedcache evaluate``: a run's own test rows give the stored figures, and every refusal is one sentence."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command import fedcache, ok
from pictures import folder

from fedcache.config import Home
from fedcache.errors import Exit
from fedcache.store.catalog import recall_last
from fedcache.store.store import Store

METHODS = {
    "fed3r": (), "fedavg": ("--rounds", 2), "fedpcl": ("--rounds", 2), "clip-zs": (), "tip-local": (),
}  # fmt: skip


def trained(place: Path) -> Path:
    """A store of two domains, each a client, and a run of each method."""
    images = folder(place / "shapes", train=8, test=4, domains=("ink", "chalk"))
    words = ("--dataset", f"folder:{images}", "--backbones", "glyph-clip,random-projection", "--workers", 0)
    done = ok("extract", *words)
    for method, more in METHODS.items():
        backbones = ("--backbones", "glyph-clip") if method in ("clip-zs", "tip-local") else ()
        ok("train", "--method", method, *backbones, "--scheme", "feature-shift", *more)
    return Path(done.data["path"])


@pytest.fixture
def store(once: Callable[[Callable[[Path], Path]], Path]) -> Path:
    return once(trained)


def runs() -> dict[str, dict]:
    found = [json.loads(p.read_text()) for p in Home.from_environment().runs.glob("*/result.json")]
    return {r["method"]: r for r in found}


@pytest.mark.parametrize("method", METHODS)
def test_the_runs_own_test_rows_give_the_stored_accuracy(store: Path, method: str) -> None:
    result = runs()[method]
    words = ("evaluate", result["digest"][:12], "--store", store, "--split", "test")
    if result["protocol"] != "personalised":
        figures = ok(*words).data["runs"][0]["measures"]
        assert figures["accuracy"] == result["accuracy"]["per_seed"][0]
        assert figures["macro_f1"] == result["macro_f1"]["mean"]
        return
    for name, accuracy in zip(result["clients"], result["accuracy"]["per_client"], strict=True):
        figures = ok(*words, "--client", name).data["runs"][0]["measures"]
        assert figures["by_domain"][name]["accuracy"] == accuracy  # a client is a domain
    (whole,) = ok(*words).data["runs"]
    assert set(whole["clients"]["clients"]) == set(result["clients"])
    assert whole["clients"]["mean"] == pytest.approx(whole["measures"]["accuracy"])
    assert whole["model"] == "2 clients' own, each on all rows"


def test_a_new_dataset_is_extracted_once_with_the_recipes_of_the_run(store: Path, tmp_path: Path) -> None:
    new = folder(tmp_path / "other", train=2, test=2, classes=4)
    before = recall_last(Home.from_environment())
    words = ("evaluate", runs()["fed3r"]["digest"][:12], "--dataset", f"folder:{new}", "--workers", 0)
    first = ok(*words)
    (found,) = first.data["runs"]
    assert found["left_out"]["unknown"] == {"class3": 4}
    assert found["measures"]["rows"] == 12
    assert recall_last(Home.from_environment()) == before  # what train takes by default is not what is evaluated on
    made = sorted(Home.from_environment().stores.glob("*.zarr"))
    assert len(made) == 2
    assert {a.recipe["backbone"] for a in Store.open(next(p for p in made if p != store)).arrays.values()} == {
        "glyph-clip", "random-projection",
    }  # fmt: skip


def test_a_second_call_computes_nothing(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = folder(tmp_path / "other", train=2, test=2)
    words = ("evaluate", runs()["fed3r"]["digest"][:12], "--dataset", f"folder:{new}", "--workers", 0)
    first = ok(*words)
    monkeypatch.setattr("fedcache.runs.evaluate_run.extract", None)
    assert ok(*words).data == first.data


def test_a_new_dataset_is_computed_as_the_features_of_the_run_were(
    once: Callable[[Callable[[Path], Path]], Path], tmp_path: Path
) -> None:
    """In batches of their size, of each backbone: so figures are those of what ``predict`` says of the images."""

    def made(place: Path) -> Path:
        images = folder(place / "shapes", train=6, test=4)
        words = ("extract", "--dataset", f"folder:{images}", "--workers", 0, "--backbones")
        ok(*words, "random-projection")
        return Path(ok(*words, "glyph-clip", "--batch", 1).data["path"])

    once(made)
    run = ok("train", "--method", "fed3r", "--backbones", "random-projection,glyph-clip", "--scheme", "iid",
             "--clients", 2).data["path"]  # fmt: skip
    new = folder(tmp_path / "other", train=2, test=12)
    figures = ok("evaluate", run, "--dataset", f"folder:{new}", "--workers", 0).data["runs"][0]["measures"]
    (store,) = (p for p in Home.from_environment().stores.glob("*.zarr") if p.name.startswith("other"))
    held = Store.open(store)
    assert {a.recipe["backbone"]: a.how["batch"] for a in held.arrays.values()} == {
        "random-projection": 32, "glyph-clip": 1,
    }  # fmt: skip
    said = ok("predict", run, *[new / name for name in held.samples.name], "--top", 3, "--workers", 0).data["rows"]
    assert [row["top"] for row in said] == [
        row["top"] for row in ok("predict", run, "--store", store, "--top", 3).data["rows"]
    ]
    truth = [held.samples.classes[label] for label in held.samples.label]
    assert figures["accuracy"] == sum(row["class"] == name for row, name in zip(said, truth, strict=True)) / len(said)
    probability = [dict(row["top"])[name] for row, name in zip(said, truth, strict=True)]
    assert figures["nll"] == pytest.approx(-np.log(probability).mean(), rel=1e-12)
    again = folder(tmp_path / "asked", train=1, test=1)
    ok("evaluate", run, "--dataset", f"folder:{again}", "--workers", 0, "--batch", 16)
    (store,) = (p for p in Home.from_environment().stores.glob("*.zarr") if p.name.startswith("asked"))
    assert {a.how["batch"] for a in Store.open(store).arrays.values()} == {16}  # what is asked for goes first


def test_several_runs_are_one_table_and_one_file(store: Path, tmp_path: Path) -> None:
    some = [r["digest"][:12] for r in runs().values()]
    for ending in ("html", "csv", "json"):
        done = fedcache("evaluate", *some, "--store", store, "-o", tmp_path / f"e.{ending}")
        assert done.code == 0, done.err
        assert all(method in done.out for method in METHODS)
    page = (tmp_path / "e.html").read_text()
    assert "Reliability" in page
    assert 'src="' not in page
    with (tmp_path / "e.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert sum(line["scope"] == "all" for line in lines) == len(METHODS)
    assert {line["name"] for line in lines if line["scope"] == "domain"} == {"ink", "chalk"}
    assert len(json.loads((tmp_path / "e.json").read_text())) == len(METHODS)
    assert "--split test leaves them out" in done.err  # all rows, those of training among them


def test_a_file_of_embeddings(store: Path, tmp_path: Path) -> None:
    held, run = Store.open(store), runs()["fed3r"]["digest"][:12]
    keys = {a.recipe["backbone"]: key for key, a in held.arrays.items()}
    columns = {f"features/{name}": held.reader(key).rows(np.arange(held.rows))[:, 0] for name, key in keys.items()}
    s = held.samples
    file = tmp_path / "e.npz"
    np.savez(file, labels=np.array([s.classes[i] for i in s.label]), split=s.split, **columns)
    found = ok("evaluate", run, "--embeddings", file, "--split", "test").data["runs"][0]["measures"]
    assert found["accuracy"] == runs()["fed3r"]["accuracy"]["per_seed"][0]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), Exit.USAGE, "--dataset, --store or --embeddings says what is evaluated on; found none."),
        (("--store", "s", "--dataset", "digits"), Exit.USAGE, "found --dataset and --store"),
        (("--store", "STORE", "--split", "tests"), Exit.USAGE, "tests"),
        (("--store", "STORE", "--split", "validation"), Exit.STORE, "has no rows of split validation"),
        (("--store", "STORE", "--client", "ink"), Exit.USAGE, "one model for all clients"),
        (("--store", "STORE", "-o", "x.pdf"), Exit.USAGE, ".pdf"),
        (("--store", "STORE", "-o", "nowhere/x.csv"), Exit.USAGE, "does not exist"),
        (("--store", "STORE", "--temperature", "0"), Exit.USAGE, "temperature"),
        (("--embeddings", "none.npz"), Exit.USAGE, "none.npz"),
    ],
)
def test_refusals(store: Path, words: tuple[str, ...], code: Exit, said: str) -> None:
    given = [str(store) if w == "STORE" else w for w in words]
    done = fedcache("evaluate", runs()["fed3r"]["digest"][:12], *given)
    assert done.code == code, done.err
    assert said in done.err.splitlines()[0], done.err


def test_a_store_without_the_models_features_is_refused(store: Path, tmp_path: Path) -> None:
    new = folder(tmp_path / "other", train=2, test=2)
    path = ok("extract", "-d", f"folder:{new}", "-b", "random-projection", "--workers", 0).data["path"]
    done = fedcache("evaluate", runs()["fed3r"]["digest"][:12], "--store", path)
    assert done.code == Exit.STORE
    assert "has no features of glyph-clip" in done.err
