"""All runs of a home in memory, and what of them changed since a number: each look reads only what was written anew.

Every file of a run is written under another name and renamed, so a directory's own time says that something in it
changed. A look asks for that time of the folder of all runs, of the runs that are not finished, and in turn of a share
of the finished ones; a run is read again where its time is another, or so recent that a second change may share it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcache.runs.running import is_running
from fedcache.ui.run_facts import read_run

BUDGET = 0.2
"""Seconds that a look spends on reading at most, once it has read one run; the next look goes on."""
SHARE = 30
"""Looks in which every finished run is asked for its time once."""
RECENT = 2_000_000_000
"""Nanoseconds within which a time may stand for several changes: the clocks of file systems are coarse."""
MOST = 2000
"""Runs that one answer holds."""


@dataclass
class KnownRun:
    """A run as it was read last."""

    facts: dict[str, Any]
    stamp: int  # time of its directory, in ns
    version: int  # the number of its last change


class RunIndex:
    """The runs of a folder.

    Args:
        root: the folder; it may come later.

    Attributes:
        version: grows by one with every change.
        reads: runs that were read so far.
        stats: times that were asked for so far.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.version, self.reads, self.stats = root, 0, 0, 0
        self._known: OrderedDict[str, KnownRun] = OrderedDict()  # the one that changed last is last
        self._gone: OrderedDict[str, int] = OrderedDict()
        self._others: dict[
            str, int
        ] = {}  # names that are no run -> time of the directory, as they were looked at
        self._open: set[str] = set()  # running, stopped or damaged
        self._waiting: dict[str, None] = {}
        self._listed: int | None = None
        self._turn = 0
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Runs that are known by name and not read yet."""
        return len(self._waiting)

    def facts(self, name: str) -> dict[str, Any] | None:
        """What is known of a run; None for a name that is none, whatever it holds."""
        found = self._known.get(name)
        return None if found is None else found.facts

    def path(self, name: str) -> Path | None:
        """The directory of a run that is known, and of nothing else."""
        return self.root / name if name in self._known else None

    def every(self) -> list[dict[str, Any]]:
        """All that were read."""
        with self._lock:
            return [known.facts for known in self._known.values()]

    def changes(self, since: int) -> dict[str, Any]:
        """The runs that changed after version ``since``, and the names that are gone; ``more`` where this is a part."""
        with self._lock:
            changed: list[KnownRun] = []
            for known in reversed(self._known.values()):
                if known.version <= since:
                    break
                changed.append(known)
            changed.reverse()
            part = changed[:MOST]
            more = len(changed) > len(part)
            version = part[-1].version if more else self.version
            gone = [name for name, at in self._gone.items() if since < at <= version]
            return {
                "version": version,
                "runs": [k.facts for k in part],
                "gone": gone,
                "waiting": self.waiting,
                "more": more,
            }

    def look(self) -> None:
        """Read what was written since the last look, as far as the budget goes."""
        with self._lock:
            self._list()
            for name in [*self._open, *self._share()]:
                if self._changed(self._known[name]):
                    self._waiting.setdefault(name)
            for name, stamp in self._others.items():
                if (
                    self._stamp(self.root / name) != stamp
                ):  # a directory is there before its first file
                    self._waiting.setdefault(name)
            end = time.monotonic() + BUDGET
            while self._waiting:
                name = next(iter(self._waiting))
                del self._waiting[name]
                self._read(name)
                if time.monotonic() > end:
                    break

    def _list(self) -> None:
        """Names that are new or gone, where the folder's time says that there may be some."""
        stamp = self._stamp(self.root)
        if stamp == self._listed and not _recent(stamp):
            return
        self._listed = stamp
        try:
            with os.scandir(self.root) as found:
                names = {
                    e.name: e.stat().st_mtime_ns
                    for e in found
                    if not e.name.startswith(".") and e.is_dir()
                }
        except OSError:
            names = {}
        for name in [n for n in (*self._known, *self._others) if n not in names]:
            self._forget(name)
        new = [
            n
            for n in names
            if n not in self._known and self._others.get(n) != names[n] and n not in self._waiting
        ]
        for name in sorted(
            new, key=lambda n: -names[n]
        ):  # the newest first: what a person looks for
            self._waiting[name] = None

    def _share(self) -> list[str]:
        """The finished runs whose turn it is."""
        self._turn += 1
        names = list(self._known)
        return [n for n in names[self._turn % SHARE :: SHARE] if n not in self._open]

    def _changed(self, known: KnownRun) -> bool:
        path = self.root / known.facts["name"]
        if known.facts["state"] == "running" and not is_running(path):
            return True  # killed: no file says so
        stamp = self._stamp(path)
        return stamp != known.stamp or _recent(stamp)

    def _read(self, name: str) -> None:
        path = self.root / name
        stamp = self._stamp(path)
        facts = read_run(path)
        self.reads += 1
        if facts is None:
            self._forget(name)
            self._others[name] = stamp
            return
        self._others.pop(name, None)
        before = self._known.get(name)
        if before is None or before.facts != facts:
            self.version += 1
            self._known[name] = KnownRun(facts, stamp, self.version)
            self._known.move_to_end(name)
            self._gone.pop(name, None)
        else:
            before.stamp = stamp
        (self._open.discard if facts["state"] == "finished" else self._open.add)(name)

    def _forget(self, name: str) -> None:
        self._others.pop(name, None)
        self._waiting.pop(name, None)
        self._open.discard(name)
        if self._known.pop(name, None) is not None:
            self.version += 1
            self._gone[name] = self.version

    def _stamp(self, path: Path) -> int:
        self.stats += 1
        try:
            return path.stat().st_mtime_ns
        except OSError:
            return 0


def _recent(stamp: int) -> bool:
    return abs(time.time_ns() - stamp) < RECENT
