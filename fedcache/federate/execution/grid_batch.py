"""Points of a grid that run together, and the bookkeeping that every execution with a client axis needs.

A grid point is a separate run (``RunState``) with its server, states, traffic and records. Points differ only in
floats, so they sample the same clients and draw the same numbers. One ``fit`` trains a chunk of clients of all points,
with the leading axes (G, M), or (M,) for a single point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedcache.errors import FedcacheError
from fedcache.federate.engine.client_data import Data
from fedcache.federate.engine.context import POOLED, Ctx, LruCache, SameObject
from fedcache.federate.engine.hyperparameters import Hp
from fedcache.federate.engine.method import numel
from fedcache.federate.engine.outcome import RoundTraffic
from fedcache.federate.engine.run_state import RunState
from fedcache.federate.execution.gram_matrices import GramMatrices
from fedcache.federate.execution.gram_states import Chunk
from fedcache.federate.execution.memory_estimate import ExecutionPlan
from fedcache.federate.trust.pipeline import UploadPipeline
from fedcache.federate.trust.update_validation import all_bounded, is_bounded
from fedcache.heads.linear import Tree

Sent = list[tuple[int, int]]
"""(number of scalars, bytes of one scalar) of each client's upload."""


class GridCache:
    """Results that runs on the same features share.

    They are features in the dtype of the computation, Gram matrices of clients, pooled uploads of one-shot methods
    without gradients, and a cache of rows and draws.
    """

    def __init__(self) -> None:
        self.memo = LruCache()
        self._cast: dict[tuple[SameObject, torch.dtype], Data] = {}
        self._grams: dict[tuple[Any, ...], GramMatrices] = {}
        self._pooled = LruCache(POOLED)  # limited by the number of uploads: each counts as one byte

    def cast(self, data: Data, dtype: torch.dtype) -> Data:
        """The data with features of that dtype; images stay bytes."""
        if data.x.dtype == dtype or data.image is not None:
            return data
        key = (SameObject(data), dtype)
        if key not in self._cast:
            self._cast[key] = replace(data, x=data.x.to(dtype))
        return self._cast[key]

    def grams(self, job: RunState) -> GramMatrices:
        """The Gram matrices of the clients that are computed in coordinates."""
        # For a client whose rows are more than half the number of features, the Gram matrix costs more than it saves.
        width = job.data.x.shape[2]
        rows = {}
        for c in job.eligible.tolist():
            train = job.train_rows(c)
            if 2 * len(train) <= width:
                rows[c] = train
        of_clients = [(c, r.tobytes()) for c, r in sorted(rows.items())]
        key = (SameObject(job.data), *of_clients)
        if key not in self._grams:
            self._grams[key] = GramMatrices(job.data.x, rows)
        return self._grams[key]

    def pooled(
        self, job: RunState, ids: Sequence[int], make: Callable[[], tuple[Tree, Sent]]
    ) -> tuple[Tree, Sent]:
        """The pooled upload of a one-shot run, computed by ``make`` unless another run has pooled the same uploads.

        Two runs pool the same uploads if everything that ``fit`` reads is equal. For an ``additive`` method only the
        rows of all clients together must be equal; then sums may differ from those of ``make`` by rounding.

        Returns:
            the pooled upload, which must not be changed, and the sizes of the clients' uploads.
        """
        method = job.method
        hp = job.hp
        read = {h.name for h in method.hparams if h.fit}
        settings = [(name, value) for name, value in sorted(hp.items()) if name in read]
        same = (SameObject(job.data), method.name, *settings)
        rows = [job.train_rows(c) for c in ids]
        key: tuple[Any, ...]
        if method.additive(hp) and method.sent is numel:
            key = (*same, np.sort(np.concatenate(rows)).tobytes())
        else:
            # Without additivity the upload depends on these clients in this order, and on their draws.
            names = [job.training_clients[c].name for c in ids]
            of_clients = zip(names, [r.tobytes() for r in rows], strict=True)
            key = (*same, job.seed, *of_clients)
        pooled, sent = self._pooled.get(key, make, lambda _: 1)
        if len(sent) != len(ids):  # cached from other clients; every client sends the same amount
            sent = [sent[0]] * len(ids)
        return pooled, sent


