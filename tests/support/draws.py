"""How many examples a property test draws, noted for docs/trust.md: more when all cases are asked for."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import settings

FULL = os.environ.get("FEDCACHE_CASES") == "full"
F = TypeVar("F", bound=Callable[..., Any])


def examples(few: int, every: int, **words: Any) -> Callable[[F], F]:
    """``@settings`` with ``few`` examples, or ``every`` with FEDCACHE_CASES=full."""
    count = every if FULL else few

    def decorate(test: F) -> F:
        counted: F = pytest.mark.cases(count)(settings(max_examples=count, deadline=None, **words)(test))
        return counted

    return decorate
