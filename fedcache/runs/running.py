"""Whether a run is being trained now: a lock in its directory, which the system ends with the process that trains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from fedcache.store.files import make_private, write_atomic
from fedcache.store.lock import is_held, try_lock

LOCK = "running.lock"
"""Held in the directory of one run; in those of others that are trained with it the file names that directory."""


@contextmanager
def running(folders: Sequence[Path]) -> Iterator[None]:
    """Mark the directories of runs as being trained while the block runs; they are made where they are not there.

    Where another process makes the same run, or files cannot be locked, it is trained all the same.
    """
    with ExitStack() as held:
        for folder in folders:
            make_private(folder.parent)
            make_private(folder)
        taken = held.enter_context(try_lock(folders[0] / LOCK)) if folders else False
        if taken:
            held.callback(_forget, [folder / LOCK for folder in folders])
            for folder in folders[1:]:  # thousands of points would be thousands of open files
                with suppress(OSError):
                    write_atomic(folder / LOCK, str(folders[0].resolve()).encode())
        yield


def is_running(folder: Path) -> bool:
    """Whether a process trains the run of a directory now."""
    lock = folder / LOCK
    try:
        first = lock.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    held = Path(first) / LOCK if first else lock
    return held.exists() and is_held(held)


def _forget(locks: Sequence[Path]) -> None:
    for lock in locks:
        with suppress(OSError):
            lock.unlink(missing_ok=True)
