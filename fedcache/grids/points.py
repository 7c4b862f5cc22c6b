"""The points of a grid: what the keys of ``--sweep`` mean, which points there are, and which are one program. Keys and
values are looked at before anything runs.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.config import Home, PartitionConfig, TrainConfig, field_names
from fedcache.errors import MachineError, UsageError, shell_word, unknown
from fedcache.extract.backbones.table import lookup
from fedcache.extract.planning.find_store import need_store
from fedcache.federate.methods import find_method
from fedcache.federate.partition.partition import SCHEMES
from fedcache.federate.trust.attacks import parse_attack
from fedcache.federate.trust.policy import NO_ATTACK
from fedcache.federate.trust.robust_rules import parse_rule
from fedcache.progress import Observer
from fedcache.runs.spec import TIMING_OPTIONS, TRUST_OPTIONS, parse_participation
from fedcache.store.groups import column_of
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
        return None if value == NO_ATTACK else parse_attack(value)
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
    if (
        "hold_out" in mine
    ):  # one value, whatever characters it has: as words it would be split at commas
        options["hold_out"] = (mine["hold_out"],)
    clients = int(mine["clients"]) if "clients" in mine else base.clients
    return PartitionConfig(mine.get("scheme", base.scheme), clients, base.seed, options)


# ``--hold-out each``: every value of a column is held out in turn, one point of a grid for each.


EACH = "each"
MOST = 50
"""Values of a column that are held out in turn without being named: each is a point of every method and setting."""

NAMED = 10
"""Values that are named in a message."""


def every_value(
    by: str,
    config: TrainConfig,
    home: Home,
    *,
    min_rows: object = 1,
    observer: Observer | None = None,
) -> tuple[str, ...]:
    """The values of a column of the store that is meant; of domains, those that are chosen.

    A value with less than ``min_rows`` rows is not held out, which the observer is told. Raises UsageError for a column
    with one such value, or with more than ``MOST``; StoreError where nothing is extracted.
    """
    path = None if config.store is None else Path(config.store)
    store = need_store(home, path=path, dataset=config.dataset)
    column = column_of(store, by)
    words: tuple[str, ...] = column.words
    if by == "domain" and config.domain:
        words = tuple(word for word in words if word in config.domain)
    if len(words) < 2:
        raise UsageError(
            f"--hold-out each: the column {by} has one value, {', '.join(words)}, so nobody is left to train.",
            "Another column:  --by COLUMN   (`fedcache inspect` shows them)",
        )
    if (
        str(min_rows).isdigit() and (least := int(str(min_rows))) > 1
    ):  # another value is refused when rows are dealt
        codes = column.codes[store.column("ok") == 1]
        counts = np.bincount(codes[codes >= 0], minlength=len(column.words))
        rows = dict(zip(column.words, counts.tolist(), strict=True))
        words, small = (
            tuple(w for w in words if (rows[w] >= least) is enough) for enough in (True, False)
        )
        if len(words) < 2:
            second = sorted((rows[word] for word in (*words, *small)), reverse=True)[1]
            raise UsageError(
                f"--hold-out each: two values of {by} are needed that have {least:,} rows or more, and there are "
                f"{len(words)}.",
                f"--min-rows {second}",
            )
        if small and observer is not None:
            more = f" and {len(small) - NAMED:,} more" if len(small) > NAMED else ""
            observer.note(
                f"Less than {least:,} rows, and so not held out: {', '.join(small[:NAMED])}{more}."
            )
    if len(words) > MOST:
        some = ",".join([word for word in words if "," not in word][:2]) or "VALUE,VALUE"
        raise UsageError(
            f"--hold-out each: the column {by} has {len(words):,} values, and each would be held out in a run of its "
            f"own; more than {MOST} are not meant by a single word.",
            "Name those that are to be held out in turn:  "
            f"--by {shell_word(by)} --sweep {shell_word(f'hold_out={some}')}",
        )
    return words


# How the points of a grid are drawn, as it is asked for; without torch, as commands read it.


SAMPLERS, PRUNERS, TRIALS = ("tpe", "random", "gp"), ("none", "median", "asha"), 40
"""Of a search: how points are drawn, how trials are stopped on their way, and how many there are."""


@dataclass(frozen=True)
class Sampling:
    """How the points of a grid are drawn, as it is asked for."""

    sampler: str = "grid"  # grid, random:N[:SEED] or optuna[:SAMPLER[:SEED]]
    trials: int | None = None
    pruner: str = "none"


# What ``--sampler optuna`` searches: values and ranges of ``--sweep``, and how the next point is
# drawn.


PointKey = tuple[str, tuple[tuple[str, str], ...]]
"""A method and its swept values, which tell points apart."""

WHOLE_NUMBERS = ("rounds", "max_rows_per_client", "dp_seed", "asynchronous")
DIGITS, MOST_CHECKED, MOST_LISTED = 4, 200, 100_000
"""Digits of a drawn number; corners of a space that are checked beforehand; points up to which a space is listed."""


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, both included: ``0.1..0.9``, ``log:1e-4..1``, ``8..64``."""

    low: float
    high: float
    log: bool  # whether all orders of magnitude are equally likely
    whole: bool

    def word(self, value: float) -> str:
        """A number of the range as it is swept: whole, or with four digits, so that a person can type it."""
        if self.whole:
            return str(int(value))
        return repr(min(max(float(f"{value:.{DIGITS}g}"), self.low), self.high))

    @property
    def ends(self) -> tuple[str, ...]:
        """Both ends as words."""
        return self.word(self.low), self.word(self.high)


