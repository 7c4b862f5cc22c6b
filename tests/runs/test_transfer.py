"""``train --transfer``: the accuracy of a run on other datasets, whose classes are scored by their texts."""

from dataclasses import replace

import numpy as np
import pytest
from command import fedcache
from failing_command import must_fail
from homes import made_once
from made_path import place_of
from pictures import folder
from test_base_to_new import ABLE, HOW, base_store, generalised, made, result_of

import fedcache as fc
from fedcache.config import Home
from fedcache.errors import Exit
from fedcache.federate.methods import METHODS
from fedcache.store.store import Store

store = made_once(made)


def other_store():
    (path,) = Home.from_environment().stores.glob("other-*.zarr")
    return path


def transferred(run):
    return result_of(run)["accuracy"]["transfer"]


def name_of(path):
    dataset = Store.open(path).dataset
    return f"{dataset['slug']}-{dataset['digest'][:8]}"


@pytest.mark.parametrize("method", ABLE)
def test_it_is_the_accuracy_of_the_run_on_its_own_dataset_and_that_of_new_classes(store, method):
    words = f"train {method} {HOW} --dtype float64"
    run = place_of(f"{words} --store {base_store()} --transfer {other_store()},{base_store()}")
    result = result_of(run)
    found = transferred(run)["mean"]
    new = generalised(place_of(f"{words} --store {store} --base-classes half"))["new"]
    assert found == {
        name_of(other_store()): new,
        name_of(base_store()): result["accuracy"]["mean"],
    }
    assert transferred(run)["per_seed"] == [found]
    alone = result_of(place_of(f"{words} --store {base_store()}"))
    assert result["accuracy"]["mean"] == alone["accuracy"]["mean"]
    assert result["digest"] != alone["digest"]


def test_features_are_centred_on_the_mean_of_the_training_rows(store):
    words = f"--store {base_store()} {HOW} --set feat_post=center --transfer {store}"
    run = place_of(f"train clip-zs {words}")
    X, _ = Store.open(base_store()).Xy(split="train")
    Z, y = Store.open(store).Xy(split="test")

    def unit(rows):
        return rows / np.linalg.norm(rows, axis=-1, keepdims=True)

    T = np.asarray(Store.open(store).text("glyph-clip"), float)
    scores = (unit(Z.astype(float)) - unit(X.astype(float)).mean(0)) @ T.T
    assert transferred(run)["mean"] == {name_of(store): np.mean(scores.argmax(-1) == y)}


def test_a_method_and_stores_of_python(store):
    own = replace(METHODS["clip-zs"], name="mine")
    targets = [Store.open(store), base_store()]
    parts = fc.partition(base_store(), "iid", clients=2)
    runs = [
        fc.train(own, base_store(), parts, transfer=order) for order in (targets, targets[::-1])
    ]
    plain = place_of(f"train clip-zs --store {base_store()} {HOW} --transfer {store}")
    name = name_of(store)
    assert runs[0].result["accuracy"]["transfer"]["mean"][name] == transferred(plain)["mean"][name]
    assert runs[0].path == runs[1].path


def test_terminal_and_compare_name_the_datasets(store):
    for method in ("clip-zs", "fedclip"):
        out = fedcache(f"train {method} --store {base_store()} {HOW} --transfer {store}").out
        assert f"Transfer to other datasets: {name_of(store)}" in " ".join(out.split())
    table = " ".join(fedcache("compare").out.split())
    assert f"transfer to {name_of(store)} %" in table


def test_what_cannot_be_scored_is_refused_before_the_training(store):
    words = f"train clip-zs --store {base_store()} {HOW} --transfer"
    must_fail(
        "fed3r with these settings has no such model", words.replace("clip-zs", "fed3r"), store
    )
    must_fail("nowhere", words, "nowhere", code=Exit.STORE)
    other = place_of("extract --dataset digits --backbones random-projection --limit 100")
    error = must_fail("does not have the features of glyph-clip", words, other, code=Exit.STORE)
    assert "--backbones glyph-clip" in error["hint"]


def test_ingested_features_are_refused(tmp_path):
    paths = [tmp_path / f"{name}.zarr" for name in ("trained", "other")]
    for path in paths:
        features = {"mine": np.eye(10, 2, dtype=np.float32)}
        Store.from_arrays(features, labels=[0, 1] * 5, text={"mine": np.eye(2)}, path=path)
    must_fail("extracted", f"train clip-zs --store {paths[0]} {HOW} --transfer", paths[1])


def test_a_dataset_is_given_once_and_needs_class_texts(store, tmp_path):
    words = f"train clip-zs --store {base_store()} {HOW} --transfer"
    must_fail("twice", words, f"{store},{store}")
    images = folder(tmp_path / "images", train=4, test=4, classes=2)
    listed = tmp_path / "listed.csv"
    paths = [str(path.relative_to(tmp_path)) for path in images.rglob("*.png")]
    listed.write_text("\n".join(["path", *paths]))
    options = "--backbones glyph-clip --workers 0 --unlabelled"
    unlabelled = place_of(f"extract --dataset folder:{listed} {options}")
    must_fail("has no class texts of glyph-clip", words, unlabelled, code=Exit.STORE)
