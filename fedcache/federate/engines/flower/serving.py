"""A server or a site that stays until it is asked to stop, or a whole federation on loopback, gone afterwards."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedcache.config import Home
from fedcache.errors import FedcacheError, MachineError, StoreError, UsageError, shell_word
from fedcache.federate.engines.flower.network import (
    EVERYWHERE,
    Address,
    register,
    run_app,
    start_superlink,
    start_supernode,
)
from fedcache.federate.engines.flower.plan import Plan, write_app
from fedcache.federate.engines.flower.processes import (
    Keys,
    Process,
    free_port,
    make_keys,
    need_flower,
    read_keys,
    read_site_keys,
    stop_all,
)
from fedcache.federate.engines.flower.site import state_of
from fedcache.federate.engines.flower.site_names import server_folder
from fedcache.runs.store_choice import check_client_folder
from fedcache.store.files import make_private
from fedcache.store.store import Store

Say = Callable[[str], None]
LOOK_EVERY = 0.5
"""Seconds between looks at a process."""

KEY_UNKNOWN = "failed to activate supernode"
"""What a SuperNode's log has when the server, which listens, does not take its key: it does not know it, or has not
missed yet the site of that key that was killed."""

WITH_KEYS = "fedcache flower keys --out KEYS --sites NAME, then start the server again: it registers every key of KEYS."

HOST = "127.0.0.1"

Told = Callable[[dict[str, Any]], None]


def serve(
    keys: Path | None, host: str | None, port: int, home: Home, say: Say, asked: threading.Event
) -> None:
    """Run the SuperLink until it is asked to stop. Raises UsageError, MachineError."""
    need_flower()
    known = None
    if keys is not None:
        known = read_keys(keys)
    where = host or ("127.0.0.1" if known is None else EVERYWHERE)
    if known is None:
        Address(where, port).need_loopback(
            f"fedcache flower keys --out KEYS --sites a,b --host {shell_word(where)}, then --keys KEYS"
        )
    folder = _folder(home, server_folder(port) + ("" if known is not None else "-insecure"))
    process = start_superlink(Address(where, port), known, folder)
    try:
        by = ""
        if known is not None:
            by = " by TLS"
            here = "127.0.0.1"
            if where != EVERYWHERE:
                here = where
            register(Address(here, port, known.ca), list(known.nodes.values()))
            names = ", ".join(known.nodes) or "none"
            say(f"Sites that may take part: {names}.")
        say(f"Listening at {where}:{port}{by}; its log is {process.log}.")
        _stay(process, asked, {})
    finally:
        process.stop()


def attend(
    shard: Path,
    superlink: str,
    keys: Path | None,
    name: str | None,
    port: int | None,
    home: Home,
    say: Say,
    asked: threading.Event,
    *,
    masked_only: bool = False,
) -> None:
    """Run a SuperNode on a shard until it is asked to stop; with ``masked_only`` it sends no upload as it is.

    Raises UsageError, StoreError, MachineError.
    """
    need_flower()
    store = Store.open(shard)
    if "shard" not in store.dataset and name is None:
        raise UsageError(
            f"{shard} was not cut out of a larger store, so its client has no name.",
            f"Give it one that no other site has:  fedcache flower site --shard {shell_word(shard)} "
            f"--superlink {shell_word(superlink)} --name NAME",
        )
    ca, key = (None, None) if keys is None else read_site_keys(keys)
    address = Address.parse(superlink, ca)
    address.need_loopback(
        "Take --keys DIR, which `fedcache flower keys` made for this site on the server's machine."
    )
    if not address.check():
        say(f"Nothing listens at {address} yet; the site looks for it until it is there.")
    state = state_of(home.root, store)
    config = {"shard": str(shard.resolve()), "state": str(state)}
    if name:
        config["name"] = name
    if masked_only:
        config["masked-only"] = "yes"
    folder = _folder(home, f"site-{state.name}")
    process = start_supernode(address, config, key, folder, port or free_port())
    client = name or store.dataset["shard"]["client"]
    say(f"Site {client!r} at {address}; its log is {process.log}.")
    unknown = MachineError(
        f"The server at {address} does not know this site's key {key}, or the same site was killed less than a minute "
        "ago and is not missed yet.",
        f"After a kill: the same command again in a minute. Else {WITH_KEYS}",
    )
    try:
        _stay(process, asked, {KEY_UNKNOWN: unknown} if key is not None else {})
    finally:
        process.stop()


def _stay(process: Process, asked: threading.Event, known: Mapping[str, FedcacheError]) -> None:
    """Wait until asked to stop. Raises, when the process ends by itself, what is known of its log, or MachineError."""
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


@dataclass
class Loopback:
    """A running federation."""

    folder: Path  # of logs and keys
    address: Address  # of the server
    keys: Keys | None  # None without TLS
    link: Process  # the server's process
    nodes: dict[str, Process] = field(default_factory=dict)  # name -> process of each site

    def add(
        self, shard: Path, home: Home, *, name: str | None = None, called: str | None = None
    ) -> Process:
        """Start a site on a shard; ``called`` is the name of its key and of its log."""
        store = Store.open(shard)
        label = called or shard.stem
        config = {"shard": str(shard.resolve()), "state": str(state_of(home.root, store))}
        if name is not None:
            config["name"] = name
        key = None
        if self.keys is not None:
            key = self.keys.site(label) / "node.key"
        process = start_supernode(
            self.address, config, key, self.folder, free_port(), f"node-{label}"
        )
        self.nodes[label] = process
        return process

    def run(self, plan: Plan, told: Told) -> dict[str, Any]:
        """Write the plan's app and run it."""
        return run_app(
            write_app(plan, self.folder / f"app-{plan.train.method}").path, self.address, told
        )

    def stop(self) -> None:
        """End all of it."""
        stop_all([self.link, *self.nodes.values()])


