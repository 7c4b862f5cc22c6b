"""Facts of the methods whose server does more than average: fedavgm, fedadam and its kin, feddyn, fednova, feddisco."""

import numpy as np
import pytest
from federation import federation, gap, go_all, keeps
from float64 import doubles, zeros
from method_calls import lanes
from reference_steps import Tree, linear_gradient, local_batches, mean_of
from scipy.special import kl_div
from setting_lines import set_to

from fedcache.federate.methods import feddisco

SGD = set_to("opt=sgd lr=0.1 momentum=0.0 wd=0.0 head=linear init=zero batch=16")
NAMES = ("W", "b")
ROWS = [len(c.train) for c in federation()[1]]


def nothing():
    """A model of zeros."""
    return Tree(W=zeros(6, 11), b=zeros(6))


def models(name, settings, rounds):
    """The server's model after each of some rounds, from the one before the first."""
    saved = []
    go_all(name, settings, rounds=rounds, on_round=keeps(saved))
    return [nothing(), *(Tree({k: after.tensors[f"server/{k}"] for k in NAMES}) for after in saved)]


def trained_from(server, round_, epochs=1, momentum=0.0, wd=0.0):
    """What each client makes of a server's model in that round, by SGD as torch defines it."""
    data, clients = federation()
    ends = []
    for client in clients:
        w = server
        v = nothing()
        for rows in local_batches(client, round_, epochs):
            v = momentum * v + linear_gradient(w, data, rows) + wd * w
            w = w - 0.1 * v
        ends.append(w)
    return ends


def mean_step(server, round_, weights=ROWS):
    """sum_i p_i (w_i - w) by name; p_i by rows unless given."""
    return mean_of(trained_from(server, round_), weights) - server


def test_fedavg_is_local_sgd_then_the_weighted_mean():
    seen = models("fedavg", {**SGD, "epochs": 2, "momentum": 0.9, "wd": 1e-3}, 2)
    for r in range(2):
        assert gap(seen[r + 1], mean_of(trained_from(seen[r], r, 2, 0.9, 1e-3), ROWS)) < 1e-12


def test_the_momentum_of_the_server_is_that_of_the_paper():
    seen = models("fedavgm", {**SGD, "server_momentum": 0.6, "lr_g": 0.5}, 3)
    v = nothing()
    for r in range(3):
        v = 0.6 * v - mean_step(seen[r], r)
        assert gap(seen[r + 1], seen[r] - 0.5 * v) < 1e-12


RULES = {
    "fedadam": lambda v, d: 0.7 * v + 0.3 * d * d,
    "fedyogi": lambda v, d: v - 0.3 * d * d * (v - d * d).sign(),
    "fedadagrad": lambda v, d: v + d * d,
}


@pytest.mark.parametrize("name", RULES)
def test_adaptive_servers_step_as_algorithm_2_prints(name):
    own = {
        "lr_g": 0.2,
        "beta1": 0.4,
        "tau": 0.01,
        **({} if name == "fedadagrad" else {"beta2": 0.7}),
    }
    seen = models(name, SGD | own, 3)
    m = nothing()
    v = {k: t + 1e-4 for k, t in nothing().items()}
    for r in range(3):
        step = mean_step(seen[r], r)
        m = 0.4 * m + 0.6 * step
        v = {k: RULES[name](v[k], step[k]) for k in NAMES}
        assert (
            gap(seen[r + 1], {k: seen[r][k] + 0.2 * m[k] / (v[k].sqrt() + 0.01) for k in NAMES})
            < 1e-12
        )


@pytest.mark.parametrize("clip", [10.0, 0.05])
def test_feddyn_as_released(clip):
    # Three rounds of the released steps: alpha / (n_i M / N), h_i += u - w, gradients cut before the weight decay, and
    # the server's model is the mean of the clients' plus the mean of all h_i.
    data, clients = federation()
    out = go_all("feddyn", {**SGD, "alpha": 0.3, "alpha_by": "rows", "clip": clip})
    w = nothing()
    moved = [nothing() for _ in clients]
    cut = []
    for r in range(3):
        ends = []
        for client, h in zip(clients, moved, strict=True):
            u = w
            a = 0.3 * sum(ROWS) / (len(client.train) * 9)
            for rows in local_batches(client, r):
                g = linear_gradient(u, data, rows) + a * (h - w)
                norm = sum((g[k] ** 2).sum() for k in NAMES).sqrt()
                cut.append(bool(norm > clip))
                u = u - 0.1 * (min(1.0, clip / (norm + 1e-6)) * g + a * u)
            ends.append(u)
        moved = [h + u - w for h, u in zip(moved, ends, strict=True)]
        w = mean_of(ends, [1] * 9) + mean_of(moved, [1] * 9)
    assert any(cut) == (clip < 1.0)
    assert gap({k: out.server[k] for k in NAMES}, w) < 1e-12


