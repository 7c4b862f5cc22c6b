"""Facts of the methods that change FedAvg's local objective: fedntd, scaffold, ditto, moon."""

import numpy as np
import pytest
import torch
from federation import federation, gap, go, go_all, keeps, server_gap, start_of
from float64 import even, normal, zeros
from reference_steps import Tree, descended, linear, linear_gradient, local_batches, mean_of
from refusal import refused
from setting_lines import set_to
from torch.nn.functional import cosine_similarity, cross_entropy, kl_div, normalize, one_hot

from fedcache.federate.methods import METHODS, ditto
from fedcache.heads.losses import not_true_divergence

SINGLE = {"dtype": torch.float32}


def project(p, x):
    return normalize(torch.relu(x @ p["P.W"].T + p["P.b"]), dim=-1)


# fedntd


def test_one_other_class_has_no_divergence():
    u = normal(5, 2)
    g = normal(5, 2, seed=1)
    assert float(not_true_divergence(u, g, torch.tensor([0, 1, 1, 1, 0]), even(5))) == 0.0


@pytest.mark.parametrize("scale", [1.0, 20.0])  # of student and teacher alike
def test_fedntd_is_its_equation(scale):
    # Loops over rounds, clients and batches; a rate, then half of it.
    data, clients = federation()
    lr = 0.2 / scale**2
    settings = {
        **set_to("lr_decay=0.5 tau=2.0 beta=0.7 batch=16 epochs=2 wd=0.0 momentum=0"),
        "lr": lr,
        "logit_scale": scale,
    }
    out = go_all("fedntd", settings, rounds=2)

    def objective(p, x, y, w):
        keep = one_hot(y, data.classes) == 0
        u = scale * linear(p, x)
        other = (u[keep].view(len(x), -1) / 2.0).log_softmax(-1)
        known = (scale * linear(w, x)[keep].view(len(x), -1) / 2.0).log_softmax(-1)
        kl = kl_div(other, known, reduction="batchmean", log_target=True)
        return cross_entropy(u, y) + 0.7 * 4.0 * kl

    w = Tree(W=data.text.clone(), b=zeros(data.classes))
    for r in range(2):
        ends = [
            descended(w, data, local_batches(c, r, 2), lr * 0.5**r, objective, w) for c in clients
        ]
        w = mean_of(ends, [len(c.train) for c in clients])
    assert gap(out.server, w) < 1e-12


# scaffold


def test_scaffold_is_algorithm_1_with_option_2():
    # Every c_i is the mean gradient (with decay) of the client's last round, which the loop below adds up.
    data, clients = federation()
    settings = set_to("head=linear init=text lr=0.3 wd=0.01 batch=16 epochs=2 lr_g=0.5")
    out = go("scaffold", settings, rounds=4, participation=5)
    x = Tree(W=data.text.clone(), b=zeros(data.classes))
    zero = 0.0 * x
    c = zero
    own = [zero] * len(clients)
    for record in out.records:
        ends = []
        change = []
        for i in record.clients:
            y = x
            seen = []
            for rows in local_batches(clients[i], record.round - 1, 2):
                g = linear_gradient(y, data, rows) + 0.01 * y
                seen.append(g)
                y = y - 0.3 * (g - own[i] + c)
            ends.append(y)
            new = mean_of(seen, [1] * len(seen))
            change.append(new - own[i])
            own[i] = new
        x = x + 0.5 * (mean_of(ends, [1] * 5) - x)
        c = c + 1 / len(clients) * sum(change, zero)
    assert gap(out.server, x | {f"c/{k}": t for k, t in c.items()}) < 1e-12
    assert (
        max(gap(s, {f"c/{k}": t for k, t in own[i].items()}) for i, s in out.states.items()) < 1e-12
    )


@pytest.mark.parametrize("still", [{"lr": 0.0}, {"epochs": 0}])
def test_who_does_not_move_keeps_the_gradients_it_has(still):
    saved = []
    moved = go("scaffold", "head=linear", rounds=2, on_round=keeps(saved))
    rests = go("scaffold", {"head": "linear", **still}, rounds=3, state=saved[-1])
    assert float(moved.server["c/W"].abs().max()) > 0.0
    assert server_gap(moved, rests) == 0.0
    assert all(gap(s, rests.states[i]) == 0.0 for i, s in moved.states.items())


