"""Digests of Python code by what it does: syntax trees without comments, docstrings, formatting and places of files."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from fedcache.store.files import digest_of

SCHEME = 2
"""Number of the rule by which code is digested; 1 hashed paths and whole files. It is part of every digest."""


def digest_of_files(files: Iterable[Path]) -> str:
    """sha256 over the code of some modules.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     a, b = Path(folder) / "a.py", Path(folder) / "b.py"
    ...     _ = a.write_text("x = 1"), b.write_text("x  =  1  # one")
    ...     digest_of_files([a]) == digest_of_files([b])
    True
    """
    # Sorted digests instead of sorted paths: where a file lies is no part of what it computes.
    return digest_of([SCHEME, sorted(tree_digest(path.read_text(encoding="utf-8")) for path in files)])


@cache
def tree_digest(source: str) -> str:
    """sha256 of a module's syntax tree without comments, docstrings, and the paths of fedcache's own modules.

    >>> tree_digest("x = 1  # one") == tree_digest('x = 1')
    True
    >>> tree_digest("x = 1") == tree_digest("x = 2")
    False
    """
    digest = hashlib.sha256()
    for part in _parts(ast.parse(source)):
        digest.update(part.encode())
    return digest.hexdigest()


def _parts(node: ast.AST) -> Iterator[str]:
    """A syntax tree as words. Empty fields are left out, so that a field that a later Python adds changes nothing."""
    yield f"({type(node).__name__}"
    for name, value in ast.iter_fields(node):
        if value is None or value == [] or name in ("kind", "type_comment", "type_ignores"):
            continue
        if name == "module" and isinstance(node, ast.ImportFrom) and str(value).startswith("fedcache"):
            continue
        yield f" {name}="
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(item, ast.AST):
                yield f"{item!r},"
            elif not _says_nothing(item):
                yield from _parts(item)
    yield ")"


def _says_nothing(node: ast.AST) -> bool:
    """Whether a statement is a docstring, or imports for type checkers alone."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
