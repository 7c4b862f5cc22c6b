"""Prototypes: class means of projections, how a server merges them, and how they classify."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import normalize, one_hot

from fedcache.heads.losses import mask_logits


def class_means(z: Tensor, y: Tensor, mask: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Prototype of each class: the mean projection of its examples (FedPCL eq 5, FedProto eq 3).

    Args:
        z: [.., N, P] projections.
        y: [.., N] class indices below ``classes``.
        mask: [.., N] 1.0 for an example, 0.0 for padding.
        classes: C.

    Returns:
        prototype [.., C, P] and count [.., C]. A class with count 0 has a zero row; test the count, not the row.
    """
    # [.., N, C]: 1 where a row is an example of the class, so one product sums the rows of each class.
    member = one_hot(y, classes).to(z.dtype) * mask.unsqueeze(-1)
    count = member.sum(-2)
    total = member.mT @ z
    return total / count.clamp(min=1.0).unsqueeze(-1), count


def merge(sets: Tensor, counts: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    """The global prototypes of several clients' sets (FedPCL eq 6), summed in float64.

    Args:
        sets: [.., m, C, P] local prototypes.
        counts: [.., m, C] number of examples behind each; 0 where a client does not own the class.
        rule: ``weighted``: client i has the weight n_ij / N_j, its share of the examples of class j; ``mean``: all
            owners O_j of the class have equal weights (released code); ``eq6``: the printed equation, which is
            ``weighted`` with an extra factor 1/|O_j| (D-06).

    Returns:
        prototype [.., C, P] (zero rows where no client has the class) and has [.., C], bool.
    """
    n = counts.double()
    owners = (n > 0).double()
    weight = n
    if rule == "mean":
        weight = owners
    total = weight.sum(-2)
    if rule == "eq6":
        total = total * owners.sum(-2)
    summed = (weight.unsqueeze(-1) * sets.double()).sum(-3)
    mixed = summed / total.clamp(min=1.0).unsqueeze(-1)
    return mixed.to(sets.dtype), owners.sum(-2) > 0


def dots(z: Tensor, sets: Tensor) -> Tensor:
    """z . C of rows z [.., N, P] and all prototypes of S sets [.., S, C, P], by one product; [.., N, S, C]."""
    flat = sets.flatten(-3, -2)
    clients_share_sets = z.dim() == flat.dim() == 4 and flat.shape[1] == 1
    if clients_share_sets:
        # One product for all clients of a grid point.
        G, M, N, P = z.shape
        rows = z.reshape(G, M * N, P)
        u = (rows @ flat[:, 0].mT).view(G, M, N, -1)
    else:
        u = z @ flat.mT
    return u.reshape(*u.shape[:-1], *sets.shape[-3:-1])


def scores(z: Tensor, prototype: Tensor, has: Tensor, rule: str) -> Tensor:
    """Similarity of each row to each class prototype, to be maximised.

    Args:
        z: [.., N, P] projections.
        prototype: [.., C, P].
        has: [.., C] true where the prototype exists. A class without one is never predicted if another class has one.
        rule: ``dot``; ``cos``; ``mse``, where argmin |z - C|^2 = argmax(z . C - |C|^2 / 2).

    Returns:
        [.., N, C].
    """
    if rule == "cos":
        s = normalize(z, dim=-1) @ normalize(prototype, dim=-1).mT
    else:
        s = z @ prototype.mT
        if rule == "mse":
            # |z - C|^2 = |z|^2 - 2 (z . C - |C|^2 / 2), and |z|^2 is the same for every class.
            s = s - 0.5 * (prototype**2).sum(-1).unsqueeze(-2)
    return mask_logits(s, has.unsqueeze(-2))
