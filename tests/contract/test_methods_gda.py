"""gda: Gaussian discriminants beside zero-shot logits, against the released steps written in numpy."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from federation import Rows, gap, go_all
from pooled_rows import CLIENTS, DATA, POOL, TEST, X, Y, parts

from fedcache.federate.methods import METHODS

TEXT = DATA.text.numpy()


def released(x, y, classes):
    """W [C, D] and b [C] as the released code has them: centred rows, their covariance, a pseudo-inverse."""
    mu = np.stack([x[y == c].mean(0) for c in range(classes)])
    centred = np.concatenate([x[y == c] - mu[c] for c in range(classes)])
    cov = np.cov(centred.T)
    n, D = centred.shape
    precision = D * np.linalg.pinv((n - 1) * cov + np.trace(cov) * np.eye(D))
    return mu @ precision, np.log(1.0 / classes) - np.einsum("nd,dc,nc->n", mu, precision, mu) / 2


def check(out, W, b, close=1e-10):
    """The server has the weights and the bias, up to rounding."""
    for name, want in (("W", W), ("b", b)):
        assert np.abs(out.server[name].numpy() - want).max() < close * np.abs(want).max()


@pytest.mark.parametrize(
    "group", [CLIENTS, parts(0, 1), parts(3, 17)], ids=["nine", "one", "seventeen"]
)
def test_it_is_the_released_code_for_every_partition(group):
    W, b = released(X, Y.argmax(1), 6)
    out = go_all("gda", "alpha=0.3", DATA, group)
    check(out, 100.0 * TEXT + 0.3 * W, 0.3 * b)
    x = DATA.x[:, 0].numpy()
    logits = 100.0 * x @ TEXT.T + 0.3 * (x @ W.T + b)
    assert np.array_equal(out.predict(DATA.x).numpy(), logits.argmax(1))


def test_augmentations_give_what_the_released_code_makes_of_them():
    draws = torch.from_numpy(
        np.random.default_rng(0).normal(0, 0.2, (len(DATA.x), 3, DATA.x.shape[2]))
    )
    views = torch.cat([DATA.x, DATA.x + draws], 1)
    data = replace(DATA, x=views / views.norm(dim=-1, keepdim=True))
    x = np.concatenate([data.x[POOL, view].numpy() for view in (1, 2, 3)])
    W, b = released(x, np.tile(data.y[POOL].numpy(), 3), 6)
    out = go_all("gda", "alpha=0.3 proto_view=aug", data, CLIENTS)
    check(out, 100.0 * TEXT + 0.3 * W, 0.3 * b)
    hp = METHODS["gda"].resolve("paper", {"proto_view": "aug"})
    assert METHODS["gda"].faithful(hp, 4) == "cached_views"


def test_fewer_rows_than_features_are_enough():
    few = [
        Rows("few", np.concatenate([POOL[Y[:, c] == 1][:2] for c in range(6)])[:10], TEST)
    ]  # 10 rows, 11 features
    x = DATA.x[few[0].train, 0].numpy()
    y = DATA.y[few[0].train].numpy()
    data = replace(DATA, classes=5, text=DATA.text[:5], y=DATA.y.clamp(max=4))
    W, b = released(x, y, 5)
    out = go_all("gda", "alpha=2.0 scale=7.0", data, few)
    check(out, 7.0 * TEXT[:5] + 2.0 * W, 2.0 * b, 1e-9)


def test_with_one_row_a_class_the_precision_is_zero():
    one = [Rows("one", np.array([POOL[Y[:, c] == 1][0] for c in range(6)]), TEST)]
    out = go_all("gda", "alpha=3.0", DATA, one)
    assert gap(out.server["W"], 100.0 * DATA.text) < 1e-9
    assert np.allclose(out.server["b"].numpy(), -3.0 * np.log(6.0))
