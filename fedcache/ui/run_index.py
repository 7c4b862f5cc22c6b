"""All runs of a home in memory, and a number that grows with every change: a look reads only what was written anew.

Every file of a run is written under another name and renamed, so a directory's own time says that something in it
changed. A look asks for that time of the folder of all runs, of the runs that are not finished, and in turn of a share
of the finished ones; a run is read again where its time is another, or so recent that a second change may share it.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from fedcache.runs.directory import is_running
from fedcache.ui.run_facts import RUNNING, read_run

BUDGET = 0.2
"""Seconds that a look spends on reading at most, once it has read one run; the next look goes on."""
SHARE = 30
"""Looks in which every finished run is asked for its time once."""
RECENT = 2_000_000_000
"""Nanoseconds within which a time may stand for several changes: the clocks of file systems are coarse."""


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
        self.root = root
        self.version = 0
        self.reads = 0
        self.stats = 0
        # Name of a directory -> what was read, None where it is no run (yet), and the directory's time then.
        self._known: dict[str, tuple[dict[str, Any] | None, int]] = {}
        self._waiting: dict[str, None] = {}
        self._listed: int | None = None
        self._turn = 0
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Directories that are known by name and not read yet."""
        return len(self._waiting)

    def facts(self, name: str) -> dict[str, Any] | None:
        """What is known of a run; None for a name that is none, whatever it holds."""
        return self._known.get(name, (None,))[0]

    def every(self) -> list[dict[str, Any]]:
        """All that were read."""
        with self._lock:
            return [facts for facts, _ in self._known.values() if facts is not None]

    def look(self) -> None:
        """Read what was written since the last look, as far as the budget goes."""
        with self._lock:
            self._list()
            self._turn += 1
            for number, (name, (facts, stamp)) in enumerate(self._known.items()):
                settled = facts is not None and facts["state"] == "finished"
                if settled and (number + self._turn) % SHARE:
                    continue
                now = self._stamp(self.root / name)
                # No file says that the process of a run was killed.
                killed = facts is not None and facts["state"] == RUNNING
                if now != stamp or _recent(now) or (killed and not is_running(self.root / name)):
                    self._waiting[name] = None
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
                there = [e for e in found if not e.name.startswith(".") and e.is_dir()]
                times = {e.name: e.stat().st_mtime_ns for e in there}
        except OSError:
            times = {}
        for name in [n for n in (*self._known, *self._waiting) if n not in times]:
            self._waiting.pop(name, None)
            self._put(name, None)
            self._known.pop(name, None)
        # The newest first: what a person looks for.
        for name in sorted(times, key=lambda n: -times[n]):
            if name not in self._known:
                self._waiting[name] = None

    def _read(self, name: str) -> None:
        stamp = self._stamp(self.root / name)
        facts = read_run(self.root / name)
        self.reads += 1
        self._put(name, facts, stamp)

    def _put(self, name: str, facts: dict[str, Any] | None, stamp: int = 0) -> None:
        before = self.facts(name)
        if before == facts:
            facts = before  # the same object, by which a page tells that nothing changed
        else:
            self.version += 1
        self._known[name] = facts, stamp

    def _stamp(self, path: Path) -> int:
        self.stats += 1
        try:
            return path.stat().st_mtime_ns
        except OSError:
            return 0


def _recent(stamp: int) -> bool:
    return abs(time.time_ns() - stamp) < RECENT
