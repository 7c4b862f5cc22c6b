"""The process of a long call: a stop that is asked for, and what the C library does with memory that is freed.

glibc returns large blocks to the kernel when they are freed, and faults the next ones in page by page, zeroed: 98
images/s instead of 166 for efficientnet-lite0 at 128 px on one core, and a third of the time of a grid of 240 points
with 100 classes.
"""

from __future__ import annotations

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""``mallopt``'s names for: freed memory that is kept; the size from which a block is mapped by itself."""

MOST = (1 << 31) - 1


class Stop:
    """A request to stop, set by a signal handler, honoured at the next chunk or where no finished round is lost."""

    def __init__(self) -> None:
        self.requested = False

    def ask(self) -> None:
        """Ask to stop at the next good moment."""
        self.requested = True


def keep_freed_memory() -> bool:
    """Let this process keep what it frees until it ends; values do not change.

    A library must not decide this for its user: workers and commands call it, ``fedcache.train`` does not.

    Returns:
        whether the allocator could be told: only glibc can. Elsewhere it is slower, not wrong.
    """
    import ctypes  # every command imports this module, and few call this

    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MOST)) and bool(mallopt(M_TRIM_THRESHOLD, MOST))
