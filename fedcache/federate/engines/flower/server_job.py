"""One point and seed of a federation, as its server follows it."""

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
"""(round, metrics, traffic of the round, snapshot) after each round of one point and seed; rounds count from 1."""


MOST_TENSORS = 10_000
MOST_NUMBERS = 2**40
"""Tensors that a client may say it holds, and the longest axis of one."""


@dataclass
class ServerJob:
    """One point and seed on its way."""

    id: str  # names it to the sites
    run: RunState  # the server's end of it
    rounds: int  # how many there will be
    participation: int | float | None  # as ``RunState.sample`` takes it
    on_round: OnRound  # called after every round
    leaves_out: bool = (
        False  # whether a malformed upload is left out of its round; else it ends the run
    )
    records: list[RoundRecord] = field(default_factory=list)  # of the rounds so far
    # client -> shapes of what it says it holds, sorted by name, without tensors that have its rows for an axis
    outlines: dict[int, tuple[tuple[str, tuple[int, ...]], ...]] = field(default_factory=dict)
    evaluation: Evaluation | None = None  # of the last round that was scored
    dealt: Data | None = None  # the labels that ``evaluation`` is about
    failed: FedcacheError | None = None  # what ended it
    # of what the server held at the beginning
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    # client -> the last round in which the server has its upload
    latest: dict[int, int] = field(default_factory=dict)

    def answered(self, client: int, told: Any) -> int:
        """The round that a client says it answers; what it holds is noted.

        Raises ValueError for words that are none of this job's.
        """
        if not isinstance(told, dict) or told.get("id") != self.id:
            said = "none"
            if isinstance(told, dict):
                said = str(told.get("id"))[:12]
            raise ValueError(f"it answers job {said}, and was asked for {self.id[:12]}")
        number = told.get("round")
        outline = told.get("outline")
        if isinstance(outline, dict):
            shapes = list(outline.values())
        else:
            shapes = [None]
        sound = all(
            isinstance(s, list) and all(type(n) is int and 0 <= n <= MOST_NUMBERS for n in s)
            for s in shapes
        )
        if type(number) is not int or not sound or len(shapes) > MOST_TENSORS:
            raise ValueError("its words are malformed")
        if outline:
            held = sorted(
                (name, tuple(shape))
                for name, shape in outline.items()
                if not name.startswith("rows/")
            )
            self.outlines[client] = tuple(held)
        return number

    @property
    def outline(self) -> Tree:
        """Tensors without memory as most clients say that they hold them."""
        if not self.outlines:
            return {}
        ((usual, _),) = Counter(self.outlines.values()).most_common(1)
        return {name: torch.empty(shape, device="meta") for name, shape in usual}

    @property
    def open(self) -> bool:
        """Whether rounds are left."""
        return self.failed is None and self.run.round < self.rounds
