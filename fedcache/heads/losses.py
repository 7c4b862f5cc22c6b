"""Losses with one value per client. ``w`` [.., B] is 1/b on the b real rows of a batch and 0 on padding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

# Softmax over classes, computed along the axis of memory where it is quickest.
#
# torch's kernel for the last axis works on one row at a time. A row with fewer numbers than a
# vector register uses a part of one register, so it takes up to ten times as long as the kernel
# for other axes, which works on many rows at once.

REGISTER = 16
"""Number of values that fit into a vector register."""

FEWEST = 1024
"""Number of scores from which copying them to move the axis of classes saves time."""

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
    # Scores of a grid have their axes in another order of memory. Along the last axis, torch's kernel would first copy
    # them; along the axis that this order gives to the classes, it does not.
    order = sorted(range(u.dim()), key=u.stride, reverse=True)
    in_memory = u.permute(order)
    if not in_memory.is_contiguous() or order[-1] == u.dim() - 1:
        return kernel(u, -1)
    back = [order.index(axis) for axis in range(u.dim())]
    return kernel(in_memory, back[-1]).permute(back)


MASKED = -1e30
"""Value of masked logits. It is finite, because with -inf a row with only masked candidates has a NaN gradient."""


def mask_logits(u: Tensor, keep: Tensor) -> Tensor:
    """Logits u where ``keep`` is true, ``MASKED`` elsewhere."""
    return torch.where(keep, u, u.new_full((), MASKED))


def cross_entropy(u: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """Weighted cross-entropy of logits u [.., B, C] at class indices y [.., B]; returns [..]."""
    lead = u.shape[:-1]
    log_p = log_softmax(u)  # one kernel; logsumexp is several
    of_label = log_p.gather(-1, y.expand(lead).unsqueeze(-1)).squeeze(-1)
    return (w * -of_label).sum(-1)


def proto_contrast(u: Tensor, y: Tensor, candidate: Tensor, include: bool) -> Tensor:
    """Prototype contrast with the rows as anchors, -s_y + logsumexp_{c in A(y)} s_c (FedPCL eqs 8 and 9).

    A(y) are the classes that have a prototype, with or without y itself.

    Args:
        u: [.., C] similarities s_c = z . C^(c) / tau of each row to each class.
        y: class index of each row, the shape of ``u`` without its last axis.
        candidate: [.., C] true where the class has a prototype, broadcast against ``u``.
        include: whether A(y) contains y itself, as in InfoNCE. Without y, as printed, the loss is
            -log(p_y / (1 - p_y)) of the softmax p, which has no lower bound unless z has unit length.

    Returns:
        one value per row, 0 where fewer than two classes have a prototype (there are no negatives). Where class y has
        no prototype, the value is finite and meaningless: leave such rows out.
    """
    index = y.unsqueeze(-1)
    # Classes without a prototype get a logit so low that their softmax is 0.
    masked = mask_logits(u, candidate)
    if include:  # log_softmax is one kernel; logsumexp is several
        value = -log_softmax(masked).gather(-1, index).squeeze(-1)
    else:
        log_sum = torch.logsumexp(masked.scatter(-1, index, MASKED), -1)
        value = log_sum - u.gather(-1, index).squeeze(-1)
    has_negatives = candidate.sum(-1) > 1
    return value * has_negatives.to(value.dtype)


def anchor_contrast(sim: Tensor, y: Tensor, real: Tensor, *, skip: bool = False) -> Tensor:
    """Contrast with one anchor per row, and the rows of its class as positives.

    mean_a -1/|Pos(a)| sum_{j in Pos(a)} log( exp(s_aj) / sum_{l != a} exp(s_al) ), Pos(a) = {j != a : y_j = y_a}.
    If each row's anchor is the prototype of its class, this is the released ConLoss of FedPCL (D-04).

    Args:
        sim: [.., L, L] similarity of row a's anchor to the embedding of row l, over tau.
        y: [.., L] class indices.
        real: [.., L] true for rows that count; padding and rows without a prototype do not.
        skip: leave anchors without a positive out of the mean; otherwise they count as 0.

    Returns:
        [..]: the mean over real rows.
    """
    # [.., L, L]: pairs of different rows that count, and among them those of one class.
    eye = torch.eye(y.shape[-1], dtype=torch.bool, device=y.device)
    pair = real.unsqueeze(-1) & real.unsqueeze(-2) & ~eye
    same_class = y.unsqueeze(-1) == y.unsqueeze(-2)
    positive = (pair & same_class).to(sim.dtype)
    log_p = sim - torch.logsumexp(mask_logits(sim, pair), -1, keepdim=True)
    hits = positive.sum(-1)
    # The mean over an anchor's positives; masked entries are zeroed first, because 0 times an infinite entry is NaN.
    of_pairs = torch.where(pair, log_p, torch.zeros_like(sim))
    value = -(positive * of_pairs).sum(-1) / hits.clamp(min=1.0)
    if skip:
        real = real & (hits > 0)
    rows = real.to(sim.dtype)
    return (value * rows).sum(-1) / rows.sum(-1).clamp(min=1.0)


def supervised_contrast(z: Tensor, y: Tensor, w: Tensor, tau: float | Tensor) -> Tensor:
    """SupCon: every embedding is an anchor, and the others of its class are its positives.

    mean_i -1/|Pos(i)| sum_{p in Pos(i)} log( exp(z_i.z_p/tau) / sum_{a != i} exp(z_i.z_a/tau) ), over the rows i with
    a positive; 0 when no row has one.

    Args:
        z: [.., L, P] embeddings, of one view or of several after one another.
        y: [.., L] class indices.
        w: [.., L] batch weights.
        tau: temperature; a tensor has the axes of ``z``.

    Returns:
        [..].
    """
    lead = z.shape[:-1]
    sim = z @ z.mT / tau
    real = (w > 0).expand(lead)
    return anchor_contrast(sim, y.expand(lead), real, skip=True)


def set_contrast(
    u: Tensor, y: Tensor, w: Tensor, inside: Tensor, *, anchored: bool, include: bool
) -> Tensor:
    """Contrast of a batch against several sets of prototypes at once, one value per set.

    Args:
        u: [.., B, S, C] similarity of each row to class c's prototype of set s, over tau.
        y: [.., B] class indices.
        w: [.., B] batch weights.
        inside: [.., S, C] true where set s has class c. A row adds nothing to a set without its class, and the mean
            is over the rows whose class some set has.
        anchored: prototypes are the anchors (``anchor_contrast``), else rows are (``proto_contrast``).
        include: as in ``proto_contrast``.

    Returns:
        [.., S].
    """
    B, S = u.shape[-3:-1]
    y = y.expand(u.shape[:-2]).unsqueeze(-1).expand(u.shape[:-1])
    mask = inside.unsqueeze(-3).expand(u.shape)
    has_class = mask.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    real = (w > 0).unsqueeze(-1) & has_class
    if anchored:
        # [.., S, l, a]: the class of row a
        anchor = y.mT.unsqueeze(-2).expand(*u.shape[:-3], S, B, B)
        sim = u.movedim(-2, -3).gather(-1, anchor).mT
        return anchor_contrast(sim, y.mT, real.mT)
    per_row = proto_contrast(u, y, inside.unsqueeze(-3), include)
    rows = (w.unsqueeze(-1) * real).to(u.dtype)
    # Every set is divided by the weight of the rows whose class some set has, so sets with few classes weigh less.
    known = (w.unsqueeze(-1) * real.any(-1, keepdim=True)).sum(-2)
    tiny = torch.finfo(u.dtype).tiny
    return (rows * per_row).sum(-2) / known.clamp(min=tiny)


def not_true_divergence(u: Tensor, g: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """KL( softmax_{c != y}(g) || softmax_{c != y}(u) ): FedNTD's distillation of the classes that are not true.

    Args:
        u: [.., B, C] logits of the student, over the temperature.
        g: [.., B, C] logits of the teacher, over the temperature; leading axes full or 1.
        y: [.., B] class indices; each row's column y is left out of both softmaxes.
        w: [.., B] batch weights.

    Returns:
        [..]; exactly 0 at u = g, with a gradient that is exactly 0 in the column of y.
    """
    # The softmax over the classes that are not true: the true one's logit is masked in both models.
    index = y.expand(u.shape[:-1]).unsqueeze(-1)
    log_u = log_softmax(u.scatter(-1, index, MASKED))
    log_g = log_softmax(g.expand(u.shape).scatter(-1, index, MASKED))
    divergence = (log_g.exp() * (log_g - log_u)).sum(-1)
    return (w * divergence).sum(-1)


def model_contrast(z: Tensor, near: Tensor, far: Tensor, tau: float | Tensor, w: Tensor) -> Tensor:
    """-log[ e^{cos(z, near) / tau} / (e^{cos(z, near) / tau} + e^{cos(z, far) / tau}) ], MOON's contrast of models.

    It is softplus((cos(z, far) - cos(z, near)) / tau): log 2 with zero gradient where ``near`` is ``far``.

    Args:
        z: [.., B, P] projections by the model that trains.
        near: [.., B, P] projections by the model that z is pulled to; leading axes full or 1.
        far: [.., B, P] projections by the model that z is pushed from; leading axes full or 1.
        tau: temperature, a number or shaped to scale [.., B].
        w: [.., B] batch weights.

    Returns:
        [..].
    """
    z = normalize(z, dim=-1)
    difference = normalize(far, dim=-1) - normalize(near, dim=-1)
    gap = (z * difference).sum(-1)
    return (w * softplus(gap / tau)).sum(-1)
