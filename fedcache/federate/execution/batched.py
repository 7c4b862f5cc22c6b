"""Chunks of clients, of all points of a grid, as one batch with the leading axes (M,) or (G, M).

The steps of small heads are nearly all dispatch, which a chunk pays once; larger heads gain while a chunk's parameters
stay in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedcache.errors import Exit, FedcacheError
from fedcache.federate.engine.hyperparameters import Hp
from fedcache.federate.engine.method import Method
from fedcache.federate.engine.outcome import RoundTraffic, itemsize
from fedcache.federate.execution.executor import Executor
from fedcache.federate.execution.grid_batch import Sent
from fedcache.federate.execution.memory_estimate import GRID_SET, LARGE_SET, WORKING_SET, ExecutionPlan, Load
from fedcache.federate.trust.pipeline import UploadPipeline
from fedcache.heads.linear import Tree

SMALL_HEAD = 64 << 10
"""Heads up to this many bytes are nearly all dispatch, which the points of a grid share as clients do."""

FEWEST, FEW = 4, 8
"""Clients with larger heads that gain more by shared dispatch than they lose in the cache, and those that gain most."""


class Batched(Executor):
    """A chunk of clients is one ``fit``."""

    name = "batched"
    joins_points = True

    @classmethod
    def serves(cls, method: Method, hp: Hp, load: Load) -> str:
        """Every method whose functions take a client axis, on clients that are alike."""
        if load.mixed:
            return "its clients differ in more than their rows"
        if "pixels" in method.reads(hp):
            return "a convolution has no client axis"
        return "" if cls.name in method.executions else "it has no client axis"

    @classmethod
    def cost(cls, method: Method, hp: Hp, load: Load) -> float:
        """Below ``sequential`` for small heads, and for heads of which several fit into the cache."""
        if not method.gradient or method.central or load.clients * load.points < 2:
            return 2.0
        cached = load.clients > 1 and fits_cache(load) >= FEWEST
        return 0.5 if load.head_bytes <= SMALL_HEAD or cached else 2.0

    @classmethod
    def plan(cls, method: Method, load: Load, chunk: int | None) -> ExecutionPlan:
        """As many clients and points as fit the cache."""
        load = points_together(method, load)
        # Points only share dispatch, which larger heads have left behind: each is computed alone.
        if load.points == 1 or load.head_bytes > SMALL_HEAD:
            return ExecutionPlan(cls.name, min(load.clients, chunk or fits_cache(load)))
        points = max(1, min(load.points, GRID_SET // max(1, 4 * load.head_bytes)))
        clients = max(1, GRID_SET // max(1, 4 * load.head_bytes * points))
        return ExecutionPlan(cls.name, min(load.clients, chunk or clients), points)

    def one_round(self, ids: Sequence[int], downs: Sequence[Tree]) -> list[RoundTraffic | None]:
        """Chunk by chunk, the clients with most rows first."""
        batch, sent = self.batch, dict[int, Sent]()
        pipeline = batch.points[0].upload_pipeline(ids, downs[0], batch.participation)
        try:
            self.fit_all(batch.by_rows(ids), batch.broadcasts(downs), pipeline, sent)
        except FedcacheError as error:
            if error.code is Exit.INTERRUPTED:
                raise
            return batch.fail(error)
        return batch.finish(ids, downs, pipeline, sent)

    def fit_all(self, order: Sequence[int], down: Tree, pipeline: UploadPipeline, sent: dict[int, Sent]) -> None:
        """Train the clients of a round.

        Args:
            order: clients by falling rows.
            down: what they are sent, with leading axes.
            pipeline: takes their uploads.
            sent: client -> what it sends for each point, filled here.
        """
        self.fit_chunks(order, self.batch.plan.chunk, down, pipeline, sent)

    def fit_chunks(
        self, order: Sequence[int], width: int, down: Tree, pipeline: UploadPipeline, sent: dict[int, Sent]
    ) -> None:
        """The same, ``width`` clients at once."""
        batch, first = self.batch, self.batch.points[0]
        for start in range(0, len(order), width):
            chunk = order[start : start + width]
            first.env.watch()
            ctx, data = batch.ctx(chunk), first.rows(chunk, batch.axes)
            state, up = first.method.fit(down, batch.states(chunk, down), data, ctx)
            accepted = batch.accepts(up, state, chunk, pipeline, sent)
            batch.store(chunk, state, whole=len(chunk) == len(order))
            # Uploads leave the chunk one by one, as they would leave the clients.
            for j, c in enumerate(chunk if accepted else ()):
                own = batch.of_client(up, j)
                pipeline.add(own, c, validated=True)
                batch.note_sent(c, own, itemsize(up), sent)


def fits_cache(load: Load) -> int:
    """Clients whose parameters fit the cache together."""
    client = max(1, 4 * load.head_bytes)
    return max(1, WORKING_SET // client, min(FEW, LARGE_SET // client))


def points_together(method: Method, load: Load) -> Load:
    """The load of the points that can be one batch: closed forms look at their floats, so they go one after another."""
    return replace(load, points=1) if not method.gradient or method.central or method.one_shot else load