def open_loopback(
    folder: Path, names: Sequence[str], *, tls: bool, port: int | None = None
) -> Loopback:
    """Start a server on loopback; with ``tls`` for sites of these names alone. Raises MachineError."""
    make_private(folder)
    keys = None
    if tls:
        keys = make_keys(folder / "keys", names, ())
    address = Address(HOST, port or free_port(), None if keys is None else keys.ca)
    link = start_superlink(address, keys, folder)
    made = Loopback(folder, address, keys, link)
    try:
        if keys is not None:
            register(address, list(keys.nodes.values()))
    except BaseException:
        made.stop()
        raise
    return made


def up(
    plan: Plan,
    shards: Path,
    home: Home,
    told: Told,
    *,
    tls: bool = False,
    port: int | None = None,
    keep: Path | None = None,
) -> dict[str, Any]:
    """Run a plan over the shards of a directory, each a site of its own, on loopback; returns the run's last words.

    Args:
        plan: what is run; it is of as many sites as there are shards.
        shards: a directory of client stores.
        home: where results and the sites' states are.
        told: called with every note and warning.
        tls: with certificates and keys made for it.
        port: of the server; None for a free one.
        keep: directory of logs, kept; None keeps those of a run that failed.

    Raises:
        UsageError for a plan that these shards cannot have; StoreError without shards; MachineError.
    """
    check_client_folder(shards)
    stores = sorted(shards.glob("*.zarr"))
    if not stores:
        raise StoreError(
            f"{shards} holds no client stores.",
            "fedcache shard --partition NAME --out DIR   makes them.",
        )
    for path in stores:
        Store.open(path)
    plan = replace(plan, sites=len(stores)).checked()
    if keep is None:  # in the home, where gc names what a killed command or a failed run leaves
        around = _folder(home, "loopback")
        folder = Path(tempfile.mkdtemp(prefix=f"up.{os.getpid()}-", dir=around))
    else:
        folder = keep.expanduser().resolve()
    logs_matter = keep is not None
    try:
        with ExitStack() as stack:
            loopback = open_loopback(folder, [p.stem for p in stores], tls=tls, port=port)
            stack.callback(loopback.stop)
            by = ""
            if tls:
                by = " by TLS"
            told({"note": f"Server at {loopback.address}{by}; logs in {folder}."})
            for path in stores:
                loopback.add(path, home)
            last = loopback.run(plan, told)
        logs_matter |= "error" in last
    except Exception:
        logs_matter = True
        raise
    finally:  # also after Ctrl-C
        if not logs_matter:
            shutil.rmtree(folder, ignore_errors=True)
    return last
