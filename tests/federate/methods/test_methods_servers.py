"""Facts of the methods whose server does more than average: fedavgm, fedadam and its kin, feddyn, fednova, feddisco."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from federation import federation, gap, go, run
from method_calls import lanes
from scipy.special import kl_div

from fedcache.federate.engine.context import generator
from fedcache.federate.methods import METHODS, feddisco
from fedcache.federate.partition.partition import make
from fedcache.testing.partition_laws import small_columns

SGD = {"opt": "sgd", "lr": 0.1, "momentum": 0.0, "wd": 0.0, "head": "linear", "init": "zero", "batch": 16}
ALL = {"participation": None}


def models(name, settings, rounds):
    """The server after each of some rounds, as numpy, from the one before the first."""
    data, clients = federation()
    seen = [{"W": np.zeros((data.classes, data.x.shape[-1])), "b": np.zeros(data.classes)}]
    for n in range(1, rounds + 1):
        out = go(name, settings, data, clients, rounds=n, **ALL)
        seen.append({k: t.numpy().copy() for k, t in out.server.items()})
    return seen


def trained_from(server, round_, settings):
    """What each client makes of a server's model in that round: one round of FedAvg for it alone."""
    data, clients = federation()
    method = METHODS["fedavg"]
    found = []
    for client in clients:
        start = {k: torch.from_numpy(np.array(server[k])) for k in ("W", "b")}
        begun = replace(method, init=lambda _ctx, start=start: dict(start))
        # The batches of a round are drawn by its number, so earlier rounds are run at rate 0.
        out = one_round_of(begun, settings, data, client, round_)
        found.append({k: t.numpy() for k, t in out.items()})
    return found, np.array([len(c.train) for c in clients], float)


def one_round_of(method, settings, data, client, round_):
    """What one client's local training in that round makes of the model that ``method`` begins with."""

    def fit(down, state, lanes, ctx):
        if ctx.round < round_:
            return state, dict(down)
        return METHODS["fedavg"].fit(down, state, lanes, ctx)

    hp = method.resolve("paper", settings)
    out = run(replace(method, fit=fit, executions=("sequential",)), hp, data, [client], rounds=round_ + 1,
              participation=None, dtype=torch.float64)  # fmt: skip
    return out.server


def mean_step(server, round_, settings, weights=None):
    """sum_i p_i (w_i - w) by name; p_i by rows unless given."""
    found, n = trained_from(server, round_, settings)
    p = n / n.sum() if weights is None else weights
    return {k: sum(pi * (w[k] - server[k]) for pi, w in zip(p, found, strict=True)) for k in ("W", "b")}


@pytest.mark.parametrize("execution", ["sequential", "batched"])
def test_a_server_without_momentum_is_fedavg_bit_for_bit(execution):
    data, clients = federation(dtype=torch.float32)
    how = {"execution": execution, "dtype": torch.float32}
    a = go("fedavgm", {"server_momentum": 0.0}, data, clients, **how)
    b = go("fedavg", {}, data, clients, **how).server
    assert gap({k: a.server[k] for k in b}, b) == 0.0
    assert gap({k: t for k, t in go("fedavgm", {}, data, clients, **how).server.items() if k in b}, b) > 0.0


def test_the_momentum_of_the_server_is_that_of_the_paper():
    seen = models("fedavgm", {**SGD, "server_momentum": 0.6, "lr_g": 0.5}, 3)
    v = dict.fromkeys(("W", "b"), 0.0)
    for r in range(3):
        step = mean_step(seen[r], r, SGD)
        for k in ("W", "b"):
            v[k] = 0.6 * v[k] - step[k]
            assert np.abs(seen[r + 1][k] - (seen[r][k] - 0.5 * v[k])).max() < 1e-12


RULES = {
    "fedadam": lambda v, d: 0.7 * v + 0.3 * d * d,
    "fedyogi": lambda v, d: v - 0.3 * d * d * np.sign(v - d * d),
    "fedadagrad": lambda v, d: v + d * d,
}


