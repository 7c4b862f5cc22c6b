"""Removal of swept values without effect: the method lacks the hyperparameter, or another one switches it off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedcache.config import TrainConfig
from fedcache.errors import UsageError, shell_word
from fedcache.federate.methods import find_method
from fedcache.grids.points import combinations, split_key, values_of_place
from fedcache.runs.spec import why_unread

GridPoint = tuple[str, dict[str, str]]


def methods_without(methods: Sequence[str], keys: Sequence[str]) -> dict[str, list[str]]:
    """Hyperparameter -> the methods that do not have it, and are trained without it.

    Keys that no method has are left out here. They are rejected by name when a method resolves them.
    """
    lacking_by_key = {}
    for key in keys:
        place, name = split_key(key)
        if place != "set":
            continue
        lacking = []
        for method in methods:
            declared = [h.name for h in find_method(method).hparams]
            if name not in declared:
                lacking.append(method)
        if lacking and len(lacking) < len(methods):
            lacking_by_key[key] = lacking
    return lacking_by_key


def settings_for(
    method: str, methods: Sequence[str], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The values of ``--set`` without the hyperparameters that only other methods of the grid have."""
    lacking = methods_without(list(dict.fromkeys(methods)), list(settings))
    return {key: value for key, value in settings.items() if method not in lacking.get(key, ())}


def points_that_differ(
    methods: Sequence[str], sweeps: Mapping[str, Sequence[str]], config: TrainConfig
) -> tuple[list[GridPoint], tuple[str, ...]]:
    """The distinct points of some sweeps, without the values that they do not read, and notes about these values.

    Raises UsageError for illegal sweeps, and for a swept key that no point reads.
    """
    notes = []
    lacking = methods_without(methods, [*sweeps, *config.set])
    for key, names in lacking.items():
        listed = ", ".join(names)
        notes.append(
            f"{key} is not a hyperparameter of {listed}, so these runs are trained without it."
        )
    points, unread = drop_unread(combinations(methods, sweeps, lacking), config)
    for key, why in unread.items():
        notes.append(
            f"{key} has no effect with {why}, so fedcache trains configurations with {why} only once, without {key}."
        )
    # Without these values, several points may be the same.
    distinct = dict.fromkeys((name, tuple(sweep.items())) for name, sweep in points)
    return [(name, dict(sweep)) for name, sweep in distinct], tuple(notes)


def drop_unread(
    points: Sequence[GridPoint], config: TrainConfig
) -> tuple[list[GridPoint], dict[str, str]]:
    """Every point without the swept values that it does not read, and key -> the setting that switches it off.

    Raises UsageError for a key that no point reads.
    """
    unread = {}
    read: set[str] = set()
    reduced = []
    for name, sweep in points:
        method = find_method(name)
        settings = {**config.set, **values_of_place(sweep, "set")}
        # Unknown hyperparameters are refused by name when the point is prepared.
        declared = {h.name for h in method.hparams}
        known = {key: value for key, value in settings.items() if key in declared}
        hp = method.resolve(config.preset, known)
        remaining = dict(sweep)
        for key in sweep:
            place, hparam = split_key(key)
            if place != "set":
                continue
            why = why_unread(hparam, hp)
            if why:
                unread[key] = why
                del remaining[key]
        reduced.append((name, remaining))
        read.update(remaining)
    for key, why in unread.items():
        if key not in read:
            hparam = split_key(key)[1]
            method_name = shell_word(points[0][0])
            raise UsageError(
                f"--sweep {key} changes nothing: {hparam} has no effect with {why}.",
                f"Leave the --sweep out, or change the hyperparameter that disables {hparam}:  fedcache methods info "
                f"{method_name}",
            )
    return reduced, unread
