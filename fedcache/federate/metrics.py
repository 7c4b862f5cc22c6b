"""Metrics over clients and predictions."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


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
    """Unweighted mean over the classes present in ``label`` of the F1 score of [N] predictions."""
    f1 = []
    for c in range(classes):
        truth, guess = label == c, predicted == c
        if truth.any():
            f1.append(2.0 * np.sum(truth & guess) / (truth.sum() + guess.sum()))
    return float(np.mean(f1)) if f1 else math.nan
