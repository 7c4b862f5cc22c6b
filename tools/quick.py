"""Run the tests that a change reaches, in seconds: the loop of an author, before `make test`.

    python tools/quick.py [FILE ...] [--list]

Without FILE, what differs from the last commit is the change, and where nothing differs, what the branch changed since
it left main. Each changed module of the package gets the test files that are named after it, and then those that import
it, the most specific first: a file that imports three modules says more about one of them than a file that imports
thirty. A changed method also runs the laws over all methods and its golden figures. What is left out is printed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from methods_tried import changed_since, sources_of, where_it_left_main  # noqa: E402

from fedcache.federate.methods import NAMES, module_of  # noqa: E402

FILES = 5
"""Test files for each changed module."""

# Syntax trees of all files would take three seconds.
IMPORT = re.compile(r"^ *(?:from|import) (fedcache[\w.]*)(?: import (\([^)]*\)|.*))?", re.MULTILINE)

OF_EVERY_METHOD = ("tests/contract/test_method_laws.py", "tests/contract/test_golden.py")
"""Tests over all methods; a changed method runs its own cases."""

MARKS = "not slow and not durability and not browser and not engines and not gpu"


def changed_paths() -> list[str]:
    """Paths that differ from the last commit, or else from where the branch left main."""
    return sorted(changed_since("HEAD") or changed_since(where_it_left_main() or "HEAD"))


@cache
def imports_of(file: Path) -> frozenset[str]:
    """Modules of fedcache that a file imports, anywhere in it, and what it imports from them."""
    found = set()
    for module, names in IMPORT.findall(file.read_text(encoding="utf-8")):
        found |= {module, *(f"{module}.{name}" for name in re.findall(r"\w+", names))}
    return frozenset(found)


@cache
def test_files() -> tuple[Path, ...]:
    """All files of tests."""
    return tuple(sorted((ROOT / "tests").rglob("test_*.py")))


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    files = sorted((ROOT / "fedcache").rglob("*.py"))
    return {dotted_name(file.relative_to(ROOT)): file for file in files}


def dotted_name(path: Path) -> str:
    """The name by which a file below the root is imported."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def tests_of(module: Path) -> list[Path]:
    """The test files that reach a module of the package, the most specific first."""
    dotted = dotted_name(module)
    stem = dotted.rpartition(".")[2]
    named = [file for file in test_files() if stem in file.stem.removeprefix("test_")]
    named.sort(key=lambda file: (file.parent.name not in module.parts, len(file.stem)))
    importing = []
    ring = {dotted}
    seen = {dotted}
    while ring and len(importing) < FILES:
        direct = [
            file
            for file in test_files()
            if file not in importing and not ring.isdisjoint(imports_of(file))
        ]
        importing += sorted(direct, key=lambda file: len(imports_of(file)))
        # Nothing imports the module itself, or too little: what imports its users comes next.
        users = {name for name, file in modules().items() if not ring.isdisjoint(imports_of(file))}
        ring = users - seen
        seen |= ring
    found = list(dict.fromkeys([*named[:2], *importing, *named]))
    if found:
        return found
    # It is imported by a name made at run time, as commands are: tests that spell its name, or of its folder.
    spelt = (stem, stem.replace("_", "-"))
    found = [
        file
        for file in test_files()
        if any(word in file.read_text(encoding="utf-8") for word in spelt)
    ]
    return found or [file for file in test_files() if file.parent.name in module.parts]


def files_over_methods() -> list[str]:
    """Test files with a case for each method."""
    return [
        file.relative_to(ROOT).as_posix()
        for file in test_files()
        if file.name == "test_golden.py"
        or "from methods_tried import tried" in file.read_text(encoding="utf-8")
    ]


def choose(changed: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Test files to run, test files that are left out, and changed methods."""
    chosen = [
        path for path in changed if Path(path).name.startswith("test_") and (ROOT / path).is_file()
    ]
    left_out = []
    for path in changed:
        if not (path.startswith("fedcache/") and path.endswith(".py")):
            continue
        found = [file.relative_to(ROOT).as_posix() for file in tests_of(Path(path))]
        chosen += found[:FILES]
        left_out += found[FILES:]
    methods = [name for name in NAMES if not sources_of(module_of(name)).isdisjoint(changed)]
    chosen = list(dict.fromkeys(chosen))
    if methods:
        chosen += [file for file in OF_EVERY_METHOD if file not in chosen]
    return chosen, [file for file in dict.fromkeys(left_out) if file not in chosen], methods


def words_of(chosen: Sequence[str], methods: Sequence[str]) -> list[str]:
    """What pytest is called with."""
    words = [*chosen, "-q", "-x", "-m", MARKS]
    if methods:
        laws = " or ".join(Path(file).stem for file in OF_EVERY_METHOD)
        words += ["-k", f"not ({laws}) or {' or '.join(methods)}"]
    return words


def main() -> int:
    """Choose, run, and say what is left out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="changed files; default: what git says"
    )
    parser.add_argument("--list", action="store_true", help="print the test files and run none")
    options = parser.parse_args()
    if missing := [file for file in options.files if not (ROOT / file).is_file()]:
        parser.error(f"there is no file {', '.join(missing)} below {ROOT}")
    changed = options.files or changed_paths()
    if not changed:
        print("Nothing differs from main. make test runs all tests.")
        return 0
    chosen, left_out, methods = choose(changed)
    print(f"{len(changed)} changed files, {len(chosen)} test files:", *chosen, sep="\n  ")
    if left_out:
        print(f"Left out: {len(left_out)} other test files that reach them. make test runs all.")
    if options.list or not chosen:
        return 0
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FEDCACHE_CHANGED": " ".join(changed)}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *words_of(chosen, methods)],
        cwd=ROOT,
        env=environment,
        check=False,
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
