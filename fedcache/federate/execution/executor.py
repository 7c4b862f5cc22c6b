"""Executor: a class that computes the middle of a round, between the broadcast and the server's step.

To add an executor, derive from ``Executor`` in a new file and register the class (``engine.run.registered``). All
executions give the same results: bit for bit the same draws, and sums that differ only by rounding (1e-10 in float64).
``tests/contract/test_method_laws.py`` tests all further requirements. ``Sequential``, the simplest executor,
serves every method, and the results of the others must equal its results.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, cast

import numpy as np
from torch import Tensor

from fedcache.errors import Exit, FedcacheError
from fedcache.federate.engine.client_data import stack_clients
from fedcache.federate.engine.hyperparameters import Hp
from fedcache.federate.engine.method import Method, no_state, numel
from fedcache.federate.engine.outcome import RoundTraffic, Snapshot, itemsize
from fedcache.federate.engine.run_state import RunState
from fedcache.federate.engine.simulated_time import TimedRun
from fedcache.federate.execution.grid_batch import GridBatch, Sent
from fedcache.federate.execution.memory_estimate import (
    GPU_SET,
    GRID_SET,
    LARGE_SET,
    WORKING_SET,
    ExecutionPlan,
    Load,
    shares_uploads,
)
from fedcache.federate.partition.client_table import blocks_within, train_rows_of, train_sizes
from fedcache.federate.trust.pipeline import UploadPipeline
from fedcache.heads.linear import Tree

SPECTRUM_POINTS = 4
"""Number of configurations from which one decomposition of their shared upload is faster than a Cholesky solve each."""


TOGETHER_FROM = 32
"""Number of clients in a round from which uploads that are only sums are computed for several clients at once."""

TOGETHER_ROWS = 2 << 20
"""Maximum number of rows that are summed together.

It is large, because the rows of a group are read in file order, and many rows are closer together there than few.
"""


class Executor(ABC):
    """Computes the rounds of some points of a grid (one point is a single run).

    Args:
        batch: the points, before the first round to compute.
        snapshots: one for each point, None for a point that does not resume; only executors that keep client states in
            a form of their own read them.
    """

    name: ClassVar[str]
    """Value of ``--execution`` that selects this mode."""

    joins_points: ClassVar[bool] = False
    """Whether several points of a grid are one computation."""

    def __init__(self, batch: GridBatch, snapshots: Sequence[Snapshot | None] = ()) -> None:
        self.batch = batch

    @classmethod
    @abstractmethod
    def serves(cls, method: Method, hp: Hp, load: Load) -> str:
        """Why this executor cannot compute that method under these hyperparameters; "" if it can."""

    @classmethod
    def cost(cls, method: Method, hp: Hp, load: Load) -> float:
        """Rank of the time of a round; ``sequential`` has 1, and ``auto`` chooses the lowest."""
        return math.inf

    @classmethod
    def plan(cls, method: Method, load: Load, chunk: int | None) -> ExecutionPlan:
        """How many clients and points are computed at once; ``chunk`` is the number of clients that the user gave."""
        return ExecutionPlan(cls.name, 1)

    @abstractmethod
    def one_round(self, ids: Sequence[int], downs: Sequence[Tree]) -> list[RoundTraffic | None]:
        """Train the sampled clients of every point, pool their uploads and let each server take its step.

        Args:
            ids: numbers of the sampled clients, ascending; all points sample the same clients.
            downs: broadcast of each point's server.

        Returns:
            for each point the traffic of its round; None for a point in ``batch.failed``.
        """

    def train_round(self) -> list[RoundTraffic | None]:
        """Sample, broadcast and compute one round. A point's error is in ``batch.failed``, and the others continue."""
        points = self.batch.points
        ids = points[0].sample(
            self.batch.participation
        )  # also sets ``lost``, the clients that drop out
        for point in points[1:]:
            point.lost = points[0].lost
        downs = [point.down() for point in points]
        # A private round without clients still adds noise and counts for epsilon: skipping it would leak information.
        if not ids and points[0].trust.privacy is None:
            traffics: list[RoundTraffic | None] = [None] * len(points)
            for g, point in enumerate(points):
                if g not in self.batch.failed:
                    traffics[g] = point.nobody_sends(downs[g])
            return traffics
        return self.one_round(ids, downs)


