"""Search space of ``--sampler optuna``: values and ranges of ``--sweep``, and the draw of the next point."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from fedcache.errors import MachineError, UsageError
from fedcache.federate.methods import find_method
from fedcache.grids.points import NUMBERS, check_sweeps, split_key
from fedcache.grids.sampling import PRUNERS, SAMPLERS, TRIALS, Sampling

PointKey = tuple[str, tuple[tuple[str, str], ...]]
"""A method and its swept values, which tell points apart."""

WHOLE_NUMBERS = ("rounds", "max_rows_per_client", "dp_seed", "asynchronous")
DIGITS = 4
MOST_CHECKED = 200
MOST_LISTED = 100_000
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
    if place == "run" and name in (*NUMBERS, "participation"):
        kinds = {"float"}
    else:
        kinds = {"int"}
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
        what = "numbers"
        if whole:
            what = "whole numbers"
        raise UsageError(
            f"--sweep {key}={values[0]} is no range of {what}, the lower first{', above 0' * log}.",
            f"For example --sweep {key}=" + ("8..64" if whole else "log:1e-4..1"),
        )
    return Range(low, high, log, whole)


def _ends_of(value: str) -> tuple[bool, float, float] | None:
    """Whether a range is logarithmic, and its ends; None for a value that is none."""
    match = re.fullmatch(r"(log:)?([^:]+?)\.\.([^:]+)", value)
    try:
        if match is None:
            return None
        return (match[1] is not None, float(match[2]), float(match[3]))
    except ValueError:
        return None
