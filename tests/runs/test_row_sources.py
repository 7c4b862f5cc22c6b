"""What a run reads of one store or of the stores of its clients, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heard import Heard

import fedcache as fc
from fedcache.config import Home, PartitionConfig, TrainConfig
from fedcache.errors import Exit, FedcacheError
from fedcache.federate.methods import METHODS
from fedcache.process import Stop
from fedcache.progress import Silent
from fedcache.runs.client_stores import open_clients
from fedcache.runs.features import RunInputs, read_client_stores
from fedcache.runs.open_run import prepare_run, row_source
from fedcache.runs.row_sources import InputCache, Preparation, ShardRows, StoreRows
from fedcache.store.export import write_shards

ROWS = 20


def features(views: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(ROWS, views, width)).astype(np.float32)


def store(labels: Any = None, arrays: dict[str, Any] | None = None, **changes: Any) -> fc.Store:
    """20 rows of two classes and two domains, the first 15 of them for training; arrays of 4 views and of 2."""
    y = np.arange(ROWS) % 2 if labels is None else labels
    domains = np.where(np.arange(ROWS) % 4 < 2, "ink", "pen")
    split = np.where(np.arange(ROWS) < 15, "train", "test")
    made = arrays or {"a": features(4, 3), "b": features(2, 2, 1)}
    return fc.Store.from_arrays(made, labels=y, domains=domains, classes=("cat", "dog"), splits=split, **changes)


def prepared(place: fc.Store, method: str, cache: InputCache | None = None, **config: Any) -> tuple[RunInputs, Heard]:
    heard = Heard()
    asked = TrainConfig(method=method, store=str(place.path), participation="all", **config)
    preparation = Preparation(Home.from_environment(), heard, Stop(), cache=cache or InputCache())
    return prepare_run(asked, row_source(asked, PartitionConfig("iid", 3), preparation)), heard


def test_all_arrays_are_concatenated_as_far_as_they_have_views() -> None:
    place = store()
    inputs, heard = prepared(place, "fedavg")
    keys = list(place.arrays)
    widths = tuple(place.arrays[key].shape[2] for key in keys)
    parts = [place.reader(key).all()[:, :2] for key in keys]
    assert torch.equal(inputs.data.x, torch.from_numpy(np.concatenate(parts, axis=2)))
    assert inputs.data.widths == widths
    counts = ", ".join(str(place.arrays[key].shape[1]) for key in keys)
    assert f"Views: 2 of each backbone, as all of them have ({counts})." in heard.notes
    assert (inputs.features.arrays, inputs.backbones) == (
        tuple(keys),
        tuple(sorted("ab", key=lambda n: keys[0][0] != n)),
    )
    assert inputs.features.digests == tuple(place.arrays[key].digest for key in keys)
    assert (inputs.domains, inputs.classes) == (("ink", "pen"), ("cat", "dog"))
    assert inputs.data.domain is not None
    assert inputs.data.domain.tolist() == [int(i % 4 >= 2) for i in range(ROWS)]
    assert inputs.data.y.tolist() == [i % 2 for i in range(ROWS)]
    d = place.dataset
    assert inputs.dataset == {"slug": d["slug"], "digest": d["digest"], "rows": ROWS, "ok": ROWS}
    assert inputs.choices == {"backbones": list(inputs.backbones)}, "the store was named"
    assert inputs.seconds.keys() == {"extract", "load"}
    assert min(inputs.seconds.values()) >= 0
    alone, heard = prepared(place, "fedavg", backbones=("b",))
    assert (alone.data.widths, alone.backbones) == ((2,), ("b",))
    assert not [note for note in heard.notes if note.startswith("Views")]


def test_a_store_that_was_found_is_part_of_what_runs_it_again() -> None:
    place = store()
    preparation = Preparation(Home.from_environment(), Silent(), Stop())
    for config, named in ((TrainConfig(method="fedavg"), False), (TrainConfig(method="fedavg", dataset="d"), True)):
        source = StoreRows(config, PartitionConfig("iid", 3), preparation)
        source.store = place
        key = next(iter(place.arrays))
        wanted = {"backbones": [str(place.arrays[key].recipe["backbone"])]}
        assert source.choices([key]) == (wanted if named else {"store": str(place.path.resolve()), **wanted})


def test_rows_without_labels_are_told_of_where_something_would_be_scored() -> None:
    train_only = store(np.where(np.arange(ROWS) < 15, np.arange(ROWS) % 2, -1), name="train-only")
    unscored = "No test row has a label: the models are made, and nothing is scored."
    assert unscored in prepared(train_only, "fedavg")[1].notes
    one_known = store(np.where(np.arange(ROWS) < 16, np.arange(ROWS) % 2, -1), name="one-known")
    assert unscored not in prepared(one_known, "fedavg")[1].notes
    test_only = store(np.where(np.arange(ROWS) < 15, -1, 1), name="test-only")
    no_probe = "No training row has a label: no linear probe can be trained, and nothing is scored."
    assert no_probe in prepared(test_only, "fedavg-simclr")[1].notes
    assert no_probe not in prepared(train_only, "fedavg-simclr")[1].notes
    worded = store(np.where(np.arange(ROWS) < 15, -1, 1), name="worded", text={"a": np.eye(2, 3)})
    assert no_probe not in prepared(worded, "clip-zs")[1].notes, "text needs no probe"


@pytest.mark.parametrize(("views", "said"), [(1, True), (2, True), (3, False)])
def test_too_few_views_for_augmentation_are_told_of(views: int, said: bool) -> None:
    _, heard = prepared(store(arrays={"a": features(views, 3)}), "fedavg-simclr")
    note = (
        f"Views stored of each image: {views}. fedavg-simclr wants augmentations: approx; `fedcache extract --views 8` "
        "stores some."
    )
    assert (note in heard.notes) is said
    _, other = prepared(store(arrays={"a": features(views, 3)}), "fedavg")
    assert not [n for n in other.notes if n.startswith("Views stored")]


def test_points_of_a_grid_read_features_draw_rows_and_warn_once() -> None:
    place, cache = store(np.zeros(ROWS, int)), InputCache()
    first, heard = prepared(place, "fedavg", cache)
    assert len([w for w in heard.warnings if "only one class among the training rows (cat)" in w]) == 1
    again, heard = prepared(place, "fedavg", cache, set={"lr": "0.5"})
    assert heard.warnings == []
    assert again.features is first.features
    assert again.partitions is first.partitions
    scaled, _ = prepared(place, "fedavg", cache, set={"feat_post": "l2"})
    assert scaled.features is not first.features
    assert torch.allclose(scaled.data.x.norm(dim=2)[:, :1], torch.ones(ROWS, 1) * scaled.data.x.norm(dim=2)[0, 0])
    other, _ = prepared(place, "fedavg", cache, domain=("ink",))
    assert other.partitions is not first.partitions


def test_a_domain_that_is_not_there_is_corrected() -> None:
    with pytest.raises(FedcacheError, match=r"^Unknown domain 'inc'. Did you mean 'ink'\?"):
        prepared(store(), "fedavg", domain=("pen", "inc"))


def sites(place: fc.Store, folder: Path) -> Path:
    """Two clients of different rows that share the test rows 15 to 19."""
    test = np.arange(15, ROWS)
    write_shards(place, [("p", np.array([1, 5, 7]), test), ("q", np.array([0, 5, 9, 14]), test)], folder)
    return folder


def test_shards_do_not_go_where_others_are(tmp_path: Path) -> None:
    place, rows = store(), np.array([0, 1])
    folder = sites(place, tmp_path / "sites")
    assert sites(place, folder) == folder, "the same ones are there already"
    with pytest.raises(FedcacheError) as caught:
        write_shards(place, [("p", rows, rows)], folder)
    assert caught.value.message == f"{folder} holds 1 stores that are not of this partition, 1-q.zarr for one."
    assert caught.value.hint == "Name another folder:  --out DIR"
    with pytest.raises(FedcacheError, match="with digest"):
        write_shards(place, [("p", rows, rows), ("q", rows, rows)], folder)


def test_rows_that_several_client_stores_hold_are_read_once(tmp_path: Path) -> None:
    place = store(text={"a": np.eye(2, 3, dtype=np.float32)})
    folder, heard = sites(place, tmp_path / "sites"), Heard()
    config = TrainConfig(method="fed3r", clients_from=str(folder), seeds="3,1", backbones=("a",), participation="all")
    preparation = Preparation(Home.from_environment(), heard, Stop())
    inputs = prepare_run(config, row_source(config, PartitionConfig(), preparation))
    rows = [0, 1, 5, 7, 9, 14, 15, 16, 17, 18, 19]  # each once, in the parent's order
    (key,) = inputs.features.arrays
    assert torch.allclose(
        inputs.data.x, torch.nn.functional.normalize(torch.from_numpy(place.reader(key).all()[rows]), dim=-1)
    ), "a backbone with text: to the sphere"
    assert inputs.data.y.tolist() == [r % 2 for r in rows]
    assert inputs.data.domain is not None
    assert inputs.data.domain.tolist() == [int(r % 4 >= 2) for r in rows]
    partition = inputs.partitions[3]
    assert inputs.partitions == {3: partition, 1: partition}
    assert [(c.name, c.train.tolist(), c.test.tolist()) for c in partition.clients] == [
        ("p", [1, 2, 3], [6, 7, 8, 9, 10]), ("q", [0, 2, 4, 5], [6, 7, 8, 9, 10]),
    ]  # fmt: skip
    assert partition.test.tolist() == [6, 7, 8, 9, 10]
    assert partition.validation is None
    assert (partition.dataset, partition.pool) == (place.dataset["digest"], 11)
    assert inputs.dataset == {"slug": inputs.dataset["slug"], "digest": place.dataset["digest"], "rows": 17, "ok": 17}
    assert inputs.choices == {"backbones": ["a"]}
    assert heard.notes[0] == f"2 client stores in {folder}."
    assert inputs.seconds["extract"] == 0.0


def test_client_stores_bring_the_rows_to_choose_by(tmp_path: Path) -> None:
    place, test = store(), np.arange(15, ROWS)
    held = [("p", np.array([1, 7]), test), ("q", np.array([0, 9, 14]), test)]
    write_shards(place, held, tmp_path / "sites", [np.array([5, 6]), None])
    config = TrainConfig(method="fedncm", clients_from=str(tmp_path / "sites"), backbones=("a",), participation="all")
    inputs = prepare_run(
        config, row_source(config, PartitionConfig(), Preparation(Home.from_environment(), Heard(), Stop()))
    )
    (partition,) = inputs.partitions.values()
    # Rows 0, 1, 5, 6, 7, 9, 14, 15, .. of the parent: 5 and 6 are the third and the fourth.
    assert [c.validation.tolist() for c in partition.clients if c.validation is not None] == [[2, 3], []]
    assert [c.train.tolist() for c in partition.clients] == [[1, 4], [0, 5, 6]]


def test_what_client_stores_cannot_serve_is_refused(tmp_path: Path) -> None:
    folder = sites(store(), tmp_path / "sites")

    def refused(method: str, message: str, hint: str, **config: Any) -> None:
        asked = TrainConfig(method=method, clients_from=str(folder), **config)
        source = ShardRows(asked, folder, Preparation(Home.from_environment(), Silent(), Stop()))
        with pytest.raises(FedcacheError) as caught:
            source.open(METHODS[method], METHODS[method].resolve())
        assert (caught.value.code, caught.value.message, caught.value.hint) == (Exit.USAGE, message, hint)

    refused(
        "fedavg-scratch", "fedavg-scratch trains on images, and --clients-from on the features of client stores.",
        "Train on the store they were cut from: fedcache train --method fedavg-scratch --partition NAME",
    )  # fmt: skip
    for config in ({"client_backbones": ("a",)}, {"client_set": {"dim": "3"}}):
        refused(
            "solo",
            "--client-backbones and --client-set deal differences to clients by number, --clients-from to stores.",
            "Train on the store they were cut from:  fedcache train --partition NAME", **config,
        )  # fmt: skip


def test_client_stores_without_labels_are_refused_where_they_are_read(tmp_path: Path) -> None:
    folder = sites(store(np.where(np.arange(ROWS) == 9, -1, np.arange(ROWS) % 2)), tmp_path / "sites")
    config = TrainConfig(method="fed3r", clients_from=str(folder))
    preparation = Preparation(Home.from_environment(), Silent(), Stop())
    with pytest.raises(FedcacheError) as caught:
        prepare_run(config, row_source(config, PartitionConfig(), preparation))
    assert caught.value.message == f"fed3r needs labels, and rows of the client stores in {folder} have none."
    assert caught.value.hint == "Add labels to the dataset, then:  fedcache shard --partition NAME --out DIR"


def test_a_folder_without_client_stores_is_told_what_makes_them(tmp_path: Path) -> None:
    def refused(message: str, hint: str) -> None:
        with pytest.raises(FedcacheError) as caught:
            open_clients(tmp_path / "sites")
        assert (caught.value.code, caught.value.message, caught.value.hint) == (Exit.STORE, message, hint)

    make = "fedcache shard --partition NAME --out DIR"
    refused(f"There is no directory {tmp_path / 'sites'}.", f"{make}   makes client stores.")
    (tmp_path / "site").mkdir()
    refused(f"There is no directory {tmp_path / 'sites'}. Did you mean 'site'?", f"{make}   makes client stores.")
    (tmp_path / "sites").mkdir()
    refused(f"{tmp_path / 'sites'} holds no client stores.", f"{make}   makes them.")
    folder = sites(store(), tmp_path / "sites")
    (folder / "0-p.zarr").rename(tmp_path / "p.zarr")
    refused(f"{folder} lacks client 0: it has 1 stores, numbered up to 1.", f"{make}   writes what is missing.")
    fc.Store.from_arrays({"a": features(1, 2)}, path=folder / "0-p.zarr")
    refused(f"{folder / '0-p.zarr'} is not a client's store.", make)


def test_features_of_client_stores_are_placed_by_row() -> None:
    first = store()
    key = next(iter(first.arrays))
    places = [np.arange(ROWS)[::-1].copy()]
    found = read_client_stores(METHODS["fedavg"], {}, [first], [key], places, "none", np.arange(3))
    assert torch.equal(found.data.x, torch.from_numpy(first.reader(key).all()[::-1].copy()))
    assert found.data.y.tolist() == [i % 2 for i in reversed(range(ROWS))]
    assert found.arrays == (key,)
