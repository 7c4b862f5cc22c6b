"""Figures of a page that are drawn side by side: the same bytes, whatever becomes of the processes that draw them."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from fedcache.progress import Silent
from fedcache.report import side_by_side
from fedcache.report.drawing import Draw, Plot
from fedcache.report.side_by_side import draw_all

HERE = os.getpid()
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere figures are drawn one after another")


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


def fail() -> None:
    raise ValueError("this figure cannot be drawn here")


@pytest.mark.parametrize(
    "fault",
    [None, fail, lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: sys.exit("ends")],
    ids=["all end well", "an error", "killed", "exits"],
)
@pytest.mark.usefixtures("three_cores")
def test_drawings_are_the_same_bytes_whatever_becomes_of_a_process(
    fault: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    many, told = plots(8, fault), Told()
    sys.stdout.write("in the buffer ")  # a process that is copied has it too, and must not write it
    draw_all(many, told)
    sys.stdout.flush()
    assert [("svg" in vars(p)) for p in many] == ([True] * 8 if fault is None else [i % 3 == 0 for i in range(8)])
    assert [p.svg for p in many] == [p.svg for p in plots(8)]
    assert told.said == [("drawing", 8, "figures"), 3, 3, 2, "stop"]
    assert capfd.readouterr() == ("in the buffer ", "")
    with pytest.raises(ChildProcessError):  # none is left behind
        os.waitpid(-1, os.WNOHANG)


@pytest.mark.usefixtures("three_cores")
def test_where_there_is_no_room_for_a_process_figures_are_drawn_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise BlockingIOError("too many processes")

    monkeypatch.setattr(os, "fork", fork)
    many, open_files = plots(6), len(list(Path("/proc/self/fd").iterdir()))
    draw_all(many, Silent())
    assert [("svg" in vars(p)) for p in many] == [True, False, False] * 2
    assert [p.svg for p in many] == [p.svg for p in plots(6)]
    assert len(list(Path("/proc/self/fd").iterdir())) == open_files


@pytest.mark.parametrize(("cores", "platform", "count"), [(1, "linux", 6), (8, "darwin", 6), (8, "linux", 3)])
def test_few_figures_one_core_and_other_systems_take_no_process(
    cores: int, platform: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_by_side, "cores", lambda: cores)
    monkeypatch.setattr(side_by_side.sys, "platform", platform)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a process was made"))
    many = plots(count)
    draw_all(many, Silent())
    assert all("svg" in vars(p) for p in many)


def test_no_figure_is_no_work() -> None:
    told = Told()
    draw_all([], told)
    assert told.said == [("drawing", 0, "figures"), "stop"]


@pytest.mark.usefixtures("three_cores")
def test_an_error_of_a_figure_is_raised_and_no_process_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    many, told = plots(6), Told()
    monkeypatch.setitem(vars(many[0]), "fill", lambda *_: fail())
    with pytest.raises(ValueError, match="cannot be drawn"):
        draw_all(many, told)
    assert told.said[-1] == "stop"
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
