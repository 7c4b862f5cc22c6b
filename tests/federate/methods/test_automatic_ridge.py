"""Ridges that choose themselves: generalised cross-validation by hand, and what it must not depend on."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from federation import Rows, go_all
from float64 import normal
from hypothesis import strategies as st
from pooled_rows import DATA, MEANS, POOL, X, Y, any_partition, parts
from refusal import training_error
from sklearn.datasets import load_digits
from sklearn.linear_model import Ridge
from torch.nn.functional import normalize

from fedcache.federate.engine.client_data import Data
from fedcache.federate.methods import METHODS
from fedcache.heads.ridge import MOST_FREE, RIDGES, best_ridge, spectrum

AUTO = {"lam": "auto"}
LDA = {"head": "lda", "shrink": "auto"}
SEVEN = (DATA, parts(0, 7))
"""The rows of the federation, and seven clients that hold them."""


def by_hand(rows, targets, *, centred=False):
    """The ridge with the lowest n RSS / (n - df)^2 of ridge regressions that are solved one by one."""
    count = len(rows)
    if centred:
        rows = rows - rows.mean(0)
        targets = targets - targets.mean(0)
        count -= 1
    values = np.linalg.eigvalsh(rows.T @ rows)
    mean = (values.sum() - values.max()) / len(values)
    scores = {}
    for ridge in mean * RIDGES:
        hat = rows @ np.linalg.solve(rows.T @ rows + ridge * np.eye(rows.shape[1]), rows.T)
        free = np.trace(hat)
        if free <= MOST_FREE * count:
            scores[ridge] = ((targets - hat @ targets) ** 2).sum() / (count - free) ** 2
    return min(scores, key=scores.get)


def takes(key, expected, name, chosen, *pair):
    """Check the number that a run chooses; returns this run and one that is given the number."""
    out = go_all(name, chosen, *pair)
    assert float(out.server[key]) == pytest.approx(expected, rel=1e-9)
    assert out.records[-1].diagnostics[key] == float(out.server[key])
    return out, go_all(name, {**chosen, key: expected}, *pair)


def same_heads(one, other, names="Wb"):
    """Both runs end with these tensors and send as many bytes."""
    for name in names:
        assert torch.allclose(one.server[name], other.server[name], rtol=1e-9, atol=1e-9)
    assert one.traffic.totals() == other.traffic.totals()


@any_partition(8, 40)
def test_auto_is_cross_validation_by_hand_for_every_partition(seed, m):
    out, given_lam = takes("lam", by_hand(X, Y), "fed3r", AUTO, DATA, parts(seed, m))
    assert torch.allclose(out.server["W"], given_lam.server["W"], rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("bias", [False, True])
def test_the_ridge_of_left_out_clients_is_that_of_models_fitted_without_them(bias):
    clients = parts(0, 4)
    by = {**AUTO, "lam_by": "clients", "bias": bias}
    out = go_all("fed3r", by, DATA, clients)
    values = np.linalg.eigvalsh(X.T @ X - bias * len(X) * np.outer(X.mean(0), X.mean(0)))
    errors = {}
    for ridge in (values.sum() - values.max()) / len(values) * RIDGES:
        without = Ridge(alpha=ridge, fit_intercept=bias)
        errors[ridge] = 0.0
        for client in clients:
            own = np.isin(POOL, client.train)
            guess = without.fit(X[~own], Y[~own]).predict(X[own])
            errors[ridge] += ((guess - Y[own]) ** 2).sum()
    assert float(out.server["lam"]) == pytest.approx(min(errors, key=errors.get), rel=1e-9)
    training_error(lambda: go_all("fed3r", by, DATA, clients[:1]), "lam_by=rows")


def test_around_the_mean_auto_is_that_of_centred_rows():
    out = go_all("fed3r", {**AUTO, "bias": True}, *SEVEN)
    assert float(out.server["lam"]) == pytest.approx(by_hand(X, Y, centred=True), rel=1e-9)


def test_with_a_personal_part_every_client_takes_the_ridge_of_all_rows():
    one = go_all("fed3r", AUTO, *SEVEN)
    own = go_all("fed3r", {**AUTO, "omega": 2.0}, *SEVEN)
    assert float(own.server["lam"]) == pytest.approx(float(one.server["lam"]), rel=1e-12)
    assert set(own.server) >= {"gram", "class_sum", "target_sum"}


@pytest.mark.parametrize(("cov", "means"), [("within", 6), ("total", 1)])
@any_partition(4, 40)
def test_discriminants_shrink_as_the_regression_on_the_classes_does(cov, means, seed, m):
    expected = by_hand(X, Y, centred=True) / (len(X) - means)
    pair = DATA, parts(seed, m)
    out, given_gamma = takes("gamma_shrink", expected, "fedcgs", {"cov": cov}, *pair)
    same_heads(out, given_gamma)


def test_lda_of_gh_ofl_shrinks_as_fedcgs_does():
    out = go_all("gh-ofl", LDA, *SEVEN)
    gamma = float(go_all("fedcgs", {}, DATA, parts(1, 3)).server["gamma_shrink"])
    usual = ((X - Y @ MEANS) ** 2).sum() / (len(X) - 6) / X.shape[1]
    shrink = gamma / (gamma + usual)
    assert out.records[-1].diagnostics["shrink"] == pytest.approx(shrink, rel=1e-9)
    given_shrink = go_all("gh-ofl", {**LDA, "shrink": shrink}, *SEVEN)
    same_heads(out, given_shrink)


@pytest.mark.parametrize("head", ["nb", "qda"])
def test_other_heads_of_gh_ofl_keep_the_released_part(head):
    out = go_all("gh-ofl", {**LDA, "head": head}, *SEVEN)
    assert out.hp["shrink"] == 0.05
    assert "shrink" not in out.records[-1].diagnostics


UNIT = replace(DATA, x=normalize(DATA.x, dim=-1))
UNIT_X = UNIT.x[POOL, 0].numpy()


@any_partition(8, 40, kappa=st.sampled_from([0.5, 1.0]))
def test_around_class_texts_auto_is_that_of_what_the_texts_leave(seed, m, kappa):
    chosen = {**AUTO, "kappa": kappa}
    expected = by_hand(UNIT_X, kappa * Y - UNIT_X @ UNIT.text.numpy().T)
    out, given_lam = takes("lam", expected, "fed3r-prior", chosen, UNIT, parts(seed, m))
    same_heads(out, given_lam, "W")


def test_rows_that_are_not_unit_keep_the_constant():
    out = go_all("fed3r-prior", {**AUTO, "feat_post": "none"}, *SEVEN)
    assert out.hp["lam"] == 1.0
    assert "lam" not in out.records[-1].diagnostics


def wide_digits():
    """400 features of 1,797 images, more than rows in most tests, and labels; an order of the images."""
    x, y = load_digits(return_X_y=True)
    draw = np.random.default_rng(0)
    x = np.maximum(0, x / 16 @ draw.normal(size=(64, 400)))
    return x, y, draw.permutation(len(x))


@pytest.mark.parametrize("rows", [200, 600, 1200])
@pytest.mark.parametrize(
    ("name", "chosen"),
    [("fed3r", AUTO), ("fed3r-prior", AUTO), ("fedcgs", {}), ("gh-ofl", LDA)],
)
def test_copies_of_two_percent_of_the_rows_move_the_accuracy_by_at_most_a_point(name, chosen, rows):
    x, y, order = wide_digits()
    z = normalize(torch.from_numpy(x)[:, None], dim=-1)
    test = order[1200:]
    # Texts that know something: class means of rows that nobody trains on.
    held = [test[y[test] == c][:20] for c in range(10)]
    text = normalize(torch.stack([z[rows, 0].mean(0) for rows in held]), dim=-1)
    data = Data(x=z, y=torch.from_numpy(y), classes=10, text=text)

    def accuracy(train):
        return float(go_all(name, chosen, data, [Rows("all", train, test)]).accuracy)

    copies = np.concatenate([order[:rows], order[: rows // 50]])
    assert abs(accuracy(copies) - accuracy(order[:rows])) <= 0.01


def test_no_more_than_half_of_the_rows_are_degrees_of_freedom():
    z = normal(30, 60)
    targets = z[:, :3]  # which the rows predict exactly, so that the smallest ridge looks best
    known = spectrum(z.mT @ z, z.mT @ targets)
    choice = best_ridge(known, float(targets.square().sum()), 30.0)
    free = float((known["values"] / (known["values"] + choice.ridge)).sum())
    assert choice.limited
    assert free <= 15.0 < free * 10 ** (1 / 8)


@pytest.mark.parametrize(
    ("name", "key", "constant"),
    [("fed3r", "lam", 0.01), ("fed3r-prior", "lam", 1.0), ("gh-ofl", "shrink", 0.05)],
)
def test_the_default_is_auto_and_the_papers_preset_its_own(name, key, constant):
    method = METHODS[name]
    assert method.resolve()[key] is None
    assert method.resolve("paper")[key] == method.resolve("official")[key] == constant
    assert method.usual == (key,)
    assert METHODS["fedavg"].usual == ()
    assert METHODS["fedavg"].resolve() == METHODS["fedavg"].resolve("paper")


def test_weighted_rows_have_the_papers_ridge():
    out = go_all("fed3r", {**AUTO, "class_weight": "local"}, *SEVEN)
    assert out.hp["lam"] == float(out.server["lam"]) == 0.01


def test_a_ridge_below_all_eigenvalues_of_few_rows_is_warned_of():
    width = X.shape[1]
    (client,) = parts(0, 1)
    some = replace(client, train=client.train[: 2 * width])
    many = replace(client, train=client.train[: 3 * width])
    for chosen, group, warned in (
        ({"lam": 1e-9}, some, True),
        ({"lam": 1e-9}, many, False),
        (AUTO, some, False),
    ):
        out = go_all("fed3r", chosen, DATA, [group])
        assert any("lam=auto" in line for line in out.warnings) == warned
