"""Prompts of which a part stays with the client: PromptFolio and FedPGP, compared with torch's own optimiser."""

import numpy as np
import pytest
import torch
from federation import federation, fitted, gap, go_all, server_gap
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
    return (1 - theta) * class_features(data, p["ctx"]) + theta * class_features(data, p["own"])


@pytest.mark.parametrize("theta", [0.4, 1.0])
def test_promptfolio_is_its_formula_by_torchs_own_adam(theta, two):
    def objective(data, x, y, p):
        return cross_entropy(100 * x @ mixed(data, p, theta).T, y)

    out = go_all("promptfolio", {**TRAINING, "theta": theta}, *two)
    start = first("promptfolio", two)
    assert gap(start["ctx"], start["own"]) > 0.01
    shared, own = by_hand(two, start, objective)
    assert gap(out.server["ctx"], shared) < 1e-10
    assert (gap(shared, start["ctx"]) > 0.01) == (theta < 1)
    for state, tensors in zip(out.states.values(), own, strict=True):
        assert gap(state["own"], tensors["own"]) < 1e-10
    assert gap(own[0]["own"], own[1]["own"]) > 0.01
    assert out.protocol == "personalised"
    scored(out, *two, [mixed(two[0], {"ctx": shared, **p}, theta) for p in own])


def test_without_own_prompts_it_is_promptfl(two):
    plain = go_all("promptfl", TRAINING, *two)
    out = go_all("promptfolio", {**TRAINING, "theta": 0.0}, *two)
    assert server_gap(out, plain) == 0.0
    assert gap(out.states[0]["own"], first("promptfolio", two)["own"]) == 0.0
    assert np.array_equal(out.evaluation.predictions, plain.evaluation.predictions)


@pytest.mark.parametrize("mu", [1.0, 0.0])
def test_fedpgp_is_its_formula_by_torchs_own_adam(mu, two):
    def personal(data, p):
        return class_features(data, p["ctx"] + p["U"] @ p["V"])

    def objective(data, x, y, p):
        t = personal(data, p)
        shared = class_features(data, p["ctx"])
        near = cosine_similarity(shared, of_template(data), dim=1)
        pairs = torch.stack([near, cosine_similarity(shared, t, dim=1)], 1) / 0.5
        kept = cross_entropy(pairs, torch.zeros(len(t), dtype=torch.int64))
        return cross_entropy(100 * x @ t.T, y) + mu * kept

    out = go_all("fedpgp", {**TRAINING, "mu": mu}, *two)
    start = first("fedpgp", two)
    assert start["U"].shape == (3, 4)
    shared, own = by_hand(two, start, objective)
    assert gap(out.server["ctx"], shared) < 1e-10
    assert gap(shared, start["ctx"]) > 0.01
    for state, tensors in zip(out.states.values(), own, strict=True):
        assert gap({k: state[k] for k in tensors}, tensors) < 1e-10
    assert gap(own[0], own[1]) > 0.01
    scored(out, *two, [personal(two[0], {"ctx": shared, **p}) for p in own])
