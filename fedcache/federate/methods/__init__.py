"""One paper, one file. A method is found because its file lies here.

The file of a method is its name with underscores, and its ``METHOD`` is the method. A file is imported when its method
is asked for, so the names are known without importing torch.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from fedcache.errors import unknown

if TYPE_CHECKING:
    from fedcache.federate.engine.method import Method

NAMES = tuple(sorted(file.name.replace("_", "-") for file in iter_modules(__path__) if not file.ispkg))


def module_of(name: str) -> str:
    """The dotted name of the file that declares a method."""
    return f"{__name__}.{name.replace('-', '_')}"


class MethodTable(MutableMapping[str, "Method"]):
    """The methods by name. Those of this folder are imported when first read; others may be added for this process."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._loaded: dict[str, Method | None] = dict.fromkeys(names)

    def __getitem__(self, name: str) -> Method:
        method = self._loaded[name]
        if method is None:
            self._loaded[name] = method = import_module(module_of(name)).METHOD
        return method

    def __setitem__(self, name: str, method: Method) -> None:
        self._loaded[name] = method

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._loaded  # the mixin's would import the file to look

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaded)

    def __len__(self) -> int:
        return len(self._loaded)


METHODS = MethodTable(NAMES)


def find_method(name: str) -> Method:
    """The method of that name; exit 2 with "did you mean" when there is none."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]
