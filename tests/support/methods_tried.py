"""Which methods a test over all methods runs in the short draw: some of every kind, and those whose code has changed.

What the engine does wrong, it does wrong for a whole kind of methods. Each kind has a representative, and a method
whose file, or shared code that the file imports, differs from main is tried whole. FEDCACHE_CASES=full tries all.
"""

import ast
import os
import subprocess
from functools import cache
from pathlib import Path

from draws import FULL
from loaded_files import ROOT

from fedcache.federate.methods import NAMES, module_of
from fedcache.store.files import tree_digest

REPRESENTATIVES = frozenset(
    [
        "central",  # no clients
        "clip-zs",  # nothing is trained
        "fed3r",  # sums of second moments, one round
        "fedavg",  # one model, trained in steps
        "fedavg-simclr",  # images, without labels
        "fedncm",  # sums of class means, one round
        "fedproto",  # prototypes
        "fedrep",  # one part of the model is shared
        "flesd-head",  # distillation on a public set
        "fst-cbdg",  # Gaussian text features, several phases
        "promptfl",  # prompts before a text encoder
        "scaffold",  # clients and server keep a state
        "solo",  # nothing is sent
        "tpfl-feat",  # text and image features
    ]
)

COMMITS = 20
"""On main itself, what so many commits changed counts as changed."""


def tried(things):
    """Those of ``things``, names of methods or tuples that begin with one, whose method is tried in this draw."""
    every = list(things)
    if FULL:
        return every
    chosen = REPRESENTATIVES | changed_methods()
    return [thing for thing in every if (thing if isinstance(thing, str) else thing[0]) in chosen]


@cache
def changed_methods():
    """Methods whose code differs from main; all of them where there is no git to ask."""
    changed = changed_files()
    if changed is None:
        return frozenset(NAMES)
    return frozenset(
        name
        for name in NAMES
        if any(code_differs(path) for path in changed & sources_of(module_of(name)))
    )


@cache
def code_differs(path):
    """Whether more than comments and docstrings of a changed module differs; True where FEDCACHE_CHANGED lists it."""
    before = _git("show", f"{base_commit()}:{path}")
    file = ROOT / path
    if "FEDCACHE_CHANGED" in os.environ or before is None or not file.is_file():
        return True
    return tree_digest(before) != tree_digest(file.read_text(encoding="utf-8"))


def changed_files():
    """Paths below the root that differ from main; FEDCACHE_CHANGED lists them instead. None without git."""
    if (given := os.environ.get("FEDCACHE_CHANGED")) is not None:
        return frozenset(given.split())
    base = base_commit()
    return None if base is None else changed_since(base)


def changed_since(commit):
    """Paths below the root that differ from a commit, new files among them."""
    tracked = _git("diff", "--name-only", commit) or ""
    untracked = _git("ls-files", "--others", "--exclude-standard") or ""
    return frozenset([*tracked.splitlines(), *untracked.splitlines()])


def base_commit():
    """The commit that changes are counted from: where this branch left main, and on main ``COMMITS`` commits ago."""
    head = _git("rev-parse", "HEAD")
    base = where_it_left_main()
    if base is not None and base != head:
        return base
    return head and _git("rev-parse", f"HEAD~{COMMITS}")


def where_it_left_main():
    """The last commit that this branch and main share; None without git or without main."""
    return _git("merge-base", "HEAD", "origin/main")


def _git(*words):
    """What git prints; None where it fails or is not installed."""
    try:
        done = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@cache
def sources_of(module):
    """The files that a module of ``fedcache.federate.methods`` is made of: its own, and those there that it imports."""
    path = Path(*module.split("."))
    file = path / "__init__.py" if (ROOT / path).is_dir() else path.with_suffix(".py")
    if not (ROOT / file).is_file():
        return frozenset()
    found = {file.as_posix()}
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(
            "fedcache.federate.methods."
        ):
            continue
        imported = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in imported:
            found |= sources_of(name)
    return frozenset(found)
