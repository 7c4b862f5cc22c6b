"""The life of runs: prepared, opened, trained seed by seed from wherever a killed one stopped, and stored.

A run alone is one point; the points of a grid that differ in floats alone may be trained together where that pays. Each
point is a run with a directory, checkpoints and a result of its own. Checkpoints are written as often as their cost
allows, and a run stops where no finished round is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedcache.config import Home, PartitionConfig, SaveModels, TrainConfig
from fedcache.errors import Exit, FedcacheError, StoppedError
from fedcache.federate.engine.method import Method
from fedcache.federate.engine.outcome import Snapshot, TrainingOutput
from fedcache.federate.engine.run import RunCallbacks, run_points
from fedcache.federate.execution.grid_batch import GridCache
from fedcache.federate.partition.client_table import names_of
from fedcache.process import Stop
from fedcache.progress import Observer, Silent
from fedcache.runs.directory import DamagedRunError
from fedcache.runs.events import ALONE, GridPosition, OnRound, replay_stored, with_hooks
from fedcache.runs.features import RunInputs
from fedcache.runs.forecast import forecast_run, training_run
from fedcache.runs.identity import code_of
from fedcache.runs.open_run import (
    OpenRun,
    note_earlier,
    note_stored,
    open_run,
    prepare_run,
    resolve_inputs,
    row_source,
)
from fedcache.runs.privacy_ledger import LEDGER
from fedcache.runs.row_sources import Preparation
from fedcache.runs.run import Run
from fedcache.runs.run_models import KeptModels
from fedcache.runs.running import owning
from fedcache.runs.spec import check_config, seeds_text

CHECKPOINT_EVERY = 2.0
"""Seconds between checkpoints: what a kill may cost, where writing is cheap."""

CHECKPOINT_SHARE = 0.05
"""Of the time of a run, what checkpoints may take: large states are written less often."""


class CheckpointPace:
    """When to write the next checkpoint; used as a context around writing, so that it knows the cost."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._begun = 0.0
        self._writing = 0.0
        self._cost = 0.0

    def due(self) -> bool:
        """Whether it is time."""
        return time.monotonic() - self._last > max(CHECKPOINT_EVERY, self._cost / CHECKPOINT_SHARE)

    def __enter__(self) -> None:
        self._begun = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._writing += time.monotonic() - self._begun

    def over(self) -> None:
        """All checkpoints of a round are written."""
        self._last = time.monotonic()
        self._cost = self._writing
        self._writing = 0.0


class StopCheck:
    """Ends a run inside a round once a stop is asked for, if the rounds before it are all kept.

    Where the last checkpoint is older, the round is finished first and its state is written: what is lost is less
    than one round, or the time of one.

    Args:
        stop: set by a signal handler.
        story: what is being computed, for the message: "seed 0".
        kept: rounds that are kept already.
    """

    def __init__(self, stop: Stop, story: str, kept: int) -> None:
        self.stop = stop
        self.story = story
        self.begin(kept)

    def begin(self, kept: int) -> None:
        """Rounds start after round ``kept``, whose state is written."""
        self.kept = self.done = kept

    def __call__(self) -> None:
        """Raise if it may stop here."""
        if self.stop.requested and self.kept == self.done:
            raise stopped(f"in round {self.done + 1} of {self.story}; what came before it is kept")


def stopped(where: str) -> FedcacheError:
    """How a stop that was asked for ends a command."""
    return StoppedError(f"Stopped on request {where}.", "Run the same command again to go on.")


def train(
    config: TrainConfig,
    home: Home,
    *,
    method: Method | None = None,
    partition: PartitionConfig | None = None,
    runs: Path | None = None,
    repartition: bool = False,
    extract: bool = True,
    fresh: bool = False,
    observer: Observer | None = None,
    hooks: Sequence[OnRound] = (),
    stop: Stop | None = None,
    save: SaveModels | None = None,
) -> Run:
    """Train a method on cached features, over seeds, and return the run of all seeds of this configuration.

    Seeds that are stored already are not trained again.

    Raises UsageError, StoreError, CorruptionError, FederatedRunError; StoppedError after a stop, resumable.

    Args:
        config: what to train; None fields take the defaults of the method's paper.
        home: where stores and runs are.
        method: one of the user's own, in the place of the one that ``config`` names.
        partition: how to deal rows, when ``config.partition`` names no saved one.
        runs: directory of results instead of ``home.runs``.
        repartition: every seed draws its own partition (else all seeds share one).
        extract: whether to run the extraction that is missing.
        fresh: run again although the result is there.
        observer: told the story.
        hooks: each called with every ``Round``, also those of a stored result; see ``HookedObserver`` for what one
            costs that fails.
        stop: set by a signal handler; honoured where no finished round is lost.
        save: which models are kept; by default those of every seed.
    """
    observer = with_hooks(observer, hooks)
    stop = stop or Stop()
    partition = partition or PartitionConfig()
    check_config(config, partition)
    if method is not None:
        code_of(method)  # refused before anything is extracted
    preparation = Preparation(home, observer, stop, extract, repartition)
    inputs = prepare_run(
        config, row_source(config, partition, preparation), method, home.root / LEDGER
    )
    kept = KeptModels(save or SaveModels())
    return train_run(
        inputs, config, runs or home.runs, fresh=fresh, observer=observer, stop=stop, kept=kept
    )


