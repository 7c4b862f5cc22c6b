"""Runs servers and sites until a stop request, and whole federations on the loopback interface."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedcache.config import Home
from fedcache.errors import MachineError, UsageError, shell_word
from fedcache.federate.engines.flower.plan import Plan, write_app
from fedcache.federate.engines.flower.processes import (
    EVERYWHERE,
    Address,
    Keys,
    Process,
    failure_of,
    free_port,
    make_keys,
    need_flower,
    read_keys,
    read_site_keys,
    register,
    run_app,
    start_superlink,
    start_supernode,
    stop_all,
)
from fedcache.federate.engines.flower.site import SENT, state_of
from fedcache.federate.engines.flower.site_names import server_folder
from fedcache.parsing import Facts
from fedcache.runs.store_choice import client_paths
from fedcache.store.files import make_private
from fedcache.store.store import Store

Say = Callable[[str], None]
LOOK_EVERY = 0.5
"""Seconds between two checks whether a process still runs."""

KEY_UNKNOWN = "failed to activate supernode"
"""Text in the log of a SuperNode whose key the server refuses. Either the server does not know the key, or it has not
noticed yet that an earlier site with this key was killed."""

KEY_WAIT = 90.0
"""Seconds for which a site tries again after the server refused its key. The server registers keys some seconds after
it opens its port, and takes a minute to notice that a site was killed."""

RETRY_EVERY = 5.0
"""Seconds between two tries."""

WITH_KEYS = "fedcache flower keys --out KEYS --sites NAME, then start the server again: it registers every key of KEYS."

HOST = "127.0.0.1"

OnWords = Callable[[Facts], None]
"""Callback for the notes and warnings of a run."""


def serve(
    keys: Path | None, host: str | None, port: int, home: Home, say: Say, stop: threading.Event
) -> None:
    """Run the SuperLink until ``stop`` is set. Raises UsageError, MachineError."""
    need_flower()
    folder = server_folder(port)
    # Without keys, nothing is encrypted, so the server listens on this machine only.
    if keys is None:
        server_keys = None
        listen_host = host or HOST
        encryption = ""
        folder += "-insecure"
        Address(listen_host, port).need_loopback(
            f"fedcache flower keys --out KEYS --sites a,b --host {shell_word(listen_host)}, then --keys KEYS"
        )
    else:
        server_keys = read_keys(keys)
        listen_host = host or EVERYWHERE
        encryption = " by TLS"
    address = Address(listen_host, port)
    process = start_superlink(address, server_keys, _folder(home, folder))
    try:
        if server_keys is not None:
            local = Address(address.local_host, port, server_keys.ca)
            register(local, list(server_keys.nodes.values()))
            names = ", ".join(server_keys.nodes) or "none"
            say(f"Sites that may take part: {names}.")
        say(f"Listening on {listen_host}:{port}{encryption}. Log: {process.log}.")
        _run_until_stop(process, stop)
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
    stop: threading.Event,
    *,
    masked_only: bool = False,
) -> None:
    """Run a SuperNode on a shard until ``stop`` is set; with ``masked_only`` it sends masked uploads only.

    Raises UsageError, StoreError, MachineError.
    """
    need_flower()
    store = Store.open(shard)
    if "shard" not in store.dataset and name is None:
        raise UsageError(
            f"{shard} was not made by `fedcache shard`, so its client has no name.",
            f"Give it a name that no other site has:  fedcache flower site --shard {shell_word(shard)} "
            f"--superlink {shell_word(superlink)} --name NAME",
        )
    ca = None
    key = None
    if keys is not None:
        ca, key = read_site_keys(keys)
    # Without keys a site may only use a server on the same machine.
    address = Address.parse(superlink, ca)
    address.need_loopback(
        "Use --keys DIR, the folder that `fedcache flower keys` made for this site on the server."
    )
    if not address.check():
        say(f"No server is listening at {address} yet. The site keeps trying to connect.")
    state = state_of(home.root, store)
    config = {"shard": str(shard.resolve()), "state": str(state)}
    if name:
        config["name"] = name
    if masked_only:
        config["masked-only"] = "yes"
    folder = _folder(home, f"site-{state.name}")
    node_port = port or free_port()
    client = name or store.dataset["shard"]["client"]
    last_try = None
    while True:
        began = time.monotonic()
        process = start_supernode(address, config, key, folder, node_port)
        if last_try is None:
            say(f"Site {client!r} is running and connects to {address}. Log: {process.log}.")
            say(f"The facts, uploads and counts that it sends are listed in {state / SENT}.")
        try:
            _run_until_stop(process, stop)
            return
        except MachineError:
            if key is None or KEY_UNKNOWN not in process.tail(60).lower():
                raise
        finally:
            process.stop()
        now = time.monotonic()
        if last_try is None or now - began > KEY_WAIT:
            last_try = now + KEY_WAIT
            say(f"The server refuses this site's key. The site tries again for {KEY_WAIT:g} s.")
        if now >= last_try:
            raise MachineError(
                f"The server at {address} does not know this site's key {key}, or another site with this key is "
                f"connected. The site tried for {KEY_WAIT:g} s.",
                f"Stop the other site. If there is none: {WITH_KEYS}",
            )
        if stop.wait(RETRY_EVERY):
            return


def _run_until_stop(process: Process, stop: threading.Event) -> None:
    """Wait until ``stop`` is set. Raises MachineError if the process ends by itself."""
    while not stop.wait(LOOK_EVERY):
        if not process.alive:
            raise failure_of(process, "")  # "", because the process has ended


def _folder(home: Home, name: str) -> Path:
    """Private folder for the log and the data of a program."""
    return make_private(home.root / "flower" / name)


@dataclass
class Loopback:
    """A running federation on this machine."""

    folder: Path  # of logs and keys
    address: Address  # of the server
    keys: Keys | None  # None without TLS
    link: Process  # of the server
    nodes: dict[str, Process] = field(default_factory=dict)  # name of a site -> its process

    def add(self, shard: Path, home: Home, *, called: str | None = None) -> Process:
        """Start a site on a shard; ``called`` is the name of its key and of its log."""
        state = state_of(home.root, Store.open(shard))
        label = called or shard.stem
        config = {"shard": str(shard.resolve()), "state": str(state)}
        key = None
        if self.keys is not None:
            key = self.keys.site(label) / "node.key"
        process = start_supernode(
            self.address, config, key, self.folder, free_port(), f"node-{label}"
        )
        self.nodes[label] = process
        return process

    def run(self, plan: Plan, on_words: OnWords) -> Facts:
        """Write the plan's app and run it; returns the last message of the run."""
        app = write_app(plan, self.folder / f"app-{plan.train.method}")
        return run_app(app, self.address, on_words)

    def stop(self) -> None:
        """Stop the server and all sites."""
        stop_all([self.link, *self.nodes.values()])


