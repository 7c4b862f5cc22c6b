"""The process of a long call: how signals stop it, how its workers start, and how the C library handles freed memory.

glibc returns large blocks of memory to the kernel when they are freed. The kernel then provides the next blocks page by
page, filled with zeros. This makes efficientnet-lite0 at 128 px on one core slower, 98 images/s instead of 166, and
takes a third of the time of a grid of 240 points with 100 classes.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

GRACE = 2.0
"""Seconds that a process has to clean up when it is stopped at once."""

INTERRUPTED = 130
"""Exit code of a process that a signal ended, as in shells; ``errors.Exit`` has the same code."""

M_TRIM_THRESHOLD = -1
"""Parameter of ``mallopt`` for the amount of freed memory at the top of the heap that is kept."""

M_MMAP_THRESHOLD = -3
"""Parameter of ``mallopt`` for the size from which a block is mapped separately."""

MOST = (1 << 31) - 1
"""Largest value of a parameter of ``mallopt``."""

_starting = threading.Lock()
"""Held while a fork server starts with an environment of its own."""

LIBRARIES = ("torch", "torchvision", "timm", "open_clip", "transformers", "PIL.Image")
"""Modules with long import times. The fork server imports those of them that its caller has imported."""

_open_until_the_end: list[socket.socket] = []
"""Sockets to which the system writes signals. If they were closed, other files could get their numbers."""


class Stop:
    """A request to stop, set by a signal handler. Work ends after the current chunk or round, so that none is lost."""

    def __init__(self) -> None:
        self.requested = False

    def ask(self) -> None:
        """Request a stop."""
        self.requested = True


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, as SIGINT does, so both end a command without own handlers in the same way.

    Outside the main thread, where Python does not handle signals, nothing is changed.
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
        # Another handler is that of a command that was stopped and is about to end; it stays.
        if signal.getsignal(signal.SIGTERM) is interrupt:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def stop_on_signals(request: Callable[[], None], note: Callable[[str], None]) -> Iterator[None]:
    """Stop at SIGINT and SIGTERM: the first signal stops at the next chunk, step or round, the second one at once.

    The second signal raises a KeyboardInterrupt in the call, so that files are closed and locks released. The call may
    not react to the exception, for example in a computation that Python cannot interrupt, in a write without a reader,
    or while it waits for a process. So after ``GRACE`` seconds, worker processes are killed and this process is ended.
    After a signal, the handlers stay in place beyond the block, because the end of the process may hang too.

    Args:
        request: called at the first signal.
        note: receives a sentence on the effect of the next signal.
    """
    requests = 0
    has_ended = False

    def handle(number: int, frame: Any) -> None:
        nonlocal requests
        requests += 1
        if requests == 1:
            request()
            # Printing fails if the signal interrupted another print, or if the reader has closed the stream.
            with suppress(RuntimeError, OSError):
                note("Stopping after the current step; press Ctrl-C again to stop at once.")
        elif has_ended:
            end_at_once()
        elif requests == 2:
            _end_in_any_case()
            raise KeyboardInterrupt

    # Python calls a handler only between two steps of the main thread, but writes to a wake-up descriptor at any time.
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    threading.Thread(target=_end_after_two, args=(receiver,), daemon=True).start()
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    wake_before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        has_ended = True
        if requests:
            _open_until_the_end.append(sender)
        else:
            signal.set_wakeup_fd(wake_before)
            for number, handler in before.items():
                signal.signal(number, handler)
            sender.close()


@contextmanager
def stopped_by_signals(note: Callable[[str], None]) -> Iterator[Stop]:
    """A request to stop, set by the first SIGINT or SIGTERM; see ``stop_on_signals`` for ``note`` and the second."""
    stop = Stop()
    with stop_on_signals(stop.ask, note):
        yield stop


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
    end_at_once()  # the process still runs, perhaps in the exit of the interpreter, which waits for threads


def _end_in_any_case() -> None:
    """Let the system end this process by SIGALRM, two seconds after ``_end_after_two`` should have ended it.

    An interpreter that is shutting down runs no other threads. On a busy machine, an extraction still existed five
    seconds after the second signal, although its lock was released long before.
    """
    signal.setitimer(signal.ITIMER_REAL, GRACE + 2.0)


def end_at_once() -> None:
    """Kill the worker processes of this process and end it without any cleanup: as safe as a power cut."""
    import multiprocessing  # imported here, because most commands start no process

    for child in multiprocessing.active_children():
        child.kill()
    _kill_fork_server()
    os._exit(INTERRUPTED)


def _kill_fork_server() -> None:
    """Kill the fork server of this process, if there is one."""
    from multiprocessing import forkserver

    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if server is not None:
        with suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)


def worker_context(*modules: str) -> BaseContext:
    """The context in which worker processes start: on Linux as forks of a process that has imported what they need.

    A process that starts on its own imports torch first, two processor seconds each. A fork of the caller itself would
    copy torch's threads and locks in an undefined state. So one process, the fork server, imports ``modules`` and those
    of LIBRARIES that the caller has imported, and does nothing else. It begins now, while the caller prepares the work,
    and serves all later workers. They start with Ctrl-C blocked and with the environment of the server: see
    ``take_environment``.
    """
    import multiprocessing
    from multiprocessing import forkserver, resource_tracker

    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    imported = [name for name in LIBRARIES if name in sys.modules]
    context.set_forkserver_preload([*imported, *modules])
    # The server imports from where this process does; an empty entry of ``sys.path`` means the working directory.
    # Python itself would add the working directory.
    path = [folder or os.curdir for folder in sys.path]
    server_environment = {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}
    with _starting, environment_with(server_environment):
        # The resource tracker first, because Python unblocks Ctrl-C when it starts the tracker.
        resource_tracker.ensure_running()
        # Blocked, because Ctrl-C reaches the server too, and would end it with a traceback while it imports.
        with blocked({signal.SIGINT}):
            forkserver.ensure_running()
    _end_fork_server_at_exit()
    return context


@cache
def _end_fork_server_at_exit() -> None:
    """Let this process kill its fork server when it ends. It is registered once, however often workers start.

    A server that still imports does not notice that this process ends, and importing torch may take ten seconds. The
    negative priority means: after all workers have ended.
    """
    from multiprocessing.util import Finalize

    Finalize(None, _kill_fork_server, exitpriority=-100)


@contextmanager
def environment_with(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables while the block runs; None removes a variable."""
    before = {name: os.environ.get(name) for name in variables}
    _set_environment(variables)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def take_environment(environment: Mapping[str, str]) -> None:
    """Give a worker the environment of its caller."""
    os.environ.clear()
    os.environ.update(environment)


