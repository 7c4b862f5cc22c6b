"""The bytes of a store: a store that an earlier version wrote still trains, and other Zarr readers read ours."""

import numpy as np
import pytest
import zarr
from files_now import bytes_of
from golden_store import lay_golden

import fedcache as fc

FEATURES = (np.arange(64, dtype=np.float32).reshape(16, 4) % 7 - 3) / 4
LABELS = ("zebra", "ant", "10", "9") * 4


@pytest.mark.parametrize("name", ["store-format-1.json", "store-format-1-named-axes.json"])
def test_a_store_of_an_earlier_version_still_trains(tmp_path, name):
    """The first file is of a version that gave the axes of arrays no names."""
    lay_golden(tmp_path, name)
    store = fc.Store.open(tmp_path)
    parts = fc.partition(store, "iid", clients=2)
    assert 0.0 <= fc.train("fedncm", store, parts).accuracy["mean"] <= 1.0


# of the manifest, which is no Zarr file
@pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning")
def test_zarr_reads_the_numbers_that_were_given(tmp_path):
    path = tmp_path / "s.zarr"
    splits = [0] * 12 + [1] * 4
    fc.Store.from_arrays({"a": FEATURES}, labels=LABELS, splits=splits, name="s", path=path)
    group = zarr.open_group(path, mode="r")
    (features,) = [array for _, array in group["features"].arrays()]
    assert np.array_equal(np.asarray(features)[:, 0], FEATURES)
    samples = dict(group["samples"].arrays())
    assert np.asarray(samples["split"]).tolist() == splits
    # Classes are numbered in the order of their names.
    assert np.asarray(samples["label"]).tolist() == [
        sorted(set(LABELS)).index(label) for label in LABELS
    ]


def test_two_stores_of_the_same_rows_have_the_same_bytes(tmp_path):
    files = []
    for folder in ("a", "b"):
        path = tmp_path / folder / "s.zarr"
        fc.Store.from_arrays({"a": FEATURES}, labels=LABELS, name="s", path=path)
        files.append(bytes_of(path))
    assert files[0] == files[1]
