"""The short and the full draw: how many examples and which of many alike a test tries.

FEDCACHE_CASES=full asks for the full one (``make nightly``); the numbers go into docs/trust.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import pytest
from hypothesis import settings

FULL = os.environ.get("FEDCACHE_CASES") == "full"
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def one_of_each(things: Iterable[T], kind: Callable[[T], Hashable]) -> list[T]:
    """The first of ``things`` of every kind; all of them in the full draw."""
    every = list(things)
    return every if FULL else list({kind(thing): thing for thing in reversed(every)}.values())[::-1]


def examples(few: int, every: int, **words: Any) -> Callable[[F], F]:
    """``@settings`` with ``few`` examples, or ``every`` with FEDCACHE_CASES=full."""
    count = every if FULL else few

    def decorate(test: F) -> F:
        counted: F = pytest.mark.cases(count)(settings(max_examples=count, **words)(test))
        return counted

    return decorate