def test_feddyn_is_algorithm_1():
    alpha = 0.3
    seen = models("feddyn", {**SGD, "alpha": alpha}, 3)
    data, clients = federation()
    g = [nothing() for _ in clients]
    h = nothing()
    for r in range(3):
        w = seen[r]
        ends = []
        for client, own in zip(clients, g, strict=True):
            u = w
            for rows in local_batches(client, r):
                u = u - 0.1 * (linear_gradient(u, data, rows) - own + alpha * (u - w))
            ends.append(u)
        g = [own - alpha * (u - w) for own, u in zip(g, ends, strict=True)]
        mean = mean_of(ends, [1] * 9)
        h = h - alpha * (mean - w)
        assert gap(h, mean_of(g, [1] * 9)) < 1e-12  # h is the mean of all g_i
        assert gap(seen[r + 1], mean - 1 / alpha * h) < 1e-12


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fednova_averages_mean_steps(momentum):
    seen = models("fednova", {**SGD, "epochs": 2, "momentum": momentum}, 2)
    share = [n / sum(ROWS) for n in ROWS]
    # a_i: how much of every gradient reaches the weights by the end, summed over the steps.
    tau = [2 * -(-n // 16) for n in ROWS]
    a = [sum(sum(momentum**k for k in range(t - j)) for j in range(t)) for t in tau]
    steps = sum(p * one for p, one in zip(share, a, strict=True))
    for r in range(2):
        found = trained_from(seen[r], r, 2, momentum)
        each = [p / one * (seen[r] - w) for p, w, one in zip(share, found, a, strict=True)]
        assert gap(seen[r + 1], seen[r] - steps * sum(each, nothing())) < 1e-12
    assert len(set(tau)) > 1


def disco_ctx(**settings):
    """The context in which a server averages the uploads of three clients."""
    return lanes("feddisco", settings, who=("a", "b", "c"))


def test_weights_of_feddisco_by_hand():
    # The distances 0, 0.5, 1.5 are 0, 0.25, 0.75 of their sum, and half of that is taken from the shares of the rows:
    # 0.6 + 0.1 = 0.7, 0.3 - 0.125 + 0.1 = 0.275, relu(0.1 - 0.375 + 0.1) = 0.
    # The Euclidean distances are taken as they are: 0.7, 0.3 - 0.25 + 0.1 = 0.15, relu(0.1 - 0.45 + 0.1) = 0.
    # Clients that are all even have no distance to divide by; where nobody would count, all count by their rows.
    rows = [0.6, 0.3, 0.1]
    for distances, settings, wanted in (
        ([0.0, 0.5, 1.5], {}, [0.7 / 0.975, 0.275 / 0.975, 0.0]),
        ([0.0, 0.5, 0.9], {"metric": "l2"}, [0.7 / 0.85, 0.15 / 0.85, 0.0]),
        ([0.0, 0.5, 0.9], {"a": 0.0, "b": 0.0}, rows),
        ([0.0, 0.0, 0.0], {"b": 0.0}, rows),
        ([1.0, 1.0, 1.0], set_to("metric=l2 a=5.0 b=0.0"), rows),
    ):
        up = {"n": doubles([[60.0], [30.0], [10.0]]), "discrepancy": doubles(distances)[:, None]}
        assert feddisco.weights(up, disco_ctx(**settings)).tolist() == pytest.approx(wanted)


def test_feddisco_warns_of_clients_that_count_for_nothing():
    for settings, pair, warned in (
        ({**SGD, "metric": "l2"}, federation(per_client=1), 1),
        (SGD, federation(sizes=(40,) * 9), 0),
    ):
        warnings = go_all("feddisco", settings, *pair).warnings
        assert len([w for w in warnings if "weight 0" in w]) == warned


@pytest.mark.parametrize("metric", ["l2", "kl"])
def test_feddisco_averages_by_them(metric):
    # The released rule: scipy's kl_div to even shares over the sum of all clients, or the Euclidean distance as it is.
    seen = models("feddisco", {**SGD, "metric": metric}, 3)
    data, clients = federation()
    share = np.array([np.bincount(data.y[c.train], minlength=6) / len(c.train) for c in clients])
    d = np.sqrt(((share - 1 / 6) ** 2).sum(1))
    if metric == "kl":
        d = kl_div(share, 1 / 6).sum(1)
        d = d / d.sum()
    p = np.maximum(np.array(ROWS) / sum(ROWS) - 0.5 * d + 0.1, 0.0)
    for r in range(3):
        step = mean_step(seen[r], r, p.tolist())
        assert gap(seen[r + 1], seen[r] + step) < 1e-12
