"""One client after another, each alone and without leading axes: what serves every method, and the others must equal.

It is the fastest for closed forms, for Adam on a projection head, and wherever a step's work outweighs its dispatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fedcache.errors import Exit, FedcacheError
from fedcache.federate.engine.hyperparameters import Hp
from fedcache.federate.engine.method import Method
from fedcache.federate.engine.outcome import Snapshot
from fedcache.federate.engine.run_state import RunState
from fedcache.federate.engine.traffic import RoundTraffic
from fedcache.federate.execution.executor import Executor
from fedcache.federate.execution.grid_batch import GridBatch
from fedcache.federate.execution.grid_cache import Sent
from fedcache.federate.execution.load import ExecutionPlan, Load, shares_uploads
from fedcache.heads.linear import Tree

SPECTRUM_POINTS = 4
"""Points of a shared upload from which on a server prepares what serves all: eigenvalues cost some Cholesky solves."""


class Sequential(Executor):
    """Client by client, in client order."""

    name = "sequential"

    def __init__(self, batch: GridBatch, snapshots: Sequence[Snapshot | None] = ()) -> None:
        super().__init__(batch, snapshots)
        self._prepared: tuple[Tree, Tree] | None = None  # pooled uploads, and what the server prepared of them

    @classmethod
    def serves(cls, method: Method, hp: Hp, load: Load) -> str:
        """Everything."""
        return ""

    @classmethod
    def cost(cls, method: Method, hp: Hp, load: Load) -> float:
        """What the others are compared with."""
        return 1.0

    @classmethod
    def plan(cls, method: Method, load: Load, chunk: int | None) -> ExecutionPlan:
        """One client; all points at once only where they can share what clients send."""
        return ExecutionPlan(cls.name, 1, load.points if shares_uploads(method) else 1)

    def one_round(self, ids: Sequence[int], downs: Sequence[Tree]) -> list[RoundTraffic | None]:
        """The points one after another."""
        return [self._point(g, ids, down) for g, down in enumerate(downs)]

    def _point(self, g: int, ids: Sequence[int], down: Tree) -> RoundTraffic | None:
        if g in self.batch.failed:
            return None
        point = self.batch.points[g]
        try:
            pooled, sent = self._pooled(point, ids, down)
            return point.finish(ids, down, pooled, sent)
        except FedcacheError as error:
            if error.code is Exit.INTERRUPTED:
                raise
            self.batch.failed[g] = error
            return None

    def _pooled(self, point: RunState, ids: Sequence[int], down: Tree) -> tuple[Tree, Sent]:
        """Uploads of the clients, pooled, and what each of them sent; from the cache where another point has them."""
        batch, fit = self.batch, partial(self._fit, point, ids, down)
        if batch.cache is None or not shares_uploads(point.method) or not point.trust.plain:
            return fit()
        pooled, sent = batch.cache.pooled(point, ids, fit)
        if len(batch.points) >= SPECTRUM_POINTS:
            if self._prepared is None or self._prepared[0] is not pooled:
                self._prepared = (pooled, point.method.prepare(pooled, point.server_ctx(ids)))
            pooled = self._prepared[1]
        return pooled, sent

    def _fit(self, point: RunState, ids: Sequence[int], down: Tree) -> tuple[Tree, Sent]:
        pipeline = point.upload_pipeline(ids, down, self.batch.participation)
        sent: Sent = []
        for c in ids:
            up = point.fit_one(down, c)
            pipeline.add(up, c)
            sent.append(point.upload_size(up))
        return point.pooled(pipeline), sent
