"""Numbers that explain a result: a generalisation bound, what an exchange costs, how sure zero-shot labels are, and
how much each backbone says of what all of them say. Pure functions of arrays; none is read by training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedcache.errors import UsageError, unknown

FUSION_NORMS = ("column", "none")


@dataclass(frozen=True)
class Bound:
    """Theorem 4.1 of FedPCL: how far the expected loss may lie above the one that was measured."""

    printed: float  # sqrt((N/2) ln((m+1)C / delta)) + ``capacity``; it grows with N
    corrected: float  # sqrt(ln((m+1)C / delta) / (2N)) + ``capacity``
    capacity: float  # sqrt((d/N) ln(e N / d)), the term both share


def generalisation_bound(
    rows: int, clients: int, classes: int, dimension: int, delta: float = 0.05
) -> Bound:
    """The bound of FedPCL (A theorem 4.1, eq 11), as printed and corrected.

    The printed first term takes McDiarmid's constants c_i as 1. Changing one of N rows changes a mean by at most 1/N;
    with c_i = 1/N that term falls with N, as a bound should. Raises FedcacheError, exit 2 for counts below 1, a delta
    outside (0, 1), or d >= e N, where the theorem says nothing.

    Args:
        rows: N, training rows of all clients.
        clients: m.
        classes: C.
        dimension: d, the VC dimension of the head; D + 1 for a linear one on D features.
        delta: probability with which the bound may fail.
    """
    counts = {"rows": rows, "clients": clients, "classes": classes, "dimension": dimension}
    for name, value in counts.items():
        if value < 1:
            raise UsageError(
                f"{name} is {value}, expected at least 1.", "Give the count of the run."
            )
    if not 0.0 < delta < 1.0:
        raise UsageError(
            f"delta is {delta}, expected a probability between 0 and 1.", "For example delta=0.05."
        )
    if dimension >= math.e * rows:
        raise UsageError(
            f"The bound needs d < e N, found d = {dimension} and e N = {math.e * rows:.1f} ({rows} rows).",
            f"Use more rows (at least {math.floor(dimension / math.e) + 1}), or a head of fewer dimensions.",
        )
    capacity = math.sqrt(dimension / rows * math.log(math.e * rows / dimension))
    chance = math.log((clients + 1) * classes / delta)
    return Bound(
        printed=math.sqrt(rows / 2 * chance) + capacity,
        corrected=math.sqrt(chance / (2 * rows)) + capacity,
        capacity=capacity,
    )


@dataclass(frozen=True)
class Exchange:
    """Scalars one client sends in a whole run, by what it sends; what it receives is not counted."""

    representations: int  # N_pub d numbers a round, FLESD's features of the public set
    matrices: (
        int  # N_pub (N_pub - 1) / 2 a round, their similarities (symmetric, with a known diagonal)
    )
    weights: int  # |w| a round, weight averaging

    @property
    def cheaper(self) -> bool:
        """FLESD's inequality (C eq 11): whether representations cost less than weights."""
        return self.representations < self.weights

    @property
    def send(self) -> str:
        """The smaller form of FLESD's upload: ``reps`` while d < (N_pub - 1) / 2, else ``matrix``."""
        return "reps" if self.representations < self.matrices else "matrix"


def flesd_exchange(
    public: int, width: int, weights: int, rounds: int, average_rounds: int | None = None
) -> Exchange:
    """What FLESD and weight averaging send (C eq 11, uplink only: the model comes down in both).

    Raises FedcacheError, exit 2 for a negative number.

    Args:
        public: N_pub, rows of the public set.
        width: d of a representation.
        weights: |w|, scalars of the model.
        rounds: of FLESD.
        average_rounds: of weight averaging; None for as many.
    """
    average = rounds if average_rounds is None else average_rounds
    counts = {
        "public": public,
        "width": width,
        "weights": weights,
        "rounds": rounds,
        "average_rounds": average,
    }
    for name, value in counts.items():
        if value < 0:
            raise UsageError(
                f"{name} is {value}, expected at least 0.", "Give the count of the run."
            )
    return Exchange(public * width * rounds, public * (public - 1) // 2 * rounds, weights * average)


def fusion_similarity(single: Tensor, fused: Tensor, owned: Tensor, norm: str = "column") -> Tensor:
    """How near each backbone's prototypes are to those of all backbones together (A figure 3).

    s_ki is the mean over the classes client i owns of <C_i^(j) from backbone k alone, C_i^(j) from all>, of unit
    prototypes. It compares coordinates, so it means something only where the projections start from one basis;
    ``linear_cka`` does not ask for that. Raises FedcacheError, exit 2 for an unknown norm.

    Args:
        single: [K, M, C, P] prototypes of models on one backbone each.
        fused: [M, C, P] of the model on all of them.
        owned: bool [M, C].
        norm: ``column`` divides every client's column by its sum; ``none`` leaves cosines (the paper says only
            "normalized").

    Returns:
        [K, M]; NaN for a client that owns no class, and by ``column`` where a column does not sum to more than 0.
    """
    if norm not in FUSION_NORMS:
        raise unknown("fusion_norm", norm, FUSION_NORMS)
    cosine = (normalize(single, dim=-1) * normalize(fused, dim=-1)).sum(-1)
    mine = owned.to(cosine.dtype)
    s = (cosine * mine).sum(-1) / mine.sum(-1)
    if norm == "none":
        return s
    total = s.sum(0)
    return torch.where(total > 0, s / total, s.new_full((), math.nan))


def linear_cka(x: Tensor, y: Tensor) -> float:
    """Linear centred kernel alignment of two representations of the same rows (Kornblith et al., ICML 2019).

    |Yc'Xc|^2 / (|Xc'Xc| |Yc'Yc|) with centred columns: 1 for representations equal up to a rotation and a scale,
    whatever their widths or first weights. Raises FedcacheError, exit 2 when the numbers of rows differ.

    Args:
        x: [N, P] projections.
        y: [N, Q] projections of the same rows.

    Returns:
        between 0 and 1; NaN where a representation is constant.
    """
    if x.shape[0] != y.shape[0]:
        raise UsageError(
            f"The representations have {x.shape[0]} and {y.shape[0]} rows.",
            "Project the same rows with both models.",
        )
    a, b = (t.double() - t.double().mean(0) for t in (x, y))
    norm = torch.linalg.matrix_norm
    return float(norm(b.mT @ a) ** 2 / (norm(a.mT @ a) * norm(b.mT @ b)))
