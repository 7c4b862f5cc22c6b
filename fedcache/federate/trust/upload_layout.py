"""An upload as one row of numbers, on which attacks, bounds, noise and robust rules work, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fedcache.federate.engine.method import Pooling
from fedcache.federate.engine.uploads import Uploads
from fedcache.heads.linear import Tree


class UploadLayout:
    """Which numbers of an upload stand in a row of V, and where: all floats but counts, tensor by tensor by name.

    Args:
        expected: what the method declares.
        broadcast: what clients were sent; a tensor that is averaged stands in V as its difference from this.
        rules: name -> how the method pools it; what is summed stands in V per row of the client's data.
    """

    def __init__(self, expected: Uploads, broadcast: Tree, rules: Mapping[str, Pooling]) -> None:
        self.rules = rules
        self.expected = expected
        self.names = sorted(n for n, t in expected.items() if t.dtype.is_floating_point and not t.counts_rows)
        self.base = {
            n: broadcast[n].double()
            for n in self.names
            if n in broadcast and tuple(broadcast[n].shape) == expected[n].shape and rules[n] in ("mean", "uniform")
        }

    def vector(self, up: Tree, rows: float) -> Tensor:
        """[d] float64 of an upload by a client with that many rows."""
        parts = []
        for name in self.names:
            t = up[name].double()
            t = t - self.base[name] if name in self.base else t
            parts.append((t / rows if self.rules[name] == "sum" else t).flatten())
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)

    def tree(self, v: Tensor, rows: float, rest: Tree) -> Tree:
        """The upload that ``vector`` makes ``v`` of; counts and integers are those of ``rest``."""
        out, start = dict(rest), 0
        for name in self.names:
            shape = self.expected[name].shape
            size = math.prod(shape)
            t = v[start : start + size].view(shape)
            start += size
            t = t * rows if self.rules[name] == "sum" else t
            out[name] = (t + self.base[name] if name in self.base else t).to(self.expected[name].dtype)
        return out

    @property
    def size(self) -> int:
        """d, numbers in a row."""
        return sum(math.prod(self.expected[name].shape) for name in self.names)
