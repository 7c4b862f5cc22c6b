"""Packages that are functions of the Python API too.

``fedcache.extract`` and ``fedcache.report`` are packages and functions: importing a submodule binds the package's name
in ``fedcache``, over whatever the function was called. So these packages can be called.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    _function: str

    def __call__(self, *args: Any, **options: Any) -> Any:
        """The function of that name in the Python API."""
        place, _, name = self._function.rpartition(".")
        return getattr(import_module(place), name)(*args, **options)


def callable_package(package: str, function: str) -> None:
    """Let a call of ``package`` be a call of ``function``, by its full name, imported then."""
    module = sys.modules[package]
    module.__class__ = _CallablePackage
    vars(module)["_function"] = function
