"""Linear maps on frozen rows, in coordinates that are shorter than the weights; the execution ``gram`` trains these.

SGD on a linear map of a client's rows X [n, D] to U outputs never leaves a small space. With bases B_j [U, D] (the
weights that training starts from, and those that it is pulled to) every iterate is

    W = sum_j c_j B_j + A' X,        c_j scalar, A [n, U].

A step moves A by the rows of dL/du. Momentum, weight decay and pulls towards other such maps are linear, so they act on
(c, A) as they would on W. Outputs are u = sum_j c_j (X B_j') + K A with K = X X', computed once. So W [.., U, D]
becomes one tensor of coordinates [.., k + n, U]: k rows that each repeat c_j, then A. An optimiser steps it like any
other tensor. This is exact for SGD, but not for Adam, whose second moment depends on the coordinates.

Inside this module, the client axis comes first and grid points last, (M, rows, U, G): one GEMM per client serves all
points, and a step's gradient is an addition of whole rows. With ``WIDE`` or more outputs, the last two axes are swapped
in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

WIDE = 64
"""Number of outputs from which the outputs of one grid point are adjacent in memory, so that sums over outputs read
memory in order. With fewer outputs, it is faster if the points are adjacent."""


def zeros(like: Tensor, clients: int, rows: int, outputs: int, points: int) -> Tensor:
    """Zeros (M, R, U, G), in the memory order that is faster for this number of outputs (``WIDE``)."""
    if outputs >= WIDE:
        return like.new_zeros(clients, rows, points, outputs).mT
    return like.new_zeros(clients, rows, outputs, points)


def points_first(t: Tensor) -> bool:
    """Whether the outputs of a grid point are adjacent in the memory of [.., U, G]."""
    return t.stride(-2) < t.stride(-1) and t.shape[-1] > 1


@dataclass(frozen=True)
class GramBasis:
    """Products that give the outputs of a chunk of clients.

    Attributes:
        gram: [M, R, n] products of R rows with the client's n training rows, zero on padding. In training, the R rows
            are the training rows themselves, so this is K [M, n, n].
        seen: [M, k, R, U, G or 1] the R rows times B_j'.
        axes: leading axes of the tensors that methods see: 0, 1 (M,) or 2 (G, M).
    """

    gram: Tensor
    seen: Tensor
    axes: int

    def narrow(self, count: int) -> GramBasis:
        """The first ``count`` clients."""
        return replace(self, gram=self.gram[:count], seen=self.seen[:count])


def inner(W: Tensor, axes: int) -> Tensor:
    """Coordinates [.., R, U] -> (M, R, U, G), a view where ``outer`` made them."""
    if axes == 2:
        return W.permute(1, 2, 3, 0)
    return W.reshape(-1, *W.shape[-2:]).unsqueeze(-1)


def outer(W: Tensor, axes: int) -> Tensor:
    """(M, R, U, G) -> coordinates [.., R, U], a view; memory stays in the inner order."""
    if axes == 2:
        return W.permute(3, 0, 1, 2)
    if axes == 1:
        return W.squeeze(-1)
    return W[0, ..., 0]


class GramBatch:
    """A batch of a client's own rows, by position: the ``x`` that ``affine`` multiplies with coordinates."""

    def __init__(self, basis: GramBasis, positions: Tensor) -> None:
        self.basis = basis
        self.shape = positions.shape  # without an axis of features
        M, n = basis.gram.shape[:2]
        self._positions = positions.reshape(M, -1)
        self._clients = torch.arange(M, device=positions.device).unsqueeze(1)
        self._rows = (self._clients * n + self._positions).flatten()

    def affine(self, W: Tensor) -> Tensor:
        """Outputs [.., B, U] for coordinates [.., k + n, U]."""
        out: Tensor = _Outputs.apply(W, self)
        return out

    def outputs(self, W: Tensor) -> Tensor:
        """The forward pass."""
        basis = self.basis
        B = self._positions.shape[1]
        full = inner(W, basis.axes)
        seen = basis.seen
        swapped = points_first(full)
        if swapped:
            full = full.mT
            seen = seen.mT
        M = len(full)
        last = full.shape[2:]
        k, R = seen.shape[1:3]
        n = basis.gram.shape[2]
        c = full[:, :k]
        A = full[:, k:]
        K = basis.gram.reshape(M * R, n).index_select(0, self._rows).view(M, B, n)
        # u = K A + sum_j c_j (X B_j'), for the rows of the batch: [M, B, U, G], or with the last two axes swapped.
        u = torch.bmm(K, A.reshape(M, n, -1)).view(M, B, *last)
        core = seen.shape[3:]
        for j in range(k):
            rows = seen[:, j].reshape(M * R, *core).index_select(0, self._rows)
            u.addcmul_(rows.view(M, B, *core), c[:, j].unsqueeze(1))
        if swapped:
            u = u.mT
        return outer(u, basis.axes)

    def moved(self, du: Tensor, like: Tensor) -> Tensor:
        """Coordinates of dL/dW from dL/du [.., B, U], in the memory order of ``like``.

        Each row of dL/du is added to the coordinates of the client's row that it belongs to.
        """
        basis = self.basis
        B = self._positions.shape[1]
        d = inner(du, basis.axes)
        swapped = points_first(inner(like, basis.axes))
        if swapped:
            d = d.mT
        M = len(d)
        last = d.shape[2:]
        k, n = basis.seen.shape[1:3]
        # The gradient is a linear combination of the batch's rows, so it has no coordinates on the bases.
        out = d.new_zeros(M, k + n, *last)
        rows = (self._clients * (k + n) + k + self._positions).flatten()
        flat = out.view(M * (k + n), -1)
        flat.index_add_(0, rows, d.reshape(M * B, -1))
        if swapped:
            out = out.mT
        return outer(out, basis.axes)


class _Outputs(torch.autograd.Function):
    """Outputs of maps in coordinates.

    The backward pass gives the coordinates of dL/dW, not the gradient with respect to the coordinates.
    """

    @staticmethod
    def forward(ctx: Any, W: Tensor, batch: GramBatch) -> Tensor:
        ctx.batch = batch
        ctx.save_for_backward(W)
        return batch.outputs(W)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.batch.moved(grads[0], *ctx.saved_tensors), None
