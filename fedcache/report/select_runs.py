"""``method:NAME``, ``dataset:NAME`` and ``partition:NAME``: the finished runs that something is true of.

Names may be patterns: ``method:fed*``, ``partition:dirichlet-*``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from fedcache.federate.partition.partition import SCHEMES
from fedcache.runs.score import values_held_out


def partition_name(result: Mapping[str, Any]) -> str:
    """The name of a saved partition, or the one that its scheme and arguments would give it."""
    part = result["partition"]
    scheme = SCHEMES.get(part["scheme"])
    return str(
        part["name"]
        or (scheme.default_name(part["args"], part["seed"]) if scheme else part["scheme"])
    )


def name_without_hold_out(result: Mapping[str, Any]) -> str:
    """The name of a saved partition, or the default name of the scheme without the held-out value."""
    part = result["partition"]
    args = {name: value for name, value in part.get("args", {}).items() if name != "hold_out"}
    return partition_name({**result, "partition": {**part, "args": args}})


def partition_words(result: Mapping[str, Any]) -> str:
    """A partition as labels show it: its name, and ``hold_out=VALUE`` where the run holds out values of a column."""
    held = values_held_out(result)
    if held:
        return f"{name_without_hold_out(result)}, hold_out={','.join(held)}"
    return partition_name(result)


OF: Mapping[str, Callable[[Mapping[str, Any]], tuple[str, ...]]] = MappingProxyType(
    {
        "method": lambda r: (str(r["method"]),),
        "dataset": lambda r: (str(r["dataset"]["slug"]),),
        "partition": lambda r: (partition_name(r), str(r["partition"]["scheme"])),
    }
)
"""What stands before the colon -> the names of a result that may stand behind it."""


def selector(query: str) -> Callable[[Mapping[str, Any]], bool] | None:
    """Whether a result is one of those that are meant; None for a query that is no selection."""
    kind, colon, pattern = query.partition(":")
    if not colon or not pattern or kind not in OF:
        return None
    return lambda result: any(fnmatchcase(name, pattern) for name in OF[kind](result))
