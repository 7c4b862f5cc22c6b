"""Every suite in full, one after another, resumable: what has passed for this commit is not run again.

    python tools/nightly.py [--fresh] [--list]

The steps run all cases, new examples of property tests, every law broken, random changes of the code and of the files
of a home. Each step's output is kept in .nightly/COMMIT/STEP.log, its result and time in .nightly/COMMIT/steps.json,
and a table of all in .nightly/COMMIT/report.md. A step that fails does not stop the others. A
checkout with changes begins again each time, as it may have changed since. Exits 1 if a step failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
QUICK = ("lint", "types", "docs", "audit", "unit")
TARGETS = (
    *QUICK,
    "slow",
    "numeric",
    "browser",
    "notebooks",
    "test-engines",
    "lint-files",
    "smoke-wheel",
    "trust",
)
"""Targets of the Makefile. ``trust`` runs the durability tests. The tools run after the quick ones."""


CHANGED = "-changed"


def steps() -> dict[str, list[str]]:
    """Name -> command."""
    python = sys.executable
    own = {
        "break-laws": [python, "tools/break_laws.py"],
        "mutate": [python, "tools/mutate.py", "--count", "60"],
        "attack-home": [
            python,
            "tools/attack_home.py",
            "--count",
            "2000",
            "--seed",
            date.today().strftime("%j"),
        ],
    }
    made = {target: ["make", target] for target in TARGETS}
    return {target: made[target] for target in QUICK} | own | made


def commit() -> str:
    """The commit of the checkout, with ``CHANGED`` where files differ from it."""
    words = ["git", "describe", "--always", "--abbrev=12", f"--dirty={CHANGED}", "--exclude=*"]
    return subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def report(name: str, done: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of what ran."""
    rows = [
        f"| {step} | {found['result']} | {found['seconds']:,} | {found['processor']:,} |"
        for step, found in done.items()
    ]
    total = sum(found["seconds"] for found in done.values())
    return "\n".join(
        [
            f"# Night of {name}",
            "",
            "| step | result | seconds | processor seconds |",
            "|---|---|---|---|",
            *rows,
            "",
            f"{total:,} s in all.",
            "",
        ]
    )


def run(step: str, words: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run a step; its result and seconds."""
    began = time.monotonic()
    before = processor_seconds()
    environment = {**os.environ, "FEDCACHE_CASES": "full", "OMP_NUM_THREADS": "1"}
    with (folder / f"{step}.log").open("wb") as log:
        done = subprocess.run(
            words, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False
        )
    return {
        "result": "passed" if done.returncode == 0 else "failed",
        "seconds": round(time.monotonic() - began),
        "processor": round(processor_seconds() - before),
    }


def processor_seconds() -> float:
    """Seconds of the processors that finished commands have used, which other work on the machine does not change."""
    used = os.times()
    return used.children_user + used.children_system


def main() -> int:
    """Run what has not passed yet, and say how each step ended."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--fresh", action="store_true", help="run again what has passed")
    parser.add_argument("--list", action="store_true", help="say what would run, and run nothing")
    options = parser.parse_args()
    name = commit()
    folder = ROOT / ".nightly" / name
    kept = folder / "steps.json"
    goes_on = kept.is_file() and not options.fresh and not name.endswith(CHANGED)
    done: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if goes_on else {}
    for step, words in steps().items():
        if done.get(step, {}).get("result") == "passed":
            print(f"{step}: passed before", flush=True)
            continue
        if options.list:
            print(f"{step}: {' '.join(words)}")
            continue
        folder.mkdir(parents=True, exist_ok=True)
        done[step] = run(step, words, folder)
        print(f"{step}: {done[step]['result']} in {done[step]['seconds']:,} s", flush=True)
        kept.write_text(json.dumps(done, indent=1) + "\n")
        (folder / "report.md").write_text(report(name, done), encoding="utf-8")
    if not options.list:
        print(f"Logs and report: {folder.relative_to(ROOT)}")
    return int(any(found["result"] != "passed" for found in done.values()))


if __name__ == "__main__":
    sys.exit(main())
