"""A method of the user's own, handed over as an object: which code determines its results.

Its functions come from files that fedcache has never seen. Their digest covers those files, the user's files they
import, and whatever was bound to the functions (closures, defaults, ``partial``), so that a changed line or a changed
number is another run, as it is for the methods that come along.
"""

from __future__ import annotations

import ast
import hashlib
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from importlib.machinery import SourceFileLoader
from importlib.util import resolve_name
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

import fedcache
from fedcache.errors import Exit, FedcacheError
from fedcache.federate.engine.method import Method
from fedcache.federate.methods import METHODS
from fedcache.runs.identity import code_digest
from fedcache.store.files import digest_of, sha256_hex

PACKAGE = Path(fedcache.__file__).resolve().parent
INSTALLED = tuple(Path(sysconfig.get_path(k)).resolve() for k in ("stdlib", "platstdlib", "purelib", "platlib"))
HOW = (
    "Write the method into a .py file of its own and import it: the digest of that file is part of the run's identity."
)


def code_of(method: Method) -> str:
    """The code digest of a method's runs: ``code_digest`` of one that comes along, ``own_digest`` of the user's."""
    return code_digest(method.name) if METHODS.get(method.name) is method else own_digest(method)


def own_digest(method: Method) -> str:
    """sha256 over fedcache's part, the files the method is written in, and everything bound to its functions.

    Raises:
        FedcacheError: USAGE, when its name is taken, its source cannot be read or is not what runs, or something is
            bound to it that has no digest.
    """
    if method.name in METHODS:
        raise FedcacheError(
            Exit.USAGE,
            f"This Method is called {method.name!r} and is not the {method.name} that comes with fedcache.",
            f"Give it a name of its own: dataclasses.replace(method, name='my-{method.name}')",
        )
    found = _Walk(method.name)
    facts = found.value(method)
    base = sorted(code_digest(stem) for stem in found.stems or {""})
    return digest_of([base, sorted(found.sources.values()), facts])


class _Walk:
    """Everything that is reached from a method.

    Attributes:
        sources: the user's file -> its name and sha256; where it lies is no part of what it says.
        stems: of fedcache's own method files that are used.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.sources: dict[Path, str] = {}
        self.stems: set[str] = set()
        self._codes: dict[Path, set[CodeType]] = {}
        self._inside: set[int] = set()

    def value(self, value: Any) -> Any:
        """A value as JSON that differs where the value does."""
        if value is None or isinstance(value, str | bool | int | float):
            return repr(value)
        if isinstance(value, tuple | list):
            return [type(value).__name__, *map(self.value, value)]
        if isinstance(value, set | frozenset):
            return ["set", *sorted(map(str, map(self.value, value)))]
        if isinstance(value, Mapping):
            return {"mapping": [[self.value(k), self.value(v)] for k, v in value.items()]}
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().numpy()
        if isinstance(value, np.ndarray) and value.dtype.kind in "fiubc":
            return [str(value.dtype), list(value.shape), sha256_hex(np.ascontiguousarray(value).tobytes())]
        if isinstance(value, torch.dtype | np.dtype):
            return repr(value)
        if isinstance(value, partial):
            return ["partial", self.value(value.func), self.value(value.args), self.value(value.keywords)]
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, BuiltinFunctionType | ModuleType | type):
            self._module(value.__name__ if isinstance(value, ModuleType) else value.__module__)
            return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"
        if is_dataclass(value):
            self._module(type(value).__module__)
            return {f.name: self.value(getattr(value, f.name)) for f in fields(value)}
        raise FedcacheError(
            Exit.USAGE,
            f"The method {self.name!r} holds an object of type {type(value).__name__}, whose digest is not known.",
            "Bind numbers, words, tensors and functions to a method's functions, and make other objects inside them.",
        )

    def _function(self, function: FunctionType) -> Any:
        code = function.__code__
        name = f"{function.__module__}.{function.__qualname__}:{code.co_firstlineno}"
        if id(function) in self._inside:  # one that is bound to itself
            return name
        self._inside.add(id(function))
        path = Path(code.co_filename)
        if _own(path):
            self._source(path, function.__module__)
            if code not in self._codes[path]:
                raise FedcacheError(
                    Exit.USAGE,
                    f"{function.__qualname__} of the method {self.name!r} is not what {path} says now.",
                    "Import the file again, or start Python anew: what runs must be what is digested.",
                )
            name = f"{function.__qualname__}:{code.co_firstlineno}"  # a module is called as it is imported
        else:
            self._module(function.__module__)
        bound = [cell.cell_contents for cell in function.__closure__ or ()]
        made = [name, self.value(bound), self.value(function.__defaults__), self.value(function.__kwdefaults__)]
        self._inside.discard(id(function))
        return made

    def _source(self, path: Path, module: str) -> None:
        """Note a file of the user's, and those it imports."""
        if path in self.sources:
            return
        try:
            raw = path.read_bytes()
            text = raw.decode()
            whole = SourceFileLoader(module, str(path)).source_to_code(raw, str(path))
        except (OSError, ValueError, SyntaxError) as error:
            raise FedcacheError(
                Exit.USAGE, f"The source of the method {self.name!r} cannot be read ({path}).", HOW
            ) from error
        self.sources[path] = f"{path.name} {hashlib.sha256(raw).hexdigest()}"
        self._codes[path] = set(_codes(whole))
        package = getattr(sys.modules.get(module), "__package__", None) or ""
        for name in _imported(text, package):
            self._module(name)

    def _module(self, name: str) -> None:
        """Note where a module comes from: one of fedcache's methods, a file of the user's, or neither."""
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None:
            return
        path = Path(file)
        if path.resolve().parent == PACKAGE / "federate" / "methods" and path.stem != "__init__":
            self.stems.add(path.stem)
        elif _own(path) and path.suffix == ".py":
            self._source(path, name)


def _own(path: Path) -> bool:
    """Whether a file is neither fedcache's nor installed."""
    place = path.resolve()
    return not any(place.is_relative_to(p) for p in (PACKAGE, *INSTALLED)) and "site-packages" not in place.parts


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _imported(text: str, package: str) -> Iterator[str]:
    """Dotted names that a file may import, modules and what is taken from them."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            dots = "." * node.level + (node.module or "")
            try:
                whole = resolve_name(dots, package) if node.level else dots
            except ImportError:
                continue
            yield whole
            yield from (f"{whole}.{alias.name}" for alias in node.names)