def open_loopback(
    folder: Path, names: Sequence[str], *, tls: bool, port: int | None = None
) -> Loopback:
    """Start a server on loopback; with ``tls`` only for sites of these names. Raises MachineError."""
    make_private(folder)
    keys = None
    ca = None
    if tls:
        keys = make_keys(folder / "keys", names, ())
        ca = keys.ca
    address = Address(HOST, port or free_port(), ca)
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
    on_words: OnWords,
    *,
    tls: bool,
    port: int | None,
    keep: Path | None,
) -> Facts:
    """Run a plan on loopback with one site for each shard of a directory; returns the last message of the run.

    Args:
        plan: the run; its number of sites is set to the number of shards.
        shards: a directory of client stores.
        home: of the results and the sites' states.
        on_words: called with every note and warning.
        tls: whether to make and use certificates and keys.
        port: of the server; None for a free one.
        keep: directory of logs, which stays; with None, logs stay only if the run fails.

    Raises:
        UsageError for a plan that these shards cannot have; StoreError without shards; MachineError.
    """
    stores = client_paths(shards)
    for path in stores:
        Store.open(path)  # a store that cannot be opened ends the command before anything starts
    plan = replace(plan, sites=len(stores)).checked()
    if keep is None:
        # In the home, because ``fedcache gc`` lists leftovers of killed and failed runs there.
        parent = _folder(home, "loopback")
        folder = Path(tempfile.mkdtemp(prefix=f"up.{os.getpid()}-", dir=parent))
    else:
        folder = keep.expanduser().resolve()
    logs_matter = keep is not None
    try:
        with ExitStack() as stack:
            loopback = open_loopback(folder, [p.stem for p in stores], tls=tls, port=port)
            stack.callback(loopback.stop)
            encryption = ""
            if tls:
                encryption = " by TLS"
            on_words({"note": f"Server at {loopback.address}{encryption}; logs in {folder}."})
            for path in stores:
                loopback.add(path, home)
            last_words = loopback.run(plan, on_words)
        logs_matter |= "error" in last_words
    except Exception:
        logs_matter = True
        raise
    finally:  # also after Ctrl-C
        if not logs_matter:
            shutil.rmtree(folder, ignore_errors=True)
    return last_words
