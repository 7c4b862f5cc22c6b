"""Clients' rows and their Gram matrices, computed once for all rounds, points and seeds, and products with these rows.

Shapes: n rows of a client, D features, U outputs of the map, M clients of a chunk, G points of a grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedcache.federate.engine.client_data import Features, take_rows
from fedcache.federate.engine.context import SameObject
from fedcache.federate.partition.client_table import RowLists
from fedcache.heads.gram import WIDE, GramBasis, points_first
from fedcache.heads.linear import by_onednn, each_times_transposed, times_transposed

CACHE_BYTES = 256 << 20
"""Limit in bytes for stacked Gram matrices that are kept for the next round, which may have the same clients."""

THIN = 64
"""Number of columns up to which X B' is faster as (B X')', because B X' has long rows (measured with MKL, one core)."""

BLOCK = 250
"""Number of rows of a block in a product with few columns. A block stays in the cache until it is packed."""

COMPILED = 50
"""Number of products of one shape from which oneDNN is faster although it first compiles a kernel.

It holds for clients with 50 rows.
"""


def thin(columns: int) -> bool:
    """Whether a product of all rows with so few columns is computed as the transpose of the swapped product."""
    return columns <= THIN


class GramMatrices:
    """Each client's training rows, packed one after another, and their Gram matrices; for all rounds, points and seeds.

    Args:
        x: [N, 1, D] features in the dtype of the computation.
        rows: client -> its int64 training rows, for the clients with few enough rows.
    """

    def __init__(self, x: Features, rows: Mapping[int, np.ndarray]) -> None:
        # In the order of clients in chunks, so that a chunk is one block.
        order = sorted(rows, key=lambda c: (-len(rows[c]), c))
        self.n = {c: len(rows[c]) for c in order}
        lists = RowLists.of([rows[c] for c in order])
        self.start = dict(zip(order, lists.ends[:-1].tolist(), strict=True))
        self.packed = take_rows(x, torch.from_numpy(lists.rows).to(x.device))
        # Client -> [n, n]; matrices of the same size follow one another in memory.
        self.gram: dict[int, Tensor] = {}
        # X X' of all clients with n rows at once: their rows are one block [M, n, D].
        for n, alike in groupby(order, lambda c: self.n[c]):
            group = list(alike)
            first = self.start[group[0]]
            block = self.packed[first : first + n * len(group)]
            by_client = block.view(len(group), n, block.shape[-1])
            self.gram |= zip(group, _gram_matrices(by_client), strict=True)
        self._kept: dict[tuple[int, ...], Tensor] = {}  # clients of a chunk -> ``stacked``
        self._kept_bytes = 0
        # (client, scored rows Z) -> Z X', and Z B' of each basis B.
        self._scored: dict[tuple[int, bytes], tuple[Tensor, dict[SameObject, Tensor]]] = {}

    def of(self, client: int) -> Tensor:
        """Rows [n, D] of a client; a view."""
        start = self.start[client]
        return self.packed[start : start + self.n[client]]

    def block(self, clients: Sequence[int]) -> Tensor | None:
        """Rows of clients that follow one another in memory, as a view; None if they do not."""
        start = self.start[clients[0]]
        end = start
        for c in clients:
            if self.start[c] != end:
                return None
            end += self.n[c]
        return self.packed[start:end]

    def rows(self, clients: Sequence[int]) -> Tensor | None:
        """``block``; on a GPU a copy of separate rows, because the copy costs less than a product for each client."""
        block = self.block(clients)
        if block is None and self.packed.device.type != "cpu":
            return torch.cat([self.of(c) for c in clients])
        return block

    def stacked(self, clients: Sequence[int]) -> Tensor:
        """Gram matrices [M, n, n], with zeros after each client's rows."""
        key = tuple(clients)
        if key in self._kept:
            return self._kept[key]
        longest = max(self.n[c] for c in clients)
        if all(self.n[c] == longest for c in clients) and self.block(clients) is not None:
            # The matrices follow one another in memory, as the rows do.
            shape = (len(clients), longest, longest)
            return self.gram[clients[0]].as_strided(shape, (longest**2, longest, 1))
        # Zeros after a client's rows change no product, because the coordinates there are zero too.
        out = self.packed.new_zeros(len(clients), longest, longest)
        for to, c in zip(out, clients, strict=True):
            to[: self.n[c], : self.n[c]] = self.gram[c]
        if self._kept_bytes + out.nbytes <= CACHE_BYTES:
            self._kept[key] = out
            self._kept_bytes += out.nbytes
        return out

    def scoring_basis(
        self, client: int, x: Features, rows: Tensor, bases: Sequence[Tensor]
    ) -> GramBasis:
        """The basis for scoring rows of x [N, 1, D] by a client's coordinates; cached for other points of a grid."""
        # Z X' of the scored rows Z [R, D] and the client's rows X [n, D], and Z B_j' of each basis, are computed once.
        key = (client, rows.cpu().numpy().tobytes())
        z = cache(lambda: x[rows, 0])  # read only if a product is missing
        if key not in self._scored:
            self._scored[key] = (z() @ self.of(client).mT, {})
            self._trim()
        gram, seen = self._scored[key]
        for base in bases:
            if SameObject(base) not in seen:
                seen[SameObject(base)] = z() @ base.mT
        # One client and one point are axes of length 1 here; methods see no leading axes (0).
        products = torch.stack([seen[SameObject(base)] for base in bases])
        return GramBasis(gram.unsqueeze(0), products[None, ..., None], 0)

    def _trim(self) -> None:
        """Remove the oldest products of scored rows until ``CACHE_BYTES`` are left; the newest stay in any case."""
        sizes = {}
        for key, (gram, seen) in self._scored.items():
            sizes[key] = gram.nbytes + sum(t.nbytes for t in seen.values())
        total = sum(sizes.values())
        for key in list(sizes)[:-1]:
            if total <= CACHE_BYTES:
                break
            del self._scored[key]
            total -= sizes[key]

    def forward(self, clients: Sequence[int], base: Tensor) -> Tensor:
        """X B' [M, n, U, G] of each client for bases [G, U, D] that clients share."""
        G, U, D = base.shape
        M = len(clients)
        longest = max(self.n[c] for c in clients)
        # The bases of all points are the columns of one product, in the memory order of ``zeros``.
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
            # If all clients have the same number of rows, the product is the result; otherwise each part is padded.
            if len(u) == M * longest:
                out = u.reshape(M, longest, *last)
                if swapped:
                    return out.mT
                return out
            parts = torch.split(u, [self.n[c] for c in clients])
        else:
            parts = tuple(self.of(c) @ flat.mT for c in clients)
        out = pad_sequence([part.view(-1, *last) for part in parts], batch_first=True)
        if swapped:
            return out.mT
        return out

    def back(self, clients: Sequence[int], A: Tensor, weights: Sequence[float]) -> Tensor:
        """sum_m w_m A_m' X_m [G, U, D] for A [M, n, U, G]."""
        swapped = points_first(A)
        if swapped:
            A = A.mT
        M, _, first, second = A.shape
        # First w_m A_m; then one product with the packed rows sums over rows and clients.
        scaled = A.flatten(2) * A.new_tensor(weights).view(M, 1, 1)
        block = self.rows(clients)
        if block is None:
            # Rows of separate clients: one product for each client, added up in one matrix [U G, D].
            total = A.new_zeros(first * second, self.packed.shape[1])
            for of_client, c in zip(scaled, clients, strict=True):
                total.addmm_(of_client[: self.n[c]].mT, self.of(c))
        elif len(block) == M * A.shape[1]:  # no client has fewer rows than another
            total = _summed_product(scaled.flatten(0, 1), block)
        else:
            pairs = zip(scaled, clients, strict=True)
            cut = torch.cat([of_client[: self.n[c]] for of_client, c in pairs])
            total = _summed_product(cut, block)
        total = total.view(first, second, -1)
        if swapped:
            return total
        return total.permute(1, 0, 2)


def _gram_matrices(rows: Tensor) -> Tensor:
    """X X' [M, n, n] of M clients with the same number of rows [M, n, D]."""
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
    """rows flat' [n, k] with few columns. Blocks take 3/4 of the time of one call, because that packs the long side."""
    if by_onednn(flat, rows) or rows.device.type != "cpu":
        return times_transposed(flat, rows).mT
    out = rows.new_empty(len(flat), len(rows))
    # flat rows' instead of rows flat', so that the result has long rows.
    for start in range(0, len(rows), BLOCK):
        block = slice(start, start + BLOCK)
        torch.mm(flat, rows[block].mT, out=out[:, block])
    return out.mT


def _summed_product(A: Tensor, rows: Tensor) -> Tensor:
    """A' rows [k, D] of A [n, k]; for oneDNN the longer side of the result comes first."""
    if A.shape[1] > rows.shape[1] and by_onednn(rows.mT, A.mT):
        return times_transposed(rows.mT, A.mT).mT.contiguous()
    return times_transposed(A.mT, rows.mT)
