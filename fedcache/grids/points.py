"""Points of a grid: the meaning of the keys of ``--sweep``, the list of points, and the groups that train together.

Keys and values are checked before anything runs.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np

from fedcache.config import PartitionConfig, TrainConfig, field_names
from fedcache.errors import MachineError, UsageError, shell_word, unknown
from fedcache.extract.backbones.table import lookup
from fedcache.federate.engine.method import Method
from fedcache.federate.methods import find_method
from fedcache.federate.partition.partition import SCHEMES
from fedcache.federate.trust.attacks import parse_attack
from fedcache.federate.trust.pipeline import NO_ATTACK
from fedcache.federate.trust.robust_rules import parse_rule
from fedcache.grids.sampling import PRUNERS, SAMPLERS, TRIALS, Sampling
from fedcache.parsing import Facts, Record
from fedcache.plugins import PREFIXES
from fedcache.runs.spec import TIMING_OPTIONS, TRUST_OPTIONS, parse_participation, why_unread

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
    swept: Facts = {**values_of_place(sweep, "partition")}
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
    return replace(base, scheme=scheme, clients=clients, options={**of_base, **swept})


# Removal of swept values without effect: the method lacks the hyperparameter, or another one switches it off.

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


def settings_for(method: str, methods: Sequence[str], settings: Record) -> Facts:
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


# Search space of ``--sampler optuna``: values and ranges of ``--sweep``, and how points are drawn from them.

PointKey = tuple[str, tuple[tuple[str, str], ...]]
"""A method and its swept values. Equal configurations have equal keys."""

DIGITS = 4
"""Significant digits of a drawn number."""
MOST_CHECKED = 200
"""Maximum number of configurations of a space that are checked before the search."""
MOST_LISTED = 100_000
"""Largest search space whose configurations are all listed, so that untried configurations are found."""


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, both included: ``0.1..0.9``, ``log:1e-4..1``, ``8..64``."""

    low: float
    high: float
    log: bool  # whether all orders of magnitude are equally likely
    whole: bool

    def word(self, value: float) -> str:
        """A number of the range as a swept value: whole, or with four digits, so that a person can type it."""
        if self.whole:
            return str(int(value))
        rounded = float(f"{value:.{DIGITS}g}")
        # Rounding may leave the range.
        return repr(min(max(rounded, self.low), self.high))

    @property
    def ends(self) -> tuple[str, ...]:
        """Both ends as words."""
        return self.word(self.low), self.word(self.high)


@dataclass(frozen=True)
class SearchPlan:
    """A search: its space, and how points are drawn and stopped."""

    methods: tuple[str, ...]
    space: Mapping[str, tuple[str, ...] | Range]  # swept key -> list of values, or range of numbers
    sampler: str = "tpe"  # of ``SAMPLERS``
    seed: int = 0
    pruner: str = "none"  # of ``PRUNERS``
    trials: int = TRIALS

    @property
    def words(self) -> str:
        """Sampler, seed and pruner for a person."""
        words = f"{self.sampler}, seed {self.seed}"
        if self.pruner != "none":
            words += f", pruner {self.pruner}"
        return words

    @property
    def size(self) -> float:
        """Number of points of the space; infinite with a range of numbers that are not whole."""
        size: float = len(self.methods)
        for values in self.space.values():
            if not isinstance(values, Range):
                size *= len(values)
            elif values.whole:
                size *= values.high - values.low + 1
            else:
                return math.inf
        return size

    def ordered(self, key: str) -> tuple[str, ...] | None:
        """A list of three or more numbers in ascending order; None for other values.

        The sampler draws a place in this order, so that it can learn from neighbouring values.
        """
        values = self.space[key]
        if isinstance(values, Range) or len(values) < 3:
            return None
        try:
            return tuple(sorted(values, key=float))
        except ValueError:
            return None

    def every_point(self) -> Iterator[PointKey]:
        """All points of a space whose ranges are of whole numbers."""
        lists: list[Sequence[str]] = []
        for values in self.space.values():
            if isinstance(values, Range):
                numbers = range(int(values.low), int(values.high) + 1)
                lists.append(list(map(str, numbers)))
            else:
                lists.append(values)
        for method, *words in itertools.product(self.methods, *lists):
            yield method, tuple(zip(self.space, words, strict=True))

    @property
    def listed(self) -> dict[str, tuple[str, ...]]:
        """Swept key -> values that stand for the key in checks: the ends of a range, all values of a list."""
        listed = {}
        for key, values in self.space.items():
            if isinstance(values, Range):
                values = values.ends
            listed[key] = values
        return listed

    def corners(self) -> list[tuple[str, dict[str, str]]]:
        """At most ``MOST_CHECKED`` points that stand for the space in the checks before the search."""
        all_corners = itertools.product(self.methods, *self.listed.values())
        points = []
        for method, *words in itertools.islice(all_corners, MOST_CHECKED):
            points.append((method, dict(zip(self.space, words, strict=True))))
        return points


