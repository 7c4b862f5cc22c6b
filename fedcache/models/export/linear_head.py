"""The head of a model that is linear in its features, found by asking it: coefficients, and a scikit-learn estimator.

A method's ``predict`` is code of its own, so whether it is linear is seen from its values: the scores at zero are the
intercept, those at the unit vectors give the coefficients, and drawn rows of several lengths must then agree. Scores
count up to a number that is the same for all classes (as minus half the squared distances to class means), which no
probability depends on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.compose import ColumnTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import Binarizer, Normalizer
from torch import Tensor

from fedcache.errors import UsageError
from fedcache.federate.engine.deployed import DeployedModel
from fedcache.heads.losses import MASKED
from fedcache.models.predictor import Predictor

AGREE = 1e-6
"""Largest difference of scores, relative to the largest, of a head that is called linear."""

LENGTHS = (0.01, 1.0, 30.0)
"""Of the drawn rows, in standard deviations: a bend near zero or far out is met by one of them."""

STEP = 1024
"""Unit vectors that are scored at a time."""


@dataclass(frozen=True)
class LinearHead:
    """Scores are x @ coef.T + intercept, of features after ``feat_post``."""

    coef: NDArray[np.float64]  # [C, D]
    intercept: NDArray[np.float64]  # [C]
    centred: bool  # scores minus their mean over classes, where only these are linear


def linear_head(predictor: Predictor) -> LinearHead:
    """The head of a model that is linear in features.

    Raises UsageError, naming the method, for any other one.
    """
    (model,), (saved,) = predictor.deployed, predictor.members
    name = saved.facts.method
    if saved.facts.image is not None:
        raise UsageError(
            f"{name} reads images, so its model is not linear in features.",
            "fedcache export-model RUN -o model.onnx",
        )
    exact = _in_double(model)
    for centred in (False, True):
        found = _fitted(exact, centred)
        if found is not None:
            return found
    raise UsageError(
        f"The scores of {name} are not linear in the features, so no coefficients give them.",
        "fedcache export-model RUN -o DIR, model.onnx, model.pt2 or head.safetensors   takes every method.",
    )


def _in_double(model: DeployedModel) -> DeployedModel:
    """The same tensors, computed with in float64, where a bend is not hidden by rounding."""
    env = replace(model.ctx.env, dtype=torch.float64, text=_double(model.ctx.env.text))
    down, own = (
        {k: t.double() if t.is_floating_point() else t for k, t in tree.items()}
        for tree in (model.down, model.personal)
    )
    return replace(model, down=down, personal=own, ctx=replace(model.ctx, env=env))


def _double(t: Tensor | None) -> Tensor | None:
    if t is None:
        return None
    return t.double()


def _fitted(model: DeployedModel, centred: bool) -> LinearHead | None:
    """The linear function through the values of a model; None where another row disagrees."""
    D = model.ctx.env.width

    def scores(x: Tensor) -> Tensor:
        with torch.no_grad():
            s = model.scores(x)
        # A class that is never predicted has one very low score; the mean is of the others.
        if centred:
            return torch.where(live, s - s[:, live].mean(-1, keepdim=True), s)
        return s

    with torch.no_grad():
        live = model.scores(torch.zeros(1, D, dtype=torch.float64))[0] > MASKED / 2
    b = scores(torch.zeros(1, D, dtype=torch.float64))[0]
    eye = torch.eye(D, dtype=torch.float64)
    W = torch.cat([scores(eye[start : start + STEP]) for start in range(0, D, STEP)]) - b
    drawn = torch.randn(64, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for length in LENGTHS:
        x = drawn * length
        wanted = scores(x)
        gap = (x @ W + b - wanted).abs()
        size = wanted[:, live].abs().max()
        if not bool((gap <= AGREE * (1e-3 + size)).all()):  # False for NaN
            return None
    return LinearHead(W.T.numpy().copy(), b.numpy().copy(), centred)


def estimator(predictor: Predictor, head: LinearHead) -> Any:
    """A scikit-learn classifier of raw features [N, D], all backbones side by side: names in ``classes_`` (sorted).

    A ``LogisticRegression`` with the head's coefficients, after the steps of ``feat_post`` where these are not linear.
    Its probabilities are those of ``predict``. Raises UsageError for a model of one class.
    """
    saved = predictor.members[0]
    facts = saved.facts
    if len(facts.classes) < 2:
        raise UsageError(
            "The model has one class, and a LogisticRegression needs two.",
            "Use -o head.safetensors",
        )
    order = np.argsort(np.array(facts.classes), kind="stable")
    coef = head.coef[order] / predictor.softmax_temperature
    intercept = head.intercept[order] / predictor.softmax_temperature
    own = facts.overrides.get(facts.saved.get(predictor.client or "", -1))
    if own is not None and own.columns:
        whole = np.zeros((len(coef), facts.width))
        whole[:, np.concatenate([np.arange(a, b) for a, b in own.columns])] = coef
        coef = whole
    if facts.feat_post == "standardize":
        mean, scale = (
            saved.tensors[f"features/{name}"].double().numpy() for name in ("mean", "scale")
        )
        coef = coef / scale
        intercept = intercept - coef @ mean
    if len(order) == 2:  # what scikit-learn keeps of two classes
        coef = coef[1:] - coef[:1]
        intercept = intercept[1:] - intercept[:1]
    last = LogisticRegression()
    last.coef_ = coef
    last.intercept_ = intercept
    last.classes_ = np.array(facts.classes)[order]
    last.n_features_in_ = facts.width
    last.n_iter_ = np.array([0])
    return _after(facts.feat_post, facts.widths, last)


def _after(feat_post: str, widths: tuple[int, ...], last: LogisticRegression) -> Any:
    """The classifier behind the steps of ``feat_post``; ``standardize`` is in its coefficients."""
    if feat_post in ("none", "standardize"):
        return last
    if feat_post == "sign":
        return _ready(make_pipeline(Binarizer(threshold=0.0), last))
    if feat_post == "l2_concat" or len(widths) == 1:
        return _ready(make_pipeline(Normalizer(), last))
    starts = np.cumsum([0, *widths])
    blocks = [
        (f"block_{k}", Normalizer(), slice(int(a), int(a) + w))
        for k, (a, w) in enumerate(zip(starts, widths, strict=False))
    ]
    return _ready(make_pipeline(ColumnTransformer(blocks), last))


def _ready(made: Pipeline) -> Pipeline:
    """A pipeline whose steps need no fit."""
    for _, step in made.steps[:-1]:
        step.fit(np.zeros((1, made.steps[-1][1].n_features_in_)))
    return made
