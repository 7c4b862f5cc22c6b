"""Run the real command line, in this process or in its own."""

import io
import json
import os
import shlex
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

from fedcache.cli import main


@dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def envelope(self):
        """The one JSON object on stdout."""
        lines = [line for line in self.out.splitlines() if line.strip()]
        assert len(lines) == 1, self.out
        return json.loads(lines[0])

    @property
    def data(self):
        return self.envelope["data"]

    @property
    def error(self):
        return self.envelope["error"]

    @property
    def warnings(self):
        return self.envelope["warnings"]


def words_of(line):
    """The words of a command line, as a shell has them."""
    return tuple(shlex.split(line))


def fedcache(line, *words):
    """``fedcache LINE WORDS`` in this process: the line as a shell reads it, each word as it is."""
    out = io.StringIO()
    err = io.StringIO()
    code = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main([*words_of(str(line)), *(str(w) for w in words)])
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


def ok(line, *words):
    """``fedcache LINE WORDS --json``, which must succeed."""
    done = fedcache(line, *words, "--json")
    assert done.code == 0, done.err + done.out
    return done


def data_of(line, *words):
    """The data that ``fedcache LINE WORDS --json`` answers with; the command must succeed."""
    return ok(line, *words).data


def environment(home):
    return {**os.environ, "FEDCACHE_HOME": str(home), "OMP_NUM_THREADS": "1"}


def apart(line, *words, home):
    """``fedcache LINE WORDS`` in a process of its own, to its end."""
    done = subprocess.run(
        [sys.executable, "-m", "fedcache", *words_of(str(line)), *map(str, words)],
        capture_output=True,
        text=True,
        env=environment(home),
        timeout=280,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def python(code, *words, **more):
    """What lines of Python print in a process of their own, which must succeed, with ``more`` in its environment."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        capture_output=True,
        text=True,
        env=os.environ | more,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def start(line, *words, home, capture=False):
    """``fedcache LINE WORDS`` in a process group of its own, left running; output is dropped unless captured."""
    sink = subprocess.PIPE if capture else subprocess.DEVNULL
    return subprocess.Popen(
        [sys.executable, "-m", "fedcache", *words_of(str(line)), *map(str, words)],
        stdout=sink,
        stderr=sink,
        text=True,
        env=environment(home),
        start_new_session=True,
    )
