"""Prompts of one client, and those that stay near the template (KgCoOp, ProGrad), compared with torch's own Adam."""

from functools import partial

import pytest
import torch
from federation import federation, fitted, gap, go_all
from setting_lines import set_to
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax

from fedcache.federate.methods import METHODS
from fedcache.federate.methods.prograd import aligned
from fedcache.testing.towers import E, L

TRAINING = set_to("ctx_init=words batch=64 epochs=2 lr=0.02 sched_unit=none reset_opt=false")
CLASSES = 6


@pytest.fixture
def whole():
    """One client who has every training row, and the data."""
    data, clients = federation(sizes=(20,), per_client=6)
    return fitted(METHODS["promptfl"], data), clients


def class_features(data, vectors):
    """Class features [C, D] of the vectors before the names, by plain torch."""
    tokens, end = data.towers.text.embed([n + "!" for n in data.names])
    count = vectors.shape[-2]
    own = vectors.expand(CLASSES, count, E)
    prompt = torch.cat([tokens[:, :1], own, tokens[:, 1 : L - count]], 1)
    return data.towers.text.encode(prompt, end + count)


def of_template(data):
    tower = data.towers.text
    return tower.encode(*tower.embed([data.towers.template.format(n) for n in data.names]))


def trained_by_hand(whole, start, gradient):
    """The vectors after 3 rounds of 2 epochs of one batch, by torch's Adam on the gradient of the vectors."""
    data, clients = whole
    x, y = data.x[clients[0].train, 0], data.y[clients[0].train]
    v = start.clone().requires_grad_()
    solver = torch.optim.Adam([v], lr=0.02)
    for _ in range(6):
        v.grad = gradient(data, x, y, v)
        solver.step()
    return v.detach()


def of_promptfl(data, x, y, v):
    return torch.autograd.grad(cross_entropy(100 * x @ class_features(data, v).T, y), v)[0]


def of_kgcoop(data, x, y, v):
    T = class_features(data, v)
    apart = torch.linalg.vector_norm(T - of_template(data), dim=1) ** 2
    return torch.autograd.grad(cross_entropy(100 * x @ T.T, y) + 8 * apart.mean(), v)[0]


def of_prograd(data, x, y, v, lam=1.0):
    u = 100 * x @ class_features(data, v).T
    (g,) = torch.autograd.grad(cross_entropy(u, y), v, retain_graph=True)
    template = softmax(100 * x @ of_template(data).T, 1)
    (b,) = torch.autograd.grad(kl_div(log_softmax(u, 1), template, reduction="batchmean"), v)
    unit = b / b.norm()
    along = (g * unit).sum()
    # the first prompt is the template, so that b is a rounding error
    return g if along >= 0 or b.norm() < 1e-8 * g.norm() else g - lam * along * unit


@pytest.mark.parametrize(
    ("name", "settings", "gradient"),
    [
        ("promptfl", {"ctx_init": "normal", "n_ctx": 3}, of_promptfl),  # T-T3: CoOp
        ("promptfl", {"ctx_init": "normal", "n_ctx": 3, "csc": True}, of_promptfl),
        ("kgcoop", {}, of_kgcoop),
        ("prograd", {}, of_prograd),
        ("prograd", {"prograd_weight": 0.3}, partial(of_prograd, lam=0.3)),
    ],
)
def test_one_client_is_the_formula_by_torchs_own_adam(name, settings, gradient, whole):
    out = go_all(name, {**TRAINING, **settings}, *whole)
    start = go_all(name, {**TRAINING, **settings, "lr": 0.0}, *whole, rounds=1).server["ctx"]
    assert gap(out.server["ctx"], trained_by_hand(whole, start, gradient)) < 1e-10
    assert gap(out.server["ctx"], start) > 0.05


def test_only_the_part_against_the_general_gradient_is_removed():
    general = torch.tensor([[2.0, 0.0], [0.0, 0.0]])
    against = torch.tensor([[-3.0, 1.0], [0.0, 5.0]])
    assert aligned(against, general, 1.0).tolist() == [[0.0, 1.0], [0.0, 5.0]]
    assert aligned(against, general, 0.5).tolist() == [[-1.5, 1.0], [0.0, 5.0]]
    assert torch.equal(aligned(-against, general, 1.0), -against)
    assert torch.equal(aligned(against, 0 * general, 1.0), against)
