"""Locks: one writer per array. The operating system releases a lock when its holder ends; readers never lock."""

from __future__ import annotations

import errno
import glob
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from fedcache.config import Home
from fedcache.errors import CorruptionError, MachineError, StoreError, UsageError, shell_word
from fedcache.parsing import parse_json
from fedcache.store.files import (
    HOST,
    Buffer,
    explain_disk_errors,
    make_private,
    read_sealed,
    size_of,
    write_atomic,
    write_sealed,
    written_unnamed,
)

POLL = 0.1
"""Seconds between two attempts to take a lock that another holder has."""


def _started(pid: int) -> int:
    """Start time of a process in clock ticks since boot; 0 if unknown.

    The start time distinguishes the process from a later one with the same pid.
    """
    try:
        # The name in brackets, field 2, may contain any text. The start is field 22, so it has index 19 after the name.
        after_name = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1]
        return int(after_name.split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def this_process() -> dict[str, Any]:
    """Identity of this process as JSON values: ``pid``, ``host``, ``started``."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "started": _started(os.getpid())}


def still_runs(process: Mapping[str, Any]) -> bool | None:
    """Whether a process still runs; ``process`` is the result of ``this_process`` in it.

    None for a process of another machine, or if no process is named.
    """
    try:
        pid = int(process["pid"])
        here = process["host"] == socket.gethostname()
    except (KeyError, TypeError, ValueError):
        return None
    if not here:
        return None
    began = process.get("started")
    if not is_alive(pid):
        return False
    # If a start time is unknown, the pid decides.
    return not began or _started(pid) in (0, began)


def is_alive(pid: int) -> bool:
    """Whether a process of this machine runs, also one of another user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OverflowError:  # no pid is that large
        return False
    except OSError:  # it runs, but under another user
        return True
    return True


def writer_of(path: Path) -> int:
    """The process whose temporary file this is, ``.NAME.PID-HOST-RANDOM.partial``; 0 for another host or name."""
    pid, *rest = path.name.removesuffix(".partial").rpartition(".")[2].split("-")
    is_here = len(rest) < 2 or rest[0] == HOST
    if path.name.endswith(".partial") and pid.isdigit() and is_here:
        return int(pid)
    return 0


def lock_holder(path: Path) -> str:
    """Who holds a lock, in words."""
    try:
        found = parse_json(path.with_suffix(".json").read_bytes())
        if found == this_process():
            return "another thread of this process"
        return f"process {int(found['pid'])} on {found['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process or thread"  # the holder has not written its note yet


@contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Whether the lock file ``path`` could be taken at once; it is held while the block runs."""
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except (Timeout, OSError, NotImplementedError):
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def is_held(path: Path) -> bool:
    """Whether a process holds the lock file ``path`` now; also works on a read-only file system."""
    try:
        with FileLock(path, timeout=0):
            return False
    except OSError as error:  # also Timeout, which is an OSError
        if error.errno == errno.EROFS:
            return _is_held_elsewhere(path)
        return True
    except NotImplementedError:
        return True


def _is_held_elsewhere(path: Path) -> bool:
    """Whether a process with write permission holds a lock file that is on a read-only file system here."""
    import fcntl  # Windows has none, but it raises no EROFS either

    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@contextmanager
def wait_for_lock(
    path: Path, on_wait: Callable[[], None], while_waiting: Callable[[], None]
) -> Iterator[None]:
    """Hold the lock file ``path`` while the block runs. If another holder has it, wait until that holder has ended.

    The system releases the lock of a process that was killed, so the next waiting process takes it. Raises
    MachineError if files cannot be locked.

    Args:
        path: the lock file, in a directory that exists.
        on_wait: called once, if another holder has the lock.
        while_waiting: called several times a second until the lock is free. It may raise to give up.
    """
    lock = FileLock(path, timeout=0)
    waiting = False
    while True:
        try:
            lock.acquire()
            break
        except Timeout:
            pass
        except (OSError, NotImplementedError) as error:
            raise _cannot_lock(path, error) from error
        if not waiting:
            on_wait()
            waiting = True
        while_waiting()
        time.sleep(POLL)
    try:
        yield
    finally:
        lock.release()


def _cannot_lock(path: Path, error: Exception) -> MachineError:
    return MachineError(
        f"{path} cannot be locked: {error}.",
        "Use a directory with write permission, on a file system with locks.",
    )


@contextmanager
def hold_lock(path: Path, what: str, *, wait: bool) -> Iterator[None]:
    """Hold the lock file ``path``, ``locks/<name>.lock``, while the block runs.

    If another holder has it, wait until it is free; without ``wait``, raise StoreError, naming the holder and ``what``
    is locked.
    """
    lock = FileLock(path, timeout=-1 if wait else 0)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise StoreError(
            f"{what} is being written by {lock_holder(path)}.",
            "Try again when the writing has finished, or wait with `fedcache extract --wait`. Finished chunks are "
            "kept. To share an extraction among processes: `fedcache extract --part 1/2` and so on, then "
            "`fedcache join`.",
        ) from error
    except (OSError, NotImplementedError) as error:
        raise _cannot_lock(path, error) from error
    try:
        # Partial notes of killed holders.
        for left in path.parent.glob(f".{path.stem}.json.*.partial"):
            left.unlink(missing_ok=True)
        with explain_disk_errors(path):
            write_atomic(path.with_suffix(".json"), json.dumps(this_process()).encode())
        yield
    finally:
        path.with_suffix(".json").unlink(missing_ok=True)
        lock.release()


@contextmanager
def lock_manifest(store: Path, needed: int = 0) -> Iterator[None]:
    """Hold the lock of a store's manifest while the block runs, after removing partial files of killed holders.

    ``needed`` are the bytes that the block writes, for the message of a full disk.
    """
    lock = store / "locks" / "manifest.lock"
    with hold_lock(lock, f"the manifest of {store}", wait=True), explain_disk_errors(store, needed):
        _remove_partial_files(store)
        yield


def _remove_partial_files(path: Path) -> None:
    """Remove temporary files of killed processes from folders where only the holder of the manifest's lock writes."""
    for folder in (path, path / "samples" / "ok" / "c", path / "partitions", path / "groups"):
        for left in folder.glob(".*.partial"):
            # Journals and the history are written under other locks, so their writers may run.
            if not left.name.startswith((".journal-", ".history")):
                left.unlink(missing_ok=True)
    for left in (path / "text").rglob(".*.partial"):
        left.unlink(missing_ok=True)


# Files that a user names with ``-o``: whole or absent, and without leftovers of killed processes.
#
# On Linux a file has no name before it is complete. On other systems it has a temporary name, which
# stays if the process is killed. The next command with the same output removes that file. If there is
# no such command, ``fedcache gc`` finds it: while a file is being written, a note in ``outputs/`` of
# the home contains its path.

NOTES = "outputs"
"""Folder of the home with a note for each file outside the home that is being written."""


NOTE_KIND = {"kind": "file that is being written"}
"""Seal of these notes: their kind."""


def need_folder(path: Path) -> None:
    """Check that the directory of a file to write exists. Raises UsageError."""
    if not path.parent.is_dir():
        hint = f"mkdir -p {shell_word(path.parent)}"
        raise UsageError(f"The directory {path.parent} does not exist.", hint)


@contextmanager
def output_file(path: Path, needed: int = 0) -> Iterator[BinaryIO]:
    """A file to write that replaces ``path`` when the block ends, as ``written_unnamed``.

    Args:
        path: of the file.
        needed: bytes that will be written, for the message of a full disk; 0 if not known.
    """
    with _noted(path), written_unnamed(path, needed) as file:
        yield file


def write_output(path: Path, *parts: Buffer) -> None:
    """Replace ``path`` by the concatenated parts, as ``output_file``."""
    with output_file(path, size_of(parts)) as file:
        for part in parts:
            file.write(part)


def leftover_outputs(home: Home) -> Iterator[Path]:
    """Temporary files of killed processes that were writing outputs, and their notes."""
    for note in sorted((home.root / NOTES).glob("*.json")):
        try:
            found = read_sealed(note, NOTE_KIND)
        except CorruptionError:
            yield note
            continue
        if found is None:
            continue
        if still_runs(found.content) is not False:
            continue
        yield from _partials(Path(found.content["path"]), str(found.content["pid"]))
        yield note


@contextmanager
def _noted(path: Path) -> Iterator[None]:
    """Remove temporary files of killed processes for an output, and note in the home that it is being written now."""
    home = Home.from_environment()
    for left in _partials(path, "*"):
        with suppress(OSError):
            if not is_alive(writer_of(left)):
                left.unlink(missing_ok=True)
    note = home.root / NOTES / f"{os.getpid()}-{os.urandom(4).hex()}.json"
    if home.root.is_dir():
        with suppress(OSError):
            make_private(note.parent)
            write_sealed(note, NOTE_KIND, {"path": str(path.absolute()), **this_process()})
    try:
        yield
    finally:
        with suppress(OSError):
            note.unlink(missing_ok=True)


def _partials(path: Path, pid: str) -> list[Path]:
    """Temporary files that process ``pid`` made for an output; ``*`` is any process."""
    return sorted(path.parent.glob(f".{glob.escape(path.name)}.{pid}-*.partial"))
