"""Masking for secure aggregation: each site sends a vector of bounded numbers, and the server sees only their sum.

Every pooled mean and sum is linear in the uploads, so the server needs only the sum of the vectors:

    averaged by rows      v_i = n_i (t_i - broadcast) / n_max       averaged evenly    v_i = t_i - broadcast
    summed                v_i = t_i / n_max                         counts of rows     v_i = C n_ic / n_max

with n_max the largest number of training rows that a site declares, and C the largest absolute value of a number:
SecAgg+ rounds [-C, C] to a grid of integers, so the sum is exact to 2 C m / levels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from fedcache.errors import FederatedRunError, UsageError
from fedcache.federate.engine.hyperparameters import Hp
from fedcache.federate.engine.method import Method, Pooling, Uploads
from fedcache.federate.trust.pipeline import TrustPolicy, UploadPool
from fedcache.heads.linear import Tree
from fedcache.parsing import Facts, Record

LEAST_SITES = 3
"""Minimum number of sites in a sum. With two sites, each could compute the other's upload from the sum."""

BOUND = 8.0
"""Default of ``--secure-bound``, as in Flower."""

MODULUS = 1 << 32
"""Masked numbers are integers below this value. The sum of a round's quantised numbers must also be below it."""


def levels_for(sites: int) -> int:
    """The number of levels of [-C, C]: the largest power of 2 for which the sum over sites stays below the modulus.

    >>> levels_for(3) == 1 << 30, levels_for(4) == 1 << 29
    (True, True)
    """
    return 1 << math.floor(math.log2((MODULUS - 1) / sites))


def check_secure(method: Method, hp: Hp, trust: TrustPolicy) -> None:
    """Refuse methods and policies that need single uploads. Raises UsageError, with the reason."""
    stacked = [prefix for prefix, rule in method.pool(hp).items() if rule == "stack"]
    needed = ", ".join(sorted(prefix or "everything" for prefix in stacked))
    if needed:
        raise UsageError(
            f"{method.name} does not support --secure: its server needs {needed} of each site, but secure "
            "aggregation gives the server only sums.",
            "Use a method that averages or adds uploads: fedavg, fedprox, fedncm, fed3r, fedcgs, scaffold, ...",
        )
    if not trust.plain or trust.max_share is not None:
        raise UsageError(
            f"{trust.options_given} checks single uploads, but --secure hides them.",
            "Leave one of them out.",
        )


@dataclass(frozen=True)
class MaskedTensor:
    """One tensor of an upload and its form in the vector."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # of the upload: ``float32``
    rule: Pooling  # how the method pools it
    counts: bool  # whether it holds numbers of rows, which are whole
    moved: bool  # whether the vector holds its difference from the broadcast

    @property
    def size(self) -> int:
        """Number of its entries."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Masking:
    """Layout and scale of the vectors of a round; the server sends both to the sites."""

    tensors: tuple[MaskedTensor, ...]
    scale: float  # n_max
    bound: float  # C

    @classmethod
    def of(
        cls, method: Method, hp: Hp, expected: Uploads, broadcast: Tree, scale: float, bound: float
    ) -> Masking:
        """The masking for the ``expected`` uploads of a method after that broadcast."""
        pool = UploadPool(method.pool(hp), 1)
        made = []
        for name, t in sorted(expected.items()):
            rule = pool.rule(name)
            shape = tuple(t.shape)
            counts = t.counts_rows or not t.dtype.is_floating_point
            # Differences from the broadcast are small, so they fit the bound better than the values.
            same = name in broadcast and tuple(broadcast[name].shape) == shape
            moved = rule in ("mean", "uniform") and same and not counts
            dtype = str(t.dtype).removeprefix("torch.")
            made.append(MaskedTensor(name, shape, dtype, rule, counts, moved))
        return cls(tuple(made), scale, bound)

    @property
    def size(self) -> int:
        """d, numbers in a vector."""
        return sum(t.size for t in self.tensors)

    def to_words(self) -> Facts:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_words(cls, words: Record) -> Masking:
        """The inverse of ``to_words``."""
        tensors = []
        for t in words["tensors"]:
            shape = tuple(t["shape"])
            tensors.append(MaskedTensor(**{**t, "shape": shape}))
        return cls(tuple(tensors), float(words["scale"]), float(words["bound"]))

    def vector(self, up: Tree, broadcast: Tree, rows: float) -> Tensor:
        """The vector [d] float64 of one upload, of a site with ``rows`` training rows.

        Raises FederatedRunError for an upload of other names or shapes, or with a number beyond the bound.
        """
        found = {name: (tuple(t.shape), t.dtype) for name, t in up.items()}
        expected = {t.name: (t.shape, getattr(torch, t.dtype)) for t in self.tensors}
        if found != expected:
            raise FederatedRunError(
                "The tensors of this site's upload are not the tensors that the server expects.",
                "Install the same version of fedcache on the server and on the site.",
            )
        # ``torch.cat`` needs a tensor, even if an upload has none.
        parts = [torch.zeros(0, dtype=torch.float64)]
        for t in self.tensors:
            value = up[t.name].double()
            if t.moved:
                value = value - broadcast[t.name].double()
            scaled = value * self._factor(t, rows)
            parts.append(scaled.flatten())
        made = torch.cat(parts)
        largest = 0.0
        if len(made):
            largest = float(made.abs().max())
        # Written so that NaN is refused too.
        if not largest <= self.bound:
            needed = math.inf
            if math.isfinite(largest):
                needed = 2.0 ** math.ceil(math.log2(largest))
            raise FederatedRunError(
                f"This site's upload contains the number {largest:.3g}; secure aggregation allows at most "
                f"{self.bound:g}.",
                f"Make the app again with --secure-bound {needed:g}. A larger bound rounds uploads more coarsely.",
            )
        return made

    def sums(
        self, total: Tensor, broadcast: Tree, rows: Sequence[float]
    ) -> dict[str, tuple[Tensor, torch.dtype]]:
        """The sums for ``UploadPipeline.add_sum``, from the summed vectors of sites with these numbers of rows."""
        summed = {}
        start = 0
        for t in self.tensors:
            part = total[start : start + t.size].view(t.shape)
            value = part.double() / self._factor(t, 1.0)
            start += t.size
            if t.moved:
                weight: float = len(rows)
                if t.rule == "mean":
                    weight = sum(rows)
                value = value + weight * broadcast[t.name].double()
            if t.counts:
                value = value.round()
            summed[t.name] = (value, getattr(torch, t.dtype))
        return summed

    def _factor(self, t: MaskedTensor, rows: float) -> float:
        """The factor of a tensor in the vector of a site with ``rows`` rows; ``rows=1`` gives the factor of the sum."""
        if t.rule == "uniform":
            return 1.0
        weight = 1.0
        if t.rule == "mean":
            weight = rows
        if t.counts:
            return weight / self.scale * self.bound
        return weight / self.scale
