"""A pool of worker processes that ends with its first worker, whenever and however that one ends, and never hangs.

A signal to the whole process group ends workers before they start, while they start, compute or answer;
``ProcessPoolExecutor`` never stops waiting for some of these.
"""

from __future__ import annotations

import multiprocessing
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
from fedcache.process import Stop


@contextmanager
def without_main() -> Iterator[None]:
    """Workers started in this block do not run the caller's script again.

    A spawned process imports the ``__main__`` of its parent, so a script or notebook without a ``__main__`` guard would
    start the same extraction in every worker. The workers need nothing from it: all they run lives in this package.
    """
    real = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = real


class WorkerProcesses:
    """A process pool whose calls end with an error when a worker dies, and which ends at once when asked to.

    What workers need at their start is sent by a thread, not by the call that starts them, which would write it into a
    pipe that a dead worker never empties. The thread that waits for an answer checks that all workers live. Workers
    never import ``__main__``.

    Args:
        count: processes.
        initializer: called in each worker with ``initargs``.
        stop: when it was requested, workers that have ended are no failure.
    """

    def __init__(
        self, count: int, initializer: Callable[..., None], initargs: tuple[Any, ...], stop: Stop
    ) -> None:
        self.count = count
        self.stop = stop
        # spawn: a fork would copy torch's threads and locks in whatever state they are.
        context = multiprocessing.get_context("spawn")
        self._arguments, sender = context.Pipe(duplex=False)
        self.pool = ProcessPoolExecutor(
            count,
            context,
            initializer=start_worker,
            initargs=(initializer, self._arguments, context.Lock()),
        )
        payload = bytes(ForkingPickler.dumps(initargs))
        threading.Thread(target=_send_each, args=(sender, payload, count), daemon=True).start()

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        """Start a call in a worker; raises what ``ended`` gives when a worker has died."""
        try:
            # Blocked while they start: a worker that Ctrl-C reaches before it can ignore it would print a traceback.
            with without_main(), _blocked(signal.SIGINT):
                return self.pool.submit(call, *args)
        except BrokenProcessPool as error:
            raise self.ended(str(error)) from error

    def ask(self, call: Callable[..., Any], *args: Any, times: int = 1) -> Any:
        """Run a call ``times`` times at once and return one answer; errors as ``submit``."""
        answers = [self.submit(call, *args) for _ in range(times)]
        while waiting := [answer for answer in answers if not answer.done()]:
            if not wait(waiting, timeout=1.0, return_when=FIRST_COMPLETED).done:
                self.check()
        return [self.result(answer) for answer in answers][-1]

    def result(self, answer: Future[Any]) -> Any:
        """The value of a call that has ended; errors as ``submit``, or what the call raised."""
        try:
            return answer.result()
        except BrokenProcessPool as error:
            raise self.ended(str(error)) from error

    def check(self) -> None:
        """Raise what ``ended`` gives if a worker has died: one killed while it answers leaves its call waiting."""
        for process in list((self.pool._processes or {}).values()):
            if process.exitcode is not None:
                raise self.ended(f"exit code {process.exitcode}")

    def ended(self, how: str) -> FedcacheError:
        """The error of workers that were ended from outside: by the signal that asked to stop, or by something else."""
        if self.stop.requested:
            return StoppedError(
                "Stopped on request, with the workers. Finished chunks are kept.",
                "Run the same command again to resume.",
            )
        return MachineError(
            f"An extraction worker ended ({how}).",
            "If memory ran out, run the same command again to resume, with a smaller --batch or with "
            "--workers 1.",
        )

    def close(self) -> None:
        """End the workers without waiting for results that are not needed any more."""
        # shutdown() forgets the processes and the pipe of answers, so they are noted first.
        processes = list((self.pool._processes or {}).values())
        answers = self.pool._result_queue
        self._arguments.close()  # ends the thread that sends them
        self.pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()  # they compute, and hold nothing that must be put in order
        for process in processes:
            process.join(5)
        # A worker that ended in the middle of an answer leaves the pool's thread, for which the interpreter waits when
        # it ends, waiting for the rest. The workers are gone: without our own copy of their end, the pipe ends too.
        if answers is not None:
            answers._writer.close()  # type: ignore[attr-defined]


def _send_each(sender: Connection, payload: bytes, count: int) -> None:
    """Send the payload once for every worker; ends silently when no worker reads it any more."""
    with sender, suppress(OSError):
        for _ in range(count):
            sender.send_bytes(payload)


@contextmanager
def _blocked(number: signal.Signals) -> Iterator[None]:
    """A signal waits while the block runs; processes started meanwhile begin with it blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# Functions that run inside a worker process.


def die_with_parent() -> None:
    """End this process when its parent ends, however that happens: an orphan would keep its memory."""
    parent = parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def watch() -> None:
        connection.wait([sentinel])
        # not sys.exit: the main thread may be inside the model, and nothing here is worth flushing
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def start_worker(initializer: Callable[..., None], arguments: Connection, turn: Lock) -> None:
    """The first call in a worker process: signals are the parent's business, and what it needs is received."""
    # Ctrl-C reaches the whole process group: the parent stops after the chunks under way, which need their workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent()
    with turn:
        received = arguments.recv()
    initializer(*received)
