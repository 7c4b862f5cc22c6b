"""Many figures drawn side by side: a page of hundreds takes as long as its slowest core."""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress

from fedcache.extract.device import cores
from fedcache.progress import Observer
from fedcache.report.drawing import Plot

LEAST = 2
"""Figures for which a process of its own is worth its start."""


def draw_all(plots: Sequence[Plot], observer: Observer) -> None:
    """Draw what a page shows, which each figure keeps. The same bytes as one after another.

    Each core but one gets a copy of this process, which has all data without a copy, and draws its part of them. What
    such a process does not give back, whatever became of it, is drawn when it is asked for.

    Args:
        plots: in any order.
        observer: told the progress, as if all cores were equally quick.
    """
    parts = max(1, min(cores(), len(plots) // LEAST)) if sys.platform == "linux" else 1
    observer.start("drawing", len(plots), "figures")
    try:
        if parts > 1:
            import matplotlib.backends.backend_svg
            import matplotlib.figure  # noqa: F401
        begun = [(plots[i::parts], _begin(plots[i::parts])) for i in range(1, parts)]
        try:
            for at, plot in enumerate(plots[::parts]):
                plot.svg  # noqa: B018  is drawn by this
                observer.advance(min(parts, len(plots) - at * parts))
        finally:
            given = [(part, _read(answer)) for part, answer in begun]
        for part, raw in given:
            for plot, svg in zip(part, json.loads(raw or "[]"), strict=False):
                vars(plot)["svg"] = svg
    finally:
        observer.stop()


def _begin(plots: Sequence[Plot]) -> tuple[int, int] | None:
    """Draw in a process: its number, and the pipe that gives the JSON of all drawings, or nothing after a fault.

    The process writes to that pipe alone and ends at once: it leaves alone the streams, whose locks a thread of this
    process may have held, and all that is done when a process ends. None where there is no room for a process.
    """
    read, write = os.pipe()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, on locks that threads hold
            process = os.fork()
    except OSError:
        os.close(read)
        os.close(write)
        return None
    if process:
        os.close(write)
        return process, read
    try:
        gc.freeze()  # what was made before belongs to the other process, and is not ended here
        with os.fdopen(write, "wb") as pipe:
            pipe.write(json.dumps([plot.svg for plot in plots]).encode())
    finally:
        os._exit(0)


def _read(begun: tuple[int, int] | None) -> bytes:
    """All that a process of ``_begin`` gives, once it has ended."""
    if begun is None:
        return b""
    with os.fdopen(begun[1], "rb") as answer:
        raw = answer.read()
    with suppress(ChildProcessError):  # somebody else waits for the children of this process
        os.waitpid(begun[0], 0)
    return raw