class Sequential(Executor):
    """Client by client, in client order."""

    name = "sequential"

    def __init__(self, batch: GridBatch, snapshots: Sequence[Snapshot | None] = ()) -> None:
        super().__init__(batch, snapshots)
        # Pooled uploads, and the result of ``Method.prepare`` for them.
        self._prepared: tuple[Tree, Tree] | None = None

    @classmethod
    def serves(cls, method: Method, hp: Hp, load: Load) -> str:
        """It serves every method."""
        return ""

    @classmethod
    def cost(cls, method: Method, hp: Hp, load: Load) -> float:
        """The unit of cost."""
        return 1.0

    @classmethod
    def plan(cls, method: Method, load: Load, chunk: int | None) -> ExecutionPlan:
        """One client; all points at once only if they can share uploads."""
        points = 1
        if shares_uploads(method):
            points = load.points
        return ExecutionPlan(cls.name, 1, points)

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
        """Pooled uploads of the clients and their sizes; from the cache if another point has computed them."""
        batch = self.batch
        fit = partial(self._fit, point, ids, down)
        shares = shares_uploads(point.method) and point.trust.plain
        if batch.cache is None or not shares:
            return fit()
        # Points that differ only in hyperparameters of the server have the same uploads, so one point trains for all.
        pooled, sent = batch.cache.pooled(point, ids, fit)
        # Eigenvalues of the shared sums serve every ridge, so the first of these points computes them for all.
        if len(batch.points) >= SPECTRUM_POINTS:
            if self._prepared is None or self._prepared[0] is not pooled:
                self._prepared = (pooled, point.method.prepare(pooled, point.server_ctx(ids)))
            pooled = self._prepared[1]
        return pooled, sent

    def _fit(self, point: RunState, ids: Sequence[int], down: Tree) -> tuple[Tree, Sent]:
        pipeline = point.upload_pipeline(ids, down, self.batch.participation)
        sent = []
        for group, up in self.uploads(point, down, list(groups_of(point, ids))):
            if len(group) > 1 and pipeline.add_together(up, group):
                sent += [point.upload_size(up)] * len(group)
                continue
            # A sum that the pipeline cannot take is computed again client by client.
            for c in group:
                upload = up
                if len(group) > 1:
                    upload = point.fit_one(down, c)
                pipeline.add(upload, c)
                sent.append(point.upload_size(upload))
        return point.pooled(pipeline, ids), sent

    def uploads(
        self, point: RunState, down: Tree, groups: Sequence[Sequence[int]]
    ) -> Iterator[tuple[Sequence[int], Tree]]:
        """The upload of each group of clients, in this order: of one client, or the sum over several clients."""
        for group in groups:
            yield group, fit_group(point, down, group)


def fit_group(point: RunState, down: Tree, group: Sequence[int]) -> Tree:
    """The upload of one client; for several clients the sum of uploads, fitted as one client with all their rows."""
    if len(group) == 1:
        return point.fit_one(down, group[0])
    point.env.watch()
    rows = np.sort(train_rows_of(point.training_clients, group))  # in the order of the file
    # One client without leading axes (0), with all columns (None).
    data = stack_clients(point.features(None), point.labels, [rows], 0)
    # A sum does not depend on draws, so the context of any client of the group serves.
    _state, up = point.method.fit(down, {}, data, point.ctx(group[:1], 0))
    return up


def groups_of(point: RunState, ids: Sequence[int]) -> Iterator[Sequence[int]]:
    """Groups of clients that are computed together: up to ``TOGETHER_ROWS`` rows if uploads are sums, else one client.

    So a million clients do not need a matrix each, and the rows of a group are read in the order of the file. The
    result is the sum of the uploads up to rounding. Traffic is counted as if each client sent its own upload.
    """
    method = point.method
    sums = method.additive(point.hp) and method.sent is numel and method.enter is no_state
    together = sums and point.trust.plain and not point.overrides
    if not together or len(ids) < TOGETHER_FROM:
        yield from ([c] for c in ids)
        return
    # A group ends before the client with which its rows would exceed ``TOGETHER_ROWS``.
    rows = train_sizes(point.training_clients)[np.asarray(ids)]
    for start, end in blocks_within(rows, TOGETHER_ROWS):
        yield ids[start:end]


