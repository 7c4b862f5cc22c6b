"""What determines a result, and its digest: the name of a run's directory.

A stored result is returned again only while nothing that determines it has changed. Part of that is the code itself.
Its digest is taken from the syntax trees, so comments, docstrings, formatting and the place of a file are free to
change, and every expression that could change a figure is not.

The functions of a user's own method come from files that fedcache has never seen. Their digest covers those files, the
user's files they import, and whatever was bound to the functions (closures, defaults, ``partial``), so that a changed
line or a changed number is another run, as it is for the methods that come along.
"""

from __future__ import annotations

import ast
import hashlib
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache, partial
from importlib.machinery import SourceFileLoader
from importlib.util import resolve_name
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from fedcache.errors import UsageError
from fedcache.federate.methods import METHODS
from fedcache.store.files import digest_of, digest_of_files, sha256_hex

if TYPE_CHECKING:
    from fedcache.federate.engine.method import Method

ROOT = Path(__file__).resolve().parents[1]

DETERMINING = (
    "heads/**",
    "federate/engine/**",
    "federate/execution/**",
    "federate/partition/**",
    "federate/trust/**",
    "federate/methods/common/**",
    "runs/features.py",
    "runs/partitions.py",
    "runs/results.py",
    "runs/row_sources.py",
    "runs/store_choice.py",
    "store/chunks.py",
    "store/reader.py",
    "store/samples.py",
    "extract/batches.py",
    "extract/images.py",
    "extract/backbones/encoder.py",
    "extract/backbones/clip_towers.py",
)
"""Files under fedcache/ that determine the figures of every method: the reader of features, the partition, training,
evaluation, and the decoding of images. Of the methods' own files only those that a method uses are added."""


@dataclass(frozen=True)
class Identity:
    """What determines a result."""

    # method, preset, every hyperparameter, rounds, participation, seeds, execution, dtype, ... resolved
    config: Mapping[str, Any]
    features: Sequence[str]  # recipe digests in the order they are concatenated, and the text features' digest
    dataset: str  # content digest
    partitions: Sequence[str]  # digest per seed
    code: str  # ``code_digest``

    @property
    def digest(self) -> str:
        """sha256 over all of it."""
        return digest_of(asdict(self))


@cache
def code_digest(method: str) -> str:
    """sha256 over the code that determines the results of a method.

    Other methods' files are left out, so that adding one does not make every stored result old. "" stands for what all
    methods share.
    """
    return digest_of_code(ROOT, method)


def digest_of_code(root: Path, method: str) -> str:
    """``code_digest`` of the package whose folder is ``root``."""
    files = {path for pattern in DETERMINING for path in root.glob(pattern.replace("/**", "/**/*.py"))}
    files |= _with_imports(root / "federate" / "methods", method.replace("-", "_"))
    return digest_of_files(files)


