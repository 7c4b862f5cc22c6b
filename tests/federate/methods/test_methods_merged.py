"""afl: the clients' ridge solutions merged pairwise, against the released steps and the least squares of all rows."""

from dataclasses import replace

import numpy as np
import pytest
from federation import gap, go_all
from float64 import doubles, far
from pooled_rows import CLIENTS, DATA, X, Y, any_partition, parts
from refusal import training_error

from fedcache.federate.methods.afl import merge, remove_ridge


def released(group, gamma, clean):
    """W [D, C] by the released steps: inverses, the law as it is printed, one client after another."""
    eye = np.eye(X.shape[1])
    each = []
    for client in group:
        x = DATA.x[client.train, 0].numpy()
        y = np.eye(6)[DATA.y[client.train].numpy()]
        R = np.linalg.inv(x.T @ x + gamma * eye)
        each.append((R @ x.T @ y, R, np.linalg.inv(R)))
    Wt, Rt, Ct = each[0]
    for Wk, Rk, Ck in each[1:]:
        both = np.linalg.inv(Ct + Ck)
        Wt = (eye - Rt @ Ck + Rt @ Ck @ both @ Ck) @ Wt + (eye - Rk @ Ct + Rk @ Ct @ both @ Ct) @ Wk
        Ct = Ct + Ck
        Rt = np.linalg.inv(Ct)
    ridge = len(group) * gamma
    return Wt + ridge * np.linalg.inv(Ct - ridge * eye) @ Wt if clean else Wt


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize(
    "group", [CLIENTS, CLIENTS[1:4], CLIENTS[1:2]], ids=["nine", "three", "one"]
)
def test_merging_is_the_released_code(group, clean):
    out = go_all("afl", {"gamma": 0.7, "clean": clean}, DATA, group)
    assert far(out.server["W"], released(group, 0.7, clean).T) < 1e-10
    assert out.records[-1].diagnostics == {"cleaned": float(clean)}


@any_partition(8, 20)
def test_it_is_the_least_squares_of_all_rows_for_every_partition(seed, m):
    out = go_all("afl", {}, DATA, parts(seed, m))
    assert far(out.server["W"], np.linalg.lstsq(X, Y, rcond=None)[0].T) < 1e-10
    assert gap(out.server["W"], go_all("fed3r", "lam=0.0").server["W"]) < 1e-10


def test_hand_worked_merging():
    # One feature: rows 1, 1 of y = 2 and one row 2 of y = 1; gamma 1. C = 3 and 5, W = 4/3 and 2/5.
    # Together (X'Y) / (X'X + 2) = 6 / 8, and without the ridges 6 / 6.
    W, C = merge(*doubles([4 / 3, 3.0, 2 / 5, 5.0]).view(4, 1, 1))
    assert abs(float(W) - 0.75) < 1e-14
    assert float(C) == 8.0
    assert abs(float(remove_ridge(W, C, 2.0)) - 1.0) < 1e-14


def test_where_features_repeat_the_ridge_stays():
    twice = replace(DATA, x=DATA.x.repeat(1, 1, 2), text=None)
    out = go_all("afl", "gamma=0.4", twice, CLIENTS)
    assert out.records[-1].diagnostics == {"cleaned": 0.0}
    assert gap(out.server["W"], go_all("fed3r", "lam=3.6", twice, CLIENTS).server["W"]) < 1e-9
    training_error(lambda: go_all("afl", "gamma=0.0", twice, CLIENTS), "gamma=0", "--set gamma=")
