"""SimCLR's contrast of two views, and FLESD's distillation of similarities.

In the losses ``w`` [.., B] is 1/b on the b real rows of a batch and 0 on padding; each loss has one value per client.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from fedcache.heads.losses import mask_logits


def nt_xent(z1: Tensor, z2: Tensor, w: Tensor, tau: float | Tensor) -> Tensor:
    """SimCLR's loss: each of the 2B embeddings against the other 2B - 1; its positive is the other view of its row.

    Args:
        z1: [.., B, P] unit embeddings of one view.
        z2: [.., B, P] unit embeddings of the other view.
        w: [.., B] batch weights.
        tau: temperature, a number or broadcast against [.., 2B, 2B].

    Returns:
        [..]; log(2B - 1) when all embeddings are equal, 0 for a single row, which has no negative.
    """
    B = z1.shape[-2]
    z = torch.cat([z1, z2], -2)
    both = torch.cat([w, w], -1)
    s = z @ z.mT / tau
    # [.., 2B, 2B]: every real embedding but the query itself is a candidate; the positive is B places away.
    itself = torch.eye(2 * B, dtype=torch.bool, device=z.device)
    other = ~itself & (both > 0).unsqueeze(-2)
    total = torch.logsumexp(mask_logits(s, other), -1)
    positive = torch.cat([s.diagonal(B, -2, -1), s.diagonal(-B, -2, -1)], -1)
    # A padded row may have no candidate. Its weight is 0, and its total is finite, because masked logits are finite.
    return (0.5 * both * (total - positive)).sum(-1)


def one_way(z1: Tensor, z2: Tensor, w: Tensor, tau: float | Tensor) -> Tensor:
    """InfoNCE in one direction (D-30): rows of view 1 are queries, all rows of view 2 keys; log B when all are equal.

    Arguments and result as in ``nt_xent``; gradients pass through both views.
    """
    s = z1 @ z2.mT / tau
    real = (w > 0).unsqueeze(-2)
    total = torch.logsumexp(mask_logits(s, real), -1)
    positive = s.diagonal(0, -2, -1)
    return (w * (total - positive)).sum(-1)


def similarity_divergence(
    z: Tensor, keys: Tensor, target: Tensor, w: Tensor, tau: float | Tensor
) -> Tensor:
    """FLESD's L_ESD: mean KL(q || p) with p_ij = softmax_j(z_i . k_j / tau) (eqs 7 and 9).

    Args:
        z: [B, P] unit queries of the student; the gradient goes through them alone.
        keys: [A, P] unit anchors.
        target: [B, A] rows q_i that sum to 1; entries may be 0.
        w: [B] batch weights.
        tau: the student's temperature.

    Returns:
        []; 0 when p equals q.
    """
    log_p = torch.log_softmax(z @ keys.mT / tau, -1)
    kl: Tensor = (torch.special.xlogy(target, target) - target * log_p).sum(-1)
    return (w * kl).sum(-1)


class Ensemble:
    """Rows of the ensembled similarity matrix M = mean_k exp(M_k / tau), M_k = R_k R_k' (FLESD eqs 4 to 6).

    Entries are computed as exp((M_k - 1) / tau), which does not overflow in float32, because no entry of M_k is above
    1. This is eq 5 up to one constant factor, which the normalisation of eq 8 removes. The matrix is built once for up
    to ``EAGER`` rows. A larger one might not fit in memory, so its rows are computed when they are needed.

    Args:
        R: [K, N, d] unit representations of the public rows by each client.
        M: [K, N, N] similarities M_k, if clients sent these instead (exactly one of R and M is given).
        tau: the target temperature.
        keep: share of the similarities of a row that is kept (the largest ones); the others count as 0
            (``sim_topk_percent``).
        own: whether a row's similarity to itself is kept in addition (D-96).
    """

    EAGER = 5000

    def __init__(
        self,
        R: Tensor | None,
        M: Tensor | None,
        tau: float,
        keep: float = 1.0,
        *,
        own: bool = False,
    ) -> None:
        parts = R
        if R is None:
            parts = M
        self._parts: Sequence[Tensor] = list(cast(Tensor, parts))
        self._has_matrices = R is None
        self.size = len(self._parts[0])
        self._tau = tau
        self._kept = kept(self.size, keep, own=own)
        self._matrix: Tensor | None = None
        if self.size <= self.EAGER:
            every = torch.arange(self.size, device=self._parts[0].device)
            self._matrix = self._make(every)

    def _make(self, i: Tensor) -> Tensor:
        """``rows``, computed from the clients' representations or similarities."""
        total = torch.zeros(len(i), self.size, dtype=self._parts[0].dtype, device=i.device)
        for part in self._parts:  # one client at a time: memory is that of one [B, N] block
            if self._has_matrices:
                m = part[i]
            else:
                m = part[i] @ part.mT
            total += torch.exp((sparse(m, self._kept) - 1.0) / self._tau)
        return total / len(self._parts)

    def rows(self, i: Tensor) -> Tensor:
        """[B, N] rows ``i`` [B] of the matrix, up to one constant factor."""
        if self._matrix is not None:
            return self._matrix[i]
        return self._make(i)

    def targets(self, i: Tensor, anchors: Tensor, *, exclude_self: bool = False) -> Tensor:
        """q_ij over anchors j (eq 8): rows ``i`` [B] at columns ``anchors`` [A], normalised; [B, A]."""
        t = self.rows(i)[:, anchors]
        if exclude_self:
            t = torch.where(i.unsqueeze(-1) == anchors, torch.zeros_like(t), t)
        tiny = torch.finfo(t.dtype).tiny
        return t / t.sum(-1, keepdim=True).clamp(min=tiny)


def kept(rows: int, keep: float, *, own: bool = False) -> int:
    """Number of similarities of a row that are kept, of ``rows``: the share ``keep``, rounded, and at least one.

    With ``own``, as in the released code (D-96): the share rounded down, plus the row's similarity to itself, which is
    always 1 and need not be sent.
    """
    if keep >= 1.0:
        return rows
    if own:
        return min(rows, int(keep * rows) + 1)
    return max(1, round(keep * rows))


def sparse(m: Tensor, count: int) -> Tensor:
    """The ``count`` largest entries of each row of m [.., N]; the others are 0."""
    if count >= m.shape[-1]:
        return m
    values, index = m.topk(count, -1)
    return torch.zeros_like(m).scatter(-1, index, values)
