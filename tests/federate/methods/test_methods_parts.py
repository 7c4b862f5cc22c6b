"""Facts of the methods that share or choose a part of the model: fedper, lg-fedavg, fedbabu, ifca; and of fedlc."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from federation import federation, gap, go, go_all, server_gap
from float64 import zeros
from method_calls import batches_of
from reference_steps import Tree, descended, gradient, linear
from setting_lines import set_to
from torch.nn.functional import cross_entropy, normalize, one_hot

from fedcache.federate.methods import METHODS

STEP = set_to("lr=0.05 batch=16 dim=8 bn=false z_norm=l2")


def test_the_classifier_of_fedbabu_never_changes():
    first = go_all("fedavg", STEP, rounds=1).server
    out = go("fedbabu", STEP, rounds=3)
    begun = go("fedbabu", {**STEP, "lr": 0.0, "wd": 0.0}, rounds=1).server
    for k in ("Q.W", "Q.b"):
        assert torch.equal(out.server[k], begun[k])
        assert not torch.equal(out.server[k], first[k])
    assert not torch.equal(out.server["P.W"], begun["P.W"])


@pytest.mark.parametrize(
    ("tune", "moved"),
    [("all", {"P.W", "P.b", "Q.W", "Q.b"}), ("head", {"Q.W", "Q.b"}), ("body", {"P.W", "P.b"})],
)
def test_fine_tuning_moves_what_it_is_told_to_and_leaves_the_server(tune, moved):
    data, clients = federation()
    how = {**STEP, **set_to("opt=sgd momentum=0.0 wd=0.0 batch=64 tune_epochs=2"), "tune": tune}
    out = go("fedbabu", how, rounds=2)
    plain = go("fedbabu", {**how, "tune_epochs": 0}, rounds=2)
    assert server_gap(out, plain) == 0.0
    assert out.protocol == "personalised"
    assert plain.protocol == "global"
    own = out.deployed(0).personal
    assert {k for k, t in own.items() if not torch.equal(t, out.server[k])} == moved
    # Two steps of gradient descent on all rows of the client, written out.
    x = data.x[clients[0].train, 0]
    y = data.y[clients[0].train]
    p = out.server

    def objective(p):
        z = normalize(torch.relu(x @ p["P.W"].T + p["P.b"]), dim=-1)
        return cross_entropy(z @ p["Q.W"].T + p["Q.b"], y)

    for _ in range(2):
        slope = gradient(objective, p)
        p = {k: t - 0.05 * slope[k] * (k in moved) for k, t in p.items()}
    assert max(gap(own[k], p[k]) for k in moved) < 1e-12


@pytest.mark.parametrize(
    ("absent", "denominator"), [(1.0, "include"), (1e-8, "include"), (1.0, "exclude")]
)
def test_the_margin_of_fedlc_is_that_of_the_paper(absent, denominator):
    settings = {
        **set_to("head=linear init=zero opt=sgd lr=0.1 momentum=0.0 wd=0.0 batch=8 tau=0.7"),
        "absent": absent,
        "denominator": denominator,
    }
    data, clients = federation()
    client = clients[3]
    out = go_all("fedlc", settings, data, [client], rounds=1)
    count = data.y[client.train].bincount(minlength=data.classes)
    assert 0 in count
    margin = 0.7 * torch.where(count > 0, count.double(), absent) ** -0.25
    p = Tree(W=zeros(data.classes, data.x.shape[-1]), b=zeros(data.classes))

    def objective(p, x, y):
        u = linear(p, x) - margin
        if denominator == "include":
            return cross_entropy(u, y)
        others = u.masked_fill(one_hot(y, data.classes) > 0, -torch.inf)
        return (others.logsumexp(1) - u.gather(1, y[:, None])[:, 0]).mean()

    p = descended(p, data, batches_of(client, 0, 0, 0, size=8), 0.1, objective)
    assert gap(out.server, p) < 1e-12
    # With a margin of 70 no row pushes down a class that the client has no rows of.
    assert (float(p["W"][count == 0].abs().max()) < 1e-20) == (absent < 1)


@pytest.mark.parametrize("agg", ["weighted", "uniform"])
def test_one_model_of_ifca_is_fedavg(agg):
    how = {**STEP, "opt": "sgd", "agg": agg}
    a = go_all("ifca", {**how, "models": 1})
    # Its weights are drawn from a stream of its own: the same step from the same begin is asked of fedavg.
    begun = go_all("ifca", {**how, "models": 1, "lr": 0.0, "wd": 0.0}, rounds=1).server
    start = {k.removeprefix("models/"): t[0] for k, t in begun.items() if k != "chosen"}

    def init(ctx):
        return {k: t.reshape((1,) * len(ctx.lead) + tuple(t.shape)) for k, t in start.items()}

    b = go_all(replace(METHODS["fedavg"], init=init), how).server
    assert max(gap(a.server["models/" + k][0], t) for k, t in b.items()) < 1e-12


def test_clients_of_two_kinds_find_their_models():
    # Six clients on two opposite tasks: the classes of the second kind are the first's in reverse.
    g = np.random.default_rng(0)
    data, clients = federation(sizes=(40,) * 6, per_client=6)
    means = g.standard_normal((data.classes, data.x.shape[-1])) * 3
    y = data.y.numpy().copy()
    x = means[y] + 0.3 * g.standard_normal((len(y), means.shape[1]))
    for client in clients[3:]:
        rows = np.concatenate([client.train, client.test])
        x[rows] = means[data.classes - 1 - y[rows]] + 0.3 * g.standard_normal(
            (len(rows), means.shape[1])
        )
    data = replace(data, x=torch.from_numpy(x)[:, None].to(data.x.dtype))
    out = go_all("ifca", set_to("lr=0.02 batch=16 dim=16"), data, clients, rounds=15)
    assert sorted(out.server["chosen"].tolist()) == [120.0, 120.0]
    mine = [out.deployed(i).personal for i in range(6)]
    assert gap(mine[0], mine[1]) == gap(mine[4], mine[5]) == 0.0 < gap(mine[0], mine[4])
    assert out.accuracy > 0.9


def test_a_model_that_nobody_chose_stays_and_weights_of_others_do_not_mix():
    data, clients = federation()
    how = {**STEP, "models": 3}
    begun = go_all("ifca", {**how, "lr": 0.0, "wd": 0.0}, data, clients[:1], rounds=1).server
    after = go_all("ifca", how, data, clients[:1], rounds=1).server
    chosen = after["chosen"] > 0
    assert int(chosen.sum()) == 1
    assert torch.equal((after["models/P.W"] != begun["models/P.W"]).flatten(1).any(1), chosen)
