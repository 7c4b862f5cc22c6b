"""Stacks of clients' models: tensors of equal shape are stored as one tensor with a row for each client.

    clients/GROUP/number      [K] int64, the clients of a group, in the order in which they were added
    clients/GROUP/down/NAME   [K, ...] tensors of clients' models that replace the server's tensor of that name
    clients/GROUP/own/NAME    [K, ...] tensors that only clients' models have

A group consists of all clients whose tensors have the same names, dtypes and shapes. Most methods have one group; if a
client's model holds its training rows, there is one group for each number of rows. Files of format 1 had separate
tensors for every client, ``client/NUMBER/own/NAME``. Reading one tensor takes 50 us, so 100,000 clients took 10 s.
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
    """Builder of the stacks; clients are added one after another."""

    def __init__(self) -> None:
        # Outline (names, dtypes and shapes) -> the numbers of the clients that have it, and their tensors by name.
        self._groups: dict[tuple[Any, ...], tuple[list[int], dict[str, list[Tensor]]]] = {}

    def add(self, number: int, tree: Tree) -> None:
        """Add the tensors of a client, ``down/NAME`` and ``own/NAME``; the caller must not change them later."""
        outline = tuple((name, t.dtype, tuple(t.shape)) for name, t in sorted(tree.items()))
        if outline not in self._groups:
            self._groups[outline] = ([], {name: [] for name in sorted(tree)})
        numbers, rows = self._groups[outline]
        numbers.append(number)
        for name, t in tree.items():
            rows[name].append(t)

    def stacked(self) -> Tree:
        """All stacks by their names in a file. The builder is empty afterwards."""
        out = {}
        for group, (numbers, rows) in enumerate(self._groups.values()):
            out[f"{PREFIX}{group}/number"] = torch.tensor(numbers)
            # Rows are freed after each stack, so at most the tensors of one name are in memory twice.
            while rows:
                name, each = rows.popitem()
                out[f"{PREFIX}{group}/{name}"] = torch.stack(each)
        self._groups.clear()
        return out


def of_format_1(tensors: Mapping[str, Tensor]) -> Tree:
    """The tensors of a file of format 1 under the names of format 2; the values are equal."""
    clients: dict[int, Tree] = {}
    out = {}
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
    """Stacks of a file, read client by client."""

    groups: dict[str, Tree]  # group -> ``down/NAME`` and ``own/NAME`` [K, ...]
    places: dict[int, tuple[str, int]]  # client's number -> its group and row

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> ClientStacks:
        """The stacks among the tensors of a file."""
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

    def group_of(self, number: int | None) -> str:
        """The group of a client; "" for a client that is in no group."""
        if number not in self.places:
            return ""
        return self.places[number][0]

    def tree(self, number: int | None, part: str) -> Tree:
        """Copies of a client's tensors in ``part`` (``down`` or ``own``), by name; {} for a client in no group."""
        if number not in self.places:
            return {}
        group, row = self.places[number]
        copies = {}
        for name, t in self.groups.get(group, {}).items():
            folder, _, last = name.partition("/")
            if folder == part:
                # A copy is aligned in memory. A row is not, and alignment can change the order of torch's sums.
                copies[last] = t[row].clone()
        return copies
