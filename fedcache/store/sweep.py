"""What a writer leaves that was killed after its array was finished: its journal and its note of who holds the lock.

Nobody opens a finished array to write it, so nobody else would remove them.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from fedcache.store.journal import journal_path
from fedcache.store.lock import if_free
from fedcache.store.manifest import read_manifest


def sweep(store: Path) -> None:
    """Remove the notes of killed writers, and the journals of finished arrays; those of who still writes stay.

    Raises:
        FedcacheError: CORRUPT or STORE for a manifest that cannot be read.
    """
    finished = {journal_path(store, key): key for key in read_manifest(store).arrays}
    lefts = [(note.stem, note) for note in (store / "locks").glob("*.json")]
    lefts += [(key, journal) for journal, key in finished.items() if journal.exists()]
    for key, left in lefts:
        with (
            if_free(store / "locks" / f"{key}.lock") as free,
            suppress(OSError),
        ):  # a store that may only be read keeps it
            if free and (left not in finished or key in read_manifest(store).arrays):
                left.unlink(missing_ok=True)
