"""Events of a run: each of its rounds is passed to an observer and to hooks, such as ``runs.trackers``."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcache.parsing import Facts, Record
from fedcache.progress import Observer, Round, Silent, tell_ended
from fedcache.runs.directory import has_secret_times, rounds_of

OnRound = Callable[[Round], object]
"""A callback that gets every round of a run."""

MEASURED = ("accuracy", "seconds", "clients")
"""Metrics of a round that do not come from the method."""


@dataclass(frozen=True)
class GridPosition:
    """Position of a run in a grid; the default is a run alone."""

    point: str = ""  # the swept values of this run
    done: int = 0  # points of the grid that ended before this run
    points: int = 1  # points of the grid
    grid: str = ""  # name of the grid


ALONE = GridPosition()


class RunEvents:
    """Passes the rounds of one run to an observer, with the bytes that were sent so far.

    Args:
        observer: receives events.
        path: directory of the run.
        facts: values of ``result.json``: method, seeds, rounds, trust, and those that ``shown_settings`` and ``origin``
            read.
        position: in a grid.
    """

    def __init__(
        self,
        observer: Observer,
        path: Path,
        facts: Record,
        position: GridPosition = ALONE,
    ) -> None:
        self.observer = observer
        self.path = path
        self.position = position
        self.method = str(facts["method"])
        self.rounds = int(facts["rounds"])
        self.seeds = [int(seed) for seed in facts["seeds"]]
        self.settings = shown_settings(facts)
        self.about = origin(facts)
        self.secret_times = has_secret_times(facts)
        self._sums: dict[int, tuple[int, int]] = {}  # bytes up and down so far, by seed

    def round_ended(
        self, seed: int, round_: int, metrics: Record, traffic: Mapping[str, int]
    ) -> None:
        """Publish a new round; the arguments are those of the engine's ``on_round``."""
        diagnostics = {name: value for name, value in metrics.items() if name not in MEASURED}
        self._publish(seed, round_, metrics["accuracy"], diagnostics, traffic, stored=False)

    def replay(self, seed: int, records: Iterable[Record]) -> None:
        """Publish rounds of a seed that were computed before: from a checkpoint, a finished seed, or a stored run."""
        for record in records:
            self._publish(
                seed,
                int(record["round"]),
                record["accuracy"],
                record.get("diagnostics", {}),
                record["traffic"],
                stored=True,
            )

    def _publish(
        self,
        seed: int,
        round_: int,
        accuracy: float | None,
        diagnostics: Mapping[str, float | None],
        traffic: Mapping[str, int],
        *,
        stored: bool,
    ) -> None:
        # Bytes of all rounds of the seed so far.
        up, down = self._sums.get(seed, (0, 0))
        sent = up + traffic["up_bytes"]
        received = down + traffic["down_bytes"]
        self._sums[seed] = (sent, received)
        self.observer.round_done(
            Round(
                path=self.path,
                method=self.method,
                seed=seed,
                seed_number=self.seeds.index(seed) + 1,
                seeds=len(self.seeds),
                round=round_,
                rounds=self.rounds,
                accuracy=number(accuracy),
                diagnostics={name: number(value) for name, value in diagnostics.items()},
                up_bytes=traffic["up_bytes"],
                down_bytes=traffic["down_bytes"],
                sent_bytes=sent,
                received_bytes=received,
                point=self.position.point,
                points_done=self.position.done,
                points=self.position.points,
                stored=stored,
                settings=self.settings,
                about=self.about,
                grid=self.position.grid,
                secret_times=self.secret_times,
            )
        )

    def ended(self, result: Record) -> None:
        """Publish the result of the run."""
        tell_ended(self.observer, self.path, result)


def number(value: float | None) -> float | None:
    """A finite float; None for NaN, infinity and None, because JSON has no such numbers."""
    if value is not None and math.isfinite(value):
        return float(value)
    return None


def _selected(values: Record, names: Sequence[str]) -> Facts:
    """The values with these names; names that are missing are skipped."""
    return {name: values[name] for name in names if name in values}


def shown_settings(facts: Record) -> Facts:
    """The settings of a run in one dictionary: those of its result and every hyperparameter."""
    shown = {
        "dataset": facts["dataset"]["slug"],
        "backbones": " + ".join(map(str, facts["backbones"])),
        **_selected(facts, ("preset", "participation", "dtype")),
        **facts["hyperparameters"],
    }
    return {key: "auto" if value is None else value for key, value in shown.items()}


def origin(facts: Record) -> Facts:
    """Digests of a run and the arguments of its partition in one dictionary, with keys such as ``partition.alpha``."""
    flat = _selected(facts, ("digest", "code", "device"))
    if "digest" in facts["dataset"]:
        flat["dataset_digest"] = facts["dataset"]["digest"]
    partition = facts.get("partition", {})
    shown = {**_selected(partition, ("scheme", "seed", "digest")), **partition.get("args", {})}
    for name, value in shown.items():
        flat[f"partition.{name}"] = value
    return flat


def replay_stored(observer: Observer, path: Path, result: Record, position: GridPosition) -> None:
    """Publish all rounds of a finished run, and its result."""
    events = RunEvents(observer, path, result, position)
    for record in rounds_of(path):
        events.replay(int(record["seed"]), [record])
    events.ended(result)


class HookedObserver(Silent):
    """An observer that also hands every round to hooks.

    A hook that raises is reported and not called again. The run continues, because a tracker must not stop a training.

    Args:
        observer: receives all events. If it is None, a failure of a hook is a Python warning.
        hooks: called with every round.
    """

    def __init__(self, observer: Observer | None, hooks: Sequence[OnRound]) -> None:
        self._observer = observer or Silent()
        self._has_observer = observer is not None
        self._hooks = list(hooks)
        # These events are passed to the observer only.
        for method in ("note", "warn", "start", "advance", "stop"):
            setattr(self, method, getattr(self._observer, method))

    def round_done(self, round_: Round) -> None:
        """Pass a round to the observer and to every hook."""
        self._observer.round_done(round_)
        self._call(lambda hook: hook(round_), f"in round {round_.round} of seed {round_.seed}")

    def ended(self, path: Path, result: Record) -> None:
        """Pass the result to the observer, and to every hook that has a method ``ended``."""
        tell_ended(self._observer, path, result)

        def call(hook: Any) -> None:
            if hasattr(hook, "ended"):
                hook.ended(path, result)

        self._call(call, f"at the end of {path}")

    def _call(self, call: Callable[[Any], object], when: str) -> None:
        for hook in list(self._hooks):
            try:
                call(hook)
            except Exception as error:
                self._hooks.remove(hook)
                self._failed(hook, when, error)

    def _failed(self, hook: OnRound, when: str, error: Exception) -> None:
        name = getattr(hook, "__qualname__", None) or type(hook).__name__
        kind = type(error).__name__
        text = f"The callback {name} failed {when}. The run continues without it. {kind}: {error}"
        if self._has_observer:
            self._observer.warn(text)
        else:
            warnings.warn(text, RuntimeWarning, stacklevel=2)


def with_hooks(observer: Observer | None, hooks: Sequence[OnRound]) -> Observer:
    """An observer that also calls the hooks; the observer itself if there are none."""
    if hooks:
        return HookedObserver(observer, hooks)
    return observer or Silent()
