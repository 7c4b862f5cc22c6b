"""``train --stages``: classes that arrive in stages, scored after each stage."""

import numpy as np
import pytest
from failing_command import must_fail
from refusal import refused
from sklearn.linear_model import Ridge

import fedcache as fc
from fedcache.config import TrainConfig
from fedcache.federate.methods import METHODS
from fedcache.runs.loop import stage_of_classes
from fedcache.runs.spec import resolve_run
from fedcache.store.store import Store

CLASSES = 6
ADDITIVE = [
    name
    for name, method in METHODS.items()
    if method.one_shot
    and method.needs == {"labels"}
    and method.additive(method.resolve("default", {}))
]


def stored(x, y, split, place):
    words = {"labels": y, "splits": split.astype(int), "classes": list("abcdef")}
    return Store.from_arrays({"mine": x}, **words, path=place / "rows.zarr")


@pytest.fixture(scope="module")
def rows():
    y = np.tile(np.arange(CLASSES), 60)
    x = np.random.default_rng(0).normal(size=(len(y), 12)) + 1.5 * np.eye(CLASSES, 12)[y]
    y[::17] = -1  # rows without a label
    split = np.arange(len(y)) // CLASSES % 3 == 0
    return x.astype(np.float32), y, split


@pytest.fixture(scope="module")
def store(rows, tmp_path_factory):
    x, y, split = rows
    return stored(x, y, split, tmp_path_factory.mktemp("stages"))


@pytest.fixture
def parts(store):
    return fc.partition(store, scheme="dirichlet", clients=3, alpha=10.0)


def test_every_additive_method_ends_with_the_model_of_all_classes(store, parts):
    assert {"fed3r", "fedcgs", "fedncm", "gh-ofl"} <= set(ADDITIVE)
    for name in ADDITIVE:
        accuracy = fc.train(name, store, parts, stages=3).result["accuracy"]
        (found,) = accuracy["stages"]["per_seed"]
        assert found["final"] == accuracy["pooled"], name
        assert [len(line) for line in found["by_stage"]] == [1, 2, 3], name
        assert accuracy["stages"]["average"] == pytest.approx(np.mean(found["after_each_stage"]))


def test_the_figures_are_those_of_ridge_regressions_on_the_classes_so_far(store, parts, rows):
    x, y, split = rows
    lam = 0.5
    run = fc.train("fed3r", store, parts, stages=3, settings={"lam": lam})
    (found,) = run.result["accuracy"]["stages"]["per_seed"]
    stage_of = stage_of_classes(CLASSES, 3, 0)
    assert found["stage_of_class"] == stage_of.tolist()
    assert sorted(np.bincount(stage_of)) == [2, 2, 2]
    x = x.astype(np.float64)
    a = np.zeros((3, 3))
    after_each = []
    for stage in range(3):
        here = (y >= 0) & (stage_of[y] <= stage)
        train = here & ~split
        test = here & split
        one_hot = np.eye(CLASSES)[y[train]]
        ridge = Ridge(alpha=lam, fit_intercept=False).fit(x[train], one_hot)
        scores = ridge.predict(x[test])
        scores[:, stage_of > stage] = -np.inf
        right = scores.argmax(1) == y[test]
        after_each.append(right.mean())
        for s in range(stage + 1):
            a[stage, s] = right[stage_of[y[test]] == s].mean()
    for stage, line in enumerate(found["by_stage"]):
        assert line == pytest.approx(a[stage, : stage + 1])
    assert found["after_each_stage"] == pytest.approx(after_each)
    forgetting = [max(a[0, 0], a[1, 0]) - a[2, 0], a[1, 1] - a[2, 1]]
    assert found["forgetting"] == pytest.approx(np.mean(forgetting))
    assert found["forgetting"] > 0, "more classes are harder to tell apart"


def test_a_stage_without_test_rows_has_no_accuracy(rows, tmp_path):
    x, y, split = rows
    first = stage_of_classes(CLASSES, 3, 0) == 0
    untested = (y >= 0) & first[y] & split
    store = stored(x[~untested], y[~untested], split[~untested], tmp_path)
    run = fc.train(
        "fedncm", store, fc.partition(store, scheme="dirichlet", clients=2, alpha=10.0), stages=3
    )
    (found,) = run.result["accuracy"]["stages"]["per_seed"]
    assert found["after_each_stage"][0] is None
    assert [line[0] for line in found["by_stage"]] == [None] * 3
    assert found["average"] == pytest.approx(np.mean(found["after_each_stage"][1:]))


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("fedavg", {}, "fedavg does not compute the sum"),
        ("soft-means", {"feat_post": "l2"}, "soft-means reads no labels"),
        ("gh-ofl", {"feat_post": "standardize"}, "feat_post=standardize"),
    ],
)
def test_stages_need_sums_over_labelled_rows(name, given, words):
    config = TrainConfig(method=name, stages=2, set=given)
    settings = METHODS[name].resolve("paper", given)
    refused(lambda: resolve_run(config, METHODS[name], settings, ["a"], 5), words)


def test_stages_that_cannot_be_are_refused(store, parts):
    refused(lambda: fc.train("fed3r", store, parts, stages=2, participation=2), "some clients")
    refused(lambda: fc.train("fed3r", store, parts, stages=CLASSES + 1), "only 6 classes")
    private = {"dp_clip": 1.0, "dp_noise": 1.0, "dp_seed": 0}
    refused(lambda: fc.train("fed3r", store, parts, stages=2, **private), "dp_clip")
    must_fail("--stages", f"train fed3r --store {store.path} --stages 0")
