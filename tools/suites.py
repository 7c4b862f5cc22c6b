"""The second suite: what a change must pass after `make test`, without the parts that it cannot have changed.

    python tools/suites.py [--all] [--list]

Each suite names the paths that it depends on. It runs where one of them differs from main, and every suite runs where
tools/, the Makefile, .ci/ or what all tests share differ. What is skipped is printed with its reason; `make nightly`
runs everything in full.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / ".suites"
sys.path.insert(0, str(ROOT / "tests" / "support"))

from methods_tried import changed_files  # noqa: E402

EVERYTHING = ("tools/", "Makefile", ".ci/", "tests/conftest.py", "tests/support/")
"""Where one of these differs, all suites run."""

PACKAGE = ("fedcache/", "tests/", "pyproject.toml")
TRAINING_SIDE = tuple(
    f"{top}/{folder}/"
    for top in ("fedcache", "tests")
    for folder in (
        "federate",
        "grids",
        "heads",
        "models",
        "report",
        "reproduce",
        "runs",
        "testing",
        "ui",
    )
)
"""What extraction and stores do not use."""

INSTALLED = ("pyproject.toml", "uv.lock")
CATALOGUE = ("fedcache/report/methods/catalogue.json",)
"""The list of methods, which differs with every change of a method."""


@dataclass(frozen=True)
class Suite:
    """A target of the Makefile, the beginnings of the paths that it depends on, and of those below that it does not."""

    target: str
    paths: tuple[str, ...]
    without: tuple[str, ...] = ()

    def reason(self, changed: frozenset[str] | None) -> str:
        """Why it is skipped; empty where it runs. ``changed`` is None where git cannot say what differs."""
        if changed is None or any(path.startswith(EVERYTHING) for path in changed):
            return ""
        if any(
            path.startswith(self.paths) and not path.startswith(self.without) for path in changed
        ):
            return ""
        reason = f"nothing below {', '.join(self.paths)} differs from main"
        if self.without:
            reason += f", except below {', '.join(self.without)}"
        return reason


SUITES = (
    Suite("long", PACKAGE),
    Suite("test-engines", ("fedcache/", "tests/engines/", "pyproject.toml")),
    Suite("long-data", PACKAGE, TRAINING_SIDE),
    Suite("browser", ("fedcache/report/", "fedcache/ui/", "tests/browser/"), CATALOGUE),
    Suite(
        "notebooks",
        (
            "docs/",
            "examples/",
            "README.md",
            "fedcache/__init__.py",
            "fedcache/api.py",
            "fedcache/commands/",
            "fedcache/report/",
        ),
        CATALOGUE,
    ),
    Suite(
        "contributor",
        (
            "docs/add-a-backbone.md",
            "docs/add-a-dataset.md",
            "docs/add-a-method.md",
            "examples/",
            "fedcache/commands/new.py",
            "fedcache/federate/engine/method.py",
            "fedcache/plugins.py",
            "fedcache/testing/",
            "tests/commands/test_new_dataset.py",
            "tests/commands/test_new_package.py",
            "tests/contract/",
            "tests/project/",
        ),
    ),
    Suite("numeric", ("fedcache/heads/", "fedcache/federate/", "fedcache/models/", "tests/heads/")),
    Suite("smoke-wheel-quick", (*INSTALLED, "README.md", "fedcache/__init__.py")),
    Suite("audit", INSTALLED),
    Suite("docs", ("docs/", "mkdocs.yml", "README.md", "fedcache/")),
    Suite("lint-files", (".github/", "Dockerfile", "CITATION.cff")),
)
"""The longest first, so that the last to run are short."""

TOGETHER = 3
"""Suites that run at the same time. Federations, kills and the browser wait more than they compute."""

INCLUDED = {"docs": "browser"}
"""Targets that another target makes, where it runs."""


def run(suite: Suite) -> bool:
    """Run a suite; whether it passed.

    The last lines are printed when it ends, all of them if it failed; the whole output is kept in LOGS.
    """
    began = time.monotonic()
    done = subprocess.run(
        ["make", suite.target],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    (LOGS / f"{suite.target}.log").write_text(done.stdout, encoding="utf-8")
    shown = done.stdout if done.returncode else "\n".join(done.stdout.splitlines()[-2:])
    print(f"{shown}\n-- make {suite.target}: {time.monotonic() - began:.0f} s", flush=True)
    return not done.returncode


def main() -> int:
    """Choose, run, and say what was skipped and what failed."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument(
        "--all", action="store_true", help="run every suite, also where nothing differs from main"
    )
    parser.add_argument("--list", action="store_true", help="say what would run, and run nothing")
    options = parser.parse_args()
    changed = None if options.all else changed_files()
    chosen = {suite.target for suite in SUITES if not suite.reason(changed)}
    for suite in SUITES:
        if reason := suite.reason(changed):
            print(f"-- make {suite.target}: skipped, as {reason}", flush=True)
    for target, other in INCLUDED.items():
        if {target, other} <= chosen:
            chosen.remove(target)
            print(f"-- make {target}: part of make {other}", flush=True)
    if options.list:
        print("runs:", *(suite.target for suite in SUITES if suite.target in chosen))
        return 0
    LOGS.mkdir(exist_ok=True)
    suites = [suite for suite in SUITES if suite.target in chosen]
    with ThreadPoolExecutor(TOGETHER) as pool:
        passed = list(pool.map(run, suites))
    failed = [suite.target for suite, ok in zip(suites, passed, strict=True) if not ok]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
