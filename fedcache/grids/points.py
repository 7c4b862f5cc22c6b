"""Points of a grid: the meaning of the keys of ``--sweep``, the list of points, and the groups that train together.

Keys and values are checked before anything runs.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from fedcache.config import PartitionConfig, TrainConfig, field_names
from fedcache.errors import UsageError, unknown
from fedcache.extract.backbones.table import lookup
from fedcache.federate.engine.method import Method
from fedcache.federate.methods import find_method
from fedcache.federate.partition.partition import SCHEMES
from fedcache.federate.trust.attacks import parse_attack
from fedcache.federate.trust.pipeline import NO_ATTACK
from fedcache.federate.trust.robust_rules import parse_rule
from fedcache.plugins import PREFIXES
from fedcache.runs.spec import TIMING_OPTIONS, TRUST_OPTIONS, parse_participation

# Keys of ``--sweep`` that are options of the run or of the partition. All other keys are hyperparameters.
RUN_KEYS = ("rounds", "participation", "backbones", "domain", *TIMING_OPTIONS, *TRUST_OPTIONS)
PARTITION_KEYS = (
    "scheme",
    "clients",
    "alpha",
    "shards",
    "shots",
    "by",
    "hold_out",
    "tests",
    "min_rows",
    "max_clients",
    "validation",
    "unlabelled",
    "inside",
)
LEAST: dict[str, int | float] = {
    "rounds": 1,
    "max_rows_per_client": 1,
    "asynchronous": 1,
    "dp_seed": 0,
    "byzantine": 0.0,
    "max_update_norm": 0.0,
    "max_share": 0.0,
    "max_row_norm": 0.0,
    "dp_clip": 0.0,
    "dp_noise": 0.0,
    "dp_delta": 0.0,
    "server_step": 0.0,
    "staleness_power": 0.0,
    "clients": 1,
    "shards": 1,
    "shots": 1,
    "min_rows": 1,
    "max_clients": 1,
    "alpha": 1e-300,  # any number above 0
}
"""Keys of the run and of the partition with numbers as values -> the minimum, as an int for whole numbers."""


def split_key(key: str) -> tuple[str, str]:
    """The place of a key (run | partition | set) and its name there.

    If a method and a scheme both have a parameter ``alpha``, ``set.alpha`` is the hyperparameter of the method and
    ``partition.alpha`` the argument of the scheme.
    """
    place, dot, name = key.partition(".")
    if dot and place in ("set", "partition"):
        return place, name
    option = key.replace("-", "_")
    if option in RUN_KEYS:
        return "run", option
    if key in PARTITION_KEYS:
        return "partition", key
    return "set", key


def values_of_place(sweep: Mapping[str, str], place: str) -> dict[str, str]:
    """The swept values of one place, by their names there."""
    values = {}
    for key, value in sweep.items():
        place_of_key, name = split_key(key)
        if place_of_key == place:
            values[name] = value
    return values


def check_sweeps(methods: Sequence[str], sweeps: Mapping[str, Sequence[str]]) -> None:
    """Refuse unknown keys, illegal values and repetitions. Raises UsageError."""
    for key, values in sweeps.items():
        if key in ("seed", "seeds"):
            seeds = ",".join(values) or "0,1,2"
            raise UsageError(
                f"--sweep {key}: seeds cannot be swept, because every configuration runs all seeds.",
                f"--seeds {seeds} (with --repartition each seed draws its own partition)",
            )
        if not values:
            raise UsageError(f"--sweep {key} has no values.", f"For example --sweep {key}=a,b")
    seen: dict[tuple[str, str], str] = {}
    for key, values in sweeps.items():
        place_and_name = split_key(key)
        option = field_names(TrainConfig).get(key.replace("-", "_"))
        if place_and_name[0] == "set" and option is not None:
            flag = option.replace("_", "-")
            raise UsageError(
                f"--sweep {key}: {option} cannot be swept, because it must be the same for all configurations.",
                f"Give --{flag} VALUE once, together with the sweeps. In Python:  options={{{option!r}: VALUE}}",
            )
        if place_and_name in seen:
            earlier = seen[place_and_name]
            raise UsageError(
                f"--sweep {earlier} and --sweep {key} sweep the same setting.",
                "Leave one of them out.",
            )
        seen[place_and_name] = key
        # 0.1 and 1e-1 are two spellings of one value.
        spellings: dict[Any, list[str]] = {}
        for value in values:
            parsed = tuple(_parsed_by(methods, key, value))
            spellings.setdefault(parsed, []).append(value)
        for words in spellings.values():
            if len(words) > 1:
                repeated = "."
                if words[0] != words[1]:
                    repeated = f": {words[0]} and {words[1]}."
                distinct = ",".join(same[0] for same in spellings.values())
                raise UsageError(
                    f"--sweep {key} contains a value twice{repeated}", f"--sweep {key}={distinct}"
                )


def _parsed_by(methods: Sequence[str], key: str, value: str) -> list[tuple[str, Any]]:
    """(method, value) as each method parses it, or ("", value) as the run parses it.

    Raises UsageError for an illegal value.
    """
    place, name = split_key(key)
    if place == "run":
        return [("", _run_value(name, value))]
    if place == "partition":
        for method in map(find_method, methods):
            if name == key and _has_hyperparameter(method, name):
                raise UsageError(
                    f"--sweep {key} is ambiguous, because the scheme and {method.name} both have {key}.",
                    f"--sweep partition.{key}=... for the scheme, or --sweep set.{key}=... for the method",
                )
        return [("", _partition_value(name, value))]
    all_methods = list(map(find_method, methods))
    # If no method has the hyperparameter, ``hparam`` of the first one raises the error.
    readers = [method for method in all_methods if _has_hyperparameter(method, name)] or all_methods
    return [(method.name, method.hparam(name).parse(value)) for method in readers]


def _has_hyperparameter(method: Method, name: str) -> bool:
    return any(h.name == name for h in method.hparams)


def _number(key: str, value: str) -> int | float:
    """A swept number of ``LEAST``. Raises UsageError for a smaller number and for other words."""
    least = LEAST[key]
    # For a text that is no number, ``number`` stays NaN, and every comparison with NaN is false.
    number = math.nan
    with suppress(ValueError):
        number = type(least)(value)
    if not (number >= least and math.isfinite(number)):
        if isinstance(least, int):
            legal = f"a whole number of at least {least}"
        elif least > 0:
            legal = "a number above 0"
        else:
            legal = "a number of at least 0"
        raise UsageError(
            f"--sweep {key}: {value!r} is not {legal}.", f"For example --sweep {key}=1,2"
        )
    return number


def _run_value(name: str, value: str) -> Any:
    if name in LEAST:
        return _number(name, value)
    if name == "participation":
        return parse_participation(value)
    if name == "aggregate":
        return parse_rule(value).text
    if name == "attack":
        if value == NO_ATTACK:
            return None
        return parse_attack(value)
    if name == "backbones":
        for one in value.split("+"):
            # Keys of stored arrays (name and digest) and the user's own backbones are looked up in the store later.
            if not re.fullmatch(r".+-[0-9a-f]+", one) and not one.startswith(PREFIXES):
                lookup(one)
    return value


def _partition_value(name: str, value: str) -> Any:
    if name not in PARTITION_KEYS:
        raise unknown("swept argument of the scheme", name, PARTITION_KEYS)
    if name in LEAST:
        return _number(name, value)
    if name == "scheme" and value not in SCHEMES:
        raise unknown("scheme", value, SCHEMES)
    return value


def typed_sweep_values(values: Mapping[str, str]) -> dict[str, int | float]:
    """The numbers among the swept values of a run, as the types of ``TrainConfig``.

    Raises UsageError for a word that is not a number.
    """
    return {key: _number(key, value) for key, value in values.items() if key in LEAST}


def sampled(
    sampler: str, points: Sequence[tuple[str, dict[str, str]]]
) -> list[tuple[str, dict[str, str]]]:
    """The points to train: all of them (``grid``), or N of them drawn without repeats (``random:N[:SEED]``).

    Raises UsageError.
    """
    if sampler == "grid":
        return list(points)
    match = re.fullmatch(r"random:(\d{1,9})(?::(\d{1,9}))?", sampler)
    if match is None or int(match[1]) < 1:
        raise UsageError(
            f"--sampler {sampler} is neither grid nor random:N.", "For example --sampler random:20"
        )
    count = min(int(match[1]), len(points))
    rng = np.random.default_rng(int(match[2] or 0))
    drawn = rng.choice(len(points), count, replace=False)
    return [points[i] for i in sorted(drawn)]


def combinations(
    methods: Sequence[str],
    sweeps: Mapping[str, Sequence[str]],
    lacking: Mapping[str, Sequence[str]] | None = None,
) -> list[tuple[str, dict[str, str]]]:
    """Every (method, swept values). Raises UsageError as ``check_sweeps``.

    ``lacking`` maps a key to the methods that do not have it; their points are without that key.
    """
    distinct = list(dict.fromkeys(methods))
    check_sweeps(distinct, sweeps)
    points = []
    for method in distinct:
        keys = [key for key in sweeps if method not in (lacking or {}).get(key, ())]
        values_of_keys = [sweeps[key] for key in keys]
        for values in itertools.product(*values_of_keys):
            points.append((method, dict(zip(keys, values, strict=True))))
    return points


def point_groups(todo: Sequence[tuple[str, dict[str, str]]]) -> list[list[int]]:
    """Groups of points that differ only in float hyperparameters. Points are numbers, in the order of the product."""
    groups: dict[Any, list[int]] = {}
    for number, (name, sweep) in enumerate(todo):
        floats = {("set", h.name) for h in find_method(name).hparams if h.kind == "float"}
        in_common = []
        for key, value in sweep.items():
            # ``auto`` is not a number. Points that train together have a number for this hyperparameter.
            if value == "auto" or split_key(key) not in floats:
                in_common.append((key, value))
        groups.setdefault((name, *sorted(in_common)), []).append(number)
    return list(groups.values())


def swept_schemes(points: Sequence[tuple[str, Mapping[str, str]]]) -> tuple[str, ...]:
    """The swept partition schemes; () if the scheme is not swept."""
    schemes: dict[str, None] = {}
    for _, sweep in points:
        values = values_of_place(sweep, "partition")
        if "scheme" in values:
            schemes[values["scheme"]] = None
    return tuple(schemes)


def partition_of_point(
    base: PartitionConfig, sweep: Mapping[str, str], schemes: Sequence[str] = ()
) -> PartitionConfig:
    """The partition of a point: the base with the swept scheme, clients and arguments.

    If ``schemes`` are swept, an argument of the base goes only to the schemes that declare it. An argument that no
    scheme declares stays, so that the scheme of the point refuses it.
    """
    swept: dict[str, Any] = {**values_of_place(sweep, "partition")}
    scheme = swept.pop("scheme", base.scheme)
    clients = base.clients
    if "clients" in swept:
        clients = int(swept.pop("clients"))
    # A tuple of one value, because a word would be split at its commas.
    if "hold_out" in swept:
        swept["hold_out"] = (swept["hold_out"],)
    declared = {name: {a.name for a in SCHEMES[name].arguments} for name in schemes}
    of_other_schemes = set().union(*declared.values()) - declared.get(scheme, set())
    of_base = {key: value for key, value in base.options.items() if key not in of_other_schemes}
    return PartitionConfig(scheme, clients, base.seed, {**of_base, **swept})
