"""FedPFT: mixtures that travel, moments that merge, and the rows the server draws from them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from federation import federation, go, go_all
from method_calls import lanes
from refusal import training_error
from sklearn.mixture import GaussianMixture

from fedcache.federate.engine.client_data import stack_clients
from fedcache.federate.methods import fedpft
from fedcache.heads.gaussian_mixture import Gaussians, factor_of, fit_mixture, pooled

COVS = pytest.mark.parametrize("cov", ["spherical", "diag", "full"])


def covariance(scale, cov, width):
    if cov == "full":
        L = factor_of(scale, width)
        return L @ L.T
    return np.diag(np.broadcast_to(scale, width) ** 2)


def moments(z, cov):
    mean = z.mean(0)
    apart = z - z.mean(0)
    total = apart.T @ apart / len(z)
    if cov == "spherical":
        return mean, np.eye(z.shape[1]) * np.trace(total) / z.shape[1]
    return mean, total if cov == "full" else np.diag(np.diag(total))


def fitted(z, k, cov, reg=0.0):
    return fit_mixture(z, k, cov, reg=reg, tol=1e-12, steps=1000, seed=0)


@COVS
@pytest.mark.parametrize("reg", [0.0, 0.01])
def test_one_gaussian_is_the_fixed_point_of_em(cov, reg):  # T-K10
    z = np.random.default_rng(0).standard_normal((40, 5)) @ np.diag([1, 2, 3, 0.5, 0.1]) + 3.0
    ours = fitted(z, 1, cov, reg)
    em = GaussianMixture(1, covariance_type=cov, reg_covar=reg).fit(z)
    theirs = (
        em.covariances_[0] if cov == "full" else np.diag(np.broadcast_to(em.covariances_[0], 5))
    )
    assert np.allclose(ours.mean, em.means_, atol=1e-12)
    assert np.allclose(covariance(ours.scale[0], cov, 5), theirs, rtol=1e-9)
    assert ours.weight.tolist() == [1.0]


@COVS
def test_merged_moments_are_those_of_all_rows(cov):  # T-K11
    g = np.random.default_rng(1)
    samples = [
        g.standard_normal((n, 4)) * g.uniform(0.5, 2.0, 4) + g.standard_normal(4)
        for n in (30, 1, 7, 120)
    ]
    reg = 1e-9 if cov == "full" else 0.0  # the one row has no Cholesky factor otherwise
    parts = [fitted(z, 1, cov, reg) for z in samples]
    each = Gaussians(
        *(np.concatenate([getattr(p, k) for p in parts]) for k in ("mean", "scale")),
        np.array([30, 1, 7, 120]),
    )
    mean, scale = pooled(each, cov)
    want_mean, want = moments(np.concatenate(samples), cov)
    assert np.allclose(mean, want_mean, atol=1e-12)
    assert np.allclose(covariance(scale, cov, 4), want, atol=1e-8)


@COVS
def test_em_finds_two_clusters(cov):
    g = np.random.default_rng(2)
    z = np.concatenate(
        [g.standard_normal((300, 3)) * 0.1 - 2, g.standard_normal((100, 3)) * 0.4 + 2]
    )
    made = fitted(z, 2, cov)
    order = made.mean[:, 0].argsort()
    assert np.allclose(made.weight[order], [0.75, 0.25], atol=1e-6)
    for k, part in zip(order, (z[:300], z[300:]), strict=True):
        mean, want = moments(part, cov)
        assert np.allclose(made.mean[k], mean, atol=1e-6)
        assert np.allclose(covariance(made.scale[k], cov, 3), want, atol=1e-6)


@COVS
def test_drawn_rows_have_the_moments_of_the_mixture(cov):
    g = np.random.default_rng(3)
    L = np.tril(g.standard_normal((3, 3)))[np.tril_indices(3)]
    scale = {
        "spherical": [[0.5], [2.0]],
        "diag": [[1, 2, 3], [0.1, 0.2, 0.3]],
        "full": [L, 2.0 * L],
    }[cov]
    mixture = Gaussians(
        np.array([[0.0, 1.0, 2.0], [5.0, -5.0, 0.0]]), np.array(scale, float), np.array([3.0, 1.0])
    )
    z = mixture.rows(g.standard_normal((40_000, 3)), g, cov)
    inside = [covariance(s, cov, 3) for s in mixture.scale]
    want = np.cov(mixture.mean.T, aweights=[3, 1], ddof=0) + np.average(inside, 0, [3, 1])
    assert np.allclose(z.mean(0), np.average(mixture.mean, 0, [3, 1]), atol=0.08)
    assert np.abs(np.cov(z.T) - want).max() < 0.03 * np.abs(want).max()


DATA, CLIENTS = federation()


def uploads(settings, group=CLIENTS):
    """What the clients of ``group`` send, on a client axis, and the server's context."""
    ctx = lanes("fedpft", settings, lead=(len(group),), who=[c.name for c in group])
    _, up = fedpft.fit({}, {}, stack_clients(DATA.x, DATA.y, [c.train for c in group], 1), ctx)
    return up, lanes("fedpft", settings, who=("/server",))


