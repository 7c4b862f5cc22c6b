"""What a user waits for before anything is computed: whole processes, from the shell's point of view."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.measure import Row, in_turn, make_row, quartiles

EXTRACT = ["-m", "fedcache", "extract", "--dataset", "digits", "--backbones", "efficientnet-lite0", "--size", "96",
           "--limit", "600", "--json"]  # fmt: skip


def rows() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "FEDCACHE_HOME": str(Path(folder) / "home")}

        def python(*words: str) -> str:
            done = subprocess.run([sys.executable, *words], env=env, check=True, capture_output=True, text=True)
            return done.stdout

        python(*EXTRACT)
        again = json.loads(python(*EXTRACT))["data"]
        forward = sum(a["forward_batches"] for a in again["arrays"])
        calls = {
            "second run": lambda: python(*EXTRACT),
            "help": lambda: python("-m", "fedcache", "--help"),
            "import": lambda: python("-c", "import fedcache"),
            "python": lambda: python("-c", "pass"),
        }
        seconds = in_turn(calls, 7)
    empty = min(seconds["python"])
    made = []
    for name, key, target, bar in (
        ("second run of the same extraction", "second run", "<= 1.5 s, nothing decoded or computed", 1.5),
        ("fedcache --help", "help", "<= 0.5 s", 0.5),
        ("import fedcache", "import", "<= 0.2 s", 0.2),
    ):
        detail = f"whole process, best of 7; an empty Python process takes {empty:.3f} s"
        measured = min(seconds[key])
        met = measured <= bar
        if key == "second run":
            detail += f"; {again['decoded']} images decoded, {forward} forward passes"
            met = met and again["decoded"] == 0 and forward == 0
        made.append(make_row(name, target, measured, quartiles(seconds[key]), met, detail=detail))
    return made
