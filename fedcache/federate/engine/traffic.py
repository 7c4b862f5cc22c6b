"""Traffic: scalars and bytes up and down, counted from what uploads and broadcasts really hold.

``exact`` counts those tensors; ``paper`` counts weights only (no biases, no BatchNorm), as the papers' tables do.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from fedcache.heads.linear import Tree


@dataclass(frozen=True)
class RoundTraffic:
    """Totals of one round over its clients, in scalars (``*_bytes`` in bytes)."""

    clients: int
    up: int
    down: int
    up_bytes: int
    down_bytes: int
    paper_up: int
    paper_down: int


def itemsize(tree: Tree) -> int:
    """Bytes of one scalar of a tree (0 when it holds none)."""
    return max((t.element_size() for t in tree.values() if t.is_floating_point()), default=0)


@dataclass
class Traffic:
    """The counter of a run.

    Attributes:
        up: exact scalars uploaded by each client so far.
        down: exact scalars sent to each client so far.
        rounds: totals per round.
    """

    up: list[int]
    down: list[int]
    rounds: list[RoundTraffic] = field(default_factory=list)

    def totals(self) -> dict[str, int]:
        """Sums over rounds and clients."""
        keys = ("up", "down", "up_bytes", "down_bytes", "paper_up", "paper_down")
        return {k: sum(getattr(r, k) for r in self.rounds) for k in keys}

    def to_json(self) -> dict[str, Any]:
        """Everything counted, as JSON."""
        return {
            "up": list(self.up),
            "down": list(self.down),
            "rounds": [asdict(r) for r in self.rounds],
            "totals": self.totals(),
        }

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Traffic:
        """The counter that ``to_json`` wrote."""
        return cls(list(saved["up"]), list(saved["down"]), [RoundTraffic(**r) for r in saved["rounds"]])
