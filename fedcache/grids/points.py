"""The points of a grid: what the keys of ``--sweep`` mean, which points there are, and which are one program. Keys and
values are looked at before anything runs.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedcache.config import PartitionConfig, TrainConfig, field_names
from fedcache.errors import UsageError, unknown
from fedcache.extract.backbones.table import lookup
from fedcache.federate.methods import find_method
from fedcache.federate.partition.partition import SCHEMES
from fedcache.federate.trust.attacks import parse_attack
from fedcache.federate.trust.policy import NO_ATTACK
from fedcache.federate.trust.robust_rules import parse_rule
from fedcache.runs.spec import TIMING_OPTIONS, TRUST_OPTIONS, parse_participation
from fedcache.store.own_names import PREFIXES

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
NUMBERS = (
    "byzantine",
    "max_update_norm",
    "max_share",
    "max_row_norm",
    "dp_clip",
    "dp_noise",
    "dp_delta",
    "server_step",
    "staleness_power",
)
"""Those of them whose values are numbers of at least 0."""
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
    return {
        name: v for key, v in sweep.items() for where, name in (split_key(key),) if where == place
    }


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
        if (
            where[0] == "set"
            and (option := field_names(TrainConfig).get(key.replace("-", "_"))) is not None
        ):
            raise UsageError(
                f"--sweep {key}: {option} is the same for all points.",
                f"--{option.replace('_', '-')} VALUE beside the sweeps; in Python  options={{{option!r}: VALUE}}",
            )
        if where in seen:
            raise UsageError(
                f"--sweep {seen[where]} and --sweep {key} are the same.", "Leave one of them out."
            )
        seen[where] = key
        meanings: dict[Any, str] = {}  # -> as it is written first
        repeated: list[tuple[str, str]] = []
        for value in values:
            meant = tuple(_parsed_by(methods, key, value))
            if meant in meanings:
                repeated.append((meanings[meant], value))
            meanings.setdefault(meant, value)
        for first, value in repeated[:1]:
            raise UsageError(
                f"--sweep {key} names a value twice"
                + ("." if first == value else f": {first} and {value}."),
                f"--sweep {key}={','.join(meanings.values())}",
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
    known = list(map(find_method, methods))
    reading = [method for method in known if any(h.name == name for h in method.hparams)]
    return [(method.name, method.hparam(name).parse(value)) for method in reading or known]


def _number(key: str, value: str, kind: type, legal: str, low: float) -> Any:
    try:
        made = kind(value)
    except ValueError:
        made = math.nan
    if not (made >= low and math.isfinite(made)):
        raise UsageError(
            f"--sweep {key}: {value!r} is not {legal}.",
            f"For example --sweep {key}={max(1, int(low))},2",
        )
    return made


def _run_value(name: str, value: str) -> Any:
    if name == "rounds":
        return _number(name, value, int, "a number of at least 1", 1)
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
            # A name with the digest of its recipe is that of an array; the user's own are looked for in the store.
            if not re.fullmatch(r".+-[0-9a-f]+", one) and not one.startswith(PREFIXES):
                lookup(one)
    if name in ("max_rows_per_client", "asynchronous"):
        return _number(name, value, int, "a whole number of at least 1", 1)
    if name in NUMBERS:
        return _number(name, value, float, "a number of at least 0", 0.0)
    if name == "dp_seed":
        return _number(name, value, int, "a whole number of at least 0", 0)
    return value


def _partition_value(name: str, value: str) -> Any:
    if name not in PARTITION_KEYS:
        raise unknown("swept argument of the scheme", name, PARTITION_KEYS)
    if name in ("clients", "shards", "shots", "min_rows", "max_clients"):
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
    whole = ("rounds", "max_rows_per_client", "dp_seed", "asynchronous")
    numbers = {**dict.fromkeys(whole, int), **dict.fromkeys(NUMBERS, float)}
    made: dict[str, Any] = {}
    for key, value in values.items():
        if key in numbers:
            try:
                made[key] = numbers[key](value)
            except ValueError:
                raise UsageError(
                    f"--sweep {key}: {value!r} is no number.", f"For example --sweep {key}=1,2"
                ) from None
    return made


def sampled(
    sampler: str, points: Sequence[tuple[str, dict[str, str]]]
) -> list[tuple[str, dict[str, str]]]:
    """The points that are run: all of them (``grid``), or N of them drawn without repeats (``random:N[:SEED]``).

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
    drawn = np.random.default_rng(int(match[2] or 0)).choice(len(points), count, replace=False)
    return [points[i] for i in sorted(drawn)]


def combinations(
    methods: Sequence[str],
    sweeps: Mapping[str, Sequence[str]],
    lacking: Mapping[str, Sequence[str]] | None = None,
) -> list[tuple[str, dict[str, str]]]:
    """Every (method, swept values), checked before anything runs: names, values, repeats. Raises UsageError.

    ``lacking`` has the keys that some methods have not.
    """
    check_sweeps(list(dict.fromkeys(methods)), sweeps)
    made = []
    for method in dict.fromkeys(methods):
        mine = {
            key: values
            for key, values in sweeps.items()
            if method not in (lacking or {}).get(key, ())
        }
        made += [
            (method, dict(zip(mine, values, strict=True)))
            for values in itertools.product(*mine.values())
        ]
    return made


def point_groups(todo: Sequence[tuple[str, dict[str, str]]]) -> list[list[int]]:
    """Numbers of the points, those that differ in floats alone together, in the order of the product."""
    groups: dict[Any, list[int]] = {}
    for number, (name, sweep) in enumerate(todo):
        floats = {h.name for h in find_method(name).hparams if h.kind == "float"}
        # A name that scheme and method both have is the scheme's unless it says otherwise: every point its own rows.
        free = {k for k in sweep if split_key(k)[0] == "set" and split_key(k)[1] in floats}
        rest: dict[str, str] = {k: v for k, v in sweep.items() if k not in free or v == "auto"}
        groups.setdefault((name, *sorted(rest.items())), []).append(number)
    return list(groups.values())


def swept_schemes(points: Sequence[tuple[str, Mapping[str, str]]]) -> tuple[str, ...]:
    """The partition schemes that points differ in; () where their scheme is not swept."""
    named = (values_of_place(sweep, "partition").get("scheme") for _, sweep in points)
    return tuple(dict.fromkeys(scheme for scheme in named if scheme is not None))


def partition_of_point(
    base: PartitionConfig, sweep: Mapping[str, str], schemes: Sequence[str] = ()
) -> PartitionConfig:
    """The partition of a point: the base with the swept scheme, clients and arguments.

    Of ``schemes``, those that are swept, each takes the arguments of the base that it has; one that none of them has
    stays, and is refused by the scheme.
    """
    mine = values_of_place(sweep, "partition")
    had = {name: {a.name for a in SCHEMES[name].arguments} for name in schemes}
    elsewhere = set().union(*had.values()) - had.get(mine.get("scheme", ""), set())
    kept = {k: v for k, v in base.options.items() if k not in elsewhere}
    options: dict[str, Any] = {
        **kept,
        **{k: v for k, v in mine.items() if k not in ("scheme", "clients")},
    }
    # one value, whatever characters it has: as words it would be split at commas
    if "hold_out" in mine:
        options["hold_out"] = (mine["hold_out"],)
    clients = int(mine["clients"]) if "clients" in mine else base.clients
    return PartitionConfig(mine.get("scheme", base.scheme), clients, base.seed, options)
