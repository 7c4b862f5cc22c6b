"""A federation on loopback: a server, a site for every shard, one run, and all of it gone afterwards."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedcache.config import Home
from fedcache.errors import StoreError
from fedcache.federate.engines.flower.app import write_app
from fedcache.federate.engines.flower.keys import Keys, make_keys
from fedcache.federate.engines.flower.network import Address, register, run_app, start_superlink, start_supernode
from fedcache.federate.engines.flower.plan import Plan
from fedcache.federate.engines.flower.processes import Process, free_port, stop_all
from fedcache.federate.engines.flower.site_store import state_of
from fedcache.store.files import make_private
from fedcache.store.store import Store

HOST = "127.0.0.1"
Told = Callable[[dict[str, Any]], None]


@dataclass
class Loopback:
    """A running federation.

    Attributes:
        folder: of logs and keys.
        address: of the server.
        keys: None without TLS.
        link: the server's process.
        nodes: name -> process of each site.
    """

    folder: Path
    address: Address
    keys: Keys | None
    link: Process
    nodes: dict[str, Process] = field(default_factory=dict)

    def add(self, shard: Path, home: Home, *, name: str | None = None, called: str | None = None) -> Process:
        """Start a site on a shard; ``called`` is the name of its key and of its log."""
        store = Store.open(shard)
        label = called or shard.stem
        config = {"shard": str(shard.resolve()), "state": str(state_of(home.root, store))}
        if name is not None:
            config["name"] = name
        key = None if self.keys is None else self.keys.site(label) / "node.key"
        process = start_supernode(self.address, config, key, self.folder, free_port(), f"node-{label}")
        self.nodes[label] = process
        return process

    def run(self, plan: Plan, told: Told) -> dict[str, Any]:
        """Write the plan's app and run it."""
        app = write_app(plan, self.folder / f"app-{plan.train.method}")
        return run_app(app.path, self.address, told)

    def stop(self) -> None:
        """End all of it."""
        stop_all([self.link, *self.nodes.values()])


def open_loopback(folder: Path, names: Sequence[str], *, tls: bool, port: int | None = None) -> Loopback:
    """Start a server on loopback; with ``tls`` for sites of these names alone.

    Raises:
        MachineError.
    """
    make_private(folder)
    keys = make_keys(folder / "keys", names, ()) if tls else None
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
    """Run a plan over the shards of a directory, each a site of its own, on loopback.

    Args:
        plan: what is run; it is of as many sites as there are shards.
        shards: a directory of client stores.
        home: where results and the sites' states are.
        told: called with every note and warning.
        tls: with certificates and keys made for it.
        port: of the server; None for a free one.
        keep: directory of logs, kept; None keeps those of a run that failed.

    Returns:
        the run's last words: ``done`` or ``error``.

    Raises:
        UsageError for a plan that these shards cannot have; StoreError without shards; MachineError.
    """
    stores = sorted(shards.glob("*.zarr")) if shards.is_dir() else []
    if not stores:
        raise StoreError(f"{shards} holds no client stores.", "fedcache shard --partition NAME --out DIR makes them.")
    for path in stores:
        Store.open(path)
    plan = replace(plan, sites=len(stores)).checked()
    folder = Path(tempfile.mkdtemp(prefix="fedcache-up-")) if keep is None else keep.expanduser().resolve()
    logs_matter = keep is not None
    try:
        with ExitStack() as stack:
            loopback = open_loopback(folder, [p.stem for p in stores], tls=tls, port=port)
            stack.callback(loopback.stop)
            told({"note": f"Server at {loopback.address}{' by TLS' if tls else ''}; logs in {folder}."})
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
