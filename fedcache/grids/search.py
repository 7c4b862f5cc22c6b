"""``grid --sampler optuna``: points one after another, each drawn from what those before it gave on validation rows.

A trial is a run trained alone, the very run that ``train`` gives; what is there is read. A search that was killed goes
on with the trial it was in, from its checkpoint.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock, Timeout

from fedcache.errors import CorruptionError, FedcacheError, StoreError, UsageError, shell_word
from fedcache.grids import train_grid
from fedcache.grids.record import GridRecord
from fedcache.grids.request import GridRequest
from fedcache.grids.result import Grid, LostPoint, Point, PrunedPoint, ends_one_point
from fedcache.grids.search_space import MOST_LISTED, PointKey, Range, SearchPlan
from fedcache.grids.train_grid import GridEngine, GridRun, check_validation, retrain
from fedcache.process import Stop
from fedcache.progress import VALIDATION_ACCURACY, EachOnce, Observer, Round, Silent, tell_ended
from fedcache.runs.directory import mark_pruned
from fedcache.runs.events import OnRound, with_hooks
from fedcache.runs.loop import train_run
from fedcache.runs.run import Run
from fedcache.runs.score import choice_value
from fedcache.store.files import sha256_hex
from fedcache.store.sealed import SealedLines, first_of, read_sealed_lines, write_sealed_lines

if TYPE_CHECKING:
    from optuna import Study as OptunaStudy
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial, Trial

# The trials of a search: sealed lines on disk, of which an Optuna study is built.
#
# Each point is drawn by a sampler of its own, seeded by the search's seed and the number of the
# trial, from all trials before it. So what is drawn depends on nothing that a killed process took
# with it.


NAME = "fedcache"
METHOD = "method"
TRIALS = "trials.jsonl"
"""In the folder of a search: one sealed line for every trial that has ended. It is what a search reads again."""
JOURNAL = "study.journal"
"""Alongside: the same trials for Optuna's own tools. It is written anew by every search, and never read."""
ATTEMPTS = 20
"""How often a trial is drawn again that was had before."""

REDUCTION = 3
STARTUP = 5
"""ASHA: of how many trials the best goes on at each rung. Median: trials that are never stopped, to compare with."""


