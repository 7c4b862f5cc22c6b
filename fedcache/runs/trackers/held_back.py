"""Delayed metrics of private runs for trackers.

Tracking libraries note the time at which each round is written. The time of a round grows with the number of clients
that took part in it, and the epsilon of a private run assumes that this stays secret. So a tracker gets all rounds
of a private run at once, when the run has ended. ``--dp-allow participants`` tells who took part, and tracks live.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from fedcache.progress import Round


class Tracker(Protocol):
    """A hook on the result stream that has something to close; it may also have ``ended(path, result)``."""

    def __call__(self, round_: Round) -> None:
        """Write one round."""

    def close(self) -> None:
        """Nothing more comes."""


class HeldBack:
    """A tracker that gets the rounds of private runs when these have ended, and all other rounds at once.

    Args:
        tracker: of fedcache's own, or of a plug-in.
    """

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self.__qualname__ = type(tracker).__name__  # as warnings name the hook
        self._rounds: dict[Path, list[Round]] = {}

    @property
    def failed(self) -> bool:
        """Whether something could not be written."""
        return bool(getattr(self.tracker, "failed", False))

    def __call__(self, round_: Round) -> None:
        """Pass on one round, or hold it back."""
        if round_.secret_times:
            self._rounds.setdefault(round_.path, []).append(round_)
        else:
            self.tracker(round_)

    def ended(self, path: Path, result: Mapping[str, Any]) -> None:
        """A run has its result: pass on its rounds, and its end if the tracker wants to know it."""
        self._release(path)
        if hasattr(self.tracker, "ended"):
            self.tracker.ended(path, result)

    def close(self) -> None:
        """Pass on the rounds of runs that were stopped, and close the tracker."""
        for path in list(self._rounds):
            self._release(path)
        self.tracker.close()

    def _release(self, path: Path) -> None:
        for round_ in self._rounds.pop(path, []):
            self.tracker(round_)
