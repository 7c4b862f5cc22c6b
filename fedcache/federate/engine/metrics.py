"""Metrics over clients and predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedcache.federate.engine.context import Ctx
from fedcache.heads.class_balance import deficits, votes
from fedcache.heads.linear import Tree


def fairness(accuracy: np.ndarray) -> dict[str, float]:
    """How accuracy is spread over clients.

    Args:
        accuracy: [m] fractions; NaN for clients that were not scored, which are left out.

    Returns:
        ``mean`` (fraction), ``std_pp`` (population standard deviation in percentage points), ``var_pp2`` (its square,
        the q-FFL convention), ``worst10``, ``worst20``, ``worst40`` (means of the floor(q m) lowest) and ``best10``;
        NaN where floor(q m) is 0.
    """
    a = np.sort(np.asarray(accuracy, np.float64))
    a = a[~np.isnan(a)]
    if not len(a):
        return dict.fromkeys(("mean", "std_pp", "var_pp2", "worst10", "worst20", "worst40", "best10"), math.nan)

    def tail(q: int, *, best: bool = False) -> float:
        size = len(a) * q // 100
        if not size:
            return math.nan
        return float((a[-size:] if best else a[:size]).mean())

    std = float(a.std() * 100.0)
    return {
        "mean": float(a.mean()),
        "std_pp": std,
        "var_pp2": std**2,
        "worst10": tail(10),
        "worst20": tail(20),
        "worst40": tail(40),
        "best10": tail(10, best=True),
    }


def entropy_bits(q: Tensor) -> Tensor:
    """Entropy in bits of each row of q [.., C] (FST-CBDG fig 2: base 2, D-54); returns [..]."""
    nats: Tensor = -torch.special.xlogy(q, q).sum(-1)
    return nats / math.log(2.0)


def macro_f1(predicted: np.ndarray, label: np.ndarray, classes: int) -> float:
    """Unweighted mean over the classes present in ``label`` of the F1 score of [N] predictions.

    A class that is only predicted lowers the score of those it was taken for, and has none of its own: scikit-learn's
    ``f1_score(label, predicted, average="macro", labels=np.unique(label))``. Rows whose label or prediction is -1
    (unknown) are left out.
    """
    known = (label >= 0) & (predicted >= 0)
    label, predicted = label[known], predicted[known]
    right = np.bincount(label[label == predicted], minlength=classes)
    truth, guess = np.bincount(label, minlength=classes), np.bincount(predicted, minlength=classes)
    present = truth > 0
    return float(np.mean(2.0 * right[present] / (truth + guess)[present])) if present.any() else math.nan


def classes_owned(label: np.ndarray) -> int:
    """Distinct known classes among the labels [n] of a client's training rows."""
    return len(np.unique(label[label >= 0]))


def self_training(server: Tree, states: Mapping[int, Tree], labels: Mapping[int, Tensor], ctx: Ctx) -> dict[str, float]:
    """What to watch in FST-CBDG, over the clients that took part so far.

    Args:
        server: W [C, D].
        states: ``rows/q`` [n, C] per client.
        labels: [n] true classes per client, for evaluation only.
        ctx: text features and switches.

    Returns:
        ``pseudo_accuracy`` of argmax q; ``entropy_bits``, mean over rows; ``synthetic``, mean rows that balance a
        client now (eq 7); ``drift``, the Frobenius norm of W - T.
    """
    equal, gamma = ctx.hp["sampling"] == "equal", ctx.number("gamma")
    right, bits, rows, dealt = 0, 0.0, 0, 0
    for client in sorted(states):
        q = states[client]["rows/q"]
        right += int((q.argmax(-1) == labels[client]).sum())
        bits += float(entropy_bits(q.double()).sum())
        rows += q.shape[0]
        dealt += int(deficits(votes(q, torch.ones(q.shape[0], device=q.device)), gamma, equal=equal).sum())
    drift = float(torch.linalg.matrix_norm(server["W"] - ctx.text))
    if not rows:
        return {"drift": drift}
    return {
        "pseudo_accuracy": right / rows,
        "entropy_bits": bits / rows,
        "synthetic": dealt / len(states),
        "drift": drift,
    }
