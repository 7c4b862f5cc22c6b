"""A store is found by the content of its dataset: a folder that was renamed costs nothing."""

from pathlib import Path

import pytest
from command import data_of, ok
from made_path import place_of
from make_images import tree, write_directory

from fedcache import Store
from fedcache.store.verify import verify

WORDS = "--backbones random-projection --size 16 --workers 0"


@pytest.fixture
def images(tmp_path):
    return write_directory(
        tmp_path / "before", tree([f"{c}/{i}.png" for c in ("cat", "dog") for i in range(6)])
    )


def test_a_renamed_folder_has_the_store_it_had_and_nothing_is_computed(images):
    first = data_of(f"extract --dataset folder:{images} {WORDS}")
    moved = images.rename(images.with_name("after"))
    words = f"extract --dataset folder:{moved} {WORDS}"
    again = ok(words)
    assert again.data["arrays"][0]["state"] == "complete"
    assert "These images are already stored, under the name before-" in again.err
    # The third time from what is remembered now.
    assert again.data["path"] == data_of(words)["path"] == first["path"]
    run = "train --method fed3r --scheme iid --clients 2"
    assert (
        data_of(f"{run} --dataset folder:{moved}")["dataset"]["digest"]
        == first["dataset"]["digest"]
    )
    assert data_of(f"{words} --backbones pixels")["path"] == first["path"]
    assert [entry["path"] for entry in data_of("ls")["entries"]] == [first["path"]]


def test_a_damaged_store_of_the_same_content_is_passed_over(images):
    first = place_of(f"extract --dataset folder:{images} {WORDS}")
    (first / "manifest.json").write_text("{}")
    moved = images.rename(images.with_name("after"))
    assert place_of(f"extract --dataset folder:{moved} {WORDS}") != first


def test_a_renamed_folder_with_one_more_image_goes_on_from_the_store_of_the_old_name(images):
    small = f"{WORDS} --batch 4 --chunk-rows 4"
    ok(f"extract --dataset folder:{images} {small}")
    moved = images.rename(images.with_name("after"))
    write_directory(moved, tree(["dog/999.png"]))
    again = data_of(f"extract --dataset folder:{moved} {small}")
    assert again["growth"]["forward_passes"] == 1
    assert again["dataset"]["slug"] == "after"


def features(path):
    """The rows of a store by their uid, and its names and classes as they are now."""
    store = Store.open(path)
    (key,) = store.arrays
    s = store.samples
    assert [name.split("/")[0] for name in s.name] == [s.classes[label] for label in s.label]
    uids = (uid.tobytes() for uid in s.uid)
    return dict(zip(uids, (x.tobytes() for x in store.reader(key).all()), strict=True))


def test_images_and_a_class_that_change_names_keep_their_features(images, tmp_path):
    was = features(data_of(f"extract --dataset folder:{images} {WORDS}")["path"])
    a = images / "cat/1.png"
    b = images / "dog/2.png"
    away = tmp_path / "away"
    for source, target in ((a, away), (b, a), (away, b), (images / "cat", images / "zebra")):
        source.rename(target)
    again = data_of(f"extract --dataset folder:{images} {WORDS}")
    assert again["growth"] == {"new": 0, "vanished": 0, "reused_chunks": 1, "forward_passes": 0}
    assert Store.open(again["path"]).samples.classes == ("dog", "zebra")
    assert features(again["path"]) == was
    assert verify(Path(again["path"])).problems == []
