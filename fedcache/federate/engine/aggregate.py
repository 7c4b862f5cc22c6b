"""Pooling of uploads as they come: one client at a time, or a chunk's sum, in float64.

Memory is that of one upload whatever the number of clients. Uploads may carry a leading axis of grid points; stacked
ones are put in client order whatever the order in which they came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedcache.errors import FederatedRunError, InternalError
from fedcache.federate.engine.method import Pooling
from fedcache.heads.linear import Tree


class UploadPool:
    """A running aggregate of uploads.

    Args:
        rules: name prefix -> mean (weights n_i) | uniform | sum | stack; the longest matching prefix decides.
        clients: how many uploads will come; what is stacked has its memory from the beginning.
    """

    def __init__(self, rules: Mapping[str, Pooling], clients: int) -> None:
        self._clients = clients
        self._rules = sorted(rules.items(), key=lambda item: -len(item[0]))
        self._sums: dict[str, Tensor] = {}
        self._stacks: dict[str, tuple[list[int], Tensor]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._shapes: dict[str, torch.Size] = {}
        self._weight = 0.0
        self._count = 0

    def rule(self, name: str) -> Pooling:
        """How the upload of that name is pooled."""
        for prefix, rule in self._rules:
            if name.startswith(prefix):
                return rule
        raise InternalError(f"No pooling rule covers the upload {name!r}.", "Add its prefix to the method's pool.")

    def add(self, up: Tree, weight: float, client: int) -> None:
        """Add a client's upload with its weight n_i (not yet divided by N)."""
        self._weight += weight
        self._count += 1
        for name, t in up.items():
            if (first := self._shapes.setdefault(name, t.shape)) != t.shape:
                raise FederatedRunError(
                    f"Client {client} uploads {name} of shape {tuple(t.shape)}, and another {tuple(first)}.",
                    "Uploads that are taken together have one shape: pad them and send a mask.",
                )
            self._dtypes[name] = t.dtype
            if self.rule(name) == "stack":
                if name not in self._stacks:
                    self._stacks[name] = ([], t.new_empty((self._clients, *t.shape)))
                order, stack = self._stacks[name]
                stack[len(order)] = t
                order.append(client)
            else:
                self._accumulate(name, t, self.factor(name, weight))

    def factor(self, name: str, weight: float) -> float:
        """What multiplies the upload of a client of that weight."""
        return weight if self.rule(name) == "mean" else 1.0

    def weigh(self, weights: Sequence[float]) -> None:
        """Count clients whose uploads come as sums alone."""
        self._weight += sum(weights)
        self._count += len(weights)

    def add_sum(self, name: str, total: Tensor, dtype: torch.dtype) -> None:
        """Add what is already the sum over some clients, each times its ``factor``.

        Clients are counted by ``add`` or ``weigh``.

        Args:
            name: of the uploads.
            total: their sum.
            dtype: of the uploads.
        """
        self._dtypes[name] = dtype
        self._accumulate(name, total, 1.0)

    def _accumulate(self, name: str, t: Tensor, weight: float) -> None:
        total = self._sums.get(name)
        if total is None:
            total = self._sums[name] = torch.zeros(t.shape, dtype=torch.float64, device=t.device)
        total.add_(t, alpha=weight)

    def done(self) -> Tree:
        """Means and sums in the dtype of the uploads, stacks [k, ..] in client order."""
        out: Tree = {}
        for name, (order, stack) in self._stacks.items():
            place = torch.tensor(sorted(range(len(order)), key=order.__getitem__), device=stack.device)
            out[name] = stack[: len(order)] if order == sorted(order) else stack[place]
        for name, total in self._sums.items():
            rule = self.rule(name)
            scale = {"mean": self._weight, "uniform": float(self._count), "sum": 1.0}.get(rule, 1.0)
            out[name] = (total / scale).to(self._dtypes[name])
        return out
