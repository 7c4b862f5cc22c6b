"""Chunks of clients, of all points of a grid, as one batch with the leading axes (M,) or (G, M).

The steps of small heads are nearly all dispatch, which a chunk pays once; larger heads gain while a chunk's parameters
stay in the cache. On a GPU every head gains. Small uploads, and all on a GPU, are summed by one product over a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from fedcache.errors import Exit, FedcacheError
from fedcache.federate.engine.hyperparameters import Hp
from fedcache.federate.engine.method import Method, numel
from fedcache.federate.engine.outcome import RoundTraffic, itemsize
from fedcache.federate.execution.executor import Executor
from fedcache.federate.execution.grid_batch import Sent
from fedcache.federate.execution.memory_estimate import (
    GPU_SET,
    GRID_SET,
    LARGE_SET,
    WORKING_SET,
    ExecutionPlan,
    Load,
)
from fedcache.federate.trust.pipeline import UploadPipeline
from fedcache.heads.linear import Tree

SMALL_HEAD = 64 << 10
"""Heads and uploads up to this many bytes are nearly all dispatch, which clients of a chunk and points share."""

FEWEST = 4
FEW = 8
"""Clients with larger heads from which on shared dispatch gains more than the cache loses, and their best number."""


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
        if cls.name in method.executions:
            return ""
        return "it has no client axis"

    @classmethod
    def cost(cls, method: Method, hp: Hp, load: Load) -> float:
        """Below ``sequential`` for small heads, for heads of which several fit into the cache, and on a GPU."""
        if not method.gradient or method.central or load.clients * load.points < 2:
            return 2.0
        cached = load.clients > 1 and fits_cache(load) >= FEWEST
        if load.device != "cpu" or load.head_bytes <= SMALL_HEAD or cached:
            return 0.5
        return 2.0

    @classmethod
    def plan(cls, method: Method, load: Load, chunk: int | None) -> ExecutionPlan:
        """As many clients and points as fit the cache."""
        load = points_together(method, load)
        # Points share nothing but dispatch, which costs larger heads little: each point is computed alone.
        if load.points == 1 or (load.head_bytes > SMALL_HEAD and load.device == "cpu"):
            return ExecutionPlan(cls.name, min(load.clients, chunk or fits_cache(load)))
        budget = GPU_SET
        if load.device == "cpu":
            budget = GRID_SET
        # Points first: they share the rows that are read. Clients fill what is left of the cache.
        points = max(1, min(load.points, budget // max(1, 4 * load.head_bytes)))
        clients = max(1, budget // max(1, 4 * load.head_bytes * points))
        return ExecutionPlan(cls.name, min(load.clients, chunk or clients), points)

    def one_round(self, ids: Sequence[int], downs: Sequence[Tree]) -> list[RoundTraffic | None]:
        """Chunk by chunk, the clients with most rows first."""
        batch = self.batch
        sent = dict[int, Sent]()
        pipeline = batch.points[0].upload_pipeline(ids, downs[0], batch.participation)
        try:
            self.fit_all(batch.by_rows(ids), batch.broadcasts(downs), pipeline, sent)
        except FedcacheError as error:
            if error.code is Exit.INTERRUPTED:
                raise
            return batch.fail(error)
        return batch.finish(ids, downs, pipeline, sent)

    def fit_all(
        self, order: Sequence[int], down: Tree, pipeline: UploadPipeline, sent: dict[int, Sent]
    ) -> None:
        """Train the clients of a round.

        Args:
            order: clients by falling rows.
            down: what they are sent, with leading axes.
            pipeline: takes their uploads.
            sent: client -> what it sends for each point, filled here.
        """
        self.fit_chunks(order, self.batch.plan.chunk, down, pipeline, sent)

    def fit_chunks(
        self,
        order: Sequence[int],
        width: int,
        down: Tree,
        pipeline: UploadPipeline,
        sent: dict[int, Sent],
    ) -> None:
        """The same, ``width`` clients at once."""
        batch = self.batch
        first = self.batch.points[0]
        for start in range(0, len(order), width):
            # One ``fit`` of the chunk: states and uploads come back with the leading axes (M,) or (G, M).
            chunk = order[start : start + width]
            first.env.watch()
            ctx = batch.ctx(chunk)
            data = first.rows(chunk, batch.axes)
            state, up = first.method.fit(down, batch.states(chunk, down), data, ctx)
            accepted = batch.accepts(up, state, chunk, pipeline, sent)
            batch.store(chunk, state, whole=len(chunk) == len(order))
            if not accepted:
                continue
            if self.sums_uploads(up, len(chunk)):
                self.pool_chunk(chunk, up, pipeline)
            else:
                for j, c in enumerate(chunk):
                    pipeline.add(batch.of_client(up, j), c, validated=first.trust.plain)
            self.note_sent(chunk, up, itemsize(up), sent)

    def sums_uploads(self, up: Tree, clients: int) -> bool:
        """Whether the uploads of a chunk are pooled by one sum over its clients: small uploads, and all on a GPU.

        On a CPU a sum would first copy large ones. Empty uploads are not summed, as each of them may be refused.
        """
        size = sum(t.nbytes for t in up.values())
        device = self.batch.points[0].env.device.type
        return size > 0 and (size <= SMALL_HEAD * clients or device != "cpu")

    def pool_chunk(
        self,
        chunk: Sequence[int],
        up: Tree,
        pipeline: UploadPipeline,
        each: Mapping[str, list[Tensor]] | None = None,
    ) -> None:
        """Pool the uploads of a chunk: one sum over its clients for summed tensors, client by client for stacked ones.

        ``each`` has further tensors to stack, by client, with an axis of points of length 1 or more.
        """
        stacked = {}
        # The weights of the clients depend on the rule of pooling alone, so they are made once for each rule.
        factors: dict[str, list[float]] = {}
        for name, t in up.items():
            rule = pipeline.rule(name)
            if rule == "stack":
                stacked[name] = t
                continue
            if rule not in factors:
                factors[rule] = pipeline.factors(name, chunk)
            pipeline.add_sum(name, self.batch.weighted_sum(t, factors[rule]), t.dtype)
        if not stacked and not each:
            pipeline.add_weights(chunk)  # a sum does not contain the number of its clients
            return
        validated = self.batch.points[0].trust.plain  # else each upload is validated by itself
        for j, c in enumerate(chunk):
            own = self.batch.of_client(stacked, j)
            own |= {n: self.batch.less_points(parts[j]) for n, parts in (each or {}).items()}
            pipeline.add(own, c, validated=validated)

    def note_sent(
        self,
        chunk: Sequence[int],
        up: Tree,
        size: int,
        sent: dict[int, Sent],
        shown: Tree | None = None,
    ) -> None:
        """Note what each client of a chunk sends: its part of ``up``, and ``shown``, which has no axis of clients."""
        # If every scalar counts, all clients of the chunk send equally many.
        alike = self.batch.points[0].method.sent is numel
        for j, c in enumerate(chunk):
            if alike and j:
                sent[c] = sent[chunk[0]]
                continue
            self.batch.note_sent(c, {**self.batch.of_client(up, j), **(shown or {})}, size, sent)


def fits_cache(load: Load) -> int:
    """Clients whose parameters fit the cache together; on a GPU, those that share the cost of one launch."""
    # weights, gradient, momentum and output of one client
    client = max(1, 4 * load.head_bytes)
    if load.device != "cpu":
        return max(1, GPU_SET // client)
    return max(1, WORKING_SET // client, min(FEW, LARGE_SET // client))


def points_together(method: Method, load: Load) -> Load:
    """The load of the points that can be one batch: one point for closed forms, which read their hyperparameters."""
    if not method.gradient or method.central or method.one_shot:
        return replace(load, points=1)
    return load
