"""The tiny federation on which the laws run, and a comparison of two runs that treats NaN as unequal.

It has four clients of 6, 11, 1 and 7 rows, 3 classes and 5 features. It is small, so a law takes milliseconds, and
uneven, so a method that ignores the numbers of rows breaks a law. The first client may be a public set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcache.federate.engine.client_data import Data
from fedcache.federate.engine.method import Method
from fedcache.federate.engine.outcome import TrainingOutput
from fedcache.federate.partition.client_table import Client
from fedcache.testing.towers import SIDES, TinyTowers, as_images

TINY = (6, 11, 1, 7)
"""Number of training rows of each client."""


TinyClient = Client
"""A client: its name and the numbers of its rows in the features."""


def make_federation(
    seed: int = 0,
    *,
    sizes: Sequence[int] = TINY,
    classes: int = 3,
    width: int = 5,
    views: int = 1,
    dtype: torch.dtype = torch.float64,
    per_client: int = 2,
    tests: int = 2,
) -> tuple[Data, list[TinyClient]]:
    """Clients of ``sizes`` training rows and ``tests`` test rows, with ``per_client`` classes each.

    Features are noisy class centres of norm 1, [N, views, width]; class text features [C, width] lie near the centres;
    rows alternate between two domains.
    """
    g = np.random.default_rng(seed)
    centres = _unit(g.standard_normal((classes, width)))
    labels = []
    clients = []
    start = 0
    for i, n in enumerate(sizes):
        client_classes = g.choice(classes, per_client, replace=False)
        labels.append(g.choice(client_classes, n + tests))
        rows = np.arange(start, start + n + tests)
        clients.append(TinyClient(f"client-{i}", rows[:n], rows[n:]))
        start += n + tests
    # The noise is small compared with the distance between two centres, so a method can learn the classes.
    y = np.concatenate(labels)
    noise = 0.4 * g.standard_normal((len(y), views, width))
    x = _unit(centres[y][:, None] + noise)
    text = _unit(centres + 0.3 * g.standard_normal(centres.shape))
    domain = np.arange(len(y)) % 2
    data = Data(
        torch.from_numpy(x).to(dtype),
        torch.from_numpy(y),
        classes,
        torch.from_numpy(text).to(dtype),
        (width,),
        torch.from_numpy(domain),
    )
    return data, clients


def wide(seed: int = 0, **kwargs: Any) -> tuple[Data, list[TinyClient]]:
    """The tiny federation with 40 features, more than twice the rows of a client, so ``gram`` serves every client."""
    return make_federation(seed, **{"width": 40, **kwargs})


def fitted(method: Method, data: Data) -> Data:
    """The federation with all inputs that a method needs: live encoders, or images instead of features."""
    if {"text tower", "image tower"} & method.needs and data.towers is None:
        # Class names of one letter each.
        names = tuple("abcdefghijklmnopqrstuvwxyz"[: data.classes])
        towers = TinyTowers(data.x.shape[-1], data.x.dtype)
        data = replace(data, names=names, towers=towers)
    if "pixels" in method.needs and data.image is None:
        data = replace(data, x=as_images(features_of(data)), image=SIDES)
    return data


def gap(a: Tensor | Mapping[Any, Any], b: Tensor | Mapping[Any, Any]) -> float:
    """Largest difference of two tensors or trees; inf if names or shapes differ or a number is NaN."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        if a.keys() != b.keys():
            return math.inf
        return max((gap(a[k], b[k]) for k in a), default=0.0)
    if isinstance(a, Mapping) or isinstance(b, Mapping):
        return math.inf
    if a.shape != b.shape:
        return math.inf
    if not a.numel():
        return 0.0
    worst = float((a.double() - b.double()).abs().max())
    # Every comparison with NaN is false, so a NaN could pass a bound.
    if math.isnan(worst):
        return math.inf
    return worst


def difference(a: TrainingOutput, b: TrainingOutput) -> float:
    """Largest difference of two runs in the server and every client's state; inf if accuracies differ."""
    if not np.array_equal(a.client_accuracy, b.client_accuracy, equal_nan=True):
        return math.inf
    return max(gap(a.server, b.server), gap(a.states, b.states))


def features_of(data: Data) -> Tensor:
    """The features of a small federation, which are in memory."""
    assert isinstance(data.x, Tensor)
    return data.x


def _unit(x: np.ndarray) -> np.ndarray:
    unit: np.ndarray = x / np.linalg.norm(x, axis=-1, keepdims=True)
    return unit
