"""Rows to choose by, on the command line: ``--validation`` of partition, train and grid."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command import fedcache, ok

import fedcache as fc
from fedcache.config import TrainConfig
from fedcache.errors import Exit, FedcacheError
from fedcache.federate.engines.flower.site import SiteRequest
from fedcache.federate.partition.partition import Partition
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


def by_hand(store: Path, parts: Partition, rows: np.ndarray, kind: str) -> float:
    """Share of ``rows`` that a head makes right, which is fitted to all training rows of all clients together."""
    opened = Store.open(store)
    (key,) = opened.arrays
    x = opened.reader(key).rows(np.arange(ROWS))[:, 0].astype(np.float64)
    label = opened.samples.label
    trained = np.concatenate([c.train for c in parts.clients])
    if kind == "fed3r":
        gram = x[trained].T @ x[trained] + 0.01 * np.eye(WIDTH)  # lam of fed3r
        scores = x @ np.linalg.solve(gram, x[trained].T @ np.eye(3)[label[trained]])
    else:
        means = np.stack([x[trained][label[trained] == c].mean(0) for c in range(3)])
        scores = x @ (means / np.linalg.norm(means, axis=1, keepdims=True)).T  # metric=cos
    return float((scores.argmax(1) == label)[rows].mean())


@pytest.mark.parametrize("kind", ["fed3r", "fedncm"])
@pytest.mark.parametrize("how", ["0.25", "split"])
def test_the_validation_accuracy_is_that_of_a_head_worked_out_by_hand(store: Path, kind: str, how: str) -> None:
    words = ("-s", "iid", "-m", 4, "--validation", how, "--store", store)
    done = ok("train", "--method", kind, *words, "--set", "feat_post=none").data
    parts = fc.partition(store, "iid", clients=4, validation=how)
    assert done["partition"]["digest"] == parts.digest
    assert parts.validation is not None
    wanted = by_hand(store, parts, parts.validation, kind)
    assert done["validation"]["mean"] == done["validation"]["pooled"] == pytest.approx(wanted, abs=1e-12)
    assert done["validation"]["rows"] == len(parts.validation)
    assert done["accuracy"]["mean"] == pytest.approx(by_hand(store, parts, parts.test, kind), abs=1e-12)
    own = [by_hand(store, parts, c.validation, kind) for c in parts.clients if c.validation is not None]
    assert done["validation"]["per_client"] == pytest.approx(own, abs=1e-12)


def test_a_run_tells_of_it_and_one_without_is_as_it_was(store: Path) -> None:
    words = ("train", "--method", "fedrep", "-s", "iid", "-m", 4, "--rounds", 4, "--seeds", "0,1", "--store", store)
    plain = ok(*words).data
    assert "validation" not in plain
    assert "validation_accuracy" not in plain["diagnostics"]
    done = ok(*words, "--validation", "0.25", "--eval-every", 2).data
    found = done["validation"]
    assert [one["round"] for one in found["per_round"]] == [2, 4]
    assert found["per_round"][-1]["mean"] == pytest.approx(found["mean"], abs=1e-12)
    assert found["mean"] == pytest.approx(np.mean(found["per_seed"]), abs=1e-12)
    assert found["std"] == pytest.approx(np.std(found["per_seed"], ddof=1), abs=1e-12)
    assert found["mean"] == found["client_mean"] == pytest.approx(np.mean(found["per_client"]), abs=1e-12)
    printed = fedcache(*words, "--validation", "0.25", "--eval-every", 2).out
    assert f"validation accuracy {100 * found['mean']:.2f} % +- " in printed
    assert "on 36 rows that nobody trains on; over all rows" in printed
    assert "validation_accuracy" not in printed
    run = fc.train("fedrep", store, fc.partition(store, "iid", clients=4, validation=0.25), rounds=4, seeds=[0, 1])
    assert run.validation.mean == found["mean"]
    assert run.frame("clients")["validation"].tolist() == found["per_client"]
    assert run.clients.validation is not None
    assert "validation accuracy" in run._repr_html_()


def test_client_stores_give_the_validation_figures_of_the_partition_they_were_cut_from(
    store: Path, tmp_path: Path
) -> None:
    name = ok("partition", "-s", "iid", "-m", 2, "--validation", "0.25", "--store", store).data["name"]
    sites = ok("shard", "--partition", name, "--out", tmp_path / "sites", "--store", store).data["path"]
    whole = ok("train", "--method", "fedrep", "--rounds", 2, "--partition", name, "--store", store).data
    apart = ok("train", "--method", "fedrep", "--rounds", 2, "--clients-from", sites).data
    assert apart["validation"] == whole["validation"]
    assert apart["accuracy"]["mean"] == whole["accuracy"]["mean"]


def test_a_site_of_a_federation_refuses_rows_to_choose_by(store: Path, tmp_path: Path) -> None:
    name = ok("partition", "-s", "iid", "-m", 2, "--validation", "0.25", "--store", store).data["name"]
    sites = ok("shard", "--partition", name, "--out", tmp_path / "sites", "--store", store).data["stores"]
    with pytest.raises(FedcacheError, match="18 validation rows, which a federation of sites does not score") as error:
        SiteRequest(Store.open(sites[0]), TrainConfig(method="fedncm")).client(None)
    assert error.value.code == Exit.USAGE
    assert "without --validation" in error.value.hint