@pytest.mark.parametrize("name", RULES)
def test_adaptive_servers_step_as_algorithm_2_prints(name):
    own = {"lr_g": 0.2, "beta1": 0.4, "tau": 0.01, **({} if name == "fedadagrad" else {"beta2": 0.7})}
    seen = models(name, {**SGD, **own}, 3)
    m, v = {"W": 0.0, "b": 0.0}, {"W": 1e-4, "b": 1e-4}
    for r in range(3):
        step = mean_step(seen[r], r, SGD)
        for k in ("W", "b"):
            m[k] = 0.4 * m[k] + 0.6 * step[k]
            v[k] = RULES[name](v[k], step[k])
            assert np.abs(seen[r + 1][k] - (seen[r][k] + 0.2 * m[k] / (np.sqrt(v[k]) + 0.01))).max() < 1e-12


@pytest.mark.parametrize("name", RULES)
def test_a_large_tau_makes_an_adaptive_server_fedavg(name):
    how = {**SGD, "beta1": 0.0, "tau": 1e9, "lr_g": 2e9, **({} if name == "fedadagrad" else {"beta2": 0.0})}
    # sqrt(v) is tau in the first round, so a step is half of lr_g / tau; yogi and adam with beta2 = 0 forget v at once.
    one = go(name, how, rounds=1, **ALL).server
    b = go("fedavg", SGD, rounds=1, **ALL).server
    scale = {"fedadagrad": 1.0, "fedyogi": 1.0, "fedadam": 2.0}[name]
    assert gap({k: t / scale for k, t in one.items() if k in b}, b) < 1e-8


@pytest.mark.parametrize("execution", ["sequential", "batched"])
@pytest.mark.parametrize("clip", [10.0, 0.05])
def test_feddyn_as_released(execution, clip):
    # Three rounds of the released steps: alpha / (n_i M / N), h_i += u - w, gradients cut before the weight decay, and
    # the server's model is the mean of the clients' plus the mean of all h_i.
    alpha, rounds = 0.3, 3
    data, clients = federation()
    settings = {**SGD, "alpha": alpha, "alpha_by": "rows", "clip": clip}
    out = go("feddyn", settings, data, clients, rounds=rounds, execution=execution, **ALL)
    x, y, names = data.x[:, 0].numpy(), data.y.numpy(), ("W", "b")
    w = {"W": np.zeros((data.classes, x.shape[1])), "b": np.zeros(data.classes)}
    n = np.array([len(c.train) for c in clients], float)
    own_alpha = alpha / (n / n.sum() * len(n))
    moved = [{k: np.zeros_like(w[k]) for k in names} for _ in clients]
    cut = []
    for r in range(rounds):
        ends = []
        for client, a, h in zip(clients, own_alpha, moved, strict=True):
            u = dict(w)
            order = client.train[generator(0, "batch", r, client.name, 0).permutation(len(client.train))]
            for i in range(0, len(order), 16):
                rows = order[i : i + 16]
                p = np.exp(x[rows] @ u["W"].T + u["b"])
                p /= p.sum(1, keepdims=True)
                p[np.arange(len(rows)), y[rows]] -= 1.0
                g = {"W": p.T @ x[rows] / len(rows), "b": p.mean(0)}
                g = {k: g[k] + a * (h[k] - w[k]) for k in names}
                norm = np.sqrt(sum((g[k] ** 2).sum() for k in names))
                cut.append(norm > clip)
                u = {k: u[k] - 0.1 * (g[k] * min(1.0, clip / (norm + 1e-6)) + a * u[k]) for k in names}
            ends.append(u)
        for h, u in zip(moved, ends, strict=True):
            h.update({k: h[k] + u[k] - w[k] for k in names})
        w = {k: np.mean([u[k] for u in ends], 0) + np.mean([h[k] for h in moved], 0) for k in names}
    assert any(cut) == (clip < 1.0)
    assert max(np.abs(out.server[k].numpy() - w[k]).max() for k in names) < 1e-12


