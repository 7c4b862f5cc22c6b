"""Models of a federation: the server's predicts as that of a run in process, and every site keeps its own."""

from pathlib import Path

import numpy as np
import pytest
from command import data_of
from damage import flip_bit
from failing_command import must_fail_corrupt
from refusal import training_error
from setting_lines import set_to
from test_site_claims import federated, node_of, shards  # noqa: F401
from tolerance import SUMS, close

from fedcache.commands.train import model_lines
from fedcache.federate.engines.flower.site import SiteJob
from fedcache.models.predictor import Predictor
from fedcache.models.saved_model import SavedModel
from fedcache.runs.predict_run import load_seed
from fedcache.store.store import Store


def features(path):
    """Rows of a shard, labels, and which of them test."""
    store = Store.open(path)
    (key,) = store.arrays
    return (
        store.reader(key).all()[:, 0],
        store.samples.label,
        np.flatnonzero(store.samples.split == 1),
    )


@pytest.mark.parametrize("method", ["fedavg", "fed3r", "fedncm"])
def test_the_server_saves_the_model_that_a_run_in_process_saves(method, grid, sites, tmp_path):
    settings = {"fedavg": set_to("head=linear lr=0.1 opt=sgd")}.get(method, {})
    run = federated(grid, tmp_path, method=method, set=settings, rounds=2)
    words = [w for k, v in settings.items() for w in ("--set", f"{k}={v}")]
    line = f"train --rounds 2 --participation all --method {method} --clients-from"
    here = data_of(line, sites, *words)
    far = load_seed(run.path)
    # The line for the sites names the file, which is enough to predict.
    at_a_site = model_lines(run.path, run.result)[1]
    file = next((run.path / "models").glob("*.safetensors"))
    assert str(file) in at_a_site
    assert f"fedcache predict {file.name}" in at_a_site
    store = next(sites.glob("*.zarr"))
    assert data_of(f"predict {file} --store {store}")["rows"]
    near = load_seed(Path(here["path"]))
    assert far.facts.recipes == near.facts.recipes
    assert far.facts.classes == near.facts.classes == ("a", "b", "c", "d")
    for shard in sorted(sites.glob("*.zarr")):
        x, _, _ = features(shard)
        assert close(Predictor((far,)).scores(x), Predictor((near,)).scores(x), SUMS)


@pytest.mark.parametrize("method", ["fedproto", "ditto", "solo"])
def test_a_site_keeps_the_model_that_it_was_scored_with(method, grid, tmp_path):
    run = federated(grid, tmp_path, method=method, set={}, rounds=2)
    assert load_seed(run.path).clients == []  # no client's model is at the server
    for name, claimed in zip(
        run.result["clients"], run.result["accuracy"]["per_client"], strict=True
    ):
        site = grid.sites[node_of(grid, name)]
        (file,) = (site.state / "models").glob("*.safetensors")
        model = SavedModel.load(file)
        assert model.clients == [name]
        assert model.facts.method == method
        assert model.facts.rounds == 2
        x, label, test = features(site.path)
        predictor = Predictor((model,))
        guess = predictor.predicted(predictor.scores(x[test]))
        assert float((guess == label[test]).mean()) == claimed
    # the file alone is enough, and its one client need not be named
    assert len(data_of(f"predict {file} --store {site.path}")["rows"]) == len(x)


def test_where_all_sites_have_the_servers_model_none_keeps_one(grid, tmp_path):
    federated(grid, tmp_path, rounds=1)
    assert not list((tmp_path / "state").rglob("models"))


def test_a_job_whose_name_is_a_path_is_refused():
    """The name is part of the paths of the site's files, and it comes from the server."""
    words = {"id": "../../elsewhere", "hp": {}, "seed": 0, "round": 1, "since": 0}
    training_error(lambda: SiteJob.from_words(words), "not a valid job name")


def test_a_model_of_a_site_that_was_changed_is_refused(grid, sites, tmp_path):
    federated(grid, tmp_path, method="fedproto", set={}, rounds=1)
    file = next((tmp_path / "state").rglob("models/*.safetensors"))
    flip_bit(file)
    must_fail_corrupt("", "predict", file, "--store", next(sites.glob("*.zarr")))