@dataclass(frozen=True)
class SearchPlan:
    """A search: its space, and how points are drawn and stopped."""

    methods: tuple[str, ...]
    space: Mapping[
        str, tuple[str, ...] | Range
    ]  # swept key -> values, of which one is taken, or numbers
    sampler: str = "tpe"  # of ``SAMPLERS``
    seed: int = 0
    pruner: str = "none"  # of ``PRUNERS``
    trials: int = TRIALS

    @property
    def words(self) -> str:
        """Sampler, seed and pruner for a person."""
        return f"{self.sampler}, seed {self.seed}" + (
            "" if self.pruner == "none" else f", pruner {self.pruner}"
        )

    @property
    def size(self) -> float:
        """Points of the space; infinite where there are ranges of numbers that are not whole."""
        sizes = [
            (math.inf if not v.whole else v.high - v.low + 1) if isinstance(v, Range) else len(v)
            for v in self.space.values()
        ]
        return math.prod([len(self.methods), *sizes])

    def ordered(self, key: str) -> tuple[str, ...] | None:
        """Three or more numbers of a list by size: the next one is more alike than the others. None for other values.

        What the sampler draws is the place among them.
        """
        values = self.space[key]
        if isinstance(values, Range) or len(values) < 3:
            return None
        try:
            return tuple(sorted(values, key=float))
        except ValueError:
            return None

    def every_point(self) -> Iterator[PointKey]:
        """All points of a space without ranges of numbers that are not whole."""
        values = [
            tuple(map(str, range(int(v.low), int(v.high) + 1))) if isinstance(v, Range) else v
            for v in self.space.values()
        ]
        for method, *words in itertools.product(self.methods, *values):
            yield method, tuple(zip(self.space, words, strict=True))

    def corners(self) -> list[tuple[str, dict[str, str]]]:
        """Points by which the space is checked before anything is trained: of ranges the ends, of lists all values."""
        ends = [v.ends if isinstance(v, Range) else v for v in self.space.values()]
        every = itertools.islice(itertools.product(self.methods, *ends), MOST_CHECKED)
        return [(method, dict(zip(self.space, words, strict=True))) for method, *words in every]


