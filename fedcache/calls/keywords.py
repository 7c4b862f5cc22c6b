"""Keywords of the Python API: their names checked, those that are options of a command, and errors in their words."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from fedcache.config import ADDRESSES, refuse_remote
from fedcache.errors import FedcacheError, unknown
from fedcache.store.own_names import note_named
from fedcache.torch_state import usual_torch_state

P = ParamSpec("P")
R = TypeVar("R")


_OPTION = re.compile(
    r"(?<![\w-])--([a-z][a-z-]*[a-z])(?: (?!-)((?:'[^']*'|\"[^\"]*\"|[^\s'\"])+))?"
)
_OPTIONS = re.compile(rf"{_OPTION.pattern}(?: {_OPTION.pattern})*")
_COMMAND = re.compile(r"\bfedcache [a-z]")


def names_checked(function: Callable[P, R]) -> Callable[P, R]:
    """Refuse a misspelt keyword with "did you mean".

    Errors name keywords where those of the command name its options. The caller's torch state changes no result.
    """
    signature = inspect.signature(function)
    known = signature.parameters
    any_keyword = any(p.kind is p.VAR_KEYWORD for p in known.values())

    def is_keyword(name: str) -> bool:
        return any_keyword or name in known

    @wraps(function)
    def checked(*args: P.args, **given: P.kwargs) -> R:
        for name in given:
            if not is_keyword(name):
                listed = f"Known: {', '.join(sorted(known))}"
                hint = f"settings={{{name!r}: {given[name]!r}}}   for a hyperparameter of the method\n{listed}"
                raise unknown("option", name, known, hint=hint if "settings" in known else listed)
        for name, value in signature.bind_partial(*args, **given).arguments.items():
            if name not in ADDRESSES:
                refuse_remote(value, name)
        try:
            with usual_torch_state():
                return function(*args, **given)
        except FedcacheError as error:
            error.message, error.hint = (
                as_keywords(text, is_keyword) for text in (error.message, error.hint)
            )
            raise

    return checked


def as_keywords(text: str, is_keyword: Callable[[str], bool]) -> str:
    """A sentence about options of the command line as one about keywords; commands in it stay as they are.

    >>> as_keywords("Take some out:  --validation 0.2 --fresh", lambda name: True)
    'Take some out:  validation=0.2 fresh=True'
    """
    # Two blanks and the end of a line are where what is to be typed begins or ends.
    parts = re.split(r"(\s{2,}|\n)", text)
    return "".join(part if _COMMAND.search(part) else _one_part(part, is_keyword) for part in parts)


def _one_part(text: str, is_keyword: Callable[[str], bool]) -> str:
    typed = _OPTIONS.fullmatch(text) is not None

    def written(found: re.Match[str]) -> str:
        name = found[1].replace("-", "_")
        value = " ".join(shlex.split(found[2] or ""))
        key, equals, of = value.partition("=")
        if not typed:  # within a sentence the name alone
            if is_keyword(name):
                return found[0].replace(f"--{found[1]}", name, 1)
            return found[0]
        if name == "set" and equals:
            if is_keyword("settings"):
                return f"settings={{{key!r}: {_literal(of)}}}"
            return found[0]
        if name in ("sweep", "option") and equals:
            if is_keyword(key):
                return f"{key}={_literal(of)}"
            return found[0]
        if is_keyword(name):
            return f"{name}={_literal(value) if value else True}"
        return found[0]

    return _OPTION.sub(written, text)


def _literal(value: str) -> str:
    """A value as Python writes it; a word in capitals stands for one and is left."""
    if "," in value:
        return f"[{', '.join(map(_literal, value.split(',')))}]"
    if value.isupper() or re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", value):
        return value
    return repr(value)


def fields_of(config: type, given: Mapping[str, Any], *, strict: bool = False) -> dict[str, Any]:
    """Those of some keywords that are fields of a configuration and were given, as its values.

    The backbones among them are backbones that the user named.

    Args:
        config: the dataclass.
        given: keywords.
        strict: whether others are refused.

    Raises:
        UsageError, for another keyword under ``strict``.
    """
    known: Mapping[str, Any] = config.__dataclass_fields__  # type: ignore[attr-defined]
    note_named([given.get("backbones"), given.get("client_backbones")])
    if strict and (wrong := [name for name in given if name not in known]):
        raise unknown("option", wrong[0], known)
    made = {
        name: given[name]
        for name in known
        if name not in ("method", "store", "seeds", "set") and name in given
    }
    # A template holds commas, so a text is one value; lists of names may be written with commas.
    made["text"] = (made["text"],) if isinstance(made.get("text"), str) else made.get("text")
    made = {
        k: str(v) if isinstance(v, Path) else tuple(v) if isinstance(v, list) else v
        for k, v in made.items()
    }
    return {k: v for k, v in made.items() if v is not None}
