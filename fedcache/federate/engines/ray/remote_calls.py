"""Remote calls on a Ray cluster. They are idempotent, are repeated if a worker or a node dies, and return small values.

Without GPUs, calls are plain tasks. With GPUs, each GPU has one actor that takes calls, so that models are loaded once.
The called functions belong to this package, so workers import it and never a user's script.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import fedcache
from fedcache.errors import FedcacheError, MachineError
from fedcache.federate.engines.ray.cluster import RETRIES, Cluster, first_line

Make = Callable[[Any], Any]
Use = Callable[..., dict[str, Any]]


@cache
def package_digest() -> str:
    """sha256 over all source files of fedcache; other code could compute other results."""
    root = Path(fedcache.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def check_code(expected: str) -> None:
    """Refuse calls of a driver with other code. Raises MachineError."""
    if package_digest() != expected:
        raise MachineError(
            f"{socket.gethostname()} has another version of fedcache than the machine that runs the "
            "command.",
            "Install the same version of fedcache on every node.",
        )


class RayWorkerPool:
    """Pool of calls of one function on a cluster.

    Every worker process computes ``make(setup)`` once and passes the value to all of its calls.

    Args:
        cluster: runs the calls.
        make: ``make(setup)`` -> value, in a worker.
        use: ``use(value, *args)`` -> a small dict, in a worker; must be idempotent.
        setup: argument of ``make``.
        cpus: of a call.
        gpus: 1 for calls by actors that hold a GPU each, 0 for tasks.
        most: limit of simultaneous calls.
    """

    def __init__(
        self,
        cluster: Cluster,
        make: Make,
        use: Use,
        setup: Any,
        *,
        cpus: int,
        gpus: int = 0,
        most: int | None = None,
    ) -> None:
        self.cluster = cluster
        self.cpus = cpus
        self.gpus = gpus
        self.most = most or 1 << 20  # without a limit, a number that no cluster reaches
        ray = cluster.ray
        # Sent with every call. The setup may be large, so it is stored once in the cluster, and workers fetch it. In a
        # list it stays a reference; Ray would replace a reference that is itself an argument by the value.
        session = secrets.token_hex(8)
        environment = worker_environment(cluster.home)
        self._head = (make, use, session, environment, [ray.put(setup)])
        # Reference of a call -> its tag, and the number of its actor (0 for a task).
        self._waiting: dict[Any, Any] = {}
        self._actors: list[Any] = []
        if gpus:
            # Actors reserve no CPU, because tasks would wait forever for CPUs that actors hold.
            remote = ray.remote(
                num_gpus=1, num_cpus=0, max_restarts=RETRIES, max_task_retries=RETRIES
            )
            kind = remote(GpuActor)
            count = min(self.most, cluster.need(0, gpus))
            self._actors = [kind.remote() for _ in range(count)]
        else:
            cluster.need(cpus)
            self._task = ray.remote(num_cpus=cpus, max_retries=RETRIES)(call)

    @property
    def slots(self) -> int:
        """Number of simultaneous calls."""
        if self.gpus:
            return len(self._actors)
        return max(1, min(self.most, self.cluster.slots(self.cpus)))

    @property
    def waiting(self) -> int:
        """Number of calls without an answer."""
        return len(self._waiting)

    def submit(self, tag: Any, *args: Any) -> None:
        """Start a call; ``wait`` returns its answer with ``tag``."""
        if not self.gpus:
            ref = self._task.remote(*self._head, *args)
            self._waiting[ref] = (tag, 0)
            return
        # The actor with the fewest waiting calls gets the call, so that no GPU is idle while another has a queue.
        counts = [0] * len(self._actors)
        for _, actor in self._waiting.values():
            counts[actor] += 1
        idlest = counts.index(min(counts))
        ref = self._actors[idlest].call.remote(*self._head, *args)
        self._waiting[ref] = (tag, idlest)

    def wait(self, seconds: float) -> list[tuple[Any, dict[str, Any]]]:
        """(tag, answer) of the calls that have ended, after at most that many seconds.

        Raises FedcacheError from a call; MachineError if its workers died ``RETRIES`` + 1 times.
        """
        ray = self.cluster.ray
        refs = list(self._waiting)
        # First all calls that have ended; if there are none, wait for the next one.
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        if not done:
            done, _ = ray.wait(refs, num_returns=1, timeout=seconds)
        answers = []
        for ref in done:
            tag, _ = self._waiting.pop(ref)
            answer = self._answer(ref)
            error = answer.get("error")
            if isinstance(error, BaseException):
                raise error
            answers.append((tag, answer))
        return answers

    def ask(self, *args: Any) -> dict[str, Any]:
        """One call and its answer; errors as ``wait``."""
        self.submit(None, *args)
        while True:
            for _, answer in self.wait(1.0):
                return answer

    def interrupt(self) -> None:
        """Send every call the signal of Ctrl-C, so that it saves its last round and ends. Its answer is lost."""
        for ref in self._waiting:
            with suppress(Exception):
                self.cluster.ray.cancel(ref)

    def settle(self, seconds: float) -> None:
        """Wait until all calls have ended, at most ``seconds``. Their answers are discarded."""
        refs = list(self._waiting)
        if refs:
            self.cluster.ray.wait(refs, num_returns=len(refs), timeout=seconds)
        self._waiting.clear()

    def _answer(self, ref: Any) -> dict[str, Any]:
        errors = self.cluster.ray.exceptions
        try:
            found: dict[str, Any] = self.cluster.ray.get(ref)
        except errors.RayTaskError:
            raise  # a bug, with the traceback of the worker
        except errors.RayError as error:
            why = first_line(error, "no reason given")
            kind = type(error).__name__
            attempts = RETRIES + 1
            raise MachineError(
                f"A worker of {self.cluster.words} ended {attempts} times ({kind}: {why}).",
                "A common cause is too little memory. To resume, run the same command again with fewer CPUs for Ray "
                "or a smaller --batch.",
            ) from error
        return found


class GpuActor:
    """Actor: one process that holds a GPU and the models it has loaded there."""

    def call(self, *args: Any) -> dict[str, Any]:
        """``call`` in the process of this actor."""
        return call(*args)


@dataclass(frozen=True)
class WorkerEnvironment:
    """Settings of the driver that a worker takes over before it imports anything."""

    code: str  # ``package_digest``
    folder: str  # working directory, so that relative paths mean the same
    variables: dict[str, str]  # of the environment


def worker_environment(home: str | None) -> WorkerEnvironment:
    """The settings of this process; ``home`` is HOME of the user if workers have another one."""
    named = ("FEDCACHE_", "HF_", "TORCH_HOME", "XDG_")
    variables = {key: value for key, value in os.environ.items() if key.startswith(named)}
    if home:
        variables["HOME"] = home
    return WorkerEnvironment(package_digest(), str(Path.cwd()), variables)


_sessions: dict[str, Any] = {}
"""Session -> value of ``make``, in a worker. It has at most one entry."""


def call(
    make: Make, use: Use, session: str, environment: WorkerEnvironment, box: list[Any], *args: Any
) -> dict[str, Any]:
    """In a worker: one call of ``use``, with the value of ``make(setup)`` that this process computes at its first call.

    ``box`` is a list with the reference of the setup.
    """
    try:
        if session not in _sessions:
            import ray

            check_code(environment.code)
            os.environ.update(environment.variables)
            with suppress(OSError):
                os.chdir(environment.folder)
            # The value of an earlier session goes first, because two sets of backbones may not fit into memory.
            _sessions.clear()
            _sessions[session] = make(ray.get(box[0]))
        return use(_sessions[session], *args)
    except FedcacheError as error:
        return {"error": error}
