"""Class balance: the number of synthetic rows of each class that balances soft labels (FST-CBDG eq 7)."""

from __future__ import annotations

import torch
from torch import Tensor


def votes(q: Tensor, weight: Tensor) -> Tensor:
    """m_k = #{j : argmax q_j = k}.

    Ties go to the first tied class at or after class (row mod C), so that labels with equal entries spread evenly.

    Args:
        q: [.., R, C] soft labels.
        weight: [.., R]; rows with weight 0 are padding.

    Returns:
        int64 [.., C].
    """
    C = q.shape[-1]
    row = torch.arange(q.shape[-2], device=q.device)
    k = torch.arange(C, device=q.device)
    # Distance of each class from (row mod C), going round; the closest of the tied classes gets the vote.
    distance = (k - row.unsqueeze(-1)) % C
    tied = q == q.amax(-1, keepdim=True)
    best = torch.where(tied, distance, C).argmin(-1)
    m = torch.zeros(*q.shape[:-2], C, dtype=torch.int64, device=q.device)
    counted = (weight > 0).expand(best.shape)
    return m.scatter_add_(-1, best, counted.long())


def deficits(m: Tensor, gamma: float | Tensor, *, equal: bool = False) -> Tensor:
    """n_k = round((1 + gamma) max m) - m_k; with ``equal`` (table 4), the same total, spread evenly over the classes.

    Args:
        m: int64 [.., C] rows of each class.
        gamma: >= 0, a float or one per grid point [G, 1].
        equal: every class gets round(sum_k n_k / C).

    Returns:
        int64 [.., C], never negative.
    """
    most = m.amax(-1, keepdim=True).double()
    scale = gamma
    if isinstance(scale, Tensor):
        scale = scale.unsqueeze(-1)
    n = torch.round((1.0 + scale) * most).long() - m
    if equal:
        mean = n.sum(-1, keepdim=True).double() / m.shape[-1]
        n = torch.round(mean).long().expand(m.shape)
    return n
