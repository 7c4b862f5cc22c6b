"""Prompt methods compared with plain torch: CoOp, KgCoOp, ProGrad, PromptFolio, FedPGP and DP-FPL."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from federation import federation, fitted, gap, go_all
from float64 import far
from setting_lines import set_to
from torch.nn.functional import (
    cosine_similarity,
    cross_entropy,
    kl_div,
    log_softmax,
    softmax,
)

from fedcache.federate.engine.context import generator
from fedcache.federate.methods import METHODS
from fedcache.federate.methods.prograd import aligned
from fedcache.testing.towers import E, L

STEPS = set_to("batch=64 epochs=2 lr=0.02 sched_unit=none reset_opt=false")
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
    out = go_all(name, {**STEPS, "ctx_init": "words", **settings}, *whole)
    start = go_all(
        name, {**STEPS, "ctx_init": "words", **settings, "lr": 0.0}, *whole, rounds=1
    ).server["ctx"]
    assert gap(out.server["ctx"], trained_by_hand(whole, start, gradient)) < 1e-10
    assert gap(out.server["ctx"], start) > 0.05


def test_only_the_part_against_the_general_gradient_is_removed():
    general = torch.tensor([[2.0, 0.0], [0.0, 0.0]])
    against = torch.tensor([[-3.0, 1.0], [0.0, 5.0]])
    assert aligned(against, general, 1.0).tolist() == [[0.0, 1.0], [0.0, 5.0]]
    assert aligned(against, general, 0.5).tolist() == [[-1.5, 1.0], [0.0, 5.0]]
    assert torch.equal(aligned(-against, general, 1.0), -against)
    assert torch.equal(aligned(against, 0 * general, 1.0), against)


@pytest.fixture
def two():
    """Two clients of 20 and 12 rows, and the data."""
    data, clients = federation(sizes=(20, 12), per_client=6)
    return fitted(METHODS["promptfl"], data), clients


def first(name, two, **settings):
    """The shared prompt and the own tensors of the clients before the first step."""
    out = go_all(name, {**STEPS, "n_ctx": 3, **settings, "lr": 0.0}, *two, rounds=1)
    return {**out.server, **{k: t for k, t in out.states[0].items() if not k.startswith("opt/")}}


def by_hand(two, start, objective):
    """3 rounds of 2 steps of torch's Adam at both clients on ``objective(data, x, y, p)``, averaging ``ctx``.

    Returns the shared prompt, and the own tensors of each client.
    """
    data, clients = two
    params = [{k: t.clone().requires_grad_() for k, t in start.items()} for _ in clients]
    solvers = [torch.optim.Adam(p.values(), lr=0.02) for p in params]
    rows = np.array([len(c.train) for c in clients])
    for _ in range(3):
        for client, p, solver in zip(clients, params, solvers, strict=True):
            x, y = data.x[client.train, 0], data.y[client.train]
            for _ in range(2):
                solver.zero_grad()
                objective(data, x, y, p).backward()
                solver.step()
        shared = sum(n * p["ctx"].detach() for n, p in zip(rows, params, strict=True)) / rows.sum()
        for p in params:
            p["ctx"].data.copy_(shared)
    return shared, [{k: t.detach() for k, t in p.items() if k != "ctx"} for p in params]


def scored(out, data, clients, features):
    """Whether each client's predictions are those of its class features."""
    parts = np.split(out.evaluation.predictions, np.cumsum([len(c.test) for c in clients])[:-1])
    for client, own, mine in zip(clients, features, parts, strict=True):
        u = data.x[client.test, 0] @ own.T
        assert np.array_equal(mine, u.argmax(1).numpy())


def mixed(data, p, theta):
    """PromptFolio's class features: those of the shared and of the own prompt, mixed."""
    return (1 - theta) * class_features(data, p["ctx"]) + theta * class_features(data, p["own"])


def adapted(data, p, mu):
    """FedPGP's class features: those of the shared prompt and an own matrix of low rank."""
    return class_features(data, p["ctx"] + p["U"] @ p["V"])


def of_promptfolio(data, x, y, p, theta):
    return cross_entropy(100 * x @ mixed(data, p, theta).T, y)


def of_fedpgp(data, x, y, p, mu):
    t = adapted(data, p, mu)
    shared = class_features(data, p["ctx"])
    near = cosine_similarity(shared, of_template(data), dim=1)
    pairs = torch.stack([near, cosine_similarity(shared, t, dim=1)], 1) / 0.5
    kept = cross_entropy(pairs, torch.zeros(len(t), dtype=torch.int64))
    return cross_entropy(100 * x @ t.T, y) + mu * kept


