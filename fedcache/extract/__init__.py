"""Run frozen backbones over images and write their features into a store; as a function, ``api.functions.extract``."""

from __future__ import annotations

from fedcache.calling import callable_package

callable_package(__name__, "fedcache.api.extract")
