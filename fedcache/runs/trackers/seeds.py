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
"""Seeds that are written at a time: each is a file and a thread. Points of a grid beyond them are written when others
have ended."""

PROJECT = "fedcache"
"""Project or experiment of tracked runs, where the library's environment names none."""

Seed = tuple[Path, int]
"""Directory of a run, and one of its seeds."""

Figures = Mapping[str, float]
"""Final figures by name."""


class SeedLog(Protocol):
    """Destination of the rounds of one seed."""

    def write(self, round_: Round) -> None:
        """Write one round."""

    def end(self, figures: Figures | None) -> None:
        """Write what the run gave and close; None for a run that has not ended."""


class SeedTracker(ABC):
    """A tracker that has one tracked run for every run and seed.

    A seed is reported from its first round on, also where it continues from a checkpoint or is read from a stored
    result, and what was tracked of it before is replaced: no round is there twice, and none is missing.

    Args:
        most_open: seeds that are written at a time; the rounds of others wait in memory.
    """

    def __init__(self, most_open: int) -> None:
        self._most_open = most_open
        self._open: dict[Seed, SeedLog] = {}
        self._waiting: dict[Seed, list[Round]] = {}
        self._failed = False

    @property
    def failed(self) -> bool:
        """Whether something could not be written."""
        return self._failed

    @abstractmethod
    def begin(self, round_: Round) -> SeedLog:
        """Open the tracked run of a seed, of which this is the first round."""

    def __call__(self, round_: Round) -> None:
        """Write one round, or have it wait."""
        key = (round_.path, round_.seed)
        if key not in self._open and len(self._open) >= self._most_open:
            self._waiting.setdefault(key, []).append(round_)
            return
        try:
            self._write(key, [*self._waiting.pop(key, []), round_])
        except Exception:
            self._failed = True
            raise

    def ended(self, path: Path, result: Mapping[str, Any]) -> None:
        """A run has its result: write its final figures, and close its seeds."""
        try:
            for key in [key for key in (*self._open, *self._waiting) if key[0] == path]:
                self._write(key, self._waiting.pop(key, []))
                self._open.pop(key).end(final_figures(path, result, key[1]))
        except Exception:
            self._failed = True
            raise

    def close(self) -> None:
        """Write what waits of runs that have no result, and close it; after a failure nothing more is written."""
        while not self._failed and (self._open or self._waiting):
            key = next(iter((*self._open, *self._waiting)))
            self._write(key, self._waiting.pop(key, []))
            self._open.pop(key).end(None)
        for log in self._open.values():
            with suppress(Exception):  # which was told before
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

    key: str  # the same whenever the same seed of the same run is tracked
    name: str  # for a person
    group: (
        str  # of the points of a grid, or of the seeds of a run; "" for a run alone with one seed
    )


def name_of(round_: Round) -> TrackedName:
    """The names of the tracked run of a round."""
    words = [round_.method, f"seed {round_.seed}"]
    if round_.point:
        words.insert(1, round_.point)
    run = round_.path.name
    group = round_.grid
    # The seeds of a run are a group where no grid groups them.
    if not group and round_.seeds > 1:
        group = f"{round_.method}-{run}"
    return TrackedName(f"{run}-seed-{round_.seed}", " ".join(words), group)


def metrics_of(round_: Round) -> dict[str, float]:
    """The figures of a round: ``accuracy``, ``bytes/up`` and ``bytes/down`` so far, ``diagnostics/<name>``.

    What was not measured is not among them.
    """
    if round_.accuracy is None:
        known = {}
    else:
        known = {"accuracy": round_.accuracy}
    sums = {"bytes/up": float(round_.sent_bytes), "bytes/down": float(round_.received_bytes)}
    return {
        **known,
        **sums,
        **{f"diagnostics/{k}": v for k, v in round_.diagnostics.items() if v is not None},
    }


def parameters_of(round_: Round) -> dict[str, bool | int | float | str]:
    """All that determines the run of a round, flat: words of its result and of its configuration, digests, versions."""
    file: Mapping[str, Any] = {}
    with suppress(OSError, ValueError, KeyError):
        file = parse_toml((round_.path / "config.toml").read_text(encoding="utf-8"))["train"]
    from_file = {k: v for k, v in file.items() if k not in (*PLACES, "set", "seeds")}
    names = ("fedcache", "torch", "numpy")
    versions: dict[str, Any] = {"python": platform.python_version()}
    for name in names:
        with suppress(metadata.PackageNotFoundError):  # run from a folder
            versions[name] = metadata.version(name)
    given = {
        **from_file,
        **round_.settings,
        "method": round_.method,
        "seed": round_.seed,
        "rounds": round_.rounds,
        "point": round_.point or None,
        "grid": round_.grid or None,
        **round_.about,
        "run": round_.path.name,
        **{f"version.{k}": v for k, v in versions.items()},
    }
    return {key: _plain(value) for key, value in given.items() if value is not None}


def _plain(value: Any) -> bool | int | float | str:
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple | dict):
        return json.dumps(value, default=str)
    return str(value)


def final_figures(path: Path, result: Mapping[str, Any], seed: int) -> dict[str, float]:
    """Final figures of a run: those of one seed, and with ``mean`` and ``std`` those over all seeds."""
    place = [int(s) for s in result["seeds"]].index(seed)
    found: dict[str, Any] = {}
    for name in ("accuracy", "validation", "macro_f1"):
        figures = result.get(name) or {}
        per_seed = figures.get("per_seed") or []
        if place < len(per_seed):
            found[name] = per_seed[place]
        found |= {f"{name}_{of}": figures.get(of) for of in ("mean", "std")}
    found |= {f"clients/{name}": value for name, value in result.get("fairness", {}).items()}
    found["trainable_parameters"] = result.get("parameters", {}).get("trainable")
    found["seconds"] = ((measured_of(path, result) or {}).get("seconds") or {}).get("train")
    return {
        f"final/{name}": float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
