"""Fed3R against the one product no ridge regression can leave out: X'X in float64, 50,000 x 1,024; one thread.

And against scikit-learn's classifier, both on float32 rows.
"""

from __future__ import annotations

import torch
from sklearn.linear_model import Ridge, RidgeClassifier
from torch import Tensor

from benchmarks import clean
from benchmarks.measure import Row, at_most, in_turn

N = 50_000
D = 1024
C = 10


def rows() -> list[Row]:
    torch.set_num_threads(1)
    f = clean.federation(100, N // 100, C, D)
    double = f.data.x[:N, 0].double()
    onehot = torch.nn.functional.one_hot(f.data.y[:N], C).double().numpy()
    flat = double.numpy()
    product = torch.empty(D, D, dtype=torch.float64)

    def gemm() -> Tensor:
        return torch.mm(double.mT, double, out=product)

    calls = {
        "X'X": gemm,
        "fed3r": lambda: f.ours("fed3r", {"lam": 0.01}),
        "scikit-learn Ridge": lambda: Ridge(alpha=0.01, fit_intercept=False, solver="cholesky").fit(
            flat, onehot
        ),
    }
    seconds = in_turn(calls, 5)
    rate = 2.0 * N * D * D / min(seconds["X'X"]) / 1e9
    detail = (
        f"X'X at {rate:.0f} GFLOP/s; fed3r converts the float32 rows of 100 clients, "
        "skips blocks below the diagonal, solves and scores; 1 thread"
    )
    target = "<= 1.5 x one X'X in float64"
    row = at_most("fed3r", target, 1.5, seconds, "fed3r", "X'X", detail)
    return [row, against_classifier()]


def against_classifier() -> Row:
    """Fed3R with float32 products against scikit-learn's classifier on the same float32 rows, as accurate."""
    f = clean.federation(100, N // 100, 100, D)
    flat = f.data.x[:N, 0].numpy()
    labels = f.data.y[:N].numpy()
    settings = {"lam": 1.0, "bias": True, "precision": "float32"}
    calls = {
        "RidgeClassifier": lambda: RidgeClassifier(alpha=1.0).fit(flat, labels),
        "fed3r": lambda: f.ours("fed3r", settings),
    }
    seconds = in_turn(calls, 5)
    ours = float((f.ours("fed3r", settings).predict(f.data.x[:N]) == f.data.y[:N]).double().mean())
    theirs = RidgeClassifier(alpha=1.0).fit(flat, labels).score(flat, labels)
    detail = (
        f"{N:,} x {D}, 100 classes, with an intercept; right on their own rows: "
        f"{ours:.4f} and {theirs:.4f}; 1 thread"
    )
    name = "fed3r beside RidgeClassifier"
    target = "<= 1 x RidgeClassifier, both float32"
    return at_most(name, target, 1.0, seconds, "fed3r", "RidgeClassifier", detail)
