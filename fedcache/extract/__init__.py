"""Run frozen backbones over images and write their features into a store.

``fedcache.extract`` is this package and also the function of the Python API: importing a submodule binds the package's
name in ``fedcache``, over whatever the function was called. So the package itself can be called.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """A package that is called as ``fedcache.api.functions.extract``."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        """See ``fedcache.api.functions.extract``."""
        from fedcache.api.functions import extract

        return extract(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
