"""Swept values that change nothing: keys that a method has not, and switches that others turn off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedcache.config import TrainConfig
from fedcache.errors import UsageError, shell_word
from fedcache.federate.engine.hyperparameters import Value
from fedcache.federate.methods import find_method
from fedcache.grids.points import combinations, split_key
from fedcache.runs.spec import why_unread

GridPoint = tuple[str, dict[str, str]]


def methods_without(methods: Sequence[str], keys: Sequence[str]) -> dict[str, list[str]]:
    """Of hyperparameters that some of several methods have: key -> those that have it not, and are trained without.

    Keys that none has are left to be refused by name.
    """
    found = {}
    for key in keys:
        place, name = split_key(key)
        lack = [
            m
            for m in methods
            if place == "set" and all(h.name != name for h in find_method(m).hparams)
        ]
        if lack and len(lack) < len(methods):
            found[key] = lack
    return found


def settings_for(
    method: str, methods: Sequence[str], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Those of ``--set`` that a method has, where others of several methods have the rest."""
    if settings:
        lacking = methods_without(list(dict.fromkeys(methods)), list(settings))
    else:
        lacking = {}
    return {key: value for key, value in settings.items() if method not in lacking.get(key, ())}


def points_that_differ(
    methods: Sequence[str], sweeps: Mapping[str, Sequence[str]], config: TrainConfig
) -> tuple[list[GridPoint], tuple[str, ...]]:
    """Every point of some sweeps, without the hyperparameters that it does not read and once, and what to say of it.

    Raises UsageError for what cannot be, and where a swept key changes nothing at all.
    """
    lacking = methods_without(methods, [*sweeps, *config.set])
    said = [
        f"{', '.join(names)}: no hyperparameter {key}, trained without."
        for key, names in lacking.items()
    ]
    points = combinations(methods, sweeps, lacking)
    unread, off = refuse_unread(points, config)
    left = {
        (name, tuple((k, v) for k, v in sweep.items() if k not in own)): None
        for (name, sweep), own in zip(points, off, strict=True)
    }
    said += [
        f"{key} is not read under {why}: trained without it there, once."
        for key, why in unread.items()
    ]
    return [(name, dict(sweep)) for name, sweep in left], tuple(said)


def _why_unread(key: str, hp: Mapping[str, Value]) -> str:
    place, name = split_key(key)
    if place == "set":
        return why_unread(name, hp)
    return ""


def refuse_unread(
    points: Sequence[GridPoint], config: TrainConfig
) -> tuple[dict[str, str], list[set[str]]]:
    """Swept keys that are not read: key -> under which setting, and those of each point.

    Raises UsageError for a key that no point reads.
    """
    unread: dict[str, str] = {}
    off: list[set[str]] = []
    for name, sweep in points:
        method = find_method(name)
        own = {split_key(k)[1]: v for k, v in sweep.items() if split_key(k)[0] == "set"}
        mine = {
            h.name for h in method.hparams
        }  # others are refused by name when the point is prepared
        hp = method.resolve(
            config.preset, {k: v for k, v in {**config.set, **own}.items() if k in mine}
        )
        why = {k: words for k in sweep if (words := _why_unread(k, hp))}
        unread |= why
        off.append({*why})
    read = {k for (_, sweep), own in zip(points, off, strict=True) for k in sweep if k not in own}
    for key in (k for k in unread if k not in read):
        raise UsageError(
            f"--sweep {key} changes nothing: {split_key(key)[1]} is not read under {unread[key]}.",
            f"Leave it out, or set what reads it; see  fedcache methods info {shell_word(points[0][0])}",
        )
    return unread, off
