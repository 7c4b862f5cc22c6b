"""Clients' rows with their Gram matrices, computed once for all rounds, points and seeds, and the products of a round.

Shapes: n rows of a client, D features, U outputs of the map, M clients of a chunk, G points of a grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from fedcache.federate.engine.client_data import Features, take_rows
from fedcache.federate.engine.context import SameObject
from fedcache.heads.gram import WIDE, GramBasis, points_first
from fedcache.heads.linear import by_onednn, each_times_transposed, times_transposed

CACHE_BYTES = 256 << 20
"""Stacked Gram matrices that are kept for the next round: with all clients in every round they come again."""

THIN = 64
"""Columns up to which X B' is faster as (B X')': the long side is then that of the result's rows (MKL, one core)."""

BLOCK = 250
"""Rows that a product with few columns takes at once, so that they are still in the cache when they are packed."""

COMPILED = 50
"""Products of one shape from which on oneDNN makes up for the kernel that it compiles, of clients with some 50 rows."""


def thin(columns: int) -> bool:
    """Whether a product of all rows with so few columns is made the other way round."""
    return columns <= THIN


class GramMatrices:
    """Each client's training rows, packed one after another, and their Gram matrices; for all rounds, points and seeds.

    Args:
        x: [N, 1, D] features in the dtype of the computation.
        rows: client -> its int64 training rows, for the clients with few enough of them.
    """

    def __init__(self, x: Features, rows: Mapping[int, np.ndarray]) -> None:
        # as chunks are cut, so that a chunk is one block
        order = sorted(rows, key=lambda c: (-len(rows[c]), c))
        self.n = {c: len(rows[c]) for c in order}
        starts = np.cumsum([0, *self.n.values()])
        self.start = {c: int(s) for c, s in zip(order, starts[:-1], strict=True)}
        every = np.concatenate([np.empty(0, np.int64), *(rows[c] for c in order)])
        self.packed = take_rows(x, torch.from_numpy(every).to(x.device))
        self.gram: dict[
            int, Tensor
        ] = {}  # [n, n] of each; those of equal sizes lie one after another
        # X X' of all clients with n rows at once: their rows are one block [M, n, D].
        for n, alike in groupby(order, lambda c: self.n[c]):
            group = list(alike)
            first = self.start[group[0]]
            own = self.packed[first : first + n * len(group)].view(
                len(group), n, self.packed.shape[-1]
            )
            self.gram |= zip(group, _gram_matrices(own), strict=True)
        self._kept: dict[tuple[int, ...], Tensor] = {}
        self._kept_bytes = 0
        self._beside: dict[tuple[int, bytes], tuple[Tensor, dict[SameObject, Tensor]]] = {}

    def of(self, client: int) -> Tensor:
        """[n, D] rows of a client, a view."""
        return self.packed[self.start[client] : self.start[client] + self.n[client]]

    def block(self, clients: Sequence[int]) -> Tensor | None:
        """Rows of clients that lie one after another, a view; None when they do not."""
        at = self.start[clients[0]]
        for c in clients:
            if self.start[c] != at:
                return None
            at += self.n[c]
        return self.packed[self.start[clients[0]] : at]

    def rows(self, clients: Sequence[int]) -> Tensor | None:
        """``block``; on a GPU a copy of rows that are apart, as a product for each client costs more than to copy."""
        block = self.block(clients)
        if block is None and self.packed.device.type != "cpu":
            return torch.cat([self.of(c) for c in clients])
        return block

    def stacked(self, clients: Sequence[int]) -> Tensor:
        """[M, n, n] Gram matrices, zero past a client's rows."""
        key = tuple(clients)
        if key in self._kept:
            return self._kept[key]
        longest = max(self.n[c] for c in clients)
        if all(self.n[c] == longest for c in clients) and self.block(clients) is not None:
            # They lie one after another, as the rows do.
            return self.gram[clients[0]].as_strided(
                (len(clients), longest, longest), (longest**2, longest, 1)
            )
        # Zeros past a client's rows change no product: the coordinates there are zero too.
        out = self.packed.new_zeros(len(clients), longest, longest)
        for to, c in zip(out, clients, strict=True):
            to[: self.n[c], : self.n[c]] = self.gram[c]
        if self._kept_bytes + out.nbytes <= CACHE_BYTES:
            self._kept[key] = out
            self._kept_bytes += out.nbytes
        return out

    def beside(self, client: int, x: Features, rows: Tensor, bases: Sequence[Tensor]) -> GramBasis:
        """For scoring rows of x [N, 1, D] by a client's coordinates over ``bases``; kept for other points of a grid."""
        # Z X' of the scored rows Z [R, D] with the client's own [n, D], and Z B_j' of each base, all computed once.
        key = (client, rows.cpu().numpy().tobytes())
        z: Tensor | None = None
        if key not in self._beside:
            z = x[rows, 0]
            self._beside[key] = (z @ self.of(client).mT, {})
            self._trim()
        gram, seen = self._beside[key]
        for base in bases:
            if SameObject(base) not in seen:
                if z is None:
                    z = x[rows, 0]
                seen[SameObject(base)] = z @ base.mT
        products = torch.stack([seen[SameObject(base)] for base in bases])
        return GramBasis(gram.unsqueeze(0), products[None, ..., None], 0)

    def _trim(self) -> None:
        """Forget the oldest products of scored rows above ``CACHE_BYTES``; the latest stays."""
        sizes = []
        for gram, seen in self._beside.values():
            sizes.append(gram.nbytes + sum(t.nbytes for t in seen.values()))
        total = sum(sizes)
        for key, size in zip(list(self._beside)[:-1], sizes, strict=False):
            if total <= CACHE_BYTES:
                break
            del self._beside[key]
            total -= size

    def forward(self, clients: Sequence[int], base: Tensor) -> Tensor:
        """X B' [M, n, U, G] of each client for bases [G, U, D] that clients share."""
        G, U, D = base.shape
        M = len(clients)
        longest = max(self.n[c] for c in clients)
        # All points' bases side by side are the columns of one product, in the order that ``zeros`` has in memory.
        swapped = U >= WIDE
        if swapped:
            flat = base.reshape(G * U, D)
            last = (G, U)
        else:
            flat = base.permute(1, 0, 2).reshape(U * G, D)
            last = (U, G)
        block = self.rows(clients)
        if block is not None:
            if thin(len(flat)):
                u = _thin_product(flat, block)
            else:
                u = times_transposed(block, flat)
            # With equally many rows the product is the result; otherwise each client's part is padded.
            if len(u) == M * longest:
                out = u.reshape(M, longest, *last)
                if swapped:
                    return out.mT
                return out
            parts = torch.split(u, [self.n[c] for c in clients])
        else:
            parts = tuple(self.of(c) @ flat.mT for c in clients)
        out = self.packed.new_zeros(M, longest, *last)
        for to, part in zip(out, parts, strict=True):
            to[: len(part)] = part.view(-1, *last)
        if swapped:
            return out.mT
        return out

    def back(self, clients: Sequence[int], A: Tensor, weights: Sequence[float]) -> Tensor:
        """sum_m w_m A_m' X_m [G, U, D] for A [M, n, U, G]."""
        swapped = points_first(A)
        if swapped:
            A = A.mT
        M, _, first, second = A.shape
        # w_m A_m first: then one product with the packed rows sums over rows and clients.
        scaled = A.flatten(2) * A.new_tensor(weights).view(M, 1, 1)
        block = self.rows(clients)
        if block is None:
            # Rows that are apart: a product of each client, added up in one matrix [U G, D].
            total = A.new_zeros(first * second, self.packed.shape[1])
            for of_client, c in zip(scaled, clients, strict=True):
                total.addmm_(of_client[: self.n[c]].mT, self.of(c))
        elif len(block) == M * A.shape[1]:  # no client has fewer rows than another
            total = _summed_product(scaled.flatten(0, 1), block)
        else:
            cut = torch.cat(
                [of_client[: self.n[c]] for of_client, c in zip(scaled, clients, strict=True)]
            )
            total = _summed_product(cut, block)
        total = total.view(first, second, -1)
        if swapped:
            return total
        return total.permute(1, 0, 2)