def search_of(
    sampling: Sampling, methods: Sequence[str], sweeps: Mapping[str, Sequence[str]]
) -> SearchPlan | None:
    """The search that is asked for; None for a grid whose points are known beforehand.

    Raises UsageError for what makes no sense; MachineError, with the line that installs it, where Optuna is missing.
    """
    if not sampling.sampler.startswith("optuna"):
        for option, given in (
            ("--trials", sampling.trials is not None),
            ("--pruner", sampling.pruner != "none"),
        ):
            if given:
                raise UsageError(
                    f"{option} is of a search, and the sampler is {sampling.sampler}.",
                    "--sampler optuna",
                )
        for key, values in sweeps.items():
            if any(_ends_of(value) for value in values):
                raise UsageError(
                    f"--sweep {key}={','.join(values)} is a range, and a grid has every value by itself.",
                    f"--sampler optuna searches it, optuna:random draws from it; or list values: --sweep {key}=a,b",
                )
        return None
    match = re.fullmatch(rf"optuna(?::({'|'.join(SAMPLERS)}))?(?::(\d{{1,9}}))?", sampling.sampler)
    if match is None:
        raise UsageError(
            f"--sampler {sampling.sampler} is not optuna[:{'|'.join(SAMPLERS)}[:SEED]].",
            "For example --sampler optuna:tpe:1",
        )
    if sampling.pruner not in PRUNERS:
        raise UsageError(
            f"--pruner {sampling.pruner} is not known.", f"--pruner {' | '.join(PRUNERS)}"
        )
    if sampling.trials is not None and sampling.trials < 1:
        raise UsageError(
            f"--trials is {sampling.trials}, expected at least 1.", f"For example --trials {TRIALS}"
        )
    if find_spec("optuna") is None:
        raise MachineError(
            "--sampler optuna needs the package optuna, which is not installed.",
            "pip install 'fedcache[optuna]'",
        )
    names = tuple(dict.fromkeys(methods))
    space = {key: _dimension(names, key, tuple(values)) for key, values in sweeps.items()}
    check_sweeps(names, {key: v.ends if isinstance(v, Range) else v for key, v in space.items()})
    if not sweeps and len(names) == 1:
        raise UsageError(
            "--sampler optuna has nothing to search.", "For example --sweep lr=log:1e-4..1"
        )
    return SearchPlan(
        names,
        space,
        match[1] or "tpe",
        int(match[2] or 0),
        sampling.pruner,
        sampling.trials or TRIALS,
    )


def _dimension(
    methods: Sequence[str], key: str, values: tuple[str, ...]
) -> tuple[str, ...] | Range:
    place, name = split_key(key)
    if place == "partition":
        raise UsageError(
            f"--sweep {key} deals other rows, and a search compares accuracies on the same validation rows.",
            "Make one search for each value, with its option and without this --sweep; or leave --sampler optuna out",
        )
    found = [_ends_of(value) for value in values]
    if not any(found):
        return values
    ends = found[0]
    if ends is None or len(values) > 1:
        raise UsageError(
            f"--sweep {key}={','.join(values)} mixes a range with other values.",
            "One range, or a list.",
        )
    log, low, high = ends
    kinds = {"float"} if place == "run" and name in (*NUMBERS, "participation") else {"int"}
    if place == "set":
        kinds = {find_method(method).hparam(name).kind for method in methods}
    elif name not in (*NUMBERS, *WHOLE_NUMBERS, "participation"):
        kinds = {"choice"}
    if not kinds <= {"float", "int"}:
        raise UsageError(
            f"--sweep {key} has no range: its values are words.", f"List them: --sweep {key}=a,b"
        )
    whole = "int" in kinds or (name == "participation" and low.is_integer() and high.is_integer())
    if (
        not low < high
        or (log and low <= 0)
        or (whole and not (low.is_integer() and high.is_integer()))
    ):
        what = "whole numbers" if whole else "numbers"
        raise UsageError(
            f"--sweep {key}={values[0]} is no range of {what}, the lower first{', above 0' * log}.",
            f"For example --sweep {key}=" + ("8..64" if whole else "log:1e-4..1"),
        )
    return Range(low, high, log, whole)


def _ends_of(value: str) -> tuple[bool, float, float] | None:
    """Whether a range is logarithmic, and its ends; None for a value that is none."""
    match = re.fullmatch(r"(log:)?([^:]+?)\.\.([^:]+)", value)
    try:
        return None if match is None else (match[1] is not None, float(match[2]), float(match[3]))
    except ValueError:
        return None
