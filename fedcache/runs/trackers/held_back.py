"""Delayed metrics of private runs for trackers.

Tracking libraries note the time at which each round is written. The time of a round grows with its number of clients,
and the epsilon of a private run assumes that this number is secret. So a tracker gets all rounds of a private run at
once, when the run has ended. With ``--dp-allow participants`` the participants are published and no round is delayed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from fedcache.progress import Round


class Tracker(Protocol):
    """A hook that receives rounds and must be closed. It may also have a method ``ended(path, result)``."""

    def __call__(self, round_: Round) -> None:
        """Write one round."""

    def close(self) -> None:
        """Close the tracker after the last round."""


class HeldBack:
    """Delays the rounds of private runs until the run has ended, and passes all other rounds on immediately.

    Args:
        tracker: receives the rounds; of fedcache, or of a plug-in.
    """

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self.__qualname__ = type(tracker).__name__  # the name of the hook in warnings
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
        """Pass on the delayed rounds of a run that has ended, and its result if the tracker has ``ended``."""
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
