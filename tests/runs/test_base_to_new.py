"""``train --base-classes``: a run on the first classes, and its accuracy on the other classes by their texts."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from command import fedcache, ok
from failing_command import must_fail
from federation import fitted, go_tiny, tiny
from homes import made_once
from made_path import place_of, run_of
from pictures import folder
from safetensors.torch import load_file
from text_tables import rows_of

from fedcache.config import Home
from fedcache.errors import StoreError, UsageError
from fedcache.federate.engine.client_data import Data
from fedcache.federate.methods import METHODS
from fedcache.runs.base_to_new import (
    base_to_new,
    count_base_classes,
    generalises,
    harmonic_mean,
    split_data,
)
from fedcache.runs.features import load_towers
from fedcache.store.store import Store

ABLE = [name for name, method in METHODS.items() if generalises(method, method.resolve())]
HOW = "--scheme iid --clients 2 --rounds 2"


def extracted(images):
    return place_of(f"extract --dataset folder:{images} --backbones glyph-clip --workers 0")


def made(place):
    """A store of six classes, one of its first three classes alone, and one of the others."""
    images = folder(place / "shapes", train=4, test=4, classes=6)
    path = extracted(images)
    classes = Store.open(path).samples.classes
    for half, names in (("base", classes[:3]), ("other", classes[3:])):
        for name in names:
            for split in ("train", "test"):
                shutil.copytree(images / split / name, place / half / split / name)
        extracted(place / half)
    return path


store = made_once(made)


def base_store():
    (path,) = Home.from_environment().stores.glob("base-*.zarr")
    return path


def result_of(run):
    return json.loads((run / "result.json").read_text())


def generalised(run):
    return result_of(run)["accuracy"]["base_to_new"]


def tensors(run):
    (file,) = run.glob("models/seed-0.safetensors")
    return load_file(file)


@pytest.mark.parametrize("method", ABLE)
def test_the_run_is_that_of_a_dataset_with_the_base_classes_alone(store, method):
    """Rows and names of the new classes change neither the model nor the base accuracy."""
    run = place_of(f"train {method} --store {store} {HOW} --base-classes half")
    alone = place_of(f"train {method} --store {base_store()} {HOW}")
    found = tensors(run)
    expected = tensors(alone)
    assert found.keys() == expected.keys()
    # Stored texts were computed in batches of other sizes, so their last bits differ.
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)
    result = result_of(run)
    of_base = result_of(alone)
    assert result["accuracy"]["mean"] == of_base["accuracy"]["mean"] == generalised(run)["base"]
    assert result["class_names"] == of_base["class_names"]
    assert result["accuracy"].get("zero_shot") == of_base["accuracy"].get("zero_shot")


def new_rows(store):
    """Features of the test rows of the last three classes, and their labels from 0."""
    X, y = Store.open(store).Xy(split="test")
    X = X / np.linalg.norm(X, axis=-1, keepdims=True)
    return X[y >= 3].astype(float), y[y >= 3] - 3


def test_the_new_accuracy_of_class_texts_is_that_of_the_other_texts(store):
    run = place_of(f"train clip-zs --store {store} {HOW} --base-classes 3")
    X, y = new_rows(store)
    T = np.asarray(Store.open(store).text("glyph-clip"), float)[3:]
    found = generalised(run)
    accuracy = np.mean((X @ T.T).argmax(-1) == y)
    assert found["new"] == accuracy
    assert found["per_seed"][0]["new_rows"] == len(y) == 12
    base = found["base"]
    assert found["harmonic_mean"] == pytest.approx(2 / (1 / base + 1 / accuracy), rel=1e-12)


def test_trained_vectors_around_new_names_predict_as_prompts_that_are_put_together_here(
    store, monkeypatch
):
    trained = []

    def seen(run, out, new):
        trained.append(out.broadcast()["ctx"])
        return base_to_new(run, out, new)

    monkeypatch.setattr("fedcache.runs.loop.base_to_new", seen)
    words = "--set lr=0.2 --set n_ctx=3 --set epochs=3"
    run = place_of(f"train promptfl --store {store} {HOW} {words} --base-classes half")
    opened = Store.open(store)
    towers = load_towers(opened, next(iter(opened.arrays)), Home.from_environment())
    (v,) = trained
    after = towers.template.partition("{}")[2]
    tokens, end = towers.text.embed([name + after for name in opened.samples.classes[3:]])
    prompts = torch.cat([tokens[:, :1], v.expand(3, -1, -1), tokens[:, 1:]], 1)[
        :, : tokens.shape[1]
    ]
    with torch.no_grad():
        T = towers.text.encode(prompts, end + 3).numpy()
    X, y = new_rows(store)
    assert generalised(run)["new"] == np.mean((X @ T.T).argmax(-1) == y)


def test_words_of_the_template_without_a_step_are_class_texts(store):
    """PromptFL that takes no step with the template's words is zero-shot, on the new classes too."""
    untrained = "--set ctx_init=words --set lr=0 --set warm_lr=0"
    prompt = place_of(f"train promptfl --store {store} {HOW} {untrained} --base-classes half")
    texts = place_of(f"train clip-zs --store {store} {HOW} --base-classes half")
    assert generalised(prompt) == generalised(texts)


