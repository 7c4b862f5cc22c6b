"""Names of sites: the key that owns each name, kept by a server from run to run.

Flower 1.41 tells an app the public key of every node (``Grid.get_nodes``). Where the server knows keys, a node takes
part only when it signs with the private one, so the key says which site it is, after a restart too. A name belongs to
the first key that takes part under it. A server without keys keeps no table: its nodes make a new key at every start.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from fedcache.config import Home
from fedcache.errors import CorruptionError, unknown
from fedcache.store.lock import hold_lock
from fedcache.store.sealed import read_sealed, write_sealed

VARIABLE = "FEDCACHE_SITE_NAMES"
"""Tells the app of a server, which Flower starts, where the table is; "" or none for a server without keys."""

TABLE = "names.json"
"""The table in a server's folder."""

WHAT = {"kind": "names of a server's sites"}
"""Seals the table for what it is."""


class SiteNames:
    """The table of one server; ``path`` is None where sites have no keys, and nothing is kept."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path

    @classmethod
    def from_environment(cls) -> SiteNames:
        """The table of the server that has started this process."""
        path = os.environ.get(VARIABLE)
        return cls(Path(path) if path else None)

    def known(self) -> dict[str, str]:
        """Name -> fingerprint of the key it belongs to. Raises CorruptionError for a table that is not as written."""
        if self.path is None:
            return {}
        try:
            found = read_sealed(self.path, WHAT)
        except CorruptionError as error:
            raise CorruptionError(
                f"{error.message} It says which key each site's name belongs to.",
                "Restore it, or remove it: every name is then that of the next key that takes part under it.",
            ) from error
        if found is None:
            return {}
        return dict(found.content)

    def bind(self, keys: Mapping[str, str]) -> None:
        """Keep names, with the keys of those who take part under them; a name that belongs to a key stays its."""
        self._change(lambda known: {**keys, **known})

    def forget(self, names: Iterable[str]) -> None:
        """Let names go to the next keys that take part under them. Raises UsageError for a name that has no key."""
        gone = list(names)
        known = self.known()
        for name in gone:
            if name not in known:
                raise unknown(
                    "site", name, known, hint="" if known else "No name belongs to a key yet."
                )
        self._change(lambda now: {name: key for name, key in now.items() if name not in gone})

    def _change(self, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
        """Replace the table by what a change makes of it; several runs of a server take turns."""
        if self.path is None:
            return
        with hold_lock(self.path.parent / "locks" / "names.lock", "the names of sites", wait=True):
            known = self.known()
            changed = change(known)
            if changed != known:
                write_sealed(self.path, WHAT, dict(sorted(changed.items())))


def names_of(port: int, home: Home) -> SiteNames:
    """Whose name is whose at the server with keys that listens, or has listened, at a port of this machine."""
    return SiteNames(home.root / "flower" / server_folder(port) / TABLE)


def server_folder(port: int) -> str:
    """Name of the folder of the server at a port, below ``flower`` of the home."""
    return f"server-{port}"