@dataclass
class GridBatch:
    """Points that are computed together."""

    points: Sequence[RunState]  # one point is a single run
    plan: ExecutionPlan  # how they are computed
    participation: int | float | None = None  # clients per round, as in ``RunState.sample``
    cache: GridCache | None = None  # results of other points; None for a single run
    # Number of a point -> the error that ended it. Its clients are still computed, but their results are not used.
    failed: dict[int, FedcacheError] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.axes = min(2, len(self.points))
        self.hp = stack_hp([point.hp for point in self.points], self.points[0])

    def by_rows(self, ids: Sequence[int]) -> list[int]:
        """Clients by falling rows: little is padded, and in a chunk the clients without further batches come last."""
        return sorted(ids, key=lambda c: (-self.rows_of(c), c))

    def rows_of(self, client: int) -> int:
        """Training rows of a client."""
        return len(self.points[0].training_clients[client].train)

    def ctx(self, order: Sequence[int]) -> Ctx:
        """The context of a chunk of all points."""
        ctx = self.points[0].ctx(order, self.axes)
        if self.axes == 1:
            return ctx
        return replace(ctx, lead=(len(self.points), len(order)), hp=self.hp)

    def broadcasts(self, downs: Sequence[Tree]) -> Tree:
        """The broadcasts of the servers as one tree, with a client axis of length 1: clients of a point share it."""
        down = downs[0]
        if self.axes == 2:
            down = stacked_trees(downs)
        # [1, ..] or [G, 1, ..]: the axis of clients is broadcast, never copied.
        return {k: t.unsqueeze(self.axes - 1) for k, t in down.items()}

    def states(self, order: Sequence[int], down: Tree) -> Tree:
        """The states of the clients of a chunk, stacked; the states of new clients are made first."""
        known = self.points[0].states
        if self.axes == 1:
            held = known.chunk(order)
            if held is not None:
                return held
        entered = self.enter(down, [c for c in order if c not in known])
        trees = []
        for point, new in zip(self.points, entered, strict=True):
            trees.append([new.get(c) or point.states.get(c, {}) for c in order])
        return self.stacked(trees)

    def stacked(self, trees: Sequence[Sequence[Tree]]) -> Tree:
        """[point][client] trees as one."""
        points = [pad_stack(of_point) for of_point in trees]
        if self.axes == 1:
            return points[0]
        return stacked_trees(points)

    def enter(self, down: Tree, new: Sequence[int]) -> list[dict[int, Tree]]:
        """The first states of clients that take part for the first time, per point; ``new`` is sorted by falling rows.

        The tensors are views of one tensor of all these clients.
        """
        first = self.points[0]
        state = {}
        if new:
            state = first.method.enter(down, first.rows(new, self.axes), self.ctx(new))
        if not state:
            return [{} for _ in self.points]
        # A tensor whose axis of points has length 1 is equal for all points, so the others share it with the first.
        differing = {k: t for k, t in state.items() if t.shape[0] > 1}

        def of_clients(tree: Tree, g: int) -> dict[int, Tree]:
            mine = self.of_point(tree, g)
            return {c: split(mine, j, self.rows_of(c)) for j, c in enumerate(new)}

        shared = of_clients(state, 0)
        made = [shared]
        for g in range(1, len(self.points)):
            trees = of_clients(differing, g)
            made.append({c: {**shared[c], **tree} for c, tree in trees.items()})
        return made

    def store(self, order: Sequence[int], state: Tree, *, whole: bool = False) -> None:
        """Give every client of a chunk its own part of the states that ``fit`` returned.

        A chunk that is the ``whole`` round is kept stacked, because the next round may have the same clients.
        """
        if not state:
            return
        if whole and self.axes == 1:
            each = [split(state, j, self.rows_of(c)) for j, c in enumerate(order)]
            self.points[0].states.hold(Chunk(tuple(order), state, each))
            return
        for g, point in enumerate(self.points):
            mine = self.of_point(state, g)
            for j, c in enumerate(order):
                point.states.write(c, split(mine, j, self.rows_of(c)))

    def less_points(self, t: Tensor) -> Tensor:
        """A tensor [G, ..] in the form of pooled uploads: without the axis of points if there is one point."""
        if self.axes == 2:
            return t
        return t[0]

    def of_point(self, tree: Tree, g: int) -> Tree:
        """The tensors of one point, with their client axis."""
        if self.axes == 1:
            return tree
        return {k: own_part(t, 0, g) for k, t in tree.items()}

    def of_client(self, tree: Tree, j: int) -> Tree:
        """The tensors of the client at position ``j`` of a chunk, with the axis of points if there is one."""
        axis = self.axes - 1
        made = {k: own_part(t, axis, j) for k, t in tree.items()}
        if self.axes == 2:
            G = len(self.points)
            made = {k: t.expand(G, *t.shape[1:]) for k, t in made.items()}
        return made

    def weighted_sum(self, t: Tensor, weights: Sequence[float]) -> Tensor:
        """The sum over the clients of a chunk, each times its weight, in float64; with the axis of points."""
        axis = self.axes - 1
        # One float64 product of [.., M] with the weights, for any number of other axes.
        w = torch.tensor(weights, dtype=torch.float64, device=t.device)
        full = t.expand(*t.shape[:axis], len(weights), *t.shape[axis + 1 :])
        clients_last = full.double().movedim(axis, -1)
        total = (clients_last @ w.unsqueeze(-1)).squeeze(-1)
        if self.axes == 2:
            return total.expand(len(self.points), *total.shape[1:])
        return total

    def accepts(
        self,
        up: Tree,
        state: Tree,
        order: Sequence[int],
        pipeline: UploadPipeline,
        sent: dict[int, Sent],
        coordinates: Mapping[str, tuple[int, ...]] | None = None,
    ) -> bool:
        """Validate the results of ``fit`` for a chunk of clients.

        Raises FederatedRunError for a malformed upload, unless the policy rejects it. A number that is not finite ends
        only its point.

        Args:
            up: the uploads.
            state: the clients' new states; uploads and states may have the same names with different tensors.
            order: the clients.
            pipeline: of the round.
            sent: client -> sizes of its uploads, filled here for uploads that are rejected.
            coordinates: as in ``UploadPipeline.accepts_batch``.

        Returns:
            False if the uploads of all these clients are rejected.
        """
        # Uploads are validated first: a rejected upload is no error of its point.
        accepted = pipeline.accepts_batch(up, order, self.ctx(order).lead, coordinates)
        if accepted:
            self.check_finite(up, order)
        else:
            # Uploads are rejected only in a batch of one point (``run_points``), so each client has one size.
            scalars, size = self.points[0].upload_size(up)
            for c in order:
                sent[c] = [(scalars // len(order), size)]
        self.check_finite(state, order)
        return accepted

    def fail(self, error: FedcacheError) -> list[RoundTraffic | None]:
        """End every point that has not ended yet."""
        for g in range(len(self.points)):
            self.failed.setdefault(g, error)
        return [None] * len(self.points)

    def check_finite(self, tree: Tree, order: Sequence[int]) -> None:
        """End every point with a result that is not finite."""
        if self.points[0].trust.on_bad == "reject" or all_bounded(tree):
            return
        # Only tensors with a number that is too large or not finite are checked point by point; their clients are on
        # one leading axis (1).
        bad = {n: t for n, t in tree.items() if t.is_floating_point() and not is_bounded(t)}
        for g, point in enumerate(self.points):
            try:
                point.check_finite(self.of_point(bad, g), order, 1)
            except FedcacheError as error:
                self.failed.setdefault(g, error)

    def finish(
        self,
        ids: Sequence[int],
        downs: Sequence[Tree],
        pipeline: UploadPipeline,
        sent: dict[int, Sent],
    ) -> list[RoundTraffic | None]:
        """Let every server step with its pooled uploads. Returns the same as ``Executor.one_round``."""
        try:
            pooled = self.points[0].pooled(pipeline, ids)
        except FedcacheError as error:
            return self.fail(error)
        traffics: list[RoundTraffic | None] = []
        for g, point in enumerate(self.points):
            traffics.append(None)
            if g in self.failed:
                continue
            mine = dict(pooled)
            if self.axes == 2:
                for name, t in pooled.items():
                    # Stacked uploads have the clients before the points: [M, G, ..].
                    axis = int(pipeline.rule(name) == "stack")
                    mine[name] = t.select(axis, g)
            sizes = [sent[c][g] for c in ids]
            try:
                traffics[g] = point.finish(ids, downs[g], mine, sizes)
            except FedcacheError as error:
                self.failed[g] = error
        return traffics


def stack_hp(hps: Sequence[Hp], point: RunState) -> Hp:
    """The hyperparameters of some points, where a float in which they differ is a tensor [G, 1].

    ``point`` is any of them; it determines dtype and device.
    """
    made = dict(hps[0])
    for name in made:
        values = [hp[name] for hp in hps]
        if any(v != values[0] for v in values):
            column = [[v] for v in values]
            made[name] = torch.tensor(column, dtype=point.env.dtype, device=point.env.device)
    return made


def stacked_trees(trees: Sequence[Tree]) -> Tree:
    """Trees of the same names as one tree with a new first axis."""
    return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}


def own_part(t: Tensor, axis: int, position: int) -> Tensor:
    """The part at a position of an axis, as a view; if the axis has length 1, all positions share the tensor."""
    return t.select(axis, min(position, t.shape[axis] - 1))


def pad_stack(trees: Sequence[Tree]) -> Tree:
    """One tree per client, without leading axes -> one tree with a client axis; ``rows/`` tensors are padded."""
    out = {}
    for name in trees[0]:
        parts = [tree[name] for tree in trees]
        if name.startswith("rows/"):
            out[name] = pad_sequence(parts, batch_first=True)
        else:
            out[name] = torch.stack(parts)
    return out


def split(tree: Tree, position: int, rows: int) -> Tree:
    """The tree of the client at ``position`` of the axis (M,), with ``rows/`` tensors cut to its rows; views."""
    alone = {}
    for name, t in tree.items():
        part = own_part(t, 0, position)
        if name.startswith("rows/"):
            part = part[:rows]
        alone[name] = part
    return alone