@pytest.mark.parametrize("name", ABLE)
def test_no_tensor_of_server_and_uploads_depends_on_the_classes(name):
    """The declaration is true: a federation with one class more has tensors of the same shapes."""
    shapes = []
    for classes in (4, 5):
        data, clients = tiny(views=4, classes=classes)
        out = go_tiny(name, {}, fitted(METHODS[name], data), clients)
        shapes.append({key: t.shape for key, t in out.broadcast().items()})
    assert shapes[0] == shapes[1]


def test_terminal_and_compare_show_the_three_accuracies(store):
    words = f"--store {store} {HOW} --base-classes half"
    out = " ".join(fedcache(f"train clip-zs {words}").out.split())
    found = generalised(run_of("clip-zs"))
    new = f"{100 * found['new']:.2f} % on 12 test rows of the new classes"
    assert (
        f"on the 3 base classes, {new}, harmonic mean {100 * found['harmonic_mean']:.2f} %" in out
    )
    ok(f"train fedclip {words}")
    table = fedcache("compare").out
    for heading in ("base %", "new %", "harmonic mean %"):
        assert heading in table
    assert f"{100 * found['harmonic_mean']:.2f}" in table


def test_the_harmonic_mean_of_the_means_over_seeds(store):
    run = place_of(f"train fedclip --store {store} {HOW} --seeds 0,1 --base-classes half")
    found = generalised(run)
    new = np.mean([seed["new"] for seed in found["per_seed"]])
    assert len(found["per_seed"]) == 2
    assert found["new"] == pytest.approx(new)
    assert found["harmonic_mean"] == harmonic_mean(found["base"], found["new"])


def test_a_new_name_that_is_too_long_is_refused_before_the_training(tmp_path):
    images = folder(tmp_path / "shapes", train=4, test=4, classes=4)
    for split in ("train", "test"):
        last = sorted((images / split).iterdir())[-1]
        last.rename(last.parent / ("z" * 40))
    words = f"train promptfl --store {extracted(images)} {HOW} --base-classes half --set n_ctx=30"
    must_fail("z" * 20, words)
    assert not list((Home.from_environment().runs).glob("*/checkpoint*"))


def test_a_held_out_value_is_refused(store):
    name = Store.open(store).samples.classes[0]
    words = f"train clip-zs --store {store} --base-classes half --by class --hold-out {name}"
    must_fail("on other rows", words)


def test_hand_worked_means_and_counts():
    assert harmonic_mean(0.5, 1.0) == pytest.approx(2 / 3)
    assert harmonic_mean(0.0, 0.0) == 0.0
    assert harmonic_mean(None, 0.4) is None
    assert count_base_classes("half", "abcde") == 3  # rounded up, as in CoOp's code
    assert count_base_classes("1", "ab") == 1
    for wrong in ("0", "2", "all", "-1", "1.5"):
        with pytest.raises(UsageError, match="at least one must be a base class"):
            count_base_classes(wrong, "ab")


def test_a_partition_of_the_base_classes_gives_the_same_run_and_another_one_is_refused(store):
    """The stored configuration of a run names the partition that the run was made with."""
    run = place_of(f"train clip-zs --store {store} {HOW} --base-classes half")
    words = f"train clip-zs --store {store} --base-classes half --partition"
    again = place_of(f"{words} {run / 'partition-0.partition'} --fresh")
    assert generalised(again) == generalised(run)
    ok(f"partition --store {store} --scheme iid --clients 2 --name every")
    must_fail("has training rows of new classes", f"{words} every")


@pytest.mark.parametrize(
    ("words", "said"),
    rows_of(
        """
        fed3r                         | fed3r with these settings has no such model
        solo --set init=text          | solo with these settings has no such model
        promptfl --set csc=true       | promptfl with these settings has no such model
        clip-zs --base-classes 6      | there are 6 classes
        clip-zs --clients-from shards | cannot be combined with client stores
        """
    ),
)
def test_what_cannot_score_new_classes_is_refused_by_name(store, words, said):
    if "--base-classes" not in words:
        words += " --base-classes half"
    if "--clients-from" not in words:
        words += f" --store {store}"
    assert must_fail(said, f"train {words}")["hint"]


@pytest.mark.parametrize(
    ("splits", "domains", "expected"),
    [
        ([0, 0, 0, 1, 1, 1], (), [4, 5]),
        ([0, 0, 0, 0, 0, 0], (), [2, 4, 5]),
        ([0, 0, 0, 0, 0, 0], ("ink",), [2, 4]),
    ],
)
def test_test_rows_of_new_classes_are_those_of_the_split_and_the_domains(
    splits, domains, expected, tmp_path
):
    y = np.array([0, 1, 2, 0, 3, 2])
    samples = Store.from_arrays(
        {"mine": np.ones((6, 2), np.float32)},
        labels=y,
        classes=["a", "b", "c", "d"],
        domains=["ink", "chalk", "ink", "ink", "ink", "chalk"],
        path=tmp_path / "rows.zarr",
    ).samples
    samples = replace(samples, split=np.array(splits))
    data = Data(torch.ones(6, 1, 2), torch.from_numpy(y), 4, text=torch.eye(4, 2))
    base, new = split_data(data, 2, samples, domains)
    assert base.y.tolist() == [0, 1, -1, 0, -1, -1]
    assert (base.classes, new.classes) == (2, 2)
    assert torch.equal(torch.cat([base.text, new.text]), data.text)
    assert new.rows.tolist() == expected
    assert new.label.tolist() == (y[expected] - 2).tolist()
    with pytest.raises(StoreError, match="no test rows"):
        split_data(data, 2, samples, ("none",))
