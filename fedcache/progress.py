"""Progress of long calls. The library prints nothing; the command line listens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

VALIDATION_ACCURACY = "validation_accuracy"
"""Among the diagnostics of a round that was scored: the accuracy on validation rows, where there are some."""


@dataclass(frozen=True)
class Round:
    """Figures of one round of a run. Every round of every run is reported once and in order.

    Attributes:
        path: directory of the run; its name is the first 16 digits of the run's digest.
        method: its name.
        seed: the seed this round belongs to.
        seed_number: its place among the run's seeds, from 1.
        seeds: how many seeds the run has.
        round: from 1.
        rounds: of every seed.
        accuracy: a fraction, the headline of the method's protocol; None for a round that was not measured.
        diagnostics: the method's own numbers of a measured round.
        up_bytes: that this round's clients sent, all together.
        down_bytes: that they were sent.
        sent_bytes: up of this seed up to and with this round.
        received_bytes: down of this seed up to and with this round.
        point: the swept values, ``lr=0.1 tau=0.05``; "" for a run alone.
        points_done: points of the grid that had ended before.
        points: of the grid; 1 for a run alone.
        stored: whether it was computed by an earlier call, and is read from what that one kept.
        settings: dataset, backbones, preset and every hyperparameter of the run, by name.
        about: digests of the run, and how its rows were assigned, by name.
        grid: the name of the grid that the run is a point of; "" for a run alone.
        secret_times: whether the time at which this round ended must stay secret. It grows with the number of clients
            that took part, which the epsilon of a private run assumes to be unknown.
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
    """A note on a choice that the result repeats or implies. ``train`` and ``grid`` print it only with -v."""


class Observer(Protocol):
    """Listens to a long call. Every method may be called from the calling thread only."""

    def note(self, text: str) -> None:
        """A line of the story: a choice and why, a plan, a summary."""

    def warn(self, text: str) -> None:
        """A warning for the user; the call continues."""

    def start(self, what: str, total: int, unit: str) -> None:
        """A measured stretch of work begins: ``total`` units of ``unit`` (``images``, ``rounds``)."""

    def round_done(self, round_: Round) -> None:
        """The figures of a round of training; ``advance`` counts it. Also called for rounds that were stored before.

        An observer may also have ``ended(path, result)``, called when a run has its result.
        """

    def advance(self, units: int) -> None:
        """So many more units are done."""

    def stop(self) -> None:
        """The stretch is over."""


@contextmanager
def progress_of(observer: Observer, what: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """A context with a function that reports progress as (units done, units in all).

    A stretch begins with the first call, and another one where fewer units are done than before.
    """
    seen = 0

    # Work may begin again from 0, as for each of several files: then the observer gets a new stretch.
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
    """Tell an observer that listens for it that a run has its result, the content of ``result.json``."""
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
    """An observer that passes everything on, but a sentence that was said before: of a grid, what holds for all points.

    Args:
        observer: receives the calls.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._said: set[tuple[str, str]] = set()
        for passed_on in ("start", "round_done", "advance", "stop"):
            setattr(self, passed_on, getattr(observer, passed_on))

    def ended(self, path: Path, result: Mapping[str, Any]) -> None:
        """Passed on."""
        tell_ended(self._observer, path, result)

    def note(self, text: str) -> None:
        """Passed on the first time."""
        if self._is_new("note", text):
            self._observer.note(text)

    def warn(self, text: str) -> None:
        """Passed on the first time."""
        if self._is_new("warn", text):
            self._observer.warn(text)

    def _is_new(self, kind: str, text: str) -> bool:
        new = (kind, text) not in self._said
        self._said.add((kind, text))
        return new


def byte_size(count: int) -> str:
    """Bytes for a person: exact below 1,000."""
    value = float(count)
    unit = "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    if unit == "B":
        return f"{count} B"
    return f"{value:,.1f} {unit}"


def percent(value: float | None) -> str:
    """A fraction as percent with two decimals; a dash for none."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{100 * value:.2f}"
