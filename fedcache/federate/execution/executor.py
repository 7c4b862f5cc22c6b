"""What an execution is: a class that computes the middle of a round, between the broadcast and the server's step.

To add one, derive from ``Executor`` in a file of its own and register it (``choose.registered``). All executions give
the same results: bit for bit the same draws, and sums that differ by rounding alone (1e-10 in float64). The laws of
``tests/federate/engine/test_engine_laws.py`` say what else every one of them must keep.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from fedcache.federate.engine.hyperparameters import Hp
from fedcache.federate.engine.method import Method
from fedcache.federate.engine.outcome import Snapshot
from fedcache.federate.engine.traffic import RoundTraffic
from fedcache.federate.execution.grid_batch import GridBatch
from fedcache.federate.execution.load import ExecutionPlan, Load
from fedcache.heads.linear import Tree


class Executor(ABC):
    """Computes the rounds of some points of a grid (one point is a run alone).

    Args:
        batch: the points, before the first round that is computed here.
        snapshots: what each point goes on from, None where it begins; for what an executor keeps in a form of its own.
    """

    name: ClassVar[str]
    """The word of ``--execution``."""

    joins_points: ClassVar[bool] = False
    """Whether several points of a grid are one computation."""

    def __init__(self, batch: GridBatch, snapshots: Sequence[Snapshot | None] = ()) -> None:
        self.batch = batch

    @classmethod
    @abstractmethod
    def serves(cls, method: Method, hp: Hp, load: Load) -> str:
        """Why it cannot compute that method under these hyperparameters; "" when it can."""

    @classmethod
    def cost(cls, method: Method, hp: Hp, load: Load) -> float:
        """Rank of the time of a round, where 1 is the time of ``sequential``; the least is chosen by ``auto``."""
        return math.inf

    @classmethod
    def plan(cls, method: Method, load: Load, chunk: int | None) -> ExecutionPlan:
        """How many clients and points are computed at once; ``chunk`` is the number of clients that the user asks."""
        return ExecutionPlan(cls.name, 1)

    @abstractmethod
    def one_round(self, ids: Sequence[int], downs: Sequence[Tree]) -> list[RoundTraffic | None]:
        """Train the sampled clients of every point, pool their uploads and let each server take its step.

        Args:
            ids: numbers of the sampled clients, ascending; all points sample the same.
            downs: what the server of each point broadcasts.

        Returns:
            for each point the traffic of its round; None for a point in ``batch.failed``.
        """

    def train_round(self) -> list[RoundTraffic | None]:
        """Sample, broadcast and compute one round.

        Raises:
            FedcacheError: what ended a run that is alone; of several points the others go on.
        """
        points = self.batch.points
        ids = points[0].sample(self.batch.participation)
        found = self.one_round(ids, [point.down() for point in points])
        if self.batch.failed and len(points) == 1:
            raise self.batch.failed[0]
        return found
