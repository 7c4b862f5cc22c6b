"""The live view: how far a stretch of work is, as a bar on a terminal and in words everywhere.

Where nothing is said or measured for two seconds, a line on the terminal says that the command is at work.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fedcache.progress import Round, byte_size
from fedcache.visible_text import visible

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress

WINDOW = 30.0
"""Seconds from which rate and time left are taken."""

SILENCE = 1.5
"""Seconds without a word after which a terminal says that the command is at work; nothing is silent for two."""


class Stretch:
    """A measured stretch of work: what is done of it, and what its rounds said.

    Args:
        what: the work, ``training fedavg``.
        total: of the units.
        unit: ``images``, ``rounds``.
    """

    def __init__(self, what: str, total: int, unit: str) -> None:
        self.what = what
        self.total = total
        self.unit = unit
        self.done = 0
        self.begun = time.monotonic()
        self._window: deque[tuple[float, int]] = deque([(self.begun, 0)], maxlen=200)
        self._last: Round | None = None
        self._measured: Round | None = None
        self._up = self._down = 0

    def take(self, round_: Round) -> None:
        """A round has ended."""
        self._last = round_
        self._up += round_.up_bytes
        self._down += round_.down_bytes
        if round_.accuracy is not None:
            self._measured = round_

    def advance(self, units: int, now: float) -> None:
        """So many more units are done."""
        self.done += units
        if self._last is not None and self._last.stored:
            self._window.clear()  # read and not computed: they would make the rest look fast
        self._window.append((now, self.done))
        while len(self._window) > 2 and now - self._window[0][0] > WINDOW:
            self._window.popleft()

    def words(self, now: float) -> str:
        """Progress in words: rounds, last accuracy, bytes sent, pace and remaining time; unknown parts are left out."""
        last = self._last
        if last is None:
            units = f"{self.total:,} {self.unit}"
            return ", ".join([f"{self.done:,}/{units}", *self._pace(now)])
        parts = [f"round {last.round} of {last.rounds}"]
        if last.seeds > 1:
            parts.append(f"seed {last.seed_number} of {last.seeds}")
        if last.points > 1:
            parts.append(f"{last.points_done} of {last.points} points done")
        if (m := self._measured) is not None:
            # The last accuracy may be older than the last round: it is measured every few rounds.
            earlier = ""
            if (m.seed, m.round) != (last.seed, last.round):
                earlier = f" in round {m.round}"
            if m.seed != last.seed:
                earlier += f" of seed {m.seed_number}"
            where = ""
            if m.point:
                where = f" with {m.point}"
            accuracy = 100 * (m.accuracy or 0)
            parts.append(f"accuracy {accuracy:.2f} %{where}{earlier}")
        up = byte_size(self._up)
        down = byte_size(self._down)
        parts.append(f"{up} up, {down} down")
        return ", ".join([*parts, *self._pace(now)])

    def _pace(self, now: float) -> list[str]:
        last = self._last
        if last is not None and not last.points_done and self.done < last.points:
            return []  # points that are trained together end a round at once: the first of them took no such time alone
        then, before = self._window[0]
        rate = (self.done - before) / max(now - then, 1e-9)
        if not rate:
            return []
        # the clock's last bits add no second
        left = math.ceil((self.total - self.done) / rate - 1e-6)
        if rate >= 0.1:
            fast = f"{rate:,.1f} {self.unit}/s"
        else:
            fast = f"{1 / rate:,.0f} s each"
        return [fast, f"{left // 60}:{left % 60:02d} left"]


def animated() -> bool:
    """Whether stderr is a terminal that can be drawn on; ``TERM=dumb`` cannot, and gets lines like a file."""
    return sys.stderr.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


class SignOfLife:
    """A last line on a terminal, "at work for 4 s", while a command says nothing; what is said takes its place.

    A thread writes it, so that it also comes while a library is imported or a model is read. Nothing is written to
    what is no terminal.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._since = time.monotonic()
        self._shown = ""
        self._held = False
        if animated():
            threading.Thread(target=self._watch, name="sign of life", daemon=True).start()

    def spoken(self, *, held: bool = False) -> None:
        """Something is about to be said, or with ``held`` a bar is drawn until this is called again."""
        with self._lock:
            self._clear()
            self._since = time.monotonic()
            self._held = held

    def end(self) -> None:
        """Nothing is written from here on."""
        self._ended.set()
        self.spoken(held=True)

    def _watch(self) -> None:
        while not self._ended.wait(0.25):
            with self._lock:
                silent = time.monotonic() - self._since
                words = f"at work for {silent:.0f} s"
                if not self._held and silent >= SILENCE and words != self._shown:
                    self._shown = words
                    sys.stderr.write(f"\r\x1b[K{words}")
                    sys.stderr.flush()

    def _clear(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = ""


def bar(stretch: Stretch) -> Progress:
    """A bar with the words below it, which break between words where the terminal is narrow.

    Words are made when the terminal is drawn, ten times a second, and not when a round ends.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
    from rich.text import Text

    # The words are a line of their own, as a column of the bar would be cut on a narrow terminal.
    class WithWords(Progress):
        def get_renderables(self) -> Iterable[RenderableType]:
            for task in self.tasks:
                task.completed = stretch.done
            yield self.make_tasks_table(self.tasks)
            yield Text(visible(stretch.words(time.monotonic())))

    made = WithWords(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    made.add_task(stretch.what, total=stretch.total)
    return made
