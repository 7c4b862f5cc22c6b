"""Change the package at random places, one at a time, and see whether a test notices.

    OMP_NUM_THREADS=1 python tools/mutate.py --count 40 [--seed N] [--paths GLOB ...] [--report FILE]

A line that can be changed without a failing test is a promise that no test holds. Places are drawn by lines, so a long
module gets more than a short one. Each change is made in a copy of the repository (never in this checkout), and only
tests that execute the changed line run there, until the first failure: first as many as fit into ``--budget`` seconds,
and where none of these fails the others, within ``MORE`` seconds. The lines that each test executes are measured once
per test file, and kept in a cache as long as neither the test file nor any module it runs has changed. A change of a
line that no test executes survives too.

A survivor is looked at by a person: it gets a test, or, where the change makes no difference that a promise speaks of,
an entry in ``tools/mutants-equivalent.toml`` with the reason; such changes are not drawn again. Prints the share that
was noticed, and exits 1 if it is below ``LEAST``. ``--at FILE:LINE`` tries all changes of a line instead.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import gzip
import hashlib
import json
import os
import queue
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent
sys.path.insert(0, str(TOOLS))

from mutants import Mutant, mutants_of  # noqa: E402
from mutate_watch import DATA, SOURCE, TESTS  # noqa: E402

OPTIONAL = ("*/engines/*", "*/flower/*", "*/commands/flower.py", "*/ray_*.py")
"""Modules of optional engines: their tests start real clusters, which ``MARKS`` leaves out."""
MORE = 300.0
"""Seconds of further tests for a mutant that survives its first ones."""
LEAST = 0.85
"""Share of mutants that must be noticed."""
MARKS = "not slow and not durability and not browser and not engines"
LEFT_OUT = (
    ".git",
    ".venv*",
    "__pycache__",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    ".hypothesis",
    "site",
)
PAGES = "pages_are_those_of_the_code"
"""Part of the name of the test that compares pages made from tables of the code, which no test reads line by line."""
NOTHING_RAN = 5
NO_SUCH_TEST = 4
"""Exit codes of pytest."""


@dataclass
class Verdict:
    """What became of a mutant: ``noticed`` by ``by``, or not, after ``ran`` of the ``executing`` tests."""

    mutant: Mutant
    noticed: bool
    by: str
    ran: Sequence[str]
    executing: int
    seconds: float


class Copies:
    """Copies of the repository, each lent to one thread at a time."""

    def __init__(self, root: Path, folder: Path, count: int) -> None:
        self._free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        self._running: set[subprocess.Popen[str]] = set()
        self._ended = False
        self.memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // (count + 1)
        self.watching = folder / "watching"
        self.watching.mkdir()
        (self.watching / "sitecustomize.py").write_text(
            "import mutate_watch\nmutate_watch.begin()\n"
        )
        for i in range(count):
            tree = folder / str(i) / root.name
            shutil.copytree(root, tree, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
            # Compiled files that are checked by content: two versions of a module may be written within one second.
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "compileall",
                    "-q",
                    "--invalidation-mode",
                    "checked-hash",
                    ".",
                ],
                cwd=tree,
                check=False,
                capture_output=True,
            )
            self._free.put(tree)
        self.first = folder / "0" / root.name

    @contextmanager
    def one(self) -> Iterator[Path]:
        """A copy that no other thread has."""
        tree = self._free.get()
        try:
            yield tree
        finally:
            self._free.put(tree)

    def end(self, *_: object) -> None:
        """End all that runs, as a handler of signals: what was started has a session of its own and would not end."""
        self._ended = True
        for run in list(self._running):
            _end_group(run)
        raise KeyboardInterrupt

    def pytest(
        self, tree: Path, words: Sequence[str], limit: float, **env: str
    ) -> tuple[int | None, str]:
        """Exit code (None when ``limit`` seconds were over) and what pytest said."""
        path = os.pathsep.join([str(tree), *([str(self.watching), str(TOOLS)] if env else [])])
        own = {
            "PYTHONPATH": path,
            "PYTHONDONTWRITEBYTECODE": "1",
            "COLUMNS": "250",
            "OMP_NUM_THREADS": "1",
            **env,
        }
        temporary = tree.parent / "tmp"
        always = [
            "-q",
            "-p",
            "no:cacheprovider",
            f"--basetemp={temporary}",
            "-rfE",
            "--tb=no",
            "--no-header",
        ]
        if self._ended:
            raise KeyboardInterrupt
        run = subprocess.Popen(
            [sys.executable, "-m", "pytest", *always, *words],
            cwd=tree,
            env={**os.environ, **own},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (self.memory,) * 2),
        )
        self._running.add(run)
        try:
            output, _ = run.communicate(timeout=limit)
            return run.returncode, output
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            _end_group(run)
            self._running.discard(run)
            run.communicate()
            shutil.rmtree(temporary, ignore_errors=True)


def _end_group(run: subprocess.Popen[str]) -> None:
    """End what a run has started, also what outlived it."""
    with suppress(ProcessLookupError):
        os.killpg(run.pid, signal.SIGKILL)


# What executes what ---------------------------------------------------------------------------------------------------


@dataclass
class TestFile:
    """What the tests of one file execute.

    Attributes:
        tests: id and seconds of each test that passes, in the order of the bits below.
        lines: per module and line a number whose bit i says that test i executes it.
    """

    tests: list[tuple[str, float]]
    lines: dict[str, dict[int, int]]


@dataclass
class Map:
    """What all tests execute."""

    files: list[TestFile]

    def executing(self, file: str, lines: Collection[int]) -> dict[int, int]:
        """Per number of a test file the bits of its tests that execute any of ``lines``."""
        hits = {}
        for i, test_file in enumerate(self.files):
            known = test_file.lines.get(file, {})
            bits = 0
            for line in lines:
                bits |= known.get(line, 0)
            if bits:
                hits[i] = bits
        return hits

    def in_turn(self, hits: dict[int, int], file: str) -> list[tuple[str, float]]:
        """The tests of ``hits``, the most promising first.

        Test files take turns, each with its quickest test; first comes the file that runs ``file`` the most, measured
        by the share of all the lines that it executes.
        """

        def share(i: int) -> float:
            lines = self.files[i].lines
            return -len(lines.get(file, ())) / sum(map(len, lines.values()))

        rows = []
        for place, i in enumerate(sorted(hits, key=share)):
            mine = sorted(
                (t for bit, t in enumerate(self.files[i].tests) if hits[i] >> bit & 1),
                key=lambda t: t[1],
            )
            rows += [(turn, place, test) for turn, test in enumerate(mine)]
        return [test for _, _, test in sorted(rows)]


def measure(copies: Copies, package: str, cache: Path, jobs: int) -> Map:
    """What every test file executes: from the cache, or by running it."""
    root = copies.first
    files = sorted(
        p.relative_to(root).as_posix()
        for p in (root / "tests").rglob("*.py")
        if p.name.startswith("test_") or p.name.endswith("_test.py")
    )
    helpers = [
        p
        for p in sorted((root / "tests").rglob("*.py"))
        if p.relative_to(root).as_posix() not in files
    ]
    common = hashlib.sha256(repr((sys.version, MARKS, package)).encode())
    for path in helpers:
        common.update(path.read_bytes())
    cache.mkdir(parents=True, exist_ok=True)

    def one(file: str) -> TestFile:
        own = hashlib.sha256(common.digest() + (root / file).read_bytes()).hexdigest()
        entry = cache / f"{file.replace('/', '--')}.json.gz"
        if entry.is_file():
            stored = json.loads(gzip.decompress(entry.read_bytes()))
            if stored["own"] == own and all(
                _digest(root / f) == d for f, d in stored["modules"].items()
            ):
                return _read(stored)
        begun = time.monotonic()
        with copies.one() as tree:
            tests, lines, wrong = _watched(copies, tree, file, package)
        print(
            f"measured {file}: {len(tests)} tests, {time.monotonic() - begun:.0f} s{wrong}",
            flush=True,
        )
        stored = {
            "own": own,
            "modules": {f: _digest(root / f) for f in sorted(lines)},
            "tests": tests,
            "lines": {
                f: {str(n): hex(bits) for n, bits in by_line.items()}
                for f, by_line in lines.items()
            },
        }
        if not wrong:
            partial = entry.with_suffix(f".{os.getpid()}")
            partial.write_bytes(gzip.compress(json.dumps(stored).encode()))
            partial.replace(entry)
        return _read(stored)

    with ThreadPoolExecutor(jobs) as pool:
        return Map(list(pool.map(one, files)))


def _digest(path: Path) -> str:
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return ""


def _read(stored: dict[str, Any]) -> TestFile:
    lines = {
        f: {int(n): int(bits, 16) for n, bits in by_line.items()}
        for f, by_line in stored["lines"].items()
    }
    return TestFile([(t, s) for t, s in stored["tests"]], lines)


def _watched(
    copies: Copies, tree: Path, file: str, package: str
) -> tuple[list[tuple[str, float]], dict[str, dict[int, int]], str]:
    """Tests with their seconds, lines with the bits of the tests, and what went wrong."""
    from coverage import CoverageData
    from coverage.exceptions import DataError

    with tempfile.TemporaryDirectory(dir=tree.parent) as folder:
        listing = Path(folder) / "tests.json"
        env = {DATA: f"{folder}/data", SOURCE: str(tree / package), TESTS: str(listing)}
        status, output = copies.pytest(tree, ["-p", "mutate_watch", "-m", MARKS, file], 3600, **env)
        if not listing.is_file():
            sys.exit(f"{file} could not be measured: {output.strip()[-500:]}")
        known = json.loads(listing.read_text(encoding="utf-8"))
        good = {name: e for name, e in known.items() if e["passed"] and e["ran"]}
        bit = {name: 1 << i for i, name in enumerate(good)}
        # also by shared fixtures: context -> bits of the tests
        uses: dict[str, int] = defaultdict(int)
        for name, entry in good.items():
            for context in (name, *entry["fixtures"]):
                uses[context] |= bit[name]
        lines: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for path in sorted(Path(folder).glob("data.*")):
            data = CoverageData(str(path))
            try:
                data.read()
            except DataError:  # of a process that was killed while it wrote
                continue
            for module in data.measured_files():
                name = Path(module).relative_to(tree).as_posix()
                # A module that was not even imported has no lines here.
                for line, contexts in data.contexts_by_lineno(module).items():
                    for context in contexts:
                        # "test|" of processes that a test starts
                        lines[name][line] |= uses[context] | uses[context.rstrip("|")]
    failed = [name for name, e in known.items() if not e["passed"]]
    wrong = ""
    if status is None:
        wrong = "; took too long"
    elif failed:
        wrong = f"; {len(failed)} fail unchanged, the first {failed[0]}"
    return [(n, e["seconds"]) for n, e in good.items()], lines, wrong


# One mutant -----------------------------------------------------------------------------------------------------------


class Readers:
    """Who reads a name: lines of functions of the package, functions of the tests, and other names made from it."""

    def __init__(self, package: dict[str, str], tests: dict[str, str]) -> None:
        self.lines: dict[str, set[tuple[str, int]]] = defaultdict(set)
        self.tests: dict[str, set[str]] = defaultdict(set)
        self.made_of: dict[str, set[str]] = defaultdict(set)
        self.at_import: dict[str, set[int]] = {}
        for file, source in (*package.items(), *tests.items()):
            inside: set[int] = set()
            for statement in ast.parse(source).body:
                for node in ast.walk(statement):
                    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                        body = node.body if isinstance(node.body, list) else [node.body]
                        inside.update(range(body[0].lineno, (body[-1].end_lineno or 0) + 1))
                read = [
                    (node.lineno, name)
                    for node in ast.walk(statement)
                    if (name := _name_read(node))
                ]
                for line, name in read:
                    if file in package and line in inside:
                        self.lines[name].add((file, line))
                    if file in tests and isinstance(statement, ast.FunctionDef | ast.ClassDef):
                        self.tests[name].add(f"{file}::{statement.name}")
                    elif line not in inside:
                        self.made_of[name].update(_assigned(statement))
            self.at_import[file] = set(range(1, source.count("\n") + 2)) - inside


def _name_read(node: ast.AST) -> str:
    if not isinstance(node, ast.Name | ast.Attribute) or not isinstance(node.ctx, ast.Load):
        return ""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr


def _assigned(node: ast.stmt) -> list[str]:
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [t.id for t in targets if isinstance(t, ast.Name)]


def tests_for(mutant: Mutant, known: Map, readers: Readers) -> list[tuple[str, float]]:
    """The tests that may notice a mutant, the most promising first.

    What runs at import no test executes by itself. It is given, by turns, the tests that execute a line where its name
    is read or, after these, anything else of its module, and the tests that read the name or one made from it.
    """
    if not mutant.names:
        hits = known.executing(mutant.file, range(mutant.line, mutant.end + 1))
        hits = hits or known.executing(mutant.file, range(mutant.first, mutant.stop + 1))
        return known.in_turn(hits, mutant.file)
    names = set(mutant.names)
    for _ in range(2):
        names |= {made for name in names for made in readers.made_of.get(name, ())}
    direct: dict[int, int] = defaultdict(int)
    for name in mutant.names:
        for file, line in readers.lines.get(name, ()):
            for i, bits in known.executing(file, range(line, line + 1)).items():
                direct[i] |= bits
    module = {n for f in known.files for n in f.lines.get(mutant.file, {})} - readers.at_import[
        mutant.file
    ]
    executing = known.in_turn(direct, mutant.file)
    executing += known.in_turn(known.executing(mutant.file, module), mutant.file)
    functions = {function for name in names for function in readers.tests.get(name, ())}
    reading: dict[int, int] = defaultdict(int)
    for i, f in enumerate(known.files):
        for bit, (test, _) in enumerate(f.tests):
            if "::".join(test.partition("[")[0].split("::")[:2]) in functions:
                reading[i] |= 1 << bit
    name = Path(mutant.file).stem
    # of a table, the cases of this module
    own = re.compile(rf"[\[-]({name}|{name.replace('_', '-')})[]-]")
    about = sorted(
        known.in_turn(reading, mutant.file), key=lambda test: own.search(test[0]) is None
    )
    both = zip_longest(executing, about)
    chosen = list(dict.fromkeys(t for pair in both for t in pair if t is not None))
    pages = [t for f in known.files for t in f.tests if PAGES in t[0]]
    # the first five always run
    return chosen[: 5 - len(pages)] + pages + chosen[5 - len(pages) :]


def judge(
    copies: Copies, mutant: Mutant, source: str, tests: Sequence[tuple[str, float]], budget: float
) -> Verdict:
    """Run the tests on the changed copy, as many as fit into ``budget`` seconds (at least five)."""
    begun = time.monotonic()
    chosen = []
    total = 0.0
    for name, seconds in tests:
        if len(chosen) >= 5 and total + seconds > budget:
            continue
        chosen.append(name)
        total += seconds
    if not chosen:
        return Verdict(mutant, False, "", (), 0, 0.0)
    with copies.one() as tree:
        target = tree / mutant.file
        listed = tree.parent / "chosen.txt"
        listed.write_text("\n".join(chosen), encoding="utf-8")
        target.write_text(mutant.apply(source), encoding="utf-8")
        try:
            status, output = copies.pytest(tree, ["-x", f"@{listed}"], 3 * total + 60)
        finally:
            target.write_text(source, encoding="utf-8")
        # The mutant may have taken the tests away, but they must be there without it.
        if status in (NO_SUCH_TEST, NOTHING_RAN):
            unchanged, words = copies.pytest(tree, ["--collect-only", f"@{listed}"], 600)
            if unchanged != 0:
                sys.exit(
                    f"The tests chosen for {mutant.file}:{mutant.line} cannot be collected: {words[-500:]}"
                )
    by = ""
    if status is None:
        by = "time was over"
    elif status != 0:
        failed = re.search(r"^(?:FAILED|ERROR):? (.*)$", output, re.MULTILINE)
        by = failed[1] if failed else " ".join(output.split())[-200:]
    seconds = time.monotonic() - begun
    return Verdict(mutant, status != 0, by, chosen, len(tests), seconds)


# All of them ----------------------------------------------------------------------------------------------------------


def accepted_rows(file: Path) -> list[dict[str, str]]:
    """What a person found to be equivalent: file, where, before, after and why."""
    if file.is_file():
        return list(tomllib.loads(file.read_text(encoding="utf-8")).get("mutant", []))
    return []


def draw(
    sources: dict[str, str],
    equivalent: set[tuple[str, str, str, str]],
    count: int,
    seed: int,
    at: str,
) -> list[Mutant]:
    """``count`` mutants on lines drawn without repeats, or all of the line ``at``."""
    by_line: dict[tuple[str, int], list[Mutant]] = defaultdict(list)
    for file in sorted(sources):
        for mutant in mutants_of(sources[file], file):
            if (mutant.file, mutant.where, mutant.before, mutant.after) not in equivalent:
                by_line[file, mutant.line].append(mutant)
    if at:
        file, _, line = at.rpartition(":")
        return by_line.get((file, int(line)), [])
    order = random.Random(seed)
    lines = sorted(by_line)
    order.shuffle(lines)
    made: list[Mutant] = []
    for line in lines:
        mutant = order.choice(by_line[line])
        if _compiles(mutant.apply(sources[mutant.file])):
            made.append(mutant)
        if len(made) == count:
            break
    return made


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def shown(v: Verdict) -> str:
    """A survivor, for a person."""
    m = v.mutant
    ran = "no test executes it"
    if v.executing:
        ran = f"{len(v.ran)} of the {v.executing} tests that execute it ran"
    names = [f"      {name}" for name in v.ran[:8]]
    if len(v.ran) > 8:
        names.append("      ...")
    place = f"{m.file}:{m.line} in {m.where or 'the module'}"
    return "\n".join([place, f"    - {m.before}", f"    + {m.after}", f"    {ran}", *names])


def table(verdicts: Sequence[Verdict], head: str) -> str:
    """The report."""
    rows = [
        f"| {v.mutant.file}:{v.mutant.line} | `{_cell(v.mutant.before)}` | `{_cell(v.mutant.after)}` |"
        f" {_cell(v.by)[:140] if v.noticed else '**nothing**'} | {len(v.ran)} of {v.executing} | {v.seconds:.0f} |"
        for v in verdicts
    ]
    left = "".join(f"\n```\n{shown(v)}\n```\n" for v in verdicts if not v.noticed)
    lines = [
        "# Mutants",
        "",
        head,
        "",
        "| place | before | after | noticed by | tests chosen | s |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        "## Survivors",
        left or "\nNone.",
    ]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("`", "'")


def sources_in(tree: Path, folder: str) -> dict[str, str]:
    """The texts of the Python files in a folder of ``tree``, by their paths below ``tree``."""
    files = sorted((tree / folder).rglob("*.py"))
    return {file.relative_to(tree).as_posix(): file.read_text("utf-8") for file in files}


def main() -> int:
    """Draw mutants, judge them and print the verdicts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=40, help="how many mutants")
    parser.add_argument(
        "--seed", type=int, default=None, help="of the draw; default: another every time"
    )
    parser.add_argument(
        "--paths",
        nargs="+",
        metavar="GLOB",
        default=[],
        help="modules, as pkg/heads/*; default all",
    )
    parser.add_argument(
        "--at", metavar="FILE:LINE", default="", help="all mutants of this line instead of a draw"
    )
    parser.add_argument("--budget", type=float, default=90, help="seconds of tests per mutant")
    parser.add_argument("--jobs", type=int, default=2, help="copies that work at the same time")
    parser.add_argument("--report", type=Path, help="Markdown file with every mutant")
    parser.add_argument("--root", type=Path, default=TOOLS.parent, help="the repository")
    parser.add_argument("--package", default="fedcache", help="its package")
    parser.add_argument(
        "--cache", type=Path, help="folder for what tests execute; default: the user's cache"
    )
    o = parser.parse_args()
    root = o.root.resolve()
    seed = random.SystemRandom().randrange(10**6) if o.seed is None else o.seed
    at_home = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mutate" / o.package
    )
    listed = accepted_rows(root / "tools" / "mutants-equivalent.toml")
    equivalent = {(r["file"], r["where"], r["before"], r["after"]) for r in listed if r["why"]}
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        copies = Copies(root, Path(folder), o.jobs)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, copies.end)
        tree = copies.first  # all is read from the copy, so the repository may change meanwhile
        sources = sources_in(tree, o.package)
        inside = {
            n: s
            for n, s in sources.items()
            if (not o.paths or any(fnmatch.fnmatch(n, g) for g in o.paths))
            and not any(fnmatch.fnmatch(n, g) for g in OPTIONAL)
        }
        mutants = draw(sources if o.at else inside, equivalent, o.count, seed, o.at)
        if not mutants:
            parser.error("There is nothing to change in these modules.")
        known = measure(copies, o.package, o.cache or at_home, o.jobs)
        readers = Readers(sources, sources_in(tree, "tests"))
        print(f"{len(mutants)} mutants of {len(inside)} modules, seed {seed}", flush=True)

        def one(mutant: Mutant) -> Verdict:
            chosen = tests_for(mutant, known, readers)
            source = sources[mutant.file]
            v = judge(copies, mutant, source, chosen, o.budget)
            if not v.noticed and (left_out := [t for t in chosen if t[0] not in set(v.ran)]):
                again = judge(copies, mutant, source, left_out, MORE)
                v = replace(
                    again,
                    ran=[*v.ran, *again.ran],
                    executing=v.executing,
                    seconds=v.seconds + again.seconds,
                )
            line = f"noticed   {mutant.file}:{mutant.line}  {mutant.after[:70]}  by {v.by[:90]}  {v.seconds:.0f} s"
            print(line if v.noticed else f"SURVIVES  {shown(v)}", flush=True)
            return v

        with ThreadPoolExecutor(o.jobs) as pool:
            verdicts = list(pool.map(one, mutants))
    noticed = sum(v.noticed for v in verdicts)
    share = noticed / len(verdicts)
    mean = sum(v.seconds for v in verdicts) / len(verdicts)
    head = f"{noticed} of {len(verdicts)} mutants were noticed ({share:.0%}), {mean:.0f} s each; seed {seed}."
    print(head)
    if o.report:
        o.report.write_text(table(verdicts, head), encoding="utf-8")
    return int(share < LEAST)


if __name__ == "__main__":
    sys.exit(main())
