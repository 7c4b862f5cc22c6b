"""``rows:FILE``: rows of numbers come as they are, in every format, and what is no number is refused."""

import pickle

import numpy as np
import pytest
from no_dataset import no_dataset
from opened import open_dataset
from test_datasets_arrays import write

from fedcache.errors import FedcacheError
from fedcache.extract.image_files import BadImage


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("<f4", (7, 2, 3)), (">f4", (7, 5)), ("f8", (7, 5)), ("i2", (7, 2, 3)), ("?", (7, 5))],
)
def test_rows_have_their_numbers_in_every_format(tmp_path, dtype, shape):
    waves = (np.random.default_rng(0).normal(size=shape) * 100).astype(dtype)
    digests = set()
    for name in ("stored.npz", "packed.npz", "h.h5"):
        path = write(tmp_path / name, waves=waves, label=np.array(list("abababa")))
        data = open_dataset(f"rows:{path}")
        assert (data.holds, data.classes) == ("rows", ("a", "b"))
        source = pickle.loads(pickle.dumps(data.source))
        for row in (6, 0, 3):
            found = source.read(row)
            assert found.dtype == np.dtype(dtype).newbyteorder("=")
            assert np.array_equal(found, waves[row]), (name, row)
        digests.add(data.digest)
    assert len(digests) == 1


def test_the_column_of_rows_is_named_by_the_user(tmp_path):
    np.savez(tmp_path / "n.npz", a=np.ones((4, 3)), b=np.ones((4, 2)), grade=[1, 2, 1, 2])
    no_dataset(f"rows:{tmp_path / 'n.npz'}", "float64")
    data = open_dataset(f"rows:{tmp_path / 'n.npz'}?rows=b&label=grade")
    assert (data.source.read(0).shape, data.classes) == ((2,), ("1", "2"))


def test_a_row_that_is_not_finite_is_a_bad_one(tmp_path):
    waves = np.zeros((3, 4), np.float32)
    waves[1, 2] = np.nan
    np.save(tmp_path / "w.npy", waves)
    data = open_dataset(f"rows:{tmp_path / 'w.npy'}")
    with pytest.raises(BadImage, match="not finite"):
        data.source.read(1)
    assert "1 cannot be read" in data.reading
    assert data.source.read(2).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "values",
    [
        np.zeros(3),
        np.zeros((3, 0)),
        np.zeros((3, 2), complex),
        np.array([["a", "b"]]),
        np.asfortranarray(np.arange(6.0).reshape(3, 2)),
    ],
)
def test_what_is_no_row_of_numbers_is_refused(tmp_path, values):
    np.savez(tmp_path / "x.npz", rows=values)
    with pytest.raises(FedcacheError, match="rows") as caught:
        open_dataset(f"rows:{tmp_path / 'x.npz'}")
    assert "image" not in caught.value.message
