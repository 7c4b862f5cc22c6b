"""What a run reads of one store or of the stores of its clients, and what is said of it."""

import shutil

import numpy as np
import pytest
import torch
from heard import Heard
from refusal import refused, store_error

import fedcache as fc
from fedcache.config import Home, PartitionConfig, TrainConfig
from fedcache.errors import FedcacheError
from fedcache.process import Stop
from fedcache.runs.features import InputCache, Preparation
from fedcache.runs.loop import prepare_run, row_source
from fedcache.runs.store_choice import open_clients
from fedcache.store.export import write_shards

ROWS = 20


def store(labels=10 * (0, 1), classes=("cat", "dog"), **changes):
    """20 rows of two classes and two domains, the first 15 of them for training; arrays of 4 views and of 2."""
    rng = np.random.default_rng(0)
    arrays = {key: rng.normal(size=(ROWS, *shape)) for key, shape in (("a", (4, 3)), ("b", (2, 2)))}
    domains = np.where(np.arange(ROWS) % 4 < 2, "ink", "pen")
    split = np.where(np.arange(ROWS) < 15, "train", "test")
    return fc.Store.from_arrays(
        arrays, labels=labels, domains=domains, classes=classes, splits=split, **changes
    )


def prepared(place, method, cache=None, **config):
    heard = Heard()
    asked = TrainConfig(method=method, store=str(place.path), participation="all", **config)
    preparation = Preparation(Home.from_environment(), heard, Stop(), cache=cache or InputCache())
    return prepare_run(asked, row_source(asked, PartitionConfig("iid", 3), preparation)), heard


def test_all_arrays_are_concatenated_as_far_as_they_have_views():
    place = store()
    inputs, heard = prepared(place, "fedavg")
    keys = tuple(place.arrays)
    parts = [place.reader(key).all()[:, :2] for key in keys]
    assert torch.equal(inputs.data.x, torch.from_numpy(np.concatenate(parts, axis=2)))
    assert inputs.data.widths == (3, 2)
    assert any(note.startswith("Training uses 2 view(s) of each backbone") for note in heard.notes)
    assert inputs.features.arrays == keys
    assert inputs.features.digests == tuple(place.arrays[key].digest for key in keys)
    assert inputs.domains == ("ink", "pen")
    assert inputs.classes == ("cat", "dog")
    assert inputs.data.domain.tolist() == 5 * [0, 0, 1, 1]
    assert inputs.data.y.tolist() == 10 * [0, 1]
    assert inputs.dataset["ok"] == ROWS


def test_points_of_a_grid_read_features_draw_rows_and_warn_once():
    place = store(np.zeros(ROWS, int))
    cache = InputCache()
    first, heard = prepared(place, "fedavg", cache)
    assert len([warning for warning in heard.warnings if "(cat)" in warning]) == 1
    again, heard = prepared(place, "fedavg", cache, set={"lr": "0.5"})
    assert heard.warnings == []
    assert again.features is first.features
    assert again.partitions is first.partitions
    scaled, _ = prepared(place, "fedavg", cache, set={"feat_post": "l2"})
    assert scaled.features is not first.features
    other, _ = prepared(place, "fedavg", cache, domain=("ink",))
    assert other.partitions is not first.partitions


def sites(place, folder):
    """Two clients of different rows that share the test rows 15 to 19."""
    test = np.arange(15, ROWS)
    held = [("p", np.array([1, 5, 7]), test), ("q", np.array([0, 5, 9, 14]), test)]
    write_shards(place, held, folder)
    return folder


def test_shards_do_not_go_where_others_are(tmp_path):
    place = store()
    rows = np.array([0, 1])
    folder = sites(place, tmp_path / "sites")
    assert sites(place, folder) == folder, "the same ones are there already"
    for clients, said in (("p", r"1-q\.zarr"), ("pq", "digest")):
        with pytest.raises(FedcacheError, match=said):
            write_shards(place, [(client, rows, rows) for client in clients], folder)


def of_shards(folder, method, **config):
    asked = TrainConfig(method=method, clients_from=str(folder), participation="all", **config)
    preparation = Preparation(Home.from_environment(), Heard(), Stop())
    return prepare_run(asked, row_source(asked, PartitionConfig(), preparation))


def test_rows_that_several_client_stores_hold_are_read_once(tmp_path):
    place = store(text={"a": np.eye(2, 3, dtype=np.float32)})
    inputs = of_shards(sites(place, tmp_path / "sites"), "fed3r", seeds="3,1", backbones=("a",))
    rows = [0, 1, 5, 7, 9, 14, 15, 16, 17, 18, 19]  # each once, in the parent's order
    (key,) = inputs.features.arrays
    x = torch.nn.functional.normalize(torch.from_numpy(place.reader(key).all()[rows]), dim=-1)
    assert torch.allclose(inputs.data.x, x), "a backbone with text: to the sphere"
    assert inputs.data.y.tolist() == [r % 2 for r in rows]
    assert inputs.data.domain.tolist() == [int(r % 4 >= 2) for r in rows]
    partition = inputs.partitions[3]
    assert inputs.partitions == {3: partition, 1: partition}
    trained = {c.name: c.train.tolist() for c in partition.clients}
    assert trained == {"p": [1, 2, 3], "q": [0, 2, 4, 5]}
    assert partition.test.tolist() == [6, 7, 8, 9, 10]
    assert partition.validation is None
    assert inputs.dataset["digest"] == place.dataset["digest"]
    assert inputs.dataset["rows"] == 17


def test_client_stores_bring_the_rows_to_choose_by(tmp_path):
    place = store()
    test = np.arange(15, ROWS)
    held = [("p", np.array([1, 7]), test), ("q", np.array([0, 9, 14]), test)]
    write_shards(place, held, tmp_path / "sites", [np.array([5, 6]), None])
    (partition,) = of_shards(tmp_path / "sites", "fedncm", backbones=("a",)).partitions.values()
    # Rows 0, 1, 5, 6, 7, 9, 14, 15, .. of the parent: 5 and 6 are the third and the fourth.
    assert [c.validation.tolist() for c in partition.clients] == [[2, 3], []]
    assert [c.train.tolist() for c in partition.clients] == [[1, 4], [0, 5, 6]]


@pytest.mark.parametrize(
    ("method", "config"),
    [
        ("fedavg-scratch", {}),
        ("solo", {"client_backbones": ("a",)}),
        ("solo", {"client_set": {"dim": "3"}}),
    ],
)
def test_what_client_stores_cannot_serve_is_refused(tmp_path, method, config):
    refused(
        lambda: of_shards(sites(store(), tmp_path / "sites"), method, **config), "--clients-from"
    )


def test_a_folder_without_client_stores_is_refused(tmp_path):
    def unopened(said):
        store_error(lambda: open_clients(tmp_path / "sites"), said)

    unopened("no directory")
    (tmp_path / "site").mkdir()
    unopened("'site'")
    (tmp_path / "sites").mkdir()
    unopened("no client stores")
    folder = sites(store(), tmp_path / "sites")
    shutil.copytree(folder / "0-p.zarr", folder / "9-copy.zarr")
    unopened("9-copy.zarr")
    shutil.rmtree(folder / "9-copy.zarr")
    shutil.rmtree(folder / "0-p.zarr")
    unopened("client 0")
    other = sites(store(classes=("cat", "cow")), tmp_path / "others")
    shutil.copytree(other / "0-p.zarr", folder / "0-p.zarr")
    unopened("1-q.zarr and 0-p.zarr")
    shutil.rmtree(folder / "0-p.zarr")
    store(path=folder / "0-p.zarr")
    unopened("0-p.zarr is not a client store")
