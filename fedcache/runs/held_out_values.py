"""The values that ``hold_out`` names: of which column they are, and one with a comma in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedcache.errors import UsageError, shell_word, unknown
from fedcache.store.store import Store, column_of


def with_whole_value(store: Store, arguments: dict[str, Any]) -> dict[str, Any]:
    """``hold_out`` as one value where the whole word is one that has a comma in it, and not several values."""
    word = arguments.get("hold_out")
    by = arguments.get("by") or "domain"
    if not isinstance(word, str) or "," not in word or not isinstance(by, str):
        return arguments
    values = column_of(store, by).words
    several = all(part.strip() in values for part in word.split(","))
    if word.strip() in values and not several:
        return {**arguments, "hold_out": (word.strip(),)}
    return arguments


def check_held_out_domains(store: Store, arguments: Mapping[str, Any]) -> None:
    """Where values are held out and no column is named, they are domains.

    Raises UsageError for another value, with the columns that hold it.
    """
    values = arguments.get("hold_out")
    if arguments.get("by") is not None or not isinstance(values, tuple | list):
        return
    for value in values:
        if value in store.samples.domains:
            continue
        words = {
            "class": store.samples.classes,
            **{name: store.group(name).words for name in store.groups},
        }
        holding = [name for name, known in words.items() if value in known]
        options = " or ".join(f"--by {shell_word(name)}" for name in holding[:4])
        raise UsageError(
            unknown("value of domain", str(value), store.samples.domains).message,
            f"Without --by, what is held out are domains: {', '.join(store.samples.domains[:12])}. "
            + (
                f"{value!r} is a value of another column: {options}"
                if holding
                else "--by COLUMN names another column."
            ),
        )
