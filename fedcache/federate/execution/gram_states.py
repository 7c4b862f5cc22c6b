"""Client states between rounds. Some maps are kept as coordinates on the client's rows.

Shapes: n rows of a client, D features, U outputs of the map, M clients of a chunk, k bases.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from fedcache.federate.engine.client_data import Features
from fedcache.federate.engine.outcome import Snapshot
from fedcache.federate.execution.gram_matrices import GramMatrices
from fedcache.federate.execution.state_table import StateTable
from fedcache.heads.gram import GramBatch
from fedcache.heads.linear import Tree

# Small tensors that are kept for many rounds are stored together in blocks of 16 MiB.
#
# Allocated one by one, they would lie between temporary tensors of training and fragment the
# memory.

BLOCK_BYTES = 16 << 20

LARGE_BYTES = 1 << 20
"""Bytes above which a tensor is allocated separately, so that the allocator can return its memory as a whole."""

ALIGNED = 64
"""Bytes of a cache line. Every tensor in a block begins at a multiple of this number."""


class TensorBlocks:
    """Memory for tensors that are kept. A block is freed when none of its tensors is used any more.

    The tensors are views, and a pickled view contains its whole block. Clone tensors before another process gets them.
    """

    def __init__(self) -> None:
        self._block: Tensor | None = None  # [BLOCK_BYTES] uint8, the block that is being filled
        self._used = 0  # used bytes of this block

    def copy(self, t: Tensor) -> Tensor:
        """A contiguous copy: on the CPU and up to ``LARGE_BYTES`` a view of a block, else a separate tensor."""
        if t.device.type != "cpu" or not 0 < t.nbytes <= LARGE_BYTES:
            return t.clone(memory_format=torch.contiguous_format)
        if self._block is None or self._used + t.nbytes > BLOCK_BYTES:
            self._block = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
            self._used = 0
        free = self._block[self._used : self._used + t.nbytes]
        # The next tensor begins on a cache line.
        self._used += -(-t.nbytes // ALIGNED) * ALIGNED
        return free.view(t.dtype).view(t.shape).copy_(t)

    def copy_tree(self, tree: Tree) -> Tree:
        """A copy of every tensor."""
        return {name: self.copy(t) for name, t in tree.items()}


def same_outline(a: Tree, b: Tree) -> bool:
    """Whether two trees have tensors of the same names, shapes and dtypes."""
    return _outline(a) == _outline(b)


def _outline(tree: Tree) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (t.shape, t.dtype) for name, t in tree.items()}


FIRST = ("W", "P.W")
"""Names of tensors that multiply features. Copies of them have a prefix with a slash (``near/P.W``, ``opt/m/W``)."""


def is_first(name: str) -> bool:
    """Whether a tensor of that name multiplies features."""
    return name.rsplit("/", 1)[-1] in FIRST


@dataclass
class KeptCoordinates:
    """One client's coordinates of one run, kept between rounds."""

    coords: dict[str, Tensor]  # name -> [k + n, U]
    # k tensors [U, D]; clients that entered with equal weights share one tensor.
    bases: list[Tensor]
    seen: list[Tensor]  # X B_j' [n, U] of each basis


def primal(grams: GramMatrices, client: int, coords: Tensor, bases: Sequence[Tensor]) -> Tensor:
    """W [U, D] from its coordinates [k + n, U]."""
    k = len(bases)
    W = coords[k : k + grams.n[client]].mT @ grams.of(client)
    # W = A' X + sum_j c_j B_j; c_j has one number for each output.
    for c, base in zip(coords[:k], bases, strict=True):
        W.addcmul_(c.unsqueeze(-1), base)
    return W


@dataclass(frozen=True)
class Chunk:
    """The states of a chunk's clients: stacked as ``fit`` returned them, and each client's part as views."""

    clients: tuple[int, ...]
    stacked: Tree  # [M, ..]
    each: Sequence[Tree]

    def alone(self) -> bool:
        """Whether every tensor has an axis of these clients, and its memory contains nothing else."""
        for t in self.stacked.values():
            whole = t.is_contiguous() and t.untyped_storage().nbytes() == t.nbytes
            if not whole or t.shape[0] != len(self.clients):
                return False
        return True


