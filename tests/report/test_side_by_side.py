"""Figures of a page that are drawn side by side: the same bytes, whatever becomes of the processes that draw them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fedcache.progress import SIGN_OF_LIFE, Silent
from fedcache.report import side_by_side
from fedcache.report.drawing import Draw, Plot
from fedcache.report.side_by_side import draw_all

HERE = os.getpid()
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere figures are drawn one after another"
)


class Told(Silent):
    """What an observer is told of the progress."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def start(self, what: str, total: int, unit: str) -> None:
        self.said.append((what, total, unit))

    def advance(self, count: int) -> None:
        self.said.append(count)

    def stop(self) -> None:
        self.said.append("stop")


def plots(count: int, fault: Any = None) -> list[Plot]:
    """Figures of one line each; ``fault`` is called in the processes that draw for this one."""

    def fill_of(i: int) -> Draw:
        def fill(axes: Any, marks: Any) -> None:
            if fault is not None and os.getpid() != HERE:
                fault()
            marks(axes.scatter([0, i], [i, 1]), ["left", "right"])

        return fill

    return [Plot(f"p{i}", f"figure {i}", "a line", ("x",), [], fill_of(i)) for i in range(count)]


@pytest.fixture
def three_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "cores", lambda: 3)
    # The threads of what runs the tests in several processes use nothing that drawing uses.
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.current_thread()])


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that are made from here on; others may be children of what runs the tests."""
    made: list[int] = []
    fork = os.fork

    def noted() -> int:
        made.append(fork())
        return made[-1]

    monkeypatch.setattr(os, "fork", noted)
    return made


def none_is_left(made: list[int]) -> None:
    """Two processes were made, and both have ended and were waited for."""
    assert len(made) == 2
    for process in made:
        with pytest.raises(ChildProcessError):
            os.waitpid(process, os.WNOHANG)


def fail() -> None:
    raise ValueError("this figure cannot be drawn here")


FAULTS = {
    "all end well": None,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


@pytest.mark.slow
@pytest.mark.usefixtures("three_cores")
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_drawings_are_the_same_bytes_whatever_becomes_of_a_process(
    fault: Any,
    forked: list[int],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(side_by_side, "PATIENCE", 1.0)
    many, told = plots(8, fault), Told()
    sys.stdout.write("in the buffer ")  # a process that is copied has it too, and must not write it
    draw_all(many, told)
    sys.stdout.flush()
    assert [("svg" in vars(p)) for p in many] == (
        [True] * 8 if fault is None else [i % 3 == 0 for i in range(8)]
    )
    assert [p.svg for p in many] == [p.svg for p in plots(8)]
    assert told.said == [("drawing", 8, "figures"), 3, 3, 2, "stop"]
    assert capfd.readouterr() == ("in the buffer ", "")
    none_is_left(forked)


@pytest.mark.slow
@pytest.mark.usefixtures("three_cores")
def test_where_there_is_no_room_for_a_process_figures_are_drawn_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fork() -> int:
        raise BlockingIOError("too many processes")

    monkeypatch.setattr(os, "fork", fork)
    many, open_files = plots(6), len(list(Path("/proc/self/fd").iterdir()))
    draw_all(many, Silent())
    assert [("svg" in vars(p)) for p in many] == [True, False, False] * 2
    assert [p.svg for p in many] == [p.svg for p in plots(6)]
    assert len(list(Path("/proc/self/fd").iterdir())) == open_files


@pytest.mark.slow
@pytest.mark.usefixtures("three_cores")
def test_an_error_of_a_figure_is_raised_and_no_process_is_left(
    forked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    many, told = plots(6), Told()
    monkeypatch.setitem(vars(many[0]), "fill", lambda *_: fail())
    with pytest.raises(ValueError, match="cannot be drawn"):
        draw_all(many, told)
    assert told.said[-1] == "stop"
    none_is_left(forked)


@pytest.mark.slow
def test_no_process_is_made_while_another_thread_may_hold_a_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the thread that tells a terminal that a command is at work may run."""
    names: list[str] = []
    threads = [threading.current_thread()]
    monkeypatch.setattr(threading, "enumerate", lambda: threads)
    monkeypatch.setattr(side_by_side, "cores", lambda: 2)
    fork = os.fork
    monkeypatch.setattr(os, "fork", lambda: [names.append(threads[-1].name), fork()][1])
    for name in ("MainThread", SIGN_OF_LIFE, "of a notebook"):
        threads[1:] = [] if name == "MainThread" else [threading.Thread(name=name)]
        many = plots(4)
        draw_all(many, Silent())
        assert all("svg" in vars(p) for p in many)
    assert names == ["MainThread", SIGN_OF_LIFE]


KILLED = """
import sys, time
sys.path[:0] = {path!r}
from test_side_by_side import *
import os
monkey = pytest.MonkeyPatch()
monkey.setattr(side_by_side, "cores", lambda: 3)
def fill_of(i):
    def fill(axes, marks):
        if os.getpid() == here:
            print("drawing", flush=True)
            time.sleep(280)
        axes.scatter(range(1500), range(1500))  # more than a pipe holds
    return fill
here = os.getpid()
draw_all([Plot(f"p{{i}}", "", "a cloud", ("x",), [], fill_of(i)) for i in range(6)], Silent())
"""


@pytest.mark.slow
def test_what_draws_ends_when_the_command_is_killed() -> None:
    code = KILLED.format(path=[str(Path(__file__).parent), *sys.path])
    command = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert command.stdout is not None
    assert command.stdout.readline() == "drawing\n"
    assert len(_of_session(command.pid)) == 3
    command.kill()
    command.wait()
    until = time.monotonic() + 200
    while _of_session(command.pid) and time.monotonic() < until:
        time.sleep(0.1)
    assert _of_session(command.pid) == []
    command.stdout.close()


def _of_session(leader: int) -> list[int]:
    """Processes of a session that are no zombies."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, _, session = (place / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                found.append(int(place.name))
    return found
