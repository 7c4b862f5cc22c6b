"""What the keys of ``--sweep`` mean, and whether their values can be: looked at before anything runs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fedcache.errors import UsageError, unknown
from fedcache.extract.backbones.table import lookup
from fedcache.federate.methods import find_method
from fedcache.federate.partition.partition import SCHEMES
from fedcache.federate.trust.attacks import parse_attack
from fedcache.federate.trust.policy import NO_ATTACK
from fedcache.federate.trust.robust_rules import parse_rule
from fedcache.runs.spec import TRUST_OPTIONS, parse_participation

RUN_KEYS = ("rounds", "participation", "backbones", "domain", *TRUST_OPTIONS)
PARTITION_KEYS = ("scheme", "clients", "alpha", "shards", "shots")
PLACES = {"set": "the method's", "partition": "the scheme's"}


def split_key(key: str) -> tuple[str, str]:
    """Where a key belongs and its name there: run | partition | set.

    ``set.alpha`` is a hyperparameter and ``partition.alpha`` the scheme's, for names that both have.
    """
    place, dot, name = key.partition(".")
    if dot and place in PLACES:
        return place, name
    if (run := key.replace("-", "_")) in RUN_KEYS:  # also spelt as the option is
        return "run", run
    return "partition" if key in PARTITION_KEYS else "set", key


def values_of_place(sweep: Mapping[str, str], place: str) -> dict[str, str]:
    """The swept values of one place, by their names there."""
    return {name: v for key, v in sweep.items() for where, name in (split_key(key),) if where == place}


def check_sweeps(methods: Sequence[str], sweeps: Mapping[str, Sequence[str]]) -> None:
    """Refuse keys and values that cannot be. Raises UsageError."""
    for key, values in sweeps.items():
        if key in ("seed", "seeds"):
            raise UsageError(
                f"--sweep {key}: seeds are not swept, every point runs all of them.",
                f"--seeds {','.join(values) or '0,1,2'} (with --repartition each of them draws its own partition)",
            )
        if not values:
            raise UsageError(f"--sweep {key} has no values.", f"For example --sweep {key}=a,b")
    seen: dict[tuple[str, str], str] = {}
    for key, values in sweeps.items():
        where = split_key(key)
        if where in seen:
            raise UsageError(f"--sweep {seen[where]} and --sweep {key} are the same.", "Leave one of them out.")
        seen[where] = key
        meanings: dict[Any, str] = {}
        for value in values:
            first = meanings.setdefault(tuple(_parsed_by(methods, key, value)), value)
            if first is not value or values.count(value) > 1:
                kept = ",".join({tuple(_parsed_by(methods, key, v)): v for v in reversed(values)}.values())
                raise UsageError(
                    f"--sweep {key} names a value twice" + ("." if first == value else f": {first} and {value}."),
                    f"--sweep {key}={','.join(reversed(kept.split(',')))}",
                )


def _parsed_by(methods: Sequence[str], key: str, value: str) -> list[tuple[str, Any]]:
    """What a value is to each method, or to the run; a value that cannot be is refused here."""
    place, name = split_key(key)
    if place == "run":
        return [("", _run_value(name, value))]
    if place == "partition":
        for method in map(find_method, methods):
            if name == key and any(h.name == name for h in method.hparams):
                raise UsageError(
                    f"--sweep {key}: {method.name} has a hyperparameter of that name too.",
                    f"--sweep partition.{key}=... for the scheme, or --sweep set.{key}=... for the method",
                )
        return [("", _partition_value(name, value))]
    return [(method.name, method.hparam(name).parse(value)) for method in map(find_method, methods)]


def _number(key: str, value: str, kind: type, legal: str, low: float) -> Any:
    try:
        made = kind(value)
    except ValueError:
        made = math.nan
    if not (made >= low and math.isfinite(made)):
        raise UsageError(f"--sweep {key}: {value!r} is not {legal}.", f"For example --sweep {key}={max(1, int(low))},2")
    return made


def _run_value(name: str, value: str) -> Any:
    if name == "rounds":
        return _number(name, value, int, "a number of at least 1", 1)
    if name == "participation":
        return parse_participation(value)
    if name == "aggregate":
        return parse_rule(value).text
    if name == "attack":
        return None if value == NO_ATTACK else parse_attack(value)
    if name == "backbones":
        for one in value.split("+"):
            if not re.fullmatch(r".+-[0-9a-f]+", one):
                lookup(one)  # a name with the digest of its recipe is that of an array
    if name in ("byzantine", "max_update_norm", "dp_clip", "dp_noise", "dp_delta"):
        return _number(name, value, float, "a number of at least 0", 0.0)
    return value


def _partition_value(name: str, value: str) -> Any:
    if name not in PARTITION_KEYS:
        raise unknown("swept argument of the scheme", name, PARTITION_KEYS)
    if name in ("clients", "shards", "shots"):
        return _number(name, value, int, "a whole number of at least 1", 1)
    if name == "alpha":
        return _number(name, value, float, "a number above 0", 1e-300)
    if name == "scheme" and value not in SCHEMES:
        raise unknown("scheme", value, SCHEMES)
    return value


def typed_sweep_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Words of a sweep as the types of ``TrainConfig``.

    Raises UsageError for a word that is no number where one is needed.
    """
    numbers = {"rounds": int, "byzantine": float, "max_update_norm": float, "dp_clip": float, "dp_noise": float,
               "dp_delta": float}  # fmt: skip
    made: dict[str, Any] = {}
    for key, value in values.items():
        if key in numbers:
            try:
                made[key] = numbers[key](value)
            except ValueError:
                raise UsageError(f"--sweep {key}: {value!r} is no number.", f"For example --sweep {key}=1,2") from None
    return made
