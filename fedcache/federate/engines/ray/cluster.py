"""A Ray cluster: one of this machine's own, which nobody else can reach, or one that is joined at its address.

Nothing leaves the machine by itself: telemetry is off before Ray is imported, a cluster of our own listens on loopback
alone, and its head finds the file without which it would ask the clouds' metadata servers whose machine it is on.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import site
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from filelock import FileLock

from fedcache.errors import MachineError, UsageError
from fedcache.store.lock import try_lock

RETRIES = 3
"""How often a call is repeated whose worker or node died."""

ANSWER_WITHIN = 3.0
"""Seconds in which the address of a cluster has to answer; Ray itself tries for two and a half minutes."""

OBJECTS = 128 << 20
"""Bytes of a local cluster's object store: it holds the description of the job, never features."""

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_USAGE_STATS_PROMPT_ENABLED": "0",
    "RAY_USAGE_STATS_REPORT_URL": "http://127.0.0.1:9",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    "RAY_task_oom_retries": str(RETRIES),
}
"""Said before Ray is imported."""

ALONE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
"""Of a local cluster: it listens on 127.0.0.1 and not on the machine's own address, and lets nobody else in."""

PREFIX = "fedcache-ray-"
HELD = "held.lock"
"""Of a local cluster's temporary folder, and the lock in it that its driver holds."""


def need_ray() -> None:
    """Refuse where Ray is not installed; nothing is imported. Raises MachineError, with the line that installs it."""
    if find_spec("ray") is None:
        raise MachineError(
            "--engine ray needs the package ray, which is not installed.",
            "pip install 'fedcache[ray]'",
        )


def check_address(address: str) -> None:
    """Refuse an address at which no cluster answers, at once.

    Raises UsageError for what is no HOST:PORT; MachineError when nothing, or something else, answers there.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 1 << 16 or "/" in host:
        raise UsageError(
            f"--ray-address {address} is not HOST:PORT.",
            "For example --ray-address 10.0.0.1:6379, the address that `ray start --head` prints; run on a node of it.",
        )
    how = f"ray start --head --port {port}   on {host} starts one;  ray status --address {address}   looks at it"
    try:
        with socket.create_connection((host.strip("[]"), int(port)), ANSWER_WITHIN) as line:
            line.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
            found = line.recv(9)
    except TimeoutError:
        found = b""
    except OSError as error:
        raise MachineError(
            f"No Ray cluster answers at {address}: {error.strerror or error}.", how
        ) from error
    if len(found) < 4 or found[3] != 4:  # a server of Ray begins with its HTTP/2 settings
        raise MachineError(f"What answers at {address} is no Ray cluster.", how)


class Cluster:
    """A cluster that this process drives; ``words`` say where it is.

    ``home`` is HOME of the user, where processes of the cluster have another.
    """

    def __init__(self, ray: Any, words: str, home: str | None = None) -> None:
        self.ray = ray
        self.words = words
        self.home = home
        self._looked = 0.0
        self._nodes: list[dict[str, float]] = []

    def nodes(self) -> list[dict[str, float]]:
        """CPU and GPU of every node that is there, looked at once a second."""
        now = time.monotonic()
        if now - self._looked > 1:
            self._looked = now
            self._nodes = [n["Resources"] for n in self.ray.nodes() if n["Alive"]]
        return self._nodes

    def slots(self, cpus: int, gpus: int = 0) -> int:
        """Calls of that size that can run at once, now."""
        wanted = {k: v for k, v in (("CPU", cpus), ("GPU", gpus)) if v}
        return sum(
            min(int(node.get(k, 0) // v) for k, v in wanted.items()) for node in self.nodes()
        )

    def need(self, cpus: int, gpus: int = 0) -> int:
        """``slots``, at least one. Raises MachineError, when no node is large enough."""
        slots = self.slots(cpus, gpus)
        if not slots:
            if gpus:
                what = counted(gpus, "GPU")
            else:
                what = counted(cpus, "CPU")
            raise MachineError(
                f"No node of {self.words} has {what}.",
                "Fewer --threads, or more --jobs, need fewer CPUs for each; `ray status` shows what there is.",
            )
        return slots


@contextmanager
def open_cluster(address: str | None, *, cpus: int, gpus: int = 0) -> Iterator[Cluster]:
    """A cluster of this machine's own, which ends with the block, or the one at HOST:PORT, which is left.

    ``cpus`` and ``gpus`` are a local cluster's. Raises MachineError, when it cannot be started or joined; UsageError
    for a wrong address.
    """
    need_ray()
    if address is not None:
        check_address(address)
    for key, value in QUIET.items():
        os.environ.setdefault(key, value)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    home = None
    if address is None:
        home = os.environ.get("HOME", str(Path.home()))
    where = "this machine's Ray"
    if address is not None:
        where = f"the Ray cluster at {address}"
    with (
        redirect_stdout(sys.stderr),
        _surroundings(address) as folder,
    ):  # Ray tells of dead workers on stdout
        with _own_signals():  # Ray reads its token once, when it is imported
            import ray
        logging.getLogger("ray").setLevel(logging.ERROR)
        try:
            with _own_signals():
                _start(ray, address, folder, cpus, gpus)
            yield Cluster(ray, where, home)
        finally:
            with _own_signals(), suppress(Exception):
                ray.shutdown()


def _start(ray: Any, address: str | None, folder: Path | None, cpus: int, gpus: int) -> None:
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address is not None:
            ray.init(address=address, **common)
        else:
            ray.init(
                num_cpus=cpus,
                num_gpus=gpus,
                include_dashboard=False,
                object_store_memory=OBJECTS,
                _temp_dir=str(folder),
                **common,
            )
    except (Exception, SystemExit) as error:
        what = "Ray could not be started"
        hint = "Free some memory and disk space, or leave --engine ray out."
        if address is not None:
            what = f"The Ray cluster at {address} could not be joined"
            hint = (
                "Its nodes need this machine's versions of Python and Ray, and its token (RAY_AUTH_TOKEN); "
                f"ray status --address {address}   looks at it"
            )
        why = first_line(error, type(error).__name__)
        raise MachineError(f"{what}: {why}.", hint) from error


def first_line(error: BaseException, without: str) -> str:
    """The first line of an error's message, which in Ray has many; ``without`` for an error that has no message."""
    return (str(error).strip().splitlines() or [without])[0]


