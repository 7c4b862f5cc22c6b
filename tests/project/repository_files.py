"""The texts of this repository."""

from loaded_files import ROOT


def content(name):
    """The text of a file: of its place in the repository, or of a path."""
    return (ROOT / name).read_text(encoding="utf-8")
