"""SGD on clients with few rows, in coordinates on their Gram matrices; exact.

The first linear map of a head, W [U, D], is trained on a client's n rows X alone, so it never leaves the span of those
rows and of the weights it began with: W = c B + A' X. A step then costs n instead of D numbers an output, with the Gram
matrix X X' computed once for the whole run (``heads.gram`` has the algebra).

A method's ``fit`` is unchanged: it gets coordinates under the names of the first map's tensors, and batches that are
positions of rows; the coordinates that it returns are turned back into maps. The broadcast and the average are one
matrix product each, and the points of a grid are columns of the same products.

There are two cases. If the server sends the map (fedavg), its tensors are new bases in every round, and the pooled
upload is turned back by one product. If the map stays with the client (fedpcl), coordinates over the bases that the
client entered with are kept from round to round; ``gram_states.ClientStates`` turns them back when they are read.

Shapes: n rows of a client, D features, U outputs of the map, M clients of a chunk, G points of a grid, k bases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from fedcache.federate.engine.client_data import ClientData
from fedcache.federate.engine.context import SameObject
from fedcache.federate.engine.hyperparameters import Hp
from fedcache.federate.engine.method import Method
from fedcache.federate.engine.outcome import Snapshot, itemsize
from fedcache.federate.execution.executor import Batched, points_together
from fedcache.federate.execution.gram_matrices import GramMatrices
from fedcache.federate.execution.gram_states import KeptCoordinates, TensorBlocks, is_first, restore
from fedcache.federate.execution.grid_batch import GridBatch, GridCache, Sent, split
from fedcache.federate.execution.memory_estimate import (
    GPU_SET,
    GRID_SET,
    WORKING_SET,
    ExecutionPlan,
    Load,
    free_memory,
)
from fedcache.federate.trust.pipeline import UploadPipeline
from fedcache.heads.gram import GramBasis, GramBatch, inner, outer, zeros
from fedcache.heads.linear import Tree
from fedcache.process import return_freed_memory

GRAM_SHARE = 0.25
"""Share of the memory that is free when a run starts, which Gram matrices and packed rows may take."""

TAKE_PART = 4
"""At least one client in 4 must take part in some round; otherwise computing the matrices of all does not pay."""

GRAM_BYTES = 1 << 30
"""Most bytes of Gram matrices and packed rows, however much memory is free: they grow with the clients."""


@dataclass(frozen=True)
class GramClientData(ClientData):
    """Clients whose batches are positions."""

    basis: GramBasis | None = None

    def take(self, i: Tensor, view: int | Tensor = 0) -> Tensor:
        """A ``GramBatch`` instead of features; one view is stored."""
        return cast(Tensor, GramBatch(cast(GramBasis, self.basis), i))

    def fits(self, rows: int, budget: int) -> bool:
        """A step takes its own positions: there is nothing to gather."""
        return False

    def narrow(self, count: int) -> ClientData:
        """The first ``count`` clients."""
        if self.rows.dim() == 1 or count == len(self.n):
            return self
        made = super().narrow(count)
        return replace(cast(GramClientData, made), basis=cast(GramBasis, self.basis).narrow(count))


@dataclass
class ChunkBases:
    """The bases of one chunk of clients, and how tensors of it are written in coordinates."""

    grams: GramMatrices  # of the run
    clients: Sequence[int]  # of the chunk, by falling rows
    axes: int  # 1 (M,) or 2 (G, M)
    # each [G or 1, U, D] that all clients share, or [M, G or 1, U, D]
    bases: list[Tensor] = field(default_factory=list)
    seen: list[Tensor] = field(default_factory=list)  # X B_j' of each, [M, n, U, G or 1]

    def basis(self) -> GramBasis:
        """For ``GramBatch``."""
        # Bases that points share have one product for all points, which is only expanded.
        G = max(s.shape[-1] for s in self.seen)
        full = [s.expand(*s.shape[:-1], G) for s in self.seen]
        return GramBasis(self.grams.stacked(self.clients), torch.stack(full, 1), self.axes)

    def add(self, base: Tensor) -> int:
        """Take a tensor as a further basis; its number."""
        self.bases.append(base)
        if base.dim() == 3:
            self.seen.append(self.grams.forward(self.clients, base))
        else:
            # Each client has a base of its own: a product of each, padded to the longest client.
            own = [self.grams.forward([c], b)[0] for c, b in zip(self.clients, base, strict=True)]
            longest, U, G = own[0].shape
            out = zeros(own[0], len(own), longest, U, G)
            for to, part in zip(out, own, strict=True):
                to[: len(part)] = part
            self.seen.append(out)
        return len(self.bases) - 1

    def unit(self, number: int, bases: int, points: int) -> Tensor:
        """The coordinates of basis ``number`` itself: c = 1, A = 0."""
        M, n, U = self.seen[0].shape[:3]
        # k rows of factors c_j, then n rows of A: basis ``number`` has factor 1 and nothing else.
        out = zeros(self.seen[0], M, bases + n, U, points)
        out[:, number] = 1.0
        return outer(out, self.axes)

    def pooled(self, W: Tensor, weights: Sequence[float]) -> Tensor:
        """sum_m w_m W_m [G, U, D] of coordinates [.., k + n, U]."""
        k = len(self.bases)
        full = inner(W, self.axes)
        # sum_m w_m (A_m' X_m + sum_j c_mj B_j): rows first, then each base times the weighted sum of its factors.
        total = self.grams.back(self.clients, full[:, k:], weights)
        w = full.new_tensor(weights)
        for j, base in enumerate(self.bases):
            c = full[:, j]  # [M, U, G]
            if base.dim() == 3:
                factor = (w.view(-1, 1, 1) * c).sum(0).mT  # [G, U]
                total = total + factor.unsqueeze(-1) * base
            else:
                total = total + torch.einsum(
                    "m,mog,mgod->god", w, c, base.expand(-1, c.shape[-1], -1, -1)
                )
        return total

    def each(self, W: Tensor) -> list[Tensor]:
        """W [G, U, D] of every client."""
        out = []
        for m, client in enumerate(self.clients):
            # The same sum as ``pooled`` of this client alone, with its own part of the bases.
            bases = []
            for base in self.bases:
                if base.dim() == 4:  # one of each client
                    base = base[m]
                bases.append(base)
            alone = ChunkBases(self.grams, [client], 2, bases)
            n = self.grams.n[client] + len(self.bases)
            own = inner(W, self.axes)[m : m + 1, :n]
            out.append(alone.pooled(outer(own, 2), [1.0]))
        return out


class Gram(Batched):
    """Clients with few rows in coordinates; those with many are batched as elsewhere."""

    name = "gram"

    def __init__(self, batch: GridBatch, snapshots: Sequence[Snapshot | None] = ()) -> None:
        super().__init__(batch, snapshots)
        self.grams = (batch.cache or GridCache()).grams(batch.points[0])
        for point, snapshot in zip(batch.points, snapshots, strict=False):
            restore(point.states, snapshot, self.grams)
        self._begun = False  # whether memory of the clients' first maps was returned to the system

    @classmethod
    def serves(cls, method: Method, hp: Hp, load: Load) -> str:
        """SGD on one stored view of a client's own rows, for methods that combine such maps linearly."""
        if load.mixed:
            return "its clients have different settings"
        if cls.name not in method.executions:
            return "it has no linear map on features that SGD trains on a client's own rows alone"
        if hp.get("opt") == "adam":
            return "opt=adam: its second moment is not the same in other coordinates"
        if hp.get("noise_on") == "features":
            return "noise_on=features: noisy rows are outside the span of the client's rows"
        if "aug" in (hp.get("train_view"), hp.get("proto_view")):
            return "training uses stored augmentations, but this mode has one view per row"
        if load.views > 1:
            return f"the store has {load.views} views per row"
        return ""

    @classmethod
    def cost(cls, method: Method, hp: Hp, load: Load) -> float:
        """Low if most rows belong to clients with few rows, and their Gram matrices fit into memory."""
        if not method.gradient or method.central:
            return 4.0
        if load.device != "cpu" and load.points == 1:
            return 2.0  # on a GPU full products cost no more than coordinates, unless points of a grid share them
        # The points of a grid share the rows that are read, so every client counts there.
        epochs = int(cast(int, hp.get("epochs") or 1))
        covered = int(load.dual_rows().sum())
        if load.points == 1:
            covered = load.worth(epochs)
        pays = 2 * covered >= int(load.rows.sum()) > 0
        # Matrices are computed for all clients, including those that never take part.
        many_take_part = TAKE_PART * load.participants >= len(load.rows)
        # Coordinates must fit into memory; other executions can keep states in a file.
        free = free_memory(load.device)
        grams_fit = load.gram_bytes() <= min(GRAM_BYTES, GRAM_SHARE * free)
        if pays and many_take_part and grams_fit and load.kept_bytes() <= free:
            return 0.25
        return 4.0

    @classmethod
    def plan(cls, method: Method, load: Load, chunk: int | None) -> ExecutionPlan:
        """As many clients and points as fit the cache; ``rest`` is the chunk of those with many rows."""
        rest = Batched.plan(method, load, chunk).chunk
        load = points_together(method, load)
        # The working set of one client: its coordinates, four times as weights are elsewhere.
        longest = int(load.dual_rows().max(initial=1))
        # coordinates, and a batch against everything that was sent (fedpcl: all clients' prototypes)
        against = load.batch * load.broadcast_bytes // max(1, load.outputs)
        client = 4 * ((longest + 2) * max(1, load.outputs) * load.itemsize + against)
        budget = GRID_SET
        if load.points == 1:
            budget = WORKING_SET
        if load.device != "cpu":
            budget = GPU_SET
        points = max(1, min(load.points, budget // client))
        clients = max(1, budget // (client * points))
        return ExecutionPlan(cls.name, min(load.clients, chunk or clients), points, rest)

    def fit_all(
        self, order: Sequence[int], down: Tree, pipeline: UploadPipeline, sent: dict[int, Sent]
    ) -> None:
        """Those with many rows first, batched; then those with few, in coordinates."""
        few = [c for c in order if c in self.grams.n]
        many = [c for c in order if c not in self.grams.n]
        plan = self.batch.plan
        self.fit_chunks(many, plan.rest, down, pipeline, sent)
        for start in range(0, len(few), plan.chunk):
            chunk = few[start : start + plan.chunk]
            self._fit_in_coordinates(chunk, down, pipeline, sent)
        if not self._begun and self.batch.points[0].states.kept:
            # Most clients enter in the first round. Their full maps are between tensors that stay.
            return_freed_memory()
            self._begun = True

    def _fit_in_coordinates(
        self, order: Sequence[int], down: Tree, pipeline: UploadPipeline, sent: dict[int, Sent]
    ) -> None:
        batch = self.batch
        first = self.batch.points[0]
        first.env.watch()
        frame = ChunkBases(self.grams, order, batch.axes)
        ctx = batch.ctx(order)
        # 1. Write the weights in coordinates.
        travels = [n for n in down if is_first(n)]
        if travels:
            state, down = self._write_broadcast(frame, order, down, travels)
        else:
            state = self._resume_coordinates(frame, order, down)
        # 2. Train: the method sees tensors of its own names, and rows that it can only multiply with them.
        rows = first.rows(order, batch.axes)
        data = GramClientData(rows.x, rows.y, rows.rows, rows.n, basis=frame.basis())
        state, up = first.method.fit(down, state, data, ctx)
        # 3. Validate the uploads, pool and count them; maps have the shape of their coordinates.
        shape = (len(frame.bases) + rows.rows.shape[-1], frame.seen[0].shape[2])
        coordinates = {n: shape for n in pipeline.expected if is_first(n)}
        if batch.accepts(up, state, order, pipeline, sent, coordinates):
            self._pool(frame, order, up, pipeline, sent)
        # 4. Keep what stays with the clients: a map that travels as itself, one that stays as coordinates.
        if travels:
            maps = {n: self._turn_back(frame, t) for n, t in state.items() if is_first(n)}
            batch.store(order, {**state, **maps})
        else:
            self._keep(order, state)

    def _pool(
        self,
        frame: ChunkBases,
        order: Sequence[int],
        up: Tree,
        pipeline: UploadPipeline,
        sent: dict[int, Sent],
    ) -> None:
        """Add the uploads of a chunk to the pool and note what each client sends."""
        batch = self.batch
        maps = {n: t for n, t in up.items() if is_first(n)}
        rest = {n: t for n, t in up.items() if n not in maps}
        # Maps that are averaged: one product turns their weighted sum back, and no client's map is ever made.
        # Maps that are stacked: every client's own.
        each: dict[str, list[Tensor]] = {}
        for name, W in maps.items():
            if pipeline.rule(name) == "stack":
                each[name] = frame.each(W)
            else:
                total = frame.pooled(W, pipeline.factors(name, order))
                pipeline.add_sum(name, batch.less_points(total), W.dtype)
        # All other tensors are as in the batched execution, summed over the chunk at once.
        self.pool_chunk(order, rest, pipeline, each)
        # Traffic counts full maps, which are never made here: tensors without memory have their shape.
        core = (frame.seen[0].shape[2], self.grams.packed.shape[1])
        like = {
            n: t.new_empty((*t.shape[: batch.axes], *core), device="meta") for n, t in maps.items()
        }
        # Without the axis of clients, which is the last of the leading axes.
        shown = {n: t.select(batch.axes - 1, 0) for n, t in like.items()}
        self.note_sent(order, rest, itemsize({**rest, **like}), sent, shown)

    def _write_broadcast(
        self, frame: ChunkBases, order: Sequence[int], down: Tree, travels: Sequence[str]
    ) -> tuple[Tree, Tree]:
        """States and broadcast with their maps in coordinates, where the map travels.

        Every one of these maps is a basis of this round, so its own coordinates are a unit vector.
        """
        batch = self.batch
        state = batch.states(order, down)
        number = {}
        for n in travels:
            # [G, U, D]: one axis of length 1, of points or of clients, becomes the axis of points
            number["down", n] = frame.add(down[n].reshape(-1, *down[n].shape[-2:]))
        # Sorted, because a snapshot has names in another order, which would change the order of sums.
        for n, t in sorted(state.items()):
            if is_first(n):
                full = t
                if batch.axes == 1:
                    full = t.unsqueeze(0)
                full = full.movedim(1, 0)  # [M, G, U, D]
                number["state", n] = frame.add(full.expand(len(order), -1, -1, -1))
        units = {key: frame.unit(j, len(number), len(batch.points)) for key, j in number.items()}
        held = {n: units.get(("state", n), t) for n, t in state.items()}
        return held, {n: units.get(("down", n), t) for n, t in down.items()}

    def _resume_coordinates(self, frame: ChunkBases, order: Sequence[int], down: Tree) -> Tree:
        """States whose maps stay with the clients: coordinates over the bases that each client entered with."""
        points = self.batch.points
        self._begin_new(order, down)
        kept = [[point.states.kept[c] for c in order] for point in points]
        k = len(kept[0][0].bases)
        longest = max(self.grams.n[c] for c in order)
        for j in range(k):
            # Points that share a basis share its products with the rows, which then have no axis of points.
            common = all(
                at.bases[j] is alone.bases[j]
                for of_point in kept
                for at, alone in zip(of_point, kept[0], strict=True)
            )
            several = kept
            if common:
                several = kept[:1]
            seen = [[at.seen[j] for at in of_point] for of_point in several]
            frame.bases.append(torch.empty(0))  # never read: nothing of these is turned back here
            frame.seen.append(_padded(seen, longest))
        state = {}
        for n in kept[0][0].coords:
            coords = [[at.coords[n] for at in of_point] for of_point in kept]
            state[n] = outer(_padded(coords, k + longest), self.batch.axes)
        rest = [[point.states.rest(c) for c in order] for point in points]
        return {**self.batch.stacked(rest), **state}

    def _begin_new(self, order: Sequence[int], down: Tree) -> None:
        """Write the maps of clients that have no coordinates yet: their maps become bases.

        Bases are shared in memory by points and clients that begin with equal weights.
        """
        points = self.batch.points
        entered = self.batch.enter(down, [c for c in order if c not in points[0].states])
        for c in order:
            # maps that a point began with -> their coordinates, for other points with the same maps
            twins: dict[tuple[SameObject, ...], KeptCoordinates] = {}
            for g, point in enumerate(points):
                if c in point.states.kept:
                    continue
                if c in entered[g]:
                    tree = entered[g][c]
                else:
                    tree = point.states[c]
                maps = tuple(SameObject(t) for n, t in sorted(tree.items()) if is_first(n))
                before = point.states.kept.get(order[0])
                others, kept = _begin(
                    self.grams, c, tree, twins.get(maps), before, point.states.blocks
                )
                twins[maps] = kept
                point.states.keep(c, others, kept, self.grams)

    def _keep(self, order: Sequence[int], state: Tree) -> None:
        batch = self.batch
        maps = {n: inner(t, batch.axes) for n, t in state.items() if is_first(n)}
        rest = {n: t for n, t in state.items() if n not in maps}
        for g, point in enumerate(batch.points):
            for j, c in enumerate(order):
                # Padding up to the longest client of the chunk is cut off.
                R = len(point.states.kept[c].bases) + self.grams.n[c]
                coords = {n: t[j, :R, :, g] for n, t in maps.items()}
                point.states.write(c, split(batch.of_point(rest, g), j, batch.rows_of(c)), coords)

    def _turn_back(self, frame: ChunkBases, W: Tensor) -> Tensor:
        """[M, U, D] or [G, M, U, D] of coordinates."""
        parts = torch.stack(frame.each(W))
        if self.batch.axes == 1:
            return parts.squeeze(1)
        return parts.movedim(0, 1)


def _padded(parts: Sequence[Sequence[Tensor]], rows: int) -> Tensor:
    """[point][client] tensors [r, U] -> (M, rows, U, G), zero past each client's rows."""
    first = parts[0][0]
    out = zeros(first, len(parts[0]), rows, first.shape[1], len(parts))
    for g, of_point in enumerate(parts):
        for j, part in enumerate(of_point):
            out[j, : len(part), :, g] = part
    return out


def _begin(
    grams: GramMatrices,
    client: int,
    tree: Mapping[str, Tensor],
    twin: KeptCoordinates | None,
    before: KeptCoordinates | None,
    blocks: TensorBlocks,
) -> tuple[Tree, KeptCoordinates]:
    """A client's maps become bases, shared in memory with those that began with the same ones.

    Args:
        grams: of the run.
        client: its number.
        tree: what it holds.
        twin: the same client of a point that began with the same tensors.
        before: another client of this point.
        blocks: where bases and their products are kept.

    Returns:
        the tensors that are no map, and the maps as coordinates.
    """
    maps = {n: t for n, t in sorted(tree.items()) if is_first(n)}
    bases = []
    seen = []
    for j, t in enumerate(maps.values()):
        if twin is not None:
            bases.append(twin.bases[j])
            seen.append(twin.seen[j])
            continue
        # Clients that begin with equal weights have one base in memory; each has its own products with its rows.
        if before is not None and torch.equal(before.bases[j], t):
            bases.append(before.bases[j])
        else:
            bases.append(blocks.copy(t))
        seen.append(blocks.copy(grams.of(client) @ bases[-1].mT))
    k = len(maps)
    n = grams.n[client]
    # A map starts as itself: factor 1 of its own base, no rows yet.
    coords = {}
    for j, (name, t) in enumerate(maps.items()):
        coords[name] = t.new_zeros(k + n, t.shape[0])
        coords[name][j] = 1.0
    return {n: t for n, t in tree.items() if n not in maps}, KeptCoordinates(coords, bases, seen)
