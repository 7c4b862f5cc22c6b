"""lp-plus-plus: full-batch steps of a linear probe with text multipliers, against the released steps in numpy."""

from dataclasses import replace

import numpy as np
import torch
from federation import go_all
from float64 import doubles, eye, far, normal
from method_calls import lanes, rows_of_one, single
from pooled_rows import CLIENTS, DATA, X, Y
from scipy.special import softmax

from fedcache.federate.methods import METHODS, lp_plus_plus

TEXT = DATA.text.numpy()


def released(x, y, iterations, *, momentum=0.9, accumulate=True, bias=True, start=None):
    """(W [C, D], alpha [C], b [C]) after full-batch steps, with gradients from the loss's own formula."""
    n = len(x)
    C = TEXT.shape[0]
    onehot = np.eye(C)[y]
    products = x @ TEXT.T
    owned = [c for c in range(C) if (y == c).any()]
    W = np.stack([x[y == c].sum(0) for c in range(C)])
    alpha = np.full(C, np.mean([250.0 * products[y == c, c].mean() for c in owned]))
    b = np.zeros(C)
    if start is not None:
        W, alpha, b = (t.copy() for t in start)
    lr_w = 4.0 * n / np.linalg.eigvalsh(x.T @ x).max()
    lr_alpha = n / (4.0 * (products**2).sum(0).max())
    vW = np.zeros_like(W)
    vb = np.zeros_like(b)
    total = np.zeros(C)
    for i in range(iterations):
        P = softmax(x @ W.T + b + alpha * products, axis=1)
        gW = (P - onehot).T @ x / n
        gb = (P - onehot).mean(0)
        ga = ((P - onehot) * products).mean(0)
        vW = momentum * vW + gW
        vb = momentum * vb + gb
        total = total + ga if accumulate else ga
        W = W - lr_w * vW
        b = b - lr_w * vb * bias
        if (i + 1) % 10 == 0:
            alpha = alpha - lr_alpha * total
    return W, alpha, b


def test_one_client_and_one_round_of_the_official_preset_are_the_released_code():
    official = METHODS["lp-plus-plus"].resolve("official")
    out = go_all("lp-plus-plus", {**official, "epochs": 43}, DATA, single(CLIENTS), rounds=1)
    W, alpha, b = released(X, Y.argmax(1), 43)
    for name, want in (("W", W), ("alpha", alpha), ("b", b)):
        assert far(out.server[name], want) < 1e-9 * np.abs(want).max()
    x = DATA.x[:, 0].numpy()
    logits = x @ W.T + b + alpha * (x @ TEXT.T)
    assert np.array_equal(out.predict(DATA.x).numpy(), logits.argmax(1))


def test_clients_begin_with_their_own_values_and_go_on_from_the_average():
    group = [CLIENTS[1], CLIENTS[5]]  # 64 and 50 rows, three classes each
    out = go_all("lp-plus-plus", "epochs=12 momentum=0.5", DATA, group, rounds=2)
    share = np.array([64.0, 50.0]) / 114.0
    average = None
    for _ in range(2):
        made = [
            released(
                DATA.x[c.train, 0].numpy(),
                DATA.y[c.train].numpy(),
                12,
                momentum=0.5,
                accumulate=False,
                bias=False,
                start=average,
            )
            for c in group
        ]
        average = [sum(s * m[i] for s, m in zip(share, made, strict=True)) for i in range(3)]
    assert far(out.server["W"], average[0]) < 1e-9 * np.abs(average[0]).max()
    assert far(out.server["alpha"], average[1]) < 1e-9 * np.abs(average[1]).max()


def test_without_iterations_a_client_sends_its_first_values():
    # Two rows (1, 0) of class 0 and one (0, 1) of class 1; texts (0.6, 0.8) and (0, 1).
    # W = (2, 0), (0, 1); f.t_k are 0.6, 0.6 and 1: alpha = 250 (0.6 + 1) / 2 = 200.
    x = eye(2)[[0, 0, 1]]
    text = doubles([[0.6, 0.8], [0.0, 1.0]])
    ctx = replace(lanes("lp-plus-plus", "epochs=0", classes=2, width=2, text=text), round=0)
    _, up = lp_plus_plus.fit(lp_plus_plus.init(ctx), {}, rows_of_one(x, [0, 0, 1]), ctx)
    assert torch.equal(up["W"], doubles([[2.0, 0.0], [0.0, 1.0]]))
    assert torch.allclose(up["alpha"], doubles([200.0, 200.0]), atol=1e-12)
    # F'F = diag(2, 1): step 4 3 / 2; sum of squares of f.t_k is 0.36 + 0.36 + 0.64 and 1: step 3 / (4 1.36).
    step_w, step_alpha = lp_plus_plus.step_sizes(x, x @ text.T, torch.tensor(3.0))
    assert abs(float(step_w) - 6.0) < 1e-12
    assert abs(float(step_alpha) - 3.0 / (4 * 1.36)) < 1e-12


def test_more_features_than_rows_have_the_same_steps():
    x = normal(4, 9)
    short, _ = lp_plus_plus.step_sizes(x, normal(4, 3, seed=1), torch.tensor(4.0))
    assert abs(
        float(short) - 16.0 / np.linalg.eigvalsh(x.numpy().T @ x.numpy()).max()
    ) < 1e-12 * float(short)
