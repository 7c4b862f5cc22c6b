"""The layout of fedcache in numbers: layers, circles, imports inside functions, and sizes.

    python tools/house.py            # every fault, and the figures
    python tools/house.py --floor runs

A module may import from its own floor and from floors below it. Imports inside functions and under ``TYPE_CHECKING``
are counted like all others. An import inside a function is allowed for one reason only: to keep torch out of start-up.
``tests/project/test_house.py`` asserts what is printed here.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
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
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
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


def floor(name: str) -> str:
    """The floor a module stands on, as ``LAYERS`` spells it."""
    parts = name.split(".")[1:] or ["__init__"]
    return "/".join(parts[:2]) if parts[:2] == ["federate", "engines"] else parts[0]


def level(name: str) -> int:
    """Number of a module's layer, 0 at the top."""
    here = floor(name)
    for number, names in enumerate(LAYERS):
        if here in names:
            return number
    raise SystemExit(f"{name} stands on a floor that LAYERS does not name")


def against_layers(found: Sequence[Import]) -> list[str]:
    """Imports that go up, or to a floor beside."""
    wrong = []
    for i in found:
        up = level(i.target) < level(i.source)
        beside = (floor(i.source), floor(i.target)) in SIDE_BY_SIDE
        if (
            up or beside
        ) and i.target != "fedcache":  # the package itself holds no code that runs on import
            wrong.append(f"{i.source}:{i.line} imports {i.target} ({i.kind})")
    return wrong


def circles(found: Sequence[Import]) -> list[list[str]]:
    """Groups of modules that reach each other (Tarjan's strongly connected components)."""
    edges: dict[str, set[str]] = defaultdict(set)
    for i in found:
        if i.target != "fedcache":
            edges[i.source].add(i.target)
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    made: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(edges[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = []
            while not group or group[-1] != name:
                group.append(stack.pop())
            if len(group) > 1:
                made.append(sorted(group))

    sys.setrecursionlimit(10_000)
    for name in sorted(edges):
        if name not in index:
            visit(name)
    return made


def sizes(known: dict[str, Path]) -> dict[str, list[str]]:
    """Parameter lists that are too long, and class names that are defined twice."""
    found: dict[str, list[str]] = {"parameters": [], "class": []}
    classes: dict[str, list[str]] = defaultdict(list)
    for name, path in known.items():
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(name)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                many = len(node.args.args) + len(node.args.kwonlyargs) + len(node.args.posonlyargs)
                if many > MOST_PARAMETERS and name not in ("fedcache.api",):
                    found["parameters"].append(f"{name}.{node.name} has {many} parameters")
    found["class"] = [f"{n} in {', '.join(w)}" for n, w in sorted(classes.items()) if len(w) > 1]
    return found


def main() -> None:
    """Print the faults of a floor, or of all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--floor", default="", help="only faults of modules whose name begins with fedcache.FLOOR"
    )
    chosen = parser.parse_args().floor.replace("/", ".")
    known = modules()
    found = imports(known)
    inside = [i for i in found if i.kind == "function"]
    lines = sum(p.read_text(encoding="utf-8").count("\n") for p in known.values())
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
    print(
        f"{lines:,} lines, {len(known)} files; {len(against_layers(found))} imports against the layers, "
        f"{len(circles(found))} circles, {len(inside)} imports inside functions"
    )


if __name__ == "__main__":
    main()
