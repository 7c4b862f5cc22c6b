"""How the C library's allocator treats the temporaries of a grid.

glibc returns every block above 32 MB to the system when it is freed, and the next one is zeroed page by page: in a grid
of 240 points and 100 classes that is a third of the time. A command keeps what it has freed until it ends.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""``mallopt``'s names for: freed memory that is kept; the size from which a block is mapped by itself."""


def keep_freed_memory() -> bool:
    """Reuse freed memory instead of returning it to the system; for this process, until it ends.

    The peak of memory stays what it is. A library must not decide this for its user, so commands call it and
    ``fedcache.train`` does not.

    Returns:
        whether the allocator could be told: only glibc can.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, 2**31 - 1)) and bool(mallopt(M_TRIM_THRESHOLD, -1))
