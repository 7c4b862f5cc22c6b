"""The layout of fedcache in numbers: layers, import cycles, imports inside functions, size and density.

    python tools/house.py            # every fault, and the figures
    python tools/house.py --only runs
    python tools/house.py --files    # how many files four commands run functions of; takes a minute

Size is counted in code tokens, without comments, docstrings and layout: no formatter and no packing changes it. An
f-string is one token in Python 3.11 and several from 3.12 on, so the limits hold for 3.11.

A module may import from its own folder and from folders of lower layers. Imports inside functions and under
``TYPE_CHECKING`` are counted like all others. An import inside a function is allowed for one reason only: to keep torch
out of start-up. ``tests/project/test_house.py`` asserts what is printed here.
"""

from __future__ import annotations

import argparse
import ast
import graphlib
import io
import json
import os
import subprocess
import sys
import tempfile
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

LAYERS = (
    ("cli", "__main__"),
    ("commands",),
    ("api", "__init__"),
    ("calls",),
    ("reproduce", "ui"),
    ("report",),
    ("federate/engines",),
    ("grids",),
    ("runs",),
    ("models", "testing"),
    ("federate", "extract"),
    ("store",),
    ("tables",),
    (
        "heads",
        "config",
        "option_info",
        "progress",
        "errors",
        "notebooks",
        "optional",
        "parsing",
        "plugins",
        "process",
        "torch_state",
        "visible_text",
    ),
)
"""From top to bottom; names on one line do not import each other."""

SIDE_BY_SIDE = {("federate", "extract"), ("extract", "federate")}
MOST_PARAMETERS = 12


@dataclass(frozen=True)
class Import:
    """One import of a fedcache module.

    Attributes:
        source: dotted name of the importing module.
        target: of the imported one.
        line: in the source.
        kind: module | function | typing.
    """

    source: str
    target: str
    line: int
    kind: str


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Dotted name -> file, of every module of the package."""
    found = {}
    for path in sorted((root / "fedcache").rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def imports(known: dict[str, Path]) -> list[Import]:
    """Every import of a fedcache module by another."""
    found = []
    for name, path in known.items():
        for node, kind in _walk(ast.parse(path.read_text(encoding="utf-8")), "module"):
            for target in _targets(node, known):
                if target != name:
                    found.append(Import(name, target, node.lineno, kind))
    return found


def _walk(node: ast.AST, kind: str) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    for child in ast.iter_child_nodes(node):
        inner = kind
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inner = "function"
        elif isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING":
            inner = "typing"
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, inner
        else:
            yield from _walk(child, inner)


def _targets(node: ast.Import | ast.ImportFrom, known: dict[str, Path]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (a.name for a in node.names if a.name in known)
    elif node.module in known:
        for alias in node.names:
            whole = f"{node.module}.{alias.name}"
            yield whole if whole in known else str(node.module)


def folder_of(name: str) -> str:
    """The folder of a module, as ``LAYERS`` spells it."""
    parts = name.split(".")[1:] or ["__init__"]
    if parts[:2] == ["federate", "engines"]:
        return "/".join(parts[:2])
    return parts[0]


def level(name: str) -> int:
    """Number of a module's layer, 0 at the top."""
    here = folder_of(name)
    for number, names in enumerate(LAYERS):
        if here in names:
            return number
    raise SystemExit(f"{name} is in a folder that LAYERS does not name")


def against_layers(found: Sequence[Import]) -> list[str]:
    """Imports from a higher layer, or between two folders of ``SIDE_BY_SIDE``."""
    wrong = []
    for i in found:
        up = level(i.target) < level(i.source)
        beside = (folder_of(i.source), folder_of(i.target)) in SIDE_BY_SIDE
        # the package itself holds no code that runs on import
        if (up or beside) and i.target != "fedcache":
            wrong.append(f"{i.source}:{i.line} imports {i.target} ({i.kind})")
    return wrong


def circles(found: Sequence[Import]) -> list[list[str]]:
    """One cycle of imports, if there are any: each module imports the one after it."""
    edges = defaultdict(set)
    for i in found:
        if i.target != "fedcache":
            edges[i.source].add(i.target)
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        return [error.args[1][::-1]]
    return []


