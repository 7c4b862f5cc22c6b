"""One-shot closed forms: systems without an answer, and personal models of fed3r."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from federation import Rows, go
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import Ridge
from test_engine_traffic import paper, wide
from test_methods_closed import CLIENTS, DATA, POOL, TEST, X, Y, parts
from test_methods_grid import lanes

from fedcache.errors import Exit, FedcacheError
from fedcache.federate.clients import lane_data
from fedcache.federate.methods import METHODS
from fedcache.federate.methods.fed3r import lift
from fedcache.heads.ridge import solve

EVERYONE = {"participation": None}


# Systems without an answer


@pytest.mark.parametrize("seed", range(8))
def test_a_system_with_fewer_rows_than_features_is_refused_even_where_cholesky_succeeds(seed):
    z = torch.randn(39, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    with pytest.raises(FedcacheError, match="lam=0 is not positive definite") as info:
        solve(z.T @ z, torch.ones(40, 1, dtype=torch.float64), 0.0)
    assert info.value.code == Exit.FEDERATED
    works = float(info.value.hint.split("=")[-1])
    solve(z.T @ z, torch.ones(40, 1, dtype=torch.float64), works)


def test_features_of_very_different_scale_are_no_reason_to_refuse():
    g = np.random.default_rng(0)
    z, scale, B = g.standard_normal((60, 5)), np.array([1e-6, 1e-3, 1.0, 1e3, 1e6])[:, None], g.standard_normal((5, 2))
    A = scale * (z.T @ z) * scale.T
    W = solve(torch.from_numpy(A), torch.from_numpy(B * scale), 0.0).numpy()
    assert np.allclose(W * scale, np.linalg.solve(z.T @ z, B), rtol=1e-9)


@pytest.mark.parametrize(
    ("name", "settings", "key"),
    [("fed3r", {"lam": 0.0}, "lam"), ("fed3r", {"lam": 0.0, "omega": 1.0}, "lam")],
)  # fmt: skip
def test_a_singular_system_names_the_switch_and_a_value_that_works(name, settings, key):
    twice = replace(DATA, x=torch.cat([DATA.x, DATA.x], -1), text=torch.cat([DATA.text, DATA.text], -1))
    with pytest.raises(FedcacheError, match=f"{key}=0 is not positive definite") as info:
        go(name, settings, twice, CLIENTS, **EVERYONE)
    assert info.value.code == Exit.FEDERATED
    word = info.value.hint.split("--set ")[1].split("=")
    assert word[0] == key
    assert np.isfinite(go(name, {**settings, key: float(word[1])}, twice, CLIENTS, **EVERYONE).accuracy)


# fed3r: personal models and random features


@pytest.mark.parametrize("bias", [False, True])
def test_a_personal_ridge_counts_the_clients_own_rows_more_often(bias):
    # (A + omega A_i + lam I)^-1 (B + omega B_i) is the ridge in which a row of client i weighs 1 + omega.
    group = parts(2, 4)
    out = go("fed3r", {"omega": 2.5, "lam": 0.5, "bias": bias}, DATA, group, **EVERYONE)
    assert out.protocol == "personalised"
    guesses = []
    for client in group:
        weight = np.where(np.isin(POOL, client.train), 3.5, 1.0)
        ridge = Ridge(alpha=0.5, fit_intercept=bias).fit(X, Y, sample_weight=weight)
        guesses.append(ridge.predict(DATA.x[TEST, 0].numpy()).argmax(1))
    assert np.array_equal(out.evaluation.predictions, np.concatenate(guesses))
    assert len({g.tobytes() for g in guesses}) > 1


def test_without_extra_weight_there_is_one_model():
    out = go("fed3r", {"omega": 0.0}, DATA, CLIENTS)
    assert out.protocol == "global"
    assert set(out.server) == {"W", "b"}
    nearly = go("fed3r", {"omega": 1e-9}, DATA, CLIENTS)
    for c, mine in zip(CLIENTS, np.split(nearly.evaluation.predictions, 9), strict=True):
        assert np.array_equal(mine, out.predict(DATA.x[c.test]).numpy())


def test_a_huge_weight_leaves_the_clients_own_least_squares():
    big = CLIENTS[1]  # 64 rows of 11 features
    x, y = DATA.x[big.train, 0].numpy(), np.eye(6)[DATA.y[big.train].numpy()]
    everything = Rows("big", big.train, np.arange(len(DATA.y)))
    out = go("fed3r", {"omega": 1e12}, DATA, [everything, *CLIENTS[2:5]], **EVERYONE)
    u = DATA.x[:, 0].numpy() @ np.linalg.lstsq(x, y, rcond=None)[0]
    clear = u.max(1) > 1e-6  # classes it has no row of score 0
    assert clear.mean() > 0.5
    assert np.array_equal(out.evaluation.predictions[: len(DATA.y)][clear], u.argmax(1)[clear])


@pytest.mark.parametrize("bias", [False, True])
def test_personal_models_of_several_clients_at_once_are_each_ones_own(bias):
    group = [CLIENTS[i] for i in (1, 5, 3)]  # 64, 50 and 33 rows: two are padded
    options = {"omega": 2.0, "bias": bias}
    predict, sums = METHODS["fed3r"].predict, go("fed3r", options, DATA, CLIENTS, **EVERYONE).server
    down = {k: t[None] for k, t in sums.items()}
    ctx = lanes("fed3r", options, lead=(3,), who=[c.name for c in group])
    x = DATA.x[:7, 0]
    together = predict(down, {}, lane_data(DATA.x, DATA.y, [c.train for c in group], 1), x.expand(3, 7, 11), ctx)
    for client, u in zip(group, together, strict=True):
        alone = predict(sums, {}, lane_data(DATA.x, DATA.y, [client.train], 0), x, lanes("fed3r", options))
        assert torch.allclose(u, alone, atol=1e-12)


@given(st.integers(0, 99), st.integers(1, 20))
@settings(max_examples=5, deadline=None)
def test_random_features_are_one_draw_for_all_clients(seed, m):
    out = go("fed3r", {"rff_dim": 30, "lam": 0.1}, DATA, parts(seed, m), seed=seed, **EVERYONE)
    ctx = lanes("fed3r", {"rff_dim": 30})
    phi = lift(DATA.x[POOL, 0], replace(ctx, rng=replace(ctx.rng, seed=seed))).numpy()
    W = np.linalg.solve(phi.T @ phi + 0.1 * np.eye(30), phi.T @ Y)
    assert np.abs(out.server["W"].numpy() - W.T).max() < 1e-9 * np.abs(W).max()
    other = lift(DATA.x[POOL, 0], replace(ctx, rng=replace(ctx.rng, seed=seed + 1))).numpy()
    assert np.abs(phi - other).max() > 0.1


# Traffic


def test_personal_models_receive_the_sums():
    assert paper("fed3r", 512, {"omega": 1.0}) == (136_448, 136_448)
    assert paper("fed3r", 512, {"rff_dim": 1000}) == (510_500, 10_010)
    out = go("fed3r", {"omega": 1.0}, *wide(512, rows=60), rounds=1, participation=None, dtype=torch.float32)
    assert out.traffic.up == out.traffic.down == [136_448] * 5
