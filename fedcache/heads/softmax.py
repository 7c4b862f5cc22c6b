"""Softmax over classes, computed along the axis of memory where it is quickest.

torch's kernel for the last axis works on one row at a time. A row with fewer numbers than a vector register uses a part
of one register, so it takes up to ten times as long as the kernel for other axes, which works on many rows at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

REGISTER = 16
"""Numbers of a vector register; as many classes fill it."""

FEWEST = 1024
"""Numbers from which on a copy with the classes on another axis pays."""

Kernel = Callable[[Tensor, int], Tensor]


def softmax(u: Tensor) -> Tensor:
    """exp(u_c) / sum_k exp(u_k) over the last axis, the classes; [.., C]."""
    return _over_classes(torch.softmax, u)


def log_softmax(u: Tensor) -> Tensor:
    """u_c - log sum_k exp(u_k) over the last axis, the classes; [.., C]."""
    return _over_classes(torch.log_softmax, u)


def _over_classes(kernel: Kernel, u: Tensor) -> Tensor:
    if u.device.type != "cpu" or u.dim() < 2:
        return kernel(u, -1)
    if u.is_contiguous():
        quick = u.shape[-1] < REGISTER and u.numel() >= FEWEST
        if quick:
            return kernel(u.mT.contiguous(), -2).mT
        return kernel(u, -1)
    if u.mT.is_contiguous():
        return kernel(u.mT, -2).mT
    # Scores that lie in another order, as those of a grid do: the kernel would first put the classes last.
    order = sorted(range(u.dim()), key=u.stride, reverse=True)
    lies = u.permute(order)
    if not lies.is_contiguous() or order[-1] == u.dim() - 1:
        return kernel(u, -1)
    back = [order.index(axis) for axis in range(u.dim())]
    return kernel(lies, back[-1]).permute(back)