def test_feddyn_is_algorithm_1():
    alpha = 0.3
    seen = models("feddyn", {**SGD, "alpha": alpha}, 3)
    data, clients = federation()
    g = [{"W": 0.0, "b": 0.0} for _ in clients]
    h = {"W": 0.0, "b": 0.0}
    x, y = data.x[:, 0].numpy(), data.y.numpy()
    for r in range(3):
        w, ends = seen[r], []
        for client, gi in zip(clients, g, strict=True):
            u = {k: np.array(w[k]) for k in ("W", "b")}
            order = client.train[generator(0, "batch", r, client.name, 0).permutation(len(client.train))]
            for i in range(0, len(order), 16):
                rows = order[i : i + 16]
                p = np.exp(x[rows] @ u["W"].T + u["b"])
                p /= p.sum(1, keepdims=True)
                p[np.arange(len(rows)), y[rows]] -= 1.0
                grads = {"W": p.T @ x[rows] / len(rows), "b": p.mean(0)}
                u = {k: u[k] - 0.1 * (grads[k] - gi[k] + alpha * (u[k] - w[k])) for k in u}
            ends.append(u)
        for gi, u in zip(g, ends, strict=True):
            for k in u:
                gi[k] = gi[k] - alpha * (u[k] - w[k])
        for k in ("W", "b"):
            h[k] = h[k] - alpha / len(clients) * sum(u[k] - w[k] for u in ends)
            assert np.abs(h[k] - sum(gi[k] for gi in g) / len(g)).max() < 1e-12  # h is the mean of all g_i
            assert np.abs(seen[r + 1][k] - (sum(u[k] for u in ends) / len(ends) - h[k] / alpha)).max() < 1e-12


def test_telling_rows_costs_every_client_of_feddyn_a_number_each_way():
    alike, by_rows = (go("feddyn", {**SGD, "alpha_by": how}, **ALL).traffic for how in ("alike", "rows"))
    assert (by_rows.up - alike.up).tolist() == (by_rows.down - alike.down).tolist() == [1] * 9


