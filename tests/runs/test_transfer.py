"""``train --transfer``: the accuracy of a run on other datasets, whose classes are scored by their texts."""

import shutil

import numpy as np
import pytest
from command import fedcache
from failing_command import must_fail
from homes import made_once
from made_path import place_of
from pictures import folder
from test_base_to_new import ABLE, HOW, base_store, extracted, generalised, result_of

from fedcache.config import Home
from fedcache.errors import Exit
from fedcache.store.store import Store


def made(place):
    """A store of six classes, one of its first three classes, and one of the others."""
    images = folder(place / "shapes", train=4, test=4, classes=6)
    path = extracted(images)
    for split in ("train", "test"):
        for number, name in enumerate(Store.open(path).samples.classes):
            half = "base" if number < 3 else "other"
            shutil.copytree(images / split / name, place / half / split / name)
    extracted(place / "base")
    extracted(place / "other")
    return path


store = made_once(made)


def other_store():
    (path,) = Home.from_environment().stores.glob("other-*.zarr")
    return path


def transferred(run):
    return result_of(run)["accuracy"]["transfer"]


@pytest.mark.parametrize("method", ABLE)
def test_it_is_the_accuracy_of_the_run_on_its_own_dataset_and_that_of_new_classes(store, method):
    words = f"train {method} {HOW}"
    run = place_of(f"{words} --store {base_store()} --transfer {other_store()},{base_store()}")
    found = transferred(run)
    assert (
        found[other_store().stem]
        == generalised(place_of(f"{words} --store {store} --base-classes half"))["new"]
    )
    assert found[base_store().stem] == result_of(run)["accuracy"]["mean"]
    assert found["per_seed"] == [{name: found[name] for name in found if name != "per_seed"}]
    alone = result_of(place_of(f"{words} --store {base_store()}"))
    assert result_of(run)["accuracy"]["mean"] == alone["accuracy"]["mean"]
    assert result_of(run)["digest"] != alone["digest"]


def test_features_are_centred_on_the_mean_of_the_training_rows(store):
    words = f"--store {base_store()} {HOW} --set feat_post=center --transfer {store}"
    run = place_of(f"train clip-zs {words}")
    X, _ = Store.open(base_store()).Xy(split="train")
    Z, y = Store.open(store).Xy(split="test")

    def unit(rows):
        return rows / np.linalg.norm(rows, axis=-1, keepdims=True)

    T = np.asarray(Store.open(store).text("glyph-clip"), float)
    scores = (unit(Z.astype(float)) - unit(X.astype(float)).mean(0)) @ T.T
    assert transferred(run)[store.stem] == np.mean(scores.argmax(-1) == y)


def test_terminal_and_compare_name_the_datasets(store):
    for method in ("clip-zs", "fedclip"):
        out = fedcache(f"train {method} --store {base_store()} {HOW} --transfer {store}").out
        assert f"Transfer to other datasets: {store.stem}" in " ".join(out.split())
    assert f"{store.stem} %".replace("_", " ") in " ".join(fedcache("compare").out.split())


def test_what_cannot_be_scored_is_refused_before_the_training(store):
    words = f"train clip-zs --store {base_store()} {HOW} --transfer"
    must_fail(
        "fed3r with these settings has no such model", words.replace("clip-zs", "fed3r"), store
    )
    must_fail("nowhere", words, "nowhere", code=Exit.STORE)
    other = place_of("extract --dataset digits --backbones random-projection --limit 100")
    error = must_fail("does not have the features of glyph-clip", words, other, code=Exit.STORE)
    assert "--backbones glyph-clip" in error["hint"]


@pytest.mark.parametrize(
    ("labels", "text", "said"),
    [
        ([0, 1] * 5, {}, "no class texts of mine"),
        ([-1] * 10, {"mine": np.eye(2)}, "no labelled test rows"),
    ],
)
def test_a_store_without_class_texts_or_labels_is_refused(labels, text, said, tmp_path):
    rows = np.random.default_rng(0).standard_normal((10, 2)).astype(np.float32)
    paths = [tmp_path / "trained.zarr", tmp_path / "other.zarr"]
    common = {"classes": ["a", "b"]}
    Store.from_arrays(
        {"mine": rows}, labels=[0, 1] * 5, text={"mine": np.eye(2)}, path=paths[0], **common
    )
    Store.from_arrays({"mine": rows}, labels=labels, text=text, path=paths[1], **common)
    must_fail(said, f"train clip-zs --store {paths[0]} {HOW} --transfer", paths[1], code=Exit.STORE)
