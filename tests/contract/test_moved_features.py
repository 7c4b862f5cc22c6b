"""A constant that is added to all features changes no prediction of a closed form, however large it is."""

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from federation import Rows, federation, go_all
from methods_tried import tried
from refusal import training_error
from setting_lines import cases_of

from fedcache.federate.methods import METHODS

go = partial(go_all, rounds=1, dtype=torch.float32)

INVARIANT = cases_of(
    """
    fedncm metric=euclid
    fedcgs
    fedcgs cov=total
    fedcgs gamma_shrink=0.0
    fed3r bias=true
    fed3r bias=true class_weight=local
    gh-ofl head=nb
    gh-ofl head=nb variance=pooled
    gh-ofl head=lda
    gh-ofl head=qda
    fedpft cov=spherical
    fedpft cov=diag
    fedpft cov=full
    fedpft k_mix=2
    """
)

LISTED = {name for name, _ in INVARIANT}
INVARIANT += [
    (name, {})
    for name, method in METHODS.items()
    if method.one_shot and not method.depends_on_origin and name not in LISTED
]
INVARIANT = tried(INVARIANT)


def moved(mean, constants=()):
    """Four classes of standard deviation 1 in five clients, their features at ``mean``, and constant columns.

    Features are multiples of 2^-10, so that float32 holds them exactly also after 10,000 is added.
    """
    g = np.random.default_rng(0)
    y = g.integers(0, 4, 900)
    x = (0.7 * g.standard_normal((4, 16)))[y] + g.standard_normal((900, 16))
    x = np.round(x * 1024) / 1024
    data, _ = federation(classes=4, width=16 + len(constants), dtype=torch.float32)
    x = np.concatenate([x + mean, np.broadcast_to(constants, (900, len(constants)))], 1)
    features = torch.from_numpy(x).float().unsqueeze(1)
    domain = torch.zeros(900, dtype=torch.int64)
    data = replace(data, x=features, y=torch.from_numpy(y), text=None, classes=4, domain=domain)
    return data, [
        Rows(f"client-{i}", np.arange(i, 500, 5), np.arange(500 + i, 900, 5)) for i in range(5)
    ]


def scores(name, settings, mean, constants=()):
    data, clients = moved(mean, constants)
    out = go(name, settings, data, clients)
    return out.deployed(None).scores(data.x[500:, 0]).double(), data.y[500:]


def unchanged(scores, at_zero, bound, most):
    """Whether only predictions whose margin is below ``bound`` medians changed, and less than ``most`` are so close."""
    first, second = at_zero.topk(2).values.T
    margin = first - second
    close_call = margin < bound * margin.median()
    same = scores.argmax(1) == at_zero.argmax(1)
    return bool(close_call.double().mean() < most) and bool((same | close_call).all())


@pytest.mark.parametrize(("name", "settings"), INVARIANT, ids=str)
def test_a_constant_changes_no_prediction_beyond_rounding(name, settings):
    at_zero, y = scores(name, settings, 0.0)
    assert (at_zero.argmax(1) == y).double().mean() > 0.85
    # FedPFT sends 16-bit means, which are rounded by 2^-11 of their size, and then trains.
    coarse = name == "fedpft"
    for mean in (30.0, 100.0) if coarse else (30.0, 1000.0, 10_000.0):
        each_its_own = np.linspace(-mean, mean, 16).round()
        for shift in (mean, each_its_own):
            moved_scores, _ = scores(name, settings, shift)
            assert unchanged(moved_scores, at_zero, 0.1 if coarse else 1e-5 * mean, 0.1), mean


@pytest.mark.parametrize("value", [0.1, 1e6, 1e9])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        (name, settings)
        for name, settings in INVARIANT
        if name != "fedpft" and settings != {"gamma_shrink": 0.0}
    ],
    ids=str,
)
def test_columns_that_are_constant_change_no_prediction_beyond_rounding(name, settings, value):
    """FedPFT trains by gradient steps, whose initial weights depend on the number of columns."""
    without, _ = scores(name, settings, 0.0)
    beside, _ = scores(name, settings, 0.0, (value, value))
    assert unchanged(beside, without, 1e-4, 0.01)


def singular(mean, large):
    """The features at ``mean`` with one of them twice, and once more ``large`` times as large."""
    data, clients = moved(mean)
    x = data.x
    return replace(data, x=torch.cat([x, x[..., :1], large * x[..., 1:2]], -1)), clients


def accuracy(name, settings, data, clients):
    return go(name, settings, data, clients).accuracy


