"""DP-FPL, compared with steps as its released code takes them: one averaged gradient and torch's own SGD."""

import math

import numpy as np
import pytest
import torch
from federation import go_all
from float64 import far
from setting_lines import set_to
from test_methods_prompt_guided import class_features
from test_methods_prompt_personal import first, scored
from test_methods_prompt_personal import two as two
from torch.nn.functional import cross_entropy

from fedcache.federate.engine.context import generator
from fedcache.federate.methods import METHODS

SETTINGS = set_to("n_ctx=3 rank=2 batch=64 lr=0.02")


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
    out = go_all("dp-fpl", {**SETTINGS, "noise": sigma, "clip": clip}, *two)
    start = first("dp-fpl", two, **SETTINGS)
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
