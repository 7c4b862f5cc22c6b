"""SGD on clients with few rows, in coordinates on their Gram matrices; exact.

The first linear map of a head, W [U, D], is trained only on a client's n rows X. So it stays in the span of these rows
and of its initial weights: W = c B + A' X. A step then reads n instead of D numbers per output, with the Gram matrix
X X' computed once for the whole run (``heads.gram`` has the algebra).

A method's ``fit`` is unchanged. It gets coordinates under the names of the first map's tensors, and batches that are
positions of rows; the coordinates that it returns are converted to maps. The broadcast and the average are one matrix
product each, and the points of a grid are columns of the same products.

There are two cases. If the server sends the map (fedavg), its tensors are new bases in every round, and one product
converts the pooled upload. If the map stays with the client (fedpcl), coordinates over the bases with which the client
entered are kept from round to round; ``gram_states.ClientStates`` converts them when they are read.

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
    free_memory_on,
)
from fedcache.federate.trust.pipeline import UploadPipeline
from fedcache.heads.gram import GramBasis, GramBatch, inner, outer, zeros
from fedcache.heads.linear import Tree
from fedcache.process import return_freed_memory

GRAM_SHARE = 0.25
"""Limit for Gram matrices and packed rows, as a share of the memory that is free at the start of a run."""

TAKE_PART = 4
"""At least one client in 4 must take part in some round; otherwise the matrices of all clients take too long."""

GRAM_BYTES = 1 << 30
"""Limit in bytes for Gram matrices and packed rows on any machine, because they grow with the number of clients."""


@dataclass(frozen=True)
class GramClientData(ClientData):
    """Data of clients whose batches are positions of rows."""

    basis: GramBasis | None = None

    def take(self, i: Tensor, view: int | Tensor = 0) -> Tensor:
        """A ``GramBatch`` instead of features; ``view`` is not read, because only one view is stored."""
        return cast(Tensor, GramBatch(cast(GramBasis, self.basis), i))

    def fits(self, rows: int, budget: int) -> bool:
        """False: a step takes its own positions, so no features are gathered."""
        return False

    def narrow(self, count: int) -> ClientData:
        """The first ``count`` clients."""
        made = super().narrow(count)
        if made is self:
            return self
        basis = cast(GramBasis, self.basis).narrow(count)
        return replace(cast(GramClientData, made), basis=basis)


@dataclass
class ChunkBases:
    """The bases of one chunk of clients, and the conversion of its tensors to coordinates and back."""

    grams: GramMatrices  # of the run
    clients: Sequence[int]  # of the chunk, by falling rows
    axes: int  # 1 (M,) or 2 (G, M)
    # Each basis is [G or 1, U, D] if all clients share it, or [M, G or 1, U, D].
    bases: list[Tensor] = field(default_factory=list)
    seen: list[Tensor] = field(default_factory=list)  # X B_j' of each basis, [M, n, U, G or 1]

    def basis(self) -> GramBasis:
        """The basis of a ``GramBatch``."""
        # A basis that points share has one product, which is expanded to all points.
        G = max(s.shape[-1] for s in self.seen)
        full = [s.expand(*s.shape[:-1], G) for s in self.seen]
        return GramBasis(self.grams.stacked(self.clients), torch.stack(full, 1), self.axes)

    def add(self, base: Tensor) -> int:
        """Add a tensor as a further basis. Returns its number."""
        self.bases.append(base)
        if base.dim() == 3:
            seen = self.grams.forward(self.clients, base)
        else:
            # Each client has its own basis: one product for each client, padded to the longest client.
            pairs = zip(self.clients, base, strict=True)
            products = [self.grams.forward([c], b)[0] for c, b in pairs]
            longest, U, G = products[0].shape
            seen = zeros(products[0], len(products), longest, U, G)
            for to, part in zip(seen, products, strict=True):
                to[: len(part)] = part
        self.seen.append(seen)
        return len(self.bases) - 1

    def unit(self, number: int, bases: int, points: int) -> Tensor:
        """The coordinates of basis ``number`` itself: c = 1, A = 0."""
        M, n, U = self.seen[0].shape[:3]
        # k rows of factors c_j, then n rows of A: basis ``number`` has factor 1, all other numbers are 0.
        out = zeros(self.seen[0], M, bases + n, U, points)
        out[:, number] = 1.0
        return outer(out, self.axes)

    def pooled(self, W: Tensor, weights: Sequence[float]) -> Tensor:
        """sum_m w_m W_m [G, U, D] of coordinates [.., k + n, U]."""
        k = len(self.bases)
        full = inner(W, self.axes)
        # sum_m w_m (A_m' X_m + sum_j c_mj B_j): rows first, then each basis times the weighted sum of its factors.
        total = self.grams.back(self.clients, full[:, k:], weights)
        w = full.new_tensor(weights)
        for j, base in enumerate(self.bases):
            c = full[:, j]  # [M, U, G]
            if base.dim() == 3:
                factor = (w.view(-1, 1, 1) * c).sum(0).mT  # [G, U]
                total = total + factor.unsqueeze(-1) * base
            else:
                of_points = base.expand(-1, c.shape[-1], -1, -1)
                total = total + torch.einsum("m,mog,mgod->god", w, c, of_points)
        return total

    def each(self, W: Tensor) -> list[Tensor]:
        """W [G, U, D] of every client."""
        out = []
        for m, client in enumerate(self.clients):
            # The same sum as ``pooled``, with this client only and its own part of the bases.
            bases = []
            for base in self.bases:
                if base.dim() == 4:  # each client has its own basis
                    base = base[m]
                bases.append(base)
            # Two axes in any case, so that ``pooled`` returns an axis of points. Padding of the coordinates is cut off.
            alone = ChunkBases(self.grams, [client], 2, bases)
            length = self.grams.n[client] + len(self.bases)
            coords = inner(W, self.axes)[m : m + 1, :length]
            out.append(alone.pooled(outer(coords, 2), [1.0]))
        return out


class Gram(Batched):
    """Execution of clients with few rows in coordinates; clients with many rows run as in ``Batched``."""

    name = "gram"

    def __init__(self, batch: GridBatch, snapshots: Sequence[Snapshot | None] = ()) -> None:
        super().__init__(batch, snapshots)
        self.grams = (batch.cache or GridCache()).grams(batch.points[0])
        # Not strict, because there may be no snapshots.
        for point, snapshot in zip(batch.points, snapshots, strict=False):
            restore(point.states, snapshot, self.grams)
        # Whether memory of the clients' first maps was returned to the system.
        self._returned = False

    @classmethod
    def serves(cls, method: Method, hp: Hp, load: Load) -> str:
        """It serves methods that train maps by SGD on one view of a client's own rows and combine them linearly."""
        if load.mixed:
            return "its clients have different settings"
        if cls.name not in method.executions:
            return "this mode is only for clients that train a linear layer on features by SGD, on their own rows"
        if hp.get("opt") == "adam":
            return "opt=adam: the second moment of Adam depends on the basis of the features"
        if hp.get("noise_on") == "features":
            return "noise_on=features: noisy rows are outside the span of the client's rows"
        if "aug" in (hp.get("train_view"), hp.get("proto_view")):
            return (
                "training uses stored augmentations, but this mode supports only one view per row"
            )
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
        # The points of a grid share the rows that are read, so all clients with few rows count in a grid.
        if load.points == 1:
            epochs = int(cast(int, hp.get("epochs") or 1))
            covered = load.worth(epochs)
        else:
            covered = int(load.dual_rows().sum())
        # Coordinates pay if the clients for which they are faster have at least half of all rows.
        rows = int(load.rows.sum())
        pays = rows > 0 and 2 * covered >= rows
        # Matrices are computed for all clients, including those that never take part.
        many_take_part = TAKE_PART * load.participants >= len(load.rows)
        if not pays or not many_take_part:
            return 4.0
        # Coordinates must fit into memory; other executions can keep states in a file.
        free = free_memory_on(load.device)
        grams_fit = load.gram_bytes() <= min(GRAM_BYTES, GRAM_SHARE * free)
        if grams_fit and load.kept_bytes() <= free:
            return 0.25
        return 4.0

    @classmethod
    def plan(cls, method: Method, load: Load, chunk: int | None) -> ExecutionPlan:
        """As many clients and points as fit the cache; ``rest`` is the chunk of the clients with many rows."""
        rest = Batched.plan(method, load, chunk).chunk
        load = points_together(method, load)
        # Other executions count four copies of a client's weights. Here two tensors replace the weights: the
        # coordinates of the client's rows and of two bases, and the products of a batch with the broadcast (in fedpcl,
        # with the prototypes of all clients).
        longest = int(load.dual_rows().max(initial=1))
        outputs = max(1, load.outputs)
        coordinates = (longest + 2) * outputs * load.itemsize
        compared = load.batch * load.broadcast_bytes // outputs
        client = 4 * (coordinates + compared)
        budget = GRID_SET
        if load.points == 1:
            budget = WORKING_SET
        if load.device != "cpu":
            budget = GPU_SET
        return cls.fitting(load, budget, client, chunk, rest)

    def fit_all(
        self, order: Sequence[int], down: Tree, pipeline: UploadPipeline, sent: dict[int, Sent]
    ) -> None:
        """Train the clients with many rows first, batched; then those with few rows, in coordinates."""
        few = [c for c in order if c in self.grams.n]
        many = [c for c in order if c not in self.grams.n]
        plan = self.batch.plan
        self.fit_chunks(many, plan.rest, down, pipeline, sent)
        for start in range(0, len(few), plan.chunk):
            chunk = few[start : start + plan.chunk]
            self._fit_in_coordinates(chunk, down, pipeline, sent)
        if not self._returned and self.batch.points[0].states.kept:
            # Most clients enter in the first round. Their full maps, now freed, were allocated between tensors that
            # are kept, so the allocator does not return this memory by itself.
            return_freed_memory()
            self._returned = True

    def _fit_in_coordinates(
        self, order: Sequence[int], down: Tree, pipeline: UploadPipeline, sent: dict[int, Sent]
    ) -> None:
        batch = self.batch
        first = self.batch.points[0]
        first.env.watch()
        frame = ChunkBases(self.grams, order, batch.axes)
        ctx = batch.ctx(order)
        # 1. Write the weights in coordinates.
        sent_maps = [n for n in down if is_first(n)]
        if sent_maps:
            state, down = self._write_broadcast(frame, order, down, sent_maps)
        else:
            state = self._resume_coordinates(frame, order, down)
        # 2. Train: the method gets tensors under its own names, and rows that it can only multiply with them.
        rows = first.rows(order, batch.axes)
        data = GramClientData(rows.x, rows.y, rows.rows, rows.n, basis=frame.basis())
        state, up = first.method.fit(down, state, data, ctx)
        # 3. Validate the uploads, pool and count them; maps have the shape of their coordinates.
        shape = (len(frame.bases) + rows.rows.shape[-1], frame.seen[0].shape[2])
        coordinates = {n: shape for n in pipeline.expected if is_first(n)}
        if batch.accepts(up, state, order, pipeline, sent, coordinates):
            self._pool(frame, order, up, pipeline, sent)
        # 4. Keep the clients' states: full maps if the server sends maps, otherwise coordinates.
        if sent_maps:
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
        """Add the uploads of a chunk to the pool and count the scalars that each client sends."""
        batch = self.batch
        maps = {n: t for n, t in up.items() if is_first(n)}
        rest = {n: t for n, t in up.items() if n not in maps}
        # Averaged maps: one product converts their weighted sum, and no client's map is computed.
        # Stacked maps: every client's map is computed.
        each = {}
        for name, W in maps.items():
            if pipeline.rule(name) == "stack":
                each[name] = frame.each(W)
            else:
                total = frame.pooled(W, pipeline.factors(name, order))
                pipeline.add_sum(name, batch.less_points(total), W.dtype)
        # All other tensors are pooled as in the batched execution, summed over the chunk at once.
        self.pool_chunk(order, rest, pipeline, each)
        # Traffic counts full maps, which are not computed here: tensors without memory have their shape.
        core = (frame.seen[0].shape[2], self.grams.packed.shape[1])
        full = {}
        of_client = {}
        for n, t in maps.items():
            full[n] = t.new_empty((*t.shape[: batch.axes], *core), device="meta")
            # Without the axis of clients, which is the last of the leading axes.
            of_client[n] = full[n].select(batch.axes - 1, 0)
        self.note_sent(order, rest, itemsize({**rest, **full}), sent, of_client)

    def _write_broadcast(
        self, frame: ChunkBases, order: Sequence[int], down: Tree, sent_maps: Sequence[str]
    ) -> tuple[Tree, Tree]:
        """States and broadcast with their maps in coordinates, if the server sends the map.

        Each of these maps is a basis of this round, so the coordinates of a map are a unit vector.
        """
        batch = self.batch
        state = batch.states(order, down)
        basis_of = {}
        for n in sent_maps:
            # [G, 1, U, D] -> [G, U, D]; without an axis of points [1, U, D], where the client axis takes its place.
            base = down[n].reshape(-1, *down[n].shape[-2:])
            basis_of["down", n] = frame.add(base)
        # Sorted, because a snapshot has names in another order, which would change the order of sums.
        for n, t in sorted(state.items()):
            if is_first(n):
                full = t
                if batch.axes == 1:
                    full = t.unsqueeze(0)
                full = full.movedim(1, 0)  # [M, G, U, D]
                basis_of["state", n] = frame.add(full.expand(len(order), -1, -1, -1))
        units = {
            key: frame.unit(j, len(basis_of), len(batch.points)) for key, j in basis_of.items()
        }
        new_state = {n: units.get(("state", n), t) for n, t in state.items()}
        new_down = {n: units.get(("down", n), t) for n, t in down.items()}
        return new_state, new_down

    def _resume_coordinates(self, frame: ChunkBases, order: Sequence[int], down: Tree) -> Tree:
        """The states, if maps stay with the clients: coordinates over the bases with which each client entered."""
        points = self.batch.points
        self._begin_new(order, down)
        kept = [[point.states.kept[c] for c in order] for point in points]
        k = len(kept[0][0].bases)
        longest = max(self.grams.n[c] for c in order)
        for j in range(k):
            # Points that share a basis share its products with the rows, whose axis of points then has length 1.
            keys = {tuple(SameObject(client.bases[j]) for client in of_point) for of_point in kept}
            distinct = kept
            if len(keys) == 1:
                distinct = kept[:1]
            seen = [[client.seen[j] for client in of_point] for of_point in distinct]
            # A placeholder that is never read, because these maps are not converted here.
            frame.bases.append(torch.empty(0))
            frame.seen.append(_padded(seen, longest))
        state = {}
        for n in kept[0][0].coords:
            coords = [[client.coords[n] for client in of_point] for of_point in kept]
            state[n] = outer(_padded(coords, k + longest), self.batch.axes)
        rest = [[point.states.rest(c) for c in order] for point in points]
        return {**self.batch.stacked(rest), **state}

    def _begin_new(self, order: Sequence[int], down: Tree) -> None:
        """Make coordinates for clients that have none yet: their maps become bases.

        Points and clients that begin with equal weights share bases in memory.
        """
        points = self.batch.points
        entered = self.batch.enter(down, [c for c in order if c not in points[0].states])
        for c in order:
            # Initial maps of a point -> their coordinates, for other points with the same maps.
            twins: dict[tuple[SameObject, ...], KeptCoordinates] = {}
            for g, point in enumerate(points):
                if c in point.states.kept:
                    continue
                states = point.states
                if c in entered[g]:
                    tree = entered[g][c]
                else:
                    tree = states[c]
                maps = tuple(SameObject(t) for n, t in sorted(tree.items()) if is_first(n))
                # The first client of the chunk, which is also the first to get coordinates.
                before = states.kept.get(order[0])
                twin = twins.get(maps)
                rest, kept = _begin(self.grams, c, tree, twin, before, states.blocks)
                twins[maps] = kept
                states.keep(c, rest, kept, self.grams)

    def _keep(self, order: Sequence[int], state: Tree) -> None:
        """Keep the states of a chunk's clients: maps as coordinates, and the other tensors as they are."""
        batch = self.batch
        maps = {n: inner(t, batch.axes) for n, t in state.items() if is_first(n)}
        rest = {n: t for n, t in state.items() if n not in maps}
        for g, point in enumerate(batch.points):
            of_point = batch.of_point(rest, g)
            for j, c in enumerate(order):
                # Padding up to the longest client of the chunk is cut off.
                R = len(point.states.kept[c].bases) + self.grams.n[c]
                coords = {n: t[j, :R, :, g] for n, t in maps.items()}
                of_client = split(of_point, j, batch.rows_of(c))
                point.states.write(c, of_client, coords)

    def _turn_back(self, frame: ChunkBases, W: Tensor) -> Tensor:
        """The maps [M, U, D] or [G, M, U, D] that coordinates stand for."""
        parts = torch.stack(frame.each(W))
        if self.batch.axes == 1:
            return parts.squeeze(1)
        return parts.movedim(0, 1)


