"""Search space of ``--sampler optuna``: values and ranges of ``--sweep``, and how points are drawn from them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from fedcache.errors import MachineError, UsageError
from fedcache.federate.methods import find_method
from fedcache.grids.points import LEAST, check_sweeps, split_key
from fedcache.grids.sampling import PRUNERS, SAMPLERS, TRIALS, Sampling

PointKey = tuple[str, tuple[tuple[str, str], ...]]
"""A method and its swept values. Equal configurations have equal keys."""

DIGITS = 4
"""Significant digits of a drawn number."""
MOST_CHECKED = 200
"""Maximum number of configurations of a space that are checked before the search."""
MOST_LISTED = 100_000
"""Maximum size of a space whose configurations are listed to find those that are untried."""


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
