"""Which lift computes a run: one client at a time, chunks of clients as one batch, or coordinates on their rows.

``loop`` and ``stack`` are the same functions on tensors without or with a client axis; ``dual`` writes the first linear
map in coordinates (``federate.dual``). All agree to 1e-10 in float64. ``loop`` is the faster one for closed forms, for
Adam on a projection head and wherever real work outweighs dispatch; ``stack`` for small heads, whose steps are nearly
all dispatch; ``dual`` for SGD on clients with fewer rows than half the features.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from fedcache.errors import Exit, FedcacheError, unknown
from fedcache.federate.engine.method import Hp, Method
from fedcache.federate.execution.gram import GRAM_SHARE, serves

LIFTS = ("loop", "stack", "dual")

TOGETHER = ("stack", "dual")
"""Lifts that compute the points of a grid together."""

SMALL_HEAD = 64 << 10
"""Heads up to this many bytes are stacked whatever the optimiser."""

WORKING_SET = 8 << 20
"""Four copies of a chunk's parameters (weights, gradient, momentum, output) stay below this: they fit the cache."""

SKINNY = 15
"""Outputs per row whose work in ``stack`` equals the two thin products of a round in ``dual`` (measured on one core
between 10 and 100 classes, 1 and 5 epochs and 50 to 500 rows of 1,024 features)."""

GRAM_BYTES = 1 << 30
"""What Gram matrices and packed rows take at most, however much memory is free: they grow with the clients."""

GRID_SET = 128 << 20
"""The same for the points of a grid, whose shared rows pay for leaving the cache."""


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

    def dual_rows(self) -> list[int]:
        """Rows of the clients that ``dual`` can serve for less work: no more than half the features."""
        return [n for n in self.rows if 2 * n <= self.width]

    def worth(self, epochs: int) -> int:
        """Rows of the clients for which ``dual`` is also faster than ``stack`` in about its work.

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
class Lift:
    """How lanes are computed.

    Attributes:
        name: ``loop``, ``stack`` or ``dual``.
        chunk: clients at once; 1 for ``loop``.
        points: of a grid, at once.
        rest: under ``dual``, clients at once of those with too many rows, which are stacked.
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


def choose(
    method: Method,
    hp: Hp,
    load: Load,
    lift: str = "auto",
    chunk: int | None = None,
    *,
    mixed: bool = False,
) -> Lift:
    """The lift of a run, or of the points of a grid.

    Args:
        method: closed forms and one-lane methods take ``loop``.
        hp: reads ``opt``.
        load: sizes.
        lift: ``auto``, or the one to force.
        chunk: clients at once under ``stack`` and ``dual``; None for the size the cache suggests.
        mixed: whether clients differ in more than their rows; they are then computed one at a time.

    Raises:
        FedcacheError: exit 2 for an unknown lift, one that cannot serve the method, or a chunk below 1.
    """
    if lift != "auto" and lift not in LIFTS:
        raise unknown("lift", lift, ("auto", *LIFTS))
    can = ("loop",) if mixed else tuple(x for x in LIFTS if x in method.lifts)
    why_not = serves(method, hp, load.views)
    if why_not:
        can = tuple(x for x in can if x != "dual")
    if lift != "auto" and lift not in can:
        why = " when its clients differ" if mixed else f": {why_not}" if lift == "dual" else ""
        raise FedcacheError(
            Exit.USAGE,
            f"The lift {lift!r} cannot serve {method.name}{why}.",
            f"Use one that can: --lift {' | '.join(can)}",
        )
    if chunk is not None and chunk < 1:
        raise FedcacheError(
            Exit.USAGE, f"chunk is {chunk}, expected at least 1.", "Leave it out to let the engine pick."
        )
    if lift == "auto":
        lift = _fastest(method, hp, load, can)
    if lift == "loop":
        return Lift("loop", 1, load.points if shares_uploads(method) else 1)
    if not method.gradient or method.central or method.one_shot:
        load = replace(load, points=1)  # closed forms look at their floats: points one after another
    stacked = _stack(load, chunk)
    return stacked if lift == "stack" else _dual(load, chunk, stacked.chunk)


def _fastest(method: Method, hp: Hp, load: Load, can: Sequence[str]) -> str:
    if not method.gradient or method.central:
        return "loop"
    # The points of a grid share the rows that are read, so nothing is thin there.
    covered = load.worth(int(cast(int, hp.get("epochs") or 1))) if load.points == 1 else sum(load.dual_rows())
    if (
        "dual" in can
        and 2 * covered >= sum(load.rows) > 0
        and load.gram_bytes() <= min(GRAM_BYTES, GRAM_SHARE * free_memory())
    ):
        return "dual"
    lanes = load.clients * load.points
    if "stack" not in can or lanes < 2:
        return "loop"
    small = load.head_bytes <= SMALL_HEAD
    # Points of a grid only share dispatch, which a head of this size has already left behind.
    chunks = hp.get("opt") == "sgd" and load.points == 1 and load.clients > 1 and _fits(load) > 1
    return "stack" if small or chunks else "loop"


def _fits(load: Load) -> int:
    return max(1, WORKING_SET // max(1, 4 * load.head_bytes))


def _stack(load: Load, chunk: int | None) -> Lift:
    if load.points == 1:
        return Lift("stack", min(load.clients, chunk or _fits(load)))
    points = max(1, min(load.points, GRID_SET // max(1, 4 * load.head_bytes)))
    lanes = max(1, GRID_SET // max(1, 4 * load.head_bytes * points))
    return Lift("stack", min(load.clients, chunk or lanes), points)


def _dual(load: Load, chunk: int | None, rest: int) -> Lift:
    longest = max(load.dual_rows(), default=1)
    # coordinates, and a batch against everything that was sent (fedpcl: all clients' prototypes)
    against = load.batch * load.broadcast_bytes // max(1, load.outputs)
    lane = 4 * ((longest + 2) * max(1, load.outputs) * load.itemsize + against)
    budget = WORKING_SET if load.points == 1 else GRID_SET
    points = max(1, min(load.points, budget // lane))
    lanes = max(1, budget // (lane * points))
    return Lift("dual", min(load.clients, chunk or lanes), points, rest)
