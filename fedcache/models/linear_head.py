"""Linear head: the coefficients and the bias of a model whose scores are linear in the features."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcache.errors import UsageError
from fedcache.federate.engine.outcome import DeployedModel
from fedcache.heads.losses import MASKED
from fedcache.models.predictor import Predictor
from fedcache.models.saved_model import in_double

LINEAR_TO = 1e-6
"""Largest relative difference between a linear head's scores and the linear function that was fitted to them."""

LENGTHS = (0.01, 1.0, 30.0)
"""Standard deviations of the drawn rows. They reveal heads that are nonlinear near 0 or far from 0."""

UNIT_VECTORS = 1024
"""Number of unit vectors that are scored at once."""


@dataclass(frozen=True)
class LinearHead:
    """Scores are x @ coef.T + intercept, of features after ``feat_post``."""

    coef: NDArray[np.float64]  # [C, D]
    intercept: NDArray[np.float64]  # [C]
    centred: bool  # True if only the scores minus their mean over classes are linear, and these are given


def linear_head(predictor: Predictor) -> LinearHead:
    """The head of a model that is linear in features.

    Raises UsageError, naming the method, for any other model.
    """
    facts = predictor.members[0].facts
    name = facts.method
    if facts.image is not None:
        raise UsageError(
            f"{name} reads images, so its model is not linear in features.",
            "fedcache export-model RUN -o model.onnx",
        )
    exact = _exact(predictor.deployed[0])
    for centred in (False, True):
        head = _fitted(exact, centred)
        if head is not None:
            return head
    raise UsageError(
        f"The scores of {name} are not linear in the features, so coefficients cannot represent them.",
        "fedcache export-model RUN -o DIR, model.onnx, model.pt2 or head.safetensors   supports every "
        "method.",
    )


def _exact(model: DeployedModel) -> DeployedModel:
    """The same model in float64, so that rounding does not hide nonlinearity."""
    env = replace(model.ctx.env, dtype=torch.float64)
    if env.text is not None:
        env = replace(env, text=env.text.double())
    down = in_double(model.down)
    own = in_double(model.personal)
    return replace(model, down=down, personal=own, ctx=replace(model.ctx, env=env))


def _fitted(model: DeployedModel, centred: bool) -> LinearHead | None:
    """The linear function through the scores of 0 and of the unit vectors; None if it is wrong for drawn rows."""
    D = model.ctx.env.width
    origin = torch.zeros(1, D, dtype=torch.float64)
    with torch.no_grad():
        # A class that is never predicted has a very low score, which must not enter means and sizes.
        live = model.scores(origin)[0] > MASKED / 2

    def scores(x: Tensor) -> Tensor:
        with torch.no_grad():
            s = model.scores(x)
        if centred:
            return torch.where(live, s - s[:, live].mean(-1, keepdim=True), s)
        return s

    b = scores(origin)[0]
    eye = torch.eye(D, dtype=torch.float64)
    W = torch.cat([scores(rows) for rows in torch.split(eye, UNIT_VECTORS)]) - b
    drawn = torch.randn(64, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for length in LENGTHS:
        x = drawn * length
        expected = scores(x)
        gap = (x @ W + b - expected).abs()
        size = expected[:, live].abs().max()
        # NaN must not count as linear, so the check is whether the gaps are small. The summand 1e-3 keeps the tolerance
        # above 0 for scores of 0.
        linear = gap <= LINEAR_TO * (1e-3 + size)
        if not bool(linear.all()):
            return None
    return LinearHead(W.T.numpy().copy(), b.numpy().copy(), centred)