def search_of(
    sampling: Sampling, methods: Sequence[str], sweeps: Mapping[str, Sequence[str]]
) -> SearchPlan | None:
    """The requested search; None for a grid whose points are known in advance.

    Raises UsageError for contradictory options; MachineError if Optuna is not installed, with the command
    that installs it.
    """
    sampler = sampling.sampler
    # Without a search, options and ranges of a search are mistakes.
    if not sampler.startswith("optuna"):
        option = ""
        if sampling.trials is not None:
            option = "--trials"
        elif sampling.pruner != "none":
            option = "--pruner"
        if option:
            raise UsageError(
                f"{option} needs a search, but the sampler is {sampler}.", "--sampler optuna"
            )
        for key, values in sweeps.items():
            if any(_ends_of(value) for value in values):
                words = ",".join(values)
                raise UsageError(
                    f"--sweep {key}={words} is a range, but a grid without --sampler optuna needs a list of values.",
                    "Search the range with --sampler optuna, or draw values from the range with --sampler "
                    f"optuna:random. Or list values: --sweep {key}=a,b",
                )
        return None
    names = "|".join(SAMPLERS)
    match = re.fullmatch(rf"optuna(?::({names}))?(?::(\d{{1,9}}))?", sampler)
    if match is None:
        raise UsageError(
            f"--sampler {sampler} is not optuna[:{names}[:SEED]].",
            "For example --sampler optuna:tpe:1",
        )
    if sampling.pruner not in PRUNERS:
        pruners = " | ".join(PRUNERS)
        raise UsageError(f"--pruner {sampling.pruner} is not known.", f"--pruner {pruners}")
    if sampling.trials is not None and sampling.trials < 1:
        raise UsageError(
            f"--trials is {sampling.trials}, expected at least 1.", f"For example --trials {TRIALS}"
        )
    if find_spec("optuna") is None:
        raise MachineError(
            "--sampler optuna needs the package optuna, which is not installed.",
            "pip install 'fedcache[optuna]'",
        )
    # A method that is named twice is searched once.
    distinct = tuple(dict.fromkeys(methods))
    dimensions = {key: _dimension(distinct, key, tuple(values)) for key, values in sweeps.items()}
    search = SearchPlan(
        distinct,
        dimensions,
        sampler=match[1] or "tpe",
        seed=int(match[2] or 0),
        pruner=sampling.pruner,
        trials=sampling.trials or TRIALS,
    )
    check_sweeps(distinct, search.listed)
    if not sweeps and len(distinct) == 1:
        raise UsageError(
            "--sampler optuna has nothing to search.", "For example --sweep lr=log:1e-4..1"
        )
    return search


def _dimension(
    methods: Sequence[str], key: str, values: tuple[str, ...]
) -> tuple[str, ...] | Range:
    """The values of a swept key, or its range of numbers. Raises UsageError."""
    place, name = split_key(key)
    if place == "partition":
        raise UsageError(
            f"--sweep {key} changes the partition, but a search must compare accuracies on the same "
            "validation rows.",
            "Run one search for each value, with the value as an option instead of --sweep. Or leave --sampler "
            "optuna out.",
        )
    ends_of_values = [_ends_of(value) for value in values]
    if not any(ends_of_values):
        return values
    ends = ends_of_values[0]
    if ends is None or len(values) > 1:
        words = ",".join(values)
        raise UsageError(
            f"--sweep {key}={words} mixes a range with other values.",
            "Give one range, or a list of values.",
        )
    log, low, high = ends
    # The types of the key's values: hyperparameters have a type for each method, and options one type. An option that
    # is neither ``participation`` nor in ``LEAST`` has words as values.
    kinds = {"choice"}
    if place == "set":
        kinds = {find_method(method).hparam(name).kind for method in methods}
    elif name == "participation":
        kinds = {"float"}
    elif name in LEAST:
        # The minimum of an option has the type of its values.
        kinds = {type(LEAST[name]).__name__}
    if not kinds <= {"float", "int"}:
        raise UsageError(
            f"--sweep {key} cannot have a range, because its values are words.",
            f"List them: --sweep {key}=a,b",
        )
    whole_ends = low.is_integer() and high.is_integer()
    # Participation is a number of clients (whole) or a share of them.
    whole = "int" in kinds or (name == "participation" and whole_ends)
    # ``not low < high`` is true for NaN too.
    if not low < high or (log and low <= 0) or (whole and not whole_ends):
        numbers = "numbers"
        example = "log:1e-4..1"
        if whole:
            numbers = "whole numbers"
            example = "8..64"
        order = "with the smaller number first"
        if log:
            order += " and both numbers above 0"
        raise UsageError(
            f"--sweep {key}={values[0]} is not a range of {numbers} {order}.",
            f"For example --sweep {key}={example}",
        )
    return Range(low, high, log, whole)


def _ends_of(value: str) -> tuple[bool, float, float] | None:
    """Whether a range is logarithmic, and its ends; None for a value that is not a range."""
    match = re.fullmatch(r"(log:)?([^:]+?)\.\.([^:]+)", value)
    if match is None:
        return None
    try:
        low = float(match[2])
        high = float(match[3])
    except ValueError:
        return None
    return match[1] is not None, low, high
