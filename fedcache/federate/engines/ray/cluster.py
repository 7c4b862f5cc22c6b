"""Ray cluster: a local one, which other machines cannot reach, or an existing one that is joined at its address.

A local cluster makes no connection to other machines. Telemetry is switched off before Ray is imported, the cluster
listens on loopback only, and its head gets a configuration file, without which it would query the metadata servers of
cloud providers.
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
from fedcache.parsing import Facts, counted, host_and_port
from fedcache.process import environment_with
from fedcache.store.lock import try_lock

RETRIES = 3
"""Number of repetitions of a call whose worker or node ended."""

ANSWER_WITHIN = 3.0
"""Seconds in which a cluster's address must answer. Ray itself would try for two and a half minutes."""

OBJECTS = 128 << 20
"""Bytes of a local cluster's object store, which holds descriptions of tasks but no features."""

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_USAGE_STATS_PROMPT_ENABLED": "0",
    "RAY_USAGE_STATS_REPORT_URL": "http://127.0.0.1:9",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    "RAY_task_oom_retries": str(RETRIES),
}
"""Environment variables that are set before Ray is imported."""

ALONE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
"""Environment variables of a local cluster. It listens only on 127.0.0.1, and its clients need its token."""

PREFIX = "fedcache-ray-"
"""Beginning of the name of a local cluster's temporary folder."""
HELD = "held.lock"
"""Lock file in the temporary folder; the driver holds the lock while the cluster runs."""


def need_ray() -> None:
    """Check that Ray is installed, without importing it. Raises MachineError, with the command that installs it."""
    if find_spec("ray") is None:
        raise MachineError(
            "--engine ray needs the package ray, which is not installed.",
            "pip install 'fedcache[ray]'",
        )


def check_address(address: str) -> None:
    """Refuse an address at which no cluster answers within ``ANSWER_WITHIN`` seconds.

    Raises UsageError for a text that is not HOST:PORT; MachineError if nothing answers there, or a server
    that is not a Ray cluster.
    """
    host_port = host_and_port(address)
    if host_port is None:
        raise UsageError(
            f"--ray-address {address} is not HOST:PORT.",
            "For example --ray-address 10.0.0.1:6379, the address that `ray start --head` prints. Run "
            "the command on a node of the cluster.",
        )
    host, port = host_port
    hint = (
        f"ray start --head --port {port}   on {host} starts a cluster;  ray status --address {address}   "
        "shows its state"
    )
    reply = b""
    try:
        with socket.create_connection(host_port, ANSWER_WITHIN) as connection:
            # The start of an HTTP/2 connection with empty settings, which every gRPC server answers.
            empty_settings = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + empty_settings)
            with suppress(TimeoutError):  # a server that does not answer HTTP/2
                reply = connection.recv(9)
    except OSError as error:
        raise MachineError(
            f"No Ray cluster answers at {address}: {error.strerror or error}.", hint
        ) from error
    if len(reply) < 4 or reply[3] != 4:  # byte 3 is the type of the frame, 4 for settings
        raise MachineError(f"The server at {address} is not a Ray cluster.", hint)


