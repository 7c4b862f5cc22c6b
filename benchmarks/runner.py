"""Run the families, put their rows in the order of the table, and say what is met, missed or missing.

A family is a module of this folder with ``rows()``. Each runs in a process of its own with one thread, so that none
inherits another's memory, threads or crash; a family that fails leaves a row for each of its lines that says how.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.measure import Row, avx512, hardware, make_row
from benchmarks.table import LINES, line_of

HERE = Path(__file__).resolve().parent
RESULTS = (HERE / "results.json", HERE / "results-avx512.json")
"""The last rows of processors without AVX-512, and with it: their ratios differ too much to stand in one table."""
FIELDS = ("name", "target", "measured", "quartiles", "met", "hardware")
LIMIT = 900
"""Seconds after which a family is ended."""


class FamilyError(Exception):
    """A family that gave no rows; the message says why."""


def in_process(family: str) -> list[Row]:
    """The rows of a family, run in a process of its own.

    Raises:
        FamilyError: there is no such module, or it ended without rows.
    """
    if not (HERE / f"{family}.py").exists():
        raise FamilyError(f"there is no benchmarks/{family}.py")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        places = os.pathsep.join(
            p for p in (str(HERE.parent), os.environ.get("PYTHONPATH", "")) if p
        )
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "FEDCACHE_HOME": str(Path(folder) / "home"),
            "PYTHONPATH": places,
        }
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its compiled files
        words = [sys.executable, "-m", "benchmarks", "--family", family, "--out", str(out)]
        try:
            done = subprocess.run(
                words, env=env, check=False, stderr=subprocess.PIPE, text=True, timeout=LIMIT
            )
        except subprocess.TimeoutExpired:
            raise FamilyError(f"took more than {LIMIT} s") from None
        if done.returncode or not out.exists():
            last = (done.stderr.strip().splitlines() or ["no word"])[-1]
            raise FamilyError(f"exit {done.returncode}: {last[:300]}")
        return json.loads(out.read_text())


def family_rows(family: str) -> list[Row]:
    """Run ``rows()`` of a family here."""
    return importlib.import_module(f"benchmarks.{family}").rows()


def collect(families: Iterable[str], run: Callable[[str], list[Row]]) -> list[Row]:
    """The rows of some families; for one that fails, an unmet row with its error for each of its lines."""
    made = []
    for family in families:
        print(f"-- {family}")
        try:
            found = run(family)
            wrong = [f"{r.get('name', '?')} lacks {f}" for r in found for f in FIELDS if f not in r]
            wrong += [
                f"{r['name']!r} is no line of the table"
                for r in found
                if line_of(r.get("name", "")) is None
            ]
            if wrong:
                raise FamilyError("; ".join(wrong))
        except Exception as error:  # the other families are still measured
            found = [
                {
                    **make_row(line.name, line.target, None, [], False),
                    "error": f"{type(error).__name__}: {error}",
                }
                for line in LINES
                if line.family == family
            ]
        for row in found:
            print(shown(row))
        made += found
    return made


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Rows in the order of the table; those of one line as their family gave them."""
    return sorted(rows, key=lambda r: line_of(r["name"]) or 0)


def missing(rows: Iterable[Row]) -> list[str]:
    """Names of the lines without a row."""
    seen = {line_of(r["name"]) for r in rows}
    return [line.name for i, line in enumerate(LINES) if i not in seen]


def verdict(row: Row) -> str:
    """met | missed, roofline | missed | failed."""
    if row["met"]:
        return "met"
    if "error" in row:
        return "failed"
    if row.get("roofline"):
        return "missed, roofline"
    return "missed"


def passes(rows: Sequence[Row]) -> bool:
    """Whether every line has a row, and every row is met or says with numbers what forbids it."""
    return not missing(rows) and all(verdict(r) in ("met", "missed, roofline") for r in rows)


def shown(row: Row) -> str:
    """One line of the terminal's table, and what explains it."""
    measured = "-" if row["measured"] is None else f"{row['measured']:g}"
    spread = " ".join(f"{q:g}" for q in row["quartiles"])
    lines = [f"{row['name']:48} {row['target']:52} {measured:>9}  [{spread}]  {verdict(row)}"]
    lines += [f"    {key}: {row[key]}" for key in ("error", "roofline", "detail") if row.get(key)]
    return "\n".join(lines)


def kept(path: Path) -> list[Row]:
    """Rows of an earlier run; ``--only`` keeps those of the other families."""
    try:
        found = json.loads(path.read_text())["rows"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [r for r in found if line_of(r.get("name", "")) is not None]


def bench(
    only: Sequence[str], run: Callable[[str], list[Row]] = in_process, results: Path | None = None
) -> int:
    """Measure all families, or ``only`` some and keep the other rows of ``results``; the exit code.

    ``results`` is by default the one of ``RESULTS`` for this processor.
    """
    results = results or RESULTS[avx512()]
    families = list(dict.fromkeys(line.family for line in LINES))
    unknown = [name for name in only if name not in families]
    if unknown:
        print(
            f"There is no benchmark {', '.join(unknown)}; there are {', '.join(families)}.",
            file=sys.stderr,
        )
        return 2
    chosen = [f for f in families if not only or f in only]
    old = [r for r in kept(results) if LINES[line_of(r["name"]) or 0].family not in chosen]
    rows = in_order([*old, *collect(chosen, run)])
    data = {"hardware": hardware(), "rows": rows, "missing": missing(rows)}
    results.write_text(json.dumps(data, indent=1) + "\n")
    print()
    print(f"{'benchmark':48} {'target':52} {'measured':>9}  [quartiles]  verdict")
    for row in rows:
        print(shown(row).splitlines()[0])
    for name in missing(rows):
        print(f"{name:48} missing")
    print(f"{sum(r['met'] for r in rows)} of {len(rows)} rows met; {hardware()}; {results}")
    if passes(rows):
        return 0
    return 1
