"""A store is found by the content of its dataset: a folder that was renamed costs nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from command import ok
from make_images import tree, write_directory

from fedcache.config import Home

WORDS = ("--backbones", "random-projection", "--size", 16, "--workers", 0)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return write_directory(tmp_path / "before", tree([f"{c}/{i}.png" for c in ("cat", "dog") for i in range(6)]))


def stores() -> list[str]:
    return sorted(path.name for path in Home.from_environment().stores.glob("*.zarr"))


def test_a_renamed_folder_has_the_store_it_had_and_nothing_is_computed(images: Path) -> None:
    first = ok("extract", "--dataset", f"folder:{images}", *WORDS)
    moved = images.rename(images.with_name("after"))
    again = ok("extract", "--dataset", f"folder:{moved}", *WORDS)
    assert again.data["path"] == first.data["path"]
    assert stores() == [Path(first.data["path"]).name]
    assert again.data["arrays"][0]["state"] == "complete"
    assert "holds the same images, under the name they had before" in again.err
    quiet = ok("extract", "--dataset", f"folder:{moved}", *WORDS)  # from what is remembered now
    assert quiet.data["path"] == first.data["path"]
    run = ("train", "--method", "fed3r", "--scheme", "iid", "--clients", 2)
    assert ok(*run, "--dataset", f"folder:{moved}").data["dataset"]["digest"] == first.data["dataset"]["digest"]
    more = ok("extract", "--dataset", f"folder:{moved}", "--backbones", "pixels", "--size", 16, "--workers", 0)
    assert more.data["path"] == first.data["path"]


def test_another_content_under_that_name_is_another_store(images: Path) -> None:
    ok("extract", "--dataset", f"folder:{images}", *WORDS)
    copy = Path(shutil.copytree(images, images.with_name("copy")))
    (copy / "cat" / "0.png").unlink()
    ok("extract", "--dataset", f"folder:{copy}", *WORDS)
    assert len(stores()) == 2


def test_a_damaged_store_of_the_same_content_is_passed_over(images: Path) -> None:
    first = Path(ok("extract", "--dataset", f"folder:{images}", *WORDS).data["path"])
    (first / "manifest.json").write_text("{}")
    moved = images.rename(images.with_name("after"))
    again = ok("extract", "--dataset", f"folder:{moved}", *WORDS)
    assert again.data["path"] != str(first)
