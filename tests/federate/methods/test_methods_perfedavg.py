"""Facts of perfedavg: a step ahead, a step, and the adaptation of what is deployed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from federation import federation, gap, go
from method_calls import EXECUTIONS, batches_of, exact, lanes, quadratic

from fedcache.federate.engine.client_data import stack_clients
from fedcache.federate.engine.local_training import optimiser_step
from fedcache.federate.methods import perfedavg


@EXECUTIONS
@pytest.mark.parametrize("model", [{"head": "linear"}, {"dim": 8}, {"dim": 8, "bn": True, "batch": 16}])
def test_without_a_step_ahead_it_is_fedavg_bit_for_bit(execution, model):  # T-G1, T-G3
    pair, keys = exact(execution=execution)
    plain = {**model, "opt": "sgd", "lr": 0.1, "wd": 0.0, "momentum": 0.0, "epochs": 2}
    fedavg = go("fedavg", plain, *pair, **keys)
    settings = {**model, "beta": 0.1, "epochs": 2, "adapt_steps": 0}
    out = go("perfedavg", {**settings, "alpha": 0.0}, *pair, **keys)
    assert gap(out.server, fedavg.server) == 0.0
    assert np.array_equal(out.evaluation.predictions, fedavg.evaluation.predictions)
    assert (out.protocol, out.accuracy) == ("global", fedavg.accuracy)
    assert gap(go("perfedavg", {**settings, "alpha": 0.1}, *pair, **keys).server, fedavg.server) > 0.0


def test_the_first_order_step_on_a_quadratic():
    # T-G2: theta - beta a (1 - alpha a) (theta - b); the full Hessian would square the bracket.
    # Different batches: theta' = theta - alpha a (theta - b1), then theta - beta a (theta' - b2).
    a, alpha, beta = 3.0, 0.2, 0.05
    ctx = perfedavg.as_sgd(lanes("perfedavg", {"alpha": alpha, "beta": beta}, lead=(2,), who=("u", "v")), "beta")
    t, b2, b1 = (torch.tensor(v, dtype=torch.float64) for v in ([2.0, 2.0], [0.5, 0.5], [0.5, -1.0]))
    step = optimiser_step(perfedavg.ahead(quadratic(a), ("t",)), ("t",), {})
    carry = {"t": t.clone(), "opt/m/t": torch.zeros(2, dtype=torch.float64)}
    step(carry, {"x": b2, "x1": b1, "y": b2, "y1": b1, "i": b2, "i1": b1}, ctx)
    there = t - alpha * a * (t - b1)
    assert torch.allclose(carry["t"], t - beta * a * (there - b2), atol=1e-15)
    assert float(carry["t"][0]) == pytest.approx(2.0 - beta * a * (1 - alpha * a) * (2.0 - 0.5))


def test_the_second_batches_are_those_of_fedavg_and_the_first_are_others():
    data, clients = federation()
    c = clients[1]  # 64 rows
    ctx = lanes("perfedavg", {"batch": 16}, who=(c.name,))
    found = [b for _, b in perfedavg.pairs(stack_clients(data.x, data.y, [c.train], 0), ctx, 0)]
    for name, purpose in (("", "batch"), ("1", "inner")):
        for b, rows in zip(found, batches_of(c, 0, 1, 0, purpose), strict=True):
            assert torch.equal(b["x" + name], data.x[rows, 0])
            assert torch.equal(b["y" + name], data.y[rows])
    first, second = (torch.cat([b[k] for b in found]) for k in ("i1", "i"))
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(64))
    assert not torch.equal(first, second)


@EXECUTIONS
def test_perfedavg_is_a_step_ahead_and_a_step_of_torch(execution):
    data, clients = federation(sizes=(20, 33, 7))
    settings = {"head": "linear", "init": "shared", "alpha": 0.4, "beta": 0.2, "batch": 16, "adapt_steps": 2}
    start = go("perfedavg", {**settings, "epochs": 0}, data, clients, participation=None, rounds=1).server
    out = go("perfedavg", settings, data, clients, participation=None, rounds=1, execution=execution)

    def gradient(theta, rows):
        leaves = [t.detach().requires_grad_() for t in theta]
        u = torch.nn.functional.linear(data.x[rows, 0], *leaves)
        return torch.autograd.grad(torch.nn.functional.cross_entropy(u, data.y[rows]), leaves)

    total = [0.0, 0.0]
    for c in clients:
        theta = [start["W"], start["b"]]
        for second, first in zip(batches_of(c, 0, 0, 0), batches_of(c, 0, 0, 0, "inner"), strict=True):
            there = [t - 0.4 * g for t, g in zip(theta, gradient(theta, first), strict=True)]
            theta = [t - 0.2 * g for t, g in zip(theta, gradient(there, second), strict=True)]
        total = [s + len(c.train) / 60 * t for s, t in zip(total, theta, strict=True)]
    assert gap(out.server, {"W": total[0], "b": total[1]}) < 1e-12
    for i, c in enumerate(clients):  # deployed: two steps, each on the first batch of an order of the training rows
        theta = total
        for step in range(2):
            rows = batches_of(c, 0, 1, step, "adapt")[0]
            theta = [t - 0.4 * g for t, g in zip(theta, gradient(theta, rows), strict=True)]
        predicted = torch.nn.functional.linear(data.x[c.test, 0], *theta).argmax(-1)
        assert out.client_accuracy[i] == (predicted == data.y[c.test]).double().mean()


@pytest.mark.slow
def test_evaluation_never_changes_training():
    settings = {"dim": 8, "alpha": 0.3, "beta": 0.1}
    rare = go("perfedavg", settings)
    often = go("perfedavg", {**settings, "adapt_steps": 4}, eval_every=1)
    leaking = go("perfedavg", {**settings, "adapt_on": "test"}, eval_every=1)
    assert gap(rare.server, often.server) == gap(rare.server, leaking.server) == 0.0
    data, clients = federation()
    holed = data.x.clone()
    holed[np.concatenate([c.test for c in clients])] = torch.nan
    blind = go("perfedavg", {**settings, "adapt_on": "test"}, replace(data, x=holed), clients)
    assert gap(rare.server, blind.server) == 0.0


def test_adapting_on_test_rows_reads_them_and_says_so():  # D-71
    data, clients = federation(sizes=(64, 50), tests=12)
    settings = {"head": "linear", "init": "zero", "alpha": 50.0, "epochs": 0, "adapt_steps": 5, "batch": 12}
    train, test = (go("perfedavg", {**settings, "adapt_on": on}, data, clients) for on in ("train", "test"))
    assert train.warnings == ()
    assert "labelled test rows" in test.warnings[0]
    assert test.accuracy > train.accuracy
    # With other labels on the test rows the leak predicts other classes; a model of training rows does not.
    y = data.y.clone()
    rows = np.concatenate([c.test for c in clients])
    y[rows] = (y[rows] + 1) % data.classes
    for adapt_on, same in (("train", True), ("test", False)):
        moved = go("perfedavg", {**settings, "adapt_on": adapt_on}, replace(data, y=y), clients)
        known = (train if adapt_on == "train" else test).evaluation.predictions
        assert np.array_equal(moved.evaluation.predictions, known) is same
    assert go("perfedavg", {"adapt_on": "test", "adapt_steps": 0, "bn": False}).warnings == ()


def test_a_client_with_less_than_a_batch_adapts_on_what_it_has():
    data, clients = federation(sizes=(40, 9))
    settings = {"head": "linear", "init": "zero", "alpha": 5.0, "batch": 32, "drop_last": True, "epochs": 0}
    out = go("perfedavg", settings, data, clients, participation=None)
    assert out.records[0].clients == (0,)
    rows = batches_of(clients[1], 0, out.records[-1].round, 0, "adapt", size=32)[0]
    leaf = torch.zeros(6, 11, dtype=torch.float64, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(data.x[rows, 0] @ leaf.T, data.y[rows])
    bias = -5.0 * (1 / 6 - torch.bincount(data.y[rows], minlength=6) / len(rows))
    predicted = (data.x[clients[1].test, 0] @ (-5.0 * torch.autograd.grad(loss, leaf)[0]).T + bias).argmax(-1)
    assert out.client_accuracy[1] == (predicted == data.y[clients[1].test]).double().mean()
