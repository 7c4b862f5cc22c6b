"""``fedcache evaluate``: a run's own test rows give the stored figures, and every refusal is one sentence."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command import fedcache, ok
from pictures import folder

import fedcache as fc
from fedcache.config import Home
from fedcache.errors import Exit
from fedcache.federate.partition.partition import Partition
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


@pytest.mark.slow
def test_a_new_dataset_is_extracted_once_with_the_recipes_of_the_run(store: Path, tmp_path: Path) -> None:
    new = folder(tmp_path / "other", train=2, test=2, classes=4)
    before = recall_last(Home.from_environment())
    words = ("evaluate", runs()["fed3r"]["digest"][:12], "--dataset", f"folder:{new}", "--workers", 0)
    first = ok(*words)
    (found,) = first.data["runs"]
    assert found["left_out"]["unknown"] == {"9": 4}
    assert found["measures"]["rows"] == 12
    assert recall_last(Home.from_environment()) == before  # what train takes by default is not what is evaluated on
    made = sorted(Home.from_environment().stores.glob("*.zarr"))
    assert len(made) == 2
    assert {a.recipe["backbone"] for a in Store.open(next(p for p in made if p != store)).arrays.values()} == {
        "glyph-clip", "random-projection",
    }  # fmt: skip


@pytest.mark.slow
def test_a_second_call_computes_nothing(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = folder(tmp_path / "other", train=2, test=2)
    words = ("evaluate", runs()["fed3r"]["digest"][:12], "--dataset", f"folder:{new}", "--workers", 0)
    first = ok(*words)
    monkeypatch.setattr("fedcache.runs.evaluate_run.extract", None)
    assert ok(*words).data == first.data


@pytest.mark.slow
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


@pytest.mark.slow
def test_weights_that_are_given_make_the_features_of_their_backbone(tmp_path: Path) -> None:
    images, new = folder(tmp_path / "shapes", train=6, test=4), folder(tmp_path / "other", train=2, test=4)
    drawn = ("--weights", "random-projection=seed:3", "--workers", 0)
    ok("extract", "--dataset", f"folder:{images}", "--backbones", "random-projection,glyph-clip", *drawn)
    run = ok("train", "--method", "fed3r", "--backbones", "glyph-clip,random-projection", "--scheme", "iid",
             "--clients", 2).data["path"]  # fmt: skip
    ok("evaluate", run, "--dataset", f"folder:{new}", *drawn)
    (store,) = (p for p in Home.from_environment().stores.glob("*.zarr") if p.name.startswith("other"))
    recipes = {a.recipe["backbone"]: a.recipe["weights"] for a in Store.open(store).arrays.values()}
    assert recipes["random-projection"] == "seed:3"


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_file_of_embeddings(store: Path, tmp_path: Path) -> None:
    held, run = Store.open(store), runs()["fed3r"]["digest"][:12]
    keys = {a.recipe["backbone"]: key for key, a in held.arrays.items()}
    columns = {f"features/{name}": held.reader(key).rows(np.arange(held.rows))[:, 0] for name, key in keys.items()}
    s = held.samples
    file = tmp_path / "e.npz"
    np.savez(file, labels=np.array([s.classes[i] for i in s.label]), split=s.split, **columns)
    found = ok("evaluate", run, "--embeddings", file, "--split", "test").data["runs"][0]["measures"]
    assert found["accuracy"] == runs()["fed3r"]["accuracy"]["per_seed"][0]
    said = "rows have the same content as rows of shapes that"
    assert warned(run, "--embeddings", file) == [f"48 of 72 {said} {run[:8]} was trained on."]
    assert warned(run, "--embeddings", file, "--split", "test") == []
    # Ingested, trained on, and evaluated on the same file; its first rows alone, one of them changed.
    whole = ok("ingest", file, "--name", "mine").data["path"]
    mine = Path(ok("train", "--method", "fed3r", "--store", whole, "--scheme", "iid", "--clients", 2).data["path"])
    some = np.flatnonzero(s.split == 0)[:10]
    columns = {key: values[some] for key, values in columns.items()}
    for values in columns.values():
        values[0] += 1
    np.savez(tmp_path / "f.npz", labels=np.array([s.classes[i] for i in s.label[some]]), **columns)
    said = said.replace("shapes", "mine")
    assert warned(mine, "--embeddings", file) == [f"48 of 72 {said} {mine.name[:8]} was trained on."]
    assert warned(mine, "--embeddings", tmp_path / "f.npz") == [f"9 of 10 {said} {mine.name[:8]} was trained on."]


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


def run_of(method: str) -> Path:
    return Home.from_environment().runs / runs()[method]["digest"][:16]


def warned(*words: object) -> list[str]:
    return ok("evaluate", *words).envelope["warnings"]


@pytest.mark.slow
def test_rows_that_a_model_was_trained_on_are_told_wherever_model_and_rows_lie(store: Path, tmp_path: Path) -> None:
    run = run_of("fed3r")
    file, copied = run / "models" / "seed-0.safetensors", tmp_path / "mine.safetensors"
    shutil.copy(file, copied)
    moved = Path(shutil.copytree(store, tmp_path / "moved.zarr"))
    for model, said in ((run, run.name[:8]), (file, f"{run.name[:8]}/seed-0"), (copied, "mine")):
        for rows in (store, moved):
            expected = f"{said} was trained on 48 of 72 rows of {rows.name}: --split test leaves them out."
            assert warned(model, "--store", rows) == [expected]
            assert warned(model, "--store", rows, "--split", "test") == []
    # Copies of training images of the run in the test split of another dataset, beside others.
    other, again = folder(tmp_path / "other", train=1, test=5), folder(tmp_path / "again", train=8, test=0)
    for path in (again / "train" / "zebra").iterdir():
        shutil.copy(path, other / "test" / "zebra" / f"seen-{path.name}")
    words = ("-d", f"folder:{other}", "--workers", 0, "--split", "test")
    said = "have the same content as rows of shapes that mine was trained on."
    found = [w for w in warned(copied, *words) if "byte for byte" not in w]
    assert found == [f"8 of 23 rows {said}"]
    shutil.rmtree(run)
    assert warned(copied, "--store", store) == []  # nothing says what it was trained on: nothing is claimed


@pytest.mark.slow
def test_only_rows_that_clients_were_dealt_count_as_trained_on(store: Path, tmp_path: Path) -> None:
    words = ("--store", store, "--scheme", "iid", "--clients", 3, "--domain", "ink")
    run = Path(ok("train", "--method", "fed3r", *words).data["path"])
    held = Store.open(store)
    (parts,) = run.glob("partition-*.partition")
    dealt = np.concatenate([c.train for c in Partition.load(parts).clients])
    assert 0 < len(dealt) < 48
    expected = f"{run.name[:8]} was trained on {len(dealt)} of 72 rows of {store.name}: --split test leaves them out."
    assert warned(run, "--store", store) == [expected]
    # One client's store, cut with a partition of other rows: those that both hold.
    site = sorted(fc.shard(held, fc.partition(held, "iid", clients=2), tmp_path / "sites").glob("*.zarr"))[0]
    rows = np.array(Store.open(site).dataset["shard"]["rows"])
    both = np.isin(rows, dealt).sum()
    assert 0 < both < len(dealt)
    assert f" {both} of {len(rows)} rows of " in warned(run, "--store", site)[0]
    other = folder(tmp_path / "again", train=8, test=1, domains=("ink", "chalk"))
    said = f"{len(dealt)} of 54 rows have the same content as rows of shapes that {run.name[:8]} was trained on."
    assert warned(run, "-d", f"folder:{other}", "--workers", 0) == [said]


@pytest.mark.slow
def test_of_several_models_an_error_names_the_one_that_it_is_of(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "e.npz"
    np.savez(file, embeddings=np.zeros((3, 5), np.float32), labels=np.arange(3))
    some = [runs()[method]["digest"][:12] for method in ("fed3r", "fedavg")]
    done = fedcache("evaluate", *some, "--embeddings", file)
    assert done.code == Exit.STORE
    assert f"{some[0][:8]}" in done.err.splitlines()[0].split(" has features")[0], done.err
    assert some[0][:8] not in fedcache("evaluate", some[0], "--embeddings", file).err  # of one it is plain
    new = folder(tmp_path / "new", train=2, test=2, classes=4, domains=("ink",))
    site = ok("extract", "-d", f"folder:{new}", "-b", "glyph-clip,random-projection", "--workers", 0).data["path"]
    run, made = run_of("fedpcl"), tmp_path / "made.safetensors"
    ok("personalise", run, "--store", site, "-o", made, "--name", "new", "--rounds", 1)
    done = fedcache("evaluate", run, made, "--client", "chalk", "--store", store)
    assert done.code == Exit.USAGE
    assert "made.safetensors: Unknown client 'chalk'." in done.err, done.err


@pytest.mark.slow
def test_one_saved_client_is_measured_as_one_and_of_some_it_is_said_how_many(store: Path) -> None:
    words = ("train", "--method", "fedpcl", "--store", store, "--scheme", "feature-shift", "--rounds", 1)
    run = ok(*words, "--save-clients", "ink").data["path"]
    (alone,) = ok("evaluate", run, "--store", store, "--split", "test").data["runs"]
    (named,) = ok("evaluate", run, "--store", store, "--split", "test", "--client", "ink").data["runs"]
    assert alone == named
    assert (alone["model"], alone["clients"]) == ("of client ink", None)
    assert alone["measures"]["interval"] is not None
    words = ("train", "--method", "fedrep", "--store", store, "--scheme", "iid", "--clients", 3, "--rounds", 1)
    run = ok(*words, "--set", "batch=4", "--save-clients", "client-0,client-2").data["path"]
    done = fedcache("evaluate", run, "--store", store, "--split", "test")
    assert "2 of 3 clients' own, each on all rows" in done.out


def test_a_model_file_has_a_label_that_says_which_it_is(store: Path, tmp_path: Path) -> None:
    run, copied = run_of("fed3r"), tmp_path / "photos-of-june.safetensors"
    shutil.copy(run / "models" / "seed-0.safetensors", copied)
    done = fedcache("evaluate", run, run / "models" / "seed-0.safetensors", copied, "--store", store)
    assert [f" {name} " in done.out for name in (run.name[:8], f"{run.name[:8]}/seed-0", "photos-of-june")] == [
        True
    ] * 3


def test_beside_clients_models_one_for_all_is_measured_as_what_the_client_uses(store: Path) -> None:
    pair = [run_of(name) for name in ("fedpcl", "fed3r")]
    words = ("--store", store, "--split", "test")
    done = ok("evaluate", *pair, *words, "--client", "ink")
    assert [e["model"] for e in done.data["runs"]] == ["of client ink", "one for all"]
    assert done.data["runs"][1] == ok("evaluate", pair[1], *words).data["runs"][0]
    assert "fed3r trained one model for all clients: it is what ink uses too." in done.err
    unknown = fedcache("evaluate", *pair, *words, "--client", "inc")
    assert (unknown.code, "Did you mean 'ink'?" in unknown.err) == (Exit.USAGE, True)


@pytest.mark.slow
def test_an_evaluation_in_the_runs_own_folder_is_written_again(store: Path) -> None:
    run = run_of("fed3r")
    for ending in ("json", "csv", "html"):
        for _ in range(2):
            ok("evaluate", run, "--store", store, "--split", "test", "-o", run / f"e.{ending}")
    for _ in range(2):
        ok("predict", run, "--store", store, "-o", run / "models" / "p.csv")
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    for name in ("result.json", "models/models.json", "files.json", "measured.json"):
        refused = fedcache("evaluate", run, "--store", store, "-o", run / name)
        assert (refused.code, "would write over" in refused.err) == (Exit.USAGE, True)
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


def test_no_file_of_a_store_or_of_another_run_is_written_over(store: Path, tmp_path: Path) -> None:
    """Whether it is named or found by its dataset."""
    run, other = run_of("fed3r"), run_of("fedavg")
    images = folder(tmp_path / "again", train=8, test=4, domains=("ink", "chalk"))
    mine = Path(ok("extract", "-d", f"folder:{images}", "-b", "glyph-clip,random-projection").data["path"])
    for out in (mine / "manifest.json", other / "result.json"):
        before = out.read_bytes()
        for command in (("evaluate", run, "-d", f"folder:{images}"), ("evaluate", run, "--store", store)):
            done = fedcache(*command, "-o", out)
            assert (done.code, "would write over" in done.err, out.read_bytes()) == (Exit.USAGE, True, before)
    photo = next(images.rglob("*.png"))
    swapped = fedcache("predict", photo, photo)
    assert (swapped.code, f"{photo} is a file, and no model of a run." in swapped.err) == (Exit.USAGE, True)
