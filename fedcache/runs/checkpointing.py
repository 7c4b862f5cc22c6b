"""How often a run writes its state, and where it may stop."""

from __future__ import annotations

import time

from fedcache.errors import FedcacheError, StoppedError
from fedcache.extract.stop import Stop

CHECKPOINT_EVERY = 2.0
"""Seconds between checkpoints: what a kill may cost, where writing is cheap."""

CHECKPOINT_SHARE = 0.05
"""Of the time of a run, what checkpoints may take: large states are written less often."""


class CheckpointPace:
    """When to write the next checkpoint; used as a context around writing, so that it knows the cost."""

    def __init__(self) -> None:
        self._last, self._begun, self._writing, self._cost = time.monotonic(), 0.0, 0.0, 0.0

    def due(self) -> bool:
        """Whether it is time."""
        return time.monotonic() - self._last > max(CHECKPOINT_EVERY, self._cost / CHECKPOINT_SHARE)

    def __enter__(self) -> None:
        self._begun = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._writing += time.monotonic() - self._begun

    def over(self) -> None:
        """All checkpoints of a round are written."""
        self._last = time.monotonic()
        self._cost, self._writing = self._writing, 0.0


class StopCheck:
    """Ends a run inside a round once a stop is asked for, if the rounds before it are all kept.

    Where the last checkpoint is older, the round is finished first and its state is written: what is lost is less
    than one round, or the time of one.

    Args:
        stop: set by a signal handler.
        story: what is being computed, for the message: "seed 0".
        kept: rounds that are kept already.
    """

    def __init__(self, stop: Stop, story: str, kept: int = 0) -> None:
        self.stop, self.story = stop, story
        self.begin(kept)

    def begin(self, kept: int) -> None:
        """Rounds start after round ``kept``, whose state is written."""
        self.kept = self.done = kept

    def __call__(self) -> None:
        """Raise if it may stop here."""
        if self.stop.requested and self.kept == self.done:
            raise stopped(f"in round {self.done + 1} of {self.story}; what came before it is kept")


def stopped(where: str) -> FedcacheError:
    """How a stop that was asked for ends a command."""
    return StoppedError(f"Stopped on request {where}.", "Run the same command again to go on.")
