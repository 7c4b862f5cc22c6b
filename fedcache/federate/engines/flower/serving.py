"""A server or a site that stays until it is asked to stop, and says in one sentence why it cannot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from fedcache.config import Home
from fedcache.errors import FedcacheError, MachineError, UsageError
from fedcache.federate.engines.flower.installed import need_flower
from fedcache.federate.engines.flower.keys import read_keys, read_site_keys
from fedcache.federate.engines.flower.network import EVERYWHERE, Address, register, start_superlink, start_supernode
from fedcache.federate.engines.flower.processes import Process, free_port
from fedcache.federate.engines.flower.site_store import state_of
from fedcache.store.files import make_private
from fedcache.store.store import Store

Say = Callable[[str], None]
LOOK_EVERY = 0.5
"""Seconds between looks at a process."""

KEY_UNKNOWN = "failed to activate supernode"
"""What a SuperNode's log has when the server, which listens, does not take its key."""

WITH_KEYS = "fedcache flower keys --out KEYS --sites NAME, then start the server again: it registers every key of KEYS."


def serve(keys: Path | None, host: str | None, port: int, home: Home, say: Say, asked: threading.Event) -> None:
    """Run the SuperLink until it is asked to stop.

    Raises:
        UsageError, MachineError.
    """
    need_flower()
    known = None if keys is None else read_keys(keys)
    where = host or ("127.0.0.1" if known is None else EVERYWHERE)
    if known is None:
        Address(where, port).need_loopback(
            f"fedcache flower keys --out KEYS --sites a,b --host {where}, then --keys KEYS"
        )
    folder = _folder(home, f"server-{port}{'' if known is not None else '-insecure'}")
    process = start_superlink(Address(where, port), known, folder)
    try:
        local = Address("127.0.0.1" if where == EVERYWHERE else where, port, None if known is None else known.ca)
        if known is not None:
            register(local, list(known.nodes.values()))
            say(f"Sites that may take part: {', '.join(known.nodes) or 'none'}.")
        say(f"Listening at {where}:{port}{' by TLS' if known is not None else ''}; its log is {process.log}.")
        _stay(process, asked, {})
    finally:
        process.stop()


def attend(
    shard: Path, superlink: str, keys: Path | None, name: str | None, port: int | None, home: Home, say: Say,
    asked: threading.Event,
) -> None:  # fmt: skip
    """Run a SuperNode on a shard until it is asked to stop.

    Raises:
        UsageError, StoreError, MachineError.
    """
    need_flower()
    store = Store.open(shard)
    if "shard" not in store.dataset and name is None:
        raise UsageError(
            f"{shard} was not cut out of a larger store, so its client has no name.",
            f"Give it one that no other site has: fedcache flower site --shard {shard} --name NAME",
        )
    ca, key = (None, None) if keys is None else read_site_keys(keys)
    address = Address.parse(superlink, ca)
    address.need_loopback("Take --keys DIR, which the server's fedcache flower keys made for this site.")
    if not address.check():
        say(f"Nothing listens at {address} yet; the site looks for it until it is there.")
    state = state_of(home.root, store)
    config = {"shard": str(shard.resolve()), "state": str(state), **({"name": name} if name else {})}
    process = start_supernode(address, config, key, _folder(home, f"site-{state.name}"), port or free_port())
    say(f"Site {name or store.dataset['shard']['client']!r} at {address}; its log is {process.log}.")
    unknown = MachineError(f"The server at {address} does not know this site's key {key}.", WITH_KEYS)
    try:
        _stay(process, asked, {KEY_UNKNOWN: unknown} if key is not None else {})
    finally:
        process.stop()


def _stay(process: Process, asked: threading.Event, known: Mapping[str, FedcacheError]) -> None:
    """Wait until asked to stop.

    Raises:
        FedcacheError: when the process ends by itself: a known one for what its log says, else MachineError.
    """
    while not asked.wait(LOOK_EVERY):
        if process.alive:
            continue
        said = process.tail(60)
        for words, error in known.items():
            if words in said.lower():
                raise error
        raise MachineError(
            f"{process.name} ended with {process.popen.returncode}:\n{process.tail()}",
            f"Its whole log is {process.log}",
        )


def _folder(home: Home, name: str) -> Path:
    """Where a program's log is, and what it keeps."""
    folder = home.root / "flower" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    make_private(folder)
    return folder
