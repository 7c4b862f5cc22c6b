"""Products of float32 matrices on the CPU by oneDNN, where they are worth it.

oneDNN, which torch brings for convolutions, takes half the time of torch's BLAS for products from some millions of
multiplications on: measured on an AMD EPYC with AVX-512; without AVX-512 they take the same time, and no processor of
another maker was tried. It compiles a kernel for every shape, in up to three times the time of a product of that size,
so it serves products of a shape that comes again: steps of local training, and blocks of a fixed number of rows.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

LEAST = 1 << 20
"""Multiplications from which on oneDNN is used; below, a call of it costs more than it saves."""

FEW = 16
"""Rows of a client from which on W x' is quicker than x W', where W has at least four times as many."""


def times_transposed(a: Tensor, b: Tensor) -> Tensor:
    """a b', [n, m], of matrices a [n, k] and b [m, k] in any order of memory; by oneDNN where ``by_onednn``."""
    if by_onednn(a, b):
        return _onednn(a, b, None)
    return a @ b.mT


def each_times_transposed(a: Tensor, b: Tensor) -> Tensor:
    """a_i b_i', [M, n, m], of M pairs of matrices a [M, n, k] and b [M, m, k]; each as ``times_transposed``."""
    if by_onednn(a, b):
        return _stacked([_onednn(one, other, None) for one, other in zip(a, b, strict=True)])
    return torch.bmm(a, b.mT)


def each_affine_by_onednn(x: Tensor, W: Tensor, b: Tensor) -> Tensor:
    """x_i W_i' + b_i, [M, B, C], of x [M, B, D], W [M, C, D] and b [M, C], for which ``by_onednn`` holds."""
    B = x.shape[1]
    C = W.shape[1]
    if FEW <= B <= C // 4:  # in four fifths of the time
        return each_times_transposed(W, x).mT + b.unsqueeze(-2)
    return _stacked([_onednn(rows, own, shift) for rows, own, shift in zip(x, W, b, strict=True)])


def by_onednn(a: Tensor, b: Tensor) -> bool:
    """Whether oneDNN computes a b'. It depends on shapes, dtype and the processor alone, never on measured times.

    a and b are matrices, or M > 0 matrices each.
    """
    *lead, n, k = a.shape
    return (
        n * k * b.shape[-2] >= LEAST
        and len(lead) < 2
        and 0 not in lead
        and a.dtype == b.dtype == torch.float32
        and a.device.type == b.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and onednn_works()
    )


@cache
def onednn_works() -> bool:
    """Whether the processor has AVX-512, and torch still has oneDNN's product, with the result of its own.

    It is not of torch's public interface, so another release may rename or change it; ``a @ b.mT`` then serves.
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
        # small integers, which float32 has exactly
        return torch.equal(_onednn(a, b, c), torch.addmm(c, a, b.mT))
    except (AttributeError, TypeError, RuntimeError):
        return False


def _onednn(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(_dense(a), _dense(b), bias, "none", [], "")
    return out


def _dense(t: Tensor) -> Tensor:
    """The matrix without gaps, by rows or by columns: oneDNN is 1,000 times slower with other strides."""
    if t.is_contiguous() or t.mT.is_contiguous():
        return t
    return t.contiguous()


def _stacked(each: list[Tensor]) -> Tensor:
    if len(each) > 1:
        return torch.stack(each)
    return each[0].unsqueeze(0)