def _with_imports(folder: Path, name: str) -> set[Path]:
    """A method's file and the method files it imports, directly or through others."""
    seen: set[Path] = set()
    todo = [name]
    while todo:
        path = folder / f"{todo.pop()}.py"
        if path in seen or not path.exists():
            continue
        seen.add(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedcache.federate.methods"):
                place = (node.module or "").removeprefix("fedcache.federate.methods").strip(".")
                todo += [alias.name for alias in node.names] if not place else [place]
    return seen


INSTALLED = tuple(Path(sysconfig.get_path(k)).resolve() for k in ("stdlib", "platstdlib", "purelib", "platlib"))


def code_of(method: Method) -> str:
    """The code digest of a method's runs: ``code_digest`` of one that comes along, ``own_digest`` of the user's."""
    return code_digest(method.name) if METHODS.get(method.name) is method else own_digest(method)


def own_digest(method: Method) -> str:
    """sha256 over fedcache's part, the files the method is written in, and everything bound to its functions.

    Raises UsageError, when its name is taken, its source cannot be read or is not what runs, or something is bound to
    it that has no digest.
    """
    if method.name in METHODS:
        raise UsageError(
            f"This Method is called {method.name!r} and is not the {method.name} that comes with fedcache.",
            f"Give it a name of its own: dataclasses.replace(method, name='my-{method.name}')",
        )
    code = _ReachedCode(method.name)
    description = code.describe(method)
    base = sorted(code_digest(name) for name in code.methods or {""})
    return digest_of([base, sorted(code.sources.values()), description])


class _ReachedCode:
    """Everything that is reached from a method.

    Attributes:
        sources: the user's file -> its name and sha256; where it lies is no part of what it says.
        methods: files of fedcache's own methods that are used.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.sources: dict[Path, str] = {}
        self.methods: set[str] = set()
        self._codes: dict[Path, set[CodeType]] = {}
        self._open: set[int] = set()

    def describe(self, value: Any) -> Any:
        """A value as JSON that differs where the value does; the files of its functions are noted."""
        import torch

        match value:
            case None | str() | bool() | int() | float() | torch.dtype() | np.dtype():
                return repr(value)
            case tuple() | list():
                return [type(value).__name__, *map(self.describe, value)]
            case set() | frozenset():
                return ["set", *sorted(map(str, map(self.describe, value)))]
            case Mapping():
                return {"mapping": [[self.describe(k), self.describe(v)] for k, v in value.items()]}
            case torch.Tensor():
                return self.describe(value.detach().cpu().numpy())
            case np.ndarray() if value.dtype.kind in "fiubc":
                return [str(value.dtype), list(value.shape), sha256_hex(np.ascontiguousarray(value).tobytes())]
            case partial():
                return ["partial", *map(self.describe, (value.func, value.args, value.keywords))]
            case FunctionType():
                return self._function(value)
            case ModuleType():
                self._note_module(value.__name__)
                return f".{value.__name__}"
            case BuiltinFunctionType() | type():
                self._note_module(value.__module__)
                return f"{value.__module__}.{value.__qualname__}"
        if is_dataclass(value):
            self._note_module(type(value).__module__)
            return {f.name: self.describe(getattr(value, f.name)) for f in fields(value)}
        raise UsageError(
            f"The method {self.name!r} holds an object of type {type(value).__name__}, whose digest is not known.",
            "Bind numbers, words, tensors and functions to a method's functions, and make other objects inside them.",
        )

    def _function(self, function: FunctionType) -> Any:
        """Name and line of a function, and what is bound to it."""
        code, path = function.__code__, Path(function.__code__.co_filename)
        name = f"{function.__qualname__}:{code.co_firstlineno}"  # of the user's, whose module may be called anything
        if not _is_users(path):
            self._note_module(function.__module__)
            name = f"{function.__module__}.{name}"
        if id(function) in self._open:  # one that is bound to itself
            return name
        if _is_users(path):
            self._note_source(path, function.__module__)
            if code not in self._codes[path]:
                raise UsageError(
                    f"{function.__qualname__} of the method {self.name!r} is not what {path} says now.",
                    "Import the file again, or start Python anew: what runs must be what is digested.",
                )
        self._open.add(id(function))
        bound = [cell.cell_contents for cell in function.__closure__ or ()]
        described = [name, *map(self.describe, (bound, function.__defaults__, function.__kwdefaults__))]
        self._open.discard(id(function))
        return described

    def _note_source(self, path: Path, module: str) -> None:
        """Note a file of the user's, and those it imports."""
        if path in self.sources:
            return
        try:
            raw = path.read_bytes()
            tree = ast.parse(raw.decode())
            compiled = SourceFileLoader(module, str(path)).source_to_code(raw, str(path))
        except (OSError, ValueError, SyntaxError) as error:
            raise UsageError(
                f"The source of the method {self.name!r} cannot be read ({path}).",
                "Write the method into a .py file of its own and import it: the digest of that file is part of the "
                "run's identity.",
            ) from error
        self.sources[path] = f"{path.name} {hashlib.sha256(raw).hexdigest()}"
        self._codes[path] = set(_nested_codes(compiled))
        package = getattr(sys.modules.get(module), "__package__", None) or ""
        for name in _imported_names(tree, package):
            self._note_module(name)

    def _note_module(self, name: str) -> None:
        """Note where a module comes from: one of fedcache's methods, a file of the user's, or neither."""
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None:
            return
        path = Path(file)
        if path.resolve().parent == ROOT / "federate" / "methods" and path.stem != "__init__":
            self.methods.add(path.stem)
        elif path.suffix == ".py" and _is_users(path):
            self._note_source(path, name)


def _is_users(path: Path) -> bool:
    place = path.resolve()
    return not any(place.is_relative_to(p) for p in (ROOT, *INSTALLED)) and "site-packages" not in place.parts


def _nested_codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested_codes(constant)


def _imported_names(tree: ast.Module, package: str) -> Iterator[str]:
    """Dotted names that a file may import, modules and what is taken from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            dotted = "." * node.level + (node.module or "")
            try:
                origin = resolve_name(dotted, package) if node.level else dotted
            except ImportError:
                continue
            yield origin
            yield from (f"{origin}.{alias.name}" for alias in node.names)
