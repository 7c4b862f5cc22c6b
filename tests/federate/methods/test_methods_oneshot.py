"""One-shot closed forms: personal fed3r, fed3r-prior, fedcgs and fedcof, against their formulas."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from federation import federation, gap, go, go_all, rows_trained, server_gap
from float64 import far
from method_calls import lanes
from pooled_rows import CLIENTS, DATA, MEANS, POOL, TEST, X, Y, any_partition, parts
from refusal import training_error
from setting_lines import set_to
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge
from text_tables import rows_of

from fedcache.federate.methods import METHODS
from fedcache.federate.methods.fed3r import feature_map

LABEL = DATA.y[POOL].numpy()


# Systems without an answer


@pytest.mark.parametrize(
    ("name", "settings", "key"),
    rows_of(
        """
        fed3r       | lam=0.0           | lam
        fed3r       | lam=0.0 omega=1.0 | lam
        fed3r-prior | lam=0.0           | lam
        fedcgs      | gamma_shrink=0.0  | gamma_shrink
        fedcof      | gamma=0.0         | gamma
        """
    ),
)
def test_a_singular_system_names_the_switch_and_a_value_that_works(name, settings, key):
    twice = replace(DATA, x=DATA.x.repeat(1, 1, 2), text=DATA.text.repeat(1, 2))
    info = training_error(lambda: go_all(name, settings, twice, CLIENTS), f"{key}=0")
    word = info.hint.split("--set ")[1].split("=")
    assert word[0] == key
    works = set_to(settings) | {key: float(word[1])}
    assert np.isfinite(go_all(name, works, twice, CLIENTS).accuracy)


# fed3r: personal models and random features


@pytest.mark.parametrize("bias", [False, True])
def test_a_personal_ridge_counts_the_clients_own_rows_more_often(bias):
    # (A + omega A_i + lam I)^-1 (B + omega B_i) is the ridge in which a row of client i weighs 1 + omega.
    group = parts(2, 4)
    out = go_all("fed3r", {"omega": 2.5, "lam": 0.5, "bias": bias}, DATA, group)
    assert out.protocol == "personalised"
    guesses = []
    for client in group:
        weight = np.where(np.isin(POOL, client.train), 3.5, 1.0)
        ridge = Ridge(alpha=0.5, fit_intercept=bias).fit(X, Y, sample_weight=weight)
        guesses.append(ridge.predict(DATA.x[TEST, 0].numpy()).argmax(1))
    assert np.array_equal(out.evaluation.predictions, np.concatenate(guesses))
    assert len({g.tobytes() for g in guesses}) > 1


def test_without_extra_weight_there_is_one_model():
    out = go("fed3r", "omega=0.0")
    assert out.protocol == "global"
    assert {"W", "b"} <= set(out.server)
    nearly = go("fed3r", "omega=1e-9")
    for c, mine in zip(CLIENTS, np.split(nearly.evaluation.predictions, 9), strict=True):
        assert np.array_equal(mine, out.predict(DATA.x[c.test]).numpy())


@any_partition(5, 20)
def test_random_features_are_one_draw_for_all_clients(seed, m):
    out = go_all("fed3r", "rff_dim=30 lam=0.1", DATA, parts(seed, m), seed=seed)
    ctx = lanes("fed3r", "rff_dim=30 rff_sigma=1.0")
    phi = feature_map(DATA.x[POOL, 0], replace(ctx, rng=replace(ctx.rng, seed=seed))).numpy()
    W = np.linalg.solve(phi.T @ phi + 0.1 * np.eye(30), phi.T @ Y)
    assert far(out.server["W"], W.T) < 1e-9 * np.abs(W).max()
    other = feature_map(DATA.x[POOL, 0], replace(ctx, rng=replace(ctx.rng, seed=seed + 1))).numpy()
    assert np.abs(phi - other).max() > 0.1


def test_the_bandwidth_follows_the_length_of_the_training_rows():  # D-87
    data = replace(
        DATA, x=DATA.x * torch.linspace(2.0, 30.0, len(DATA.x), dtype=torch.float64)[:, None, None]
    )
    holed = data.x.clone()
    holed[TEST] = torch.nan  # of training rows alone
    sigma = float(np.linalg.norm(data.x[POOL, 0].numpy(), axis=1).mean())
    for group in (parts(0, 4), parts(1, 9), CLIENTS):
        auto = go_all("fed3r", "rff_dim=30", replace(data, x=holed), group)
        told = go_all("fed3r", {"rff_dim": 30, "rff_sigma": sigma}, data, group)
        assert abs(auto.hp["rff_sigma"] - sigma) < 1e-12 * sigma
        assert auto.records[-1].diagnostics == {"rff_sigma": auto.hp["rff_sigma"]}
        assert server_gap(auto, told) < 1e-9
    assert abs(go_all("fed3r", "rff_dim=30").hp["rff_sigma"] - 1.0) < 1e-12  # unit rows
    assert go_all("fed3r").hp["rff_sigma"] is None  # nobody asks without random features


@pytest.mark.parametrize("participation", [None, 4])
def test_for_the_mean_length_every_client_sends_a_sum_and_its_rows(participation):
    plain = go("fed3r", "rff_dim=30 rff_sigma=1.0", participation=participation).traffic
    auto = go("fed3r", "rff_dim=30", participation=participation).traffic
    assert (auto.up - plain.up).tolist() == [2] * 9
    assert (auto.down - plain.down).tolist() == [1] * 9
    assert auto.totals()["up_bytes"] - plain.totals()["up_bytes"] == 144


# fed3r-prior


def test_the_prior_is_where_nothing_is_known():  # T-K6
    zero_shot = go_all("clip-zs").predict(DATA.x)
    out = go_all("fed3r-prior", "lam=1e12")
    assert gap(out.server["W"], DATA.text) < 1e-9
    assert torch.equal(out.predict(DATA.x), zero_shot)


@any_partition(8, 20)
def test_the_prior_solves_its_least_squares_for_every_partition(seed, m):
    # |kappa Y - Z W|^2 + lam |W - W0|^2 as an ordinary least squares of stacked rows.
    out = go_all("fed3r-prior", "lam=4.0 kappa=0.7", DATA, parts(seed, m))
    W0 = DATA.text.numpy().T
    W = np.linalg.lstsq(np.r_[X, 2.0 * np.eye(11)], np.r_[0.7 * Y, 2.0 * W0], rcond=None)[0]
    assert np.allclose(out.server["W"].numpy().T, W, atol=1e-10)


# fedcgs


@pytest.mark.parametrize("absent", [0, 2])
def test_fedcgs_is_linear_discriminant_analysis(absent):
    data = replace(DATA, classes=6 + absent, text=None)
    out = go_all("fedcgs", "gamma_shrink=0.0", data, parts(1, 5))
    lda = LinearDiscriminantAnalysis(solver="lsqr").fit(X, LABEL)
    N = len(LABEL)
    biased = N / (N - 6)  # scikit-learn divides the scatter by N
    log_pi = np.log(Y.mean(0))
    W, b = (out.server[name].numpy()[:6] for name in ("W", "b"))
    # Scores differ by a number that is the same for all classes, so they are compared with those of class 0.
    assert np.allclose(biased * (W - W[0]), lda.coef_ - lda.coef_[0], rtol=1e-8)
    intercept = biased * (b - log_pi) + log_pi
    assert np.allclose(intercept - intercept[0], lda.intercept_ - lda.intercept_[0], rtol=1e-8)
    assert int(out.predict(-1e6 * DATA.x).max()) < 6  # a class nobody has is never predicted


def test_the_released_code_takes_the_total_covariance():  # D-75
    assert METHODS["fedcgs"].resolve("official")["cov"] == "total"
    out = go_all("fedcgs", "cov=total gamma_shrink=0.0", DATA, parts(1, 5))
    apart = MEANS - X.mean(0)
    W = np.linalg.solve(np.cov(X.T), apart.T)
    b = np.log(Y.mean(0)) - 0.5 * np.einsum("cd,dc->c", apart, W) - X.mean(0) @ W
    assert np.allclose(out.server["W"].numpy().T, W, rtol=1e-8)
    assert np.allclose(out.server["b"].numpy(), b, rtol=1e-8)


def test_a_covariance_needs_more_rows_than_means():
    data, clients = federation(sizes=(30,))
    # One row of each class.
    clients[0] = replace(clients[0], train=np.unique(data.y.numpy(), return_index=True)[1])
    training_error(lambda: go("fedcgs", {}, data, clients), "3 rows")


# fedcof


def by_hand(gamma, group):
    x = DATA.x[:, 0].numpy()
    y = DATA.y.numpy()
    pool = rows_trained(group)
    N = len(pool)
    mu = x[pool].mean(0)
    G = N * np.outer(mu, mu)
    S = np.zeros((6, x.shape[1]))
    for c in range(6):
        mine = [x[k.train[y[k.train] == c]] for k in group]
        mine = [m for m in mine if len(m)]
        if not mine:
            continue
        every = np.concatenate(mine)
        sigma = gamma * np.eye(x.shape[1])
        for m in mine if len(mine) > 1 else []:
            apart = m.mean(0) - every.mean(0)
            sigma += len(m) * np.outer(apart, apart) / (len(mine) - 1)
        G += (len(every) - 1) * sigma
        S[c] = every.sum(0)
    W = np.linalg.solve(G, S.T)
    return (W / np.linalg.norm(W, axis=0).clip(1e-300)).T, G / N


@pytest.mark.parametrize("group", [CLIENTS, CLIENTS[1:3], CLIENTS[1:2]], ids=["nine", "two", "one"])
def test_fedcof_is_its_formula(group):
    W, _ = by_hand(0.3, group)
    out = go_all("fedcof", "gamma=0.3", DATA, group)
    assert far(out.server["W"], W) < 1e-10
    owned = np.unique(DATA.y[rows_trained(group)])
    assert set(out.predict(-DATA.x).tolist()) <= set(owned.tolist())


def test_automatic_gamma_follows_the_variance_of_the_features():
    _, G = by_hand(0.0, CLIENTS)
    between = Y.mean(0) @ ((MEANS - X.mean(0)) ** 2).sum(1)
    variance = (np.trace(G) - (X.mean(0) ** 2).sum() + between) / 11
    auto, told = (go_all("fedcof", {"gamma": g}) for g in ("auto", 1e-2 * variance))
    assert gap(auto.server["W"], told.server["W"]) < 1e-10
    scaled = go_all("fedcof", {}, replace(DATA, x=1000.0 * DATA.x, text=None), CLIENTS)
    assert gap(auto.server["W"], scaled.server["W"]) < 1e-9


@pytest.mark.parametrize(
    ("names", "gamma"),
    rows_of(
        """
        mobilenetv2-birds                     | 0.1
        hf:google/MobileNet_v2_1.0_224        | 0.1
        mobilevit-s                           | 1.0
                                              | 1.0
        mobilenetv2-birds mobilenetv2-insects | 0.1
        mobilenetv2-birds glyph-clip          | 1.0
        """
    ),
)
def test_the_released_gamma_follows_the_backbone(names, gamma):  # D-86
    assert METHODS["fedcof"].resolve("official")["gamma_auto"] == "backbone"
    data = replace(DATA, backbones=tuple(names.split()))
    out = go_all("fedcof", "gamma_auto=backbone", data, CLIENTS)
    assert far(out.server["W"], by_hand(float(gamma), CLIENTS)[0]) < 1e-10
    assert out.records[-1].diagnostics["gamma"] == out.hp["gamma"] == float(gamma)


def test_the_number_of_clients_behind_each_class_is_logged():
    has = np.array([[(DATA.y[c.train] == k).any() for k in range(6)] for c in CLIENTS]).sum(0)
    out = go_all("fedcof")
    assert out.records[-1].diagnostics.pop("gamma") == float(out.server["gamma"]) > 0.0
    assert out.records[-1].diagnostics == {"owners_min": has.min(), "owners_mean": has.mean()}
    assert out.server["owners"].tolist() == has.tolist()
