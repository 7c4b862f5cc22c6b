"""One point and seed of a federation, as its server follows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fedcache.errors import FedcacheError
from fedcache.federate.engine.client_data import Data
from fedcache.federate.engine.outcome import Evaluation, RoundRecord, Snapshot
from fedcache.federate.engine.run_state import RunState
from fedcache.heads.linear import Tree

OnRound = Callable[[int, dict[str, Any], dict[str, Any], Callable[[], Snapshot]], None]
"""(round, metrics, traffic of the round, snapshot) after each round of one point and seed; rounds count from 1."""


@dataclass
class ServerJob:
    """One point and seed on its way."""

    id: str  # names it to the sites
    run: RunState  # the server's end of it
    rounds: int  # how many there will be
    participation: int | float | None  # as ``RunState.sample`` takes it
    on_round: OnRound  # called after every round
    records: list[RoundRecord] = field(default_factory=list)  # of the rounds so far
    outline: Tree = field(default_factory=dict)  # shapes of what a client holds
    evaluation: Evaluation | None = None  # of the last round that was scored
    dealt: Data | None = None  # the labels that ``evaluation`` is about
    failed: FedcacheError | None = None  # what ended it
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of what the server held at the beginning
    latest: dict[int, int] = field(default_factory=dict)  # client -> the last round in which the server has its upload

    @property
    def open(self) -> bool:
        """Whether rounds are left."""
        return self.failed is None and self.run.round < self.rounds
