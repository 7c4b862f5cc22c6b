"""Groups belong to the dataset that is named, also where another one with the same content shares its store."""

from pathlib import Path

import numpy as np
import pytest
from command import data_of, ok
from make_images import tree, write_directory

from fedcache import Store

RNG = np.random.default_rng(5)
IMAGES = RNG.integers(0, 256, (60, 8, 8), dtype=np.uint8)
LABELS = np.arange(60) % 3
WORDS = "--backbones random-projection --size 8 --workers 0 --batch 5 --chunk-rows 5"
TRAIN = "train --method fed3r --by site --dataset"
TWO = [["a", "b"][i % 2] for i in range(60)]
THREE = [["p", "q", "r"][i // 20] for i in range(60)]


@pytest.fixture
def specs(tmp_path):
    """Three datasets of the same images and labels: with two sites, with three, and with none."""
    for name, columns in {"two": {"site": TWO}, "three": {"site": THREE}, "none": {}}.items():
        np.savez(tmp_path / f"{name}.npz", images=IMAGES, labels=LABELS, **columns)
    return {name: f"arrays:{tmp_path / name}.npz" for name in ("two", "three", "none")}


def sites(path):
    store = Store.open(path)
    return store.group("site").words if "site" in store.groups else ()


@pytest.mark.slow
def test_training_deals_by_the_column_of_the_dataset_that_is_named(specs):
    path = data_of(f"extract --dataset {specs['two']} {WORDS}")["path"]
    assert data_of(f"extract --dataset {specs['three']} {WORDS}")["path"] == path
    assert sites(path) == ("p", "q", "r")
    ok(f"extract --dataset {specs['two']} {WORDS} --dry-run")
    assert sites(path) == ("p", "q", "r"), "a dry run brings no columns"
    first = ok(f"{TRAIN} {specs['two']}")
    assert f"to the values of {specs['two']}" in first.err
    again = ok(f"{TRAIN} {specs['two']}")  # nothing to bring, and the same run
    assert "Columns" not in again.err
    assert again.data["path"] == first.data["path"]
    other = ok(f"{TRAIN} {specs['three']}")
    assert other.data["path"] != first.data["path"]
    # An answer that was noted is not one for other groups.
    made = [first, other, ok(f"{TRAIN} {specs['two']}")]
    assert [done.data["partition"]["clients"] for done in made] == [2, 3, 2]


def test_a_dataset_without_a_column_has_not_that_of_another(specs):
    path = data_of(f"extract --dataset {specs['two']} {WORDS}")["path"]
    ok(f"extract --dataset {specs['none']} {WORDS}")
    assert sites(path) == ()
    # finished, and its column is brought again
    assert data_of(f"extract --dataset {specs['two']} {WORDS}")["arrays"][0]["state"] == "complete"
    assert sites(path) == ("a", "b")
    ok(f"datasets info {specs['none']}")
    shown = ok(f"inspect --dataset {specs['none']}")
    assert f"because {specs['none']} does not have them: site." in shown.err
    assert sites(path) == ()
    # a command that names none means the dataset last extracted
    ok("inspect")
    assert sites(path) == ("a", "b")
    Path(specs["two"].partition(":")[2]).unlink()  # the store is still what is meant
    ok("inspect")


def test_columns_come_in_the_order_of_a_store_that_grew(tmp_path):
    every = [f"n{i:02d}.png" for i in range(20)]
    root = write_directory(tmp_path / "d", tree(every))

    def listed(file, names, site):
        lines = [f"{name},{int(name[1:3]) % 2},{site[name]}" for name in names]
        (root / file).write_text("\n".join(["path,label,site", *lines]))
        return f"folder:{root / file}"

    of, other = ({name: site[i] for i, name in enumerate(every)} for site in (THREE, TWO))
    ok(f"extract {WORDS} --dataset", listed("a.csv", every[5:], of))
    grown = data_of(f"extract {WORDS} --dataset", listed("a.csv", every, of))["path"]
    assert Store.open(grown).samples.name[0] == "n05.png"  # new rows are the last
    assert data_of(f"extract {WORDS} --dataset", listed("b.csv", every, other))["path"] == grown
    ok(f"inspect --dataset folder:{root / 'a.csv'}")
    store = Store.open(grown)
    assert store.group("site").values() == [of[name] for name in store.samples.name]
