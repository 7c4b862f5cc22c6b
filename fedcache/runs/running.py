"""Locks of runs that are being trained: the system releases such a lock when the process that trains ends.

One process or thread trains a run at a time. Two of them would replace each other's files while somebody reads them,
and two that train a private run would each draw noise for the same rounds, which nobody can repeat.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from fedcache.errors import MachineError, StoppedError
from fedcache.process import Stop
from fedcache.progress import Observer
from fedcache.store.files import make_private, read_whole, write_atomic
from fedcache.store.lock import is_held, wait_for_lock

LOCK = "running.lock"
"""Held in the directory of one run; in those of others that are trained with it the file names that directory."""


@contextmanager
def owning(
    folders: Sequence[Path], observer: Observer, stop: Stop, *, private: bool = False
) -> Iterator[None]:
    """Own the directories of runs while the block runs. They are created if they do not exist.

    If another process or thread trains one of these runs, wait until it has ended. Of ordinary runs that are trained
    together only the first is locked, as thousands of points would be thousands of open files. Ordinary runs are also
    trained where files cannot be locked.

    Raises StoppedError if a stop is requested while waiting, MachineError where private runs cannot be locked.
    """

    def give_up_if_stopped() -> None:
        if stop.requested:
            raise StoppedError(
                "Stopped on request while waiting for another training of the same run.",
                "Run the same command again: it returns the stored result, or resumes the training.",
            )

    # The same order in every process, so that two grids with common private runs never wait for each other.
    locked = sorted(folders) if private else folders[:1]
    why = ": a private run that is trained twice at once spends privacy twice" if private else ""
    with ExitStack() as held:
        for folder in folders:
            make_private(folder.parent)
            make_private(folder)
        for folder in locked:
            words = f"{folder.name} is being trained by another process or thread. Waiting for it to end{why}."
            # The lock file stays when the block ends: those who wait hold it open.
            wait = wait_for_lock(folder / LOCK, partial(observer.note, words), give_up_if_stopped)
            try:
                held.enter_context(wait)
            except MachineError:
                if private:
                    raise
        others = [folder / LOCK for folder in folders if folder not in locked]
        held.callback(_forget, others)
        for lock in others:
            with suppress(OSError):
                write_atomic(lock, str(folders[0].resolve()).encode())
        yield


def is_running(folder: Path) -> bool:
    """Whether a process trains the run of a directory now."""
    lock = folder / LOCK
    try:
        first = read_whole(lock).decode()
    except (OSError, UnicodeDecodeError):
        return False
    held = lock
    if first:
        held = Path(first) / LOCK
    return held.exists() and is_held(held)


def _forget(locks: Sequence[Path]) -> None:
    for lock in locks:
        with suppress(OSError):
            lock.unlink(missing_ok=True)
