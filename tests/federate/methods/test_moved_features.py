"""A constant that is added to all features changes no prediction of a closed form, however large it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from federation import Rows, federation, go

from fedcache.federate.methods import METHODS

MEANS = (10.0, 30.0, 100.0, 1000.0, 10_000.0)

INVARIANT = [
    ("fedncm", {"metric": "euclid"}),
    ("fedcgs", {}),
    ("fedcgs", {"cov": "total"}),
    ("fedcgs", {"gamma_shrink": 0.0}),
    ("fed3r", {"bias": True}),
    ("gh-ofl", {"head": "nb"}),
    ("gh-ofl", {"head": "nb", "variance": "pooled"}),
    ("gh-ofl", {"head": "lda"}),
    ("gh-ofl", {"head": "qda"}),
    ("fedpft", {"cov": "spherical"}),
    ("fedpft", {"cov": "diag"}),
    ("fedpft", {"cov": "full"}),
    ("fedpft", {"k_mix": 2}),
]

OTHERS = {
    "afl": "a ridge regression without an intercept",
    "fed3r-prior": "a ridge regression without an intercept, towards class texts",
    "fedcof": "a ridge regression without an intercept; it keeps its accuracy, see below",
    "gda": "logits are cosines with class texts",
    "tofa": "logits are cosines with class texts",
    "clip-zs": "logits are cosines with class texts",
    "tip-local": "a cache of cosines",
    "fed-tip-proto": "a cache of cosines",
    "central": "trained by gradient steps",
    "non-fl": "trained by gradient steps",
    "flesd-cc": "trained by gradient steps",
}
"""Methods of one round whose formulas depend on where the origin of the features is, and why."""


def moved(mean):
    """Four classes of standard deviation 1 in five clients, and their features at ``mean``.

    Features are multiples of 2^-10, so that float32 holds them exactly also after 10,000 is added.
    """
    g = np.random.default_rng(0)
    y = g.integers(0, 4, 900)
    x = (0.7 * g.standard_normal((4, 16)))[y] + g.standard_normal((900, 16))
    x = np.round(x * 1024) / 1024
    data, _ = federation(classes=4, width=16, dtype=torch.float32)
    features = torch.from_numpy(x + mean).float().unsqueeze(1)
    domain = torch.zeros(900, dtype=torch.int64)
    data = replace(data, x=features, y=torch.from_numpy(y), text=None, classes=4, domain=domain)
    return data, [Rows(f"client-{i}", np.arange(i, 500, 5), np.arange(500 + i, 900, 5)) for i in range(5)]


def scores(name, settings, mean):
    data, clients = moved(mean)
    out = go(name, settings, data, clients, rounds=1, participation=None, dtype=torch.float32)
    return out.deployed(None).scores(data.x[500:, 0]).double(), data.y[500:]


@pytest.mark.parametrize(("name", "settings"), INVARIANT, ids=str)
def test_a_constant_changes_no_prediction_beyond_rounding(name, settings):
    at_zero, y = scores(name, settings, 0.0)
    assert (at_zero.argmax(1) == y).double().mean() > 0.85
    first, second = at_zero.topk(2).values.T
    margin = first - second
    # FedPFT sends 16-bit means, which are rounded by 2^-11 of their size, and then trains.
    coarse = name == "fedpft"
    for mean in MEANS[:3] if coarse else MEANS:
        close_call = margin < (0.1 if coarse else 1e-5 * mean) * margin.median()
        assert close_call.double().mean() < 0.1
        same = scores(name, settings, mean)[0].argmax(1) == at_zero.argmax(1)
        assert bool((same | close_call).all()), f"{int((~same).sum())} predictions changed at a mean of {mean:g}"


def test_fedcof_keeps_its_accuracy():
    at_zero, y = scores("fedcof", {}, 0.0)
    right = (at_zero.argmax(1) == y).double().mean()
    for mean in MEANS:
        found = (scores("fedcof", {}, mean)[0].argmax(1) == y).double().mean()
        assert found > right - 0.02, mean


def test_every_method_of_one_round_is_in_the_law_or_says_why_it_is_not():
    one_shot = {name for name, method in METHODS.items() if method.one_shot}
    assert {name for name, _ in INVARIANT} | set(OTHERS) == one_shot
