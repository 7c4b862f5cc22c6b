"""What ``run`` and ``run_points`` are asked to train, and who is called on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fedcache.errors import FedcacheError
from fedcache.federate.engine.client_data import ClientRows, Data
from fedcache.federate.engine.client_overrides import ClientOverrides
from fedcache.federate.engine.method import Method
from fedcache.federate.engine.outcome import Snapshot, TrainingOutput
from fedcache.federate.trust.policy import TrustPolicy

OnRound = Callable[[int, int, dict[str, Any], dict[str, Any], Callable[[], Snapshot]], None]
"""(point of the grid, round, metrics, traffic of the round, snapshot); points count from 0, rounds from 1.

The snapshot is a function: the state is copied only when it is called.
"""


@dataclass(frozen=True)
class TrainingRun:
    """A method, the clients it is trained on, and how: what the points of a grid have in common.

    Attributes:
        method: from ``METHODS``, or a user's own.
        data: features, labels, text; on the device that computes.
        clients: names and rows; names are unique and key the random draws.
        rounds: total, counted from the first start; one-shot methods take one.
        participation: clients a round: None for all, an int for a number, a float for a share.
        seed: of every draw.
        dtype: of the computation; float64 for comparing executions.
        eval_every: also score after every k-th round; 0 for the last only.
        overrides: in what some clients differ, by client number; the run is then computed client by client.
        trust: what is done with uploads; the default checks them and takes the method's own mean.
        execution: auto, or the name of an execution to force.
        chunk: clients that are computed at once, where the execution computes several; None lets the engine pick.
    """

    method: Method
    data: Data
    clients: Sequence[ClientRows]
    rounds: int = 1
    participation: int | float | None = None
    seed: int = 0
    dtype: torch.dtype = torch.float32
    eval_every: int = 0
    overrides: Mapping[int, ClientOverrides] = field(default_factory=dict)
    trust: TrustPolicy = field(default_factory=TrustPolicy)
    execution: str = "auto"
    chunk: int | None = None


@dataclass(frozen=True)
class RunCallbacks:
    """Who is called while a run trains; None for nobody.

    Attributes:
        before_step: before every optimiser step; an INTERRUPTED that it raises ends the run inside a round.
        on_round: after every round of every point.
        after_round: with the number of a round, when all points that are computed together have ended it.
        on_done: with the number of the first point and the outcomes of the points that were computed together.
    """

    before_step: Callable[[], None] | None = None
    on_round: OnRound | None = None
    after_round: Callable[[int], None] | None = None
    on_done: Callable[[int, Sequence[TrainingOutput | FedcacheError]], None] | None = None
