"""``rows:FILE``: rows of numbers come as they are, in every format, and what is no number is refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from fedcache.errors import FedcacheError
from fedcache.extract.datasets import Dataset, open_dataset
from fedcache.extract.digests import DigestMemory
from fedcache.extract.image_files import BadImage


def opened(spec: str, tmp_path: Path) -> Dataset:
    return open_dataset(spec, memory=DigestMemory(tmp_path / "memory"))


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "f8", "f2", "i2", "u1", "?"])
@pytest.mark.parametrize("shape", [(7, 5), (7, 2, 3)])
def test_rows_have_their_numbers_in_every_format(tmp_path, dtype, shape):
    waves = (np.random.default_rng(0).normal(size=shape) * 100).astype(dtype)
    labels = np.array(list("abababa"))
    np.savez(tmp_path / "stored.npz", waves=waves, label=labels, site=np.arange(7) % 2)
    np.savez_compressed(tmp_path / "packed.npz", waves=waves, label=labels, site=np.arange(7) % 2)
    with h5py.File(tmp_path / "h.h5", "w") as file:
        file["waves"], file["label"], file["site"] = waves, labels.astype("S1"), np.arange(7) % 2
    digests = set()
    for name in ("stored.npz", "packed.npz", "h.h5"):
        data = opened(f"rows:{tmp_path / name}", tmp_path)
        assert (data.holds, data.classes, list(data.groups)) == ("rows", ("a", "b"), ["site"])
        source = pickle.loads(pickle.dumps(data.source))
        for row in (6, 0, 3):
            found = source.read(row)
            assert found.dtype == np.dtype(dtype).newbyteorder("=")
            assert np.array_equal(found, waves[row]), (name, row)
        digests.add(data.digest)
    assert len(digests) == 1


def test_splits_in_names_and_a_column_that_is_named(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "s.npz", x_train=rng.normal(size=(4, 3)), x_test=rng.normal(size=(2, 3)), y_train=[0, 1, 0, 1],
             y_test=[0, 1])  # fmt: skip
    assert opened(f"rows:{tmp_path / 's.npz'}", tmp_path).split.tolist() == [1, 1, 0, 0, 0, 0]
    np.savez(tmp_path / "n.npz", a=rng.normal(size=(4, 3)), b=rng.normal(size=(4, 2)), grade=[1, 2, 1, 2])
    with pytest.raises(FedcacheError, match="no column of rows; it holds a float64"):
        opened(f"rows:{tmp_path / 'n.npz'}", tmp_path)
    data = opened(f"rows:{tmp_path / 'n.npz'}?rows=b&label=grade", tmp_path)
    assert (data.source.read(0).shape, data.classes) == ((2,), ("1", "2"))
    assert "rows float64 [2] from b" in data.reading


def test_a_row_that_is_not_finite_is_a_bad_one(tmp_path):
    waves = np.zeros((3, 4), np.float32)
    waves[1, 2] = np.nan
    np.save(tmp_path / "w.npy", waves)
    data = opened(f"rows:{tmp_path / 'w.npy'}", tmp_path)
    with pytest.raises(BadImage, match="not finite"):
        data.source.read(1)
    assert "1 cannot be read and will be quarantined" in data.reading
    assert data.source.read(2).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (np.zeros(3), "no column of rows"),
        (np.zeros((3, 0)), "expected numbers"),
        (np.zeros((3, 2), complex), "expected numbers"),
        (np.array([["a", "b"]]), "expected numbers"),
        (np.asfortranarray(np.arange(6.0).reshape(3, 2)), "stored column by column"),
    ],
)
def test_what_is_no_row_of_numbers_is_refused(tmp_path, values: Any, said):
    np.savez(tmp_path / "x.npz", rows=values)
    with pytest.raises(FedcacheError, match=said) as refused:
        opened(f"rows:{tmp_path / 'x.npz'}", tmp_path)
    assert "image" not in refused.value.message


def test_a_truncated_file_is_one_sentence(tmp_path):
    np.savez(tmp_path / "x.npz", rows=np.zeros((30, 20)))
    whole = (tmp_path / "x.npz").read_bytes()
    (tmp_path / "x.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FedcacheError, match=r"x\.npz"):
        opened(f"rows:{tmp_path / 'x.npz'}", tmp_path)