def timed_round(executor: Executor) -> tuple[tuple[int, ...], list[RoundTraffic | None]]:
    """One round of all points: the clients whose uploads are used, and the traffic of each point.

    The error of a point is in ``batch.failed``, as after ``Executor.train_round``.
    """
    points = cast(Sequence[TimedRun], executor.batch.points)
    first = points[0]
    round_ = first.round
    # Points of a grid have the same times and clients, so they share one schedule.
    for point in points[1:]:
        point.schedule = first.schedule
    if first.rule.buffer is None:  # the server waits for all clients of a round
        participation = executor.batch.participation
        drawn = first.sampler.drawn(round_, participation)
        took_part = tuple(first.sample(participation))
        traffics = executor.train_round()
        first.schedule.wait(drawn, round_)
        return took_part, traffics
    groups = first.begin_step()
    for point in points[1:]:
        point.join_step(first)
    # Clients that started from the same model are computed as one round, with the broadcast and draws of that round.
    arrived = []
    for version, ids in groups.items():
        for point in points:
            point.round = version  # draws are keyed by the round
        # Only the traffic of the whole step counts, which ``end_step`` returns.
        executor.one_round(ids, [point.versions[version] for point in points])
        arrived += ids
    failed = executor.batch.failed
    traffics = [None] * len(points)
    for g, point in enumerate(points):
        point.round = round_
        if g in failed:
            continue
        try:
            traffics[g] = point.end_step()
        except FedcacheError as error:
            failed[g] = error
    return tuple(sorted(arrived)), traffics


# ``Batched`` computes a chunk of M clients for G points of a grid at once. The tensors of this
# batch have the leading axes (G, M), or (M,) for a single point.
#
# Most of the time of a small head's step is torch's call overhead, which is paid once per chunk.
# Larger heads gain time as long as a chunk's parameters fit the cache. On a GPU every head gains.
# Small uploads, and all uploads on a GPU, are summed by one product over a chunk.

SMALL_HEAD = 64 << 10
"""Bytes of heads and uploads below which call overhead takes most of the time, so that clients should share calls."""

FEWEST = 4
FEW = 8
"""Number of clients in a chunk with larger heads: the minimum for which a chunk saves time, and the best number."""


