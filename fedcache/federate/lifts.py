"""Which lift computes a run: one client at a time (``loop``), or chunks of clients as one batch (``stack``).

Both are the same functions on tensors without or with a client axis, and agree to 1e-10 in float64. ``loop`` is the
faster one for closed forms, for Adam on a projection head and wherever real work outweighs dispatch; ``stack`` for
small heads, whose steps are nearly all dispatch.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedcache.errors import Exit, FedcacheError, unknown
from fedcache.federate.method import Hp, Method

LIFTS = ("loop", "stack")

SMALL_HEAD = 64 << 10
"""Heads up to this many bytes are stacked whatever the optimiser."""

WORKING_SET = 8 << 20
"""Four copies of a chunk's parameters (weights, gradient, momentum, output) stay below this: they fit the cache."""


@dataclass(frozen=True)
class Lift:
    """How lanes are computed.

    Attributes:
        name: ``loop`` or ``stack``.
        chunk: clients at once; 1 for ``loop``.
    """

    name: str
    chunk: int


def choose(
    method: Method,
    hp: Hp,
    head_bytes: int,
    clients: int,
    lift: str = "auto",
    chunk: int | None = None,
    *,
    mixed: bool = False,
) -> Lift:
    """The lift of a run.

    Args:
        method: closed forms and one-lane methods take ``loop``.
        hp: reads ``opt``.
        head_bytes: bytes of the tensors one client trains.
        clients: sampled per round.
        lift: ``auto``, or the one to force.
        chunk: clients at once under ``stack``; None for the size the cache suggests.
        mixed: whether clients differ in more than their rows; they are then computed one at a time.

    Raises:
        FedcacheError: exit 2 for an unknown lift, one that cannot serve the method, or a chunk below 1.
    """
    if lift != "auto" and lift not in LIFTS:
        raise unknown("lift", lift, ("auto", *LIFTS))
    can = ("loop",) if mixed else tuple(x for x in LIFTS if x in method.lifts)
    if lift != "auto" and lift not in can:
        why = " when its clients differ" if mixed else ""
        raise FedcacheError(
            Exit.USAGE,
            f"The lift {lift!r} cannot serve {method.name}{why}.",
            f"Use one that can: --lift {' | '.join(can)}",
        )
    if chunk is not None and chunk < 1:
        raise FedcacheError(
            Exit.USAGE, f"chunk is {chunk}, expected at least 1.", "Leave it out to let the engine pick."
        )
    fits = max(1, WORKING_SET // max(1, 4 * head_bytes))
    if lift == "auto":
        small = head_bytes <= SMALL_HEAD
        stackable = "stack" in can and method.gradient and not method.central and clients > 1
        lift = "stack" if stackable and (small or (hp.get("opt") == "sgd" and fits > 1)) else "loop"
    if lift == "loop":
        return Lift("loop", 1)
    return Lift("stack", min(clients, chunk or fits))
