"""tofa: personal discriminants from weighed sums, texts weighed by all clients, both fused by confidence."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from federation import Rows, federation, fitted, gap, go_all, rows_trained
from float64 import doubles, eye, far, normal, ones, zeros
from method_calls import lanes, rows_of_one
from torch.nn.functional import normalize

from fedcache.federate.engine.client_data import stack_clients
from fedcache.federate.methods import METHODS, fedcgs, tofa
from fedcache.heads.losses import MASKED
from fedcache.testing.towers import TinyTowers

DATA, CLIENTS = federation()
C = 6
D = 11


def sums_of(rows, settings=None):
    """What a client of these rows adds to the sums, and its context."""
    ctx = lanes("tofa", settings or {})
    return fedcgs.fit({}, {}, stack_clients(DATA.x, DATA.y, [np.asarray(rows)], 0), ctx)[1], ctx


def discriminants(x, y, weight, prior):
    """(W, b) of weighed rows, from the formula, in numpy."""
    n = weight.sum()
    count = np.array([weight[y == c].sum() for c in range(C)])
    mean = np.stack([weight[y == c] @ x[y == c] / max(count[c], 1e-300) for c in range(C)])
    apart = x - mean[y]
    scatter = (apart * weight[:, None]).T @ apart
    P = n * np.linalg.inv(scatter + np.trace(scatter) / n * np.eye(x.shape[1]))
    with np.errstate(divide="ignore"):
        b = -0.5 * np.einsum("cd,de,ce->c", mean, P, mean) + (
            np.log(count / n) if prior == "counts" else 0.0
        )
    return mean @ P, np.where(count > 0, b, MASKED)


def rows_of(*clients):
    index = rows_trained(clients)
    return DATA.x[index, 0].numpy(), DATA.y[index].numpy()


@pytest.mark.parametrize("prior", ["counts", "equal"])
def test_the_posterior_is_that_of_all_rows_weighed_beside_the_own(prior):
    everybody, ctx = sums_of(
        np.concatenate([c.train for c in CLIENTS]), {"power": 0.3, "prior": prior}
    )
    own, _ = sums_of(CLIENTS[1].train)
    made = tofa.posterior(everybody, own, ctx)
    (x, y), (xi, yi) = rows_of(*CLIENTS), rows_of(CLIENTS[1])
    weight = np.r_[np.full(len(x), 0.3), np.ones(len(xi))]
    W, b = discriminants(np.r_[x, xi], np.r_[y, yi], weight, prior)
    assert far(made["W"], W) < 1e-9 * np.abs(W).max()
    assert far(made["b"], b) < 1e-9 * np.abs(b).max()


def test_one_row_a_class_is_the_nearest_mean():
    # The scatter is 0: P is a number times I, and every row is nearest to itself.
    first = np.unique(DATA.y.numpy(), return_index=True)[1]
    sums, ctx = sums_of(first)
    p = tofa.posterior(sums, None, ctx)
    assert all(torch.isfinite(t).all() for t in p.values())
    assert (DATA.x[first, 0] @ p["W"].T + p["b"]).argmax(-1).tolist() == DATA.y[first].tolist()


def test_a_texts_confidence_is_its_softmax_among_the_other_classes_own_texts():
    z, texts = (normalize(normal(*shape), dim=-1) for shape in ((5, 4), (3, 6, 4)))
    p = tofa.confidence(z, texts, 20.0)
    for m in range(3):
        for c in range(6):
            T = texts[0].clone()
            T[c] = texts[m, c]
            assert gap(p[:, m, c], (20.0 * z @ T.T).softmax(-1)[:, c]) < 1e-12
    # one class outweighs all: nothing overflows or cancels
    sure = tofa.confidence(texts[0], texts, 1e4)
    assert not sure.isnan().any()
    assert gap(sure[:, 0].diagonal(), ones(6)) < 1e-12


def test_scores_by_hand():
    # Two classes, two rows of class 0 and one of class 1; u is the mean of what is right on own rows and on others.
    own = eye(2)
    texts = torch.stack([own, own.flip(0)])  # the second text of each class is the other's
    ctx = lanes("tofa", "scale=1.0 texts=2", classes=2, width=2)
    _, up = tofa.fit({"texts": texts}, {}, rows_of_one(own[[0, 0, 1]], [0, 0, 1]), ctx)
    s = math.e / (1.0 + math.e)
    # t^0: right with probability s everywhere. t_0^1 = e2 against t_1^0 = e2: 1/2 on every row.
    assert torch.allclose(up["score"][0], zeros(2))
    assert torch.allclose(up["score"][1], ones(2) * s * math.log(0.5 / s), atol=1e-12)
    server = tofa.aggregate({"texts": texts}, up, replace(ctx, hp={**ctx.hp, "tau": 0.5}))
    w = math.exp(s * math.log(0.5 / s) / 0.5)
    assert gap(server["T"], normalize(own + w * own.flip(0), dim=-1)) < 1e-12


def test_a_client_of_one_class_scores_what_it_can_see():
    only = Rows("only", np.flatnonzero(DATA.y.numpy() == 2)[:4], CLIENTS[0].test)
    out = go_all("tofa", {}, fitted(METHODS["tofa"], DATA), [only, CLIENTS[1]])
    assert all(torch.isfinite(t).all() for t in out.server.values())


def test_the_servers_texts_are_the_mean_of_clients_scores():
    out = go_all("tofa", "texts=3 tau=0.05", fitted(METHODS["tofa"], DATA), CLIENTS)
    scores = []
    ctx = lanes("tofa", "texts=3")
    for c in CLIENTS:
        rows = stack_clients(DATA.x, DATA.y, [c.train], 0)
        scores.append(tofa.fit({"texts": out.server["texts"]}, {}, rows, ctx)[1]["score"])
    weight = (torch.stack(scores).mean(0) / 0.05).softmax(0)
    assert (
        gap(out.server["T"], normalize((weight[..., None] * out.server["texts"]).sum(0), dim=-1))
        < 1e-12
    )
    assert float(weight.std()) > 1e-3  # they do not all weigh the same


def test_text_alone_is_zero_shot_to_the_bit():
    data = fitted(METHODS["tofa"], DATA)
    out = go_all("tofa", "fusion=text texts=1", data, CLIENTS)
    towers = TinyTowers(D)
    text = towers.text.encode(*towers.text.embed([f"it is {n}!" for n in data.names]))
    assert torch.equal(out.server["T"], text)
    zero = go_all("clip-zs", "scale=100.0", replace(DATA, text=text), CLIENTS)
    want = np.concatenate([zero.predict(DATA.x[c.test]).numpy() for c in CLIENTS])
    assert np.array_equal(out.evaluation.predictions, want)
    assert np.mean(out.client_accuracy) == out.zero_shot


def test_fusion_weighs_by_the_greatest_probabilities():
    # Logits of vision (log 3, 0): 3/4. Logits of texts (0, 0): 1/2. eta = (3/4) / (3/4 + 1/2) = 3/5.
    down = {"T": zeros(2, 2)}
    own = {"W": zeros(2, 2), "b": doubles([math.log(3.0), 0.0])}
    x = doubles([[1.0, 0.0]])
    for fusion, eta in (("adaptive", 0.6), ("half", 0.5), ("vision", 1.0), ("text", 0.0)):
        u = tofa.predict(down, own, None, x, lanes("tofa", {"fusion": fusion}, classes=2, width=2))
        assert gap(u, eta * own["b"][None]) < 1e-12
