"""The Python API in a notebook: arrays in and out, one-line reprs, escaped HTML, pandas columns, torch rows."""

import json

import numpy as np
import pytest
from arrays import embeddings
from damage import flip_bit
from refusal import corruption, refused, store_error
from toy_store import BAD, KEYS, ROWS, in_memory, values, whole

import fedcache as fc
from fedcache.notebooks import html_table

HOSTILE = "<script>alert('x')</script>"


@pytest.fixture
def store():
    x, y, split = embeddings()
    names = np.array([HOSTILE, "b & c", "d"])
    return fc.Store.from_arrays(
        {"mine": x}, labels=names[y], splits=split, domains=np.where(y == 0, "ink", "chalk")
    )


def test_every_object_is_one_useful_line_and_plain_values(store):
    parts = fc.partition(store, "iid", clients=3)
    run = fc.train("fedavg", store, parts, rounds=1)
    grid = fc.grid("fedavg", store, parts, lr=[0.1], options={"rounds": 1})
    for thing in (store, parts, run, grid, run.traffic):
        assert "\n" not in repr(thing)
        json.dumps(thing.to_dict(), allow_nan=False)
    assert f"{run.accuracy.mean:.4f}, {run.path}" in repr(run)


def test_html_is_small_and_names_stay_text(store):
    assert "<script" not in store._repr_html_()
    assert "&lt;script&gt;" in store._repr_html_()
    hostile, tame = (html_table(t, (t,), [(t,), (None,)]) for t in (HOSTILE, "x"))
    assert hostile.count("<") == tame.count("<")


def test_frames_hold_what_results_hold(store):
    pytest.importorskip("pandas")
    parts = fc.partition(store, "iid", clients=3)
    run = fc.train("fedavg", store, parts, rounds=3, seeds=range(2), eval_every=3)
    frame = run.frame()
    assert frame["seed"].tolist() == [0, 0, 0, 1, 1, 1]
    assert frame["round"].tolist() == [1, 2, 3, 1, 2, 3]
    assert frame["bytes_up"].sum() == run.traffic.bytes_up
    assert frame.dropna(subset="accuracy")["accuracy"].tolist() == run.accuracy.per_seed
    clients = run.frame("clients")
    assert clients["client"].tolist() == run.result["clients"]
    assert clients["accuracy"].tolist() == run.accuracy.per_client
    assert set(store.frame()["class"]) == {HOSTILE, "b & c", "d"}


def test_arrays_go_in_and_come_out_and_again_are_the_same_store(own_home):
    x, y, split = embeddings()
    other = np.arange(len(x) * 2, dtype=np.float64).reshape(len(x), 2)
    store, again, changed = (
        fc.Store.from_arrays({"a": x, "b": other}, labels=labels, splits=split)
        for labels in (y, y, (y + 1) % 3)
    )
    assert store.path.parent == own_home / "stores"
    assert again.path == store.path != changed.path
    train = split == "train"
    seen, labels = store.Xy("a")
    assert np.array_equal(seen, x[train])
    assert np.array_equal(labels, y[train])
    both, _ = store.Xy(["b", "a"], split=None)
    assert np.array_equal(both, np.concatenate([other.astype(np.float32), x], axis=1))
    unknown = fc.Store.from_arrays({"a": x}, labels=np.where(y == 2, -1, y))
    assert (unknown.Xy(split=None)[1] == -1).sum() == 30, (
        "a label that is not known leaves no row out"
    )


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({"features": {"mine": np.array([[1.0, np.nan]] * 4)}}, 5, "mine"),
        ({"features": {"mine": np.ones((4, 2), int)}}, 2, "float32"),
        ({"features": {"a": np.ones((4, 2)), "b": np.ones((3, 2))}}, 2, "3 and 4 rows"),
        ({"names": ["a", "a", "b", "c"]}, 2, "unique"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(own_home, change, code, says):
    given = {"labels": [0, 1, 0, 1], "features": {"mine": np.ones((4, 2), np.float32)}, **change}
    refused(lambda: fc.Store.from_arrays(given.pop("features"), **given), says, code=code)
    assert not list(own_home.glob("stores/*"))


def test_unreadable_rows_are_in_no_view():
    with in_memory() as place:
        store = whole(place / "toy.zarr")
        good = [r for r in range(ROWS) if r not in {row for bad in BAD.values() for row in bad}]
        rows = store.torch_dataset("a", split=None)
        assert len(rows) == len(good)
        assert rows[3][0].tolist() == values(KEYS[0])[good[3], 0].astype(np.float32).tolist()
        store_error(lambda: store.Xy("c"), "no features of 'c'")


def test_a_damaged_chunk_is_refused_when_its_rows_are_read(tmp_path):
    rows = whole(tmp_path / "toy.zarr").torch_dataset("a", split=None)
    flip_bit(tmp_path / f"toy.zarr/features/{KEYS[0]}/c/1/0/0", 0)
    assert len(rows[0][0]) == 3, "chunk 0 is whole, and only what is asked for is read"
    corruption(lambda: rows[4])


@pytest.mark.slow
def test_spawned_workers_of_a_loader_read_the_same_rows(store):
    import torch
    from torch.utils.data import DataLoader

    rows = store.torch_dataset()
    assert len(rows[0][0]) == 8, "opened here, and opened again in every worker"
    loader = DataLoader(rows, batch_size=16, num_workers=2, multiprocessing_context="spawn")
    for found, wanted in zip(zip(*loader, strict=True), store.Xy(), strict=True):
        assert torch.equal(torch.cat(found), torch.from_numpy(wanted))
