"""Settings of methods as a person writes them after ``--set``: ``opt=sgd lr=0.05 bn=false``."""

from __future__ import annotations

import json
from typing import Any


def set_to(line: str) -> dict[str, Any]:
    """Settings by name; numbers, truth values and quoted words are read as JSON, other words as they are."""
    return {name: _value(word) for name, _, word in (part.partition("=") for part in line.split())}


def chosen(settings: dict[str, Any] | str | None) -> dict[str, Any]:
    """Settings that are given as a line, by name, or not at all."""
    if isinstance(settings, str):
        return set_to(settings)
    return settings or {}


def cases_of(table: str) -> list[tuple[str, dict[str, Any]]]:
    """Cases of a table: each line has the name of a method and its settings."""
    found = []
    for line in table.strip().splitlines():
        name, _, settings = line.strip().partition(" ")
        found.append((name, set_to(settings)))
    return found


def _value(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word
