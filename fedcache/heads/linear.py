"""The linear map, the one operation every head is made of."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedcache.heads.gram import GramBatch
from fedcache.heads.products import by_onednn, each_affine_by_onednn, each_times_transposed

Tree = dict[str, Tensor]
Uniform = Callable[[tuple[int, ...]], Tensor]
"""Draws numbers in [-1, 1) of the given core shape; the caller decides for which clients."""

FEWEST_ROWS = 16
"""Rows of a client in a batch from which on their scores may be computed as W x'."""


class _Batched(torch.autograd.Function):
    """``baddbmm``, or oneDNN's products, whose weight gradient comes out row-major, as fused optimisers need it.

    Autograd's own ``bmm`` returns it transposed, and copying it back costs as much as the GEMM for small batches.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x, W)
        if by_onednn(x, W):
            return each_affine_by_onednn(x, W, b)
        # W x' has the long axis last, which BLAS prefers for few classes and many features.
        if x.shape[-2] >= FEWEST_ROWS and _transposed(*W.shape[-2:]):
            return torch.baddbmm(b.unsqueeze(-1), W, x.mT).mT
        out: Tensor = torch.baddbmm(b.unsqueeze(-2), x, W.mT)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (du,) = grads
        x, W = ctx.saved_tensors
        need_x, need_w, need_b = ctx.needs_input_grad
        # Of u = x W' + b: dx = du W, dW = du' x, db = the sum of du over rows.
        dx = None
        if need_x:
            dx = each_times_transposed(du, W.mT)
        dW = None
        if need_w:
            dW = each_times_transposed(du.mT, x.mT)
        db = None
        if need_b:
            db = du.sum(-2)
        return dx, dW, db


def _transposed(classes: int, width: int) -> bool:
    """Whether W x' is computed in place of x W': 1.2 to 1.7 times as fast for these shapes on the CPUs tried."""
    return 8 <= classes <= 32 and width >= 512


def affine(x: Tensor | GramBatch, W: Tensor, b: Tensor | None = None) -> Tensor:
    """``x W' + b`` for every client.

    Args:
        x: [.., N, D] rows, or a ``GramBatch`` of them.
        W: [.., C, D], leading axes equal to those of ``x``, or 1, or absent; coordinates for a ``GramBatch``.
        b: [.., C] or None.

    Returns:
        [.., N, C].
    """
    if isinstance(x, GramBatch):
        u = x.affine(W)
        if b is None:
            return u
        return u + b.unsqueeze(-2)
    if W.dim() == 2:
        # a step of local training: its shape comes again
        if b is not None and W.requires_grad and by_onednn(x, W):
            alone: Tensor = _Batched.apply(x[None], W[None], b[None])
            return alone[0]
        if not _transposed(
            *W.shape
        ):  # independent of the number of rows, as an exported program takes any
            return torch.nn.functional.linear(x, W, b)
        flat = x.reshape(-1, x.shape[-1])
        if b is None:
            scores = W @ flat.mT
        else:
            scores = torch.addmm(b.unsqueeze(-1), W, flat.mT)
        return scores.mT.contiguous().view(*x.shape[:-1], len(W))
    if W.dim() == 4 and x.dim() == 4 and x.shape[0] == 1 and W.shape[0] > 1:
        # All grid points read the same rows: fold the points into the output columns, one GEMM per client.
        G, M, C, D = W.shape
        folded = x[0] @ W.permute(1, 3, 0, 2).reshape(M, D, G * C)
        # M is 1 for a head that clients share
        u = folded.view(folded.shape[0], -1, G, C).permute(2, 0, 1, 3)
    elif b is not None and x.dim() == 3 and W.dim() == 3 and x.shape[0] == W.shape[0]:
        out: Tensor = _Batched.apply(x, W, b)
        return out
    else:
        u = x @ W.mT
    if b is None:
        return u
    return u + b.unsqueeze(-2)


def affine_gradients(x: Tensor, du: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of W and b behind ``u = x W' + b``, of a function whose gradient with respect to u is ``du``.

    Args:
        x: [.., N, D] rows; leading axes as those of ``du``, or 1.
        du: [.., N, C].

    Returns:
        du' x [.., C, D], and the sum of du over rows [.., C].
    """
    # as in ``affine``: one GEMM per client for all points
    if du.dim() == 4 and x.shape[0] == 1 and du.shape[0] > 1:
        G, M, N, C = du.shape
        folded = du.permute(1, 0, 3, 2).reshape(M, G * C, N) @ x[0]
        dW = folded.view(M, G, C, -1).transpose(0, 1)
    elif du.dim() == 3 and x.dim() == 3:
        dW = each_times_transposed(du.mT, x.mT)
    else:
        dW = du.mT @ x
    return dW, du.sum(-2)


def init_linear(uniform: Uniform, out: int, fan_in: int, prefix: str = "") -> Tree:
    """Weight [out, fan_in] and bias [out], both U(-1/sqrt(fan_in), 1/sqrt(fan_in))."""
    bound = 1.0 / math.sqrt(fan_in)
    return {f"{prefix}W": bound * uniform((out, fan_in)), f"{prefix}b": bound * uniform((out,))}


def text_head(text: Tensor) -> Tree:
    """The zero-shot classifier: W = [T_1 .. T_C]', b = 0, for class text features [C, D]."""
    return {
        "W": text.clone(),
        "b": torch.zeros(text.shape[0], dtype=text.dtype, device=text.device),
    }


def zero_head(classes: int, width: int, like: Tensor) -> Tree:
    """W = 0 [C, D] and b = 0 [C] with the dtype and device of ``like``."""
    return {"W": like.new_zeros(classes, width), "b": like.new_zeros(classes)}


def head_around(center: Tensor, W: Tensor, b: Tensor, dtype: torch.dtype) -> Tree:
    """Linear head of x, from one of x - center: scores (x - center) W' + b.

    The bias is computed in float64 for the weights as they are rounded. So their rounding errors are multiplied by
    x - center and not by x, which may be thousands of standard deviations from zero.

    Args:
        center: [D] in float64.
        W: [C, D] in float64.
        b: [C] in float64.
        dtype: of the head.
    """
    rounded = W.to(dtype)
    return {"W": rounded.contiguous(), "b": (b - rounded.double() @ center).to(dtype)}
