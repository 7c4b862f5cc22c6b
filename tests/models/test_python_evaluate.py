"""``fc.evaluate`` and ``fc.personalise`` give what the commands of the same names give."""

import json

import numpy as np
import pytest
from command import data_of
from made_path import extracted
from pictures import folder
from refusal import refused

import fedcache as fc


def trained(place):
    """A store of two domains, each a client."""
    return extracted(
        place,
        "random-projection --size 8",
        train=6,
        test=5,
        classes=4,
        domains=("ink", "chalk"),
    )


@pytest.fixture
def store(once):
    return fc.Store.open(once(trained))


@pytest.fixture
def run(store):
    return fc.train("fed3r", store, fc.partition(store, "feature-shift"))


def test_an_evaluation_is_that_of_the_command(store, run, tmp_path):
    found = fc.evaluate(run, store=store, split="test", temperature=0.1)
    words = f"evaluate --split test --temperature 0.1 {run.path} --store {store.path}"
    (told,) = data_of(words)["runs"]
    assert json.loads(json.dumps(found.to_dict())) == told
    assert found.accuracy == run.accuracy.mean == told["measures"]["accuracy"]
    saved = run.model().save(tmp_path / "m.safetensors")
    for source in (str(run.path), saved):
        again = fc.evaluate(source, store=store.path, split="test", temperature=0.1)
        assert again.measures == found.measures


@pytest.mark.slow
def test_a_dataset_is_extracted_and_its_page_written_as_by_the_command(run, tmp_path):
    other = f"folder:{folder(tmp_path / 'other', train=1, test=6, classes=5)}"
    mine = tmp_path / "1.html"
    its = tmp_path / "2.html"
    asked = {"split": "test", "with_images": True, "options": {"workers": 0}}
    found = fc.evaluate(run, other, out=mine, **asked)
    words = f"evaluate --split test --workers 0 --with-images {run.path} -d {other} -o {its}"
    (told,) = data_of(words)["runs"]
    assert json.loads(json.dumps(found.to_dict())) == told
    assert mine.read_bytes() == its.read_bytes()
    assert found.mistakes is not None


def test_a_new_clients_model_is_that_of_the_command(store, tmp_path):
    parts = fc.partition(store, "feature-shift")
    run = fc.train("fedrep", store, parts, rounds=2, settings={"batch": 4})
    sites = fc.shard(store, parts, tmp_path / "sites")
    site = fc.Store.open(sorted(sites.glob("*.zarr"))[0])
    mine = tmp_path / "a.safetensors"
    its = tmp_path / "b.safetensors"
    made = fc.personalise(run, site, mine, name="new", rounds=1, settings={"lr": 0.05})
    words = f"personalise --name new --rounds 1 --set lr=0.05 {run.path} --store {site.path}"
    told = data_of(f"{words} -o {its}")
    assert mine.read_bytes() == its.read_bytes()
    assert {**json.loads(json.dumps(made.to_dict())), "path": told["path"]} == told
    X, y = site.Xy(split="test")
    assert np.mean(made.model().scores(X).argmax(1) == y) == made.accuracy


def test_what_makes_no_sense_is_refused(store, run, tmp_path):
    for call in (
        lambda: fc.evaluate(run),
        lambda: fc.evaluate(run.model(), store=store),
        lambda: fc.evaluate(run, store=store, split="tests"),
        lambda: fc.evaluate(run, store=store, out=tmp_path / "e.pdf"),
        lambda: fc.evaluate(run, store=store, options={"wokers": 0}),
        lambda: fc.personalise(run, store, tmp_path / "p.safetensors"),
    ):
        refused(call)