class Trials:
    """The trials of a search that have ended. Raises CorruptionError for a damaged file of trials.

    Args:
        search: what is searched.
        folder: of the files, which is made.
        eval_every: rounds between scores, the first rung of ASHA.
        fresh: forget the trials that are there.
    """

    def __init__(
        self, search: SearchPlan, folder: Path, eval_every: int, *, fresh: bool = False
    ) -> None:
        self.search = search
        self.path = folder / JOURNAL
        self._eval_every = eval_every
        self._file = folder / TRIALS
        self._first = first_of({"kind": "trials of a search", "search": folder.name})
        folder.mkdir(parents=True, exist_ok=True)
        if fresh:
            self._file.unlink(missing_ok=True)
        self._distributions = dict(self._dimensions())
        try:
            self._kept = read_sealed_lines(self._file, self._first)
            self._lines = SealedLines(self._file, self._first)
            with quiet():
                self.ended: list[FrozenTrial] = [self._trial(line) for line in self._kept]
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = error if isinstance(error, ValueError) else "cannot be read"
            raise CorruptionError(
                f"{self._file} {why}. Which trials this search has made is not known from it.",
                "Remove it and run the same command again: it draws the same trials, and returns the runs that are "
                f"stored:  rm {shell_word(self._file)}",
            ) from error
        self._journal = self._new_journal()

    def ask(self) -> Trial | None:
        """The next trial; None where every point of the space was had."""
        import optuna

        taken = {self.point_of(t.params) for t in self.ended}
        number = len(self.ended)
        if len(taken) >= self.search.size:
            return None
        with quiet():
            for attempt in range(ATTEMPTS):
                trial = self._scratch(self._sampler(number, attempt)).ask(self._distributions)
                if self.point_of(trial.params) not in taken:
                    return trial
            study = self._scratch(optuna.samplers.RandomSampler(seed=self._seed(number, ATTEMPTS)))
            if self.search.size <= MOST_LISTED:  # few are left: one of them
                left = [point for point in self.search.every_point() if point not in taken]
                method, values = left[self._seed(number, ATTEMPTS) % len(left)]
                drawn: dict[str, Any] = {k: self._drawn(k, word) for k, word in values}
                study.enqueue_trial({**drawn, METHOD: method})
            return study.ask(self._distributions)

    def end(self, trial: Trial, value: float | None, *, pruned: bool = False, **facts: Any) -> None:
        """Keep a trial that has ended: finished with a value, pruned, or failed with neither."""
        from optuna.trial import TrialState

        with quiet():
            method, values = self.point_of(trial.params)
            for key, fact in {
                "point": " ".join([method, *(f"{k}={v}" for k, v in values)]),
                **facts,
            }.items():
                trial.set_user_attr(key, fact)
            if pruned:
                state = TrialState.PRUNED
            else:
                if value is None:
                    state = TrialState.FAIL
                else:
                    state = TrialState.COMPLETE
            frozen = trial.study.tell(trial, None if pruned else value, state=state)
            line = {
                "state": state.name,
                "value": frozen.value,
                "params": frozen.params,
                "facts": frozen.user_attrs,
                "optuna": frozen.system_attrs,  # the rungs that a trial reached, which the ASHA pruner compares
                "scores": {
                    str(round_): score for round_, score in frozen.intermediate_values.items()
                },
            }
            self._lines.append(line)
            self._kept.append(line)
            self.ended.append(self._trial(line))
            self._journal.add_trial(self.ended[-1])

    def cut(self, number: int) -> None:
        """Forget the trials from ``number`` on."""
        self.ended = self.ended[:number]
        self._kept = self._kept[:number]
        write_sealed_lines(self._file, self._kept, self._first)
        self._lines = SealedLines(self._file, self._first)
        self._journal = self._new_journal()

    def _trial(self, line: Mapping[str, Any]) -> FrozenTrial:
        """The trial of a sealed line, as Optuna has it."""
        import optuna
        from optuna.trial import TrialState

        return optuna.create_trial(
            state=TrialState[line["state"]],
            value=line["value"],
            params=line["params"],
            distributions=self._distributions,
            user_attrs=line["facts"],
            system_attrs=line["optuna"],
            intermediate_values={int(round_): score for round_, score in line["scores"].items()},
        )

    def point_of(self, params: dict[str, Any]) -> PointKey:
        """The point of a trial, in the order of the space."""
        values = tuple((key, self._word(key, params[key])) for key in self.search.space)
        return str(params.get(METHOD, self.search.methods[0])), values

    def _word(self, key: str, drawn: Any) -> str:
        kind = self.search.space[key]
        ordered = self.search.ordered(key)
        if isinstance(kind, Range):
            return kind.word(drawn)
        if ordered is None:
            return str(drawn)
        return str(ordered[drawn])

    def _drawn(self, key: str, word: str) -> int | str:
        """The inverse of ``_word``, of values that can be listed."""
        ordered = self.search.ordered(key)
        if isinstance(self.search.space[key], Range):
            return int(word)
        if ordered is None:
            return word
        return ordered.index(word)

    def _dimensions(self) -> Iterator[tuple[str, BaseDistribution]]:
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        if len(self.search.methods) > 1:
            yield METHOD, CategoricalDistribution(self.search.methods)
        for key, kind in self.search.space.items():
            if not isinstance(kind, Range):
                ordered = self.search.ordered(key)
                yield (
                    key,
                    CategoricalDistribution(kind)
                    if ordered is None
                    else IntDistribution(0, len(ordered) - 1),
                )
            elif kind.whole:
                yield key, IntDistribution(int(kind.low), int(kind.high), log=kind.log)
            else:
                yield key, FloatDistribution(kind.low, kind.high, log=kind.log)

    def _seed(self, number: int, attempt: int) -> int:
        return int(np.random.SeedSequence([self.search.seed, number, attempt]).generate_state(1)[0])

    def _sampler(self, number: int, attempt: int) -> BaseSampler:
        from optuna import samplers

        made = {
            "tpe": samplers.TPESampler,
            "random": samplers.RandomSampler,
            "gp": samplers.GPSampler,
        }
        sampler: BaseSampler = made[self.search.sampler](seed=self._seed(number, attempt))
        return sampler

    def _scratch(self, sampler: BaseSampler) -> OptunaStudy:
        """A study in memory that has the trials that have ended, for one trial more."""
        import optuna

        pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
        if self.search.pruner == "median":
            pruner = optuna.pruners.MedianPruner(n_startup_trials=STARTUP)
        elif self.search.pruner == "asha":
            pruner = optuna.pruners.SuccessiveHalvingPruner(max(1, self._eval_every), REDUCTION)
        study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)
        study.add_trials(self.ended)
        return study

    def _new_journal(self) -> OptunaStudy:
        """The journal for Optuna's own tools, written anew with the trials that have ended."""
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        self.path.unlink(missing_ok=True)
        with quiet():
            storage = JournalStorage(JournalFileBackend(str(self.path)))
            study = optuna.create_study(study_name=NAME, storage=storage, direction="maximize")
            study.add_trials(self.ended)
        return study


