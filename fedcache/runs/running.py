"""Locks of runs that are being trained: the system releases such a lock when the process that trains ends.

A run without noise has the same result whoever trains it, so its lock only tells others that it is being trained. A
private run draws noise that nobody can repeat, so exactly one process or thread trains it at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from fedcache.errors import StoppedError
from fedcache.process import Stop
from fedcache.progress import Observer
from fedcache.store.files import make_private, read_whole, write_atomic
from fedcache.store.lock import is_held, try_lock, wait_for_lock

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


@contextmanager
def owning(folders: Sequence[Path], observer: Observer, stop: Stop) -> Iterator[None]:
    """Own the directories of private runs while the block runs. They are created if they do not exist.

    If another process or thread trains one of these runs, wait until it has ended. Two owners would each draw noise for
    the same rounds, which releases more about the clients than the ledger says.

    Raises StoppedError if a stop is requested while waiting, MachineError where files cannot be locked.
    """

    def give_up_if_stopped() -> None:
        if stop.requested:
            raise StoppedError(
                "Stopped on request while waiting for another training of the same private run.",
                "Run the same command again: it returns the stored result, or resumes the training.",
            )

    with ExitStack() as held:
        # The same order in every process, so that two grids with common runs never wait for each other.
        for folder in sorted(folders):
            make_private(folder.parent)
            make_private(folder)
            words = (
                f"{folder.name} is being trained by another process or thread. Waiting for it to end: a private run "
                "that is trained twice at once spends privacy twice."
            )
            # The lock file stays when the block ends: those who wait hold it open.
            held.enter_context(wait_for_lock(folder / LOCK, partial(observer.note, words), give_up_if_stopped))
        yield


def is_running(folder: Path) -> bool:
    """Whether a process trains the run of a directory now."""
    lock = folder / LOCK
    try:
        first = read_whole(lock).decode()
    except (OSError, UnicodeDecodeError):
        return False
    held = Path(first) / LOCK if first else lock
    return held.exists() and is_held(held)


def _forget(locks: Sequence[Path]) -> None:
    for lock in locks:
        with suppress(OSError):
            lock.unlink(missing_ok=True)
