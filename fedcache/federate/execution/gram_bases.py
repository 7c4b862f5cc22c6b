"""Weights of a chunk of clients, written in coordinates over common bases, and turned back.

Shapes: n rows of a client, D features, U outputs of the map, M clients of a chunk, G points of a grid, k bases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from fedcache.federate.engine.client_data import ClientData
from fedcache.federate.execution.gram_matrices import GramMatrices
from fedcache.heads.gram import GramBasis, GramBatch, inner, outer


@dataclass(frozen=True)
class GramClientData(ClientData):
    """Clients whose batches are positions."""

    basis: GramBasis | None = None

    def take(self, i: Tensor, view: int | Tensor = 0) -> Tensor:
        """A ``GramBatch`` in the place of features; one view is stored."""
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
    """The bases of one chunk of clients, and how tensors of it are written in coordinates.

    Attributes:
        grams: of the run.
        clients: of the chunk, by falling rows.
        axes: 1 (M,) or 2 (G, M).
        bases: each [G or 1, U, D] that all clients share, or [M, G or 1, U, D].
        seen: X B_j' of each, [M, n, U, G or 1].
    """

    grams: GramMatrices
    clients: Sequence[int]
    axes: int
    bases: list[Tensor] = field(default_factory=list)
    seen: list[Tensor] = field(default_factory=list)

    def basis(self) -> GramBasis:
        """For ``GramBatch``."""
        G = max(s.shape[-1] for s in self.seen)
        full = [s.expand(*s.shape[:-1], G) for s in self.seen]
        return GramBasis(self.grams.stacked(self.clients), torch.stack(full, 1), self.axes)

    def add(self, base: Tensor) -> int:
        """Take a tensor as a further basis; its number."""
        self.bases.append(base)
        if base.dim() == 3:
            self.seen.append(self.grams.forward(self.clients, base))
        else:
            own = [self.grams.forward([c], b)[0] for c, b in zip(self.clients, base, strict=True)]
            out = own[0].new_zeros(len(own), *own[0].shape)
            for to, part in zip(out, own, strict=True):
                to[: len(part)] = part
            self.seen.append(out)
        return len(self.bases) - 1

    def unit(self, number: int, bases: int, points: int) -> Tensor:
        """The coordinates of basis ``number`` itself: c = 1, A = 0."""
        M, n, U = self.seen[0].shape[:3]
        out = self.seen[0].new_zeros(M, bases + n, U, points)
        out[:, number] = 1.0
        return outer(out, self.axes)

    def pooled(self, W: Tensor, weights: Sequence[float]) -> Tensor:
        """sum_m w_m W_m [G, U, D] of coordinates [.., k + n, U]."""
        k, full = len(self.bases), inner(W, self.axes)
        total = self.grams.back(self.clients, full[:, k:], weights)
        w = full.new_tensor(weights)
        for j, base in enumerate(self.bases):
            c = full[:, j]  # [M, U, G]
            if base.dim() == 3:
                total = total + (w.view(-1, 1, 1) * c).sum(0).mT.unsqueeze(-1) * base
            else:
                total = total + torch.einsum("m,mog,mgod->god", w, c, base.expand(-1, c.shape[-1], -1, -1))
        return total

    def each(self, W: Tensor) -> list[Tensor]:
        """W [G, U, D] of every client."""
        out = []
        for m, client in enumerate(self.clients):
            alone = ChunkBases(self.grams, [client], 2, [b if b.dim() == 3 else b[m] for b in self.bases], [])
            n = self.grams.n[client] + len(self.bases)
            out.append(alone.pooled(outer(inner(W, self.axes)[m : m + 1, :n], 2), [1.0]))
        return out
