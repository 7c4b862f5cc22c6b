"""Shared code of trackers: one tracked run for every run and seed, its parameters, and its final figures."""

from __future__ import annotations

import json
import math
import platform
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from fedcache.parsing import parse_toml
from fedcache.progress import Round
from fedcache.runs.directory import PLACES, measured_of

OPEN = 32
"""Maximum number of seeds that are written at the same time, because each needs a file and a thread. Rounds of other
seeds wait until one of these seeds has ended."""

PROJECT = "fedcache"
"""Default project or experiment of tracked runs; the library's environment variables take precedence."""

Seed = tuple[Path, int]
"""Directory of a run, and one of its seeds."""

Figures = Mapping[str, float]
"""Name -> final value."""


class SeedLog(Protocol):
    """Destination of the rounds of one seed."""

    def write(self, round_: Round) -> None:
        """Write one round."""

    def end(self, figures: Figures | None) -> None:
        """Write the final figures and close; they are None for a run that was stopped."""


class SeedTracker(ABC):
    """A tracker that has one tracked run for every run and seed.

    All rounds of a seed are passed to the tracker, even if training resumes from a checkpoint or the result is stored
    already. A tracked run of the same seed is replaced. So no round is repeated, and none is missing.

    Args:
        most_open: maximum number of seeds that are written at the same time, by default ``OPEN``; rounds of other seeds
            wait in memory.
    """

    def __init__(self, most_open: int | None = None) -> None:
        self._most_open = most_open or OPEN
        self._open: dict[Seed, SeedLog] = {}
        self._waiting: dict[Seed, list[Round]] = {}
        self.failed = False  # whether something could not be written

    @abstractmethod
    def begin(self, round_: Round) -> SeedLog:
        """Open the tracked run of a seed; ``round_`` is its first round."""

    def __call__(self, round_: Round) -> None:
        """Write one round, or keep it until another seed has ended."""
        key = (round_.path, round_.seed)
        if key not in self._open and len(self._open) >= self._most_open:
            self._waiting.setdefault(key, []).append(round_)
            return
        try:
            self._write(key, [*self._waiting.pop(key, []), round_])
        except Exception:
            self.failed = True
            raise

    def ended(self, path: Path, result: Mapping[str, Any]) -> None:
        """Write the final figures of a run, and close its seeds."""
        seeds = [key for key in (*self._open, *self._waiting) if key[0] == path]
        try:
            for key in seeds:
                self._write(key, self._waiting.pop(key, []))
                figures = final_figures(path, result, key[1])
                self._open.pop(key).end(figures)
        except Exception:
            self.failed = True
            raise

    def close(self) -> None:
        """Write the waiting rounds of runs without a result, and close all; after a failure nothing more is written."""
        while not self.failed and (self._open or self._waiting):
            key = next(iter((*self._open, *self._waiting)))
            self._write(key, self._waiting.pop(key, []))
            self._open.pop(key).end(None)
        for log in self._open.values():
            with suppress(Exception):  # the first failure was reported before
                log.end(None)
        self._open.clear()

    def _write(self, key: Seed, rounds: list[Round]) -> None:
        for round_ in rounds:
            if key not in self._open:
                self._open[key] = self.begin(round_)
            self._open[key].write(round_)


@dataclass(frozen=True)
class TrackedName:
    """Names of a tracked run."""

    key: str  # identifies the seed of the run; equal if it is tracked again
    name: str  # for the user
    group: str  # of the points of a grid, or of the seeds of a run; "" for a run with one seed


def name_of(round_: Round) -> TrackedName:
    """The names of the tracked run of a round."""
    words = [round_.method, f"seed {round_.seed}"]
    if round_.point:
        words.insert(1, round_.point)
    run = round_.path.name
    group = round_.grid
    # Without a grid, the seeds of a run are a group.
    if not group and round_.seeds > 1:
        group = f"{round_.method}-{run}"
    return TrackedName(f"{run}-seed-{round_.seed}", " ".join(words), group)


def metrics_of(round_: Round) -> dict[str, float]:
    """The figures of a round: ``accuracy``, ``bytes/up`` and ``bytes/down`` so far, ``diagnostics/<name>``.

    Figures that were not measured are left out.
    """
    figures = {}
    if round_.accuracy is not None:
        figures["accuracy"] = round_.accuracy
    figures["bytes/up"] = float(round_.sent_bytes)
    figures["bytes/down"] = float(round_.received_bytes)
    for name, value in round_.diagnostics.items():
        if value is not None:
            figures[f"diagnostics/{name}"] = value
    return figures


def parameters_of(round_: Round) -> dict[str, bool | int | float | str]:
    """Everything that determines the run of a round: its configuration and settings, digests, and versions."""
    file: Mapping[str, Any] = {}
    with suppress(OSError, ValueError, KeyError):
        file = parse_toml((round_.path / "config.toml").read_text(encoding="utf-8"))["train"]
    # ``PLACES`` may differ between equal runs; the round itself has the settings and its seed.
    left_out = (*PLACES, "set", "seeds")
    from_file = {name: value for name, value in file.items() if name not in left_out}
    versions = {"version.python": platform.python_version()}
    for name in ("fedcache", "torch", "numpy"):
        with suppress(metadata.PackageNotFoundError):  # not installed, but run from a folder
            versions[f"version.{name}"] = metadata.version(name)
    parameters = {
        **from_file,
        **round_.settings,
        "method": round_.method,
        "seed": round_.seed,
        "rounds": round_.rounds,
        "point": round_.point or None,
        "grid": round_.grid or None,
        **round_.about,
        "run": round_.path.name,
        **versions,
    }
    return {key: _plain(value) for key, value in parameters.items() if value is not None}


def _plain(value: Any) -> bool | int | float | str:
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple | dict):
        return json.dumps(value, default=str)
    return str(value)


def final_figures(path: Path, result: Mapping[str, Any], seed: int) -> dict[str, float]:
    """Final figures of a run: the values of one seed, and ``mean`` and ``std`` over all seeds. All are finite."""
    index = [int(number) for number in result["seeds"]].index(seed)
    values = {}
    for name in ("accuracy", "validation", "macro_f1"):
        figures = result.get(name) or {}
        per_seed = figures.get("per_seed") or []
        if index < len(per_seed):
            values[name] = per_seed[index]
        values[f"{name}_mean"] = figures.get("mean")
        values[f"{name}_std"] = figures.get("std")
    for name, value in result.get("fairness", {}).items():
        values[f"clients/{name}"] = value
    values["trainable_parameters"] = result.get("parameters", {}).get("trainable")
    measured = measured_of(path, result) or {}
    seconds = measured.get("seconds") or {}
    values["seconds"] = seconds.get("train")
    finite = {}
    for name, value in values.items():
        if isinstance(value, int | float) and math.isfinite(value):
            finite[f"final/{name}"] = float(value)
    return finite
