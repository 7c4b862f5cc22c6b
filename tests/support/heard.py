"""An observer that keeps what it is told."""

from __future__ import annotations

from fedcache.progress import Silent


class Heard(Silent):
    """Notes and warnings, each in the order in which they were told."""

    def __init__(self):
        self.notes = []
        self.warnings = []

    def note(self, text):
        self.notes.append(text)

    def warn(self, text):
        self.warnings.append(text)
