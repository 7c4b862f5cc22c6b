"""Objects that a module holds beside tensors and plain values, and classes that no file tells whole, as a digest.

What pickle would keep of an object is what it holds; it is asked for and never written. Of a class that was made inside
a function, or typed where there is no file, the values that its functions read are told beside their bytecode.
"""

from __future__ import annotations

import dis
import sys
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from fedcache.store.files import digest_of, sha256_hex
from fedcache.store.own_code import NoDigestError, ReachedCode, is_users

if TYPE_CHECKING:
    from torch import nn

SILENT = ("torch.device", "torch.fx.graph.Graph", "builtins.object")
"""Types that say nothing of features, or nothing that is not told elsewhere: a graph's code is an attribute too."""

GENERATED = (
    "__init__",
    "__new__",
    "__repr__",
    "__eq__",
    "__lt__",
    "__le__",
    "__gt__",
    "__ge__",
    "__hash__",
    "__setattr__",
    "__delattr__",
)
"""What dataclasses and the like write into a class from its fields."""

HEAP_TYPE = 1 << 9
"""The flag of classes that a ``class`` statement makes."""

NOT_HELD = (
    "__module__",
    "__dict__",
    "__weakref__",
    "__doc__",
    "__qualname__",
    "__annotations__",
    "__orig_bases__",
)
"""What every class has."""


class ReachedObjects(ReachedCode):
    """Everything that is reached from a module, its objects among it.

    Args:
        owner: for messages, as of ``ReachedCode``.
        module: whose parts are known by their paths, and described elsewhere.
    """

    def __init__(self, owner: str, module: nn.Module) -> None:
        super().__init__(owner)
        self._paths = {id(part): path for path, part in module.named_modules()}
        self._objects: dict[
            int, tuple[Any, str]
        ] = {}  # with the object, whose number is free once it is gone
        self._told: dict[type, list[Any]] = {}
        self._within: list[int] = []
        self._holder: nn.Module | None = None

    def attribute(self, holder: nn.Module, value: Any) -> Any:
        """A value that a part of the module holds, as JSON that differs where the value does."""
        self._holder = holder
        if _is_silent(value):
            return _type_name(value)
        return self.describe(value)

    def describe(self, value: Any) -> Any:
        """See ``ReachedCode.describe``; NoDigestError for objects alone that cannot tell what they hold."""
        if id(value) in self._paths:
            return ["part", self._paths[id(value)]]
        if isinstance(value, MethodType) and value.__self__ is self._holder:
            return ["method", self.describe(value.__func__)]
        if isinstance(value, type):
            told = self._told_of(value)
            if told:
                return [super().describe(value), told]
            return super().describe(value)
        if isinstance(value, FunctionType) and _has_no_file(value):
            return self._typed(value)
        found = super().describe(value)
        own = (
            []
            if isinstance(value, str | int | float) or _is_object(found)
            else self._told_of(type(value))
        )
        if own:
            return [found, own]
        return found

    def classes(self, value: Any) -> list[Any]:
        """The classes that an object's type inherits from, and what no file tells of them."""
        found: list[Any] = []
        for kind in type(value).__mro__[:-1]:
            found.append(super().describe(kind))
            found += self._told_of_one(kind)
        return found

    def describe_object(self, value: Any) -> Any:
        """The classes of an object and what pickle would keep of it; NoDigestError where that is nothing."""
        if _is_silent(value):
            return _type_name(value)
        if id(value) in self._within:  # one that holds itself
            return ["again", len(self._within) - self._within.index(id(value))]
        if id(value) in self._objects:
            return self._objects[id(value)][1]
        self._within.append(id(value))
        try:
            kept = value.__reduce_ex__(4)
            if isinstance(kept, str):  # one thing of a module, known by its name
                held: Any = [kept, self.describe(getattr(value, "__wrapped__", None))]
            else:
                make, arguments, *rest = kept
                held = [
                    self._maker(make),
                    *map(self.describe, (tuple(arguments), *map(_listed, rest))),
                ]
            made = "object " + digest_of([self.classes(value), held])
        except NoDigestError:
            raise
        except Exception as error:  # whatever an object raises that cannot be kept
            raise self._unknown(value) from error
        finally:
            self._within.pop()
        self._objects[id(value)] = (value, made)
        return made

    def _maker(self, make: Any) -> Any:
        if isinstance(make, FunctionType):
            return f"{make.__module__}.{make.__qualname__}"
        return self.describe(make)

    def _unknown(self, value: Any) -> NoDigestError:
        return NoDigestError(
            f"{self.owner[0].upper()}{self.owner[1:]} holds an object of type {type(value).__name__}, whose digest is "
            "not known.",
            "Hold numbers, words, tensors, functions and objects that pickle can keep; make others inside forward.",
        )

    def _told_of(self, kind: type) -> list[Any]:
        """What no file tells of a class and those it inherits from."""
        return [told for one in kind.__mro__[:-1] for told in self._told_of_one(one)]

    def _told_of_one(self, kind: type) -> list[Any]:
        """Of one class: functions without a file by their bytecode, and the values that they or it were given."""
        if id(kind) in self._within or not is_users_class(kind):
            return []
        if kind not in self._told:
            self._within.append(id(kind))
            try:
                self._told[kind] = list(self._untold(kind))
            finally:
                self._within.pop()
        return self._told[kind]

    def _untold(self, kind: type) -> Iterator[list[Any]]:
        module = sys.modules.get(kind.__module__)
        nowhere = (
            getattr(module, "__file__", None) is None and getattr(module, "__spec__", None) is None
        )
        functions = dict(_functions_of(kind))
        typed = {
            key
            for key, f in functions.items()
            if nowhere or (key not in GENERATED and _has_no_file(f))
        }
        for key, function in sorted(functions.items()):
            if key in typed:
                yield [key, _bytecode(function.__code__)]
            if key == "__init__":  # what it made is in the object
                continue
            if key in typed:
                yield from ([key, *read] for read in self._read_by(function))
            elif "<locals>" in function.__qualname__ and is_users(_file_of(function)):
                yield from ([key, *given] for given in self._bound_to(function))
        if typed or nowhere or self._body_reads(kind):
            held = {
                k: v
                for k, v in vars(kind).items()
                if k not in functions and not _is_of_every_class(k, v)
            }
            yield from ([key, "held", self.describe(value)] for key, value in sorted(held.items()))

    def _body_reads(self, kind: type) -> bool:
        """Whether a class was made inside a function of a file, from that function's values."""
        if "<locals>" not in kind.__qualname__:
            return False
        super().describe(kind)  # notes its file
        codes = self._codes.get(
            Path(str(getattr(sys.modules.get(kind.__module__), "__file__", ""))), set()
        )
        bodies = [code for code in codes if code.co_qualname == kind.__qualname__]
        return not bodies or any(set(code.co_freevars) - {"__class__"} for code in bodies)

    def _typed(self, function: FunctionType) -> Any:
        """A function without a file, by its bytecode and the values that it reads."""
        if id(function) in self._within:
            return function.__qualname__
        self._within.append(id(function))
        try:
            return [function.__qualname__, _bytecode(function.__code__), self._read_by(function)]
        finally:
            self._within.pop()

    def _read_by(self, function: FunctionType) -> list[Any]:
        """What a function without a file was given, and the globals that it reads."""
        told = self._bound_to(function)
        for name in sorted(set(_globals_read(function.__code__))):
            value = function.__globals__.get(name)
            # A module is known by its name, as what an installed package calls by it.
            if value is None or isinstance(value, ModuleType) or id(value) in self._within:
                continue
            if getattr(value, "__name__", None) == name and not is_users_class(value):
                continue
            told.append(["global", name, self.describe(value)])
        return told

    def _bound_to(self, function: FunctionType) -> list[Any]:
        """Closures and defaults of a function, without the class that ``super()`` needs; nothing where it has none."""
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        closure = [
            [name, self.describe(_held_by(cell))]
            for name, cell in cells.items()
            if name != "__class__"
        ]
        defaults = [function.__defaults__, function.__kwdefaults__]
        return [
            *([["closure", closure]] if closure else []),
            *([["defaults", self.describe(defaults)]] if any(defaults) else []),
        ]


