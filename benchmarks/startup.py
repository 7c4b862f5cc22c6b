"""What a user waits for before anything is computed: whole processes, from the shell's point of view."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.measure import Row, in_turn, make_row, quartiles

EXTRACT = "extract --dataset digits --backbones"
LITE = f"{EXTRACT} efficientnet-lite0 --size 96 --limit 600 --json"
IID = "--dataset digits --scheme iid --clients 10 --set head=linear --rounds 1"
TRAIN = f"train --method fedavg {IID}"
RATES = ",".join(str(i / 1000) for i in range(1, 61))
GRID = f"grid --method fedavg {IID} --sweep lr={RATES} --sweep wd=0,0.001,0.01,0.1"


def rows() -> list[Row]:
    return [*_nothing_computed(), *_runs()]


def python_of(home: Path) -> Callable[[str], str]:
    """A function that runs Python with the words of a command line, and returns what is printed.

    FEDCACHE_HOME is a folder in ``home``.
    """
    env = {**os.environ, "FEDCACHE_HOME": str(home / "home")}

    def python(line: str) -> str:
        words = [sys.executable, *shlex.split(line)]
        done = subprocess.run(words, env=env, check=True, capture_output=True, text=True)
        return done.stdout

    return python


def _row(
    name: str, target: str, bar: float, seconds: list[float], detail: str, *, sound: bool = True
) -> Row:
    """The row of a process that may take ``bar`` seconds at best; it is missed as well unless it is ``sound``."""
    measured = min(seconds)
    detail = f"whole process, best of 7; {detail}"
    met = measured <= bar and sound
    return make_row(name, target, measured, quartiles(seconds), met, detail=detail)


def _runs() -> list[Row]:
    """Runs of glyph-clip's features of digits: those that are there, their page, and new ones."""
    with tempfile.TemporaryDirectory() as folder:
        python = python_of(Path(folder))
        seeds = itertools.count(1)
        page = shlex.quote(str(Path(folder) / "report.html"))
        python(f"-m fedcache {EXTRACT} glyph-clip")
        python(f"-m fedcache {GRID}")
        # of 240 runs
        reported = in_turn({"report": lambda: python(f"-m fedcache report -o {page}")}, 7)
        python(f"-m fedcache {TRAIN}")
        calls = {
            "torch": lambda: python("-c 'import torch'"),
            "again": lambda: python(f"-m fedcache {TRAIN}"),
            "grid": lambda: python(f"-m fedcache {GRID}"),
            "fresh": lambda: python(f"-m fedcache {TRAIN} --seeds {next(seeds)}"),
        }
        seconds = in_turn(calls, 7)
    torch = min(seconds["torch"])
    detail = f"to import torch takes {torch:.2f} s"
    short = "<= import torch + 1.5 s"
    return [
        _row("a finished run again", short, torch + 1.5, seconds["again"], detail),
        _row(
            "a stored grid of 240 points again",
            "<= import torch + 3 s",
            torch + 3,
            seconds["grid"],
            detail,
        ),
        _row("report of 240 runs", "<= 3.5 s", 3.5, reported["report"], detail),
        _row("a tiny fresh run", short, torch + 1.5, seconds["fresh"], detail),
    ]


def _nothing_computed() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        python = python_of(Path(folder))
        python(f"-m fedcache {LITE}")
        again = json.loads(python(f"-m fedcache {LITE}"))["data"]
        calls = {
            "second run": lambda: python(f"-m fedcache {LITE}"),
            "help": lambda: python("-m fedcache --help"),
            "import": lambda: python("-c 'import fedcache'"),
            "python": lambda: python("-c pass"),
        }
        seconds = in_turn(calls, 7)
    forward = sum(a["forward_batches"] for a in again["arrays"])
    detail = f"an empty Python process takes {min(seconds['python']):.3f} s"
    counts = f"{again['decoded']} images decoded, {forward} forward passes"
    return [
        _row(
            "second run of the same extraction",
            "<= 1.5 s, nothing decoded or computed",
            1.5,
            seconds["second run"],
            f"{detail}; {counts}",
            sound=again["decoded"] == 0 and forward == 0,
        ),
        _row("fedcache --help", "<= 0.5 s", 0.5, seconds["help"], detail),
        _row("import fedcache", "<= 0.2 s", 0.2, seconds["import"], detail),
    ]
