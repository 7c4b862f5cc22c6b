"""What a run returns, and what a later run needs to go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedcache.federate.engine.metrics import fairness
from fedcache.federate.engine.traffic import RoundTraffic, Traffic
from fedcache.heads.linear import Tree


@dataclass(frozen=True)
class RoundRecord:
    """One round: its 1-based number, the clients that took part, what it cost, and the accuracy if it was measured.

    ``accuracy`` is a fraction: of the global test rows for a global model, the mean over clients for personal ones.
    ``diagnostics`` are the method's own numbers, made when it was measured.
    """

    round: int
    clients: tuple[int, ...]
    seconds: float
    accuracy: float | None
    traffic: RoundTraffic
    diagnostics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> RoundRecord:
        """The record that ``dataclasses.asdict`` turned into JSON."""
        traffic = RoundTraffic(**saved["traffic"])
        return cls(**{**saved, "clients": tuple(saved["clients"]), "traffic": traffic})


class Snapshot(NamedTuple):
    """The state between rounds: ``server/<name>`` and ``client/<number>/<name>`` tensors, and JSON.

    Names do not change during a run, every tensor owns its memory, and nothing else is needed to go on.
    """

    tensors: dict[str, Tensor]
    meta: dict[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """Scores of the deployed models.

    Attributes:
        client_accuracy: [M] fractions; NaN for a client without test rows or without a deployed model.
        global_accuracy: of one model on the union of all test rows; None for personal models.
        macro_f1: of one model on the union of all test rows, or the unweighted mean over personal models.
        by_domain: domain number -> accuracy over its test rows, if domains are known.
        rows: int64 store rows of ``predictions``: the union of the test rows, or all clients' one after another.
        predictions: int64 predicted classes of ``rows``.
        headline: whether the accuracy of personal models is their mean or their minimum.
    """

    client_accuracy: np.ndarray
    global_accuracy: float | None
    macro_f1: float
    by_domain: dict[int, float]
    rows: np.ndarray
    predictions: np.ndarray
    headline: str = "mean"

    @property
    def mean_accuracy(self) -> float:
        """Unweighted mean over the scored clients; NaN when there are none."""
        known = self.client_accuracy[~np.isnan(self.client_accuracy)]
        return float(known.mean()) if len(known) else float("nan")

    @property
    def accuracy(self) -> float:
        """The headline: ``global_accuracy`` of a global model, the mean or minimum over clients of personal ones."""
        if self.global_accuracy is not None:
            return self.global_accuracy
        known = self.client_accuracy[~np.isnan(self.client_accuracy)]
        return float(known.min()) if self.headline == "min" and len(known) else self.mean_accuracy


@dataclass(frozen=True)
class TrainingOutput:
    """The result of a run.

    Attributes:
        method: its name.
        hp: resolved hyperparameters.
        seed: of every stream.
        protocol: global | personalised | everywhere.
        evaluation: at the last round.
        records: one per round.
        traffic: exact and paper counts.
        fidelity: exact | cached_views | approx.
        lift: the execution: sequential | batched | gram, or one that is registered.
        chunk: clients at once.
        points: of a grid that were computed together, this one among them.
        threads: of torch, in this process.
        dtype: of the computation.
        clients: their names.
        classes_owned: classes among each client's training rows.
        trainable: scalars of the deployed model that training sets.
        server: the final server tensors.
        states: client number -> its tensors; maps that are kept as coordinates are made when they are read.
        warnings: sentences.
        attackers: names of the clients that lied.
    """

    method: str
    hp: dict[str, Any]
    seed: int
    protocol: str
    evaluation: Evaluation
    records: tuple[RoundRecord, ...]
    traffic: Traffic
    fidelity: str
    lift: str
    chunk: int
    points: int
    threads: int
    dtype: torch.dtype
    clients: tuple[str, ...]
    classes_owned: tuple[int, ...]
    trainable: int
    server: Tree
    states: Mapping[int, Tree]
    warnings: tuple[str, ...]
    attackers: tuple[str, ...]
    predict: Callable[[Tensor], Tensor]
    """x [N, V, D] or [N, D] -> int64 [N]: the classes the global model predicts."""

    @property
    def accuracy(self) -> float:
        """The headline accuracy of the last round, a fraction."""
        return self.evaluation.accuracy

    @property
    def client_accuracy(self) -> np.ndarray:
        """[M] fractions of the last round."""
        return self.evaluation.client_accuracy

    @property
    def fairness(self) -> dict[str, float]:
        """How accuracy is spread over clients."""
        return fairness(self.evaluation.client_accuracy)