def sizes(known: dict[str, Path]) -> dict[str, list[str]]:
    """Parameter lists that are too long, and class names that are defined twice."""
    parameters = []
    classes = defaultdict(list)
    for name, path in known.items():
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(name)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                many = len(node.args.args) + len(node.args.kwonlyargs) + len(node.args.posonlyargs)
                if many > MOST_PARAMETERS and name != "fedcache.api":
                    parameters.append(f"{name}.{node.name} has {many} parameters")
    twice = [f"{n} in {', '.join(w)}" for n, w in sorted(classes.items()) if len(w) > 1]
    return {"parameters": parameters, "class": twice}


METHODS = ("federate", "methods")
"""Folders of the package and the tests with one file for each method, which no limit counts."""

TOKENS = {"fedcache": 634_600, "tests": 438_600, "tools": 80_601}
"""Most code tokens of the package and of the tests, each without methods, and of tools with benchmarks.

A limit goes down when code goes, and up only with a feature that users asked for: parts and join, published stores,
sounds and layers of language models, extraction on several GPUs (30,400 tokens of the package), the prior of clients
and ridges that methods choose (4,000), the lint of words in tools (1,100), the help on one page, answers to guessed
command lines, and stores that are named and chosen for a folder (5,000); class texts for photographs, centred
features, a prior in training, predictions and exports, and one table for several settings (9,100); prediction sets
with a coverage, stages of classes, clients that are forgotten, and a comparison of methods with equal knowledge that
takes over other results (7,200); long-tailed partitions, damaged stores and models that are not passed over, and what
an attack on extraction found (1,100); models that adapt to the rows that they classify, and new classes of methods
with class texts (4,700, and the tests of both); federations of sites with missing classes or sites, and grids whose
methods share one partition (1,900); the results on photographs (2,000 of tools); and once for about 4,000
statements that were made from dense ones (3,000). A new method and its test need no change here: each is a file of
its own. Folders of the package have no limits of their own, because a concept may move to its own folder.
"""

DENSITY = {
    "tokens a statement": 11.1,
    "conditional expressions": 0.3,
    "tuple assignments": 0.1,
    "f-strings with logic": 4.6,
}
"""The densest that the package may be; the last three per 1,000 statements."""

COMMENTS = 2.0
"""Comment lines in percent of the package's lines with code or a comment, at least."""

FILES_RUN = {"extract": 45, "train": 70, "second train": 78, "compare": 33, "predict": 48}
"""Most files of the package whose functions a command runs."""

LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
LOGIC = 8
"""Tokens inside the braces of an f-string from which on it counts as one that holds logic."""


@dataclass
class Mass:
    """Counts of some Python files."""

    tokens: int = 0
    statements: int = 0
    conditional: int = 0  # conditional expressions
    tuples: int = 0  # assignments of several values to several names
    strings: int = 0  # f-strings that hold logic
    comments: int = 0  # lines that are a comment
    lines: int = 0  # lines with code

    def density(self) -> dict[str, float]:
        """Tokens a statement, three kinds of dense code per 1,000 statements, and comment lines in percent."""
        thousands = max(self.statements, 1) / 1000
        return {
            "tokens a statement": self.tokens / max(self.statements, 1),
            "conditional expressions": self.conditional / thousands,
            "tuple assignments": self.tuples / thousands,
            "f-strings with logic": self.strings / thousands,
            "comment lines": 100 * self.comments / max(self.lines + self.comments, 1),
        }


def mass(files: Iterable[Path]) -> Mass:
    """The counts of Python files."""
    total = Mass()
    for path in files:
        text = path.read_text(encoding="utf-8")
        _count_tokens(text, total)
        for node in ast.walk(ast.parse(text)):
            total.conditional += isinstance(node, ast.IfExp)
            total.strings += isinstance(node, ast.JoinedStr) and _logic(node) >= LOGIC
            total.tuples += (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Tuple)
                and isinstance(node.targets[0], ast.Tuple)
            )
    return total


def _count_tokens(text: str, total: Mass) -> None:
    with_code = set()
    statement = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            total.comments += token.line.lstrip().startswith("#")
        elif token.type == tokenize.NEWLINE:
            if statement > 1:  # a docstring is a statement of one token
                total.tokens += statement
                total.statements += 1
            statement = 0
        elif token.type not in LAYOUT:
            statement += 1
            with_code.add(token.start[0])
    total.lines += len(with_code)


def _logic(string: ast.JoinedStr) -> int:
    """Tokens of the expressions in an f-string."""
    count = 0
    for part in string.values:
        if isinstance(part, ast.FormattedValue):
            found = tokenize.generate_tokens(io.StringIO(ast.unparse(part.value)).readline)
            count += sum(token.type not in LAYOUT for token in found)
    return count


