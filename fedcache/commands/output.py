"""Output of commands: answers on stdout, notes and progress on stderr.

The module prints the JSON of ``--json``, and tables. It is the only place that turns errors into exit codes.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import typer

from fedcache.errors import (
    Exit,
    FedcacheError,
    InternalError,
    MachineError,
    StoppedError,
    memory_error,
)
from fedcache.parsing import Facts, escape_json, finite, visible
from fedcache.progress import Detail, Round, byte_size
from fedcache.store.files import FULL, full_disk

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult
    from rich.progress import Progress
    from rich.table import Table


SCHEMA = 1
LINE_EVERY = 10.0
"""Seconds between progress lines when stderr is not a terminal."""
BETWEEN = 3
"""Characters between two columns of a table."""
PIPED = 160
"""Minimum width, in characters, of a table that is not printed to a terminal."""


class TerminalObserver:
    """Observer that writes notes, warnings and progress to stderr. Progress is a live bar or a line every 10 s."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        # A command that has the option -v sets this to its value.
        self.verbose = True
        self.warnings: list[str] = []
        self._bar: Progress | None = None
        self._work: WorkProgress | None = None
        self._life = SignOfLife()

    def note(self, text: str) -> None:
        """Write one line; a ``Detail`` only if ``verbose``."""
        if self.verbose or not isinstance(text, Detail):
            self._write(text)

    def warn(self, text: str) -> None:
        """Write a warning to stderr, and keep it for the JSON output."""
        self.warnings.append(text)
        self._write(f"warning: {text}")

    def _write(self, text: str) -> None:
        text = visible(text, lines=True)
        self._clear_sign_of_life()
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def _clear_sign_of_life(self) -> None:
        self._life.clear(held=self._bar is not None)

    def start(self, what: str, total: int, unit: str) -> None:
        """Begin to report the progress of a piece of work; on a terminal, show a bar."""
        self._work = WorkProgress(visible(what), total, unit)
        self._last_line = self._work.begun
        if animated():
            self._bar = bar(self._work)
            self._clear_sign_of_life()
            self._bar.start()

    def round_done(self, round_: Round) -> None:
        """Keep the figures of a round for the next line of progress; ignored before ``start`` and after ``stop``."""
        if self._work is not None:
            self._work.add_round(round_)

    def advance(self, units: int) -> None:
        """Count finished units of work."""
        if self._work is None:
            return
        now = time.monotonic()
        self._work.advance(units, now)
        # Without a terminal there is no bar, so a line now and then shows that the work continues.
        silent = now - self._last_line >= LINE_EVERY
        if silent and self._bar is None:
            self._last_line = now
            words = visible(self._work.words(now))
            print(f"{self._work.what}: {words}", file=sys.stderr, flush=True)

    def stop(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._work = None
        self._clear_sign_of_life()

    def close(self) -> None:
        """Remove the progress bar and the line "working for 4 s" at the end of a command."""
        self.stop()
        self._life.end()


@dataclass(frozen=True)
class TextTable:
    """A table of text without markup, as wide as the terminal allows; no cell is cut and no word is broken.

    If the words do not fit into columns, each row is a block of lines.

    Args:
        title: line above the table, or "".
        columns: names of the columns.
        rows: cells of each row; None is empty.
        right: names of the columns that are aligned to the right.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    right: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        widths = self.widths(options.max_width)
        if widths is not None:
            yield self.table(widths)
            return
        for row in self.rows:
            for name, cell in zip(self.columns, row, strict=True):
                text = _cell(cell)
                if text:
                    yield Text(f"{_cell(name)}: {text}", overflow="fold")
            yield Text("")

    def needs(self) -> tuple[list[int], list[int]]:
        """For every column, the width of its longest word and of its longest line."""
        from rich.cells import cell_len

        longest_words = []
        longest_lines = []
        for cells in zip(self.columns, *self.rows, strict=True):
            texts = [_cell(cell) for cell in cells]
            words = " ".join(texts).split()
            lines = "\n".join(texts).split("\n")
            # cell_len counts columns of a terminal: a Chinese letter takes two.
            longest_words.append(max(map(cell_len, words), default=0))
            longest_lines.append(max(map(cell_len, lines)))
        return longest_words, longest_lines

    def widths(self, most: int) -> list[int] | None:
        """The width of every column in a table of at most ``most`` characters; None if the words do not fit.

        A column is as wide as its longest line. If the table is too wide, the widest columns are narrowed to an equal
        width, but none below its longest word.
        """
        longest_words, longest_lines = self.needs()
        # Of n columns, n - 1 have a gap after them. Each edge of the table takes one more character.
        room = most + 1 - BETWEEN * len(longest_words)
        widest = max(longest_lines)
        if sum(longest_words) > room:
            return None
        made = longest_lines
        # Lower the limit of all columns by one character at a time.
        while sum(made) > room:
            made = [
                max(w, min(n, widest)) for w, n in zip(longest_words, longest_lines, strict=True)
            ]
            widest -= 1
        return made

    def table(self, widths: Sequence[int]) -> Table:
        """The table with columns of these widths."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        title = None
        if self.title:
            title = Text(visible(self.title), style="table.title")
        made = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
        for column, width in zip(self.columns, widths, strict=True):
            side: JustifyMethod = "left"
            if column in self.right:
                side = "right"
            # A Text is not read as markup, so square brackets in a name stay as they are.
            made.add_column(Text(_cell(column)), justify=side, overflow="fold", width=width)
        for row in self.rows:
            made.add_row(*(Text(_cell(cell)) for cell in row))
        return made

    def tsv(self) -> str:
        """The table as tab-separated values: a line of column names, then a line for each row."""
        lines = []
        for row in (self.columns, *self.rows):
            cells = [" ".join(_cell(cell).split()) for cell in row]
            lines.append("\t".join(cells))
        return "\n".join(lines)


def _cell(cell: Any) -> str:
    """A cell as text."""
    if cell is None:
        return ""
    return visible(str(cell))


def yes_or_no(value: bool) -> str:
    """A truth value as text for a cell: yes or no."""
    if value:
        return "yes"
    return "no"


def plain_line(text: str) -> Any:
    """A line of text between tables, which rich does not read as markup."""
    from rich.text import Text

    return Text(visible(text, lines=True))


@dataclass
class CommandResult:
    """The answer of a command.

    Attributes:
        data: the ``data`` of the JSON output, plain JSON values.
        lines: text for a person, on stdout.
        code: OK, QUARANTINED, or CORRUPT for a check that found damaged files.
        renderables: tables, after the lines.
        last: lines after the tables, such as the next command.
        listing: whether the answer is a list; its tables go into a pipe as tab-separated values, its lines to stderr.
    """

    data: Facts
    lines: Sequence[str] = ()
    code: Exit = Exit.OK
    renderables: Sequence[Any] = field(default_factory=list)
    last: Sequence[str] = ()
    listing: bool = False


def run_command(
    command: str, as_json: bool, call: Callable[[TerminalObserver], CommandResult]
) -> None:
    """Run the function of a command, then end the process with its exit code.

    If the reader of stdout closes it early (``| head -1``), the exit code is the same; only less is printed.

    Raises typer.Exit always.
    """
    observer = TerminalObserver(as_json=as_json)
    try:
        try:
            result = call(observer)
        finally:
            observer.close()
    except BrokenPipeError:
        # The reader of the output, such as `head`, has closed it: that is no error.
        raise typer.Exit(int(Exit.OK)) from None
    except (Exception, KeyboardInterrupt) as error:
        message = described(error)
        fail(command, as_json, message, observer.warnings)
        raise typer.Exit(int(message.code)) from None
    # Output that cannot be written is an error too, such as a full disk behind a redirection.
    try:
        show(command, as_json, result, observer.warnings)
    except OSError as error:
        # OK is 0, so after a closed pipe the exit code is that of the result.
        raise typer.Exit(int(unwritable(error) or result.code)) from None
    raise typer.Exit(int(result.code))


def described(error: BaseException) -> FedcacheError:
    """Any error as a FedcacheError; the traceback of an unexpected one is printed."""
    if isinstance(error, FedcacheError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return StoppedError(
            "Stopped at once.",
            "Run the same command again to resume; finished work is kept.",
        )
    # A full disk has a message of its own, because freeing space helps only there.
    if isinstance(error, OSError) and error.errno in FULL:
        return full_disk(error)
    if isinstance(error, OSError):
        place = ""
        if error.filename:
            place = f"{error.filename}: "
        return MachineError(
            f"The operating system refused access to a file. {place}{error.strerror or error}.",
            "Check that the folder exists and is writable. `df` shows its free space.",
        )
    short = memory_error(error)
    if short is not None:
        return short
    # What remains is a bug: the traceback goes to stderr, and the JSON output stays one object.
    trace = "".join(traceback.format_exception(error))
    print(visible(trace, lines=True), end="", file=sys.stderr)
    return InternalError(
        f"This is a bug in fedcache: {type(error).__name__}: {error}",
        "Please report it with the lines above and the output of `fedcache doctor`.",
    )


def show(command: str, as_json: bool, result: CommandResult, warnings: Sequence[str]) -> None:
    """Print the answer of a command; raises OSError when stdout cannot be written."""
    if as_json:
        status = "problem"
        if result.code is Exit.OK:
            status = "ok"
        envelope(command, status, {"data": result.data}, warnings)
    elif result.listing and not sys.stdout.isatty():
        # stdout of a piped listing gets only the rows, for scripts; sentences go to stderr.
        for line in result.lines:
            print(visible(line, lines=True), file=sys.stderr)
        tables = "\n\n".join(table.tsv() for table in result.renderables)
        if tables:
            print(tables)
    else:
        for line in result.lines:
            print(visible(line, lines=True))
        if result.renderables:
            from rich.console import Console

            class StrictConsole(Console):
                def on_broken_pipe(self) -> None:
                    raise BrokenPipeError  # rich would exit with 1

            # A piped table is wide enough for its words; on a terminal rich takes the window's width.
            width = None
            if not sys.stdout.isatty():
                width = PIPED
                for item in result.renderables:
                    if isinstance(item, TextTable):
                        words, _ = item.needs()
                        width = max(width, sum(words) + BETWEEN * len(words))
            console = StrictConsole(width=width)
            for item in result.renderables:
                console.print(item)
        for line in result.last:
            print(visible(line, lines=True))
    sys.stdout.flush()


def unwritable(error: OSError) -> Exit:
    """The exit code when stdout cannot be written; the rest of the output is dropped.

    Returns:
        OK for a pipe that its reader has closed, which is no error. Else ENVIRONMENT, such as for a full device; the
        error is then printed to stderr.
    """
    # The interpreter flushes stdout once more when it ends. This goes to devnull, because it would fail again.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return Exit.OK
    print(
        f"fedcache: The output could not be written to stdout: {error.strerror or error}.",
        file=sys.stderr,
    )
    return Exit.ENVIRONMENT


def fail(command: str, as_json: bool, error: FedcacheError, warnings: Sequence[str] = ()) -> None:
    """Print an error: the message and the next command on stderr, and with ``--json`` the JSON output on stdout."""
    print(visible(f"fedcache: {error.message}\n{error.hint}", lines=True), file=sys.stderr)
    if as_json:
        detail = {
            "code": int(error.code),
            "name": error.code.name,
            "message": error.message,
            "hint": error.hint,
        }
        try:
            envelope(command, "error", {"error": detail}, warnings)
            sys.stdout.flush()
        except OSError as unwritten:
            unwritable(unwritten)  # the exit code is that of the error itself


def envelope(command: str, status: str, body: Facts, warnings: Iterable[str]) -> None:
    """Print the JSON output, one object, on stdout. NaN becomes null, because JSON has no NaN."""
    whole = {
        "schema": SCHEMA,
        "command": command,
        "status": status,
        **body,
        "warnings": list(warnings),
    }
    print(escape_json(json.dumps(finite(whole), ensure_ascii=False, allow_nan=False)))


# The live view: the progress of a piece of work, as a bar on a terminal and in words everywhere.
#
# If a command prints nothing for ``SILENCE`` seconds, a line on the terminal says that it is working.

WINDOW = 30.0
"""Seconds of the latest progress from which the rate and the remaining time are computed."""

SILENCE = 1.5
"""Seconds without output after which the terminal shows that the command is still working."""


@dataclass(eq=False)
class WorkProgress:
    """Progress of a piece of work: the number of units that are done, and the figures of its rounds.

    Args:
        what: name of the work, such as ``training fedavg``.
        total: number of units.
        unit: ``images`` or ``rounds``.
    """

    what: str
    total: int
    unit: str
    done: int = 0

    def __post_init__(self) -> None:
        self.begun = time.monotonic()
        self._window: deque[tuple[float, int]] = deque([(self.begun, 0)], maxlen=200)
        self._last: Round | None = None
        self._measured: Round | None = None
        self._up = self._down = 0

    def add_round(self, round_: Round) -> None:
        """Keep the figures of a round that has ended."""
        self._last = round_
        self._up += round_.up_bytes
        self._down += round_.down_bytes
        if round_.accuracy is not None:
            self._measured = round_

    def advance(self, units: int, now: float) -> None:
        """Count more units as done."""
        self.done += units
        if self._last is not None and self._last.stored:
            self._window.clear()  # stored rounds are only read, so their rate says nothing about the others
        self._window.append((now, self.done))
        while len(self._window) > 2 and now - self._window[0][0] > WINDOW:
            self._window.popleft()

    def words(self, now: float) -> str:
        """Progress in words: rounds, last accuracy, bytes sent, pace and remaining time; unknown parts are left out."""
        last = self._last
        if last is None:
            done = f"{self.done:,}/{self.total:,} {self.unit}"
            return ", ".join([done, *self._pace(now)])
        parts = [f"round {last.round} of {last.rounds}"]
        if last.seeds > 1:
            parts.append(f"seed {last.seed_number} of {last.seeds}")
        if last.points > 1:
            parts.append(f"{last.points_done} of {last.points} configurations done")
        measured = self._measured
        if measured is not None:
            # Accuracy is measured every few rounds, so the last one may be of an earlier round.
            earlier = ""
            if (measured.seed, measured.round) != (last.seed, last.round):
                earlier = f" in round {measured.round}"
            if measured.seed != last.seed:
                earlier += f" of seed {measured.seed_number}"
            where = ""
            if measured.point:
                where = f" with {measured.point}"
            accuracy = 100 * (measured.accuracy or 0)
            parts.append(f"accuracy {accuracy:.2f} %{where}{earlier}")
        up = byte_size(self._up)
        down = byte_size(self._down)
        parts.append(f"{up} up, {down} down")
        return ", ".join([*parts, *self._pace(now)])

    def _pace(self, now: float) -> list[str]:
        """The rate and the remaining time in words; [] while they are unknown."""
        last = self._last
        # Configurations that are trained together end a round at the same time, so the rate is unknown until
        # each of them has ended one.
        if last is not None and not last.points_done and self.done < last.points:
            return []
        window_start, done_before = self._window[0]
        rate = (self.done - done_before) / max(now - window_start, 1e-9)
        if not rate:
            return []
        # The small number keeps rounding errors of the clock from adding a second.
        seconds_left = math.ceil((self.total - self.done) / rate - 1e-6)
        if rate >= 0.1:
            pace = f"{rate:,.1f} {self.unit}/s"
        else:
            pace = f"{1 / rate:,.0f} s each"
        return [pace, f"{seconds_left // 60}:{seconds_left % 60:02d} left"]


def animated() -> bool:
    """Whether stderr is a terminal that can redraw a line. If not, as with ``TERM=dumb``, it gets whole lines."""
    terminal = os.environ.get("TERM", "").lower()
    return sys.stderr.isatty() and terminal not in ("dumb", "unknown")


class SignOfLife:
    """The line "working for 4 s" at the bottom of a terminal, while a command prints nothing.

    The next output replaces the line. A thread writes the line, so that it also appears while Python imports a library
    or fedcache reads a model. Without a terminal, nothing is written.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._since = time.monotonic()
        self._shown = ""
        self._held = False
        if animated():
            threading.Thread(target=self._watch, name="heartbeat", daemon=True).start()

    def clear(self, *, held: bool) -> None:
        """Erase the progress line; other output can then follow.

        With ``held``, no progress line is drawn until this method is called again.
        """
        with self._lock:
            if self._shown:
                sys.stderr.write("\r\x1b[K")
                sys.stderr.flush()
                self._shown = ""
            self._since = time.monotonic()
            self._held = held

    def end(self) -> None:
        """Remove the line and write nothing more."""
        self._ended.set()
        self.clear(held=True)

    def _watch(self) -> None:
        while not self._ended.wait(0.25):
            with self._lock:
                seconds = time.monotonic() - self._since
                words = f"working for {seconds:.0f} s"
                is_silent = seconds >= SILENCE and not self._held
                if is_silent and words != self._shown:
                    self._shown = words
                    sys.stderr.write(f"\r\x1b[K{words}")
                    sys.stderr.flush()


def bar(work: WorkProgress) -> Progress:
    """A bar with the words of the progress below it, which wrap on a narrow terminal.

    The words are made when the terminal is drawn, ten times a second, and not when a round ends.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
    from rich.text import Text

    # The words have their own line, because a column of the bar would be cut on a narrow terminal.
    class WithWords(Progress):
        def get_renderables(self) -> Iterable[RenderableType]:
            for task in self.tasks:
                task.completed = work.done
            yield self.make_tasks_table(self.tasks)
            yield Text(visible(work.words(time.monotonic())))

    made = WithWords(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    made.add_task(work.what, total=work.total)
    return made
