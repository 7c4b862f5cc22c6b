"""``extract --augment``: policies as arrays of a store, the same bits however they are computed, plain predictions."""

from pathlib import Path

import numpy as np
import pytest
from command import data_of, ok
from failing_command import must_fail, must_fail_store
from pictures import folder

from fedcache import Store

pytestmark = pytest.mark.slow

WORDS = "--backbones random-projection --recipe random-projection:size=16 --batch 4"
POLICY = "flip=0.5,rotate=30,gaussian-noise=20:0.1"


@pytest.fixture
def images(tmp_path):
    return folder(tmp_path / "shapes", train=8, test=3)


def extracted(images, *words):
    """Key of the array and the store after one extraction."""
    done = data_of(f"extract --dataset folder:{images} {WORDS}", *words)
    return done["arrays"][0]["key"], Store.open(done["path"])


def test_workers_and_chunks_change_no_bit(images, tmp_path):
    asked = ("--views", 3, "--augment", POLICY)
    key, alone = extracted(images, *asked, "--workers", 0, "--store", tmp_path / "a.zarr")
    for n, words in enumerate([("--workers", 2), ("--workers", 0, "--chunk-rows", 4)]):
        again, store = extracted(images, *asked, *words, "--store", tmp_path / f"{n}.zarr")
        assert again == key
        assert store.reader(key).all().tobytes() == alone.reader(key).all().tobytes()


def test_a_model_trained_on_augmented_rows_predicts_from_plain_images(images, tmp_path):
    plain, _ = extracted(images, "--workers", 0, "--store", tmp_path / "plain.zarr")
    extracted(images, "--views", 2, "--augment", "domainnet", "--workers", 0)
    key, store = extracted(images, "--views", 2, "--augment", POLICY, "--workers", 0)
    asked = "train --method fedavg --scheme iid --clients 2 --rounds 3 --set batch=4"
    must_fail(
        f"{key} (width 64, 2 views by {POLICY})",
        f"{asked} --store {store.path} --backbones random-projection --set train_view=aug",
    )
    done = data_of(f"{asked} --store {store.path} --backbones {key} --set train_view=aug")
    assert done["fidelity"] == "cached_views"
    run = Path(done["path"])
    config = run / "config.toml"
    assert key in config.read_text()
    extracted(images, "--views", 3, "--augment", "blur", "--workers", 0)
    # what was extracted since is not meant
    assert data_of(f"train --config {config}")["path"] == str(run)
    must_fail_store(
        "have only view 0",
        f"{asked} --store {tmp_path / 'plain.zarr'} --backbones {plain} --set train_view=aug",
    )
    said = [
        data_of(f"predict {run} --store {where}")["rows"]
        for where in (store.path, tmp_path / "plain.zarr")
    ]
    assert said[0] == said[1]  # of a store, its view 0 under any policy and without one
    name = store.samples.name[0]
    (row,) = data_of(f"predict {run} {images / name} --workers 0 --batch 4")["rows"]
    (same,) = [r for r in said[0] if r["name"] == name]
    assert row["class"] == same["class"]
    assert row["probability"] == pytest.approx(same["probability"], abs=1e-5)


def test_digits_are_not_flipped_and_that_is_said():
    words = f"--limit 8 {WORDS} --workers 0 --views 2 --augment flip=1"
    done = ok(f"extract --dataset digits {words}")
    assert "augmented views are not flipped" in done.err
    x = Store.open(done.data["path"]).reader(done.data["arrays"][0]["key"]).all()
    assert np.array_equal(x[:, 0], x[:, 1])
