"""What a run asks of the machine, how it will be computed, and what the machine has."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedcache.federate.engine.method import Method

WORKING_SET = 8 << 20
"""Four copies of a chunk's parameters (weights, gradient, momentum, output) stay below this: they fit the cache."""

GRID_SET = 128 << 20
"""The same for the points of a grid, whose shared rows pay for leaving the cache."""

SKINNY = 15
"""Outputs per row whose work in ``batched`` equals the two thin products of a round in ``gram`` (measured on one core
between 10 and 100 classes, 1 and 5 epochs and 50 to 500 rows of 1,024 features)."""


@dataclass(frozen=True)
class Load:
    """What a run asks of the machine.

    Attributes:
        head_bytes: of the tensors one client trains.
        outputs: numbers that the first linear map gives for a row.
        clients: sampled per round.
        rows: training rows of every client that takes part.
        width: D.
        itemsize: bytes of a number.
        views: stored of a row.
        points: of a grid, computed together.
        upload_bytes: of what one client sends.
        server_bytes: of what the server holds.
        state_bytes: that a client keeps between rounds.
        feature_bytes: of all rows.
        broadcast_bytes: of what a client is sent besides its first map, which losses are computed against.
        batch: rows of a step.
        mixed: whether clients differ in more than their rows (``client_overrides``).
    """

    head_bytes: int
    clients: int
    outputs: int = 0
    rows: Sequence[int] = ()
    width: int = 0
    itemsize: int = 4
    views: int = 1
    points: int = 1
    upload_bytes: int = 0
    server_bytes: int = 0
    state_bytes: int = 0
    feature_bytes: int = 0
    broadcast_bytes: int = 0
    batch: int = 32
    mixed: bool = False

    def dual_rows(self) -> list[int]:
        """Rows of the clients that ``gram`` can serve for less work: no more than half the features."""
        return [n for n in self.rows if 2 * n <= self.width]

    def worth(self, epochs: int) -> int:
        """Rows of the clients for which ``gram`` is also faster than ``batched`` in about its work.

        Every round it multiplies all rows with the broadcast and with the result, which costs as much as some
        ``SKINNY`` outputs do in an epoch; what it saves grows with outputs and epochs.
        """
        work = self.outputs * max(1, epochs)
        most = self.width * work / (2.0 * (work + SKINNY))
        return sum(n for n in self.rows if n <= most)

    def gram_bytes(self) -> int:
        """Bytes of Gram matrices and packed rows of those."""
        return sum(n * n + n * self.width for n in self.dual_rows()) * self.itemsize


@dataclass(frozen=True)
class ExecutionPlan:
    """How a run is computed.

    Attributes:
        name: of the executor.
        chunk: clients at once; 1 where they are computed one by one.
        points: of a grid, at once.
        rest: under ``gram``, clients at once of those with too many rows, which are stacked.
    """

    name: str
    chunk: int
    points: int = 1
    rest: int = 1


def free_memory() -> int:
    """Bytes of memory that can be had without swapping, as the system says."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    try:
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    except (AttributeError, ValueError, OSError):
        return 2 << 30


def shares_uploads(method: Method) -> bool:
    """Whether runs that differ in what the server alone reads have the same uploads, and can share them."""
    return method.one_shot and not method.gradient and not method.central
