"""Calls on the machines of a cluster: idempotent, repeated where a worker or a node dies, small answers only.

Plain tasks do everything; a GPU has one actor, so that what it holds is loaded once. What is called is a function of
this package, so workers import it and never a user's script.
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
    """sha256 over every source of fedcache: machines with other code would compute something else."""
    root = Path(fedcache.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(
            path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0"
        )
    return digest.hexdigest()


def check_code(expected: str) -> None:
    """Refuse to work for a driver with other code. Raises MachineError."""
    if package_digest() != expected:
        raise MachineError(
            f"{socket.gethostname()} has another fedcache than the machine the command runs on.",
            "Install the same version of fedcache on every node.",
        )


class RayWorkerPool:
    """Calls of one function under way on a cluster.

    Every worker process makes what the function needs once (``make`` of ``setup``) and uses it for all its calls.

    Args:
        cluster: where.
        make: ``make(setup)``, in a worker.
        use: ``use(value, *args)`` -> a small dict, in a worker; must be idempotent.
        setup: what every worker needs.
        cpus: of a call.
        gpus: 1 for calls by actors that hold a GPU each, 0 for tasks.
        most: calls at once, whatever the cluster has.
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
        self.most = most or 1 << 20
        self._slots = min(self.most, cluster.need(0 if gpus else cpus, gpus))
        ray = cluster.ray
        # Sent with every call, small; the setup is stored once in the cluster and fetched by the workers.
        self._head = (
            make,
            use,
            secrets.token_hex(8),
            worker_environment(cluster.home),
            [ray.put(setup)],
        )
        self._waiting: dict[Any, Any] = {}
        self._actors: list[Any] = []
        if gpus:  # no CPU is held: actors that hold every CPU leave tasks waiting for ever
            kind = ray.remote(
                num_gpus=1, num_cpus=0, max_restarts=RETRIES, max_task_retries=RETRIES
            )(GpuActor)
            self._actors = [kind.remote() for _ in range(self._slots)]
        else:
            self._task = ray.remote(num_cpus=cpus, max_retries=RETRIES)(call)

    @property
    def slots(self) -> int:
        """Calls that run at once."""
        if self.gpus:
            return self._slots
        return max(1, min(self.most, self.cluster.slots(self.cpus)))

    @property
    def waiting(self) -> int:
        """Calls that have not answered."""
        return len(self._waiting)

    def submit(self, tag: Any, *args: Any) -> None:
        """Start a call; ``wait`` gives its answer with ``tag``."""
        if not self.gpus:
            self._waiting[self._task.remote(*self._head, *args)] = (tag, 0)
            return
        # A call goes to the actor with the fewest under way: a GPU never waits while another has two calls queued.
        counts = [sum(a == i for _, a in self._waiting.values()) for i in range(len(self._actors))]
        least = counts.index(min(counts))
        self._waiting[self._actors[least].call.remote(*self._head, *args)] = (tag, least)

    def wait(self, seconds: float) -> list[tuple[Any, dict[str, Any]]]:
        """(tag, answer) of the calls that have ended, after that many seconds at most.

        Raises FedcacheError, what a call raised; MachineError when its workers died again and again.
        """
        ray = self.cluster.ray
        refs = list(self._waiting)
        # All that have ended at once; only where none has, the first one to end.
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        if not done:
            done, _ = ray.wait(refs, num_returns=1, timeout=seconds)
        answers = []
        for ref in done:
            tag, _ = self._waiting.pop(ref)
            answer = self._answer(ref)
            if isinstance(error := answer.get("error"), BaseException):
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
        """Ask every call to stop where it loses nothing: its process gets what Ctrl-C sends. Its answer is lost."""
        for ref in self._waiting:
            with suppress(Exception):
                self.cluster.ray.cancel(ref)

    def settle(self, seconds: float) -> None:
        """Wait until no call is under way, that long at most; answers are lost."""
        if self._waiting:
            self.cluster.ray.wait(
                list(self._waiting), num_returns=len(self._waiting), timeout=seconds
            )
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
            raise MachineError(
                f"A worker of {self.cluster.words} ended {RETRIES + 1} times ({kind}: {why}).",
                "Out of memory? Run the same command again: it goes on. Fewer CPUs for Ray, or a smaller --batch, need "
                "less memory.",
            ) from error
        return found


class GpuActor:
    """An actor: one process that keeps its GPU and what it has loaded there."""

    def call(self, *args: Any) -> dict[str, Any]:
        """``call``."""
        return call(*args)


@dataclass(frozen=True)
class WorkerEnvironment:
    """What a worker takes over from the driver before it imports anything."""

    code: str  # ``package_digest``
    folder: str  # working directory, so that relative paths mean the same
    variables: dict[str, str]  # of the environment


def worker_environment(home: str | None) -> WorkerEnvironment:
    """Those of this process; ``home`` is the user's where workers have another."""
    named = ("FEDCACHE_", "HF_", "TORCH_HOME", "XDG_")
    variables = {key: value for key, value in os.environ.items() if key.startswith(named)}
    return WorkerEnvironment(
        package_digest(), str(Path.cwd()), {**variables, **({"HOME": home} if home else {})}
    )


_sessions: dict[str, Any] = {}
"""In a worker: what ``make`` gave, by session; at most one."""


def call(
    make: Make, use: Use, session: str, environment: WorkerEnvironment, box: list[Any], *args: Any
) -> dict[str, Any]:
    """In a worker: one use of what this process made of the setup, which it fetches once."""
    try:
        # the first call of this process: become like the driver, then load
        if session not in _sessions:
            import ray

            check_code(environment.code)
            os.environ.update(environment.variables)
            with suppress(OSError):
                os.chdir(environment.folder)
            _sessions.clear()  # of an earlier session of this process: two sets of backbones may not fit its memory
            _sessions[session] = make(ray.get(box[0]))
        return use(_sessions[session], *args)
    except FedcacheError as error:
        return {"error": error}