def train_run(
    inputs: RunInputs,
    config: TrainConfig,
    runs: Path,
    *,
    fresh: bool,
    observer: Observer,
    stop: Stop,
    position: GridPosition = ALONE,
    kept: KeptModels | None = None,
) -> Run:
    """Train every seed of a prepared run and store the result. Raises FedcacheError, as ``train``.

    ``position`` is that of a grid's point; the others are as ``train`` takes them.
    """
    inputs, spec = resolve_inputs(inputs, config, observer)
    run = open_run(
        inputs, spec, runs, fresh=fresh, observer=observer, position=position, kept=kept, stop=stop
    )
    run.kept.check_clients(names_of(inputs.clients))
    if run.stored is not None:
        return _return_stored(run, run.stored, observer, position)
    # refuses what does not fit, before anything is written
    forecast_run(inputs, spec, kept=run.kept, place=run.directory.path)
    return _train_opened(run, observer, stop, position, fresh=fresh)


def _train_opened(
    run: OpenRun, observer: Observer, stop: Stop, position: GridPosition, *, fresh: bool
) -> Run:
    """Train the seeds of one run that are missing, and store the result of all of them."""
    with _training([run], observer, stop):
        if not fresh:
            run.find_stored()  # its owner may have ended while this process waited
        if run.stored is not None:
            return _return_stored(run, run.stored, observer, position)
        if run.earlier:
            note_earlier(run, observer)
        run.begin(fresh=fresh)
        failed = train_seeds([run], None, observer, stop)
        if failed:
            raise failed[0]
        return run.finish(observer)


def _return_stored(run: OpenRun, stored: Run, observer: Observer, position: GridPosition) -> Run:
    """A result that is there already, told as if it were trained now."""
    note_stored(stored, observer)
    more = set(run.earlier) - set(run.spec.seeds)
    if more:
        observer.note(
            f"This run also has seeds {seeds_text(more)}; the result is over all {len(run.earlier)} seeds."
        )
    said = run.kept.says_of_stored(stored.path)
    if said is not None and (position is ALONE or run.kept.which == "all"):
        observer.note(said)
    replay_stored(observer, stored.path, stored.result, position)
    return stored


@contextmanager
def _training(runs: Sequence[OpenRun], observer: Observer, stop: Stop) -> Iterator[None]:
    """Own the directories of runs while the block runs; wait for another process that trains them."""
    folders = [run.directory.path for run in runs]
    with owning(folders, observer, stop, private=runs[0].spec.trust.protects):
        yield


@dataclass(frozen=True)
class PreparedPoint:
    """One point of a grid, ready to be trained."""

    inputs: RunInputs  # those of all points, with the hyperparameters of this one
    config: TrainConfig  # what was asked for it
    position: GridPosition  # in the grid


