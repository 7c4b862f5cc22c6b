"""Swept values that change nothing: keys that a method has not, and switches that others turn off."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from fedcache.config import TrainConfig
from fedcache.errors import UsageError
from fedcache.federate.engine.hyperparameters import Value
from fedcache.federate.methods import find_method
from fedcache.grids.points import combinations, split_key
from fedcache.runs.settings import why_unread

GridPoint = tuple[str, dict[str, str]]


def methods_without(methods: Sequence[str], keys: Sequence[str]) -> dict[str, list[str]]:
    """Of hyperparameters that some of several methods have: key -> those that have it not, and are trained without.

    Keys that none has are left to be refused by name.
    """
    found = {}
    for key in keys:
        place, name = split_key(key)
        lack = [m for m in methods if place == "set" and all(h.name != name for h in find_method(m).hparams)]
        if lack and len(lack) < len(methods):
            found[key] = lack
    return found


def settings_for(method: str, methods: Sequence[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``--set`` that a method has, where others of several methods have the rest."""
    lacking = methods_without(list(dict.fromkeys(methods)), list(settings)) if settings else {}
    return {key: value for key, value in settings.items() if method not in lacking.get(key, ())}


def points_that_differ(
    methods: Sequence[str], sweeps: Mapping[str, Sequence[str]], config: TrainConfig
) -> tuple[list[GridPoint], tuple[str, ...]]:
    """Every point of some sweeps, without the hyperparameters that it does not read and once, and what to say of it.

    Raises UsageError for what cannot be, and where a swept key changes nothing at all.
    """
    lacking = methods_without(methods, [*sweeps, *config.set])
    said = [f"{', '.join(names)}: no hyperparameter {key}, trained without." for key, names in lacking.items()]
    points = combinations(methods, sweeps, lacking)
    left: dict[tuple[str, tuple[tuple[str, str], ...]], None] = {}
    unread: dict[str, str] = {}
    read: set[str] = set()
    for name, sweep in points:
        method = find_method(name)
        own = {split_key(k)[1]: v for k, v in sweep.items() if split_key(k)[0] == "set"}
        mine = {h.name for h in method.hparams}  # others are refused by name when the point is prepared
        hp = method.resolve(config.preset, {k: v for k, v in {**config.set, **own}.items() if k in mine})
        off = {k: why for k in sweep if (why := _why_unread(k, hp))}
        unread |= off
        read |= {*sweep} - {*off}
        left[name, tuple((k, v) for k, v in sweep.items() if k not in off)] = None
    _refuse(unread, read, points[0][0])
    said += [f"{key} is not read under {why}: trained without it there, once." for key, why in unread.items()]
    return [(name, dict(sweep)) for name, sweep in left], tuple(said)


def _why_unread(key: str, hp: Mapping[str, Value]) -> str:
    place, name = split_key(key)
    return why_unread(name, hp) if place == "set" else ""


def refuse_unread(points: Sequence[GridPoint], config: TrainConfig) -> None:
    """Refuse a swept key that none of some points reads, of which no method lacks any. Raises UsageError."""
    unread: dict[str, str] = {}
    read: set[str] = set()
    for name, sweep in points:
        own = {split_key(k)[1]: v for k, v in sweep.items() if split_key(k)[0] == "set"}
        hp = find_method(name).resolve(config.preset, {**config.set, **own})
        off = {k: why for k in sweep if (why := _why_unread(k, hp))}
        unread |= off
        read |= {*sweep} - {*off}
    _refuse(unread, read, points[0][0])


def _refuse(unread: Mapping[str, str], read: Container[str], method: str) -> None:
    for key in (k for k in unread if k not in read):
        raise UsageError(
            f"--sweep {key} changes nothing: {split_key(key)[1]} is not read under {unread[key]}.",
            f"Leave it out, or set what reads it; see  fedcache methods info {method}",
        )
