"""What clients hold between rounds: tensors, of which some may be kept as coordinates on the client's own rows."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from fedcache.federate.engine.context import copy_tree
from fedcache.federate.engine.outcome import Snapshot
from fedcache.federate.execution.gram_matrices import GramMatrices
from fedcache.heads.gram import GramBatch
from fedcache.heads.linear import Tree


@dataclass
class KeptCoordinates:
    """One client's coordinates of one run, kept between rounds.

    Attributes:
        coords: name -> [k + n, U].
        bases: k tensors [U, D]; clients that entered with equal weights share one in memory.
        seen: X B_j' [n, U] of each.
    """

    coords: dict[str, Tensor]
    bases: list[Tensor]
    seen: list[Tensor]


def primal(grams: GramMatrices, client: int, coords: Tensor, bases: Sequence[Tensor]) -> Tensor:
    """W [U, D] of coordinates [k + n, U]."""
    k = len(bases)
    W = coords[k : k + grams.n[client]].mT @ grams.of(client)
    for c, base in zip(coords[:k], bases, strict=True):
        W.addcmul_(c.unsqueeze(-1), base)
    return W


class ClientStates(MutableMapping[int, Tree]):
    """What clients hold: tensors, of which some may be kept as coordinates and are turned back when read."""

    def __init__(self) -> None:
        self._trees: dict[int, Tree] = {}
        self._written: set[int] = set()  # clients whose tensors nobody else has
        self.kept: dict[int, KeptCoordinates] = {}
        self.grams: GramMatrices | None = None

    def __getitem__(self, client: int) -> Tree:
        tree, kept = self._trees[client], self.kept.get(client)
        if kept is None:
            return tree
        found = {
            n: primal(cast(GramMatrices, self.grams), client, t, kept.bases)
            for n, t in kept.coords.items()
            if n not in tree
        }
        return {**tree, **found}  # made anew every time: kept, they would be more than the coordinates

    def scored(self, client: int, x: Tensor, rows: Tensor) -> tuple[Tree, GramBatch]:
        """A client's tensors with its maps as coordinates, and features x[rows] to multiply them with.

        With few rows of its own that is less work than its maps in full, and points of a grid share the products.
        """
        kept, grams = self.kept[client], cast(GramMatrices, self.grams)
        return {**self.rest(client), **kept.coords}, GramBatch(
            grams.beside(client, x, rows, kept.bases), torch.arange(len(rows))
        )

    def rest(self, client: int) -> Tree:
        """The tensors of a client that are not kept as coordinates."""
        kept = self.kept.get(client)
        tree = self._trees[client]
        return tree if kept is None else {n: t for n, t in tree.items() if n not in kept.coords}

    def held(self, client: int) -> list[Tensor]:
        """The tensors in memory behind a client, some of them shared with others."""
        kept = self.kept.get(client)
        behind = [] if kept is None else [*kept.coords.values(), *kept.bases, *kept.seen]
        return [*self._trees[client].values(), *behind]

    def outline(self, client: int) -> Tree:
        """The names and shapes of a client's tensors; maps that are coordinates have no values."""
        kept = self.kept.get(client)
        maps = {} if kept is None else {n: torch.empty_like(kept.bases[0], device="meta") for n in kept.coords}
        return {**maps, **self._trees[client]}

    def keep(self, client: int, rest: Tree, kept: KeptCoordinates, grams: GramMatrices) -> None:
        """Hold a client as coordinates and the rest."""
        self._trees[client], self.kept[client], self.grams = rest, kept, grams
        self._written.discard(client)

    def write(self, client: int, tree: Tree, coords: Tree | None = None) -> None:
        """Hold a copy of the tensors, and of the coordinates for a client that is kept in them.

        It takes the place of the one before: many small blocks, made anew every round among the temporaries of
        training, would leave holes that nothing fits into.
        """
        mine = client in self._written
        self._trees[client] = copy_tree(tree, self._trees[client] if mine else None)
        if coords is None:
            self.kept.pop(client, None)
        else:
            old = self.kept[client]
            self.kept[client] = replace(old, coords=copy_tree(coords, old.coords if mine else None))
        self._written.add(client)

    def __setitem__(self, client: int, tree: Tree) -> None:
        self._trees[client] = tree
        self.kept.pop(client, None)
        self._written.discard(client)

    def __delitem__(self, client: int) -> None:
        del self._trees[client]
        self.kept.pop(client, None)
        self._written.discard(client)

    def __contains__(self, client: object) -> bool:
        return client in self._trees  # the mixin's would turn the client's maps back to look

    def __iter__(self) -> Iterator[int]:
        return iter(self._trees)

    def __len__(self) -> int:
        return len(self._trees)


def stored(states: ClientStates) -> Tree:
    """What a snapshot holds besides plain tensors: coordinates and bases, so that a resumed run has the same bits."""
    out: Tree = {}
    for client, kept in states.kept.items():
        out |= {f"coords/{client}/{name}": t.clone() for name, t in kept.coords.items()}
        out |= {f"base/{client}/{j}": t.clone(memory_format=torch.contiguous_format) for j, t in enumerate(kept.bases)}
    return out


def restore(states: ClientStates, snapshot: Snapshot | None, grams: GramMatrices) -> None:
    """Put the coordinates of a snapshot back, where the clients are still computed in them."""
    coords: dict[int, dict[str, Tensor]] = {}
    bases: dict[int, dict[int, Tensor]] = {}
    for key, t in ({} if snapshot is None else snapshot.tensors).items():
        if key.startswith(("coords/", "base/")):
            place, number, name = key.split("/", 2)
            if place == "coords":
                coords.setdefault(int(number), {})[name] = t.clone()
            else:
                bases.setdefault(int(number), {})[int(name)] = t.clone()
    known: list[Tensor] = []
    for client in coords:
        if client not in grams.n:
            continue
        loaded = [bases[client][j] for j in range(len(bases[client]))]
        own = [next((k for k in known if k.shape == b.shape and torch.equal(k, b)), b) for b in loaded]
        known += [b for b in own if not any(b is k for k in known)]
        rest = {n: t for n, t in states[client].items() if n not in coords[client]}
        made = KeptCoordinates(coords[client], own, [grams.of(client) @ b.mT for b in own])
        states.keep(client, rest, made, grams)
