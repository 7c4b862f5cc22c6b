"""Memory that decoders in other processes fill and this process reads: numbered slots of one anonymous file.

A pickled batch costs 140 ms of two processes' time on its way through a pipe (256 images of 224 px); here only the
number of its slot is sent. The file does not use ``/dev/shm``, whose size containers limit. The kernel frees it with
the last process that holds it, so nothing is left behind after a kill.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 64
"""Alignment of arrays in bytes, for vector instructions and copies to a device."""

Inputs = dict[Any, Any]
"""Inputs of ``decode_batch`` by input key: uint8 [B, V, H, W, 3], or texts or rows."""


@dataclass(frozen=True)
class Placed:
    """The place of a uint8 array in its slot."""

    offset: int
    shape: tuple[int, ...]


@dataclass(eq=False)
class OpenSlots:
    """The slots as one process has them mapped."""

    memory: mmap.mmap
    slot_bytes: int

    def put(self, slot: int, inputs: Mapping[Any, Any]) -> Inputs:
        """Copy uint8 arrays into a slot; returns the inputs, with ``Placed`` instead of each array that fits."""
        placed = {}
        used = 0
        for key, images in inputs.items():
            placed[key] = images
            is_uint8 = getattr(images, "dtype", None) == np.uint8
            if not is_uint8 or used + images.nbytes > self.slot_bytes:
                continue
            place = Placed(used, images.shape)
            self._array(slot, place)[...] = images
            placed[key] = place
            # Rounded up to a multiple of the alignment.
            used += -(-images.nbytes // ALIGNMENT) * ALIGNMENT
        return placed

    def get(self, slot: int, placed: Mapping[Any, Any]) -> Inputs:
        """The inputs of a slot; arrays are views of its memory, which the next batch overwrites."""
        inputs = {}
        for key, value in placed.items():
            inputs[key] = value
            if isinstance(value, Placed):
                inputs[key] = self._array(slot, value)
        return inputs

    def _array(self, slot: int, place: Placed) -> NDArray[np.uint8]:
        start = slot * self.slot_bytes + place.offset
        return np.ndarray(place.shape, np.uint8, self.memory, start)


class Slots(OpenSlots):
    """The slots in the process that made them, which also knows which slots are free."""

    def __init__(self, count: int, slot_bytes: int) -> None:
        # Rounded up to whole pages. A mapping has at least one page, although slots of texts hold nothing.
        page = mmap.PAGESIZE
        slot_bytes = -(-slot_bytes // page) * page
        self.size = max(page, count * slot_bytes)
        self._file = os.memfd_create("fedcache-batches")
        os.ftruncate(self._file, self.size)
        super().__init__(mmap.mmap(self._file, self.size), slot_bytes)
        self._free = SimpleQueue[int]()
        for slot in range(count):
            self._free.put(slot)

    @property
    def address(self) -> tuple[str, int, int]:
        """The arguments of ``open_slots`` in a process of the same user, while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._file}", self.size, self.slot_bytes

    def take(self) -> int:
        """A free slot; waits for one."""
        return self._free.get()

    def free(self, slot: int) -> None:
        """Give back a slot whose arrays are no longer read."""
        self._free.put(slot)

    def close(self) -> None:
        """Close the file. Memory that an array still uses is freed together with the array."""
        os.close(self._file)
        with suppress(BufferError):
            self.memory.close()


def open_slots(path: str, size: int, slot_bytes: int) -> OpenSlots:
    """The slots of another process."""
    file = os.open(path, os.O_RDWR)
    try:
        return OpenSlots(mmap.mmap(file, size), slot_bytes)
    finally:
        os.close(file)
