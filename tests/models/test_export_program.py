"""Every method's model as a program: it predicts what the model does, for any number of rows."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from arrays import normals
from draws import one_of_each
from federation import VARIANTS, cases, fitted, go_tiny, ids, tiny
from methods_tried import tried
from refusal import refused
from test_saved_model import facts_of, rows_of

from fedcache import Recipe
from fedcache.errors import UsageError
from fedcache.federate.engine.client_data import FEAT_POSTS, prepare_features
from fedcache.federate.engine.method import ClientOverrides
from fedcache.federate.methods import METHODS
from fedcache.heads.losses import MASKED
from fedcache.models.export.program import (
    estimator,
    export,
    image_inputs,
    make_program,
)
from fedcache.models.linear_head import linear_head
from fedcache.models.predictor import Predictor
from fedcache.models.saved_model import ModelFacts, SavedModel, collect

LINEAR = {
    "afl",
    "central",
    "clip-zs",
    "dp-fpl",
    "fed3r",
    "fed3r-prior",
    "fedcgs",
    "fedcof",
    "fedncm",
    "fedntd",
    "fedpft",
    "fedpgp",
    "fedtpg",
    "fst-cbdg",
    "gda",
    "kgcoop",
    "lp-plus-plus",
    "prograd",
    "promptfl",
    "promptfolio",
    "soft-means",
}
"""Methods whose scores are linear in features by default, up to a number that is the same for all classes."""


def trained(case, dtype=torch.float64):
    """(predictor, data) of the tiny federation."""
    data, clients = tiny(views=4, dtype=dtype)
    out = go_tiny(*case, data, clients, dtype=dtype)
    data = fitted(METHODS[case[0]], data)
    model = collect(out, replace(facts_of(out, data), recipes=({},)), data, None, [])
    return Predictor((model,), next(iter(model.clients), None), encoders=data.towers), data


def first(name):
    """The first case of a method."""
    return next(case for case in cases() if case[0] == name)


def ridge_model():
    """The model of fed3r with a bias."""
    return trained(("fed3r", {"bias": True}))[0].members[0]


QUICK = ("fed3r-closed", "fedpcl-adam", "tip-local-closed")


def nine_rows(predictor, data):
    """Nine rows as the model reads them, and as its program and its graph do."""
    model = predictor.members[0]
    rows = rows_of(model, data, np.arange(9))
    if model.facts.image is None:
        return rows, rows.float()
    H, W = model.facts.image
    return rows, rows.view(-1, H, W, 3).permute(0, 3, 1, 2).contiguous()


CASES = [case for case in cases() if ids(case) in QUICK]
CASES += [
    pytest.param(case, marks=pytest.mark.slow)
    for case in tried(one_of_each(cases()) + VARIANTS)
    if case not in CASES
]


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_every_method_as_a_program(case):
    predictor, data = trained(case)
    program = make_program(predictor, home=None)
    rows, given = nine_rows(predictor, data)
    wanted = predictor.deployed[0].scores(rows)
    scores, probabilities = program.exported.module()(given)
    assert torch.allclose(scores, wanted.float(), rtol=1e-5, atol=1e-5)
    assert torch.allclose(probabilities, wanted.softmax(-1).float(), atol=1e-5)
    one = program.exported.module()(given[:1])[0]
    assert torch.allclose(one, scores[:1], rtol=1e-5, atol=1e-5)  # any number of rows


def test_a_predict_that_no_program_follows_is_refused_by_name(monkeypatch):
    predictor, _ = trained(first("fedncm"))
    program = make_program(predictor, home=None)
    monkeypatch.setattr(program.module, "features", lambda x: x[: int(x.sum() > 0) + 1])
    refused(lambda: export(program.module, program.inputs), "fedncm")


@pytest.mark.parametrize(
    "name", tried(sorted(n for n, m in METHODS.items() if "pixels" not in m.needs))
)
def test_which_methods_are_linear(name):
    predictor, data = trained([case for case in cases() if case[0] == name][-1])
    if predictor.members[0].facts.image is not None:
        pytest.skip("reads images by default")
    try:
        head = linear_head(predictor)
    except UsageError:
        assert name not in LINEAR
        return
    x = data.x[:, 0].nan_to_num().double()
    made = predictor.deployed[0]
    wanted = made.scores(x.to(made.ctx.env.dtype)).double().numpy()
    found = x.numpy() @ head.coef.T + head.intercept
    live = wanted[0] > MASKED / 2  # the client has rows of these classes
    assert live.sum() >= 2
    if head.centred:
        wanted = np.where(live, wanted - wanted[:, live].mean(-1, keepdims=True), wanted)
    assert np.abs(found - wanted).max() <= 1e-6 * (1 + np.abs(wanted[:, live]).max())


@pytest.mark.parametrize("feat_post", FEAT_POSTS)
def test_the_estimator_reads_features_as_the_model_does(feat_post):
    """Classes are sorted by name, as scikit-learn has them, and probabilities are the model's; of two backbones."""
    saved = ridge_model()
    raw = normals(1, 50, 1, 5) * 3 + 1
    _, scaling = prepare_features([raw], feat_post, np.arange(50))
    tensors = dict(saved.tensors)
    if scaling is not None:
        tensors["features/mean"] = torch.from_numpy(scaling.mean)
        tensors["features/scale"] = torch.from_numpy(scaling.scale)
    two = {"widths": (2, 3), "keys": ("k", "l"), "recipes": ({}, {})}
    facts = replace(saved.facts, feat_post=feat_post, classes=("z", "b", "a"), **two)
    predictor = Predictor((SavedModel(facts, tensors),), temperature=0.7)
    rows = raw[:, 0]
    wanted = predictor.probabilities(rows[:, :2], rows[:, 2:])
    made = others_agree(predictor, rows, wanted, [2, 1, 0])
    assert list(made.classes_) == ["a", "b", "z"]
    names = np.array(["z", "b", "a"])[wanted.argmax(-1)]
    assert np.array_equal(made.predict(rows.astype(np.float64)), names)


