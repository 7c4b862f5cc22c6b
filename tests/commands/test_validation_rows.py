"""Rows to choose by, on the command line: ``--validation`` of partition, train and grid."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command import fedcache, ok

from fedcache.errors import Exit
from fedcache.store.store import Store

ROWS, WIDTH = 240, 8


def made(place: Path) -> Path:
    """Three classes that overlap; three of five rows train, one tests, one is of split validation."""
    rng = np.random.default_rng(3)
    label = rng.integers(0, 3, ROWS)
    x = (rng.normal(size=(3, WIDTH))[label] + 0.9 * rng.normal(size=(ROWS, WIDTH))).astype("f4")
    splits = np.array(["train", "train", "train", "test", "validation"])[np.arange(ROWS) % 5]
    store = Store.from_arrays({"mine": x}, labels=label, splits=splits, path=place / "points.zarr")
    return store.path


@pytest.fixture
def store(once: Callable[[Callable[[Path], Path]], Path]) -> Path:
    return once(made)


def test_a_partition_tells_of_its_validation_rows(store: Path) -> None:
    plain = ok("partition", "--scheme", "iid", "--clients", 4, "--store", store).data
    done = ok("partition", "--scheme", "iid", "--clients", 4, "--validation", "0.25", "--store", store)
    clients, before = done.data["clients"], plain["clients"]
    assert done.data["name"] == "iid-m4-val0.25-s0"
    assert done.data["args"]["validation"] == 0.25
    assert [c["train"] + c["validation"] for c in clients] == [c["train"] for c in before] == [36] * 4
    assert done.data["validation"] == sum(c["validation"] for c in clients) == 36
    assert "validation" not in plain
    assert "validation" not in before[0]
    printed = fedcache("partition", "-s", "iid", "-m", 4, "--validation", "0.25", "--store", store).out
    assert "36 validation rows taken from the training rows (share 0.25)" in printed
    assert "train   validation   test" in printed
    split = ok("partition", "--scheme", "iid", "--clients", 4, "--validation", "split", "--store", store).data
    assert [c["validation"] for c in split["clients"]] == [48] * 4
    assert [c["train"] for c in split["clients"]] == [36] * 4


def test_shards_hold_them_as_split_validation(store: Path, tmp_path: Path) -> None:
    ok("partition", "--scheme", "iid", "--clients", 2, "--validation", "0.25", "--store", store)
    done = ok("shard", "--partition", "iid-m2-val0.25-s0", "--out", tmp_path / "sites", "--store", store)
    splits = [np.bincount(Store.open(path).samples.split, minlength=3).tolist() for path in done.data["stores"]]
    assert splits == [[54, 48, 18], [54, 48, 18]]


@pytest.mark.parametrize("wrong", ["1", "0", "a fifth", "-0.2", "nan"])
def test_a_share_that_is_none_is_refused_in_one_sentence(store: Path, wrong: str) -> None:
    done = fedcache("partition", "--scheme", "iid", f"--validation={wrong}", "--store", store)
    assert done.code == Exit.USAGE
    assert "expected a share above 0 and below 1 or split" in done.err
    assert "Traceback" not in done.err
