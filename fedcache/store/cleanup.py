"""What a writer leaves that was killed after its array was finished: its journal and its note of who holds the lock.

Nobody opens a finished array to write it, so nobody else would remove them.
"""

from __future__ import annotations

from contextlib import suppress

from fedcache.store.journal import journal_path
from fedcache.store.lock import try_lock
from fedcache.store.manifest import read_manifest
from fedcache.store.store import Store


def clean_up(store: Store) -> None:
    """Remove the notes of killed writers, and the journals of finished arrays; those of who still writes stay.

    Raises:
        CorruptionError or StoreError for a manifest that can no longer be read.
    """
    locks = store.path / "locks"
    for note in locks.glob("*.json"):
        with try_lock(note.with_suffix(".lock")) as free, suppress(OSError):  # what may only be read keeps it
            if free:
                note.unlink(missing_ok=True)
    for key in store.arrays:
        journal = journal_path(store.path, key)
        if not journal.exists():
            continue
        with try_lock(locks / f"{key}.lock") as free, suppress(OSError):
            if free and key in read_manifest(store.path).arrays:  # not begun again since the store was opened
                journal.unlink(missing_ok=True)