class ClientStates(MutableMapping[int, Tree]):
    """The states of clients: tensors. Maps that are kept as coordinates are computed when they are read.

    The states are in memory, or in a file (``move``).
    """

    def __init__(self) -> None:
        self._trees: MutableMapping[int, Tree] = {}
        self._written: set[int] = set()  # clients whose tensors are used only here
        self._chunk: Chunk | None = None  # newer than the tensors of its clients in ``_trees``
        self.blocks = TensorBlocks()
        self.kept: dict[int, KeptCoordinates] = {}
        self.grams: GramMatrices | None = None

    @property
    def table(self) -> StateTable | None:
        """The file with the states; None if they are in memory."""
        if isinstance(self._trees, StateTable):
            return self._trees
        return None

    def hold(self, chunk: Chunk) -> None:
        """Keep a chunk stacked until one of its clients is read or written.

        The next round may start from it, which saves copying it into the clients' own tensors and back.
        """
        if self._chunk is not None and self._chunk.clients == chunk.clients:
            self._chunk = None  # it is older
        self._settle()
        # A chunk is held only if all its clients are known, and its memory contains nothing else, which would be kept
        # with it.
        can_hold = self.table is None and all(client in self._trees for client in chunk.clients)
        if can_hold and chunk.alone():
            self._chunk = chunk
        else:
            self._write_all(chunk)

    def chunk(self, clients: Sequence[int]) -> Tree | None:
        """The stacked tensors of these clients, if they are held as one chunk; they must not be changed."""
        if self._chunk and self._chunk.clients == tuple(clients):
            return dict(self._chunk.stacked)
        return None

    def _settle(self) -> None:
        """Give every client of the chunk its own tensors."""
        if self._chunk is not None:
            # Removed first, because ``write`` calls this function too.
            chunk = self._chunk
            self._chunk = None
            self._write_all(chunk)

    def _write_all(self, chunk: Chunk) -> None:
        for client, tree in zip(chunk.clients, chunk.each, strict=True):
            self.write(client, tree)

    def move(self, to: MutableMapping[int, Tree]) -> None:
        """Move the states into ``to``: a file, or a dict in memory."""
        self._settle()
        for client in self._trees:
            to[client] = self[client]
        self._trees = to
        self._written.clear()

    def close(self) -> None:
        """Let other processes use the file, if there is one; the states cannot be read afterwards."""
        if self.table is not None:
            self.table.close()

    def __getitem__(self, client: int) -> Tree:
        self._settle()
        tree = self._trees[client]
        kept = self.kept.get(client)
        if kept is None:
            return tree
        # Maps are computed at every read, because they are larger than their coordinates.
        full = dict(tree)
        for name, t in kept.coords.items():
            if name not in tree:
                full[name] = primal(cast(GramMatrices, self.grams), client, t, kept.bases)
        return full

    def scored(self, client: int, x: Features, rows: Tensor) -> tuple[Tree, GramBatch]:
        """A client's tensors with its maps as coordinates, and features x[rows] to multiply them with.

        For a client with few rows this is less work than with full maps, and points of a grid share the products.
        """
        kept = self.kept[client]
        grams = cast(GramMatrices, self.grams)
        state = {**self.rest(client), **kept.coords}
        basis = grams.scoring_basis(client, x, rows, kept.bases)
        positions = torch.arange(len(rows), device=rows.device)
        return state, GramBatch(basis, positions)

    def rest(self, client: int) -> Tree:
        """The tensors of a client that are not kept as coordinates."""
        self._settle()
        kept = self.kept.get(client)
        tree = self._trees[client]
        if kept is None:
            return tree
        return {n: t for n, t in tree.items() if n not in kept.coords}

    def held(self, client: int) -> list[Tensor]:
        """The tensors of a client that are in memory; some are shared with other clients."""
        self._settle()
        held = list(self._trees[client].values())
        kept = self.kept.get(client)
        if kept is not None:
            held += [*kept.coords.values(), *kept.bases, *kept.seen]
        return held

    def outline(self, client: int) -> Tree:
        """The names and shapes of a client's tensors; maps that are kept as coordinates have no values."""
        kept = self.kept.get(client)
        if kept is None:
            return self._trees[client]
        maps = {n: torch.empty_like(kept.bases[0], device="meta") for n in kept.coords}
        return {**maps, **self._trees[client]}

    def keep(self, client: int, rest: Tree, kept: KeptCoordinates, grams: GramMatrices) -> None:
        """Keep a copy of a client's coordinates and of its other tensors; bases and their products are not copied."""
        self._settle()
        self._trees[client] = self.blocks.copy_tree(rest)
        self.grams = grams
        self.kept[client] = replace(kept, coords=self.blocks.copy_tree(kept.coords))
        self._written.add(client)

    def write(self, client: int, tree: Tree, coords: Tree | None = None) -> None:
        """Keep a copy of a client's tensors, and of its coordinates, if it has some.

        The copy overwrites the previous one if names, shapes and dtypes are equal.
        """
        self._settle()
        # Tensors that this class made itself may be overwritten; others may be shared.
        mine = client in self._written
        if self.table is not None:
            self._trees[client] = tree
        else:
            into = None
            if mine:
                into = self._trees[client]
            self._trees[client] = self._copied(tree, into)
        if coords is None:
            self.kept.pop(client, None)
        else:
            old = self.kept[client]
            into = None
            if mine:
                into = old.coords
            self.kept[client] = replace(old, coords=self._copied(coords, into))
        if self.table is None:
            self._written.add(client)

    def _copied(self, tree: Tree, into: Tree | None) -> Tree:
        """A copy, in the memory of ``into`` if it has the same names, shapes and dtypes."""
        if into is None:
            return self.blocks.copy_tree(tree)
        # Not in a block: a block is freed only as a whole, so tensors that change their shapes would fill new blocks.
        if not same_outline(tree, into):
            return {k: t.clone(memory_format=torch.contiguous_format) for k, t in tree.items()}
        for k, t in tree.items():
            into[k].copy_(t)
        return into

    def __setitem__(self, client: int, tree: Tree) -> None:
        self._settle()
        self._trees[client] = tree
        self.kept.pop(client, None)
        self._written.discard(client)

    def __delitem__(self, client: int) -> None:
        self._settle()
        del self._trees[client]
        self.kept.pop(client, None)
        self._written.discard(client)

    def __contains__(self, client: object) -> bool:
        return client in self._trees  # the inherited method would compute the client's maps

    def __iter__(self) -> Iterator[int]:
        return iter(self._trees)

    def __len__(self) -> int:
        return len(self._trees)


