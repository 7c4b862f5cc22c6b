"""``fedcache personalise``: the model of a new client as a file, and every refusal in one sentence."""

import pytest
from arrays import small_store
from command import data_of, fedcache, ok
from failing_command import must_fail, must_fail_store
from homes import made_once
from made_path import extracted, place_of, results
from pictures import CLASSES, folder

from fedcache import Store
from fedcache.errors import Exit
from fedcache.models.saved_model import SavedModel

METHODS = {"tip-local": "", "fedpcl": "--rounds 2", "fed3r": "", "ditto": "--rounds 2 --seeds 0,1"}


@made_once
def sites(place):
    """Runs over two domains, each a client, and the shards of these clients."""
    extracted(place, "glyph-clip", train=8, domains=("ink", "chalk"))
    made = data_of("partition --scheme feature-shift")
    for method, more in METHODS.items():
        ok(f"train --method {method} --partition {made['name']} {more}")
    out = place / "home/sites"
    ok(f"shard --partition {made['name']} --out {out}")
    return out


def shard(sites, client):
    return next(
        p for p in sites.glob("*.zarr") if Store.open(p).dataset["shard"]["client"] == client
    )


def run_of(method):
    """The digest of the run of a method, as much of it as names the run."""
    return results()[method]["digest"][:12]


@pytest.mark.slow
def test_a_client_of_the_run_is_as_right_as_it_was(sites, tmp_path):
    result = results()["tip-local"]
    for name, accuracy in zip(result["clients"], result["accuracy"]["per_client"], strict=True):
        out = tmp_path / f"{name}.safetensors"
        found = data_of(
            "personalise", result["digest"][:12], "--store", shard(sites, name), "-o", out
        )
        assert found["client"] == name
        assert found["measures"]["accuracy"] == accuracy
        assert found["rounds"] == 0


def test_a_new_client_has_a_file_that_predicts(sites, here):
    words = (f"personalise --name new {run_of('fedpcl')} --store", shard(sites, "ink"))
    done = data_of(*words, "--set", "epochs=2")
    model = SavedModel.load(here / "new.safetensors")
    assert model.clients == ["new"]
    assert model.facts.hp["epochs"] == 2
    test_rows = ("new.safetensors", "--store", shard(sites, "ink"), "--split", "test")
    (measured,) = data_of("evaluate", *test_rows)["runs"]
    assert measured["measures"]["accuracy"] == done["measures"]["accuracy"]
    assert len(data_of("predict", *test_rows)["rows"]) == measured["measures"]["rows"] == 12
    must_fail("new.safetensors", *words)


@pytest.mark.parametrize(
    ("method", "words", "said"),
    [
        ("fed3r", "", "fed3r"),
        ("fedpcl", "--set epoch=2", "epoch"),
        ("fedpcl", "--set dim=7", "dim=7"),
        ("ditto", "--seed all", "one seed"),
        ("ditto", "-o x.onnx", "x.onnx"),
        ("ditto", "--name a/b", "a/b"),
    ],
)
def test_refusals(sites, here, method, words, said):
    must_fail(said, f"personalise {run_of(method)} {words} --store", shard(sites, "ink"))
    assert not list(here.glob("*.safetensors"))


def test_a_store_that_is_none_or_has_other_features_is_refused(sites, tmp_path):
    personalise = (f"personalise {run_of('fedpcl')} -o", tmp_path / "new.safetensors")
    must_fail("", *personalise)
    assert fedcache(*personalise, "--store", "gone.zarr").code == Exit.STORE
    must_fail_store("glyph-clip", *personalise, "--store", small_store(tmp_path))


def test_a_store_without_training_rows_of_known_classes_is_refused(sites, here):
    other = folder(here / "other", train=2, test=2)
    for split in ("train", "test"):
        for name in CLASSES[:3]:
            (other / split / name).rename(other / split / f"kind of {name}")
    path = place_of(f"extract -d folder:{other} -b glyph-clip --workers 0")
    must_fail_store("training rows", f"personalise {run_of('fedpcl')} --store {path}")


@pytest.mark.slow
def test_rows_of_classes_that_the_model_does_not_know_are_told(sites, here):
    images = folder(here / "more", train=4, test=2, domains=("new",))
    for split in ("train", "test"):
        (images / f"{split}/new/zebra").rename(images / f"{split}/new/unknown")
    path = place_of(f"extract --dataset folder:{images} --backbones glyph-clip --workers 0")
    run = run_of("fedpcl")
    done = fedcache(f"personalise {run} --store {path} --name z --rounds 1")
    assert done.code == 0
    assert "(unknown)" in done.err
    told = fedcache(f"personalise {run} --store", shard(sites, "ink"), "--name", "y", "--rounds", 1)
    assert "left out" not in told.err