@pytest.mark.parametrize(
    ("key", "value", "legal"), [("opt", "adam", "sgd"), ("momentum", "0.9", "expected 0.")]
)
def test_scaffold_refuses_what_option_2_is_wrong_for(key, value, legal):
    refused(lambda: METHODS["scaffold"].resolve("paper", {key: value}), legal)


# ditto


@pytest.mark.slow
@pytest.mark.parametrize(("opt", "head"), [("sgd", "linear"), ("adam", "mlp")])
def test_ditto_is_fedavg_and_without_pull_solo_bit_for_bit(opt, head):
    settings = {**set_to("lr=0.01 batch=16 dim=8 epochs=2 init=shared"), "opt": opt, "head": head}
    free = go("ditto", {**settings, "lambda": 0.0}, **SINGLE)
    held = go("ditto", {**settings, "lambda": 0.5}, **SINGLE)
    alone = go("solo", settings, **SINGLE)
    shared = go("fedavg", settings, **SINGLE)
    assert server_gap(free, shared) == server_gap(held, shared) == 0.0
    assert all(gap(ditto.personal(s), alone.states[i]) == 0.0 for i, s in free.states.items())
    assert all(gap(ditto.personal(s), alone.states[i]) > 0.0 for i, s in held.states.items())
    assert np.array_equal(free.client_accuracy, alone.client_accuracy)


def test_the_pull_of_ditto_is_towards_what_was_received():
    # One full batch of plain SGD with lr lambda = 1: v - lr (g(v) + lambda (v - w)) = w - lr g(v).
    data, clients = federation()
    settings = set_to("head=linear opt=sgd lr=0.25 momentum=0.0 wd=0.0 batch=64 lambda=4.0")
    snapshots = []
    go_all("ditto", settings, rounds=3, on_round=keeps(snapshots))
    saved = [after.tensors for after in snapshots]
    start = Tree(W=data.text, b=zeros(data.classes))
    received = [start] + [Tree({k: s[f"server/{k}"] for k in start}) for s in saved]
    for r in range(3):
        for i, c in enumerate(clients):
            v = start if r == 0 else {k: saved[r - 1][f"client/{i}/v/{k}"] for k in start}
            want = received[r] - 0.25 * linear_gradient(v, data, c.train)
            assert gap({k: saved[r][f"client/{i}/v/{k}"] for k in v}, want) < 1e-12


def test_personal_epochs_are_their_own():
    settings = set_to("head=linear epochs=2 init=zero")
    same, two, none = (go("ditto", {**settings, "personal_epochs": k}) for k in ("auto", 2, 0))
    assert gap(same.states, two.states) == 0.0
    assert all(float(s["v/W"].abs().max()) == 0.0 for s in none.states.values())
    assert server_gap(none, two) == 0.0


# moon


def test_moon_is_its_equation():
    data, clients = federation()
    settings = set_to(
        "opt=sgd lr=0.2 momentum=0.0 wd=0.0 dim=5 batch=16 epochs=2 mu=3.0 bn=false z_norm=l2"
    )
    out = go("moon", {**settings, "tau": 0.4}, rounds=3, participation=6)
    w = start_of("moon", settings)
    last = {}

    def objective(p, x, y, w, old):
        z = project(p, x)
        near, far = (torch.exp(cosine_similarity(z, project(m, x), dim=-1) / 0.4) for m in (w, old))
        contrast = -torch.log(near / (near + far)).mean()
        return cross_entropy(z @ p["Q.W"].T + p["Q.b"], y) + 3.0 * contrast

    for record in out.records:
        for i in record.clients:
            rows = local_batches(clients[i], record.round - 1, 2)
            last[i] = descended(Tree(w), data, rows, 0.2, objective, w, last.get(i, w))
        w = mean_of(
            [last[i] for i in record.clients], [len(clients[i].train) for i in record.clients]
        )
    assert gap(out.server, w) < 1e-10
    assert all(
        gap(out.states[i][f"last/{k}"], p[k]) < 1e-10
        for i, p in last.items()
        for k in ("P.W", "P.b")
    )
