"""Linear maps x W' + b, the only operation that heads train: products, gradients and initial weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fedcache.heads.gram import GramBatch

# oneDNN computes large products of float32 matrices on the CPU, if their shape is used repeatedly.
#
# torch contains oneDNN for its convolutions. For products of some millions of multiplications or
# more, oneDNN takes half the time of torch's BLAS, measured on an AMD EPYC with AVX-512. Without
# AVX-512 both take the same time; processors of other makers were not tried. But oneDNN compiles a
# kernel for every shape, which takes up to three times as long as one product of this shape. So it
# is used only for shapes that recur: steps of local training, and blocks of a fixed number of rows.

LEAST = 1 << 20
"""Number of multiplications in a product from which oneDNN is used. Below it, the call costs more than it saves."""

FEW = 16
"""With oneDNN: number of a client's rows from which W x' is faster than x W', if W has at least four times as many."""


def times_transposed(a: Tensor, b: Tensor) -> Tensor:
    """a b', [n, m], of matrices a [n, k] and b [m, k] in any order of memory; oneDNN computes it if ``by_onednn``."""
    if by_onednn(a, b):
        return _onednn(a, b, None)
    return a @ b.mT


def each_times_transposed(a: Tensor, b: Tensor) -> Tensor:
    """a_i b_i', [M, n, m], of M pairs of matrices a [M, n, k] and b [M, m, k]; each as ``times_transposed``."""
    if by_onednn(a, b):
        products = [_onednn(one, other, None) for one, other in zip(a, b, strict=True)]
        return _stacked(products)
    return torch.bmm(a, b.mT)


def each_affine_by_onednn(x: Tensor, W: Tensor, b: Tensor) -> Tensor:
    """x_i W_i' + b_i, [M, B, C], of x [M, B, D], W [M, C, D] and b [M, C], for which ``by_onednn`` holds."""
    B = x.shape[1]
    C = W.shape[1]
    if FEW <= B <= C // 4:  # W x' takes four fifths of the time of x W'
        return each_times_transposed(W, x).mT + b.unsqueeze(-2)
    products = [_onednn(rows, weight, bias) for rows, weight, bias in zip(x, W, b, strict=True)]
    return _stacked(products)


def by_onednn(a: Tensor, b: Tensor) -> bool:
    """Whether oneDNN computes a b'. It depends on shapes, dtype and the processor alone, never on measured times.

    a and b are matrices, or M > 0 matrices each.
    """
    *lead, n, k = a.shape
    if n * k * b.shape[-2] < LEAST:
        return False
    if len(lead) > 1 or 0 in lead:
        return False
    if not a.dtype == b.dtype == torch.float32:
        return False
    on_cpu = a.device.type == b.device.type == "cpu"
    return on_cpu and not torch.compiler.is_compiling() and onednn_works()


@cache
def onednn_works() -> bool:
    """Whether the processor has AVX-512, and torch has oneDNN's product, which gives the result of ``torch.addmm``.

    oneDNN's product is not in torch's public interface, so another release may rename or change it. Then ``a @ b.mT``
    is used instead.
    """
    if (
        torch.backends.cpu.get_cpu_capability() != "AVX512"
        or not torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    ):
        return False
    a = torch.arange(6.0).view(2, 3)
    b = torch.arange(12.0).view(4, 3) - 5.0
    c = torch.arange(4.0)
    try:
        # Both results must be equal: products of small integers are exact in float32.
        return torch.equal(_onednn(a, b, c), torch.addmm(c, a, b.mT))
    except (AttributeError, TypeError, RuntimeError):
        return False


