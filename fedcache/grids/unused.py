"""Swept values without effect: keys that a method does not have, and switches that others turn off."""

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

    Keys that no method has are left out here; the method refuses them by name.
    """
    found = {}
    for key in keys:
        place, name = split_key(key)
        if place != "set":
            continue
        lack = [m for m in methods if all(h.name != name for h in find_method(m).hparams)]
        if lack and len(lack) < len(methods):
            found[key] = lack
    return found


def settings_for(
    method: str, methods: Sequence[str], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The values of ``--set`` without the hyperparameters that only other methods of the grid have."""
    lacking = methods_without(list(dict.fromkeys(methods)), list(settings))
    return {key: value for key, value in settings.items() if method not in lacking.get(key, ())}


def points_that_differ(
    methods: Sequence[str], sweeps: Mapping[str, Sequence[str]], config: TrainConfig
) -> tuple[list[GridPoint], tuple[str, ...]]:
    """The points of some sweeps without the values that they do not read, each once, and notes about these values.

    Raises UsageError for illegal sweeps, and for a swept key that no point reads.
    """
    lacking = methods_without(methods, [*sweeps, *config.set])
    notes = [
        f"{', '.join(names)}: no hyperparameter {key}; trained without it."
        for key, names in lacking.items()
    ]
    points, unread = drop_unread(combinations(methods, sweeps, lacking), config)
    notes += [
        f"{key} has no effect with {why}: trained once without it." for key, why in unread.items()
    ]
    distinct = dict.fromkeys((name, tuple(sweep.items())) for name, sweep in points)
    return [(name, dict(sweep)) for name, sweep in distinct], tuple(notes)


def drop_unread(
    points: Sequence[GridPoint], config: TrainConfig
) -> tuple[list[GridPoint], dict[str, str]]:
    """Every point without the swept values that it does not read, and key -> the setting under which it is not read.

    Raises UsageError for a key that no point reads.
    """
    unread: dict[str, str] = {}
    kept: list[GridPoint] = []
    for name, sweep in points:
        method = find_method(name)
        settings = {**config.set, **values_of_place(sweep, "set")}
        # Unknown hyperparameters are refused by name when the point is prepared.
        declared = {h.name for h in method.hparams}
        hp = method.resolve(config.preset, {k: v for k, v in settings.items() if k in declared})
        left = dict(sweep)
        for key in sweep:
            place, hparam = split_key(key)
            if place == "set" and (why := why_unread(hparam, hp)):
                unread[key] = why
                del left[key]
        kept.append((name, left))
    read = {key for _, sweep in kept for key in sweep}
    for key, why in unread.items():
        if key not in read:
            hparam = split_key(key)[1]
            method_name = shell_word(points[0][0])
            raise UsageError(
                f"--sweep {key} changes nothing: {hparam} has no effect with {why}.",
                "Leave it out, or change the hyperparameter that disables it; see  fedcache methods info "
                f"{method_name}",
            )
    return kept, unread