@pytest.mark.parametrize(("large", "mean"), [(1.0, 0.0), (1e7, 0.0), (1e3, 1000.0)])
@pytest.mark.parametrize(
    ("name", "settings", "key"),
    [
        ("fedcgs", {}, "gamma_shrink"),
        ("fedcgs", {"cov": "total"}, "gamma_shrink"),
        ("fed3r", {"bias": True}, "lam"),
        ("fed3r", {}, "lam"),
    ],
)
def test_the_advice_of_a_singular_system_keeps_the_accuracy(name, settings, key, large, mean):
    usual = accuracy(name, settings, *moved(mean))
    data, clients = singular(mean, large)
    error = training_error(lambda: accuracy(name, {**settings, key: 0.0}, data, clients))
    advice = advice_in(error.hint)
    assert advice
    data = followed(advice, data, clients)
    value = float(advice.get(key, 0.01))
    assert accuracy(name, {**settings, key: value}, data, clients) > usual - 0.05


def standardized(data, clients):
    """The data with zero mean and unit variance over the training rows."""
    x = data.x.double()
    rows = torch.from_numpy(np.concatenate([c.train for c in clients]))
    return replace(data, x=((x - x[rows].mean(0)) / x[rows].std(0)).float())


def advice_in(text):
    return dict(word.rstrip(",").split("=") for word in re.findall(r"--set (\S+)", text))


def followed(advice, data, clients):
    """The data standardised where the advice is to do so, which is taken out of it."""
    wanted = advice.pop("feat_post", "none") == "standardize"
    return standardized(data, clients) if wanted else data


def scaled(factor, mean):
    data, clients = moved(0.0)
    return replace(data, x=data.x * factor + mean), clients


@pytest.mark.parametrize(
    ("factor", "mean", "number", "settings"),
    [
        (2.0**20, 0.0, "65504", {"cov": "diag", "k_mix": 2}),
        (2.0**-50, 0.0, "6e-08", {"cov": "full"}),
        (2.0**-8, 100.0, "0.0625", {"cov": "spherical"}),
    ],
)
def test_features_that_16_bits_do_not_hold_end_fedpft_with_advice_that_works(
    factor, mean, number, settings
):
    data, clients = scaled(factor, mean)
    settings = {**settings, "reg_covar": 1e-6 * factor**2}
    training_error(
        lambda: accuracy("fedpft", settings, data, clients), number, "--set feat_post=standardize"
    )
    data = standardized(data, clients)
    assert accuracy("fedpft", {**settings, "reg_covar": 1e-6}, data, clients) > 0.8


RIDGES = [
    ("fed3r", {"bias": True}, "lam"),
    ("fed3r", {}, "lam"),
    ("gh-ofl", {"head": "nb"}, "feat_post"),
    ("gh-ofl", {"head": "nb", "variance": "pooled"}, "feat_post"),
    ("gh-ofl", {"head": "lda"}, "feat_post"),
    ("gh-ofl", {"head": "qda"}, "feat_post"),
    ("fedpft", {}, "feat_post"),
]
"""Methods that add a number of its own to variances or to squared features, and the switch that a warning names."""


def advice_of(out):
    return advice_in(" ".join(out.warnings))


@pytest.mark.parametrize(("name", "settings", "key"), RIDGES, ids=str)
def test_a_ridge_that_is_larger_than_the_variances_is_warned_of_with_advice_that_works(
    name, settings, key
):
    usual = accuracy(name, settings, *moved(0.0))
    data, clients = scaled(2.0**-20, 0.0)
    advice = advice_of(go(name, settings, data, clients))
    assert set(advice) == {key}
    data = followed(advice, data, clients)
    advice = {name: float(value) for name, value in advice.items()}
    assert accuracy(name, settings | advice, data, clients) > usual - 0.05


@pytest.mark.parametrize(("name", "settings", "key"), RIDGES, ids=str)
def test_a_ridge_that_is_small_beside_the_variances_is_not_warned_of(name, settings, key):
    for mean in (0.0, 1000.0):
        assert key not in advice_of(go(name, settings, *moved(mean)))


def test_fedcof_keeps_its_accuracy_although_its_predictions_change():
    at_zero, y = (part.numpy() for part in scores("fedcof", {}, 0.0))
    first = at_zero.argmax(1)
    for mean in (10.0, 30.0, 100.0, 1000.0, 10_000.0):
        found = scores("fedcof", {}, mean)[0].argmax(1).numpy()
        assert (found == y).mean() > (first == y).mean() - 0.02, mean
        assert (found != first).mean() > 0.1, mean
