"""The process of a long call: how signals stop it, and what the C library does with freed memory.

glibc returns large blocks to the kernel when they are freed, and faults the next ones in page by page, zeroed: 98
images/s instead of 166 for efficientnet-lite0 at 128 px on one core, and a third of the time of a grid of 240 points
with 100 classes.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, cast

GRACE = 2.0
"""Seconds that a process has to put things in order after a request to stop at once."""

INTERRUPTED = 130
"""Exit code of a process that a signal ended, as shells give it; ``errors.Exit`` has the same."""

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
"""``mallopt``'s names for: freed memory that is kept; the size from which a block is mapped by itself."""

MOST = (1 << 31) - 1

_open_until_the_end: list[socket.socket] = []
"""Sockets that the system writes signals to: once collected, their numbers would be those of other files."""


class Stop:
    """A request to stop, set by a signal handler, honoured at the next chunk or where no finished round is lost."""

    def __init__(self) -> None:
        self.requested = False

    def ask(self) -> None:
        """Ask to stop at the next good moment."""
        self.requested = True


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, as SIGINT does, so that a command ends alike by both where it handles neither.

    Outside the main thread, where signals are not handled, nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        # else the command was asked to stop and is about to end
        if signal.getsignal(signal.SIGTERM) is interrupt:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def stop_on_signals(request: Callable[[], None], say: Callable[[str], None]) -> Iterator[None]:
    """Stop at SIGINT and SIGTERM: the first at the next chunk, step or round, the second at once.

    After the second a KeyboardInterrupt runs through the call, so that files are closed and locks released; whatever
    the call is doing then (a computation that Python cannot interrupt, a write without a reader, the wait for a
    process that will not end), ``GRACE`` seconds later its worker processes are killed and the process is ended.
    Once a signal came the handlers outlive the block, because then the process is about to end, which may hang too.

    Args:
        request: called at the first signal.
        say: receives what the next one does.
    """
    requests = 0
    left = False

    def handle(number: int, frame: Any) -> None:
        nonlocal requests
        requests += 1
        if requests == 1:
            request()
            # the signal came in the middle of a print, or nobody reads
            with suppress(RuntimeError, OSError):
                say("Stopping after the current step; press Ctrl-C again to stop at once.")
        elif left:
            end_at_once()
        elif requests == 2:
            _end_in_any_case()
            raise KeyboardInterrupt

    # Python calls a handler between two steps of the main thread, the bytes of a wake-up descriptor come at any time.
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    threading.Thread(target=_end_after_two, args=(receiver,), daemon=True).start()
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    wake_before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        left = True
        if requests:
            _open_until_the_end.append(sender)
        else:
            signal.set_wakeup_fd(wake_before)
            for number, handler in before.items():
                signal.signal(number, handler)
            sender.close()


def _end_after_two(receiver: socket.socket) -> None:
    """End this process ``GRACE`` seconds after the second signal; return when no more signals can come."""
    requests = 0
    with receiver:
        while requests < 2:
            numbers = receiver.recv(1)
            if not numbers:
                return
            requests += numbers[0] in (signal.SIGINT, signal.SIGTERM)
    _end_in_any_case()
    time.sleep(GRACE)
    end_at_once()  # still here, perhaps in the exit of the interpreter, which waits for threads


def _end_in_any_case() -> None:
    """Let the system end this process, by SIGALRM, a second after ``_end_after_two`` should have.

    An interpreter that takes itself apart runs no other thread any more. On a busy machine an extraction was still
    there five seconds after the second signal, with its lock long released.
    """
    signal.setitimer(signal.ITIMER_REAL, GRACE + 1.0)


def end_at_once() -> None:
    """Kill the worker processes of this process and end it, with nothing put in order: as safe as a power cut."""
    import multiprocessing  # light commands come here too, and start no process

    for child in multiprocessing.active_children():
        child.kill()
    os._exit(INTERRUPTED)


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Look for unreachable cycles after 100,000 new objects instead of 700: a report makes millions of them."""
    before = gc.get_threshold()
    # A first threshold of 0 means that nothing is collected, and stays.
    if before[0]:
        gc.set_threshold(max(before[0], 100_000), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def replace_closed_streams() -> None:
    """Read from and write to nothing where the caller has closed a standard stream (``>&-``, some daemons).

    No file that is opened later can then get the number of a stream, and be written into by what prints.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, PTH123  until the process ends


def keep_freed_memory() -> bool:
    """Let this process keep what it frees until it ends; values do not change.

    A library must not decide this for its user: workers and commands call it, ``fedcache.train`` does not.

    Returns:
        whether the allocator took the setting: only glibc can. Elsewhere it is slower, not wrong.
    """
    mallopt = _of_glibc("mallopt")
    return (
        mallopt is not None
        and bool(mallopt(M_MMAP_THRESHOLD, MOST))
        and bool(mallopt(M_TRIM_THRESHOLD, MOST))
    )


def return_freed_memory() -> None:
    """Return freed memory of this process to the kernel; a few milliseconds. Does nothing without glibc."""
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    """A function of the C library; None where it has no such function."""
    import ctypes  # every command imports this module, and few call this

    try:
        return cast(Callable[..., int], getattr(ctypes.CDLL(None), name))
    except (AttributeError, OSError, TypeError):
        return None


@contextmanager
def usual_torch_state() -> Iterator[None]:
    """Compute as in a fresh process, and give the caller's state back afterwards. Also works as a decorator.

    A notebook may have called ``torch.set_grad_enabled(False)`` or ``torch.set_default_device("cuda")``, or may train
    within ``torch.inference_mode()``. Methods that take gradients would fail there, and tensors would be made on
    another device than the one that fedcache computes on. Another default dtype draws other random numbers, and another
    precision of matrix products rounds otherwise.
    """
    torch = sys.modules.get("torch")
    if torch is None:  # then nobody has changed its state
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # this turns gradients on as well
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("highest")
        # The context of a device slows every call of torch down, so it is entered only where it changes something.
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield
