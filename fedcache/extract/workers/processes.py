"""A pool of worker processes that ends when one of its workers ends, at any time and for any reason, and never hangs.

A signal to the whole process group may end workers before they start, while they start, compute or answer.
``ProcessPoolExecutor`` would wait forever for some of them.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import connection, parent_process
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from multiprocessing.synchronize import Lock
from typing import Any

from fedcache.errors import FedcacheError, MachineError, StoppedError
from fedcache.process import Stop, blocked, take_environment, worker_context


@contextmanager
def without_main() -> Iterator[None]:
    """Workers started in this block do not run the caller's script again.

    A spawned process imports the ``__main__`` of its parent, so a script or notebook without a ``__main__`` guard would
    start the same extraction in every worker. The workers do not need it, because all their code is in this package.
    """
    real = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = real


class WorkerProcesses:
    """A process pool whose calls end with an error when a worker dies, and which ``close`` ends at once.

    A thread sends ``initargs`` to the workers. The call that starts them does not, because it would wait forever for a
    dead worker to empty its pipe. The thread that waits for an answer checks that all workers live. Workers never
    import ``__main__``.

    Args:
        count: processes.
        initializer: called in each worker with ``initargs``.
        stop: when it was requested, workers that have ended are no failure.
    """

    def __init__(
        self, count: int, initializer: Callable[..., None], initargs: tuple[Any, ...], stop: Stop
    ) -> None:
        self.stop = stop
        context = worker_context(initializer.__module__)
        # A worker that Ctrl-C reaches before ``start_worker`` ignores it would print a traceback. Forks of the fork
        # server begin with Ctrl-C blocked. A spawned process begins with the blocked signals of its caller, so the
        # caller blocks Ctrl-C while it spawns. A caller that waits for the fork server must not block Ctrl-C.
        self._blocked_at_start: set[signal.Signals] = set()
        if context.get_start_method() == "spawn":
            self._blocked_at_start = {signal.SIGINT}
        self._arguments, sender = context.Pipe(duplex=False)
        self.pool = ProcessPoolExecutor(
            count,
            context,
            initializer=start_worker,
            initargs=(initializer, self._arguments, context.Lock()),
        )
        payload = bytes(ForkingPickler.dumps((dict(os.environ), initargs)))
        threading.Thread(target=_send_each, args=(sender, payload, count), daemon=True).start()

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        """Start a call in a worker; raises what ``ended`` gives when a worker has died."""
        try:
            with without_main(), blocked(self._blocked_at_start):
                return self.pool.submit(call, *args)
        except (BrokenProcessPool, ConnectionError, EOFError) as error:
            raise self.ended(str(error)) from error

    def ask(self, call: Callable[..., Any], *args: Any, times: int = 1) -> Any:
        """Run a call ``times`` times at once and return one answer; errors as ``submit``."""
        answers = [self.submit(call, *args) for _ in range(times)]
        while waiting := [answer for answer in answers if not answer.done()]:
            if not wait(waiting, timeout=1.0, return_when=FIRST_COMPLETED).done:
                self.check()
        # All are read, so that an error of any call is raised.
        return [self.result(answer) for answer in answers][-1]

    def result(self, answer: Future[Any]) -> Any:
        """The value of a call that has ended; errors as ``submit``, or what the call raised."""
        try:
            return answer.result()
        except BrokenProcessPool as error:
            raise self.ended(str(error)) from error

    def check(self) -> None:
        """Raise the error of ``ended`` if a worker has died, because the call of a dead worker may never end."""
        for process in self._processes():
            if process.exitcode is not None:
                raise self.ended(f"exit code {process.exitcode}")

    def ended(self, how: str) -> FedcacheError:
        """The error for workers that were ended from outside, by a requested stop or by something else."""
        if self.stop.requested:
            return StoppedError(
                "Stopped on request, with the workers. Finished chunks are kept.",
                "Run the same command again to resume.",
            )
        return MachineError(
            f"An extraction worker ended unexpectedly ({how}).",
            "A common cause is too little memory. To resume, run the same command again with --workers 1. A smaller "
            "--batch needs less memory, but only together with --fresh, which discards the finished chunks.",
        )

    def close(self) -> None:
        """End the workers without waiting for results that are no longer needed."""
        # shutdown() forgets the processes and the pipe of answers, so they are noted first.
        processes = self._processes()
        answers = self.pool._result_queue
        self._arguments.close()  # ends the thread that sends them
        self.pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()  # workers only compute, so nothing must be cleaned up
        for process in processes:
            process.join(5)
        # If a worker ended in the middle of an answer, a thread of the pool waits for the rest of it, and the
        # interpreter waits for this thread when it ends. Closing our copy of the writing end ends the pipe.
        if answers is not None:
            answers._writer.close()  # type: ignore[attr-defined]

    def _processes(self) -> list[Any]:
        return list((self.pool._processes or {}).values())


def _send_each(sender: Connection, payload: bytes, count: int) -> None:
    """Send the payload once for every worker. Ends without an error if no worker reads it any more."""
    with sender, suppress(OSError):
        for _ in range(count):
            sender.send_bytes(payload)


# Functions that run inside a worker process.


def die_with_parent() -> None:
    """End this process when its parent ends, however that happens: an orphan would keep its memory."""
    parent = parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def watch() -> None:
        connection.wait([sentinel])
        # Not sys.exit, because the main thread may be inside the model. Nothing here needs flushing.
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def start_worker(initializer: Callable[..., None], arguments: Connection, turn: Lock) -> None:
    """The first call in a worker process: leave signals to the parent, receive the arguments, call ``initializer``."""
    # Ctrl-C reaches the whole process group. The parent stops after the chunks under way, which need their workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent()
    # tqdm's own lock is a semaphore of the system, about which Python prints a warning if the worker is killed.
    bars = sys.modules.get("tqdm")
    if bars is not None:
        bars.tqdm.set_lock(threading.RLock())
    # All workers read from one pipe, so they take turns.
    with turn:
        environment, initargs = arguments.recv()
    take_environment(environment)
    initializer(*initargs)
