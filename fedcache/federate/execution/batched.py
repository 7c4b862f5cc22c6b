"""The middle of a round: fit the sampled clients of one run, or of many points of a grid at once, and pool.

A grid point is a run of its own (``Rounds``): its server, states, traffic and records. Points differ in floats alone,
so they sample the same clients and draw the same numbers; a chunk of clients of all points is one ``fit`` with the
leading axes (G, M). Clients are taken in the order of falling rows, so that a chunk rests and pads little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from fedcache.errors import Exit, FedcacheError
from fedcache.federate.engine.aggregate import Pool
from fedcache.federate.engine.context import Ctx, copied, pad_stack, split
from fedcache.federate.engine.method import Hp, numel
from fedcache.federate.engine.run_state import Rounds
from fedcache.federate.engine.traffic import RoundTraffic, itemsize
from fedcache.federate.execution.choose import Lift, shares_uploads
from fedcache.federate.execution.gram import DualData, Frame, Grams, Kept, is_first
from fedcache.federate.execution.grid_cache import Sent, Shared
from fedcache.heads.gram import inner, outer
from fedcache.heads.linear import Tree

SPECTRUM_POINTS = 4
"""Points of a shared upload from which on a server prepares what serves all: eigenvalues cost some Cholesky solves."""


@dataclass
class Program:
    """Points that are computed together, and how.

    Attributes:
        jobs: the points; one is a run alone.
        lift: how.
        grams: for ``dual``.
        shared: what other programs have computed already.
        failed: point -> what ended it; its lanes go on and are not read.
    """

    jobs: Sequence[Rounds]
    lift: Lift
    grams: Grams | None = None
    shared: Shared | None = None
    failed: dict[int, FedcacheError] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.axes = 1 if len(self.jobs) == 1 else 2
        self._prepared: tuple[Tree, Tree] | None = None
        self.hp = stack_hp([job.hp for job in self.jobs], self.jobs[0])

    def one_round(self, participation: int | float | None) -> list[RoundTraffic | None]:
        """One round of every point; None for a point that failed, now or before.

        Raises:
            FedcacheError: what ended a run that is alone.
        """
        first = self.jobs[0]
        ids = first.sample(participation)
        downs = [job.down() for job in self.jobs]
        if self.lift.name == "loop":
            found = [self._loop(g, ids, downs[g], participation) for g in range(len(self.jobs))]
        else:
            found = self._together(ids, downs, participation)
        if self.failed and len(self.jobs) == 1:
            raise self.failed[0]
        return found

    def _loop(
        self, point: int, ids: Sequence[int], down: Tree, participation: int | float | None
    ) -> RoundTraffic | None:
        """Client by client, in client order."""
        job = self.jobs[point]
        if point in self.failed:
            return None
        try:
            pooled, ups = self._pooled(job, ids, down, participation)
            return job.finish(ids, down, pooled, ups)
        except FedcacheError as error:
            if error.code is Exit.INTERRUPTED:
                raise
            self.failed[point] = error
            return None

    def _pooled(
        self, job: Rounds, ids: Sequence[int], down: Tree, participation: int | float | None
    ) -> tuple[Tree, Sent]:
        """Uploads of the clients, pooled, and what each of them sent."""

        def make() -> tuple[Tree, Sent]:
            pool = job.pool(ids, down, participation)
            ups: Sent = []
            for c in ids:
                up = job.fit_one(down, c)
                pool.add(up, float(len(job.lanes[c].train)), c)
                ups.append(job.sent(up))
            return job.taken(pool), ups

        if self.shared is None or not shares_uploads(job.method) or not job.trust.plain:
            return make()
        pooled, ups = self.shared.pooled(job, ids, make)
        if len(self.jobs) >= SPECTRUM_POINTS:
            if self._prepared is None or self._prepared[0] is not pooled:
                self._prepared = (pooled, job.method.prepare(pooled, job.server_ctx(ids)))
            pooled = self._prepared[1]
        return pooled, ups

    def _together(
        self, ids: Sequence[int], downs: Sequence[Tree], participation: int | float | None
    ) -> list[RoundTraffic | None]:
        first = self.jobs[0]
        pool = first.pool(ids, downs[0], participation)
        down = {k: torch.stack([d[k] for d in downs]) for k in downs[0]} if self.axes == 2 else downs[0]
        down = {k: t.unsqueeze(self.axes - 1) for k, t in down.items()}  # shared by the clients of a point
        sent: dict[int, Sent] = {}
        order = sorted(ids, key=lambda c: (-len(first.lanes[c].train), c))
        few = [c for c in order if self.grams is not None and c in self.grams.n]
        rest = [c for c in order if self.grams is None or c not in self.grams.n]
        width = self.lift.rest if self.lift.name == "dual" else self.lift.chunk
        for start in range(0, len(rest), width):
            self._stack(rest[start : start + width], down, pool, sent)
        for start in range(0, len(few), self.lift.chunk):
            self._dual(few[start : start + self.lift.chunk], down, pool, sent)
        try:
            pooled = first.taken(pool)
        except FedcacheError as error:
            self.failed |= {g: error for g in range(len(self.jobs)) if g not in self.failed}
            return [None] * len(self.jobs)
        found: list[RoundTraffic | None] = []
        for g, job in enumerate(self.jobs):
            if g in self.failed:
                found.append(None)
                continue
            mine = pooled if self.axes == 1 else {k: _at(t, g, pool.rule(k) == "stack") for k, t in pooled.items()}
            try:
                found.append(job.finish(ids, downs[g], mine, [sent[c][g] for c in ids]))
            except FedcacheError as error:
                self.failed[g] = error
                found.append(None)
        return found

    def _stack(self, order: Sequence[int], down: Tree, pool: Pool, sent: dict[int, Sent]) -> None:
        """A chunk of clients on one axis, resting lanes a suffix."""
        first = self.jobs[0]
        first.env.watch()
        ctx, data = self.ctx(order), first.rows(order, self.axes)
        state, up = first.method.fit(down, self._states(order, down), data, ctx)
        self._finite({**up, **state}, order)
        self._store(order, state)
        for j, c in enumerate(order):
            lane = self._lane(up, j)
            pool.add(lane, float(len(first.lanes[c].train)), c)
            self._count(c, lane, itemsize(up), sent)

    def _dual(self, order: Sequence[int], down: Tree, pool: Pool, sent: dict[int, Sent]) -> None:
        """A chunk of clients whose first map is in coordinates."""
        first, grams = self.jobs[0], cast(Grams, self.grams)
        first.env.watch()
        frame, ctx = Frame(grams, order, self.axes), self.ctx(order)
        travels = [n for n in down if is_first(n)]
        if travels:
            state, down = self._written(frame, order, down, travels)
        else:
            state = self._resumed(frame, order, down)
        rows = first.rows(order, self.axes)
        data = DualData(rows.x, rows.y, rows.rows, rows.n, basis=frame.basis())
        state, up = first.method.fit(down, state, data, ctx)
        self._finite({**up, **state}, order)
        maps = {n: t for n, t in up.items() if is_first(n)}
        weights = [float(len(first.lanes[c].train)) for c in order]
        each: dict[str, list[Tensor]] = {}
        for name, W in maps.items():
            if pool.rule(name) == "stack":
                each[name] = frame.each(W)
            else:
                total = frame.pooled(W, [pool.factor(name, w) for w in weights])
                pool.add_sum(name, total if self.axes == 2 else total[0], W.dtype)
        rest = {n: t for n, t in up.items() if n not in maps}
        stacked = {n: t for n, t in rest.items() if pool.rule(n) == "stack"}
        for name in rest.keys() - stacked.keys():
            pool.add_sum(name, self._summed(rest[name], [pool.factor(name, w) for w in weights]), rest[name].dtype)
        # What travels is the map, whatever it was computed in; only its size is asked for.
        core = (frame.seen[0].shape[2], grams.packed.shape[1])
        like = {n: t.new_empty((*t.shape[: self.axes], *core), device="meta") for n, t in maps.items()}
        shown = {n: t[..., 0, :, :] if self.axes == 2 else t[0] for n, t in like.items()}
        dense = first.method.sent is numel  # then every client of the chunk sends the same
        if not stacked and not each:
            pool.weigh(weights)
        else:
            for j, c in enumerate(order):
                whole = {n: parts[j] if self.axes == 2 else parts[j][0] for n, parts in each.items()}
                pool.add({**self._lane(stacked, j), **whole}, weights[j], c)
        for j, c in enumerate(order[:1] if dense else order):
            self._count(c, {**self._lane(rest, j), **shown}, itemsize({**rest, **like}), sent)
        if dense:
            sent.update(dict.fromkeys(order, sent[order[0]]))
        if travels:
            self._store(order, {**state, **{n: self._primal(frame, t) for n, t in state.items() if is_first(n)}})
        else:
            self._keep(frame, order, state)

    def _written(self, frame: Frame, order: Sequence[int], down: Tree, travels: Sequence[str]) -> tuple[Tree, Tree]:
        """Broadcast and states with the maps in coordinates: every one of them is a basis of this round."""
        G = len(self.jobs)
        state = self._states(order, down)
        number = {}
        for n in travels:
            base = down[n] if self.axes == 1 else down[n].squeeze(1)
            number["down", n] = frame.add(base)
        for n, t in sorted(state.items()):  # as files bring names in another order, and sums would follow it
            if is_first(n):
                full = t.unsqueeze(1) if self.axes == 1 else t.movedim(1, 0)
                number["state", n] = frame.add(full.expand(len(order), -1, -1, -1))
        units = {key: frame.unit(j, len(number), G) for key, j in number.items()}
        made = {n: units.get(("state", n), t) for n, t in state.items()}
        return made, {n: units.get(("down", n), t) for n, t in down.items()}

    def _resumed(self, frame: Frame, order: Sequence[int], down: Tree) -> Tree:
        """States whose maps never travel: coordinates over the bases their client entered with."""
        grams = cast(Grams, self.grams)
        entered = self._enter(down, [c for c in order if c not in self.jobs[0].states])
        for c in order:
            alike: dict[tuple[int, ...], tuple[Tree, Kept]] = {}  # points that begin with the same tensors
            for g, job in enumerate(self.jobs):
                if c not in job.states.kept:
                    tree = job.states[c] if c in job.states else entered[g][c]
                    key = tuple(id(t) for n, t in sorted(tree.items()) if is_first(n))
                    before = job.states.kept.get(order[0])
                    others, made = _begin(grams, c, tree, alike[key][1] if key in alike else None, before)
                    alike[key] = (tree, made)  # the tree is held, so that its ids are not used again
                    job.states.keep(c, others, made, grams)
        kept = [[job.states.kept[c] for c in order] for job in self.jobs]
        names = list(kept[0][0].coords)
        k, longest = len(kept[0][0].bases), max(grams.n[c] for c in order)
        for j in range(k):
            common = all(
                at.bases[j] is alone.bases[j] for points in kept for at, alone in zip(points, kept[0], strict=True)
            )
            seen = [[at.seen[j] for at in points] for points in (kept[:1] if common else kept)]
            frame.bases.append(torch.empty(0))  # never read: nothing of these is turned back here
            frame.seen.append(_padded(seen, longest))
        state = {n: outer(_padded([[at.coords[n] for at in points] for points in kept], k + longest), self.axes)
                 for n in names}  # fmt: skip
        rest = [[job.states.rest(c) for c in order] for job in self.jobs]
        return {**self._stacked(rest), **state}

    def _keep(self, frame: Frame, order: Sequence[int], state: Tree) -> None:
        """Store what stays with the clients, maps as coordinates."""
        grams = cast(Grams, self.grams)
        maps = {n: inner(t, self.axes) for n, t in state.items() if is_first(n)}
        rest = {n: t for n, t in state.items() if n not in maps}
        for g, job in enumerate(self.jobs):
            for j, c in enumerate(order):
                old = job.states.kept[c]
                R = len(old.bases) + grams.n[c]
                coords = {n: t[j, :R, :, g] for n, t in maps.items()}
                job.states.write(c, split(_point(rest, g, self.axes), j, len(job.lanes[c].train)), coords)

    def _primal(self, frame: Frame, W: Tensor) -> Tensor:
        """[M, U, D] or [G, M, U, D] of coordinates."""
        parts = torch.stack(frame.each(W))
        return parts.squeeze(1) if self.axes == 1 else parts.movedim(0, 1)

    def ctx(self, order: Sequence[int]) -> Ctx:
        """The context of a chunk of all points."""
        ctx = self.jobs[0].ctx(order, self.axes)
        return ctx if self.axes == 1 else replace(ctx, lead=(len(self.jobs), len(order)), hp=self.hp)

    def _states(self, order: Sequence[int], down: Tree) -> Tree:
        """What the clients of a chunk hold, stacked; those that are new enter."""
        entered = self._enter(down, [c for c in order if c not in self.jobs[0].states])
        return self._stacked(
            [
                [job.states[c] if c in job.states else entered[g].get(c, {}) for c in order]
                for g, job in enumerate(self.jobs)
            ]
        )

    def _stacked(self, trees: Sequence[Sequence[Tree]]) -> Tree:
        """[point][client] trees as one."""
        points = [pad_stack(of_point) for of_point in trees]
        return points[0] if self.axes == 1 else {k: torch.stack([p[k] for p in points]) for k in points[0]}

    def _enter(self, down: Tree, new: Sequence[int]) -> list[dict[int, Tree]]:
        """What clients hold that take part for the first time, per point; ``new`` keeps the order of falling rows."""
        if not new:
            return [{} for _ in self.jobs]
        job = self.jobs[0]
        state = job.method.enter(down, job.rows(new, self.axes), self.ctx(new))
        if not state:
            return [{} for _ in self.jobs]
        made = [
            {c: copied(split(_point(own, g, self.axes), j, len(job.lanes[c].train))) for j, c in enumerate(new)}
            for g, own in enumerate(
                [state] + [{k: t for k, t in state.items() if t.shape[0] > 1}] * (len(self.jobs) - 1)
            )
        ]
        return [{c: {**made[0][c], **tree} for c, tree in point.items()} for point in made]  # what is equal is shared

    def _store(self, order: Sequence[int], state: Tree) -> None:
        if not state:
            return
        for g, job in enumerate(self.jobs):
            mine = _point(state, g, self.axes)
            for j, c in enumerate(order):
                job.states.write(c, split(mine, j, len(job.lanes[c].train)))

    def _lane(self, up: Tree, j: int) -> Tree:
        """The upload of the client at ``j``, with the axis of points if there is one."""
        axis = self.axes - 1
        made = {k: t.select(axis, j if t.shape[axis] > 1 else 0) for k, t in up.items()}
        if self.axes == 2:
            G = len(self.jobs)
            made = {k: t.expand(G, *t.shape[1:]) for k, t in made.items()}
        return made

    def _summed(self, t: Tensor, weights: Sequence[float]) -> Tensor:
        """The sum over the clients of a chunk, each times its weight, in float64; with the axis of points."""
        axis = self.axes - 1
        w = torch.tensor(weights, dtype=torch.float64, device=t.device)
        full = t.expand(*t.shape[:axis], len(weights), *t.shape[axis + 1 :])
        total = (full.double().movedim(axis, -1) @ w.unsqueeze(-1)).squeeze(-1)
        return total.expand(len(self.jobs), *total.shape[1:]) if self.axes == 2 else total

    def _count(self, client: int, counted: Tree, size: int, sent: dict[int, Sent]) -> None:
        """Note what one client sends for each point; ``size`` is the bytes of a number."""
        first = self.jobs[0]
        count = first.method.sent
        if self.axes == 1:
            sent[client] = [(count(counted, first.server_ctx()), size)]
        elif count is numel:
            sent[client] = [(numel(counted, first.server_ctx()) // len(self.jobs), size)] * len(self.jobs)
        else:
            sent[client] = [
                (count({k: t[g] for k, t in counted.items()}, job.server_ctx()), size)
                for g, job in enumerate(self.jobs)
            ]

    def _finite(self, tree: Tree, order: Sequence[int]) -> None:
        """Note every point with a result that is not finite; a finite sum proves all its terms finite."""
        bad = {n: t for n, t in tree.items() if t.is_floating_point() and not torch.isfinite(t.sum())}
        if not bad or self.jobs[0].trust.on_bad == "reject":
            return
        for g, job in enumerate(self.jobs):
            try:
                job.finite(bad if self.axes == 1 else _point(bad, g, 2), order, 1)
            except FedcacheError as error:
                self.failed.setdefault(g, error)


def stack_hp(hps: Sequence[Hp], job: Rounds) -> Hp:
    """The hyperparameters of some points: a float in which they differ is a tensor [G, 1]."""
    made = dict(hps[0])
    for name in made:
        values = [hp[name] for hp in hps]
        if any(v != values[0] for v in values):
            made[name] = torch.tensor([[v] for v in values], dtype=job.env.dtype, device=job.env.device)
    return made


def _point(tree: Tree, g: int, axes: int) -> Tree:
    """The tensors of one point, with their client axis."""
    return tree if axes == 1 else {k: t[g if t.shape[0] > 1 else 0] for k, t in tree.items()}


def _at(t: Tensor, g: int, stacked: bool) -> Tensor:
    return t[:, g] if stacked else t[g]


def _padded(parts: Sequence[Sequence[Tensor]], rows: int) -> Tensor:
    """[point][client] tensors [r, U] -> (M, rows, U, G), zero past each client's rows."""
    first = parts[0][0]
    out = first.new_zeros(len(parts[0]), rows, first.shape[1], len(parts))
    for g, of_point in enumerate(parts):
        for j, part in enumerate(of_point):
            out[j, : len(part), :, g] = part
    return out


def _begin(grams: Grams, client: int, tree: Tree, twin: Kept | None, before: Kept | None) -> tuple[Tree, Kept]:
    """A client's maps become bases, shared in memory with those that began with the same ones.

    Args:
        grams: of the run.
        client: its number.
        tree: what it holds.
        twin: the same client of a point that began with the same tensors.
        before: another client of this point.
    """
    maps = {n: t for n, t in sorted(tree.items()) if is_first(n)}
    bases, seen = [], []
    for j, t in enumerate(maps.values()):
        if twin is not None:
            bases.append(twin.bases[j])
            seen.append(twin.seen[j])
            continue
        bases.append(before.bases[j] if before is not None and torch.equal(before.bases[j], t) else t)
        seen.append(grams.of(client) @ bases[-1].mT)
    k, n = len(maps), grams.n[client]
    coords = {}
    for j, (name, t) in enumerate(maps.items()):
        coords[name] = t.new_zeros(k + n, t.shape[0])
        coords[name][j] = 1.0
    return {n: t for n, t in tree.items() if n not in maps}, Kept(coords, bases, seen)
