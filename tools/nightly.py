"""Every suite in full, resumable: what has passed for this commit is not run again.

    python tools/nightly.py [--list]

The steps run all cases, new examples of property tests, every law broken, random changes of the code and of the files
of a home. They run one after another, and ``BESIDE`` at the same time. Each step's output is kept in
.nightly/COMMIT/STEP.log, its result and time in .nightly/COMMIT/STEP.json, and a table of all in
.nightly/COMMIT/report.md. A step that fails does not stop the others. A checkout with changes begins again each time,
as it may have changed since. Exits 1 if a step failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
QUICK = ("lint", "types", "docs", "audit", "unit")
LONG = (
    "slow",
    "numeric",
    "browser",
    "notebooks",
    "test-engines",
    "lint-files",
    "smoke-wheel",
    "trust",
)
"""More targets of the Makefile. ``trust`` runs the durability tests. The tools run after the quick ones."""

BESIDE = "trust"
"""The step that waits for processes more than it computes."""

CHANGED = "-changed"


def steps() -> dict[str, list[str]]:
    """Name -> command."""
    lines = {
        "break-laws": "tools/break_laws.py",
        "mutate": "tools/mutate.py --count 60",
        "attack-home": f"tools/attack_home.py --count 2000 --seed {date.today():%j}",
    }
    own = {step: [sys.executable, *line.split()] for step, line in lines.items()}
    quick = {target: ["make", target] for target in QUICK}
    return quick | own | {target: ["make", target] for target in LONG}


def git(line: str) -> str:
    """What a git command prints in the checkout."""
    words = ["git", *line.split()]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit() -> str:
    """The commit of the checkout, with ``CHANGED`` where files differ from it."""
    name = git("rev-parse --short=12 HEAD")
    # ``trust`` writes into two of them while it runs.
    if git("status --porcelain --untracked-files=no -- . :!docs/trust.*"):
        return name + CHANGED
    return name


def report(name: str, done: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of what ran."""
    rows = [
        f"| {step} | {found['result']} | {found['seconds']:,} | {found['processor']:,} |"
        for step, found in done.items()
    ]
    heads = "| step | result | seconds | processor seconds |\n|---|---|---|---|"
    return "\n".join([f"# Night of {name}\n", heads, *rows, ""])


def run(step: str, words: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run a step; its result and seconds."""
    began = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # The tools draw their own changes; with all cases, one pass over the tests would take as long as the whole night.
    if words[0] == "make":
        environment["FEDCACHE_CASES"] = "full"
    with (folder / f"{step}.log").open("wb") as log:
        process = subprocess.Popen(
            words, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        _, status, used = os.wait4(process.pid, 0)
    return {
        "result": "failed" if status else "passed",
        "seconds": round(time.monotonic() - began),
        # those of all commands that it started and that have ended; other work on the machine does not change them
        "processor": round(used.ru_utime + used.ru_stime),
    }


def main() -> int:
    """Run what has not passed yet, and say how each step ended."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--list", action="store_true", help="say what would run, and run nothing")
    options = parser.parse_args()
    name = commit()
    folder = ROOT / ".nightly" / name
    commands = steps()
    rows: tuple[list[str], list[str]] = ([], [])
    for step in commands:
        kept = folder / f"{step}.json"
        if kept.is_file() and not name.endswith(CHANGED) and "passed" in kept.read_text():
            print(f"{step}: passed before", flush=True)
        else:
            rows[step == BESIDE].append(step)
    if options.list:
        print("runs:", *rows[0], *rows[1])
        return 0
    folder.mkdir(parents=True, exist_ok=True)

    def run_row(row: Sequence[str]) -> None:
        for step in row:
            result = run(step, commands[step], folder)
            print(f"{step}: {result['result']} in {result['seconds']:,} s", flush=True)
            (folder / f"{step}.json").write_text(json.dumps(result) + "\n")

    with ThreadPoolExecutor(len(rows)) as pool:
        list(pool.map(run_row, rows))
    done = {step: json.loads((folder / f"{step}.json").read_text()) for step in commands}
    (folder / "report.md").write_text(report(name, done), encoding="utf-8")
    print(f"Logs and report: {folder.relative_to(ROOT)}")
    return int(any(found["result"] != "passed" for found in done.values()))


if __name__ == "__main__":
    sys.exit(main())
