"""Description of all code that an object of the user reaches. Its digest identifies the object.

The object is a method, which reaches its functions, or a torch module, which reaches its class
(``extract.backbones.own_digest``). The description covers the user's files that define these, the user's files that
those files import, and the values bound to functions (closures, defaults, ``partial``). So a changed line or a changed
number is another identity. Files of Python, of installed packages and of fedcache appear by name only, because their
versions are recorded elsewhere.
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
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from fedcache.errors import UsageError
from fedcache.store.files import sha256_hex

ROOT = Path(__file__).resolve().parents[1]

INSTALLED = tuple(
    Path(sysconfig.get_path(kind)).resolve()
    for kind in ("stdlib", "platstdlib", "purelib", "platlib")
)


class NoDigestError(UsageError):
    """An object is of a type whose digest is not known."""


class ReachedCode:
    """All code that an object reaches.

    Args:
        owner: the object, for messages: ``the method 'mine'``.
        packages: folders or files of a plug-in, which count as the user's although they are installed.

    Attributes:
        sources: the user's file -> its name and sha256; the folder of the file is not part of the identity.
        methods: files of fedcache's own methods that are used.
    """

    def __init__(self, owner: str, packages: tuple[Path, ...] = ()) -> None:
        self.owner = owner
        self.packages = packages
        self.sources: dict[Path, str] = {}
        self.methods: set[str] = set()
        # File of ``sources`` -> all code objects that its current content compiles to.
        self._codes: dict[Path, set[CodeType]] = {}
        # Ids of the functions whose bound values are being described.
        self._open: set[int] = set()

    def describe(self, value: Any) -> Any:
        """A value as JSON; different values have different JSON. Files of its functions are added to ``sources``."""
        import torch

        # Values that fit no case, such as sparse tensors, are described after the ``match``.
        match value:
            case None | str() | bool() | int() | float() | torch.dtype() | np.dtype():
                return repr(value)
            case tuple() | list():
                return [type(value).__name__, *map(self.describe, value)]
            case set() | frozenset():
                return ["set", *sorted(map(str, map(self.describe, value)))]
            case Mapping():
                return {"mapping": [[self.describe(k), self.describe(v)] for k, v in value.items()]}
            case torch.Tensor() if value.layout is torch.strided and not value.is_quantized:
                plain = value.detach().cpu().contiguous()
                in_numpy = (torch.float16, torch.float32, torch.float64)
                if plain.dtype.is_floating_point and plain.dtype not in in_numpy:
                    # bfloat16 and floats of one byte, which numpy does not have: their bytes are read as integers.
                    raw = plain.reshape(-1).view(torch.uint8).numpy()
                    return [str(plain.dtype), list(plain.shape), sha256_hex(raw.tobytes())]
                return self.describe(plain.numpy())
            case np.ndarray() if value.dtype.kind in "fiubc":
                digest = sha256_hex(np.ascontiguousarray(value).tobytes())
                return [str(value.dtype), list(value.shape), digest]
            case partial():
                return ["partial", *map(self.describe, (value.func, value.args, value.keywords))]
            case FunctionType():
                return self._function(value)
            case MethodType():
                described = ["method", self.describe(value.__func__)]
                # A class method. Any other method also depends on the object to which it is bound.
                if isinstance(value.__self__, type):
                    return described
                return [*described, self.describe(value.__self__)]
            case ModuleType():
                self._note_module(value.__name__)
                # The dot at the beginning keeps it apart from a class or function of the same name.
                return f".{value.__name__}"
            # A method of an object of C, such as ``[1, 2].index``. For a function of C, ``__self__`` is its module or
            # None.
            case BuiltinFunctionType() if not isinstance(value.__self__, type | ModuleType | None):
                return ["method", value.__name__, self.describe(value.__self__)]
            case BuiltinFunctionType() | type():
                self._note_module(value.__module__)
                return f"{value.__module__}.{value.__qualname__}"
        if is_dataclass(value):
            self._note_module(type(value).__module__)
            return {f.name: self.describe(getattr(value, f.name)) for f in fields(value)}
        return self.describe_object(value)

    def describe_object(self, value: Any) -> Any:
        """Any other object as JSON. Raises NoDigestError here; for torch modules, a subclass describes the object."""
        kind = type(value).__name__
        raise NoDigestError(
            f"fedcache cannot compute a digest of an object of type {kind} in {self.owner}.",
            "From outside the function, use only numbers, strings, tensors and functions. Create all other objects "
            "inside the function.",
        )

    def _function(self, function: FunctionType) -> Any:
        """Name and line of a function, and the values bound to it."""
        code = function.__code__
        path = Path(code.co_filename)
        is_own = self._is_users(path)
        # The same file of the user may be imported under different names, so its module is not part of the name.
        name = f"{function.__qualname__}:{code.co_firstlineno}"
        if not is_own:
            self._note_module(function.__module__)
            name = f"{function.__module__}.{name}"
        # A function that is bound to itself, such as a recursive inner function: describing it again would never end.
        if id(function) in self._open:
            return name
        if is_own:
            self._note_source(path, function.__module__)
            # The digest is that of the file, so the file must contain the code that runs.
            if code not in self._codes[path]:
                raise UsageError(
                    f"The loaded code of {function.__qualname__} in {self.owner} is not the code that {path} "
                    "contains now.",
                    "Import the file again or restart Python, so that the running code matches the file.",
                )
        self._open.add(id(function))
        # The values bound to the function.
        closure = [cell.cell_contents for cell in function.__closure__ or ()]
        bound = (closure, function.__defaults__, function.__kwdefaults__)
        described = [name, *map(self.describe, bound)]
        self._open.discard(id(function))
        return described

    def _is_users(self, path: Path) -> bool:
        """Whether a file is neither Python's, nor of an installed package, nor fedcache's.

        Files of the plug-in that the object belongs to count as the user's.
        """
        place = path.resolve()
        if any(place.is_relative_to(folder) for folder in self.packages):
            return True
        if any(place.is_relative_to(folder) for folder in (ROOT, *INSTALLED)):
            return False
        return "site-packages" not in place.parts

    def _note_source(self, path: Path, module: str) -> None:
        """Add a file of the user, and the user's files that it imports, to ``sources``."""
        if path in self.sources:
            return
        try:
            raw = path.read_bytes()
            tree = ast.parse(raw.decode())
            # As an import compiles the file, so that its code objects equal those of the imported functions.
            compiled = SourceFileLoader(module, str(path)).source_to_code(raw, str(path))
        except (OSError, ValueError, SyntaxError) as error:
            raise NoDigestError(
                f"The source of {self.owner} cannot be read ({path}).",
                "Move the code to a .py file and import the file.",
            ) from error
        self.sources[path] = f"{path.name} {hashlib.sha256(raw).hexdigest()}"
        self._codes[path] = set(_nested_codes(compiled))
        # The package that relative imports of the file start from.
        package = getattr(sys.modules.get(module), "__package__", None) or ""
        for name in _imported_names(tree, package):
            self._note_module(name)

    def _note_module(self, name: str) -> None:
        """Add a module to ``methods`` if it is one of fedcache's, or to ``sources`` if it is a file of the user."""
        file = getattr(sys.modules.get(name), "__file__", None)
        # The name is not that of a module from a file: for example, it is the name of a function.
        if file is None:
            return
        path = Path(file)
        is_in_methods = path.resolve().parent == ROOT / "federate" / "methods"
        if is_in_methods and path.stem != "__init__":
            self.methods.add(path.stem)
        elif path.suffix == ".py" and self._is_users(path):
            self._note_source(path, name)


def _nested_codes(code: CodeType) -> Iterator[CodeType]:
    """A code object, and those of the functions and classes in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested_codes(constant)


def _imported_names(tree: ast.Module, package: str) -> Iterator[str]:
    """Dotted names of the modules that a file may import, and of the names imported from them.

    An imported name may be a module too: ``from package import module``.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            dotted = "." * node.level + (node.module or "")
            # A relative import outside of any package cannot be resolved; running it would fail too.
            try:
                origin = dotted
                if node.level:
                    origin = resolve_name(dotted, package)
            except ImportError:
                continue
            yield origin
            yield from (f"{origin}.{alias.name}" for alias in node.names)
