"""The store's promises: whole or refused, the same bytes however interrupted, and damage is never read as numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusal import corruption, store_error
from toy_store import CHUNK, KEYS, ROWS, content, create, fill, values, whole, write, writer

from fedcache.store.store import Store


def test_stores_are_private(store):
    assert store.path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("budget", ["1G", "0"], ids=["in memory", "mapped"])
@given(index=st.lists(st.integers(0, ROWS - 1), max_size=40))
def test_gathered_rows_are_those_asked_for(tmp_path_factory, budget, index):
    path = tmp_path_factory.getbasetemp() / "gather.zarr"
    store = Store.open(path) if path.exists() else whole(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDCACHE_MEMORY", budget)
        reader = store.reader(KEYS[0])
        for _ in range(2):
            got = reader.rows(np.array(index, np.int64))
            assert np.array_equal(got, values(KEYS[0])[index], equal_nan=True)
            got[...] = 7  # the caller's own
        assert np.array_equal(reader.all(), values(KEYS[0]), equal_nan=True)


def test_swapped_manifests_of_two_stores_are_found(place):
    one = whole(place / "a.zarr")
    other = create(place / "b.zarr")
    with writer(other, KEYS[0]) as w:
        for chunk in w.missing():
            write(w, chunk, KEYS[1])
        w.complete()
    (other.path / "manifest.json").write_bytes((one.path / "manifest.json").read_bytes())
    corruption(Store.open(other.path).reader(KEYS[0]).all)


def test_an_unfinished_array_is_refused_and_resumed(expected, store):
    fill(store, KEYS[0], chunks=2)
    store_error(lambda: Store.open(store.path).reader(KEYS[0]), "2 of 4 chunks")
    assert Store.open(store.path).unfinished() == [{"name": KEYS[0], "kept": 2, "chunks": 4}]
    with (store.path / f"journal-{KEYS[0]}.jsonl").open("ab") as file:
        file.write(b'{"chunk":3,"cr')  # a torn line vouches for nothing
    whole(store.path)
    assert content(store.path) == expected


def test_a_chunk_the_journal_vouches_for_is_kept_only_if_its_file_agrees(store):
    fill(store, KEYS[0], chunks=3)
    file = store.path / f"features/{KEYS[0]}/c/1/0/0"
    file.write_bytes(file.read_bytes()[:-2])
    with writer(store, KEYS[0]) as w:
        assert w.kept == [0, 2]


def test_another_how_is_refused_until_fresh(store):
    fill(store, KEYS[0], chunks=2)

    def chunks():
        return len(list((store.path / f"features/{KEYS[0]}/c").rglob("*/0/0")))

    other = writer(store, KEYS[0], how={"batch": 8})
    said = ("settings or versions: batch is 8 instead of 4", "discard the unfinished features")
    store_error(other.__enter__, *said)
    assert chunks() == 2
    with writer(store, KEYS[0], how={"batch": 8}, fresh=True) as w:
        assert w.kept == []
        assert chunks() == 0


def test_non_finite_rows_are_refused_with_their_numbers(store):
    x = np.ones((CHUNK, 1, 3), np.float32)
    with writer(store, KEYS[0]) as w:
        x[1] = np.inf
        corruption(lambda: w.write(1, x), "row 5")
        x[1] = 1e6  # finite, but not in float16
        corruption(lambda: w.write(1, x), "float16")
