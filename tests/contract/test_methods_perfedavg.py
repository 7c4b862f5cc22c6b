"""Facts of perfedavg: a step ahead, a step, and the adaptation of what is deployed."""

from dataclasses import replace

import numpy as np
import pytest
from federation import federation, gap, go, go_all, start_of
from float64 import zeros
from method_calls import batches_of, exact
from reference_steps import linear, linear_gradient, mean_of
from setting_lines import set_to


@pytest.mark.parametrize("model", [{"head": "linear"}, set_to("dim=8 bn=true batch=16")])
def test_without_a_step_ahead_it_is_fedavg_bit_for_bit(model):  # T-G1, T-G3
    pair, keys = exact()
    plain = {**model, "opt": "sgd", "lr": 0.1, "wd": 0.0, "momentum": 0.0, "epochs": 2}
    fedavg = go("fedavg", plain, *pair, **keys)
    settings = {**model, "beta": 0.1, "epochs": 2, "adapt_steps": 0}
    out = go("perfedavg", {**settings, "alpha": 0.0}, *pair, **keys)
    assert gap(out.server, fedavg.server) == 0.0
    assert np.array_equal(out.evaluation.predictions, fedavg.evaluation.predictions)
    assert out.protocol == "global"
    assert out.accuracy == fedavg.accuracy
    assert (
        gap(go("perfedavg", {**settings, "alpha": 0.1}, *pair, **keys).server, fedavg.server) > 0.0
    )


def test_perfedavg_is_a_step_ahead_and_a_step_of_torch():
    data, clients = federation(sizes=(20, 33, 7))
    settings = set_to("head=linear init=shared alpha=0.4 beta=0.2 batch=16 adapt_steps=2")
    start = start_of("perfedavg", settings, data, clients)
    out = go_all("perfedavg", settings, data, clients, rounds=1)

    def stepped(theta, rate, at, rows):
        g = linear_gradient(at, data, rows)
        return {k: t - rate * g[k] for k, t in theta.items()}

    ends = []
    for c in clients:
        theta = start
        for second, first in zip(
            batches_of(c, 0, 0, 0), batches_of(c, 0, 0, 0, "inner"), strict=True
        ):
            theta = stepped(theta, 0.2, stepped(theta, 0.4, theta, first), second)
        ends.append(theta)
    server = mean_of(ends, [20, 33, 7])
    assert gap(out.server, server) < 1e-12
    # deployed: two steps, each on the first batch of an order of the training rows
    for i, c in enumerate(clients):
        theta = server
        for step in range(2):
            theta = stepped(theta, 0.4, theta, batches_of(c, 0, 1, step, "adapt")[0])
        predicted = linear(theta, data.x[c.test, 0]).argmax(-1)
        assert out.client_accuracy[i] == (predicted == data.y[c.test]).double().mean()


def test_evaluation_never_changes_training():
    settings = set_to("dim=8 alpha=0.3 beta=0.1")
    rare = go("perfedavg", settings)
    leaking = go("perfedavg", {**settings, "adapt_on": "test", "adapt_steps": 4}, eval_every=1)
    assert gap(rare.server, leaking.server) == 0.0


def test_adapting_on_test_rows_reads_them_and_says_so():  # D-71
    data, clients = federation(sizes=(64, 50), tests=12)
    settings = set_to("head=linear init=zero alpha=50.0 epochs=0 adapt_steps=5 batch=12")
    train, test = (
        go("perfedavg", {**settings, "adapt_on": on}, data, clients) for on in ("train", "test")
    )
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
    assert go("perfedavg", "adapt_on=test adapt_steps=0 bn=false").warnings == ()


def test_a_client_with_less_than_a_batch_adapts_on_what_it_has():
    data, clients = federation(sizes=(40, 9))
    settings = set_to("head=linear init=zero alpha=5.0 batch=32 drop_last=true epochs=0")
    out = go_all("perfedavg", settings, data, clients)
    assert out.records[0].clients == (0,)
    rows = batches_of(clients[1], 0, out.records[-1].round, 0, "adapt", size=32)[0]
    zero = {"W": zeros(6, 11), "b": zeros(6)}
    adapted = {k: -5.0 * g for k, g in linear_gradient(zero, data, rows).items()}
    predicted = linear(adapted, data.x[clients[1].test, 0]).argmax(-1)
    assert out.client_accuracy[1] == (predicted == data.y[clients[1].test]).double().mean()
