"""GH-OFL's trained heads, against scipy's eigenvectors and densities and torch's AdamW on all rows in one place."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from federation import federation, go_all, server_gap
from float64 import far
from method_calls import single
from scipy.linalg import eigh, sqrtm
from scipy.stats import multivariate_normal

from fedcache.federate.engine.context import ClientRng, generator

DATA, CLIENTS = federation(sizes=(40, 60, 80), per_client=6)
SETTINGS = "synthetic=20 batch=32 epochs=3 lr=0.01 decay=0.1 energy=0.9 rank=3"
D = 11
EACH = 20


def shrunk(S, a):
    return (1 - a) * S + a * np.trace(S) / len(S) * np.eye(len(S))


class Pooled:
    """The Fisher subspace, synthetic rows and discriminants, from all rows in one place."""

    def __init__(self):
        rows = np.concatenate([c.train for c in CLIENTS])
        x = DATA.x[rows, 0].numpy()
        y = DATA.y[rows].numpy()
        parts = [x[y == c] for c in range(6)]
        share = np.array([len(p) for p in parts]) / len(x)
        means = np.stack([p.mean(0) for p in parts])
        within = sum((len(p) - 1) * np.cov(p.T) for p in parts) / (len(x) - 6)
        apart = means - share @ means
        S_w = shrunk(within, 0.05) + 1e-6 * np.eye(D)
        values, vectors = eigh(apart.T @ np.diag(share) @ apart, S_w)
        width = int(np.argmax(np.cumsum(values[::-1]) / values.sum() >= 0.9)) + 1
        V = vectors[:, ::-1][:, :width]
        whitened = np.real(sqrtm(S_w)) @ V
        self.V = V * np.sign(whitened[np.abs(whitened).argmax(0), np.arange(width)])
        inner = means @ self.V
        ridge = 2e-6 * np.eye(width)
        rng = ClientRng(0, 0, ("/server",), 0, torch.float64, torch.device("cpu"))
        noise = rng.normal("synthetic", [6 * EACH], width).numpy()
        spread = np.linalg.cholesky(self.V.T @ within @ self.V + ridge)
        self.y = torch.from_numpy(np.repeat(np.arange(6), EACH))
        self.z = torch.from_numpy(inner[self.y] + 0.75 * noise @ spread.T)
        self.first = rng.normal("init", [6], width)
        one = self.V.T @ shrunk(within, 0.05) @ self.V + ridge
        own = [self.V.T @ shrunk(np.cov(p.T), 0.05) @ self.V + ridge for p in parts]
        self.linear = self.densities(inner, [one] * 6, share)
        self.quadratic = self.densities(inner, own, share)

    def densities(self, means, covariances, share):
        logs = [
            multivariate_normal(m, S).logpdf(self.z)
            for m, S in zip(means, covariances, strict=True)
        ]
        return torch.from_numpy(np.stack(logs, 1) + np.log(share))


POOLED = Pooled()


def standard(u):
    return (u - u.mean(1, keepdim=True)) / u.std(1, keepdim=True, unbiased=False)


def trained(parameters, loss):
    """The parameters after three epochs of torch's AdamW, in the engine's order of the rows."""
    solver = torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)
    for epoch in range(3):
        order = generator(0, "batch", 0, "/server", epoch).permutation(len(POOLED.y))
        for rows in torch.from_numpy(order).split(32):
            solver.zero_grad()
            loss(rows).backward()
            solver.step()
    return parameters


def test_the_subspace_solves_the_generalised_eigenproblem():
    out = go_all("gh-ofl-trained", SETTINGS, DATA, CLIENTS).server
    assert 2 <= POOLED.V.shape[1] < 5
    assert far(out["V"], POOLED.V) < 1e-10


def test_fishermix_is_a_cosine_classifier_of_torch():
    W = torch.nn.Parameter(0.01 * POOLED.first)

    def loss(rows):
        cosine = torch.nn.functional.cosine_similarity(POOLED.z[rows, None], W[None], dim=-1)
        return torch.nn.functional.cross_entropy(20 * cosine, POOLED.y[rows])

    trained([W], loss)
    out = go_all("gh-ofl-trained", SETTINGS, DATA, CLIENTS)
    assert far(out.server["W"], W.detach().numpy()) < 1e-8
    # A triangle of products, a sum of each class and the counts.
    assert out.traffic.up.tolist() == [66 + 6 * D + 6] * 3


@pytest.mark.parametrize("blend", [0.0, 0.5])
def test_proto_hyper_is_distilled_from_both_discriminants(blend):
    width = POOLED.V.shape[1]
    rank = min(3, width)
    g = generator(0, "init", -1, "")
    A = torch.from_numpy(g.uniform(-1, 1, (rank, width)) / width**0.5)
    g.uniform(-1, 1, rank)  # the map to the subspace has no bias
    W, b = (torch.from_numpy(g.uniform(-1, 1, shape) / rank**0.5) for shape in ((6, rank), 6))
    A, W, b = (torch.nn.Parameter(t) for t in (A, W, b))
    teacher = standard(blend * POOLED.quadratic + (1 - blend) * POOLED.linear)

    def loss(rows):
        u = standard(POOLED.linear[rows]) + (POOLED.z[rows] @ A.T) @ W.T + b
        soft = torch.softmax(teacher[rows] / 4, 1)
        kl = torch.nn.functional.kl_div(torch.log_softmax(u / 4, 1), soft, reduction="batchmean")
        return 0.85 * 16 * kl + 0.15 * torch.nn.functional.cross_entropy(u, POOLED.y[rows])

    trained([A, W, b], loss)
    settings = f"{SETTINGS} head=proto-hyper blend={blend}"
    out = go_all("gh-ofl-trained", settings, DATA, CLIENTS).server
    for name, wanted in (("A", A), ("W", W), ("b", b)):
        assert far(out[name], wanted.detach().numpy()) < 1e-8


@pytest.mark.parametrize("head", ["fishermix", "proto-hyper"])
@pytest.mark.parametrize("present", [5, 2])
def test_the_partition_does_not_matter_and_absent_classes_are_never_predicted(head, present):
    """Two classes have one axis; a second one that rounding chooses would make another model of each partition."""
    data = replace(DATA, y=DATA.y.clamp(max=present - 1))
    settings = f"{SETTINGS} head={head}"
    whole, split = (
        go_all("gh-ofl-trained", settings, data, group) for group in (single(CLIENTS), CLIENTS)
    )
    assert server_gap(whole, split) < 1e-8
    assert (split.deployed(None).scores(data.x[:, 0]).argmax(1) < present).all()
