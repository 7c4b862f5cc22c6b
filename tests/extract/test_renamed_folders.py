"""A store is found by the content of its dataset: a folder that was renamed costs nothing."""

from pathlib import Path

import numpy as np
import pytest
from command import ok
from make_images import tree, write_directory

from fedcache.config import Home
from fedcache.store.store import Store
from fedcache.store.verify import verify

WORDS = "--backbones random-projection --size 16 --workers 0"


@pytest.fixture
def images(tmp_path):
    return write_directory(
        tmp_path / "before", tree([f"{c}/{i}.png" for c in ("cat", "dog") for i in range(6)])
    )


def stores() -> list[str]:
    return sorted(path.name for path in Home.from_environment().stores.glob("*.zarr"))


def test_a_renamed_folder_has_the_store_it_had_and_nothing_is_computed(images):
    first = ok(f"extract --dataset folder:{images} {WORDS}").data
    moved = images.rename(images.with_name("after"))
    words = f"extract --dataset folder:{moved} {WORDS}"
    again = ok(words)
    assert again.data["arrays"][0]["state"] == "complete"
    assert "holds the same images, under the name they had before" in again.err
    # The third time from what is remembered now.
    assert again.data["path"] == ok(words).data["path"] == first["path"]
    run = "train --method fed3r --scheme iid --clients 2"
    assert (
        ok(f"{run} --dataset folder:{moved}").data["dataset"]["digest"]
        == first["dataset"]["digest"]
    )
    assert ok(f"{words} --backbones pixels").data["path"] == first["path"]
    assert stores() == [Path(first["path"]).name]


def test_a_damaged_store_of_the_same_content_is_passed_over(images):
    first = Path(ok(f"extract --dataset folder:{images} {WORDS}").data["path"])
    (first / "manifest.json").write_text("{}")
    moved = images.rename(images.with_name("after"))
    again = ok(f"extract --dataset folder:{moved} {WORDS}")
    assert again.data["path"] != str(first)


@pytest.mark.slow
def test_a_renamed_class_costs_no_forward_pass_and_its_rows_have_the_new_name(tmp_path):
    files = tree([f"{c}/{i:03d}.png" for c in ("cat", "dog") for i in range(189)])
    images = write_directory(tmp_path / "images", files)
    first = ok(f"extract --dataset folder:{images} {WORDS}").data
    (images / "cat").rename(images / "zebra")
    again = ok(f"extract --dataset folder:{images} {WORDS}").data
    assert again["growth"]["forward_passes"] == 0
    assert (again["growth"]["new"], again["growth"]["vanished"]) == (0, 0)
    store, before = Store.open(Path(again["path"])), Store.open(Path(first["path"]))
    assert store.samples.classes == ("dog", "zebra")
    names = [name.split("/")[0] for name in store.samples.name]
    assert names == [store.samples.classes[label] for label in store.samples.label]
    (key,) = store.arrays
    assert np.array_equal(store.reader(key).all(), before.reader(key).all())
    assert verify(store.path).problems == []


def test_a_renamed_folder_with_one_more_image_goes_on_from_the_store_of_the_old_name(tmp_path):
    images = write_directory(
        tmp_path / "before", tree([f"{c}/{i:03d}.png" for c in ("cat", "dog") for i in range(8)])
    )
    small = "--batch 4 --chunk-rows 8"
    ok(f"extract --dataset folder:{images} {WORDS} {small}")
    moved = images.rename(images.with_name("after"))
    write_directory(moved, tree(["dog/999.png"]))
    again = ok(f"extract --dataset folder:{moved} {WORDS} {small}").data
    assert again["growth"]["forward_passes"] == 1
    assert again["dataset"]["slug"] == "after"


def test_two_images_that_change_names_keep_their_features(tmp_path):
    images = write_directory(
        tmp_path / "images", tree([f"{c}/{i}.png" for c in ("cat", "dog") for i in range(8)])
    )
    first = Store.open(Path(ok(f"extract --dataset folder:{images} {WORDS}").data["path"]))
    a, b, away = images / "cat" / "1.png", images / "dog" / "2.png", tmp_path / "away"
    for source, target in ((a, away), (b, a), (away, b)):
        source.rename(target)
    again = ok(f"extract --dataset folder:{images} {WORDS}").data
    assert again["growth"]["forward_passes"] == 0
    (key,) = first.arrays
    store = Store.open(Path(again["path"]))
    was = {
        uid.tobytes(): x.tobytes()
        for uid, x in zip(first.samples.uid, first.reader(key).all(), strict=True)
    }
    now = {
        uid.tobytes(): x.tobytes()
        for uid, x in zip(store.samples.uid, store.reader(key).all(), strict=True)
    }
    assert was == now
