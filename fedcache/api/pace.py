"""How often a run writes its state."""

from __future__ import annotations

import time

CHECKPOINT_EVERY = 2.0
"""Seconds between checkpoints: what a kill may cost, where writing is cheap."""

CHECKPOINT_SHARE = 0.05
"""Of the time of a run, what checkpoints may take: large states are written less often."""


class Pace:
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
