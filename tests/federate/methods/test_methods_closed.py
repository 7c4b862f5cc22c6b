"""Closed forms do not see the partition: fedncm and fed3r against their centralised definitions."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from federation import go_all
from float64 import far, normal
from method_calls import lanes
from pooled_rows import CLIENTS, DATA, MEANS, TEST, X, Y, any_partition, parts
from setting_lines import cases_of
from sklearn.linear_model import Ridge

from fedcache.federate.methods.fed3r import feature_map


@any_partition(15, 40)
def test_fed3r_is_the_centralised_ridge_for_every_partition(seed, m):  # T-K2
    out = go_all("fed3r", "lam=0.1", DATA, parts(seed, m))
    W = np.linalg.solve(X.T @ X + 0.1 * np.eye(X.shape[1]), X.T @ Y)
    assert far(out.server["W"], W.T) < 1e-10 * np.abs(W).max()
    right = (DATA.x[TEST, 0].numpy() @ W).argmax(1) == DATA.y[TEST].numpy()
    assert out.accuracy == right.mean()


@any_partition(8, 40)
def test_fedncm_is_the_centralised_class_means_for_every_partition(seed, m):  # T-K1
    out = go_all("fedncm", {}, DATA, parts(seed, m))
    assert far(out.server["W"], MEANS / np.linalg.norm(MEANS, axis=1, keepdims=True)) < 1e-12
    out = go_all("fedncm", "metric=euclid", DATA, parts(seed, m))
    nearest = torch.cdist(DATA.x[:, 0], torch.from_numpy(MEANS)).argmin(-1)
    assert torch.equal(out.predict(DATA.x), nearest)


def test_a_bias_that_is_not_regularised_is_scikit_learns_intercept():
    out = go_all("fed3r", "lam=0.5 bias=true", DATA, parts(0, 7))
    ridge = Ridge(alpha=0.5).fit(X, Y)
    assert far(out.server["W"], ridge.coef_) < 1e-10
    assert far(out.server["b"], ridge.intercept_) < 1e-10


@pytest.mark.parametrize("reg_bias", [True, False])
def test_a_normalised_head_is_the_released_code(reg_bias):  # D-74, D-85
    group = parts(0, 7)
    settings = {"lam": 0.5, "bias": True, "reg_bias": reg_bias, "w_normalize": True}
    out = go_all("fed3r", settings, DATA, group)
    # The released steps: sums over clients of features with a one appended, one system, then the norm of each class
    # over the rows of W that belong to features divides all of its column.
    A = np.zeros((12, 12))
    B = np.zeros((12, 6))
    for client in group:
        Z = np.c_[DATA.x[client.train, 0].numpy(), np.ones(len(client.train))]
        A += Z.T @ Z
        B += Z.T @ np.eye(6)[DATA.y[client.train].numpy()]
    W = np.linalg.inv(A + 0.5 * np.diag([1.0] * 11 + [float(reg_bias)])) @ B
    W = W / np.sqrt((W[:-1] ** 2).sum(0))
    assert far(out.server["W"], W[:-1].T) < 1e-10
    assert far(out.server["b"], W[-1]) < 1e-10
    assert np.abs(np.linalg.norm(W, axis=0) - 1.0).max() > 1e-3  # a bias in the norm would be seen
    scores = np.c_[DATA.x[:, 0], np.ones(len(DATA.y))] @ W
    assert np.array_equal(out.predict(DATA.x).numpy(), scores.argmax(1))


def test_fourier_features_are_a_gaussian_kernel():
    # phi(x).phi(y) -> exp(-|x - y|^2 / (2 sigma^2)) as their number grows.
    x = normal(6, 11)
    phi = feature_map(x, lanes("fed3r", "rff_dim=40000 rff_sigma=2.0"))
    assert float((phi @ phi.T - torch.exp(-(torch.cdist(x, x) ** 2) / 8.0)).abs().max()) < 0.03


NOBODY = cases_of(
    """
    fedncm metric=cos
    fedncm metric=euclid
    fedpft epochs=1
    gda alpha=0.0
    gda alpha=1.0
    gh-ofl head=nb
    gh-ofl head=nb variance=pooled
    gh-ofl head=lda
    gh-ofl head=qda
    """
)


@pytest.mark.parametrize(("name", "settings"), NOBODY, ids=str)
def test_a_class_that_nobody_has_is_never_predicted(name, settings):
    wider = replace(DATA, classes=8, text=torch.cat([DATA.text, DATA.text[:2]]))
    out = go_all(name, settings, wider, CLIENTS)
    assert int(out.predict(torch.cat([DATA.x, -5.0 * DATA.x])).max()) < 6
    if name == "gh-ofl":
        assert torch.equal(
            out.predict(DATA.x), go_all(name, settings, DATA, CLIENTS).predict(DATA.x)
        )
