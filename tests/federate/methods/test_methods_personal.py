"""Facts of the methods that make a model for every client: fedrep and pfedme, and what they share with others."""

import pytest
import torch
from federation import federation, gap, go, go_all, server_gap, start_of
from method_calls import batches_of
from reference_steps import Tree, linear_gradient, local_batches, mean_of
from refusal import training_error
from setting_lines import set_to
from text_tables import rows_of

from fedcache.federate.methods import METHODS
from fedcache.heads.projection import Head, logits

# -- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["paper", "official"])
def test_the_local_losses_of_table_5_share_their_switches(preset):
    # The rows differ by loss alone: everything about the model and its training has one value in all of them.
    shared = [
        "feat_post",
        "dim",
        "bn",
        "opt",
        "lr",
        "wd",
        "momentum",
        "batch",
        "epochs",
        "reset_opt",
        "drop_last",
    ]
    contrast = ("tau", "views", "proto_norm", "proto_drop_last", "infer_score", "init")
    plain = ("solo", "fedavg", "fedproto")
    contrasted = ("supcon", "fedpcl")
    for names, keys in ((plain + contrasted, shared), (contrasted, contrast)):
        rows = [METHODS[name].resolve(preset) for name in names]
        assert all([row[k] for k in keys] == [rows[0][k] for k in keys] for row in rows)
    norms = {
        names: {METHODS[name].resolve(preset)["z_norm"] for name in names}
        for names in (plain, contrasted)
    }
    # Eqs 8 and 9 need unit length.
    assert norms == {plain: {"none" if preset == "paper" else "l2"}, contrasted: {"l2"}}


# -- fedrep -----------------------------------------------------------------------------------------------------------


def test_classifiers_start_alike_or_each_on_its_own():  # D-11; P is shared either way
    settings = set_to("dim=8 e_h=0 e_b=0")
    shared, independent = (
        go_all("fedrep", {**settings, "init": i}, rounds=1) for i in ("shared", "independent")
    )
    assert server_gap(shared, independent) == 0.0
    assert gap(shared.states[0], shared.states[1]) == 0.0
    assert gap(independent.states[0], independent.states[1]) > 0.1
    fedavg = go("fedavg", "dim=8 epochs=0 init=shared", rounds=1).server
    assert gap(fedavg, shared.server | shared.states[0]) < 1e-15


@pytest.mark.parametrize(
    ("name", "opt", "shared"),
    rows_of(
        """
        fedrep    | sgd  | P
        fedrep    | adam | P
        fedper    | sgd  | P
        lg-fedavg | sgd  | Q
        """
    ),
)
def test_fedalt_is_fedrep_and_fedsim_is_fedper(name, opt, shared):  # D-112
    # One combined model whose parts are frozen in turn (FedAlt) or not (FedSim), with a fresh optimiser of torch for
    # each phase; the server's SGD of rate 1 takes the mean difference. This is how the released code is written.
    # LG-FedAvg is FedSim with the other part shared.
    data, clients = federation(sizes=(20, 33, 7))
    epochs = {"fedrep": {"e_h": 2, "e_b": 2}}.get(name, {"epochs": 2})
    settings = set_to("lr=0.02 wd=1e-3 batch=16 dim=5 bn=false") | epochs | {"opt": opt}
    start = go_all(name, settings | dict.fromkeys(epochs, 0), data, clients, rounds=1)
    out = go_all(name, settings, data, clients, rounds=3)
    assert {k[0] for k in start.server} == {shared}
    how = {"lr": 0.02, "weight_decay": 1e-3}
    phases = {"fedrep": [("Q", "head"), ("P", "batch")]}.get(name, [("PQ", "batch")])
    mean = {k: torch.nn.Parameter(t.clone()) for k, t in start.server.items()}
    personal = {i: dict(start.states[i]) for i in range(3)}
    server = torch.optim.SGD(mean.values(), lr=1.0)
    for r in range(3):
        for p in mean.values():
            p.grad = torch.zeros_like(p)
        for i, c in enumerate(clients):
            whole = {k: p.detach().clone() for k, p in mean.items()} | personal[i]
            for parts, purpose in phases:
                for k, t in whole.items():
                    t.requires_grad_(k[0] in parts)
                trained = [t for t in whole.values() if t.requires_grad]
                solver = torch.optim.SGD(trained, momentum=0.9, **how)
                if opt == "adam":
                    solver = torch.optim.Adam(trained, **how)
                for epoch in range(2):
                    for rows in batches_of(c, 0, r, epoch, purpose):
                        z = torch.relu(data.x[rows, 0] @ whole["P.W"].T + whole["P.b"])
                        u = z @ whole["Q.W"].T + whole["Q.b"]
                        solver.zero_grad()
                        torch.nn.functional.cross_entropy(u, data.y[rows]).backward()
                        solver.step()
            whole = {k: t.detach() for k, t in whole.items()}
            personal[i] = {k: whole[k] for k in personal[i]}
            for k, p in mean.items():
                p.grad += len(c.train) / 60 * (p.detach() - whole[k])
        server.step()
    assert gap(out.server, {k: p.detach() for k, p in mean.items()}) < 1e-12
    assert gap(out.states, personal) < 1e-12
    assert server_gap(out, start) > 1e-3


# -- pfedme -----------------------------------------------------------------------------------------------------------


def test_pfedme_is_a_loop_over_clients_batches_and_inner_steps():
    data, clients = federation(sizes=(20, 33, 7))
    settings = set_to(
        "head=linear init=shared batch=16 epochs=2 "
        "K=3 lambda=4.0 lr_p=0.07 eta=0.1 beta=0.7 inner_decay=0.02"
    )
    server = Tree(start_of("pfedme", settings, data, clients))
    out = go_all("pfedme", settings, data, clients, rounds=2)
    thetas = {}
    for r in range(2):
        ends = []
        for i, c in enumerate(clients):
            near = theta = server
            for rows in local_batches(c, r, 2):
                for _ in range(3):
                    g = linear_gradient(theta, data, rows)
                    theta = theta - 0.07 * (g + 4.0 * (theta - near) + 0.02 * theta)
                near = near - 0.1 * 4.0 * (near - theta)
            thetas[i] = theta
            ends.append(near)
        server = 0.3 * server + 0.7 * mean_of(ends, [20, 33, 7])
    assert gap(out.server, server) < 1e-12
    assert gap(out.states, thetas) < 1e-12


def test_pfedme_deploys_either_model_of_the_same_training():
    data, clients = federation()
    settings = {"dim": 8, "eta": 0.05}
    own, shared = (go_all("pfedme", {**settings, "eval": e}) for e in ("personalised", "global"))
    assert server_gap(own, shared) == 0.0
    assert own.protocol == "personalised"
    assert shared.protocol == "global"
    assert shared.states == {}
    head = Head("mlp", dim=8, bn=True, z_norm=False)
    for i, c in enumerate(clients):
        if i not in own.states:
            continue
        u = logits(head, own.states[i], data.x[c.test, 0])[0]
        assert own.client_accuracy[i] == (u.argmax(-1) == data.y[c.test]).double().mean()


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rate"), [("pfedme", "lr_p"), ("perfedavg", "alpha"), ("fedrep", "lr")]
)
def test_a_run_that_explodes_names_the_rates_it_has(name, rate):
    settings = {rate: 1e300, "z_norm": "none"}
    training_error(lambda: go(name, settings), "round 1", f"{rate} is 1e+300")