def folders(root: Path = ROOT) -> dict[str, list[Path]]:
    """The parts of the package, tests, tools and benchmarks -> their Python files."""
    found = defaultdict(list)
    for top in ("fedcache", "tests", "tools", "benchmarks"):
        for path in sorted((root / top).rglob("*.py")):
            parts = path.relative_to(root).parts
            inside = top == "fedcache" and len(parts) > 2
            found["/".join(parts[:2]) if inside else top].append(path)
    return found


def grouped_tokens() -> dict[str, int]:
    """Code tokens of the groups that ``TOKENS`` limits."""
    found = dict.fromkeys(TOKENS, 0)
    for folder, files in folders().items():
        group = folder.split("/")[0]
        if group == "benchmarks":
            group = "tools"
        limited = [file for file in files if file.parent.parts[-2:] != METHODS]
        found[group] += mass(limited).tokens
    return found


TRACED = """
import inspect, json, runpy, sys, threading
import torch  # whose own functions would each be looked at
out, root, *words = sys.argv[1:]
files = set()

def called(frame, event, _):
    # Bodies of modules and classes, which an import runs, are not optimised code; comprehensions are no functions.
    code = frame.f_code
    if event == "call" and code.co_flags & inspect.CO_OPTIMIZED and code.co_name[0] != "<":
        files.add(code.co_filename)

threading.setprofile(called)
sys.setprofile(called)
sys.argv = ["fedcache", *words]
try:
    runpy.run_module("fedcache", run_name="__main__")
except SystemExit as end:
    status = end.code or 0
finally:
    sys.setprofile(None)
with open(out, "w") as file:
    json.dump([f for f in files if f.startswith(root)], file)
sys.exit(status)
"""


def files_run() -> dict[str, int]:
    """How many files of the package each command runs functions of, on 200 small images."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        env = {
            **os.environ,
            "FEDCACHE_HOME": folder,
            "PYTHONPATH": str(ROOT),
            "FEDCACHE_OFFLINE": "1",
        }
        store = ("--store", str(Path(folder) / "digits.zarr"))
        data = ("--dataset", "digits", "--limit", "200", "--backbones", "random-projection")
        train = ("train", *store, "--rounds", "2", "--method")
        words = {
            "extract": ("extract", *data, *store),
            "train": (*train, "fedavg"),
            "second train": (*train, "fedprox"),  # which is compared with the first
            "compare": ("compare",),
            "predict": ("predict", "method:fedavg", *store),
        }
        for command, options in words.items():
            out = Path(folder) / f"{command}.json"
            traced = [sys.executable, "-c", TRACED, str(out), str(ROOT / "fedcache"), *options]
            subprocess.run(traced, env=env, check=True, capture_output=True, cwd=folder)
            found[command] = len(json.loads(out.read_text(encoding="utf-8")))
    return found


def main() -> None:
    """Print the faults of a folder, or of all, and the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", default="", help="folder whose faults are printed; the others are left out"
    )
    parser.add_argument("--files", action="store_true", help="count the files that commands run")
    arguments = parser.parse_args()
    if arguments.files:
        for command, count in files_run().items():
            print(f"{command}: functions of {count} files, at most {FILES_RUN[command]}")
        return
    chosen = arguments.only.replace("/", ".")
    known = modules()
    found = imports(known)
    inside = [i for i in found if i.kind == "function"]
    mine = f"fedcache.{chosen}"
    for title, faults in (
        ("against the layers", against_layers(found)),
        ("circle", [" <-> ".join(c) for c in circles(found)]),
        ("inside a function", [f"{i.source}:{i.line} imports {i.target}" for i in inside]),
        *sizes(known).items(),
    ):
        for fault in faults:
            if mine in fault:
                print(f"{title}: {fault}")
    for folder, files in folders().items():
        print(f"{folder}: {mass(files).tokens:,} tokens")
    for group, tokens in grouped_tokens().items():
        print(f"{group} without methods: {tokens:,} tokens, at most {TOKENS[group]:,}")
    package = mass(known.values())
    print(f"package: {package.tokens:,} tokens in {len(known)} files")
    for what, figure in package.density().items():
        print(f"package: {figure:.1f} {what}")
    print(
        f"{len(against_layers(found))} imports against the layers, {len(circles(found))} import cycles, "
        f"{len(inside)} imports inside functions"
    )


if __name__ == "__main__":
    main()