def _onednn(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    # "none", [], "": no activation function is applied to the product.
    out: Tensor = torch.ops.mkldnn._linear_pointwise(_dense(a), _dense(b), bias, "none", [], "")
    return out


def _dense(t: Tensor) -> Tensor:
    """The matrix itself if it is contiguous by rows or by columns, else a copy.

    With other strides, oneDNN is 1,000 times slower.
    """
    if t.is_contiguous() or t.mT.is_contiguous():
        return t
    return t.contiguous()


def _stacked(each: list[Tensor]) -> Tensor:
    """``torch.stack``, without a copy if there is only one tensor."""
    if len(each) > 1:
        return torch.stack(each)
    return each[0].unsqueeze(0)


Tree = dict[str, Tensor]
"""Name -> tensor."""
Uniform = Callable[[tuple[int, ...]], Tensor]
"""Function that draws numbers in [-1, 1) for a shape of one client; the caller decides for which clients."""


def select(tree: Tree, names: Iterable[str]) -> Tree:
    """The tensors of these names, in the order of the names."""
    return {name: tree[name] for name in names}


FEWEST_ROWS = 16
"""Without oneDNN: number of a client's rows in a batch from which scores may be computed as W x'."""


class _Batched(torch.autograd.Function):
    """x W' + b of each client, by ``baddbmm`` or oneDNN, with a row-major gradient of W, which fused optimisers need.

    The gradient of torch's ``bmm`` is transposed. For small batches, a row-major copy of it would cost as much as the
    product.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x, W)
        if by_onednn(x, W):
            return each_affine_by_onednn(x, W, b)
        # W x' has the long axis last, which BLAS prefers for few classes and many features.
        if x.shape[-2] >= FEWEST_ROWS and _transposed(*W.shape[-2:]):
            return torch.baddbmm(b.unsqueeze(-1), W, x.mT).mT
        return torch.baddbmm(b.unsqueeze(-2), x, W.mT)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (du,) = grads
        x, W = ctx.saved_tensors
        need_x, need_w, need_b = ctx.needs_input_grad
        # Gradients of u = x W' + b: dx = du W, dW = du' x, db = the sum of du over rows.
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
    """Whether W x' is computed instead of x W': 1.2 to 1.7 times as fast for these shapes on the CPUs tried."""
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
    elif W.dim() == 2:
        # A step of local training. Its shape is used again, so compiling a kernel for it pays.
        if b is not None and W.requires_grad and by_onednn(x, W):
            alone: Tensor = _Batched.apply(x[None], W[None], b[None])
            return alone[0]
        # Whether W x' replaces x W' must not depend on the number of rows: an exported program takes any number.
        if not _transposed(*W.shape):
            return torch.nn.functional.linear(x, W, b)
        flat = x.reshape(-1, x.shape[-1])
        if b is None:
            scores = W @ flat.mT
        else:
            scores = torch.addmm(b.unsqueeze(-1), W, flat.mT)
        return scores.mT.contiguous().view(*x.shape[:-1], len(W))
    elif W.dim() == x.dim() == 4 and x.shape[0] == 1 < W.shape[0]:
        # All grid points read the same rows: fold the points into the output columns, one GEMM per client.
        G, M, C, D = W.shape
        folded = x[0] @ W.permute(1, 3, 0, 2).reshape(M, D, G * C)
        # The clients are counted by ``folded``, because M is 1 for a head that clients share.
        u = folded.view(folded.shape[0], -1, G, C).permute(2, 0, 1, 3)
    elif b is not None and x.dim() == W.dim() == 3 and x.shape[0] == W.shape[0]:
        out: Tensor = _Batched.apply(x, W, b)
        return out
    else:
        u = x @ W.mT
    if b is None:
        return u
    return u + b.unsqueeze(-2)


def affine_gradients(x: Tensor, du: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients with respect to W and b of a function of u = x W' + b, from its gradient ``du`` with respect to u.

    Args:
        x: [.., N, D] rows; leading axes as those of ``du``, or 1.
        du: [.., N, C].

    Returns:
        du' x [.., C, D], and the sum of du over rows [.., C].
    """
    points_share_rows = du.dim() == 4 and x.shape[0] == 1 < du.shape[0]
    if points_share_rows:
        # As in ``affine``: one GEMM per client for all points.
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
    W = bound * uniform((out, fan_in))
    b = bound * uniform((out,))
    return {f"{prefix}W": W, f"{prefix}b": b}


def text_head(text: Tensor) -> Tree:
    """The zero-shot classifier: W = [T_1 .. T_C]', b = 0, for class text features [C, D]."""
    return {"W": text.clone(), "b": text.new_zeros(len(text))}


def head_around(center: Tensor, W: Tensor, b: Tensor, dtype: torch.dtype) -> Tree:
    """The linear head of x that gives the scores (x - center) W' + b.

    The bias is computed in float64 from the rounded weights. So the weights' rounding errors are multiplied by
    x - center and not by x, which may be thousands of standard deviations from zero.

    Args:
        center: [D] in float64.
        W: [C, D] in float64.
        b: [C] in float64.
        dtype: of the head.
    """
    rounded = W.to(dtype)
    shifted = b - rounded.double() @ center
    return {"W": rounded.contiguous(), "b": shifted.to(dtype)}
