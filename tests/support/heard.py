"""An observer that keeps what it is told."""

from __future__ import annotations

from fedcache.progress import Silent


class Heard(Silent):
    """Notes and warnings, each in the order in which they were told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)
