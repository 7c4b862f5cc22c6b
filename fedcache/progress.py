"""Progress of long calls. The library prints nothing; it reports to observers, such as that of the command line."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

VALIDATION_ACCURACY = "validation_accuracy"
"""Name of the diagnostic for the accuracy on validation rows, in scored rounds of a partition with such rows."""


@dataclass(frozen=True)
class Round:
    """Figures of one round of a run. Every round of every run is reported once and in order.

    Attributes:
        path: directory of the run; its name is the first 16 digits of the run's digest.
        method: name of the method.
        seed: the seed that this round belongs to.
        seed_number: place of the seed among the run's seeds, from 1.
        seeds: number of seeds of the run.
        round: number of the round, from 1.
        rounds: number of rounds of every seed.
        accuracy: a fraction, the primary metric of the method; None for a round that was not scored.
        diagnostics: the method's own numbers of a scored round.
        up_bytes: bytes that all clients of this round sent together.
        down_bytes: bytes that were sent to them.
        sent_bytes: sum of ``up_bytes`` over the rounds of this seed so far, this one included.
        received_bytes: sum of ``down_bytes`` over the same rounds.
        point: the swept values, ``lr=0.1 tau=0.05``; "" for a single run.
        points_done: number of points of the grid that have ended before.
        points: number of points of the grid; 1 for a single run.
        stored: whether the round was computed by an earlier call and is read from a file.
        settings: dataset, backbones, preset and every hyperparameter of the run, by name.
        about: digests of the run, and how its rows were assigned, by name.
        grid: name of the grid that the run is a point of; "" for a single run.
        secret_times: whether the time at which this round ended must stay secret. The time grows with the number of
            clients that took part, which the epsilon of a private run assumes to be unknown.
    """

    path: Path
    method: str
    seed: int
    seed_number: int
    seeds: int
    round: int
    rounds: int
    accuracy: float | None
    diagnostics: Mapping[str, float | None]
    up_bytes: int
    down_bytes: int
    sent_bytes: int
    received_bytes: int
    point: str = ""
    points_done: int = 0
    points: int = 1
    stored: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    about: Mapping[str, Any] = field(default_factory=dict, repr=False)
    grid: str = ""
    secret_times: bool = False


class Detail(str):
    """A note on a choice that the result also shows. ``train`` and ``grid`` print it only with -v."""


class Observer(Protocol):
    """Receiver of the progress of a long call. The call uses these methods only from the thread in which it runs.

    An observer may also have a method ``ended(path, result)``, which is called when a run has its result.
    """

    def note(self, text: str) -> None:
        """Receive one line: a choice and its reason, a plan or a summary."""

    def warn(self, text: str) -> None:
        """Receive a warning for the user; the call continues."""

    def start(self, what: str, total: int, unit: str) -> None:
        """Begin a piece of work of ``total`` units; ``unit`` names them (``images``, ``rounds``)."""

    def round_done(self, round_: Round) -> None:
        """Receive the figures of a round of training, also of stored rounds. A call of ``advance`` counts it."""

    def advance(self, units: int) -> None:
        """Count more units as done."""

    def stop(self) -> None:
        """End the piece of work."""


@contextmanager
def piece_of_work(observer: Observer, what: str, total: int, unit: str) -> Iterator[None]:
    """A piece of work for an observer, which begins and ends with the block; arguments as of ``Observer.start``."""
    observer.start(what, total, unit)
    try:
        yield
    finally:
        observer.stop()


@contextmanager
def progress_of(observer: Observer, what: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """A context with a function that reports progress as (units done, units in total).

    The first call begins a piece of work. A call with fewer units than before begins the next piece, because work may
    start again from 0, as for each of several files.
    """
    seen = 0

    def progress(done: int, total: int) -> None:
        nonlocal seen
        if seen == 0 or done < seen:
            if seen:
                observer.stop()
            observer.start(what, total, unit)
            seen = 0
        observer.advance(done - seen)
        seen = done

    try:
        yield progress
    finally:
        if seen:
            observer.stop()


def tell_ended(observer: Observer, path: Path, result: Mapping[str, Any]) -> None:
    """Call ``ended`` of an observer that has it, with the directory of a run and the content of ``result.json``."""
    ended = getattr(observer, "ended", None)
    if ended is not None:
        ended(path, result)


class Silent:
    """An observer that prints nothing; the default of the Python API."""

    def note(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...
    def start(self, what: str, total: int, unit: str) -> None: ...
    def round_done(self, round_: Round) -> None: ...
    def advance(self, units: int) -> None: ...
    def stop(self) -> None: ...


class EachOnce(Silent):
    """An observer that passes on each sentence only once, such as a note that is the same for all points of a grid.

    Args:
        observer: receives the calls.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._seen: set[tuple[str, str]] = set()
        for passed_on in ("start", "round_done", "advance", "stop"):
            setattr(self, passed_on, getattr(observer, passed_on))

    def ended(self, path: Path, result: Mapping[str, Any]) -> None:
        """Pass on the call."""
        tell_ended(self._observer, path, result)

    def note(self, text: str) -> None:
        """Pass on a note the first time."""
        if self._is_new("note", text):
            self._observer.note(text)

    def warn(self, text: str) -> None:
        """Pass on a warning the first time."""
        if self._is_new("warn", text):
            self._observer.warn(text)

    def _is_new(self, kind: str, text: str) -> bool:
        new = (kind, text) not in self._seen
        self._seen.add((kind, text))
        return new


def byte_size(count: int) -> str:
    """A number of bytes with a unit: exact below 1,000 bytes, else with one decimal."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    if unit == "B":
        return f"{count} B"
    return f"{value:,.1f} {unit}"


def percent(value: float | None) -> str:
    """A fraction as per cent with two decimals and no sign; a dash for None and numbers that are not finite."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{100 * value:.2f}"


def percent_range(ends: tuple[float, float] | None) -> str:
    """The ends of an interval of fractions as per cent; "" for None."""
    if ends is None:
        return ""
    return " to ".join(map(percent, ends))
