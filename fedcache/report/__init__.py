"""Reports: what a result or a partition looks like; as a function, ``report.functions.report``."""

from __future__ import annotations

from fedcache.calling import callable_package

callable_package(__name__, "fedcache.report.function.report")
