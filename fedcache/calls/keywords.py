"""Keywords of the Python API: they are checked, and errors name keywords instead of options."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from fedcache.config import ADDRESSES, refuse_remote
from fedcache.errors import FedcacheError, UsageError, unknown
from fedcache.federate.methods import METHODS
from fedcache.plugins import note_named
from fedcache.process import usual_torch_state

PARTITION_KEYWORDS = {
    "scheme": "scheme='dirichlet', clients=10",
    "clients": "scheme='iid', clients=10",
    "alpha": "scheme='dirichlet', alpha=0.1",
    "by": "by='domain'",
}
"""Keywords of ``fc.partition`` that users try in other functions -> an example with the keyword."""

P = ParamSpec("P")
R = TypeVar("R")

# An option, and its value if the next word does not begin with a hyphen. The value may be quoted.
_OPTION = re.compile(
    r"(?<![\w-])--([a-z][a-z-]*[a-z])(?: (?!-)((?:'[^']*'|\"[^\"]*\"|[^\s'\"])+))?"
)
_OPTIONS = re.compile(rf"{_OPTION.pattern}(?: {_OPTION.pattern})*")
_COMMAND = re.compile(r"\bfedcache [a-z]")


def names_checked(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function of the API: a misspelt keyword is refused with "did you mean".

    In errors, keywords replace the options of the command. The caller's torch state does not change results.
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
                raise _unknown_keyword(name, args, given, known)
        bound = signature.bind_partial(*args, **given).arguments
        for name, value in bound.items():
            if name not in ADDRESSES:
                refuse_remote(value, name, remote=name in ("store", "transfer"))
        # The user named the backbones among the arguments, so fedcache may call their code.
        for arguments in (bound, bound.get("options") or {}):
            note_named([arguments.get("backbones"), arguments.get("client_backbones")])
        try:
            with usual_torch_state():
                return function(*args, **given)
        except FedcacheError as error:
            error.message = as_keywords(error.message, is_keyword)
            error.hint = as_keywords(error.hint, is_keyword)
            raise

    return checked


def _unknown_keyword(
    name: str, args: tuple[Any, ...], given: Mapping[str, Any], known: Mapping[str, Any]
) -> FedcacheError:
    """The error of a keyword that a function does not have, with the keyword that is probably meant."""
    names = ", ".join(sorted(known))
    listed = f"Known: {names}"
    if "settings" not in known:
        return unknown("option", name, known, hint=listed)
    settings = {name: given[name]}
    setting = f"settings={settings!r}"
    # The method is the first parameter of ``train``.
    method = given.get("method", next(iter(args), None))
    if (
        isinstance(method, str)
        and method in METHODS
        and name in [h.name for h in METHODS[method].hparams]
    ):
        return UsageError(
            f"{name!r} is not a keyword argument here: it is a hyperparameter of {method}.", setting
        )
    if name in PARTITION_KEYWORDS:
        return UsageError(
            f"{name!r} is not a keyword argument here: it is an argument of a partition.",
            f"parts=fc.partition(store, {PARTITION_KEYWORDS[name]})",
        )
    hint = f"{setting}   for a hyperparameter of the method\n{listed}"
    return unknown("option", name, known, hint=hint)


def as_keywords(text: str, is_keyword: Callable[[str], bool]) -> str:
    """A sentence with options of the command line, rewritten with keywords; commands in it stay as they are.

    >>> as_keywords("Take some out:  --validation 0.2 --fresh", lambda name: True)
    'Take some out:  validation=0.2 fresh=True'
    """
    # Text to type begins and ends at two blanks or at the end of a line.
    parts = re.split(r"(\s{2,}|\n)", text)
    for i, part in enumerate(parts):
        if not _COMMAND.search(part):
            parts[i] = _one_part(part, is_keyword)
    return "".join(parts)


def _one_part(text: str, is_keyword: Callable[[str], bool]) -> str:
    """A part of a sentence with keywords in place of options; options without a keyword stay."""
    only_options = _OPTIONS.fullmatch(text) is not None

    def as_keyword(found: re.Match[str]) -> str:
        option = found[0]
        name = found[1].replace("-", "_")
        value = " ".join(shlex.split(found[2] or ""))
        # Within a sentence only the name of the option is replaced.
        if not only_options:
            if is_keyword(name):
                return option.replace(f"--{found[1]}", name, 1)
            return option
        key, equals, value_of_key = value.partition("=")
        if name == "set" and equals:
            if is_keyword("settings"):
                return f"settings={{{key!r}: {_literal(value_of_key)}}}"
            return option
        if name in ("sweep", "option") and equals:
            if is_keyword(key):
                return f"{key}={_literal(value_of_key)}"
            return option
        if is_keyword(name):
            literal = "True"
            if value:
                literal = _literal(value)
            return f"{name}={literal}"
        return option

    return _OPTION.sub(as_keyword, text)


def _literal(value: str) -> str:
    """A value as a literal of Python; a placeholder in capitals is unchanged."""
    if "," in value:
        items = ", ".join(map(_literal, value.split(",")))
        return f"[{items}]"
    if value.isupper() or re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", value):
        return value
    return repr(value)


def fields_of(config: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """The given keywords that are fields of a configuration, as a section for ``resolve``."""
    return {item.name: given[item.name] for item in fields(config) if item.name in given}
