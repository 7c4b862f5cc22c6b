"""A small ragged federation that the engine's laws are stated on, and a comparison that treats NaN as unequal."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from fedcache.federate.clients import Data
from fedcache.federate.engine import run
from fedcache.federate.methods import METHODS

SIZES = (1, 64, 7, 33, 12, 50, 8, 21, 40)  # nine clients
C, D = 6, 11
PER_ROUND = 5
ROUNDS = 3


@dataclass(frozen=True)
class Rows:
    name: str
    train: np.ndarray
    test: np.ndarray


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def federation(seed=0, *, views=1, dtype=torch.float64, sizes=SIZES, classes=C, width=D, per_client=3, tests=6):
    """Clients of ``sizes`` rows, ``per_client`` classes each; features are noisy class centres, l2-normalised."""
    g = np.random.default_rng(seed)
    centres = unit(g.standard_normal((classes, width)))
    y, clients, start = [], [], 0
    for i, n in enumerate(sizes):
        mine = g.choice(classes, per_client, replace=False)
        y.append(g.choice(mine, n + tests))
        rows = np.arange(start, start + n + tests)
        clients.append(Rows(f"client-{i}", rows[:n], rows[n:]))
        start += n + tests
    y = np.concatenate(y)
    x = unit(centres[y][:, None] + 0.4 * g.standard_normal((len(y), views, width)))
    text = unit(centres + 0.3 * g.standard_normal(centres.shape))
    data = Data(
        torch.from_numpy(x).to(dtype), torch.from_numpy(y), classes, torch.from_numpy(text).to(dtype),
        (width,), torch.from_numpy(np.arange(len(y)) % 2),
    )  # fmt: skip
    return data, clients


def cases():
    """Every method, with SGD-momentum and Adam where it takes steps, two epochs, batches of 16."""
    out = []
    for name, method in METHODS.items():
        declared = {h.name for h in method.hparams}
        small = {k: v for k, v in {"batch": 16, "epochs": 2, "dim": 5}.items() if k in declared}
        if "opt" in declared:
            out += [(name, {**small, "opt": "sgd", "lr": 0.05}), (name, {**small, "opt": "adam", "lr": 0.01})]
        else:
            out.append((name, small))
    return out


def ids(case):
    return f"{case[0]}-{case[1].get('opt', 'closed')}"


def go(name, settings=None, data=None, clients=None, **kwargs):
    """A run in float64, 5 of 9 clients sampled, 3 rounds unless told otherwise."""
    if data is None:
        data, clients = federation()
    method = METHODS[name]
    hp = method.resolve("paper", settings or {})
    kwargs = {"rounds": ROUNDS, "participation": PER_ROUND, "dtype": torch.float64, **kwargs}
    return run(method, hp, data, clients, **kwargs)


def gap(a, b):
    """Largest difference of two trees; inf where names or shapes differ or anything is NaN."""
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return math.inf
        return max((gap(a[k], b[k]) for k in a), default=0.0)
    if a.shape != b.shape:
        return math.inf
    worst = float((a - b).abs().max()) if a.numel() else 0.0
    return math.inf if math.isnan(worst) else worst


def difference(a, b):
    """Largest difference of two outcomes: server, every client's state, accuracies."""
    same = np.array_equal(a.client_accuracy, b.client_accuracy, equal_nan=True)
    return max(gap(a.server, b.server), gap(a.states, b.states), 0.0 if same else math.inf)
