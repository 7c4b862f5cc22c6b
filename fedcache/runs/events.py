"""The result stream: each round of a run is passed to an observer and to hooks, such as ``runs.trackers``."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcache.progress import Observer, Round, Silent, tell_ended
from fedcache.runs.directory import rounds_of
from fedcache.runs.result_files import has_secret_times

OnRound = Callable[[Round], object]
"""A hook on the result stream."""

MEASURED = ("accuracy", "seconds", "clients")
"""What the engine's metrics of a round hold besides the method's diagnostics."""


@dataclass(frozen=True)
class GridPosition:
    """Position of a run in a grid; the default is a run alone."""

    point: str = ""  # its swept values in words
    done: int = 0  # points that had ended before
    points: int = 1  # of the grid
    grid: str = ""  # its name


ALONE = GridPosition()


class RunEvents:
    """Tells an observer of the rounds of one run, and counts what they have sent.

    Args:
        observer: receives events.
        path: directory of the run.
        facts: what ``result.json`` says under these names: method, seeds, rounds, trust, and what ``shown_settings``
            and ``origin`` read.
        position: in a grid.
    """

    def __init__(
        self,
        observer: Observer,
        path: Path,
        facts: Mapping[str, Any],
        position: GridPosition = ALONE,
    ) -> None:
        self.observer = observer
        self.path = path
        self.position = position
        self.method = str(facts["method"])
        self.rounds = int(facts["rounds"])
        self.seeds = [int(s) for s in facts["seeds"]]
        self.settings = shown_settings(facts)
        self.about = origin(facts)
        self.secret_times = has_secret_times(facts)
        self._sums: dict[int, tuple[int, int]] = {}

    def round_ended(
        self, seed: int, round_: int, metrics: Mapping[str, Any], traffic: Mapping[str, int]
    ) -> None:
        """A round as the engine's ``on_round`` has it: metrics hold the accuracy and the method's diagnostics."""
        diagnostics = {k: v for k, v in metrics.items() if k not in MEASURED}
        self._publish(seed, round_, metrics["accuracy"], diagnostics, traffic, stored=False)

    def replay(self, seed: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Rounds of a seed that were computed before: of a checkpoint, of a finished seed, or of a stored run."""
        for r in records:
            self._publish(
                seed,
                int(r["round"]),
                r["accuracy"],
                r.get("diagnostics", {}),
                r["traffic"],
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
                diagnostics={k: number(v) for k, v in diagnostics.items()},
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

    def ended(self, result: Mapping[str, Any]) -> None:
        """The run has its result."""
        tell_ended(self.observer, self.path, result)


def number(value: float | None) -> float | None:
    """A float that JSON has, or None."""
    if value is not None and math.isfinite(value):
        return float(value)
    return None


def shown_settings(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run, flat: the words of its result and every hyperparameter."""
    shown = {
        "dataset": facts["dataset"]["slug"],
        "backbones": " + ".join(map(str, facts["backbones"])),
        **{k: facts[k] for k in ("preset", "participation", "dtype") if k in facts},
        **facts["hyperparameters"],
    }
    return {key: "auto" if value is None else value for key, value in shown.items()}


def origin(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Digests of a run, and the scheme of its partition, flat: ``partition.alpha``."""
    part = facts.get("partition", {})
    dealt = {
        **{k: part[k] for k in ("scheme", "seed", "digest") if k in part},
        **part.get("args", {}),
    }
    known = {k: facts[k] for k in ("digest", "code", "device") if k in facts}
    if "digest" in facts["dataset"]:
        data = {"dataset_digest": facts["dataset"]["digest"]}
    else:
        data = {}
    return {**known, **data, **{f"partition.{k}": v for k, v in dealt.items()}}


def replay_stored(
    observer: Observer, path: Path, result: Mapping[str, Any], position: GridPosition = ALONE
) -> None:
    """All rounds of a run whose result is there."""
    events = RunEvents(observer, path, result, position)
    for record in rounds_of(path):
        events.replay(int(record["seed"]), [record])
    events.ended(result)


class HookedObserver(Silent):
    """An observer that also hands every round to hooks.

    A hook that raises is reported and not called again, and the run continues: tracking never costs a training.

    Args:
        observer: everything is passed on to it; None for no observer, and then a failure is a Python warning.
        hooks: called with every round.
    """

    def __init__(self, observer: Observer | None, hooks: Sequence[OnRound]) -> None:
        self._observer = observer or Silent()
        self._heard = observer is not None
        self._hooks = list(hooks)
        for passed_on in ("note", "warn", "start", "advance", "stop"):
            setattr(self, passed_on, getattr(self._observer, passed_on))

    def round_done(self, round_: Round) -> None:
        """Passed on, and to every hook."""
        self._observer.round_done(round_)
        self._call(lambda hook: hook(round_), f"in round {round_.round} of seed {round_.seed}")

    def ended(self, path: Path, result: Mapping[str, Any]) -> None:
        """Passed on, and to every hook that has a method ``ended``."""
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
        text = f"on_round {name} failed {when} and is not called again; the run continues. {kind}: {error}"
        if self._heard:
            self._observer.warn(text)
        else:
            warnings.warn(text, RuntimeWarning, stacklevel=2)


def with_hooks(observer: Observer | None, hooks: Sequence[OnRound]) -> Observer:
    """The observer itself if there is no hook."""
    if hooks:
        return HookedObserver(observer, hooks)
    return observer or Silent()
