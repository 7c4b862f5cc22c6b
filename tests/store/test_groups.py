"""Groups: columns that sort the rows, kept beside the arrays."""

import numpy as np
import pytest
from arrays import normals
from damage import flip_bit
from refusal import corruption, refused

from fedcache.store.store import Store, put_groups
from fedcache.store.verify import repair, verify
from fedcache.tables.groups import Group, joined

N = 12


def store_at(path):
    return Store.from_arrays({"a": normals(0, N, 3)}, labels=np.arange(N) % 2, path=path)


def test_a_store_keeps_groups_and_their_change_is_told(tmp_path):
    store = store_at(tmp_path / "s.zarr")
    digest = store.dataset["digest"]
    site = Group.of(["x", "", "y"] * 4)
    assert put_groups(store, {"site": site, "writer": Group.of(np.arange(N))}) == []
    again = Store.open(store.path)
    assert again.groups == ["site", "writer"]
    assert again.group("site").equals(site)
    manifest = store.path / "manifest.json"
    before = manifest.read_bytes()
    assert put_groups(again, {"site": site}) == []
    assert manifest.read_bytes() == before  # nothing is written for equal values
    assert put_groups(again, {"site": Group.of(["z"] * N)}) == ["site"]
    assert again.group("site").words == ("z",)
    assert again.dataset["digest"] == digest
    report = verify(store.path)
    assert report.problems == []
    assert report.notes == []


def test_refusals_name_what_is_there(tmp_path):
    store = store_at(tmp_path / "s.zarr")
    refused(lambda: store.group("hospital"), "domain, class")
    put_groups(store, {"hospital id": Group.of(["a"] * N)})
    refused(lambda: store.group("hospitl_id"), "Did you mean 'hospital_id'")
    refused(lambda: put_groups(store, {"short": Group.of([1, 2, 3])}), "short")
    for name in ("domain", "Class", "", "../x"):
        refused(lambda name=name: put_groups(store, {name: Group.of(["a"] * N)}), name)
    assert store.groups == ["hospital_id"]


@pytest.mark.parametrize("at", [3, -1])
def test_a_flipped_bit_is_found_and_repair_forgets_the_group(tmp_path, at):
    store = store_at(tmp_path / "s.zarr")
    groups = {"site": Group.of(["x", "y"] * 6)}
    put_groups(store, groups)
    flip_bit(store.path / "groups/site.group", at)
    corruption(lambda: Store.open(store.path).group("site"))
    assert [p["file"] for p in verify(store.path).problems] == ["groups/site.group"]
    repair(store.path)
    assert Store.open(store.path).groups == []
    put_groups(Store.open(store.path), groups)
    assert verify(store.path).problems == []


def test_groups_of_joined_datasets_share_their_words():
    first = {"site": Group.of(["b", "a"])}
    made = joined([first, {"site": Group.of(["c", "", "a"]), "day": Group.of([1, 2, 3])}], [2, 3])
    assert made["site"].values() == ["b", "a", "c", None, "a"]
    assert made["day"].values() == [None, None, "1", "2", "3"]
