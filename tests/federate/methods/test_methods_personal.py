"""Facts of the methods that make a model for every client: fedrep and pfedme, and what they share with others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from federation import federation, gap, go
from method_calls import EXECUTIONS, batches_of, exact, lanes, paper, quadratic, single, wide

from fedcache.errors import Exit, FedcacheError
from fedcache.federate.methods import METHODS, pfedme
from fedcache.heads.projection import Head, logits

# -- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "narrow", "broad"),
    [("pfedme", 133_632, 395_776), ("perfedavg", 133_632, 395_776), ("fedrep", 131_072, 393_216), ("supcon", 0, 0)],
)
def test_the_papers_counts(name, narrow, broad):  # T-C1, T-C2
    assert paper(name, 512) == (narrow, narrow)
    assert paper(name, 1536) == (broad, broad)


@pytest.mark.parametrize(
    ("name", "narrow", "broad", "norm"),
    [
        ("pfedme", 133_898, 396_042, 1024),
        ("perfedavg", 133_898, 396_042, 1024),
        ("fedrep", 131_328, 393_472, 1024),
        ("supcon", 0, 0, 0),
    ],
)
def test_exact_counts(name, narrow, broad, norm):  # T-X4: biases, and 512 of gain and shift and 512 statistics
    once = {"epochs": 0} if name != "fedrep" else {"e_h": 0, "e_b": 0}
    plain = {"bn": False}
    for width, settings, expected in ((512, plain, narrow), (1536, plain, broad), (1536, {}, broad + norm)):
        out = go(name, {**once, **settings}, *wide(width), rounds=1, participation=None, dtype=torch.float32)
        assert out.traffic.up.tolist() == out.traffic.down.tolist() == [expected] * 5


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedrep", {"lr": 0.01}),
        ("pfedme", {"lambda": 1.0, "eta": 0.5, "lr_p": 0.01}),
        ("perfedavg", {"alpha": 0.05, "beta": 0.3}),
    ],
)
def test_it_learns(name, settings):
    data, clients = federation(sizes=(80,) * 4, per_client=4, tests=60)
    before, after = (
        go(name, {**settings, "dim": 32}, data, clients, rounds=r, participation=None).accuracy for r in (1, 12)
    )
    assert after > before + 0.1


def test_the_presets_of_released_code():  # D-70, D-71, D-72, D-73
    changed = {"fedrep": {"e_h": (1, 1), "e_b": (1, 1)}, "fedproto": {"protodist": ("sq_l2", "mse")},
               "pfedme": {"inner_decay": (0.0, 0.001), "K": (5, 5), "lambda": (15.0, 15.0), "eta": (0.005, 0.005)},
               "perfedavg": {"adapt_on": ("train", "test"), "adapt_steps": (1, 2)}}  # fmt: skip
    for name, switches in changed.items():
        paper_, official = METHODS[name].resolve("paper"), METHODS[name].resolve("official")
        assert {k: (paper_[k], official[k]) for k in switches} == switches


@pytest.mark.parametrize("preset", ["paper", "official"])
def test_the_local_losses_of_table_5_share_their_switches(preset):
    # The rows differ by loss alone: everything about the model and its training has one value in all of them.
    rows = [METHODS[n].resolve(preset) for n in ("solo", "fedavg", "fedproto", "supcon", "fedpcl")]
    model, training = ("feat_post", "dim", "z_norm", "bn"), ("opt", "lr", "wd", "momentum", "batch", "epochs")
    shared = (*model, *training, "reset_opt", "drop_last")
    assert all([row[k] for k in shared] == [rows[0][k] for k in shared] for row in rows[:3])
    assert [rows[3][k] for k in shared] == [rows[4][k] for k in shared]
    contrasted = {**{k: rows[0][k] for k in shared}, "z_norm": "l2"}  # eqs 8 and 9 need unit length
    assert {k: rows[4][k] for k in shared} == contrasted
    assert rows[0]["z_norm"] == ("none" if preset == "paper" else "l2")
    contrast = ("tau", "views", "proto_norm", "proto_drop_last", "infer_score", "init")
    assert [rows[3][k] for k in contrast] == [rows[4][k] for k in contrast]


# -- fedrep -----------------------------------------------------------------------------------------------------------


@EXECUTIONS
@pytest.mark.parametrize("opt", ["sgd", "adam"])
def test_each_phase_leaves_the_other_part_alone(execution, opt):  # T-R1
    pair, keys = exact(execution=execution, participation=None, rounds=1)
    settings = {"dim": 8, "opt": opt, "lr": 0.05, "bn": True}
    start = go("fedrep", {**settings, "e_h": 0, "e_b": 0}, *pair, **keys)
    head = go("fedrep", {**settings, "e_h": 2, "e_b": 0}, *pair, **keys)
    body = go("fedrep", {**settings, "e_h": 0, "e_b": 2}, *pair, **keys)
    assert gap(head.server, start.server) == 0.0  # the running statistics too
    assert gap(body.states, start.states) == 0.0
    assert all(gap(head.states[c], start.states[c]) > 0.0 for c in start.states)
    assert all(gap({k: body.server[k]}, {k: start.server[k]}) > 0.0 for k in start.server)


@EXECUTIONS
def test_the_classifier_never_leaves(execution):  # T-R2
    out = go("fedrep", {"dim": 8}, execution=execution)
    assert set(out.server) == {"P.W", "P.b", "P.gain", "P.shift", "P.mean", "P.var"}
    assert all(set(s) == {"Q.W", "Q.b"} for s in out.states.values())
    moved = go("fedrep", {"dim": 8, "bn": True, "bn_mode": "local", "batch": 16}, execution=execution)
    assert all(set(s) == {"Q.W", "Q.b", "P.mean", "P.var"} for s in moved.states.values())
    assert moved.traffic.up[moved.records[0].clients[0]] % (8 * 11 + 3 * 8) == 0  # W, b, gain and shift


@pytest.mark.parametrize("init", ["shared", "independent"])
def test_without_head_epochs_the_classifier_is_the_initial_one(init):  # T-R3
    data, clients = federation(dtype=torch.float32)
    one, keys = single(data, clients), {"dtype": torch.float32, "participation": None}
    settings = {"dim": 8, "e_h": 0, "init": init}
    saved = []
    out = go("fedrep", settings, data, one, **keys, on_round=lambda _r, _m, _t, snap: saved.append(snap().tensors))
    first = go("fedrep", {**settings, "e_b": 0}, data, one, **keys, rounds=1)
    for tensors in saved:
        assert all(torch.equal(tensors[f"client/0/{k}"], first.states[0][k]) for k in ("Q.W", "Q.b"))
    assert gap(out.server, first.server) > 0.0


def test_classifiers_start_alike_or_each_on_its_own():  # D-11; P is shared either way
    settings = {"dim": 8, "e_h": 0, "e_b": 0}
    shared, independent = (
        go("fedrep", {**settings, "init": i}, rounds=1, participation=None) for i in ("shared", "independent")
    )
    assert gap(shared.server, independent.server) == 0.0
    assert gap(shared.states[0], shared.states[1]) == 0.0
    assert gap(independent.states[0], independent.states[1]) > 0.1
    fedavg = go("fedavg", {"dim": 8, "epochs": 0, "init": "shared"}, rounds=1).server
    assert gap(fedavg, {**shared.server, **shared.states[0]}) < 1e-15


@EXECUTIONS
@pytest.mark.parametrize("opt", ["sgd", "adam"])
def test_fedrep_is_two_phases_of_torch(opt, execution):
    # An independent reference: torch.nn, a fresh torch.optim per phase, a loop over clients.
    data, clients = federation(sizes=(20, 33, 7))
    settings = {"opt": opt, "lr": 0.02, "wd": 1e-3, "batch": 16, "dim": 5, "e_h": 2, "e_b": 2, "bn": False}
    keys = {"participation": None, "execution": execution}
    start = go("fedrep", {**settings, "e_h": 0, "e_b": 0}, data, clients, **keys, rounds=1)
    out = go("fedrep", settings, data, clients, **keys, rounds=2)
    P = torch.nn.Linear(11, 5).double()
    P.load_state_dict({"weight": start.server["P.W"], "bias": start.server["P.b"]})
    heads = {i: torch.nn.Linear(5, 6).double() for i in range(3)}
    for i, Q in heads.items():
        Q.load_state_dict({"weight": start.states[i]["Q.W"], "bias": start.states[i]["Q.b"]})
    for r in range(2):
        uploads = []
        for i, c in enumerate(clients):
            body = torch.nn.Linear(11, 5).double()
            body.load_state_dict(P.state_dict())
            for part, purpose in ((heads[i], "head"), (body, "batch")):
                solver = (
                    torch.optim.Adam(part.parameters(), lr=0.02, weight_decay=1e-3)
                    if opt == "adam"
                    else torch.optim.SGD(part.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)
                )
                for epoch in range(2):
                    for rows in batches_of(c, 0, r, epoch, purpose):
                        u = heads[i](torch.relu(body(data.x[rows, 0])))
                        solver.zero_grad()
                        torch.nn.functional.cross_entropy(u, data.y[rows]).backward()
                        solver.step()
            uploads.append(body.state_dict())
        n = [len(c.train) for c in clients]
        mean = {k: sum(m * u[k] for m, u in zip(n, uploads, strict=True)) / sum(n) for k in ("weight", "bias")}
        P.load_state_dict(mean)
    assert gap(out.server, {"P.W": P.weight.detach(), "P.b": P.bias.detach()}) < 1e-12
    for i, Q in heads.items():
        assert gap(out.states[i], {"Q.W": Q.weight.detach(), "Q.b": Q.bias.detach()}) < 1e-12


def test_a_client_deploys_the_global_projection_under_its_own_classifier():
    data, clients = federation()
    out = go("fedrep", {"dim": 8, "lr": 0.05}, data, clients, participation=None)
    for i, c in enumerate(clients):
        if i not in out.states:
            continue
        u = logits(Head("mlp", dim=8, bn=True, z_norm=False), {**out.server, **out.states[i]}, data.x[c.test, 0])[0]
        assert out.client_accuracy[i] == (u.argmax(-1) == data.y[c.test]).double().mean()


# -- pfedme -----------------------------------------------------------------------------------------------------------


def envelope_step(settings, a, t, near, b):
    """One batch of pFedMe on three lanes of f(t) = (a/2) (t - b)^2."""
    ctx = lanes("pfedme", settings, lead=(3,), who=("u", "v", "w"))
    b = torch.tensor(b, dtype=torch.float64)
    carry = {"t": torch.tensor(t, dtype=torch.float64), "near/t": torch.tensor(near, dtype=torch.float64)}
    out = pfedme.envelope(quadratic(a), ("t",), {})(carry, {"x": b}, ctx)
    return out["t"], out["near/t"]


def test_the_envelope_has_the_minimiser_and_the_gradient_of_the_paper():
    # T-M1: theta* = (a b + lambda w) / (a + lambda); lambda (w - theta*) = a lambda / (a + lambda) (w - b).
    a, lam, w, b = 3.0, 5.0, np.array([1.0, -2.0, 0.5]), np.array([0.0, 4.0, 0.5])
    settings = {"K": 300, "lambda": lam, "lr_p": 0.05, "eta": 0.01}
    theta, near = envelope_step(settings, a, w.tolist(), w.tolist(), b.tolist())
    assert theta.numpy() == pytest.approx((a * b + lam * w) / (a + lam), abs=1e-12)
    assert near.numpy() == pytest.approx(w - 0.01 * a * lam / (a + lam) * (w - b), abs=1e-12)


def test_one_inner_step_by_hand():
    # a = 2, b = 1: t = 3, w = 1: gradient 2 (3 - 1) = 4, pull 5 (3 - 1) = 10, decay 0.5 * 3 = 1.5;
    # t - 0.1 (4 + 10 + 1.5) = 1.45; w - 0.02 * 5 (1 - 1.45) = 1.045. At t = w = b = 0 nothing moves.
    settings = {"K": 1, "lambda": 5.0, "lr_p": 0.1, "eta": 0.02, "inner_decay": 0.5}
    theta, near = envelope_step(settings, 2.0, [3.0, 3.0, 0.0], [1.0, 3.0, 0.0], [1.0, 3.0, 0.0])
    assert theta.tolist() == pytest.approx([1.45, 2.85, 0.0])
    assert near.tolist() == pytest.approx([1.045, 2.985, 0.0])


@EXECUTIONS
def test_pfedme_is_a_loop_over_clients_batches_and_inner_steps(execution):
    data, clients = federation(sizes=(20, 33, 7))
    settings = {"head": "linear", "init": "shared", "batch": 16, "epochs": 2, "K": 3, "lambda": 4.0, "lr_p": 0.07,
                "eta": 0.1, "beta": 0.7, "inner_decay": 0.02}  # fmt: skip
    start = go("pfedme", {**settings, "epochs": 0}, data, clients, participation=None, rounds=1).server
    out = go("pfedme", settings, data, clients, participation=None, rounds=2, execution=execution)
    server = [start["W"], start["b"]]
    thetas = {}
    for r in range(2):
        total, weight = [0.0, 0.0], 0
        for i, c in enumerate(clients):
            near, theta = list(server), [t.clone() for t in server]
            for epoch in range(2):
                for rows in batches_of(c, 0, r, epoch):
                    for _ in range(3):
                        leaves = [t.detach().requires_grad_() for t in theta]
                        u = torch.nn.functional.linear(data.x[rows, 0], *leaves)
                        g = torch.autograd.grad(torch.nn.functional.cross_entropy(u, data.y[rows]), leaves)
                        theta = [
                            t - 0.07 * (d + 4.0 * (t - w) + 0.02 * t) for t, d, w in zip(theta, g, near, strict=True)
                        ]
                    near = [w - 0.1 * 4.0 * (w - t) for w, t in zip(near, theta, strict=True)]
            thetas[i] = dict(zip(("W", "b"), theta, strict=True))
            total = [s + len(c.train) * w for s, w in zip(total, near, strict=True)]
            weight += len(c.train)
        server = [0.3 * w + 0.7 * s / weight for w, s in zip(server, total, strict=True)]
    assert gap(out.server, {"W": server[0], "b": server[1]}) < 1e-12
    assert gap(out.states, thetas) < 1e-12


@EXECUTIONS
@pytest.mark.parametrize("still", [{"lambda": 0.0}, {"beta": 0.0}])
def test_what_keeps_the_global_model(still, execution):  # T-M2, T-M4
    pair, keys = exact(execution=execution)
    settings = {"dim": 8, "beta": 0.3, "bn": False}  # running statistics move without a step
    start = go("pfedme", {**settings, "epochs": 0}, *pair, **keys, rounds=1).server
    assert gap(go("pfedme", {**settings, **still}, *pair, **keys).server, start) == 0.0
    assert gap(go("pfedme", settings, *pair, **keys).server, start) > 0.0


def test_a_full_step_is_the_personal_model():  # T-M3: eta * lambda = 1
    pair, keys = exact(participation=None, rounds=1)
    for execution in ("sequential", "batched"):
        out = go("pfedme", {"dim": 8, "lambda": 4.0, "eta": 0.25}, pair[0], pair[1][3:4], **keys, execution=execution)
        assert gap(out.server, out.states[0]) == 0.0


def test_pfedme_deploys_either_model_of_the_same_training():
    data, clients = federation()
    settings = {"dim": 8, "eta": 0.05}
    own, shared = (
        go("pfedme", {**settings, "eval": e}, data, clients, participation=None) for e in ("personalised", "global")
    )
    assert gap(own.server, shared.server) == 0.0
    assert (own.protocol, shared.protocol) == ("personalised", "global")
    assert shared.states == {}
    head = Head("mlp", dim=8, bn=True, z_norm=False)
    assert torch.equal(shared.predict(data.x), logits(head, shared.server, data.x[:, 0])[0].argmax(-1))
    for i, c in enumerate(clients):
        if i not in own.states:
            continue
        u = logits(head, own.states[i], data.x[c.test, 0])[0]
        assert own.client_accuracy[i] == (u.argmax(-1) == data.y[c.test]).double().mean()


def test_a_client_that_never_trained_deploys_the_global_model():
    data, clients = federation()
    out = go("pfedme", {"dim": 8}, data, clients)
    absent = next(i for i in range(9) if i not in out.states)
    u = logits(Head("mlp", dim=8), out.server, data.x[clients[absent].test, 0])[0]
    assert out.client_accuracy[absent] == (u.argmax(-1) == data.y[clients[absent].test]).double().mean()


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("pfedme", "lr", "0.1", "pfedme reads: "),
        ("pfedme", "eval", "local", "personalised | global"),
        ("pfedme", "K", "0", "an integer of at least 1"),
        ("perfedavg", "opt", "adam", "perfedavg reads: "),
        ("perfedavg", "adapt_on", "val", "train | test"),
        ("fedrep", "epochs", "2", "fedrep reads: "),
        ("supcon", "tau", "0", "a number of at least 1e-06"),
        ("supcon", "views", "3", "1 | 2"),
    ],
)
def test_a_switch_that_is_not_read_is_refused(name, key, value, message):
    with pytest.raises(FedcacheError) as info:
        METHODS[name].resolve("paper", {key: value})
    assert info.value.code == Exit.USAGE
    assert message in f"{info.value.message} {info.value.hint}"


@pytest.mark.parametrize(("name", "rate"), [("pfedme", "lr_p"), ("perfedavg", "alpha"), ("fedrep", "lr")])
def test_a_run_that_explodes_names_the_rates_it_has(name, rate):
    with pytest.raises(FedcacheError, match="in round 1 for client") as info:
        go(name, {rate: 1e300, "z_norm": "none"})
    assert f"{rate} is 1e+300" in info.value.hint


@pytest.mark.parametrize("name", ["pfedme", "perfedavg"])
def test_a_linear_head_starts_from_text_and_no_other_can(name):
    with pytest.raises(FedcacheError, match="init=text"):
        go(name, {"init": "text"})
    (data, clients), keys = exact(rounds=1)
    start = go(name, {"head": "linear", "epochs": 0}, data, clients, **keys).server
    assert torch.equal(start["W"], data.text)
    assert not start["b"].any()
