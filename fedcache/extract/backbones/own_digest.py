"""Digest of a user's module: its tensors, its attributes, and the source files of its code.

The digest of an object in a module covers its class and the state that pickle would keep. The digest of code is the
sha256 of its source files. Some parts have no digest: code without a source file (typed into a notebook), values that a
class takes from the function around it, and objects that cannot be pickled. For these the user gives ``version=``,
which replaces the digests of attributes and code.
"""

from __future__ import annotations

import builtins
import sys
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from fedcache.errors import UsageError
from fedcache.optional import reason
from fedcache.store.files import digest_of, sha256_hex
from fedcache.store.own_code import NoDigestError, ReachedCode

if TYPE_CHECKING:
    from torch import nn

PLAIN = (type(None), bool, int, float, str)
"""Types of attributes whose value itself is part of a module's identity."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks")
"""Attributes of every torch module that hold functions of the user. The digest covers these functions."""

SILENT = ("torch.device", "torch.fx.graph.Graph", "builtins.object")
"""Types that a module's digest skips: they do not affect features, or another attribute has the same content."""


def digest_of_parts(
    name: str, module: nn.Module, transform: Any, version: str | None = None
) -> str:
    """sha256 over a module's tensors (names, dtypes, shapes, bytes), attributes and code, and those of its transform.

    Attributes are plain values, functions, hooks, and objects that can be pickled; code is the source files of its
    classes and the user's files that they import. With a ``version``, sha256 over only the tensors and that version.
    Raises UsageError for a part without a digest; the hint asks for ``version=``.
    """
    tensors = _tensors(name, module)
    if version is not None:
        return digest_of(["version", version, tensors])
    code = ReachedObjects(f"the backbone {name}", module)
    parts: list[Any] = [tensors]
    try:
        for path, part in module.named_modules():
            parts.append([path, code.classes(part), _attributes(part, code)])
        described = None
        if transform is not None:
            described = _described_transform(transform, code)
        parts.append(described)
    except RecursionError as error:
        raise UsageError(
            f"The backbone {name} contains lists or objects that contain each other, so fedcache cannot "
            "compute a digest.",
            _ask_for_version(name),
        ) from error
    except NoDigestError as error:
        raise UsageError(error.message, _ask_for_version(name)) from error
    return digest_of([parts, sorted(code.sources.values())])


def _ask_for_version(name: str) -> str:
    label = name.removeprefix("module:")
    return (
        f"fc.backbone(module, {label!r}, version='1')   identifies the module's code by the version. Change the "
        "version when the code or the content of the module changes. Or move the code to a .py file."
    )


class ReachedObjects(ReachedCode):
    """All code and objects that a module reaches.

    Args:
        owner: for messages, as of ``ReachedCode``.
        module: its parts are described by their paths alone, because the digest covers each part itself.
    """

    def __init__(self, owner: str, module: nn.Module) -> None:
        super().__init__(owner)
        self._paths = {id(part): path for path, part in module.named_modules()}
        # The object is kept with its description: the id of a deleted object can be given to another.
        self._objects: dict[int, tuple[Any, str]] = {}
        self._classes: dict[type, list[Any]] = {}  # class -> its ``_values_around``
        self._within: list[
            int
        ] = []  # ids of the objects that are being described, the outermost first
        self._holder: nn.Module | None = None  # the part of the module whose attribute is described

    def attribute(self, holder: nn.Module, value: Any) -> Any:
        """An attribute of ``holder``, a part of the module, as JSON; different values have different JSON."""
        self._holder = holder
        if _is_silent(value):
            return _type_name(value)
        return self.describe(value)

    def describe(self, value: Any) -> Any:
        """See ``ReachedCode.describe``; NoDigestError also for code without a source file."""
        if id(value) in self._paths:
            return ["part", self._paths[id(value)]]
        if isinstance(value, MethodType) and value.__self__ is self._holder:
            return ["method", self.describe(value.__func__)]
        if isinstance(value, FunctionType):
            self._check_source(value, [value])
        found = super().describe(value)
        around = []
        if isinstance(value, type):
            around = self._values_around(value)
        elif not isinstance(value, PLAIN):
            for kind in type(value).__mro__[:-1]:
                around += self._values_around(kind)
        if around:
            return [found, around]
        return found

    def classes(self, value: Any) -> list[Any]:
        """The classes that an object's type inherits from."""
        return [self.describe(kind) for kind in type(value).__mro__[:-1]]

    def describe_object(self, value: Any) -> Any:
        """A digest of an object's classes and of its pickled state; NoDigestError if it cannot be pickled."""
        if _is_silent(value):
            return _type_name(value)
        # An object that contains itself is described by the number of steps from it to itself.
        if id(value) in self._within:
            return ["again", len(self._within) - self._within.index(id(value))]
        if id(value) in self._objects:
            _, known = self._objects[id(value)]
            return known
        self._within.append(id(value))
        try:
            reduced = value.__reduce_ex__(4)
            if isinstance(reduced, str):
                # One object of a module, known by its name, such as a cached function.
                content = [reduced, self.describe(getattr(value, "__wrapped__", None))]
            else:
                # The function that rebuilds the object, then its arguments, its state and its items.
                make, *state = reduced
                if isinstance(make, FunctionType):
                    content = [f"{make.__module__}.{make.__qualname__}"]
                else:
                    content = [self.describe(make)]
                # Items of a list or a mapping come as iterators.
                plain = [list(part) if isinstance(part, Iterator) else part for part in state]
                content += map(self.describe, plain)
            digest = digest_of([self.classes(value), content])
        except NoDigestError:
            raise
        except Exception as error:  # an object that pickle cannot keep may raise anything
            kind = type(value).__name__
            raise NoDigestError(
                f"{self.owner} contains an object of type {kind}, which cannot be pickled.",
                "Store only numbers, words, tensors and functions; create other objects inside forward.",
            ) from error
        finally:
            self._within.pop()
        described = f"object {digest}"
        self._objects[id(value)] = (value, described)
        return described

    def _values_around(self, kind: type) -> list[Any]:
        """Values that a class takes from the function in which a file defines it; [] for any other class."""
        if kind in self._classes:
            return self._classes[kind]
        # A type of C needs no source, and has no __module__ of its own.
        if not isinstance(vars(kind).get("__module__"), str):
            return []
        self._classes[
            kind
        ] = []  # until it is known, because methods of the class may refer to the class
        functions = [
            value
            for key, value in vars(kind).items()
            if isinstance(value, FunctionType) and not key.startswith("__")
        ]
        self._check_source(kind, functions)
        if self.is_installed(kind) or "<locals>" not in kind.__qualname__:
            return []
        self._note_module(kind.__module__)
        codes = self._codes.get(Path(str(_module_file(kind))), ())
        bodies = [code for code in codes if code.co_qualname == kind.__qualname__]
        takes_values = any(set(body.co_freevars) - {"__class__"} for body in bodies)
        if bodies and not takes_values:
            return []
        found = []
        for key, value in sorted(vars(kind).items()):
            # For a property, a static method or a class method, this is its function; else the value itself.
            inner = getattr(value, "fget", getattr(value, "__func__", value))
            # Functions are described with their closures and defaults. Other special attributes are left out.
            if isinstance(inner, FunctionType) or not key.startswith("__"):
                found.append([key, self.describe(inner)])
        self._classes[kind] = found
        return found

    def is_installed(self, code: FunctionType | type) -> bool:
        """Whether a class or function belongs to Python, to fedcache or to an installed package."""
        name = code.__module__ or "builtins"
        module = sys.modules.get(name) or sys.modules.get(name.partition(".")[0])
        file = getattr(module, "__file__", None)
        if name == "__main__":
            return False
        if file is not None:
            return not self._is_users(Path(file))
        # exec without a __name__ writes into builtins; a module without a spec was not imported.
        return module is not builtins and getattr(module, "__spec__", None) is not None

    def _check_source(self, code: FunctionType | type, functions: list[FunctionType]) -> None:
        """Raise NoDigestError for a class or function of the user without a source file."""
        if self.is_installed(code):
            return
        has_file = all(Path(function.__code__.co_filename).is_file() for function in functions)
        if isinstance(code, type) and _module_file(code) is None:
            has_file = False
        if not has_file:
            raise NoDigestError(
                f"{code.__qualname__} of {self.owner} has no source file, so fedcache cannot compute a digest.",
                "Move this code to a .py file and import it from there.",
            )