class Batched(Executor):
    """Execution with one ``fit`` for each chunk of clients."""

    name = "batched"
    joins_points = True

    @classmethod
    def serves(cls, method: Method, hp: Hp, load: Load) -> str:
        """It serves methods with functions that take a client axis, on clients that differ only in their rows."""
        if load.mixed:
            return "its clients have different settings"
        if "pixels" in method.reads(hp):
            return "a convolution cannot process several clients in one batch"
        if cls.name in method.executions:
            return ""
        return "it cannot process several clients in one batch"

    @classmethod
    def cost(cls, method: Method, hp: Hp, load: Load) -> float:
        """Below the cost of ``sequential`` for small heads, if several heads fit into the cache, and on a GPU."""
        trains = method.gradient and not method.central
        if not trains or load.clients * load.points < 2:
            return 2.0
        if load.device != "cpu" or load.head_bytes <= SMALL_HEAD:
            return 0.5
        if load.clients > 1 and fits_cache(load) >= FEWEST:
            return 0.5
        return 2.0

    @classmethod
    def plan(cls, method: Method, load: Load, chunk: int | None) -> ExecutionPlan:
        """As many clients and points as fit the cache."""
        load = points_together(method, load)
        # Points share only call overhead, which matters little for larger heads. Then each point is computed alone.
        alone = load.device == "cpu" and load.head_bytes > SMALL_HEAD
        if alone or load.points == 1:
            return ExecutionPlan(cls.name, min(load.clients, chunk or fits_cache(load)))
        budget = GPU_SET
        if load.device == "cpu":
            budget = GRID_SET
        # Four copies of the head, as in ``fits_cache``.
        return cls.fitting(load, budget, 4 * load.head_bytes, chunk)

    @classmethod
    def fitting(
        cls, load: Load, budget: int, client_bytes: int, chunk: int | None, rest: int = 1
    ) -> ExecutionPlan:
        """As many clients and points as fit into ``budget`` bytes; ``client_bytes`` are for one client of one point.

        ``rest`` goes into the plan as it is.
        """
        # Points first, because they share the rows that are read. Clients fill the rest of the cache.
        client_bytes = max(1, client_bytes)
        points = max(1, min(load.points, budget // client_bytes))
        clients = max(1, budget // (client_bytes * points))
        return ExecutionPlan(cls.name, min(load.clients, chunk or clients), points, rest)

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
            down: the broadcasts, with leading axes.
            pipeline: receives the uploads.
            sent: client -> sizes of its uploads for each point, filled here.
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
        """Train clients as ``fit_all``, ``width`` clients at once."""
        batch = self.batch
        first = self.batch.points[0]
        for start in range(0, len(order), width):
            # One ``fit`` for the chunk returns states and uploads with the leading axes (M,) or (G, M).
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

        On a CPU a sum would first copy large uploads. Empty uploads are added one by one, because the policy may reject
        each of them.
        """
        size = sum(t.nbytes for t in up.values())
        device = self.batch.points[0].env.device.type
        fast = device != "cpu" or size <= SMALL_HEAD * clients
        return size > 0 and fast

    def pool_chunk(
        self,
        chunk: Sequence[int],
        up: Tree,
        pipeline: UploadPipeline,
        each: Mapping[str, list[Tensor]] | None = None,
    ) -> None:
        """Pool the uploads of a chunk: one sum over its clients for summed tensors, client by client for stacked ones.

        ``each`` has further tensors to stack: name -> one tensor per client, with an axis of points of length 1 or
        more.
        """
        stacked = {}
        # The factors of the clients depend only on the rule of pooling, so they are computed once for each rule.
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
        # A plain policy has validated the whole chunk; any other policy validates each upload separately.
        validated = self.batch.points[0].trust.plain
        for j, c in enumerate(chunk):
            upload = self.batch.of_client(stacked, j)
            upload |= {n: self.batch.less_points(parts[j]) for n, parts in (each or {}).items()}
            pipeline.add(upload, c, validated=validated)

    def note_sent(
        self,
        chunk: Sequence[int],
        up: Tree,
        size: int,
        sent: dict[int, Sent],
        further: Tree | None = None,
    ) -> None:
        """Add the sizes of a chunk's uploads to ``sent``.

        The upload of a client is its part of ``up`` and all tensors of ``further``, which have no client axis.
        ``size`` is the bytes of a scalar.
        """
        # If every scalar counts, all clients of the chunk send as many scalars as its first client.
        alike = self.batch.points[0].method.sent is numel
        for j, c in enumerate(chunk):
            if alike and j:
                sent[c] = sent[chunk[0]]
                continue
            upload = self.batch.of_client(up, j)
            if further is not None:
                upload |= further
            sent[c] = []
            for g, point in enumerate(self.batch.points):
                scalars = point.method.sent(self.batch.of_point(upload, g), point.server_ctx())
                sent[c].append((scalars, size))


def fits_cache(load: Load) -> int:
    """Number of clients whose parameters fit the cache together; on a GPU, number of clients that share one launch."""
    # Weights, gradient, momentum and output of one client.
    client = max(1, 4 * load.head_bytes)
    if load.device != "cpu":
        return max(1, GPU_SET // client)
    return max(1, WORKING_SET // client, min(FEW, LARGE_SET // client))


def points_together(method: Method, load: Load) -> Load:
    """The load of the points that can be one batch; only methods that train in many rounds are batched over points.

    Closed forms, for example, read each hyperparameter as one number, not as one number per point.
    """
    trains_in_rounds = method.gradient and not method.one_shot
    if method.central or not trains_in_rounds:
        return replace(load, points=1)
    return load
