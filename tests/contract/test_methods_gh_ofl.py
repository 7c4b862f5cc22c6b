"""gh-ofl: Gaussian heads from summed statistics, against scikit-learn and the released formulas in numpy."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from federation import Rows, federation, go_all
from method_calls import paper
from pooled_rows import CLIENTS, DATA, POOL, TEST, X, Y, parts
from refusal import training_error
from sklearn.naive_bayes import GaussianNB

LABEL = Y.argmax(1)
POINTS = DATA.x[:, 0].numpy()


def scores(out):
    return out.deployed(None).scores(DATA.x[:, 0]).numpy()


def released(x, y, head, shrink=0.05, pooled=False):
    """Scores of all rows of the federation by the released formulas, from the pooled rows x, y."""
    C = int(y.max()) + 1
    D = x.shape[1]
    mu = np.stack([x[y == c].mean(0) for c in range(C)])
    log_prior = np.log(np.bincount(y) / len(y))
    pool = (x.T @ x - sum((y == c).sum() * np.outer(mu[c], mu[c]) for c in range(C))) / (len(y) - C)

    def shrunk(S):
        return (1 - shrink) * S + shrink * np.trace(S) / D * np.eye(D) + 1e-6 * np.eye(D)

    made = np.empty((len(POINTS), C))
    for c in range(C):
        mine = x[y == c]
        apart = POINTS - mu[c]
        if head == "nb":
            var = np.diag(pool) if pooled else (mine**2).mean(0) - mu[c] ** 2
            S = np.diag(np.maximum(var, 1e-6))
        elif head == "lda":
            S = shrunk(pool)
        else:
            S = shrunk(np.cov(mine.T) if len(mine) > 1 else pool)
        quad = np.einsum("nd,de,ne->n", apart, np.linalg.inv(S), apart)
        made[:, c] = log_prior[c] - quad / 2 - np.linalg.slogdet(S)[1] / 2
    return made


def check(out, want):
    """The scores agree, up to rounding and to what all classes share, which says nothing."""
    got, want = (s - s.mean(1, keepdims=True) for s in (scores(out), want))
    assert np.abs(got - want).max() < 1e-9 * np.abs(want).max()


HEADS = [
    {"head": "nb"},
    {"head": "nb", "variance": "pooled"},
    {"head": "lda"},
    {"head": "qda"},
    {"head": "qda", "shrink": 0.5},
]


@pytest.mark.parametrize("settings", HEADS, ids=lambda s: "-".join(map(str, s.values())))
@pytest.mark.parametrize("group", [CLIENTS, parts(2, 13)], ids=["nine", "thirteen"])
def test_scores_are_the_released_ones_for_every_partition(settings, group):
    out = go_all("gh-ofl", settings, DATA, group)
    want = released(
        X,
        LABEL,
        settings["head"],
        settings.get("shrink", 0.05),
        settings.get("variance") == "pooled",
    )
    check(out, want)
    assert np.array_equal(out.predict(DATA.x).numpy(), want.argmax(1))


def test_naive_bayes_is_scikit_learns():
    out = go_all("gh-ofl", "head=nb", DATA, CLIENTS)
    wanted = GaussianNB(var_smoothing=0.0).fit(X, LABEL).predict_log_proba(POINTS)
    found = torch.from_numpy(scores(out)).log_softmax(-1).numpy()
    assert np.abs(found - wanted).max() < 1e-8 * np.abs(wanted).max()


def test_a_class_of_one_row_has_the_pooled_covariance():
    rows = np.concatenate([POOL[c == LABEL][: 1 if c == 2 else 20] for c in range(6)])
    out = go_all("gh-ofl", "head=qda", DATA, [Rows("all", rows, TEST)])
    check(out, released(DATA.x[rows, 0].numpy(), DATA.y[rows].numpy(), "qda"))


def test_a_pooled_covariance_needs_more_rows_than_classes():
    data, clients = federation(sizes=(30,))
    # One row of each class.
    clients[0] = replace(clients[0], train=np.unique(data.y.numpy(), return_index=True)[1])
    for settings in HEADS[1:4]:
        training_error(partial(go_all, "gh-ofl", settings, data, clients), "3 rows")


def test_each_head_sends_what_it_needs():
    T = 11 * 12 // 2
    sizes = {
        "nb-class": (6 + 66 + 66, 66 + 66 + 6),
        "nb-pooled": (6 + 66 + 11, 66 + 11 + 6),
        "lda-class": (6 + 66 + T, 66 + 6),
        "qda-class": (6 + 66 + 6 * T, 66 + 6 * T + 6),
    }
    for name, (up, down) in sizes.items():
        head, variance = name.split("-")
        hp = {"head": head, "variance": variance}
        traffic = go_all("gh-ofl", hp, DATA, CLIENTS).traffic
        assert traffic.up.tolist() == [up] * 9
        assert traffic.down.tolist() == [down] * 9
        assert paper("gh-ofl", 11, hp, classes=6) == (up - 6, down)
