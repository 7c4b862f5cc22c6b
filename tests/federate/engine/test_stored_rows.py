"""Features that stay in their files: every number of a run is that of the same features in memory, to the bit."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from command import ok
from federation import cases, difference, go_tiny, tiny, wide
from methods_tried import tried
from pairs import parametrize, served
from refusal import corruption

from fedcache.federate.engine import client_data as stored
from fedcache.federate.engine.client_data import (
    FEAT_POSTS,
    StoredRows,
    prepare_features,
    stored_rows,
)
from fedcache.federate.methods import METHODS
from fedcache.runs import features
from fedcache.store import reader as maps
from fedcache.store.reader import map_rows
from fedcache.store.store import Store

N = 1300
D = 8


pytest_generate_tests = parametrize


def reads_features(name):
    return "pixels" not in METHODS[name].needs


@served(tried(cases()), ["sequential", "batched", "gram"], reads_features, in_turn=True)
def test_a_run_on_stored_rows_is_the_run_in_memory(case, execution):
    data, clients = wide() if execution == "gram" else tiny(views=4)
    half = data.x.half()
    memory = replace(data, x=half.float())
    text = None if data.text is None else data.text.float()
    memory = replace(memory, text=text)
    keys = {"execution": execution, "dtype": torch.float32}
    one = go_tiny(*case, memory, clients, **keys)
    two = go_tiny(*case, replace(memory, x=StoredRows(half)), clients, **keys)
    assert difference(one, two) == 0.0
    assert one.traffic == two.traffic


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Rows over three chunks, float16 and float32, one of them zero and none of them unit."""
    x = np.random.default_rng(0).standard_normal((N, 1, D)) * 3
    x[7] = 0.0
    features = {"half": x.astype(np.float16), "single": x.astype(np.float32)}
    path = tmp_path_factory.mktemp("stored") / "s.zarr"
    return Store.from_arrays(features, labels=np.arange(N) % 5, name="s", path=path)


def reader_of(store, backbone):
    (key,) = [key for key, info in store.arrays.items() if info.recipe["backbone"] == backbone]
    return Store.open(store.path).reader(key)


def test_what_needs_all_rows_or_several_arrays_is_read_into_memory(store, monkeypatch):
    monkeypatch.setenv("FEDCACHE_MEMORY", "0")
    half = reader_of(store, "half")
    assert stored_rows([half, reader_of(store, "single")], "none") is None
    assert [post for post in FEAT_POSTS if stored_rows([half], post) is None] == [
        "center",
        "standardize",
    ]
    monkeypatch.setenv("FEDCACHE_MEMORY", "1G")
    assert stored_rows([half], "none") is None  # small
    monkeypatch.setattr(stored, "IN_MEMORY", 4 * N * D - 1)
    assert stored_rows([half], "none") is not None


def test_rows_from_all_over_are_gathered_in_parts_that_may_stay(store, monkeypatch):
    """The system may map two megabytes around a row: a few hundred scattered ones would map all of a large array."""
    monkeypatch.setenv("FEDCACHE_MEMORY", "0")
    found = stored_rows([reader_of(store, "half")], "none")
    whole = prepare_features([reader_of(store, "half")], "none")[0]
    size = found.stored[0].nbytes
    monkeypatch.setattr(stored, "AROUND", 3 * size)
    monkeypatch.setattr(stored, "RESIDENT", N // 4 * size)
    gathered = []
    monkeypatch.setattr(stored, "mapped_bytes", lambda most: gathered.append(most) or most)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(0))
    for index in (order, order.reshape(2, -1)[:, ::3], torch.cat([order, order])):
        assert torch.equal(found[index, 0], whole[index, 0])
    assert torch.equal(found.take(order), whole[order, 0])
    assert max(gathered) <= 2 * (N // 4 + 4) * size, (
        "each part is within what may stay, beside what stayed"
    )


def test_a_mapped_array_is_the_array_and_no_write_reaches_a_file(store):
    reader = reader_of(store, "half")
    mapped = map_rows(reader)
    assert np.array_equal(mapped.values, reader.all())
    mapped.values[3] = 1.0
    assert not np.array_equal(mapped.values[3], reader.all()[3])
    mapped.release()
    assert np.array_equal(mapped.values, reader.all())


def test_chunks_that_fill_no_pages_are_not_mapped(tmp_path, monkeypatch):
    x = np.ones((600, 3), np.float16)  # 512 rows of 6 bytes end within a page
    store = Store.from_arrays({"odd": x}, name="odd", path=tmp_path / "odd.zarr")
    assert map_rows(store.reader(*store.arrays)) is None
    monkeypatch.setenv("FEDCACHE_MEMORY", "0")
    assert stored_rows([store.reader(*store.arrays)], "none") is None


def test_more_chunks_than_the_system_has_maps_for_are_not_mapped(store, monkeypatch):
    monkeypatch.setattr(maps, "MOST_CHUNKS", 2)
    assert map_rows(reader_of(store, "half")) is None


@pytest.mark.parametrize("damage", ["bit", "length", "place", "gone"])
def test_every_chunk_is_verified_before_a_row_is_read(tmp_path, damage):
    x = np.random.default_rng(1).standard_normal((N, D)).astype(np.float16)
    store = Store.from_arrays({"half": x}, name="s", path=tmp_path / "s.zarr")
    files = sorted(Path(store.path).glob("features/*/c/*/0/0"), key=lambda f: int(f.parts[-3]))
    raw = files[1].read_bytes()
    files[1].unlink()
    if damage != "gone":
        found = {
            "bit": raw[:100] + bytes([raw[100] ^ 1]) + raw[101:],
            "length": raw[:-1],
            "place": files[0].read_bytes(),
        }
        files[1].write_bytes(found[damage])
    corruption(lambda: map_rows(Store.open(store.path).reader(*store.arrays)), "chunk 1")


@pytest.mark.parametrize(
    ("backbone", "post"),
    [("half", "none"), ("single", "l2"), ("half", "l2_concat"), ("single", "sign")],
)
def test_a_command_gives_the_same_result_with_any_limit_of_memory(
    store, tmp_path, monkeypatch, backbone, post
):
    words = (
        f"train --method fedavg --backbones {backbone} --set feat_post={post} --scheme iid "
        "--clients 4 --rounds 2 --store",
        store.path,
    )
    found = []
    in_memory = []
    for budget in ("1G", "0"):
        monkeypatch.setenv("FEDCACHE_MEMORY", budget)
        read = []
        monkeypatch.setattr(
            features, "stored_rows", lambda *a, kept=read: kept.append(stored_rows(*a)) or kept[-1]
        )
        ok(*words, "--runs", tmp_path / budget)
        (result,) = (tmp_path / budget).rglob("result.json")
        (model,) = (tmp_path / budget).rglob("seed-0.safetensors")
        found.append((result.read_bytes(), model.read_bytes()))
        in_memory.append(read[0] is None)
    assert found[0] == found[1]
    assert in_memory == [True, False]