def test_the_first_local_models_of_feddyn_are_those_of_fedprox():
    alpha = 0.3
    one = go("feddyn", {**SGD, "alpha": alpha}, rounds=1, **ALL).server
    b = go("fedprox", {**SGD, "mu": alpha, "agg": "uniform"}, rounds=1, **ALL).server
    # From w = 0 and h = 0 every client's step is w_i: the server moves by 2 mean(w_i).
    assert gap({k: t / 2 for k, t in one.items() if k in b}, b) < 1e-12


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fednova_averages_mean_steps(momentum):
    settings = {**SGD, "epochs": 2, "momentum": momentum}
    seen = models("fednova", settings, 2)
    for r in range(2):
        found, n = trained_from(seen[r], r, settings)
        # a_i: how much of every gradient reaches the weights by the end, summed over the steps.
        tau = [2 * -(-int(rows) // 16) for rows in n]
        a = np.array([sum(sum(momentum**k for k in range(t - j)) for j in range(t)) for t in tau], float)
        p = n / n.sum()
        for k in ("W", "b"):
            d = sum(pi * (seen[r][k] - w[k]) / ai for pi, w, ai in zip(p, found, a, strict=True))
            assert np.abs(seen[r + 1][k] - (seen[r][k] - (p @ a) * d)).max() < 1e-12
    assert len(set(tau)) > 1


def test_clients_of_equally_many_steps_make_fednova_fedavg():
    data, clients = federation(sizes=(32, 32, 32))
    a = go("fednova", SGD, data, clients, **ALL).server
    b = go("fedavg", SGD, data, clients, **ALL).server
    assert gap(a, b) < 1e-12


def disco_ctx(**settings):
    """The context in which a server averages the uploads of three clients."""
    return lanes("feddisco", settings, who=("a", "b", "c"))


def disco_uploads(rows, distances):
    return {
        "n": torch.tensor(rows).double().unsqueeze(-1),
        "discrepancy": torch.tensor(distances).double().unsqueeze(-1),
    }


def test_weights_of_feddisco_by_hand():
    # The distances 0, 0.5, 1.5 are 0, 0.25, 0.75 of their sum, and half of that is taken from the shares of the rows:
    # 0.6 + 0.1 = 0.7, 0.3 - 0.125 + 0.1 = 0.275, relu(0.1 - 0.375 + 0.1) = 0.
    up = disco_uploads([60.0, 30.0, 10.0], [0.0, 0.5, 1.5])
    assert feddisco.weights(up, disco_ctx()).tolist() == pytest.approx([0.7 / 0.975, 0.275 / 0.975, 0.0])
    # The Euclidean distances are taken as they are: 0.7, 0.3 - 0.25 + 0.1 = 0.15, relu(0.1 - 0.45 + 0.1) = 0.
    up = disco_uploads([60.0, 30.0, 10.0], [0.0, 0.5, 0.9])
    assert feddisco.weights(up, disco_ctx(metric="l2")).tolist() == pytest.approx([0.7 / 0.85, 0.15 / 0.85, 0.0])
    assert feddisco.weights(up, disco_ctx(a=0.0, b=0.0)).tolist() == pytest.approx([0.6, 0.3, 0.1])
    # Clients that are all even have no distance to divide by.
    even = disco_uploads([60.0, 30.0, 10.0], [0.0, 0.0, 0.0])
    assert feddisco.weights(even, disco_ctx(b=0.0)).tolist() == pytest.approx([0.6, 0.3, 0.1])
    nobody = disco_uploads([60.0, 30.0, 10.0], [1.0, 1.0, 1.0])
    assert feddisco.weights(nobody, disco_ctx(metric="l2", a=5.0, b=0.0)).tolist() == pytest.approx([0.6, 0.3, 0.1])


@pytest.mark.parametrize(("scheme", "args"), [("dirichlet", {"alpha": 0.1}), ("shards", {"shards": 2})])
def test_every_client_counts_in_feddisco_at_its_defaults(scheme, args):
    columns = small_columns()
    for seed in range(20):
        parts = make(scheme, columns, seed=seed, clients=10, **args).clients
        counts = np.stack([np.bincount(columns.label[c.train], minlength=4) for c in parts])
        distances = feddisco.discrepancy(torch.from_numpy(counts / counts.sum(1, keepdims=True)), "kl")
        p = feddisco.weights(disco_uploads(counts.sum(1).tolist(), distances.tolist()), disco_ctx())
        assert (p > 0).all(), (seed, p)


def test_feddisco_warns_of_clients_that_count_for_nothing():
    data, clients = federation(per_client=1)
    one_class = {**SGD, "metric": "l2"}
    found = go("feddisco", one_class, data, clients, **ALL).warnings
    assert [w for w in found if "have weight 0" in w] == [found[-1]]
    assert found[-1].startswith("round 1: ")
    found = go("feddisco", SGD, *federation(sizes=(40,) * 9), **ALL).warnings
    assert not any("weight 0" in w for w in found)


def test_distances_of_class_shares():
    shares = torch.tensor([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0]], dtype=torch.float64)
    assert feddisco.discrepancy(shares, "l2").tolist() == pytest.approx([0.0, 0.75**0.5, 0.5])
    assert feddisco.discrepancy(shares, "kl").tolist() == pytest.approx([0.0, np.log(4), np.log(2)])
    assert feddisco.over_clients(feddisco.discrepancy(shares, "kl"), "kl").tolist() == pytest.approx([0, 2 / 3, 1 / 3])


@pytest.mark.parametrize("metric", ["l2", "kl"])
def test_feddisco_averages_by_them(metric):
    # The released rule: scipy's kl_div to even shares over the sum of all clients, or the Euclidean distance as it is.
    seen = models("feddisco", {**SGD, "metric": metric}, 3)
    data, clients = federation()
    y = data.y.numpy()
    share = np.array([np.bincount(y[c.train], minlength=data.classes) / len(c.train) for c in clients])
    d = np.sqrt(((share - 1 / data.classes) ** 2).sum(1))
    if metric == "kl":
        d = kl_div(share, 1 / data.classes).sum(1)
        d = d / d.sum()
    n = np.array([len(c.train) for c in clients], float)
    p = np.maximum(n / n.sum() - 0.5 * d + 0.1, 0.0)
    assert (p > 0).sum() >= 1
    for r in range(3):
        step = mean_step(seen[r], r, SGD, p / p.sum())
        for k in ("W", "b"):
            assert np.abs(seen[r + 1][k] - (seen[r][k] + step[k])).max() < 1e-12