def _gram_matrices(rows: Tensor) -> Tensor:
    """X X' [M, n, n] of M clients with equally many rows [M, n, D]."""
    M, n, _ = rows.shape
    if rows.device.type != "cpu":
        return torch.bmm(rows, rows.mT)
    if M >= COMPILED and by_onednn(rows[0], rows[0]):
        return each_times_transposed(rows, rows)
    out = rows.new_empty(M, n, n)
    for one, to in zip(rows, out, strict=True):
        torch.mm(one, one.mT, out=to)
    return out


def _thin_product(flat: Tensor, rows: Tensor) -> Tensor:
    """rows flat' [n, k] of few columns: three quarters of the time of one call, as libraries pack the larger side."""
    if by_onednn(flat, rows) or rows.device.type != "cpu":
        return times_transposed(flat, rows).mT
    out = rows.new_empty(len(flat), len(rows))
    # flat rows' instead of rows flat': the long side is then that of the result's rows.
    for start in range(0, len(rows), BLOCK):
        torch.mm(flat, rows[start : start + BLOCK].mT, out=out[:, start : start + BLOCK])
    return out.mT


def _summed_product(A: Tensor, rows: Tensor) -> Tensor:
    """A' rows [k, D] of A [n, k]; for oneDNN with the longer side of the result first."""
    if A.shape[1] > rows.shape[1] and by_onednn(rows.mT, A.mT):
        return times_transposed(rows.mT, A.mT).mT.contiguous()
    return times_transposed(A.mT, rows.mT)