def others_agree(predictor, rows, wanted, order):
    """The estimator, which has these probabilities in another order of classes, as the program has them in theirs."""
    made = estimator(predictor, linear_head(predictor))
    assert np.abs(made.predict_proba(rows.astype(np.float64)) - wanted[:, order]).max() <= 1e-6
    p = make_program(predictor, home=None).exported.module()(torch.from_numpy(rows))[1].numpy()
    assert np.abs(p - wanted).max() <= 1e-5
    return made


def test_an_estimator_of_two_classes():
    """scikit-learn keeps one row of coefficients of two classes."""
    saved = ridge_model()
    two = {
        k: t[:2] if k.startswith("server/") and t.shape[:1] == (3,) else t
        for k, t in saved.tensors.items()
    }
    cut = Predictor((SavedModel(replace(saved.facts, classes=("no", "yes")), two),))
    x = normals(2, 20, 5)
    assert others_agree(cut, x, cut.probabilities(x), [0, 1]).coef_.shape == (1, 5)


def recipe(backbone, **changes):
    return Recipe(**{"backbone": backbone, "weights": "none", "size": 8, **changes})


def test_backbones_that_resize_alike_share_an_input():
    several, reads = image_inputs(
        [recipe("a"), recipe("b", size=9), recipe("c"), recipe("d", resize="squash")]
    )
    assert reads == (0, 1, 0, 2)
    assert [(i.name, i.height, i.backbones) for i in several] == [
        ("images_1", 8, ("a", "c")),
        ("images_2", 9, ("b",)),
        ("images_3", 8, ("d",)),
    ]


def test_the_model_of_a_client_that_has_some_columns_reads_only_these():
    """The head of columns 0, 1, 3 and 4 of five: as a model, as a program and as an estimator of all five."""
    saved = ridge_model()
    held = [0, 1, 3, 4]
    tensors = {
        k: t[:, held].contiguous() if t.shape == (3, 5) else t for k, t in saved.tensors.items()
    }
    assert any(t.shape == (3, 4) for t in tensors.values())
    facts = replace(saved.facts, overrides={-1: ClientOverrides(((0, 2), (3, 5)), {})})
    again = ModelFacts.from_dict(json.loads(json.dumps(facts.to_dict())))
    assert again.overrides == facts.overrides
    predictor = Predictor((SavedModel(facts, tensors),))
    x = normals(3, 20, 5)
    made = others_agree(predictor, x, predictor.probabilities(x), [0, 1, 2])
    assert np.array_equal(made.coef_[:, 2], np.zeros(3))


@pytest.mark.parametrize("name", ["ditto", "pfedme"])
def test_a_clients_model_holds_nothing_of_its_optimiser(name):
    predictor, _ = trained((name, {}))
    own = predictor.deployed[0].personal
    assert own
    assert not [tensor for tensor in own if tensor.startswith("opt/")]
