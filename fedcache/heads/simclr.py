"""SimCLR's augmentation and its contrast of two views, and FLESD's distillation of similarities.

The augmentation is resized crop, horizontal flip, colour jitter and grey: the recipe of Chen et al. (ICML 2020) without
blur, which they leave out for 32 px images. It is a function of (image, draws) alone: the same draws give the same view
on every execution and machine. In the losses ``w`` [.., B] is 1/b on the real rows of a batch and 0 on padding; every
one gives one value per client.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from fedcache.heads.losses import MASKED

DRAWS = 11
"""Uniform numbers one view of one image takes."""

AREA = (0.2, 1.0)
ASPECT = (3 / 4, 4 / 3)
JITTER = 0.4
HUE = 0.1
GREY = (0.299, 0.587, 0.114)

# RGB to YIQ: hue is an angle in the IQ plane.
_YIQ = ((0.299, 0.587, 0.114), (0.596, -0.274, -0.322), (0.211, -0.523, 0.312))


def augment(images: Tensor, u: Tensor, *, flip: bool) -> Tensor:
    """One view of each image.

    Args:
        images: [B, 3, H, W] in [0, 1].
        u: [B, DRAWS] uniform in [0, 1).
        flip: whether half of the views are mirrored; letters and digits must not be.

    Returns:
        [B, 3, H, W] in [0, 1].
    """
    return _colour(_crop(images, u[:, :5], flip=flip), u[:, 5:])


def _crop(x: Tensor, u: Tensor, *, flip: bool) -> Tensor:
    area = AREA[0] + (AREA[1] - AREA[0]) * u[:, 0]
    aspect = torch.exp(math.log(ASPECT[0]) + (math.log(ASPECT[1]) - math.log(ASPECT[0])) * u[:, 1])
    w = torch.sqrt(area * aspect).clamp(max=1.0)
    h = torch.sqrt(area / aspect).clamp(max=1.0)
    # In grid coordinates the image is [-1, 1]: a window of share w has its centre in [-(1 - w), 1 - w].
    cx, cy = (1.0 - w) * (2.0 * u[:, 2] - 1.0), (1.0 - h) * (2.0 * u[:, 3] - 1.0)
    sign = torch.where((u[:, 4] < 0.5) & flip, -1.0, 1.0).to(x.dtype)
    zero = torch.zeros_like(w)
    theta = torch.stack([torch.stack([sign * w, zero, cx], -1), torch.stack([zero, h, cy], -1)], -2).to(x.dtype)
    grid = affine_grid(theta, list(x.shape), align_corners=False)
    return grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False).clamp(0.0, 1.0)


def _colour(x: Tensor, u: Tensor) -> Tensor:
    grey = x.new_tensor(GREY).view(1, 3, 1, 1)
    strength = 1.0 + JITTER * (2.0 * u[:, 1:4] - 1.0)

    def each(values: Tensor) -> Tensor:
        return values.view(-1, 1, 1, 1)

    y = x * each(strength[:, 0])
    mean = (y * grey).sum(1, keepdim=True).mean((-2, -1), keepdim=True)
    y = mean + each(strength[:, 1]) * (y - mean)
    luma = (y * grey).sum(1, keepdim=True)
    y = luma + each(strength[:, 2]) * (y - luma)
    y = torch.einsum("bij,bjhw->bihw", _hue_rotation(u[:, 4], x), y)
    y = torch.where(each(u[:, 0]) < 0.8, y, x).clamp(0.0, 1.0)
    return torch.where(each(u[:, 5]) < 0.2, (y * grey).sum(1, keepdim=True).expand_as(y), y)


def _hue_rotation(u: Tensor, like: Tensor) -> Tensor:
    """[B, 3, 3] matrices that turn the hue by up to HUE of a full circle, either way."""
    angle = 2.0 * math.pi * HUE * (2.0 * u - 1.0)
    c, s, zero, one = torch.cos(angle), torch.sin(angle), torch.zeros_like(angle), torch.ones_like(angle)
    turn = torch.stack(
        [torch.stack([one, zero, zero], -1), torch.stack([zero, c, -s], -1), torch.stack([zero, s, c], -1)], -2
    )
    to = torch.tensor(_YIQ, dtype=torch.float64)
    back, to = torch.linalg.inv(to).to(like), to.to(like)
    matrix: Tensor = back @ turn.to(like.dtype) @ to
    return matrix


def nt_xent(z1: Tensor, z2: Tensor, w: Tensor, tau: float | Tensor) -> Tensor:
    """SimCLR's loss: each of the 2B embeddings against the other 2B - 1; its positive is its other view.

    Args:
        z1: [.., B, P] unit embeddings of one view.
        z2: [.., B, P] of the other.
        w: [.., B] batch weights.
        tau: temperature, a number or broadcast against [.., 2B, 2B].

    Returns:
        [..]; log(2B - 1) when all embeddings are equal, 0 for a single row, which has no negative.
    """
    B = z1.shape[-2]
    z = torch.cat([z1, z2], -2)
    both = torch.cat([w, w], -1)
    s = z @ z.mT / tau
    other = torch.eye(2 * B, dtype=torch.bool, device=z.device).logical_not() & (both > 0).unsqueeze(-2)
    total = torch.logsumexp(torch.where(other, s, s.new_full((), MASKED)), -1)
    positive = torch.cat([s.diagonal(B, -2, -1), s.diagonal(-B, -2, -1)], -1)
    # A padded row has no candidate; its weight is 0, and MASKED keeps the product finite.
    return (0.5 * both * (total - positive)).sum(-1)


def one_way(z1: Tensor, z2: Tensor, w: Tensor, tau: float | Tensor) -> Tensor:
    """InfoNCE in one direction (D-30): rows of view 1 are queries, all rows of view 2 keys; log B when all are equal.

    Arguments and result as in ``nt_xent``; gradients pass through both views.
    """
    s = z1 @ z2.mT / tau
    total = torch.logsumexp(torch.where((w > 0).unsqueeze(-2), s, s.new_full((), MASKED)), -1)
    return (w * (total - s.diagonal(0, -2, -1))).sum(-1)


def similarity_divergence(z: Tensor, keys: Tensor, target: Tensor, w: Tensor, tau: float | Tensor) -> Tensor:
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

    Rows are exp((M_k - 1) / tau): the diagonal of every M_k is 1, so this is eq 5 up to one constant, which the
    normalisation of eq 8 removes and float32 does not overflow on. The matrix is built once up to ``EAGER`` rows and
    row by row beyond, where it would not fit in memory.

    Args:
        R: [K, N, d] unit representations of the public rows by each client.
        M: [K, N, N] similarities, when clients sent matrices instead (exactly one of the two is given).
        tau: the target temperature.
        keep: share of similarities kept in a row, the largest; the others count as 0 (``sim_topk_percent``).
    """

    EAGER = 5000

    def __init__(self, R: Tensor | None, M: Tensor | None, tau: float, keep: float = 1.0) -> None:
        self._parts: Sequence[Tensor] = list(R if R is not None else cast(Tensor, M))
        self._square = R is None
        self._tau, self._keep = tau, keep
        self.size = len(self._parts[0])
        every = torch.arange(self.size, device=self._parts[0].device)
        self._whole = self._make(every) if self.size <= self.EAGER else None

    def _make(self, i: Tensor) -> Tensor:
        total = torch.zeros(len(i), self.size, dtype=self._parts[0].dtype, device=i.device)
        for part in self._parts:  # one client at a time: memory is that of one [B, N] block
            m = part[i] if self._square else part[i] @ part.mT
            total += torch.exp((sparse(m, self._keep) - 1.0) / self._tau)
        return total / len(self._parts)

    def rows(self, i: Tensor) -> Tensor:
        """[B, N] rows ``i`` [B] of the matrix, up to one constant factor."""
        return self._whole[i] if self._whole is not None else self._make(i)

    def targets(self, i: Tensor, anchors: Tensor, *, exclude_self: bool = False) -> Tensor:
        """q_ij over anchors j (eq 8): rows ``i`` [B] at columns ``anchors`` [A], normalised; [B, A]."""
        t = self.rows(i)[:, anchors]
        if exclude_self:
            t = torch.where(i.unsqueeze(-1) == anchors, torch.zeros_like(t), t)
        return t / t.sum(-1, keepdim=True).clamp(min=torch.finfo(t.dtype).tiny)


def sparse(m: Tensor, keep: float) -> Tensor:
    """The ``keep`` share of largest entries of each row of m [.., N]; the others are 0."""
    if keep >= 1.0:
        return m
    count = max(1, round(keep * m.shape[-1]))
    values, index = m.topk(count, -1)
    return torch.zeros_like(m).scatter(-1, index, values)
