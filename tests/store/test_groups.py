"""Groups: columns that sort the rows, kept beside the arrays."""

import numpy as np
import pytest
from damage import flip_bit
from refusal import refused

from fedcache.errors import Exit
from fedcache.store.store import Store, put_groups
from fedcache.store.verify import repair, verify
from fedcache.tables.groups import Group, joined

N = 12


def store_at(path):
    rng = np.random.default_rng(0)
    return Store.from_arrays(
        {"a": rng.normal(size=(N, 3)).astype("f4")}, labels=np.arange(N) % 2, path=path
    )


def test_a_store_keeps_groups_and_their_change_is_told(tmp_path):
    store = store_at(tmp_path / "s.zarr")
    digest = store.dataset["digest"]
    site = Group.of(["x", "", "y"] * 4)
    assert put_groups(store, {"site": site, "writer": Group.of(np.arange(N))}) == []
    again = Store.open(store.path)
    assert again.groups == ["site", "writer"]
    assert again.group("site").equals(site)
    before = (store.path / "manifest.json").read_bytes()
    assert put_groups(again, {"site": site}) == []
    # nothing is written for equal values
    assert (store.path / "manifest.json").read_bytes() == before
    assert put_groups(again, {"site": Group.of(["z"] * N)}) == ["site"]
    assert again.group("site").words == ("z",)
    assert again.dataset["digest"] == digest
    report = verify(store.path)
    assert (report.problems, report.notes) == ([], [])


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
    put_groups(store, {"site": Group.of(["x", "y"] * 6)})
    file = store.path / "groups" / "site.group"
    flip_bit(file, at)
    refused(lambda: Store.open(store.path).group("site"), code=Exit.CORRUPT)
    assert [p["file"] for p in verify(store.path).problems] == ["groups/site.group"]
    repair(store.path)
    assert Store.open(store.path).groups == []
    put_groups(Store.open(store.path), {"site": Group.of(["x", "y"] * 6)})
    assert verify(store.path).problems == []


def test_groups_of_joined_datasets_share_their_words():
    first, second = (
        {"site": Group.of(["b", "a"])},
        {"site": Group.of(["c", "", "a"]), "day": Group.of([1, 2, 3])},
    )
    made = joined([first, second], [2, 3])
    site, day = made["site"], made["day"]
    assert [site.words[c] if c >= 0 else None for c in site.codes] == ["b", "a", "c", None, "a"]
    assert day.codes.tolist() == [-1, -1, 0, 1, 2]
