"""Many figures drawn side by side: a page of hundreds takes as long as its slowest core."""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from fedcache.extract.device import cores
from fedcache.progress import SIGN_OF_LIFE, Observer
from fedcache.report.drawing import Plot

LEAST = 2
"""Figures for which a process of its own is worth its start."""
PATIENCE = 5.0
"""Seconds that a process gets beyond four times what this one needed for its own part."""


@dataclass(frozen=True)
class Drawing:
    """A process that draws a part of the figures; its pipe gives the JSON of all drawings, or nothing after a fault."""

    process: int
    pipe: int
    part: Sequence[Plot]


def draw_all(plots: Sequence[Plot], observer: Observer) -> None:
    """Draw what a page shows, which each figure keeps. The same bytes as one after another.

    Each core but one gets a copy of this process, which has all data without a copy, and draws its part of them. What
    such a process does not give back in time, whatever became of it, is drawn when it is asked for.

    Args:
        plots: in any order.
        observer: told the progress, as if all cores were equally quick.
    """
    parts = max(1, min(cores(), len(plots) // LEAST)) if _may_fork() else 1
    if parts > 1:
        import matplotlib.backends.backend_svg
        import matplotlib.figure  # noqa: F401
    begun: list[Drawing] = []
    for i in range(1, parts):
        begun += _begin(plots[i::parts], begun)
    began = time.monotonic()
    observer.start("drawing", len(plots), "figures")
    try:
        for at, plot in enumerate(plots[::parts]):
            plot.svg  # noqa: B018  is drawn by this
            observer.advance(min(parts, len(plots) - at * parts))
    finally:
        until = time.monotonic() + PATIENCE + 4 * (time.monotonic() - began)
        given = [(one.part, _read(one, until)) for one in begun]
        observer.stop()
    for part, raw in given:
        for plot, svg in zip(part, json.loads(raw or "[]"), strict=False):
            vars(plot)["svg"] = svg


def _may_fork() -> bool:
    """Whether nothing else runs in this process that could hold a lock which its copy would wait for.

    Only the thread that tells a terminal that a command is at work may run: it uses nothing that drawing uses.
    """
    others = (
        t
        for t in threading.enumerate()
        if t is not threading.current_thread() and t.name != SIGN_OF_LIFE
    )
    return sys.platform == "linux" and not any(others)


def _begin(part: Sequence[Plot], others: Sequence[Drawing]) -> list[Drawing]:
    """Draw in a process, which writes to its pipe alone and ends at once; [] where there is no room for one.

    It leaves alone the streams, whose locks a thread of this process may have held, and all that is done when a process
    ends. When this process is no more it draws no further figure, and nobody can read its pipe.
    """
    read, write = os.pipe()
    asked = os.getpid()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # of Python 3.12, on locks that threads hold
            process = os.fork()
    except OSError:
        os.close(read)
        os.close(write)
        return []
    if process:
        os.close(write)
        return [Drawing(process, read, part)]
    try:
        for pipe in (read, *(one.pipe for one in others)):
            os.close(pipe)
        gc.freeze()  # what was made before belongs to the other process, and is not ended here
        warnings.simplefilter("error")  # whoever is warned draws again, and says it
        with os.fdopen(write, "wb") as answer:
            answer.write(json.dumps([plot.svg for plot in part if os.getppid() == asked]).encode())
    finally:
        os._exit(0)


def _read(drawing: Drawing, until: float) -> bytes:
    """All that a process gives; nothing where it has not ended by a moment of ``time.monotonic``, and it is ended."""
    raw, waiting = b"", select.poll()
    waiting.register(drawing.pipe, select.POLLIN | select.POLLHUP)
    while waiting.poll(max(0.0, 1000 * (until - time.monotonic()))):
        block = os.read(drawing.pipe, 1 << 20)
        if not block:
            break
        raw += block
    else:
        raw = b""
        with suppress(ProcessLookupError):
            os.kill(drawing.process, signal.SIGKILL)
    os.close(drawing.pipe)
    with suppress(ChildProcessError):  # somebody else waits for the children of this process
        os.waitpid(drawing.process, 0)
    return raw
