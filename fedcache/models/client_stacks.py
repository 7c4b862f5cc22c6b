"""The models of many clients in a few tensors: those that are alike lie in one, with a row for each client.

    clients/GROUP/number      [K] int64, the clients of a group, in the order in which they were added
    clients/GROUP/down/NAME   [K, ...] what a client's model has in the place of the server's tensor of that name
    clients/GROUP/own/NAME    [K, ...] what only a client's model has

A group is all clients whose tensors have the same names, dtypes and shapes. Models of most methods are one group;
where a client's model holds its rows, there is one for each number of rows. Files of format 1 had tensors of their own
for every client, ``client/NUMBER/own/NAME``, of which a reader takes 50 us each: 10 s for 100,000 clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedcache.heads.linear import Tree

PREFIX = "clients/"


class ClientTensors:
    """Clients' tensors, one client after another, to be stacked."""

    def __init__(self) -> None:
        # names, dtypes and shapes -> the clients that have them, and the rows of each name
        self._groups: dict[tuple[Any, ...], tuple[list[int], dict[str, list[Tensor]]]] = {}

    def add(self, number: int, tree: Tree) -> None:
        """The tensors of a client, ``down/NAME`` and ``own/NAME`` of any shapes; they must not change any more."""
        alike = tuple((name, t.dtype, tuple(t.shape)) for name, t in sorted(tree.items()))
        numbers, rows = self._groups.setdefault(alike, ([], {name: [] for name in sorted(tree)}))
        numbers.append(number)
        for name, t in tree.items():
            rows[name].append(t)

    def stacked(self) -> Tree:
        """All of them by their names in a file; the rows are given up."""
        out: Tree = {}
        for group, (numbers, rows) in enumerate(self._groups.values()):
            out[f"{PREFIX}{group}/number"] = torch.tensor(numbers)
            # Only one name has its rows twice in memory, and only while it is stacked.
            while rows:
                name, each = rows.popitem()
                out[f"{PREFIX}{group}/{name}"] = torch.stack(each)
        self._groups.clear()
        return out


def of_format_1(tensors: Mapping[str, Tensor]) -> Tree:
    """The tensors of a file of format 1 under the names of today; the same values."""
    clients: dict[int, Tree] = {}
    out: Tree = {}
    for name, t in tensors.items():
        if name.startswith("client/"):
            _, client, last = name.split("/", 2)
            clients.setdefault(int(client), {})[last] = t
        else:
            out[name] = t
    rows = ClientTensors()
    for number in sorted(clients):
        rows.add(number, clients[number])
    return out | rows.stacked()


@dataclass(frozen=True)
class ClientStacks:
    """Stacks as they are read: the tensors of one client at a time."""

    groups: dict[str, Tree]  # group -> ``down/NAME`` and ``own/NAME`` [K, ...]
    places: dict[int, tuple[str, int]]  # client's number -> its group and row

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> ClientStacks:
        """Those among the tensors of a file."""
        groups: dict[str, Tree] = {}
        places: dict[int, tuple[str, int]] = {}
        for name, t in tensors.items():
            if not name.startswith(PREFIX):
                continue
            _, group, last = name.split("/", 2)
            if last == "number":
                places |= {number: (group, row) for row, number in enumerate(t.tolist())}
            else:
                groups.setdefault(group, {})[last] = t
        return cls(groups, places)

    def tree(self, number: int | None, part: str) -> Tree:
        """Copies of a client's tensors in ``down`` or ``own`` by their names; {} for one that has none."""
        if number not in self.places:
            return {}
        group, row = self.places[number]
        # A copy begins where torch aligns memory, as a row does not: sums of a model have one order wherever it lies.
        return {
            name.removeprefix(f"{part}/"): t[row].clone()
            for name, t in self.groups.get(group, {}).items()
            if name.startswith(f"{part}/")
        }