def train_together(
    points: Sequence[PreparedPoint],
    runs: Path,
    *,
    cache: GridCache,
    fresh: bool,
    observer: Observer,
    stop: Stop,
    on_end: Callable[[int, Run | FedcacheError], None],
    kept: KeptModels | None = None,
) -> None:
    """Train points that differ in floats alone at once, and store each as a run.

    Raises FedcacheError, what concerns all points; INTERRUPTED after a stop.

    Args:
        points: of the grid.
        runs: directory of all runs.
        cache: Gram matrices and features of other points.
        fresh: train points although their results are there.
        observer: told the story once, and the rounds of all points.
        stop: honoured after a round; every point keeps its state.
        on_end: called with the number of each point as it ends, and its run or the error that ended it.
    """
    opened: dict[int, OpenRun] = {}
    for number, point in enumerate(points):
        notes = Silent() if opened else observer  # what is chosen is the same for all
        try:
            run = _open_point(
                point, runs, fresh=fresh, observer=observer, notes=notes, kept=kept, stop=stop
            )
        except DamagedRunError as error:
            on_end(number, error)
            continue
        if run.stored is not None:
            replay_stored(observer, run.stored.path, run.stored.result, point.position)
            on_end(number, run.stored)
            continue
        opened[number] = run
    # The run of a point that was trained alone gets its missing seeds alone too: its seeds are equal bit for bit.
    alone = [number for number, run in opened.items() if run.earlier and not run.spec.together]
    for number in alone:
        run = opened.pop(number)
        try:
            on_end(
                number,
                _train_opened(run, observer, stop, points[number].position, fresh=fresh),
            )
        except FedcacheError as error:
            if not isinstance(error, DamagedRunError) and error.code is not Exit.FEDERATED:
                raise
            on_end(number, error)
    if not opened:
        return
    if kept is not None and kept.clients is not None:
        first = next(iter(opened.values()))
        forecast_run(first.inputs, first.spec, len(opened), kept, runs)
    with _training(list(opened.values()), observer, stop):
        for number, run in list(opened.items()):
            if fresh:
                break
            out = _ended_meanwhile(run)
            if out is None:
                continue
            if isinstance(out, Run):
                replay_stored(observer, out.path, out.result, points[number].position)
            on_end(number, out)
            del opened[number]
        if not opened:
            return
        for run in opened.values():
            if run.earlier:
                note_earlier(run, observer)
            run.begin(fresh=fresh)
        failed = train_seeds(list(opened.values()), cache, observer, stop, grid_points=len(points))
        for place, (number, run) in enumerate(opened.items()):
            on_end(number, failed[place] if place in failed else run.finish(observer))


def _ended_meanwhile(run: OpenRun) -> Run | DamagedRunError | None:
    """The result of a run whose owner has ended while this process waited, or that it is damaged."""
    try:
        run.find_stored()
    except DamagedRunError as error:
        return error
    return run.stored


def _open_point(
    point: PreparedPoint,
    runs: Path,
    *,
    fresh: bool,
    observer: Observer,
    notes: Observer,
    kept: KeptModels | None,
    stop: Stop,
) -> OpenRun:
    """The run of a point: the one trained alone if some seeds of it are there, else the one trained with others."""
    inputs, spec = resolve_inputs(point.inputs, point.config, notes)
    alone = open_run(
        inputs,
        spec,
        runs,
        fresh=fresh,
        observer=observer,
        position=point.position,
        kept=kept,
        stop=stop,
    )
    alone.kept.check_clients([c.name for c in inputs.clients])
    if alone.stored is not None:
        note_stored(alone.stored, notes)
    if alone.earlier:
        return alone
    spec = replace(spec, together=True)
    return open_run(
        inputs,
        spec,
        runs,
        fresh=fresh,
        observer=observer,
        position=point.position,
        kept=kept,
        stop=stop,
    )


def train_seeds(
    runs: Sequence[OpenRun],
    cache: GridCache | None,
    observer: Observer,
    stop: Stop,
    grid_points: int = 1,
) -> dict[int, FedcacheError]:
    """Train every seed of runs that have begun; seeds that ended before are taken as they are.

    Raises FedcacheError, what concerns all runs; INTERRUPTED after a stop. ``cache`` is what the points of a grid
    share, None for a run alone, and ``grid_points`` how many these are with those that have ended before.

    Returns:
        the errors that ended runs, by their place; the others go on.
    """
    spec = runs[0].spec
    failed = dict[int, FedcacheError]()
    many = f"{len(runs)} points of " if cache is not None else ""
    observer.start(
        f"training {many}{spec.method}", len(spec.seeds) * spec.rounds * len(runs), "rounds"
    )
    try:
        for seed in spec.seeds:
            waiting: list[int] = []
            for place, run in enumerate(runs):
                if run.restore_seed(seed):
                    run.events.replay(seed, run.done[seed].rounds)
                    observer.advance(spec.rounds)
                elif place not in failed:
                    waiting.append(place)
            for group in _of_same_round(runs, waiting, seed):
                failed |= SeedTraining(
                    runs, group, seed, cache, observer, stop, grid_points
                ).train()
    finally:
        observer.stop()
    return failed


