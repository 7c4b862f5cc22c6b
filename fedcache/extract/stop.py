"""A request to stop, made from a signal handler and honoured at the next chunk, or where no finished round is lost."""

from __future__ import annotations


class Stop:
    """Set once, read often; importing it costs nothing, because every command makes one."""

    def __init__(self) -> None:
        self.requested = False

    def ask(self) -> None:
        """Ask to stop at the next good moment."""
        self.requested = True