def _padded(parts: Sequence[Sequence[Tensor]], rows: int) -> Tensor:
    """[point][client] tensors [r, U] -> (M, rows, U, G), with zeros after each client's rows."""
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
    """Make bases of a client's maps, which share memory with equal bases of other points and clients.

    Args:
        grams: of the run.
        client: its number.
        tree: its tensors.
        twin: coordinates of this client in another point that began with the same tensors; None without.
        before: coordinates of another client of this point, which may have begun with equal weights; None without.
        blocks: memory for bases and their products.

    Returns:
        the tensors that are no maps, and the maps as coordinates.
    """
    maps = {n: t for n, t in sorted(tree.items()) if is_first(n)}
    bases = []
    seen = []
    for j, t in enumerate(maps.values()):
        if twin is not None:
            bases.append(twin.bases[j])
            seen.append(twin.seen[j])
            continue
        # Clients that begin with equal weights have one basis in memory; each has its own products with its rows.
        if before is not None and torch.equal(before.bases[j], t):
            base = before.bases[j]
        else:
            base = blocks.copy(t)
        bases.append(base)
        seen.append(blocks.copy(grams.of(client) @ base.mT))
    rows = len(maps) + grams.n[client]
    # Initial coordinates of a map: factor 1 for its own basis, and 0 for every row.
    coords = {}
    for j, (name, t) in enumerate(maps.items()):
        coords[name] = t.new_zeros(rows, t.shape[0])
        coords[name][j] = 1.0
    rest = {n: t for n, t in tree.items() if n not in maps}
    return rest, KeptCoordinates(coords, bases, seen)