@pytest.mark.parametrize(
    ("name", "key", "value", "features", "objective"),
    [
        *(("promptfolio", "theta", v, mixed, of_promptfolio) for v in (0.0, 0.4, 1.0)),
        *(("fedpgp", "mu", v, adapted, of_fedpgp) for v in (1.0, 0.0)),
    ],
)
def test_a_personal_prompt_is_its_formula_by_torchs_own_adam(
    name, key, value, features, objective, two
):
    out = go_all(name, {**STEPS, "n_ctx": 3, key: value}, *two)
    start = first(name, two)
    shared, own = by_hand(two, start, partial(objective, **{key: value}))
    assert gap(out.server["ctx"], shared) < 1e-10
    # With a share of one the own prompt alone is trained, and with none the shared one.
    share = {"promptfolio": value}.get(name, 0.5)
    assert (gap(shared, start["ctx"]) > 0.01) == (share < 1)
    assert (gap(own[0], own[1]) > 0.01) == (share > 0)
    for state, tensors in zip(out.states.values(), own, strict=True):
        assert gap({k: state[k] for k in tensors}, tensors) < 1e-10
    assert out.protocol == "personalised"
    scored(out, *two, [features(two[0], {"ctx": shared, **p}, value) for p in own])


def test_the_own_parts_begin_apart_from_the_shared_prompt(two):
    folio = first("promptfolio", two)
    assert gap(folio["ctx"], folio["own"]) > 0.01
    assert first("fedpgp", two)["U"].shape == (3, 4)


def orthogonal(matrix):
    """The columns by Gram and Schmidt."""
    q, r = torch.linalg.qr(matrix)
    return q * r.diagonal().sign()


def released(two, start, sigma, clip):
    """3 rounds of one batch: the shared vectors, and the own ones of each client."""
    data, clients = two
    shared = start["ctx"].clone().requires_grad_()
    own = [start["own"].clone().requires_grad_() for _ in clients]
    solver = torch.optim.SGD([shared, *own], lr=0.02, momentum=0.9, weight_decay=5e-4)

    def drawn(purpose, client, round_, shape):
        source = generator(0, purpose, round_, client.name, 0, 0)
        return torch.from_numpy(source.standard_normal(shape))

    def private(g, purpose, client, round_):
        if sigma == 0:
            return g
        g = g * min(1.0, clip / float(g.norm()))
        return g + sigma * clip / 64 * drawn(purpose, client, round_, tuple(g.shape))

    for round_ in range(3):
        of_shared = []
        for client, w in zip(clients, own, strict=True):
            with torch.no_grad():
                u = orthogonal(w @ drawn("factors", client, round_, (8, 2)))
                v = orthogonal(w.T @ u).T
                rest = w - u @ v
            u.requires_grad_()
            v.requires_grad_()
            T = class_features(data, shared + u @ v + rest)
            loss = cross_entropy(100 * data.x[client.train, 0] @ T.T, data.y[client.train])
            g, gu, gv = torch.autograd.grad(loss, [shared, u, v])
            plain = g * min(1.0, clip / float(g.norm())) if sigma else g
            of_shared.append(
                plain + (private(g, "noise of v", client, round_) - plain) / math.sqrt(2)
            )
            gu = private(gu, "noise of U", client, round_) / 10
            gv = private(gv, "noise of V", client, round_) / 10
            u, v = u.detach(), v.detach()
            w.grad = gu @ v + u @ gv + u @ (u.T @ (gu @ v))
        shared.grad = sum(of_shared) / 2
        solver.step()
    return shared.detach(), [w.detach() for w in own]


@pytest.mark.parametrize(("sigma", "clip"), [(0.0, 10.0), (6.0, 0.5), (6.0, 1e3)])
def test_a_batch_a_round_is_the_released_code(sigma, clip, two):
    settings = set_to("n_ctx=3 rank=2 batch=64 lr=0.02")
    out = go_all("dp-fpl", {**settings, "noise": sigma, "clip": clip}, *two)
    start = first("dp-fpl", two, **settings)
    shared, own = released(two, start, sigma, clip)
    assert far(out.server["ctx"], shared.numpy()) < 1e-10
    assert far(shared, start["ctx"].numpy()) > 0.01
    for state, w in zip(out.states.values(), own, strict=True):
        assert far(state["own"], w.numpy()) < 1e-10
        assert far(w, start["own"].numpy()) > 1e-3
    scored(out, *two, [class_features(two[0], shared + w) for w in own])


def test_it_says_that_its_noise_has_no_guarantee():
    method = METHODS["dp-fpl"]
    (said,) = method.cautions(method.resolve("paper", {}))
    assert "no proven privacy" in said
    assert not method.cautions(method.resolve("paper", {"noise": 0.0}))
    assert np.isclose(
        method.hparam("noise").default, math.sqrt(100 * math.log(1e5)) / 0.4, atol=0.05
    )
