"""Run the real command line, in this process or in its own."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

from fedcache.cli import main


@dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def envelope(self) -> dict[str, Any]:
        """The one JSON object on stdout."""
        lines = [line for line in self.out.splitlines() if line.strip()]
        assert len(lines) == 1, self.out
        found: dict[str, Any] = json.loads(lines[0])
        return found

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = self.envelope["data"]
        return found


def fedcache(*words: object) -> Done:
    """``fedcache WORDS`` in this process."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main([str(w) for w in words])
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


def ok(*words: object) -> Done:
    """``fedcache WORDS --json``, which must succeed."""
    done = fedcache(*words, "--json")
    assert done.code == 0, done.err + done.out
    return done


def start(*words: object, home: object) -> subprocess.Popen[str]:
    """``fedcache WORDS`` in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "fedcache", *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "FEDCACHE_HOME": str(home), "OMP_NUM_THREADS": "1"}, start_new_session=True,
    )  # fmt: skip
