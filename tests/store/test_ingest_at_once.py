"""The same content brought into a store several times at once: every call succeeds, and there is one store."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from arrays import normals
from command import apart
from refusal import store_error
from toy_store import KEYS, create, writer

from fedcache import Store
from fedcache.store.verify import verify

X = normals(0, 3000, 16)
LABELS = np.arange(3000) % 3


@pytest.mark.slow
@pytest.mark.parametrize("replaced", [False, True], ids=["new", "replace at a path"])
def test_four_processes_that_ingest_the_same_file_all_succeed(tmp_path, replaced):
    home = tmp_path / "home"
    folder = tmp_path / "elsewhere" if replaced else home / "stores"
    file = tmp_path / "e.npz"
    words = ["ingest", file, "--name", "mine"]
    if replaced:
        words += ["--store", folder / "s.zarr"]
        np.savez(file, X=X[:100], label=LABELS[:100])
        assert apart(*words, home=home).code == 0
        words.append("--replace")
    np.savez(file, X=X, label=LABELS)
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda _: apart(*words, home=home), range(4)))
    assert [call.code for call in done] == [0] * 4, [call.err for call in done]
    (found,) = folder.iterdir()  # the store, and nothing that a writer left beside it
    assert verify(found).ok
    assert Store.open(found).rows == len(X)
    assert len(Store.open(found).arrays) == 1


def test_threads_that_make_the_same_store_all_get_it(tmp_path):
    at_once = threading.Barrier(4)

    def make(number):
        at_once.wait()
        return Store.from_arrays({"mine": X}, labels=LABELS, path=tmp_path / "s.zarr")

    with ThreadPoolExecutor(4) as pool:
        stores = list(pool.map(make, range(4)))
    assert len({tuple(store.arrays) for store in stores}) == 1
    assert not verify(tmp_path / "s.zarr").problems


def test_a_second_writer_is_refused_and_a_thread_is_not_called_another_process(tmp_path):
    store = create(tmp_path / "s.zarr")
    with writer(store, KEYS[0]):
        store_error(lambda: writer(store, KEYS[0]).__enter__(), "thread", "fedcache extract --wait")
