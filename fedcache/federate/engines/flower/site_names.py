"""Names of sites: a server's table of the key that owns each name, kept from run to run.

Flower 1.41 gives an app the public key of every node (``Grid.get_nodes``). On a server with keys, a node takes part
only if it signs with its private key, so the key identifies the site, also after a restart. A name belongs to the first
key that takes part under it. A server without keys has no table, because its nodes make a new key at every start.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from fedcache.config import Home
from fedcache.errors import CorruptionError, unknown
from fedcache.store.files import read_sealed, write_sealed
from fedcache.store.lock import hold_lock

VARIABLE = "FEDCACHE_SITE_NAMES"
"""Environment variable with the path of the table, for the server's app. It is "" or unset without keys."""

TABLE = "names.json"
"""File of the table in a server's folder."""

WHAT = {"kind": "names of a server's sites"}
"""Facts in the seal of the table."""


class SiteNames:
    """The table of one server; without keys ``path`` is None and nothing is kept."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path

    @classmethod
    def from_environment(cls) -> SiteNames:
        """The table of the server that started this process."""
        path = os.environ.get(VARIABLE)
        if not path:
            return cls()
        return cls(Path(path))

    def known(self) -> dict[str, str]:
        """Name -> fingerprint of the key that owns it. Raises CorruptionError for a damaged table."""
        if self.path is None:
            return {}
        try:
            found = read_sealed(self.path, WHAT)
        except CorruptionError as error:
            raise CorruptionError(
                f"{error.message} This file records which key owns each site name.",
                "Restore or remove the file. Once it is removed, a name belongs to the first key that uses it.",
            ) from error
        if found is None:
            return {}
        return dict(found.content)

    def bind(self, keys: Mapping[str, str]) -> None:
        """Add names with the keys of their sites; a name that has an owner keeps it."""
        self._change(lambda known: {**keys, **known})

    def forget(self, names: Iterable[str]) -> None:
        """Free names for the next keys that take part under them. Raises UsageError for a name without an owner."""
        gone = list(names)
        known = self.known()
        hint = ""
        if not known:
            hint = "No site name has a key yet on this server. For a server at another port: --port PORT"
        for name in gone:
            if name not in known:
                raise unknown("site", name, known, hint=hint)
        self._change(lambda now: {name: key for name, key in now.items() if name not in gone})

    def _change(self, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
        """Replace the table by ``change`` of it, under a lock, because several runs of a server may do so at once."""
        if self.path is None:
            return
        with hold_lock(self.path.parent / "locks" / "names.lock", "the names of sites", wait=True):
            known = self.known()
            changed = change(known)
            if changed != known:
                write_sealed(self.path, WHAT, dict(sorted(changed.items())))


def names_of(port: int, home: Home) -> SiteNames:
    """The table of the server with keys that listens, or has listened, at a port of this machine."""
    return SiteNames(home.root / "flower" / server_folder(port) / TABLE)


def server_folder(port: int) -> str:
    """Name of the folder of the server at a port. The folder is in ``flower`` of the home."""
    return f"server-{port}"
