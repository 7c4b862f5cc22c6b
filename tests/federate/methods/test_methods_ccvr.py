"""CCVR: FedAvg until the calibration, then a classifier trained on rows drawn from merged class Gaussians."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from federation import federation, gap, go_all, server_gap
from float64 import far
from method_calls import single
from refusal import refused
from scipy.linalg import sqrtm

from fedcache.federate.engine.context import ClientRng, generator
from fedcache.federate.trust.pipeline import parse_policy
from fedcache.federate.trust.privacy import Privacy

SIZES = (40, 60, 80)
DATA, CLIENTS = federation(sizes=SIZES, per_client=6)
MODEL = "dim=4 batch=16 epochs=2 lr=0.01 wd=1e-3 bn=false"


def projections(p, x):
    """P(x) written out in numpy, without BatchNorm."""
    return np.maximum(x @ p["P.W"].numpy().T + p["P.b"].numpy(), 0.0)


def drawn(z, y, counts, round_):
    """Virtual features of all classes: means and covariances by numpy, over all rows in one place."""
    rng = ClientRng(0, round_, ("/server",), 0, torch.float64, torch.device("cpu"))
    noise = rng.normal("virtual", [sum(counts)], z.shape[1]).numpy()
    rows = []
    for c, part in enumerate(np.split(noise, np.cumsum(counts)[:-1])):
        mine = z[y == c]
        rows.append(mine.mean(0) + part @ np.real(sqrtm(np.cov(mine.T))))
    return torch.from_numpy(np.concatenate(rows)), torch.from_numpy(np.repeat(np.arange(6), counts))


def retrained(W, b, x, y, round_, solver, **words):
    """A torch.nn.Linear after three epochs of a torch optimiser, in the engine's order of the rows."""
    head = torch.nn.Linear(*W.shape[::-1]).double()
    head.load_state_dict({"weight": W, "bias": b})
    optimiser = solver(head.parameters(), weight_decay=1e-3, **words)
    for epoch in range(3):
        order = generator(0, "batch", round_, "/server", epoch).permutation(len(y))
        for rows in torch.from_numpy(order).split(16):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(head(x[rows]), y[rows]).backward()
            optimiser.step()
    return head.weight.detach(), head.bias.detach()


@pytest.mark.parametrize("virtual_of", ["class", "share"])
def test_the_classifier_is_trained_on_gaussians_of_all_rows_in_one_place(virtual_of):
    settings = f"{MODEL} calibrate_at=2 virtual=20 virtual_of={virtual_of} cal_epochs=3"
    out = go_all("ccvr", settings, DATA, CLIENTS, rounds=2).server
    start = go_all("fedavg", MODEL, DATA, CLIENTS, rounds=1).server
    rows = np.concatenate([c.train for c in CLIENTS])
    y = DATA.y[rows].numpy()
    z = projections(start, DATA.x[rows, 0].numpy())
    counts = np.full(6, 20)
    if virtual_of == "share":
        counts = np.round(np.bincount(y, minlength=6) * 120 / len(y)).astype(int)
        assert len(set(counts.tolist())) > 1
    x, labels = drawn(z, y, counts.tolist(), 1)
    W, b = retrained(start["Q.W"], start["Q.b"], x, labels, 1, torch.optim.Adam, lr=0.01)
    assert far(out["Q.W"], W.numpy()) < 1e-10
    assert far(out["Q.b"], b.numpy()) < 1e-10
    assert gap(out["Q.W"], start["Q.W"]) > 1e-3
    for name in ("P.W", "P.b"):
        assert torch.equal(out[name], start[name])


def test_before_the_calibration_it_is_fedavg():
    fedavg = go_all("fedavg", MODEL, rounds=2)
    ours = go_all("ccvr", f"{MODEL} calibrate_at=3", rounds=2)
    assert server_gap(fedavg, ours) == 0.0
    assert fedavg.traffic.totals()["up"] == ours.traffic.totals()["up"]


def test_a_calibration_in_the_first_round_does_not_depend_on_the_partition():
    settings = "head=linear init=zero calibrate_at=1 batch=16 opt=sgd lr=0.1"
    whole, split = (
        go_all("ccvr", settings, DATA, group, rounds=1) for group in (single(CLIENTS), CLIENTS)
    )
    assert server_gap(whole, split) < 1e-10
    # For each class a sum, a triangle of products and a count, of features of 11 numbers.
    assert split.traffic.up.tolist() == [6 * (11 + 66 + 1)] * 3


def test_a_class_of_one_row_and_a_class_without_rows():
    # Class 0 has one row and class 1 none: the features of class 0 have the covariance within the other classes.
    y = DATA.y.clone()
    rows = torch.from_numpy(np.concatenate([c.train for c in CLIENTS]))
    y[rows] = 2 + y[rows] % 4
    y[rows[0]] = 0
    settings = "head=linear init=zero calibrate_at=1 batch=16 opt=sgd lr=0.1 cal_epochs=20"
    out = go_all("ccvr", settings, replace(DATA, y=y), CLIENTS, rounds=1).server
    scores = DATA.x[rows, 0] @ out["W"].T + out["b"]
    assert scores.argmax(1)[0] == 0
    assert not (scores.argmax(1) == 1).any()


def test_a_bound_of_rows_is_one_of_the_statistics_of_the_last_round():
    trust = parse_policy(max_row_norm=100.0)
    settings = "head=linear init=zero calibrate_at=2"
    bounded = go_all("ccvr", settings, DATA, CLIENTS, rounds=2, trust=trust).server
    assert gap(bounded, go_all("ccvr", settings, DATA, CLIENTS, rounds=2).server) < 1e-12


def test_a_private_run_is_refused_before_its_first_round():
    # Only the last round sends numbers of rows, which get no noise.
    trust = parse_policy(privacy=Privacy(1.0, 1.0, seed=0))
    refused(lambda: go_all("ccvr", f"{MODEL} calibrate_at=3", rounds=3, trust=trust), "send count")
