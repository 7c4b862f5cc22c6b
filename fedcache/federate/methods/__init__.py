"""Methods: one file for each. fedcache finds a method because its file is in this folder.

The name of the file is the name of the method with underscores, and its ``METHOD`` is the method. A file is imported
when its method is requested, so the names are known without importing torch.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from fedcache.errors import FedcacheError, UsageError, unknown
from fedcache.plugins import find, offer, plugins

if TYPE_CHECKING:
    from fedcache.federate.engine.method import Method

NAMES = tuple(
    sorted(file.name.replace("_", "-") for file in iter_modules(__path__) if not file.ispkg)
)


def module_of(name: str) -> str:
    """The dotted name of the file that declares a method."""
    return f"{__name__}.{name.replace('-', '_')}"


class MethodTable(MutableMapping[str, "Method"]):
    """The methods by name: those of this folder, imported when first read, and plug-ins, loaded when requested by name.

    Iteration gives the names of this folder only. Installed packages are searched only for a name that is not in this
    folder.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._loaded: dict[str, Method | None] = dict.fromkeys(names)

    def __getitem__(self, name: str) -> Method:
        if name not in self._loaded:
            return plugin_method(name)
        method = self._loaded[name]
        if method is None:
            method = import_module(module_of(name)).METHOD
            self._loaded[name] = method
        return method

    def __setitem__(self, name: str, method: Method) -> None:
        self._loaded[name] = method

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __contains__(self, name: object) -> bool:
        if name in self._loaded:
            return True
        return isinstance(name, str) and find("methods", name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaded)

    def __len__(self) -> int:
        return len(self._loaded)


METHODS = MethodTable(NAMES)
offer("methods", NAMES)


def plugin_method(name: str) -> Method:
    """The method of a plug-in.

    Raises KeyError if no plug-in has the name, and UsageError if it cannot be loaded or is no Method of that name.
    """
    plugin = find("methods", name)
    if plugin is None:
        raise KeyError(name)
    method: Method = plugin.load()
    if getattr(method, "name", None) != name or not callable(getattr(method, "fit", None)):
        if hasattr(method, "fit"):
            found = f"a method called {method.name!r}"
        else:
            found = f"a {type(method).__name__}"
        raise UsageError(
            f"The plug-in method {name!r} of {plugin.origin} is {found}.",
            f"The entry point {name!r} must refer to a fedcache.Method with name={name!r}.",
        )
    return method


def unknown_method(name: str) -> FedcacheError:
    """The error for a name that is no method."""
    known = sorted([*METHODS, *plugins("methods")])
    hint = (
        f"Known: {', '.join(known)}\nA method of yours is known when it is installed:  pip "
        "install -e FOLDER"
    )
    return unknown("method", name, known, hint=hint)


def find_method(name: str) -> Method:
    """The method of that name; exit 2 with "did you mean" when there is none."""
    if name not in METHODS:
        raise unknown_method(name)
    return METHODS[name]


def wants_encoders(method: Method) -> bool:
    """Whether a method runs live encoders. It then takes exactly one backbone, with class texts."""
    return bool({"text tower", "image tower"} & method.needs)