def _module_file(kind: type) -> str | None:
    return getattr(sys.modules.get(kind.__module__), "__file__", None)


def _tensors(name: str, module: nn.Module) -> list[list[Any]]:
    """Name, dtype, shape and sha256 of every parameter and buffer, including buffers that are not saved."""
    import torch

    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    made = []
    for key, tensor in sorted(tensors.items()):
        try:
            plain = tensor.detach().cpu().contiguous().reshape(-1)
            raw = b""
            if plain.numel():
                raw = plain.view(torch.uint8).numpy().tobytes()
        except (RuntimeError, TypeError, NotImplementedError) as error:
            # A sparse or quantised tensor, or one of a lazy module without content.
            raise UsageError(
                f"{key} of {name} is a {tensor.layout} tensor whose bytes cannot be read: {reason(error)}",
                "Give a module with dense tensors. If the module is lazy, call it once before.",
            ) from error
        made.append([key, str(tensor.dtype), list(tensor.shape), sha256_hex(raw)])
    return made


def _attributes(module: nn.Module, code: ReachedObjects) -> list[Any]:
    """Attributes of a module in addition to its tensors and parts."""
    from torch import nn

    # The attributes that torch.compile adds belong to this process. The compiled module is described as a part.
    if _type_name(module) == "torch._dynamo.eval_frame.OptimizedModule":
        return []
    of_torch = set(vars(nn.Module())) - set(HOOKS)
    described = []
    for key, value in sorted(vars(module).items()):
        if key not in of_torch:
            # The keys of hooks come from a counter of the process, so they are left out.
            if key in HOOKS and isinstance(value, Mapping):
                value = list(value.values())
            described.append([key, code.attribute(module, value)])
    return described


def _described_transform(transform: Any, code: ReachedObjects) -> Any:
    """A transform as JSON; transforms with different results have different JSON."""
    parts = getattr(transform, "transforms", None)
    if isinstance(parts, list | tuple):  # Compose, of torchvision and others
        return [code.classes(transform), *(_described_transform(part, code) for part in parts)]
    if isinstance(transform, FunctionType | MethodType | BuiltinFunctionType | partial):
        return code.describe(transform)
    attributes = getattr(transform, "__dict__", {})
    if code.is_installed(type(transform)):
        # The repr of torchvision's and timm's transforms contains all of their numbers, but no functions.
        text = repr(transform)
        has_functions = any(
            callable(value) and not isinstance(value, type) for value in attributes.values()
        )
        if " at 0x" not in text and not has_functions:
            return [code.classes(transform), text]
    return code.describe(transform)


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _is_silent(value: Any) -> bool:
    """Whether a value does not affect features: one of ``SILENT``, or a list or mapping of such values."""
    if isinstance(value, list | tuple | set | Mapping) and value:
        items: Any = value
        if isinstance(value, Mapping):
            items = value.values()
        known = [item for item in items if item is not None]
        return bool(known) and all(map(_is_silent, known))
    return isinstance(value, weakref.ref) or _type_name(value) in SILENT