@contextmanager
def blocked(numbers: Set[signal.Signals]) -> Iterator[None]:
    """Block signals while the block runs; processes that start meanwhile begin with them blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Run the garbage collector after 100,000 new objects instead of 700, because a report makes millions of them."""
    before = gc.get_threshold()
    # With a first threshold of 0 the collector is off, and stays off.
    if before[0]:
        gc.set_threshold(max(before[0], 100_000), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def replace_closed_streams() -> None:
    """Replace standard streams that the caller has closed (``>&-``, some daemons) by the null device.

    Otherwise a file that is opened later could get the number of a stream, and printed text would be written into it.
    """
    number = os.open(os.devnull, os.O_RDWR)
    while number <= 2:  # these numbers are those of closed streams
        number = os.open(os.devnull, os.O_RDWR)
    os.close(number)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, PTH123  until the process ends


def keep_freed_memory() -> bool:
    """Let this process keep freed memory until it ends, which makes it faster and changes no result.

    Workers and commands call this function. The Python API does not, because a library must not change the memory
    management of its user's process.

    Returns:
        Whether the allocator accepted the setting, which only glibc does.
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MOST) and mallopt(M_TRIM_THRESHOLD, MOST))


def return_freed_memory() -> None:
    """Return freed memory of this process to the kernel, in a few milliseconds. Does nothing without glibc."""
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    """A function of the C library; None if the library does not have it."""
    import ctypes  # imported here, because every command imports this module and few need ctypes

    try:
        return cast(Callable[..., int], getattr(ctypes.CDLL(None), name))
    except (AttributeError, OSError, TypeError):
        return None


@contextmanager
def usual_torch_state() -> Iterator[None]:
    """Compute as in a new process, and restore the caller's torch state afterwards. Also works as a decorator.

    A notebook may have called ``torch.set_grad_enabled(False)`` or ``torch.set_default_device("cuda")``, or may train
    within ``torch.inference_mode()``. Methods that take gradients would then fail, and tensors would be on another
    device than fedcache computes on. Another default dtype draws other random numbers, and another precision of matrix
    products rounds differently.
    """
    torch = sys.modules.get("torch")
    if torch is None:  # without torch, its state cannot have been changed
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
        # The context of a device slows down every call of torch, so it is entered only if it changes the device.
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield
