"""``fc.evaluate`` and ``fc.personalise`` give what the commands of the same names give."""

import json
from pathlib import Path

import numpy as np
import pytest
from command import ok
from heard import Heard
from pictures import folder
from refusal import refused

import fedcache as fc
from fedcache.models import evaluate, predictor, sources
from fedcache.runs import evaluate_run


def trained(place):
    """A store of two domains, each a client."""
    images = folder(place / "shapes", train=6, test=5, classes=4, domains=("ink", "chalk"))
    return Path(ok("extract -b random-projection --size 8", "-d", f"folder:{images}").data["path"])


@pytest.fixture
def store(once):
    return fc.Store.open(once(trained))


@pytest.fixture
def run(store):
    return fc.train("fed3r", store, fc.partition(store, "feature-shift"))


def test_an_evaluation_is_that_of_the_command(store, run, tmp_path):
    found = fc.evaluate(run, store=store, split="test", temperature=0.1)
    words = ("evaluate --split test --temperature 0.1", run.path, "--store", store.path)
    (told,) = ok(*words).data["runs"]
    assert json.loads(json.dumps(found.to_dict())) == told
    assert found.accuracy == run.accuracy.mean == told["measures"]["accuracy"]
    saved = run.model().save(tmp_path / "m.safetensors")
    for source in (str(run.path), saved):
        again = fc.evaluate(source, store=store.path, split="test", temperature=0.1)
        assert again.measures == found.measures


@pytest.mark.slow
def test_a_dataset_is_extracted_and_its_page_written_as_by_the_command(run, tmp_path):
    other, pages = (
        folder(tmp_path / "other", train=1, test=6, classes=5),
        [tmp_path / f"{i}.html" for i in (1, 2)],
    )
    asked = {"split": "test", "with_images": True, "options": {"workers": 0}}
    found = fc.evaluate(run, f"folder:{other}", out=pages[0], **asked)
    words = ("evaluate --split test --workers 0 --with-images", run.path, "-d", f"folder:{other}")
    (told,) = ok(*words, "-o", pages[1]).data["runs"]
    assert json.loads(json.dumps(found.to_dict())) == told
    assert pages[0].read_bytes() == pages[1].read_bytes()
    assert found.mistakes is not None


def test_clients_models_are_measured_each_or_one(store):
    run = fc.train(
        "fedrep", store, fc.partition(store, "feature-shift"), rounds=1, settings={"batch": 4}
    )
    every = fc.evaluate(run, store=store, split="test")
    assert every.clients is not None
    assert every.accuracy == every.clients.mean
    for name, accuracy in every.clients.clients.items():
        assert fc.evaluate(run, store=store, split="test", client=name).accuracy == accuracy


@pytest.mark.slow
def test_figures_of_several_blocks_of_rows_are_those_of_one(store, tmp_path, monkeypatch):
    weak = fc.train(
        "fedavg", store, fc.partition(store, "feature-shift"), rounds=1, settings={"lr": 1e-4}
    )
    X, y = store.Xy(split=None)
    np.savez(tmp_path / "e.npz", features=X, label=y, classes=store.samples.classes)

    def figures():
        heard, page = Heard(), tmp_path / f"{len(list(tmp_path.glob('*.html')))}.html"
        own = fc.evaluate(
            weak, store=store, split="all", observer=heard, out=page, with_images=True
        )
        file = fc.evaluate(weak, embeddings=tmp_path / "e.npz", observer=heard)
        assert own.mistakes is not None
        most = [(m.row, m.truth, m.predicted) for m in own.mistakes.most]
        told = [
            (m.all, m.confusion, m.by_domain, round(m.nll, 5))
            for m in (own.measures, file.measures)
        ]
        return [heard.warnings, own.mistakes.wrong, own.mistakes.rows, most, *told]

    whole = figures()
    assert whole[1:3] == [len(X) - whole[4][0].right, len(X)]
    for module in (sources, evaluate, predictor, evaluate_run):
        monkeypatch.setattr(module, "BLOCK", 7)
    assert figures() == whole


def test_a_new_clients_model_is_that_of_the_command(store, tmp_path):
    parts = fc.partition(store, "feature-shift")
    run = fc.train("fedrep", store, parts, rounds=2, settings={"batch": 4})
    sites = fc.shard(store, parts, tmp_path / "sites")
    site = fc.Store.open(sorted(sites.glob("*.zarr"))[0])
    made = fc.personalise(
        run, site, tmp_path / "a.safetensors", name="new", rounds=1, settings={"lr": 0.05}
    )
    words = (
        "personalise --name new --rounds 1 --set lr=0.05",
        run.path,
        "--store",
        site.path,
        "-o",
        tmp_path / "b.safetensors",
    )
    told = ok(*words).data
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
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
