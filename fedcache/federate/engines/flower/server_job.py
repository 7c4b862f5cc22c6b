"""Job of a server: one point and seed of a federation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fedcache.errors import FedcacheError
from fedcache.federate.engine.client_data import Data
from fedcache.federate.engine.outcome import Evaluation, RoundRecord, Snapshot
from fedcache.federate.engine.run_state import RunState
from fedcache.heads.linear import Tree

OnRound = Callable[[int, dict[str, Any], dict[str, Any], Callable[[], Snapshot]], None]
"""(round, metrics, traffic of the round, snapshot) after a round of one configuration and seed; rounds begin at 1."""


MOST_TENSORS = 10_000
"""Maximum number of tensors in a client's state that a site may report."""
MOST_NUMBERS = 2**40
"""Maximum length of an axis of such a tensor."""


def _is_shape(value: Any) -> bool:
    """Whether a value that a site sent is the shape of a tensor."""
    if not isinstance(value, list):
        return False
    return all(type(n) is int and 0 <= n <= MOST_NUMBERS for n in value)


@dataclass
class ServerJob:
    """One point and seed that the server trains."""

    id: str  # names it to the sites
    run: RunState  # the server's side of it
    rounds: int  # number of rounds in all
    participation: int | float | None  # as ``RunState.sample`` takes it
    on_round: OnRound  # called after every round
    # True: an invalid upload is left out of its round; False: an invalid upload ends the run.
    leaves_out: bool = False
    records: list[RoundRecord] = field(default_factory=list)  # of the rounds so far
    # client -> (name, shape) of the tensors of its state, sorted by name. Tensors under ``rows/`` are left out, because
    # they have one row for each training row, so their shapes differ between clients.
    outlines: dict[int, tuple[tuple[str, tuple[int, ...]], ...]] = field(default_factory=dict)
    evaluation: Evaluation | None = None  # of the last round that was scored
    scored_rows: Data | None = None  # labels of the rows that ``evaluation`` scored
    failed: FedcacheError | None = None  # the error that ended it
    # of the server's tensors at the beginning
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    # client -> the last round in which the server used its upload
    latest: dict[int, int] = field(default_factory=dict)

    def answered(self, client: int, words: Any) -> int:
        """Check the words of a client's answer, and keep the shapes of its state; returns the round that was answered.

        Raises ValueError for words that do not belong to this job.
        """
        if not isinstance(words, dict) or words.get("id") != self.id:
            found = "none"
            if isinstance(words, dict):
                found = str(words.get("id"))[:12]
            expected = self.id[:12]
            raise ValueError(f"the answer belongs to job {found}, expected {expected}")
        number = words.get("round")
        outline = words.get("outline")
        sound = (
            isinstance(outline, dict)
            and len(outline) <= MOST_TENSORS
            and all(map(_is_shape, outline.values()))
        )
        if type(number) is not int or not sound:
            raise ValueError("its header is malformed")
        if outline:
            tensors = []
            for name, shape in sorted(outline.items()):
                if not name.startswith("rows/"):
                    tensors.append((name, tuple(shape)))
            self.outlines[client] = tuple(tensors)
        return number

    @property
    def outline(self) -> Tree:
        """The state of most clients, as tensors without memory."""
        if not self.outlines:
            return {}
        ((usual, _),) = Counter(self.outlines.values()).most_common(1)
        return {name: torch.empty(shape, device="meta") for name, shape in usual}

    @property
    def open(self) -> bool:
        """Whether rounds are left."""
        return self.failed is None and self.run.round < self.rounds