def _of_same_round(
    runs: Sequence[OpenRun], waiting: Sequence[int], seed: int
) -> list[dict[int, Snapshot | None]]:
    """Runs with their checkpoints, those of the same round together: a kill may fall between two checkpoints."""
    groups: dict[int, dict[int, Snapshot | None]] = {}
    for place in waiting:
        state = runs[place].checkpoint(seed)
        groups.setdefault(_round_of(state), {})[place] = state
    return [groups[r] for r in sorted(groups)]


def _round_of(state: Snapshot | None) -> int:
    if state is None:
        return 0
    return int(state.meta["round"])


class SeedTraining:
    """One seed of some runs, from checkpoints of one round: what is told, kept and stopped while it is trained.

    ``states`` has the checkpoint of each run that is trained, by its place among ``runs``; ``cache`` is what the points
    of a grid share, None for a run alone; ``grid_points`` is how many the grid has.
    """

    def __init__(
        self,
        runs: Sequence[OpenRun],
        states: Mapping[int, Snapshot | None],
        seed: int,
        cache: GridCache | None,
        observer: Observer,
        stop: Stop,
        grid_points: int = 1,
    ) -> None:
        self.grid_points = grid_points
        self.runs = [runs[place] for place in states]
        self.places = list(states)
        self.states = list(states.values())
        self.seed = seed
        self.cache = cache
        self.observer = observer
        self.stop = stop
        self.spec = self.runs[0].spec
        self.inputs = self.runs[0].inputs
        self.kept = _round_of(self.states[0])
        of_points = "" if cache is None else f" of {len(self.runs)} points"
        self.watch = StopCheck(stop, f"seed {seed}{of_points}", self.kept)
        self.pace = CheckpointPace()
        self.due = False
        self.decided = False
        self.failed: dict[int, FedcacheError] = {}

    def train(self) -> dict[int, FedcacheError]:
        """Train all rounds that are left; the errors that ended runs, by place."""
        for run, state in zip(self.runs, self.states, strict=True):
            if state is not None:
                run.events.replay(self.seed, state.meta["records"])
                if self.cache is None:
                    self.observer.note(f"Seed {self.seed}: going on after round {self.kept}.")
                self.observer.advance(self.kept)
        self.began = time.perf_counter()
        run_points(
            replace(training_run(self.inputs, self.spec, self.seed), grid_points=self.grid_points),
            [run.inputs.settings for run in self.runs],
            states=self.states,
            callbacks=RunCallbacks(self.watch, self._on_round, self._after_round, self._on_done),
            cache=self.cache,
            tables=[run.directory.states(self.seed) for run in self.runs],
        )
        return self.failed

    def _on_round(
        self,
        point: int,
        number: int,
        metrics: dict[str, Any],
        traffic: dict[str, Any],
        snapshot: Callable[[], Snapshot],
    ) -> None:
        """A run has ended a round: tell of it, and keep its state when it is time."""
        run = self.runs[point]
        if self.spec.trust.protects:
            # A round that is made again has other noise, so it is kept before it is told: else two were released.
            with self.pace:
                run.round_drawn(self.seed, number, snapshot)
        telling = time.perf_counter()
        run.events.round_ended(self.seed, number, metrics, traffic)
        self.observer.advance(1)
        # who listens, as a tracker that starts up, trains nothing
        self.began += time.perf_counter() - telling
        if number == self.spec.rounds:
            return
        if self.spec.trust.protects:
            self.due = True
            return
        if not self.decided:  # the first run of a round decides for all of them
            self.decided, self.due = True, self.stop.requested or self.pace.due()
        if self.due:
            with self.pace:
                run.save_checkpoint(self.seed, snapshot())

    def _after_round(self, number: int) -> None:
        """All runs have ended a round: stop here if that was asked for and every state is kept."""
        if self.due:
            self.pace.over()
            self.watch.kept = number
        self.watch.done = number
        if self.due and self.stop.requested:  # never due after the last round: the run ends then
            kept = (
                "the state is kept"
                if self.cache is None
                else f"{len(self.runs)} points keep their states"
            )
            raise stopped(f"after round {number} of seed {self.seed}; {kept}")
        self.decided = self.due = False

    def _on_done(self, first: int, ended: Sequence[TrainingOutput | FedcacheError]) -> None:
        """Some runs, from number ``first`` on, have ended the seed: keep what each gave."""
        seconds = (time.perf_counter() - self.began) / len(ended)
        for place, run, out in zip(self.places[first:], self.runs[first:], ended, strict=False):
            if isinstance(out, FedcacheError):
                self.failed[place] = out
            else:
                run.keep_seed(out, seconds)
        self.watch.begin(self.kept)  # the runs that come next start from their checkpoints
        self.began = time.perf_counter()
