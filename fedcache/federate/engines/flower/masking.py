"""Masked uploads for secure aggregation: one vector of bounded numbers per site; the server sees only sums.

Every pooled mean and sum is linear in the uploads, so the sum of the vectors is all that the server needs:

    averaged by rows      v_i = n_i (t_i - broadcast) / n_max       averaged evenly    v_i = t_i - broadcast
    summed                v_i = t_i / n_max                         counts of rows     v_i = C n_ic / n_max

with n_max the largest number of training rows that a site declares, and C the bound within which every number must lie:
SecAgg+ rounds [-C, C] to a grid of integers, so the sum is exact to 2 C m / levels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fedcache.errors import FederatedRunError, UsageError
from fedcache.federate.engine.hyperparameters import Hp
from fedcache.federate.engine.method import Method, Pooling, Uploads
from fedcache.federate.trust.policy import TrustPolicy
from fedcache.heads.linear import Tree

LEAST_SITES = 3
"""Of fewer, a sum tells each site what the other sent."""

BOUND = 8.0
"""C where nothing is said: Flower's own default."""

MODULUS = 1 << 32
"""Masked numbers are integers below this, and so must the sum of a round's quantised numbers be."""


def levels_for(sites: int) -> int:
    """How many levels [-C, C] is rounded to: the largest power of 2 that the sites' sum keeps below the modulus.

    >>> levels_for(3) == 1 << 30, levels_for(4) == 1 << 29
    (True, True)
    """
    return 1 << math.floor(math.log2((MODULUS - 1) / sites))


def check_secure(method: Method, hp: Hp, trust: TrustPolicy) -> None:
    """Refuse what needs single uploads. Raises UsageError, with the reason."""
    kept = sorted(name or "everything" for name, rule in method.pool(hp).items() if rule == "stack")
    if kept:
        raise UsageError(
            f"{method.name} cannot be aggregated securely: its server keeps {', '.join(kept)} of each site, and secure "
            "aggregation gives it sums alone.",
            "Methods that average or add uploads can: fedavg, fedprox, fedncm, fed3r, fedcgs, scaffold, ...",
        )
    if not trust.plain or trust.max_share is not None:
        raise UsageError(
            f"{trust.options_given} looks at single uploads, and --secure hides them.",
            "Leave one of them out.",
        )


@dataclass(frozen=True)
class MaskedTensor:
    """Where a tensor of an upload stands in the vector, and what it is there."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # of the upload: ``float32``
    rule: Pooling  # how the method pools it
    counts: bool  # numbers of rows, which are whole
    moved: bool  # whether it stands as its difference from what was broadcast

    @property
    def size(self) -> int:
        """Numbers."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Masking:
    """What server and sites agree on before a round: the order of the vector and the numbers it is scaled by."""

    tensors: tuple[MaskedTensor, ...]
    scale: float  # n_max
    bound: float  # C

    @classmethod
    def of(
        cls, method: Method, hp: Hp, expected: Uploads, broadcast: Tree, scale: float, bound: float
    ) -> Masking:
        """The masking of uploads that a method declares, answered to that broadcast."""
        rules = sorted(method.pool(hp).items(), key=lambda item: -len(item[0]))
        made = []
        for name, t in sorted(expected.items()):
            rule = next(rule for prefix, rule in rules if name.startswith(prefix))
            counts = t.counts_rows or not t.dtype.is_floating_point
            there = name in broadcast and tuple(broadcast[name].shape) == tuple(t.shape)
            moved = rule in ("mean", "uniform") and there and not counts
            made.append(
                MaskedTensor(
                    name, tuple(t.shape), str(t.dtype).removeprefix("torch."), rule, counts, moved
                )
            )
        return cls(tuple(made), scale, bound)

    @property
    def size(self) -> int:
        """d, numbers in a vector."""
        return sum(t.size for t in self.tensors)

    def to_words(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_words(cls, words: Mapping[str, Any]) -> Masking:
        """The inverse of ``to_words``."""
        tensors = tuple(MaskedTensor(**{**t, "shape": tuple(t["shape"])}) for t in words["tensors"])
        return cls(tensors, float(words["scale"]), float(words["bound"]))

    def vector(self, up: Tree, broadcast: Tree, rows: float) -> Tensor:
        """[d] float64 of one upload by a site with that many training rows.

        Raises FederatedRunError for an upload of other names or shapes, or with a number out of bounds.
        """
        if {n: (tuple(t.shape), t.dtype) for n, t in up.items()} != {
            t.name: (t.shape, getattr(torch, t.dtype)) for t in self.tensors
        }:
            raise FederatedRunError(
                "The server asks for other tensors than this site's upload has.",
                "Install the same fedcache at both.",
            )
        parts = [torch.zeros(0, dtype=torch.float64)]
        for t in self.tensors:
            value = up[t.name].double()
            if t.moved:
                value = value - broadcast[t.name].double()
            parts.append((value * self._factor(t, rows)).flatten())
        made = torch.cat(parts)
        largest = 0.0
        if len(made):
            largest = float(made.abs().max())
        if not largest <= self.bound:
            if math.isfinite(largest):
                needed = 2.0 ** math.ceil(math.log2(largest))
            else:
                needed = math.inf
            raise FederatedRunError(
                f"A number of this site's upload is {largest:.3g}; secure aggregation takes {self.bound:g} at most.",
                f"Make the app anew with --secure-bound {needed:g}; uploads are rounded more coarsely then.",
            )
        return made

    def sums(
        self, total: Tensor, broadcast: Tree, rows: Sequence[float]
    ) -> dict[str, tuple[Tensor, torch.dtype]]:
        """What ``UploadPipeline.add_sum`` takes, from the sum of the vectors of sites with these numbers of rows."""
        found = {}
        start = 0
        for t in self.tensors:
            value = total[start : start + t.size].view(t.shape).double() / self._factor(t, 1.0)
            start += t.size
            if t.moved:
                if t.rule == "mean":
                    weight = sum(rows)
                else:
                    weight = len(rows)
                value = value + weight * broadcast[t.name].double()
            found[t.name] = (value.round() if t.counts else value, getattr(torch, t.dtype))
        return found

    def _factor(self, t: MaskedTensor, rows: float) -> float:
        """What multiplies a tensor of a site; with one row, what multiplies the pooled sum."""
        if t.rule == "uniform":
            return 1.0
        weight = 1.0
        if t.rule == "mean":
            weight = rows
        return weight / self.scale * (self.bound if t.counts else 1.0)
