"""What the C library does with memory that a model frees."""

from __future__ import annotations


def keep_memory() -> None:
    """Let this process keep what it frees, where the C library can be told to (glibc).

    By default every large activation is given back to the kernel and faulted in again at the next layer: 98 images/s
    instead of 166 for efficientnet-lite0 at 128 px on one core. Values do not change. It holds for the rest of the
    process, so only processes that are ours call it: workers, and the command line.
    """
    import ctypes

    trim_threshold, mmap_threshold = -1, -3  # malloc.h: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, 1 << 30)
        libc.mallopt(trim_threshold, (1 << 31) - 1)
    except (OSError, AttributeError, TypeError):
        return  # another C library: slower, not wrong
