"""Small tensors that stay for rounds, side by side in blocks of 16 MB.

One by one they would lie among the temporaries of training, and leave holes in memory that nothing fits into.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedcache.heads.linear import Tree

BLOCK_BYTES = 16 << 20

LARGE_BYTES = 1 << 20
"""A tensor of this size has memory of its own, which the allocator gives back whole."""

ALIGNED = 64
"""Bytes of a cache line, on which every tensor begins."""


class TensorBlocks:
    """Memory for tensors that are kept. A block is freed when no tensor of it is left.

    The tensors are views: pickled one by one, each would take its block along. Clone what leaves the process.
    """

    def __init__(self) -> None:
        self._block: Tensor | None = None  # [BLOCK_BYTES] uint8, the one that is being filled
        self._used = 0  # bytes of it

    def copy(self, t: Tensor) -> Tensor:
        """A contiguous copy; on the CPU, of up to ``LARGE_BYTES``, a view of a block."""
        if t.device.type != "cpu" or not 0 < t.nbytes <= LARGE_BYTES:
            return t.clone(memory_format=torch.contiguous_format)
        if self._block is None or self._used + t.nbytes > BLOCK_BYTES:
            self._block = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
            self._used = 0
        # The next free bytes, seen as the tensor; what follows begins on a cache line.
        place = self._block[self._used : self._used + t.nbytes].view(t.dtype).view(t.shape)
        self._used += -(-t.nbytes // ALIGNED) * ALIGNED
        return place.copy_(t)

    def copy_tree(self, tree: Tree) -> Tree:
        """A copy of every tensor."""
        return {name: self.copy(t) for name, t in tree.items()}


def same_outline(a: Tree, b: Tree) -> bool:
    """Whether two trees have tensors of the same names, shapes and dtypes."""
    return {k: (t.shape, t.dtype) for k, t in a.items()} == {
        k: (t.shape, t.dtype) for k, t in b.items()
    }
