"""Every suite in full, resumable: what has passed for this code is not run again.

    python tools/nightly.py [--list]

The steps run all cases, new examples of property tests, every law broken, random changes of the code and of the files
of a home. They run one after another, and beside them all tests, folder by folder. Each step's output is kept in
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
LONG = ("numeric", "browser", "notebooks", "test-engines", "lint-files", "smoke-wheel")
"""More targets of the Makefile. The tools run after the quick ones."""

APART = ("browser", "engines", "gpu")
"""Folders of tests that ``make tests-full`` leaves out."""


def tests_in_full() -> dict[str, list[str]]:
    """Name -> command, for each folder of tests and each file beside the folders."""
    folder = ROOT / "tests"
    parts = {file.relative_to(folder).parts[0] for file in folder.rglob("test_*.py")}
    return {
        f"tests-full-{part}": ["make", "tests-full", f"PART={part}"]
        for part in sorted(parts.difference(APART))
    }


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
    kept: dict[str, dict[str, Any]] = {}
    if NIGHT.is_file() and not code.endswith(CHANGED):
        kept = json.loads(NIGHT.read_text())
    tests = tests_in_full()
    # trust counts the cases of the tests before it
    rows = [steps(), tests | {"trust": ["make", "trust"]}]
    commands = rows[0] | rows[1]
    same = {"code": code, "result": "passed"}.items()
    done = {step: kept[step] for step in commands if same <= kept.get(step, {}).items()}
    if "trust" not in done:
        for step in tests:
            if not (LOGS / f"{step}.xml").is_file():
                done.pop(step, None)
    for step in done:
        print(f"{step}: passed before", flush=True)
    missing = [[step for step in row if step not in done] for row in rows]
    if options.list:
        print("runs:", *missing[0], *missing[1])
        return 0
    LOGS.mkdir(exist_ok=True)

    def run_row(row: Sequence[str]) -> None:
        for step in row:
            done[step] = run(step, commands[step])
            print(f"{step}: {done[step]['result']} in {done[step]['seconds']:,} s", flush=True)
            NIGHT.write_text(json.dumps(done, indent=1, sort_keys=True) + "\n")

    with ThreadPoolExecutor(len(missing)) as pool:
        list(pool.map(run_row, missing))
    write_page()
    return int(any(found["result"] != "passed" for found in done.values()))


if __name__ == "__main__":
    sys.exit(main())
