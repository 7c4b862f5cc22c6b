"""Linear maps on frozen rows in coordinates: what the execution ``gram`` computes with.

SGD on a linear map of a client's rows X [n, D] never leaves a small space: with bases B_j [U, D] (the weights it starts
from, those it is pulled to) every iterate is

    W = sum_j c_j B_j + A' X,        c_j scalar, A [n, U].

A step moves A by the rows of dL/du and, as momentum, weight decay and pulls towards other such maps are linear, acts on
(c, A) as it would on W. Outputs are u = sum_j c_j (X B_j') + K A with K = X X', computed once. So W [.., U, D] becomes
one tensor of coordinates [.., k + n, U]: k rows that each repeat c_j, then A; an optimiser steps it like any other.
It is exact for SGD; not for Adam, whose second moment depends on the coordinates.

Inside, the client axis comes first and grid points last, (M, rows, U, G): one GEMM per client serves all points, and a
step's gradient is an addition of whole rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class GramBasis:
    """What outputs are made of for a chunk of clients.

    Attributes:
        gram: [M, R, n] products of R rows with the client's own, zero past them; K [M, n, n] where it is trained.
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
    return W.permute(1, 2, 3, 0) if axes == 2 else W.reshape(-1, *W.shape[-2:]).unsqueeze(-1)


def outer(W: Tensor, axes: int) -> Tensor:
    """(M, R, U, G) -> coordinates [.., R, U], a view; memory stays in the inner order."""
    return W.permute(3, 0, 1, 2) if axes == 2 else W.squeeze(-1) if axes == 1 else W[0, ..., 0]


class GramBatch:
    """A batch of a client's own rows, by position: the ``x`` that ``affine`` multiplies with coordinates."""

    def __init__(self, basis: GramBasis, positions: Tensor) -> None:
        self.basis = basis
        self.shape = positions.shape  # of the rows; there is no last axis to read
        M, n = basis.gram.shape[:2]
        self._at = positions.reshape(M, -1)
        self._first = torch.arange(M, device=positions.device).unsqueeze(1)
        self._rows = (self._first * n + self._at).flatten()

    def affine(self, W: Tensor) -> Tensor:
        """Outputs [.., B, U] for coordinates [.., k + n, U]."""
        out: Tensor = _Outputs.apply(W, self)
        return out

    def outputs(self, W: Tensor) -> Tensor:
        """The forward pass."""
        basis, B = self.basis, self._at.shape[1]
        full = inner(W, basis.axes)
        M, _, U, G = full.shape
        k, R = basis.seen.shape[1:3]
        n = basis.gram.shape[2]
        c, A = full[:, :k], full[:, k:]
        K = basis.gram.reshape(M * R, n).index_select(0, self._rows).view(M, B, n)
        u = torch.bmm(K, A.reshape(M, n, U * G)).view(M, B, U, G)
        for j in range(k):
            rows = basis.seen[:, j].reshape(M * R, U, -1).index_select(0, self._rows).view(M, B, U, -1)
            u.addcmul_(rows, c[:, j].unsqueeze(1))
        return outer(u, basis.axes)

    def moved(self, du: Tensor) -> Tensor:
        """The coordinates of dL/dW for dL/du [.., B, U]: its rows, added where they came from."""
        basis, B = self.basis, self._at.shape[1]
        d = inner(du, basis.axes)
        M, _, U, G = d.shape
        k, n = basis.seen.shape[1:3]
        out = d.new_zeros(M, k + n, U, G)
        rows = (self._first * (k + n) + k + self._at).flatten()
        out.view(M * (k + n), U * G).index_add_(0, rows, d.reshape(M * B, U * G))
        return outer(out, basis.axes)


class _Outputs(torch.autograd.Function):
    """Outputs whose backward gives the coordinates of the primal gradient, not the gradient of the coordinates."""

    @staticmethod
    def forward(ctx: Any, W: Tensor, span: GramBatch) -> Tensor:
        ctx.span = span
        return span.outputs(W)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.span.moved(grads[0]), None
