"""The store that a command takes without --dataset and --store: the only one, or the one chosen for the folder."""

import shutil

import numpy as np
import pytest
from arrays import ingested
from command import data_of, fedcache, ok
from failing_command import must_fail, must_fail_store
from pictures import folder

import fedcache as fc

EXTRACT = "extract --backbones random-projection --size 16 --workers 0"
TRAIN = "train fedncm --scheme iid --clients 2"


@pytest.fixture
def images(tmp_path):
    return folder(tmp_path / "photos", train=4, test=2)


@pytest.fixture
def toml(images, here):
    """The fedcache.toml of a working directory, which is not there yet, beside a home with two stores."""
    ingested(here)
    ok(f"{EXTRACT} {images}")
    return here / "fedcache.toml"


@pytest.fixture
def other(toml):
    """The name of the store beside photos."""
    return next(e["dataset"] for e in data_of("ls")["entries"] if e["dataset"] != "photos")


def dataset_of(line, *words):
    return data_of(line, *words)["dataset"]["slug"]


def test_the_only_store_is_taken(tmp_path):
    ingested(tmp_path)
    assert dataset_of(TRAIN) == dataset_of("inspect")


@pytest.mark.parametrize(
    "line", [TRAIN, "inspect", "verify", "partition --scheme iid", "extract -b pixels"]
)
def test_of_several_stores_none_is_taken_and_all_are_listed(toml, line):
    error = must_fail_store("photos", line)
    assert "--dataset" in error["hint"]
    # Commands that read a store suggest the dataset that was extracted last.
    if not line.startswith("extract"):
        assert "--dataset photos" in error["hint"]
    assert "fedcache use" in error["hint"]


@pytest.mark.parametrize("change", ["cut", "deleted", "of another store"])
def test_a_damaged_store_may_be_the_one_that_is_meant(toml, other, own_home, change):
    (manifest,) = own_home.glob("stores/photos-*/manifest.json")
    raw = manifest.read_bytes()
    manifest.unlink()
    if change == "cut":
        manifest.write_bytes(raw[:-9])
    elif change == "of another store":
        (mine,) = own_home.glob(f"stores/{other}-*/manifest.json")
        shutil.copy(mine, manifest)
    error = must_fail_store(f"{other}, photos (its manifest is damaged", TRAIN)
    assert f"--dataset {other}" in error["hint"]


def test_a_store_is_chosen_for_a_folder_and_an_option_chooses_another(toml, other):
    toml.write_text("# mine\n[train]\nrounds = 1\n\n[partition]\nclients = 2\n")
    ok("use photos")
    assert dataset_of(TRAIN) == dataset_of("inspect") == "photos"
    assert "rounds = 1" in toml.read_text()
    assert "# mine" in toml.read_text()
    assert dataset_of(TRAIN, "--dataset", other) == other
    assert dataset_of(TRAIN, "--store", other) == other
    ok(f"use {other}")
    assert dataset_of("inspect") == other
    assert toml.read_text().count("dataset") == 1


def test_a_section_with_a_comment_is_kept_and_an_inline_section_is_refused(toml):
    toml.write_text("[train] # mine\nrounds = 1\n")
    ok("use photos")
    assert dataset_of("inspect") == "photos"
    assert toml.read_text().count("[train]") == 1
    toml.write_text("train = {rounds = 1}\n")
    must_fail("", "use photos")


def test_a_section_after_an_indented_header_stays_as_it_is(toml):
    extract = '  [extract]\n  dataset = "digits"\n'
    toml.write_text(f"[train]\nstore = 'old'\n{extract}")
    ok("use photos")
    assert toml.read_text() == f'[train]\ndataset = "photos"\n{extract}'


def test_more_features_of_the_chosen_dataset_are_extracted(toml):
    ok("use photos")
    assert data_of("extract --backbones pixels --size 8 --workers 0")["dataset"]["slug"] == "photos"


def test_a_name_of_no_store_is_refused_and_changes_nothing(toml):
    assert fedcache("use nothing --json").code == 2
    assert not toml.exists()


def test_a_dataset_is_named_when_it_is_extracted(images):
    made = data_of(f"{EXTRACT} --name 'first try' {images}")
    assert made["dataset"]["slug"] == "first_try"
    assert data_of(f"{EXTRACT} --name 'first try' {images}")["path"] == made["path"]
    assert dataset_of(TRAIN, "--dataset", "first_try") == "first_try"
    assert dataset_of(TRAIN, "--dataset", f"folder:{images}") == "first_try"
    more = data_of("extract --dataset first_try --backbones pixels --size 8 --workers 0")
    assert more["path"] == made["path"]
    assert fc.Store.open("first_try").rows == made["images"]


def test_content_that_is_there_keeps_its_name(images, tmp_path):
    ok(f"{EXTRACT} {images}")
    must_fail("already stored, under the name", f"{EXTRACT} --name other {images}")
    fc.Store.from_arrays({"mine": np.eye(2)}, labels=[0, 1], name="taken")
    more = folder(tmp_path / "more", train=5, test=2)
    error = fedcache(f"{EXTRACT} --name taken --json {more}").error
    assert error["hint"] == "Choose another --name."


def test_client_stores_replace_the_store_of_the_folder(other):
    ok(f"use {other}")
    ok(f"partition --scheme iid --clients 2 --name pair --dataset {other}")
    ok(f"shard --partition pair --out sites --dataset {other}")
    ok("use photos")
    assert data_of("train fedncm --clients-from sites")["dataset"]["slug"] == other
