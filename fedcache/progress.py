"""What a long call tells its caller while it works. The library prints nothing; the command line listens."""

from __future__ import annotations

from typing import Protocol


class Observer(Protocol):
    """Listens to a long call. Every method may be called from the calling thread only."""

    def note(self, text: str) -> None:
        """A line of the story: a choice and why, a plan, a summary."""

    def warn(self, text: str) -> None:
        """Something the user should look at; the call goes on."""

    def start(self, what: str, total: int, unit: str) -> None:
        """A measured stretch of work begins: ``total`` units of ``unit`` (``images``, ``rounds``)."""

    def advance(self, units: int) -> None:
        """So many more units are done."""

    def stop(self) -> None:
        """The stretch is over."""


class Silent:
    """An observer that says nothing; what the Python API uses unless told otherwise."""

    def note(self, text: str) -> None:
        """Nothing."""

    def warn(self, text: str) -> None:
        """Nothing."""

    def start(self, what: str, total: int, unit: str) -> None:
        """Nothing."""

    def advance(self, units: int) -> None:
        """Nothing."""

    def stop(self) -> None:
        """Nothing."""
