"""Prompts of which a part stays with the client: PromptFolio and FedPGP, compared with torch's own optimiser."""

from functools import partial

import numpy as np
import pytest
import torch
from federation import federation, fitted, gap, go_all
from setting_lines import set_to
from test_methods_prompt_guided import class_features, of_template
from torch.nn.functional import cosine_similarity, cross_entropy

from fedcache.federate.methods import METHODS

TRAINING = set_to("n_ctx=3 batch=64 epochs=2 lr=0.02 sched_unit=none reset_opt=false")


@pytest.fixture
def two():
    """Two clients of 20 and 12 rows, and the data."""
    data, clients = federation(sizes=(20, 12), per_client=6)
    return fitted(METHODS["promptfl"], data), clients


def first(name, two, **settings):
    """The shared prompt and the own tensors of the clients before the first step."""
    out = go_all(name, {**TRAINING, **settings, "lr": 0.0}, *two, rounds=1)
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
    out = go_all(name, {**TRAINING, key: value}, *two)
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