def counted(number: int, noun: str) -> str:
    """A number of things, in words: 1 node, 2 nodes."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}s"


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this process's signal handlers: Ray puts its own in their place when it starts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _surroundings(address: str | None) -> Iterator[Path | None]:
    """The environment that processes of a local cluster inherit, and its temporary folder, which is removed.

    Their HOME is that folder: there lies the description of the cluster without which its head would ask the metadata
    servers of three clouds, also with telemetry off; workers put the user's HOME back before they import anything.
    """
    if address is not None:
        yield None
        return
    _remove_dead_clusters()
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=_short()))
    lock = FileLock(folder / HELD)
    lock.acquire()
    (folder / "ray_bootstrap_config.yaml").write_text("{}\n")
    ours = {**ALONE, "HOME": str(folder), "RAY_AUTH_TOKEN": _token()}
    if "PYTHONUSERBASE" not in os.environ and site.ENABLE_USER_SITE:
        ours["PYTHONUSERBASE"] = site.getuserbase()
    before = {key: os.environ.get(key) for key in (*ours, "RAY_ADDRESS")}
    os.environ.update(ours)
    os.environ.pop("RAY_ADDRESS", None)  # else Ray would join what it names
    try:
        yield folder
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
        lock.release()
        _remove(folder)


@cache
def _token() -> str:
    """Of this process's clusters: one for all of them, since Ray reads it once."""
    return secrets.token_hex(32)


def _short() -> str:
    """Where private temporary folders are made; sockets lie in them, and their paths may have 107 characters."""
    usual = tempfile.gettempdir()
    return usual if len(usual) <= 20 else "/tmp"  # nosec B108


def _remove(folder: Path) -> None:
    for _ in range(20):  # processes that are ending may still write a log
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)


def _remove_dead_clusters() -> None:
    """Remove the folders of drivers that were killed: nobody holds their lock any more."""
    for left in Path(_short()).glob(f"{PREFIX}*/{HELD}"):
        with try_lock(left) as free:
            if free:
                shutil.rmtree(left.parent, ignore_errors=True)
