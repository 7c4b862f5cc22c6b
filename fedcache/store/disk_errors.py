"""What the disk refuses, in words: full, read-only, or not ours."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedcache.errors import MachineError

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def explain_disk_errors(place: Path, needed: int) -> Iterator[None]:
    """Turn the operating system's refusal of a write into an error with its figures.

    Args:
        place: what is written.
        needed: bytes this write needs.

    Raises:
        MachineError, with needed and free bytes when the disk is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            parent, free = place, 0
            with suppress(OSError):
                while not parent.exists():
                    parent = parent.parent
                free = shutil.disk_usage(parent).free
            raise MachineError(
                f"The disk is full: {place} needs {needed:,} bytes and {free:,} are free.",
                "Free some space and run the same command again: what is finished is kept.",
            ) from error
        raise MachineError(
            f"{place} cannot be written: {error.strerror or error}.",
            "Check the permissions and the disk, then run the same command again: what is finished is kept.",
        ) from error
