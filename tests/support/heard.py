"""An observer that keeps what it is told."""

from fedcache.progress import Silent


class Heard(Silent):
    """Notes and warnings, each in the order in which they were told; ``lines`` has both."""

    def __init__(self):
        self.lines, self.notes, self.warnings = [], [], []

    def note(self, text):
        self.notes.append(text)
        self.lines.append(text)

    def warn(self, text):
        self.warnings.append(text)
        self.lines.append(text)

    def said(self, words):
        return any(words in line for line in self.lines)
