"""The demo on embeddings in the place of its images: the same calls, the same table."""

import numpy as np
import pytest
from arrays import around
from command import data_of
from failing_command import must_fail

import fedcache as fc
from fedcache.commands import demo
from fedcache.config import PartitionConfig


@pytest.fixture
def small(monkeypatch):
    """A store whose two arrays stand for the demo's backbones; it is partitioned in two ways as there."""
    x, label = around(3, 20, 3, width=4)
    store = fc.Store.from_arrays(
        {"plain": x, "worded": x}, labels=label, text={"worded": np.eye(3, 4)}, name="small"
    )
    monkeypatch.setattr(demo, "BACKBONES", ("plain", "worded"))
    monkeypatch.setattr(demo, "extract_features", lambda *_: str(store.path))
    parts = ("dirichlet", PartitionConfig("dirichlet", 2, options={"alpha": 1.0}))
    monkeypatch.setattr(demo, "PARTITIONS", (("feature-shift", PartitionConfig("iid", 3)), parts))
    return store


def test_every_number_of_the_demo_is_a_stored_run(small, own_home, monkeypatch):
    pages = []
    monkeypatch.setattr(demo, "write_report", lambda *given, **_: pages.append(given))
    data = data_of("demo --methods 'fedavg, clip-zs' --rounds 2")
    assert data["store"] == str(small.path)
    assert data["report"] == f"{own_home}/demo.html"
    ((made, out, root),) = pages
    assert [run.result["digest"] for run in made] == [
        d for r in data["methods"] for d in r["digests"].values()
    ]
    assert out == own_home / "demo.html"
    assert root == own_home / "runs"
    fedavg, zero_shot = data["methods"]
    assert [(r["name"], r["backbone"]) for r in data["methods"]] == [
        ("fedavg", "plain"),
        ("clip-zs", "worded"),
    ]
    runs = {r["name"][:16]: r for r in data_of("runs list")["entries"]}
    for row in data["methods"]:
        for label, scheme in (("feature-shift", "iid"), ("dirichlet", "dirichlet")):
            run = runs[row["digests"][label][:16]]
            assert run["partition"].startswith(scheme)
            assert run["method"] == row["name"]
            assert run["rounds"] == (2 if row["name"] == "fedavg" else 1)
    assert fedavg["sends"] > zero_shot["sends"] == 0


def test_a_misspelt_method_of_the_demo_is_refused_before_anything_runs(small, own_home):
    must_fail("'fedprox'", "demo --methods fedavg,fedporx")
    assert not (own_home / "runs").exists()
