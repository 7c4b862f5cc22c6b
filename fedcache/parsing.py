"""JSON and TOML of any origin: every input that cannot be read is a ValueError in words.

Also the names of files that are made from words of a user.
"""

from __future__ import annotations

import csv
import io
import json
import re
import tomllib
from collections.abc import Iterable
from typing import Any

from fedcache.errors import UsageError

DEEPEST = 50
"""Tables and arrays inside one another that a TOML may have; no file of fedcache has more than 4."""


SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Names that can be those of a file or folder in a store."""


def slug_of(name: str) -> str:
    """A name as that of a folder."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in name)


def listed(text: str) -> list[str]:
    """The words of a list with commas; a word with a comma in it is written in quotes.

    >>> listed('a, "b,c"')
    ['a', 'b,c']

    Raises UsageError for a line break outside of quotes.
    """
    try:
        words = next(csv.reader([text], skipinitialspace=True), [])
    except csv.Error:
        raise UsageError(
            f"{text!r} is not a list of words with commas between them: it has a line break.",
            "Put a word that has a line break in it into quotes.",
        ) from None
    return [word.strip() for word in words if word.strip()]


def in_a_list(words: Iterable[str]) -> str:
    """The words as ``listed`` takes them.

    >>> in_a_list(["a", "b,c"])
    'a,"b,c"'
    """
    written = io.StringIO()
    csv.writer(written).writerow(words)
    return written.getvalue().removesuffix("\r\n")


def parse_json(text: str | bytes) -> Any:
    """``json.loads`` that knows one error: ValueError, also for nesting that Python cannot follow."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def parse_toml(text: str) -> dict[str, Any]:
    """``tomllib.loads`` that knows one error: ValueError, also for tables nested deeper than ``DEEPEST``.

    Deep tables can be read and then neither shown nor written: ``repr`` and TOML's writer follow them by recursion.

    >>> parse_toml("a.b = 1")
    {'a': {'b': 1}}
    >>> parse_toml("a." * 51 + "b = 1")
    Traceback (most recent call last):
    ValueError: it is nested more than 50 deep
    """
    too_deep = f"it is nested more than {DEEPEST} deep"
    try:
        table = tomllib.loads(text)
    except RecursionError as error:
        raise ValueError(too_deep) from error
    level: list[Any] = [table]
    for _ in range(DEEPEST + 1):
        level = [
            inner for outer in level for inner in _inside(outer) if isinstance(inner, dict | list)
        ]
        if not level:
            return table
    raise ValueError(too_deep)


def _inside(outer: dict[str, Any] | list[Any]) -> Iterable[Any]:
    if isinstance(outer, dict):
        return outer.values()
    return outer


def seeds_text(seeds: Iterable[int]) -> str:
    """Seeds as ``--seeds`` reads them, in rising order.

    >>> seeds_text([5, 0, 2, 1])
    '0-2,5'
    """
    parts: list[list[int]] = []
    for seed in sorted(seeds):
        if parts and parts[-1][-1] == seed - 1:
            parts[-1].append(seed)
        else:
            parts.append([seed])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
