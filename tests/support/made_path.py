"""A command line that makes something, and where that lies."""

from pathlib import Path

from command import ok


def place_of(*words):
    """``fedcache WORDS --json``, which must succeed: the path in its answer."""
    return Path(ok(*words).data["path"])
