"""How worker processes start: on Linux as forks of one process that has imported what they need.

A process that starts on its own imports torch first, two processor seconds each. A fork of the caller itself would copy
torch's threads and locks in an undefined state. So one process imports, does nothing else, and is forked for every
worker.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import BaseContext

SAFE_PATH = "PYTHONSAFEPATH"
LIBRARIES = ("torch", "torchvision", "timm", "open_clip", "transformers", "PIL.Image")
"""Libraries that take long to import. Workers import those that their caller has imported."""


def worker_context(*modules: str) -> BaseContext:
    """The context in which workers start, with ``modules`` and LIBRARIES imported where forks are safe.

    The process that is forked begins to import now, while the caller prepares the work, and serves all later workers.
    They begin with the environment that it had, so a caller hands over its own, as ``take_environment`` expects.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    imported = [name for name in LIBRARIES if name in sys.modules]
    context.set_forkserver_preload([*imported, *modules])
    # Blocked, because Ctrl-C reaches the server too, and would end it with a traceback while it imports.
    with blocked(signal.SIGINT), _safe_path():
        forkserver.ensure_running()
    return context


def take_environment(environment: dict[str, str]) -> None:
    """Give this process the environment of its caller."""
    os.environ.clear()
    os.environ.update(environment)


@contextmanager
def blocked(number: signal.Signals) -> Iterator[None]:
    """Block a signal while the block runs; processes that start meanwhile begin with it blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _safe_path() -> Iterator[None]:
    """Python processes that start in this block import nothing from the working directory."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before