def rows_of(client, c):
    return DATA.x[client.train, 0].numpy()[DATA.y[client.train].numpy() == c]


def counts():
    """Rows of each client and class."""
    return [[len(rows_of(client, c)) for c in range(6)] for client in CLIENTS]


@COVS
def test_without_spread_every_row_is_the_mean_of_its_class_on_its_client(cov):  # T-K12
    up, ctx = uploads({"cov": cov, "reg_covar": 1e-3})
    x, y = fedpft.draw({**up, "scale": torch.zeros_like(up["scale"])}, ctx)
    got = torch.cat([y[:, None], x], 1).numpy()
    means = [(c, rows_of(client, c)) for client in CLIENTS for c in range(6)]
    for c, z in means:
        if len(z) > 1:  # a single row borrows its spread from the class
            alike = np.abs(got - np.r_[c, z.mean(0)]).max(1) < 1e-3  # 16-bit means
            assert alike.sum() == len(z)


@pytest.mark.parametrize("k_mix", [1, 4, 100])
def test_every_class_of_every_client_is_drawn_as_often_as_it_has_rows(k_mix):
    up, ctx = uploads({"k_mix": k_mix})
    n = counts()
    assert up["count"].tolist() == n
    assert np.array_equal(np.bincount(fedpft.draw(up, ctx)[1], minlength=6), np.sum(n, 0))


def one_class(parts, cov):
    """Clients whose rows ``parts`` are all of one class: features and labels that the server draws."""
    settings = {"cov": cov, "k_mix": 1}
    who = [f"c{i}" for i in range(len(parts))]
    D = parts[0].shape[1]
    ends = np.cumsum([len(z) for z in parts])
    trains = [np.arange(e - len(z), e) for e, z in zip(ends, parts, strict=True)]
    x = torch.from_numpy(np.concatenate(parts))[:, None]
    y = torch.zeros(len(x), dtype=torch.int64)
    ctx = lanes("fedpft", settings, classes=1, width=D, lead=(len(who),), who=who)
    _, up = fedpft.fit({}, {}, stack_clients(x, y, trains, 1), ctx)
    server = lanes("fedpft", settings, classes=1, width=D, who=("/server",))
    return fedpft.draw(up, server)[0].numpy()


@pytest.mark.slow
@pytest.mark.parametrize("cov", ["spherical", "full"])
def test_single_rows_borrow_the_covariance_of_their_class_from_all_clients(cov):
    # Every client has one row z_i and draws z_i + e with e of the covariance of all z: the variances add.
    z = np.random.default_rng(4).standard_normal((1200, 3)) * [0.2, 1.0, 2.0]
    drawn = one_class(list(z[:, None]), cov)
    want = moments(z, "full")[1] + moments(z, cov)[1]
    assert np.abs(np.cov(drawn.T) - want).max() < 0.1 * np.abs(want).max()


def test_many_rows_keep_their_own_covariance():
    tight = 0.1 * np.random.default_rng(5).standard_normal((500, 3))
    drawn = one_class([tight, np.full((1, 3), 100.0)], "full")
    assert (np.abs(drawn).max(1) < 1.0).sum() == 500  # the class of both spreads by about 5


def test_a_singular_covariance_says_what_to_do():
    info = training_error(lambda: go("fedpft", "cov=full reg_covar=0.0"), "reg_covar=0")
    works = float(info.hint.split("reg_covar=")[1])
    assert np.isfinite(go("fedpft", {"cov": "full", "reg_covar": works}).accuracy)


@pytest.mark.parametrize("k_mix", [1, 2])
def test_a_feature_that_is_not_finite_names_its_client(k_mix):
    x = DATA.x.clone()
    x[CLIENTS[3].train[5]] = torch.inf
    training_error(
        lambda: go_all("fedpft", {"k_mix": k_mix, "epochs": 1}, replace(DATA, x=x), CLIENTS),
        "client 3 ('client-3')",
    )


def test_features_beyond_sixteen_bits_are_refused():
    training_error(
        lambda: go("fedpft", {}, replace(DATA, x=1e6 * DATA.x, text=None), CLIENTS), "65504"
    )


def test_no_more_gaussians_are_sent_than_a_class_has_rows():
    out = go_all("fedpft", "epochs=1 k_mix=4")
    n = np.array(counts())
    used = np.where(n > 4, 4, n > 0).sum(1)
    assert out.traffic.up.tolist() == (13 * used + (n > 0).sum(1)).tolist()


def test_a_count_beyond_two_bytes_takes_two_scalars():
    up, ctx = uploads({}, CLIENTS[1:2])
    one = {k: t[0] for k, t in up.items()}
    large = {**one, "count": one["count"].index_fill(0, one["count"].nonzero()[0], 65_536)}
    assert fedpft.sent(large, ctx) == fedpft.sent(one, ctx) + 1
