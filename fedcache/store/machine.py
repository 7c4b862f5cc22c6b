"""What the machine allows: memory for features before they are mapped from files instead, and room on its disk."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedcache.errors import MachineError, UsageError
from fedcache.store.files import FULL, FullDiskError

SHARE = 0.5
"""Of the memory that is free now: a run makes a few arrays of the features' size besides the features."""

UNKNOWN = 2 << 30
"""Where the system does not say what is free."""

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@contextmanager
def explain_disk_errors(place: Path, needed: int) -> Iterator[None]:
    """Turn the operating system's refusal to write ``needed`` bytes to ``place`` into an error with its figures.

    Raises MachineError, with needed and free bytes when the disk is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise full_disk(error, place, needed) from error
        raise MachineError(
            f"{place} cannot be written: {error.strerror or error}.",
            "Check the permissions and the disk, then run the same command again: what is finished is kept.",
        ) from error


def full_disk(error: OSError, place: Path | None = None, needed: int = 0) -> MachineError:
    """What to tell of a full disk: what it could not take, and how much it has left.

    Args:
        error: of the system; what it says of its file goes before the other arguments.
        place: what was being written.
        needed: how many bytes that takes; 0 where that is not known.
    """
    at_least = 0
    if isinstance(error, FullDiskError):
        needed = max(needed, error.needed)
        at_least = error.written
    if error.filename:
        place = place or Path(str(error.filename))
    what = "What was being written" if place is None else str(place)
    if needed:
        size = f"{needed:,} bytes"
    elif at_least:
        size = f"at least {at_least:,} bytes"
    else:
        size = "more space"
    return MachineError(
        f"The disk is full: {what} needs {size}{_free_words(place)}.",
        "Free some space and run the same command again: what is finished is kept.",
    )


def _free_words(place: Path | None) -> str:
    """How much a disk has left, as the end of a sentence; "" where the system does not say."""
    parent = (place or Path()).absolute()
    try:
        while not parent.exists():
            parent = parent.parent
        free = shutil.disk_usage(parent).free
    except OSError:
        return ""
    # A file that fits by its own bytes may need more: its folder grows, and disks give out whole blocks.
    if free:
        return f" and {free:,} bytes are free"
    return " and none is free"


def memory_limit() -> int:
    """Bytes one set of features may take: ``FEDCACHE_MEMORY`` (``8G``, ``500M``, bytes), else half of what is free.

    Free is the least of what the system and the process's control group have left. Raises UsageError, for a
    ``FEDCACHE_MEMORY`` that is no size.
    """
    asked = os.environ.get("FEDCACHE_MEMORY", "").strip()
    if not asked:
        left = [n for n in (_system(), _group()) if n is not None]
        if left:
            return int(SHARE * min(left))
        return UNKNOWN
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", asked.lower())
    if size is None:
        raise UsageError(
            f"FEDCACHE_MEMORY is {asked!r}, which is no size.", "For example 8G or 500M."
        )
    return int(float(size[1]) * _UNITS[size[2]])


def threads_for(parts: int) -> int:
    """Threads that copy ``parts`` chunks: the cores this process may use, at most four; memory gives no more."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(4, own, parts))


def _system() -> int | None:
    """Bytes that can be had without swapping."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    with suppress(OSError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _group() -> int | None:
    """Bytes left to a control group with a limit; page cache counts as used there, and is given back."""
    with suppress(OSError, ValueError, KeyError):
        place = Path("/sys/fs/cgroup")
        limit = int((place / "memory.max").read_text())
        stat = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
        return max(0, limit - int(stat["anon"]))
    return None
