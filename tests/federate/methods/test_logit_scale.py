"""The logit scale: one factor of all logits, of students, teachers and first soft labels alike (D-83)."""

import pytest
import torch
from federation import federation, gap, go, rows_trained, server_gap
from float64 import normal, ones
from method_calls import lanes
from setting_lines import set_to

from fedcache.federate.methods import METHODS
from fedcache.federate.methods.central import lbfgs

PLAIN = set_to("opt=sgd batch=16 epochs=2")


@pytest.mark.parametrize("execution", ["batched", "gram"])
@pytest.mark.parametrize("name", ["fedavg", "fedntd"])
def test_a_scale_is_another_rate_on_scaled_weights(name, execution):
    """With V = s W and c = s b the logits are V x + c, and a step of W by lr is one of V by lr s^2, decay wd / s^2."""
    head = {"head": "linear", "init": "zero", **PLAIN}
    s = 4.0
    lr = 0.02
    wd = 0.01
    scaled = go(name, {**head, "logit_scale": s, "lr": lr, "wd": wd}, execution=execution)
    plain = go(name, {**head, "lr": s**2 * lr, "wd": wd / s**2}, execution=execution)
    assert gap({k: s * t for k, t in scaled.server.items()}, plain.server) < 1e-12
    other = go(name, {**head, "lr": lr, "wd": wd}, execution=execution)
    assert server_gap(scaled, other) > 1e-3


def test_central_by_sgd_and_by_lbfgs_are_scaled_too():
    data, clients = federation()
    s = 4.0
    plain_sgd = {**PLAIN, "probe": "sgd", "init": "zero"}
    scaled = go("central", {**plain_sgd, "logit_scale": s, "lr": 0.02, "wd": 0.01})
    plain = go("central", {**plain_sgd, "lr": 0.02 * s**2, "wd": 0.01 / s**2})
    assert gap({k: s * t for k, t in scaled.server.items()}, plain.server) < 1e-12
    x = data.x[:, 0].double()
    y = data.y
    W, b = lbfgs(x, y, 6, 0.02, 500, s)
    V, c = lbfgs(x, y, 6, 0.02 / s**2, 500)  # (l2/2) |W|^2 = (l2 / 2 s^2) |V|^2
    assert gap(s * W, V) < 1e-5
    assert gap(s * b - (s * b).mean(), c - c.mean()) < 1e-5
    out = go("central", {"l2": 0.02, "logit_scale": s})
    rows = rows_trained(clients)
    W, b = lbfgs(data.x[rows, 0].double(), data.y[rows], 6, 0.02, 500, s)
    assert gap(out.server["W"], W) < 1e-6


@pytest.mark.parametrize("name", ["fedavg", "fedntd", "central", "fst-cbdg"])
def test_scores_are_scaled(name):
    """So that their softmax is the model's own probability."""
    data, _ = federation()
    x = data.x[:7, 0]
    server = {"W": normal(6, 11), "b": ones(6)}
    head = {"head": "linear", "logit_scale": 12.5}
    scores = METHODS[name].predict(server, {}, None, x, lanes(name, head, text=data.text))
    assert torch.allclose(scores, 12.5 * (x @ server["W"].T + 1.0), atol=1e-12)
