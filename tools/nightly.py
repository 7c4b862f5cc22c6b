"""Every suite in full, resumable: what has passed for this code is not run again.

    python tools/nightly.py [--list]

The steps run all cases, new examples of property tests, every law broken, random changes of the code and of the files
of a home. They run one after another, and at the same time those of ``BESIDE``. Each step's output is kept in
.nightly/, its result and time in docs/nightly.json, which docs/trust.md shows. Commit docs/nightly.json and
docs/trust.json to go on with the same code in another clone. A step that fails does not stop the others. A checkout
with changes begins again each time, as it may have changed since. Exits 1 if a step failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from typing import Any

from code_changes import CHANGED, NIGHT, ROOT, code_digest
from make_trust import write_page

LOGS = ROOT / ".nightly"
QUICK = ("lint", "types", "docs", "audit")
LONG = (
    "tests-full",
    "trust",
    "numeric",
    "browser",
    "notebooks",
    "test-engines",
    "lint-files",
    "smoke-wheel",
)
"""More targets of the Makefile. The tools run after the quick ones."""

BESIDE = ("tests-full", "trust")
"""The steps that wait for processes more than the others do; ``trust`` counts the cases of ``tests-full``."""


def steps() -> dict[str, list[str]]:
    """Name -> command."""
    lines = {
        "break-laws": "tools/break_laws.py",
        "mutate": "tools/mutate.py --count 24",
        "attack-home": f"tools/attack_home.py --count 2000 --seed {date.today():%j}",
    }
    own = {step: [sys.executable, *line.split()] for step, line in lines.items()}
    quick = {target: ["make", target] for target in QUICK}
    return quick | own | {target: ["make", target] for target in LONG}


def run(step: str, words: Sequence[str]) -> dict[str, Any]:
    """Run a step; its result and seconds."""
    began = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # The tools draw their own changes; with all cases, one pass over the tests would take as long as the whole night.
    if words[0] == "make":
        environment["FEDCACHE_CASES"] = "full"
    with (LOGS / f"{step}.log").open("wb") as log:
        process = subprocess.Popen(
            words, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        _, status, used = os.wait4(process.pid, 0)
    return {
        "code": code_digest(),
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
    code = code_digest()
    kept = json.loads(NIGHT.read_text()) if NIGHT.is_file() else {}
    same = {} if code.endswith(CHANGED) else {"code": code, "result": "passed"}
    commands = steps()
    done = {
        step: kept[step] for step in commands if same and same.items() <= kept.get(step, {}).items()
    }
    if "trust" not in done and not (LOGS / "tests.xml").is_file():
        done.pop("tests-full", None)
    rows = ([], [])
    for step in commands:
        if step in done:
            print(f"{step}: passed before", flush=True)
        else:
            rows[step in BESIDE].append(step)
    if options.list:
        print("runs:", *rows[0], *rows[1])
        return 0
    LOGS.mkdir(exist_ok=True)

    def run_row(row: Sequence[str]) -> None:
        for step in row:
            done[step] = run(step, commands[step])
            print(f"{step}: {done[step]['result']} in {done[step]['seconds']:,} s", flush=True)
            in_order = {step: done[step] for step in commands if step in done}
            NIGHT.write_text(json.dumps(in_order, indent=1) + "\n")

    with ThreadPoolExecutor(len(rows)) as pool:
        list(pool.map(run_row, rows))
    write_page()
    return int(any(found["result"] != "passed" for found in done.values()))


if __name__ == "__main__":
    sys.exit(main())