def counts(trials: Sequence[FrozenTrial]) -> dict[str, int]:
    """How many trials have finished, were pruned, and failed."""
    states = [trial.state.name for trial in trials]
    return {
        word: states.count(name)
        for word, name in (("finished", "COMPLETE"), ("pruned", "PRUNED"), ("failed", "FAIL"))
    }


@contextmanager
def quiet() -> Iterator[None]:
    """Without Optuna's own story and its warnings of what is new in it."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        optuna.logging.set_verbosity(before)


def train_points(
    request: GridRequest,
    *,
    jobs: int = 1,
    engine: GridEngine | None = None,
    observer: Observer | None = None,
    hooks: Sequence[OnRound] = (),
    stop: Stop | None = None,
) -> Grid:
    """Train every point of a grid, or search as the request asks. Raises as ``grid``, with the same arguments."""
    if request.search is None:
        return train_grid.grid(
            request, jobs=jobs, engine=engine, observer=observer, hooks=hooks, stop=stop
        )
    if jobs > 1 or engine is not None:
        raise UsageError(
            "--sampler optuna trains one trial after another: each is drawn from those before it.",
            "Leave out --jobs and --engine; --sampler random:N trains any number at once.",
        )
    run = SearchRun(request, request.search, EachOnce(with_hooks(observer, hooks)), stop or Stop())
    check_validation(run, "--sampler optuna chooses by validation")
    if request.search.pruner != "none" and not request.config.eval_every:
        raise UsageError(
            f"--pruner {request.search.pruner} compares trials on the way, and rounds are scored at the end alone.",
            "For example --eval-every 5",
        )
    lock = FileLock(run.folder / ".lock")
    run.folder.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise StoreError(
            f"{run.folder} is of a search that is running.", "Wait for it, or stop it."
        ) from None
    try:
        with GridRecord(request, run.name) as run.record:
            return run.search_points()
    finally:
        lock.release()


class SearchRun(GridRun):
    """A search under way; its points are those of the trials so far."""

    def __init__(
        self, request: GridRequest, search: SearchPlan, observer: Observer, stop: Stop
    ) -> None:
        super().__init__(request, observer, stop)
        self.search = search
        self.total = search.trials
        asked = (
            search.methods,
            dict(search.space),
            search.words,
            request.config,
            request.partition,
        )
        self.name = f"search-{sha256_hex(repr((*asked, request.repartition)).encode())[:12]}"
        self.folder = request.runs / self.name
        self.done = Grid([])

    def search_points(self) -> Grid:
        """Read the trials that have ended, make the others, and say what came of all."""
        trials = Trials(
            self.search, self.folder, self.request.config.eval_every, fresh=self.request.fresh
        )
        self.request = replace(self.request, points=())
        stored = min(len(trials.ended), self.search.trials)
        if stored:
            self.observer.note(f"{stored} trial{'s were' if stored > 1 else ' was'} there already.")
        for number in range(stored):
            if not self._read(trials.ended[number], trials):
                self.observer.note(
                    f"Trial {number + 1} was made from other data or by other code: the search goes on "
                    "from there."
                )
                trials.cut(number)
                self.request = replace(self.request, points=self.request.points[:number])
                break
        while len(self.request.points) < self.search.trials:
            trial = trials.ask()
            if trial is None:
                self.observer.note(f"All {len(trials.ended)} points of the space were tried.")
                break
            self._make(trial, trials)
        done = self.done
        had = trials.ended[: self.search.trials]
        done.search = {
            "sampler": self.search.sampler,
            "seed": self.search.seed,
            "pruner": self.search.pruner,
            "trials": len(had),
            **counts(had),
            "study": str(trials.path),
        }
        if not done.points:
            lost = [*done.damaged, *done.failed]
            raise FedcacheError(done.code, "\n".join(p.message for p in lost), lost[0].hint)
        done.without_result = self.spent_without_result()
        if self.request.retrain:
            done.retrained = retrain(self, done)
        return done

    def _add(self, trials: Trials, params: Mapping[str, Any]) -> tuple[int, str, dict[str, str]]:
        """The point of a trial as the last one; its number, method and swept values."""
        method, values = trials.point_of(dict(params))
        point = (method, dict(values))
        self.request = replace(self.request, points=(*self.request.points, point))
        number = len(self.request.points) - 1
        if self.record is not None:
            self.record.point_drawn(number, *point)
        return number, *point

    def _read(self, trial: FrozenTrial, trials: Trials) -> bool:
        """Take a trial that has ended as it was; whether it is of the same data and code."""
        number, method, sweep = self._add(trials, trial.params)
        facts = trial.user_attrs
        words = self.request.words_of(number)
        if trial.state.name == "COMPLETE":
            run = self._train(number, PassedOn(self.observer), self.stop)
            if run.path.name != facts.get("run"):
                return False
            self._ended(number, run)
        elif trial.state.name == "PRUNED":
            path = self.request.runs / str(facts["run"])
            self._recorded(number, run=path.name, pruned=facts["round"])
            self.done.pruned.append(
                PrunedPoint(method, sweep, facts["round"], facts["rounds"], trial.value, str(path))
            )
        else:
            self.done.failed.append(
                LostPoint(method, sweep, str(facts["message"]), str(facts["hint"]))
            )
            self._recorded(number, error=str(facts["message"]))
            self.observer.warn(f"{words} failed before: {facts['message']}")
        return True

    def _make(self, trial: Trial, trials: Trials) -> None:
        """Train a trial to its end, or until the pruner stops it."""
        number, method, sweep = self._add(trials, trial.params)
        self.observer.note(
            f"Trial {number + 1} of {self.search.trials}: {self.request.words_of(number)}"
        )
        watch = Watched(self.observer, trial, EitherStop(self.stop))
        try:
            run = self._train(number, watch, watch.halt)
        except FedcacheError as error:
            if watch.pruned is not None and watch.halt.own and not self.stop.requested:
                self._pruned(number, watch.pruned, trial, trials)
            elif ends_one_point(error):
                self.end_point(number, error)
                self.done.failed.append(LostPoint(method, sweep, error.message, error.hint))
                trials.end(trial, None, message=error.message, hint=error.hint)
            else:
                raise
            return
        trials.end(trial, choice_value(run.result, self.score), run=run.path.name)
        self._ended(number, run)

    def _train(self, number: int, observer: Observer, stop: Stop) -> Run:
        config = self.request.config_of(number)
        return train_run(
            self.prepare(number),
            config,
            self.request.runs,
            fresh=self.request.fresh,
            observer=observer,
            stop=stop,
            position=self.position_of(number),
            kept=self._kept,
        )

    def _ended(self, number: int, run: Run) -> None:
        self.end_point(number, run)
        self.done.points.append(Point(*self.request.points[number], run))

    def _recorded(self, number: int, **how: str | int) -> None:
        """Tell the record, where there is one, how a trial without a result ended."""
        if self.record is not None:
            self.record.point_ended(number, **how)

    def _pruned(self, number: int, last: Round, trial: Trial, trials: Trials) -> None:
        method, sweep = self.request.points[number]
        value = last.diagnostics[VALIDATION_ACCURACY]
        trials.end(
            trial, None, pruned=True, run=last.path.name, round=last.round, rounds=last.rounds
        )
        mark_pruned(
            last.path,
            {"round": last.round, "rounds": last.rounds, "validation": value, "search": self.name},
        )
        point = PrunedPoint(method, sweep, last.round, last.rounds, value, str(last.path))
        self.done.pruned.append(point)
        self._recorded(number, run=last.path.name, pruned=last.round)
        self.observer.note(f"{point.sentence}: {self.request.words_of(number)}")


class EitherStop(Stop):
    """A request to stop a trial: its own, or that of the whole search."""

    def __init__(self, whole: Stop) -> None:
        self.whole = whole
        self.own = False

    @property
    def requested(self) -> bool:  # type: ignore[override]
        """Whether either was asked for."""
        return self.own or self.whole.requested

    def ask(self) -> None:
        """Stop the trial."""
        self.own = True


class PassedOn(Silent):
    """An observer that passes on rounds and results, for hooks, and says nothing of a trial that was there."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def told(self, round_: Round) -> None:
        """Passed on."""
        self._observer.told(round_)

    def ended(self, path: Path, result: Mapping[str, Any]) -> None:
        """Passed on."""
        tell_ended(self._observer, path, result)


class Watched(PassedOn):
    """An observer that passes everything on, and reports the rounds of the first seed to the pruner.

    Attributes:
        halt: with which the trial is stopped.
        pruned: the round after which it is.
    """

    def __init__(self, observer: Observer, trial: Trial, halt: EitherStop) -> None:
        super().__init__(observer)
        self._trial = trial
        self.halt = halt
        self.pruned: Round | None = None
        for passed_on in ("note", "warn", "start", "advance", "stop"):
            setattr(self, passed_on, getattr(observer, passed_on))

    def told(self, round_: Round) -> None:
        """Passed on; a round that was scored is compared with those of other trials."""
        super().told(round_)
        value = round_.diagnostics.get(VALIDATION_ACCURACY)
        if value is None or round_.seed_number > 1 or self.pruned is not None:
            return
        self._trial.report(value, round_.round)
        if round_.round < round_.rounds and self._trial.should_prune():
            self.pruned = round_
            self.halt.ask()