def _bytecode(code: CodeType) -> list[Any]:
    constants = [_bytecode(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return [sha256_hex(code.co_code), list(code.co_names), list(code.co_varnames), constants]


def _globals_read(code: CodeType) -> Iterator[str]:
    """Names of globals that a function or one inside it reads."""
    yield from (
        str(i.argval)
        for i in dis.get_instructions(code)
        if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    )
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_read(constant)


def _functions_of(kind: type) -> Iterator[tuple[str, FunctionType]]:
    """The functions of a class, also inside properties and static methods."""
    for key, value in vars(kind).items():
        parts = (value, *(getattr(value, name, None) for name in ("__func__", "fget", "func")))
        inner = next((part for part in parts if isinstance(part, FunctionType)), None)
        if inner is not None:
            yield key, inner


def _is_of_every_class(key: str, value: Any) -> bool:
    """Whether an entry of a class says nothing of what it does: what all have, slots, and what abc keeps."""
    kept = ("getset_descriptor", "member_descriptor", "_abc_data")
    return (
        key in NOT_HELD
        or key.startswith(("__abstract", "__dataclass", "__match"))
        or type(value).__name__ in kept
    )


def _file_of(function: FunctionType) -> Path:
    return Path(function.__code__.co_filename)


def _has_no_file(function: FunctionType) -> bool:
    """Whether a function of the user's was typed or made where there is no file; generated ones are their package's."""
    if _file_of(function).is_file() or function.__code__.co_filename.startswith("<frozen"):
        return False
    return is_users_class(function)


def is_users_class(kind: Any) -> bool:
    """Whether a class, or a function, is neither Python's, nor of an installed package, nor fedcache's."""
    name = getattr(kind, "__module__", None) or "builtins"
    if name == "builtins":  # what was executed without a name says that too
        return isinstance(kind, FunctionType) or (
            isinstance(kind, type) and bool(kind.__flags__ & HEAP_TYPE)
        )
    module = sys.modules.get(name)
    file = None if name == "__main__" else getattr(module, "__file__", None)
    if file:
        return is_users(Path(file))
    return name == "__main__" or getattr(module, "__spec__", None) is None


def _held_by(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _listed(part: Any) -> Any:
    """Items of a list or a mapping, which pickle is given one by one."""
    if isinstance(part, Iterator):
        return list(part)
    return part


def _is_object(found: Any) -> bool:
    """Whether a description is one of ``describe_object``, which has the classes in it."""
    return isinstance(found, str) and found.startswith("object ")


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _is_silent(value: Any) -> bool:
    """Whether a value says nothing of features."""
    if isinstance(value, list | tuple | set | Mapping) and value:
        inner = list(value.values()) if isinstance(value, Mapping) else list(value)
        return all(one is None or _is_silent(one) for one in inner) and any(
            one is not None for one in inner
        )
    return isinstance(value, weakref.ref) or _type_name(value) in SILENT
