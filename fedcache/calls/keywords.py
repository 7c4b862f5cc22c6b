"""Keywords of the Python API: their names checked, and those that are options of a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from fedcache.errors import UsageError, unknown

P = ParamSpec("P")
R = TypeVar("R")


def names_checked(function: Callable[P, R]) -> Callable[P, R]:
    """Refuse a misspelt keyword with "did you mean"; ``lift`` is the former name of ``execution``."""
    known = inspect.signature(function).parameters

    @wraps(function)
    def checked(*args: P.args, **given: P.kwargs) -> R:
        words: dict[str, Any] = given
        if "execution" in known:
            words = current_names(words)
        for name in words:
            if name not in known:
                raise unknown("option", name, known)
        return function(*args, **words)

    return checked


def current_names(words: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords with ``lift`` called ``execution``. Raises UsageError for both."""
    if "lift" in words and "execution" in words:
        raise UsageError("lift and execution are one option, and both are given.", "Leave lift out.")
    return {"execution" if name == "lift" else name: value for name, value in words.items()}


def fields_of(config: type, given: Mapping[str, Any], *, strict: bool = False) -> dict[str, Any]:
    """Those of some keywords that are fields of a configuration and were given, as its values.

    Args:
        config: the dataclass.
        given: keywords.
        strict: whether others are refused.

    Raises:
        UsageError, for another keyword under ``strict``.
    """
    known: Mapping[str, Any] = config.__dataclass_fields__  # type: ignore[attr-defined]
    given = current_names(given)
    if strict and (wrong := [name for name in given if name not in known]):
        raise unknown("option", wrong[0], known)
    made = {name: given[name] for name in known if name not in ("method", "store", "seeds", "set") and name in given}
    # A template holds commas, so a text is one value; lists of names may be written with commas.
    made["text"] = (made["text"],) if isinstance(made.get("text"), str) else made.get("text")
    made = {k: str(v) if isinstance(v, Path) else tuple(v) if isinstance(v, list) else v for k, v in made.items()}
    return {k: v for k, v in made.items() if v is not None}