class Cluster:
    """A cluster that this process uses; ``words`` name it in messages.

    The workers of a local cluster start with another HOME; ``home`` is the user's HOME, which they restore. It is None
    for a cluster that this process joined.
    """

    def __init__(self, ray: Any, words: str, home: str | None = None) -> None:
        self.ray = ray
        self.words = words
        self.home = home
        self._looked = 0.0
        self._nodes: list[dict[str, float]] = []

    def nodes(self) -> list[dict[str, float]]:
        """CPU and GPU of every living node, updated once a second."""
        now = time.monotonic()
        if now - self._looked > 1:
            self._looked = now
            self._nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        return self._nodes

    def slots(self, cpus: int, gpus: int = 0) -> int:
        """Calls of that size that can run at the same time on the present nodes."""
        needed = {"CPU": cpus, "GPU": gpus}
        total = 0
        for node in self.nodes():
            # The scarcest resource of a node decides.
            total += min(int(node.get(key, 0) // count) for key, count in needed.items() if count)
        return total

    def need(self, cpus: int, gpus: int = 0) -> int:
        """``slots``, at least one. Raises MachineError if no node is large enough."""
        slots = self.slots(cpus, gpus)
        if not slots:
            resources = counted(cpus, "CPU")
            if gpus:
                resources = counted(gpus, "GPU")
            raise MachineError(
                f"No node of {self.words} has {resources}.",
                "Use fewer --threads or more --jobs, so that each job needs fewer CPUs; `ray status` shows "
                "the resources.",
            )
        return slots


@contextmanager
def open_cluster(address: str | None, *, cpus: int, gpus: int) -> Iterator[Cluster]:
    """A local cluster, which ends with the block, or the cluster at HOST:PORT, which continues to run.

    ``cpus`` and ``gpus`` size a local cluster. Raises MachineError if it cannot be started or joined; UsageError for a
    wrong address.
    """
    need_ray()
    if address is not None:
        check_address(address)
    for key, value in QUIET.items():
        os.environ.setdefault(key, value)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # also if the user has set it to 1
    if address is None:
        home = os.environ.get("HOME", str(Path.home()))
        where = "this machine's Ray"
    else:
        home = None
        where = f"the Ray cluster at {address}"
    # Ray prints messages about dead workers to stdout, which belongs to the command.
    with redirect_stdout(sys.stderr), _local_environment(address) as folder:
        with _keep_signal_handlers():
            import ray  # reads its token at import
        logging.getLogger("ray").setLevel(logging.ERROR)
        try:
            with _keep_signal_handlers():
                _start(ray, address, folder, cpus, gpus)
            yield Cluster(ray, where, home)
        finally:
            with _keep_signal_handlers(), suppress(Exception):
                ray.shutdown()


def _start(ray: Any, address: str | None, folder: Path | None, cpus: int, gpus: int) -> None:
    """Start a local cluster, or join the one at an address. Raises MachineError."""
    options: Facts
    if address is not None:
        options = {"address": address}
        failure = f"The Ray cluster at {address} could not be joined"
        hint = (
            "The nodes need the same versions of Python and Ray, and the same RAY_AUTH_TOKEN, as this machine. To "
            f"see the state of the cluster:  ray status --address {address}"
        )
    else:
        options = {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "include_dashboard": False,
            "object_store_memory": OBJECTS,
            "_temp_dir": str(folder),
        }
        failure = "Ray could not be started"
        hint = "Free some memory and disk space, or leave --engine ray out."
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    except (Exception, SystemExit) as error:
        why = first_line(error, type(error).__name__)
        raise MachineError(f"{failure}: {why}.", hint) from error


def first_line(error: BaseException, otherwise: str) -> str:
    """The first line of an error's message, because Ray's messages are long; ``otherwise`` if it has no message."""
    lines = str(error).strip().splitlines()
    if lines:
        return lines[0]
    return otherwise


@contextmanager
def _keep_signal_handlers() -> Iterator[None]:
    """Restore this process's signal handlers, which Ray replaces when it starts."""
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
def _local_environment(address: str | None) -> Iterator[Path | None]:
    """Set the environment of a local cluster, and yield its temporary folder, which is removed at the end.

    HOME of its processes is that folder. It holds the cluster's configuration file, without which the head would query
    the metadata servers of three cloud providers, even without telemetry. Workers restore the user's HOME before they
    import anything.
    """
    if address is not None:
        yield None
        return
    _remove_dead_clusters()
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=_short_parent()))
    # With an address in the environment, Ray would join the cluster there.
    ours = {**ALONE, "RAY_ADDRESS": None, "HOME": str(folder), "RAY_AUTH_TOKEN": _token()}
    # Packages of the user are found below HOME, which changes here, so their folder is named.
    if "PYTHONUSERBASE" not in os.environ and site.ENABLE_USER_SITE:
        ours["PYTHONUSERBASE"] = site.getuserbase()
    try:
        with FileLock(folder / HELD), environment_with(ours):
            (folder / "ray_bootstrap_config.yaml").write_text("{}\n")
            yield folder
    finally:
        _remove_folder(folder)


@cache
def _token() -> str:
    """The token of all clusters of this process, because Ray reads it only once."""
    return secrets.token_hex(32)


def _short_parent() -> str:
    """Parent of the temporary folders, with a short path: paths of sockets in them have at most 107 characters."""
    usual = tempfile.gettempdir()
    if len(usual) <= 20:
        return usual
    return "/tmp"  # nosec B108


def _remove_folder(folder: Path) -> None:
    """Remove a folder. Processes that are ending may still write logs into it, so it tries several times."""
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)


def _remove_dead_clusters() -> None:
    """Remove the folders of killed drivers, which do not hold their locks any more."""
    for lock in Path(_short_parent()).glob(f"{PREFIX}*/{HELD}"):
        with try_lock(lock) as free:
            if free:
                shutil.rmtree(lock.parent, ignore_errors=True)
