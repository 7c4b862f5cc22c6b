"""Linear systems are refused when they are singular and solved when they are not, on every processor."""

import numpy as np
import pytest
import torch
from draws import FULL
from float64 import eye, ones
from refusal import training_error

from fedcache.heads.gaussian_mixture import pack
from fedcache.heads.ridge import factored, solve, solve_spectrum, spectrum


def system(z):
    z = torch.as_tensor(z, dtype=torch.float64)
    return z.mT @ z


def by_cholesky(A, B, ridge, size=None):
    return solve(A, B, ridge, size=size)


def by_eigenvalues(A, B, ridge, size=None):
    return solve_spectrum(spectrum(A, B, size), ridge)


either_way = pytest.mark.parametrize("way", [by_cholesky, by_eigenvalues])


def refused(way, A, size=None):
    B = ones(len(A), 1)
    return float(training_error(lambda: way(A, B, 0.0, size), "lam=0").hint.split("=")[-1])


@either_way
@pytest.mark.parametrize("mean", [0.0, 30.0])
@pytest.mark.parametrize(("rows", "features"), [(39, 40), (2, 3), (9, 10)])
def test_fewer_rows_than_features_are_refused_in_each_draw(way, rows, features, mean):
    for seed in range(200 if FULL else 40):
        z = np.random.default_rng(seed).standard_normal((rows, features)) + mean
        assert torch.isfinite(way(system(z), ones(features, 1), refused(way, system(z)))).all()


DETERMINED = {
    "equal": lambda z: z[:, 2],
    "sum": lambda z: z[:, 0] - 2.0 * z[:, 1] + 3.0 * z[:, 5],
    "zero": lambda z: 0.0,
    "mean": lambda z: z[:, :7].mean(1),
}


@either_way
@pytest.mark.parametrize("what", DETERMINED)
@pytest.mark.parametrize("features", [8, 257])
def test_a_feature_that_others_determine_is_refused(way, what, features):
    z = np.random.default_rng(features).standard_normal((2 * features, features))
    z[:, 7] = DETERMINED[what](z)
    for scale in (1e-3, 1.0, 1e3):
        refused(way, system(scale * z))


@either_way
def test_regular_systems_are_solved(way):
    for seed in range(50):
        g = np.random.default_rng(seed)
        z = g.standard_normal((60, 40))
        B = g.standard_normal((40, 3))
        W = way(system(z), torch.from_numpy(B), 0.0).numpy()
        assert np.allclose(W, np.linalg.solve(z.T @ z, B), rtol=1e-6, atol=1e-9)


@either_way
@pytest.mark.parametrize("condition", [1e3, 1e9])
def test_a_system_of_known_condition_is_solved(way, condition):
    g = np.random.default_rng(0)
    V = np.linalg.qr(g.standard_normal((100, 100)))[0]
    A = (V * np.geomspace(1.0, condition, 100)) @ V.T
    known = g.standard_normal((100, 1))
    W = way(torch.from_numpy((A + A.T) / 2), torch.from_numpy(A @ known), 0.0).numpy()
    assert np.abs(W - known).max() < 1e-12 * condition


def test_features_of_very_different_scale_are_no_reason_to_refuse():
    g = np.random.default_rng(0)
    z = g.standard_normal((60, 5))
    B = g.standard_normal((5, 2))
    scale = np.array([1e-6, 1e-3, 1.0, 1e3, 1e6])[:, None]
    A = scale * (z.T @ z) * scale.T
    W = solve(torch.from_numpy(A), torch.from_numpy(B * scale), 0.0).numpy()
    assert np.allclose(W * scale, np.linalg.solve(z.T @ z, B), rtol=1e-9)


@either_way
@pytest.mark.parametrize("mean", [1e2, 1e4])
def test_a_constant_feature_is_refused_after_its_mean_is_subtracted(way, mean):
    # What is left of its square is rounding, which looks like a small feature of its own.
    z = np.random.default_rng(0).standard_normal((200, 12)) + mean
    z[:, 5] = mean + 0.1
    A = system(z)
    total = torch.from_numpy(z.sum(0))
    refused(way, (A - torch.outer(total, total) / 200) / 200, size=A.diagonal() / 200)


def test_each_system_of_a_batch_is_judged_alone():
    g = np.random.default_rng(0)
    batch = torch.stack([system(g.standard_normal((60, 20))), system(g.standard_normal((19, 20)))])
    assert factored(torch.stack([batch, batch.flip(0)]))[1].tolist() == [
        [True, False],
        [False, True],
    ]


def test_a_system_with_nan_is_refused():
    A = eye(4)
    A[2, 1] = A[1, 2] = torch.nan
    refused(by_cholesky, A)


def test_a_covariance_of_fewer_rows_than_features_has_no_factor():
    for seed in range(200):
        z = np.random.default_rng(seed).standard_normal((9, 10))
        with pytest.raises(np.linalg.LinAlgError):
            pack(z.T @ z)
