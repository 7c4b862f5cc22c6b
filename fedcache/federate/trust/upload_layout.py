"""An upload as one row of numbers, on which attacks, bounds, noise and robust rules work, and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedcache.federate.engine.method import Pooling
from fedcache.federate.trust.update_validation import is_count
from fedcache.heads.linear import Tree


class UploadLayout:
    """Which numbers of an upload stand in a row of V, and where."""

    def __init__(self, like: Tree, down: Tree, rules: Mapping[str, Pooling]) -> None:
        self.rules = rules
        self.like = like
        self.names = sorted(n for n, t in like.items() if t.is_floating_point() and not is_count(n))
        self.base = {
            n: down[n].double() for n in self.names if n in down and down[n].shape == like[n].shape and self._delta(n)
        }

    def _delta(self, name: str) -> bool:
        return self.rules[name] in ("mean", "uniform")

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
            like = self.like[name]
            t = v[start : start + like.numel()].view(like.shape)
            start += like.numel()
            t = t * rows if self.rules[name] == "sum" else t
            out[name] = (t + self.base[name] if name in self.base else t).to(like.dtype)
        return out