def stored(states: ClientStates) -> Tree:
    """Coordinates and bases, which a snapshot has in addition to tensors, so that a resumed run has the same bits."""
    out = {}
    for client, kept in states.kept.items():
        for name, t in kept.coords.items():
            out[f"coords/{client}/{name}"] = t.clone()
        for j, t in enumerate(kept.bases):
            out[f"base/{client}/{j}"] = t.clone(memory_format=torch.contiguous_format)
    return out


def restore(states: ClientStates, snapshot: Snapshot | None, grams: GramMatrices) -> None:
    """Load the coordinates of a snapshot, for clients that are still computed in coordinates."""
    coords: dict[int, dict[str, Tensor]] = {}
    bases: dict[int, dict[int, Tensor]] = {}
    if snapshot is None:
        return
    device = grams.packed.device
    for key, t in snapshot.tensors.items():
        if key.startswith(("coords/", "base/")):
            kind, number, name = key.split("/", 2)  # ``number`` is the client's
            if kind == "coords":
                # ``keep`` copies it.
                coords.setdefault(int(number), {})[name] = t.to(device)
            else:
                bases.setdefault(int(number), {})[int(name)] = t.to(device, copy=True)
    # Equal bases become one tensor again, as they were before the snapshot.
    known: list[Tensor] = []
    for client in coords:
        if client not in grams.n:
            continue
        loaded = [bases[client][j] for j in range(len(bases[client]))]
        shared = []
        for b in loaded:
            equal = (k for k in known if k.shape == b.shape and torch.equal(k, b))
            shared.append(next(equal, b))
        known += [b for b in shared if not any(b is k for k in known)]
        # X B_j' is computed again from the rows and the bases.
        seen = [grams.of(client) @ b.mT for b in shared]
        rest = {n: t for n, t in states[client].items() if n not in coords[client]}
        states.keep(client, rest, KeptCoordinates(coords[client], shared, seen), grams)
