"""Search (``grid --sampler optuna``): points are drawn one after another, guided by earlier validation accuracies.

A trial is a run trained alone, equal to the run of ``train``; stored trials are read. A search that was killed resumes
its last trial from the checkpoint.
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
from fedcache.grids.record import GridRecord, damage_of
from fedcache.grids.request import GridRequest
from fedcache.grids.result import Grid, LostPoint, Point, PrunedPoint, point_words
from fedcache.grids.search_space import MOST_LISTED, PointKey, Range, SearchPlan
from fedcache.grids.train_grid import GridEngine, GridRun, check_validation, retrain
from fedcache.process import Stop
from fedcache.progress import (
    VALIDATION_ACCURACY,
    Detail,
    EachOnce,
    Observer,
    Round,
    Silent,
    tell_ended,
)
from fedcache.runs.directory import ends_one_run, mark_pruned
from fedcache.runs.events import OnRound, with_hooks
from fedcache.runs.run import Run
from fedcache.runs.score import choice_value
from fedcache.store.files import (
    SealedLines,
    first_of,
    read_sealed_lines,
    sha256_hex,
    write_sealed_lines,
)

if TYPE_CHECKING:
    from optuna import Study as OptunaStudy
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial, Trial

# The trials of a search: sealed lines on disk, from which an Optuna study is built.
#
# Each point is drawn by a new sampler from all earlier trials. The seed of the sampler depends only on the
# seed of the search and the number of the trial. A resumed search therefore draws the same points as a search
# that was not interrupted.


NAME = "fedcache"
"""Name of the Optuna study in the journal."""
METHOD = "method"
"""Name of the Optuna parameter that draws the method of a point."""
TRIALS = "trials.jsonl"
"""File of a search with one sealed line for every trial that has ended. A resumed search reads it."""
JOURNAL = "study.journal"
"""File of a search that Optuna's own tools can read, with the same trials. fedcache writes it and never reads it."""
ATTEMPTS = 20
"""Maximum number of draws for a trial. A draw of an earlier configuration is discarded and repeated. After the last
draw, a small space is listed and one of its untried configurations is taken."""

REDUCTION = 3
"""With ASHA, one trial of this many continues after each rung."""
STARTUP = 5
"""Number of first trials that the median pruner never stops."""


class Trials:
    """The trials of a search that have ended. Raises CorruptionError for a damaged file of trials.

    Args:
        search: the space and options of the search.
        folder: folder of the files; it is created.
        eval_every: rounds between scores, the first rung of ASHA.
        fresh: forget the stored trials.
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
            raise CorruptionError(
                f"{self._file} {damage_of(error)}. fedcache can therefore not see which trials this search has made.",
                "Remove the file and run the same command again. It draws the same trials and reuses the "
                f"stored runs:  rm {shell_word(self._file)}",
            ) from error
        self._journal = self._new_journal()

    def ask(self) -> Trial | None:
        """The next trial; None if every point of the space was tried."""
        import optuna

        tried = {self.point_of(trial.params) for trial in self.ended}
        number = len(self.ended)
        if len(tried) >= self.search.size:
            return None
        with quiet():
            for attempt in range(ATTEMPTS):
                study = self._new_study(self._sampler(number, attempt))
                trial = study.ask(self._distributions)
                if self.point_of(trial.params) not in tried:
                    return trial
            seed = self._seed(number, ATTEMPTS)
            study = self._new_study(optuna.samplers.RandomSampler(seed=seed))
            # Few untried points are left. In a space that can be listed, one of them is chosen. ``seed`` is that of one
            # more draw.
            if self.search.size <= MOST_LISTED:
                untried = [point for point in self.search.every_point() if point not in tried]
                method, values = untried[seed % len(untried)]
                params: dict[str, Any] = {key: self._drawn(key, word) for key, word in values}
                params[METHOD] = method
                study.enqueue_trial(params)
            return study.ask(self._distributions)

    def end(self, trial: Trial, value: float | None, *, pruned: bool = False, **facts: Any) -> None:
        """Keep a trial that has ended: with a value if it finished, without one if it was pruned or failed.

        ``facts`` are stored with the trial, such as the name of its run.
        """
        from optuna.trial import TrialState

        state = TrialState.COMPLETE
        if pruned:
            state = TrialState.PRUNED
        elif value is None:
            state = TrialState.FAIL
        with quiet():
            method, values = self.point_of(trial.params)
            trial.set_user_attr("point", point_words(method, dict(values)))
            for key, fact in facts.items():
                trial.set_user_attr(key, fact)
            frozen = trial.study.tell(trial, value, state=state)
            scores = {str(number): score for number, score in frozen.intermediate_values.items()}
            # The system attributes hold the rungs that the trial reached, which ASHA compares.
            line = {
                "state": state.name,
                "value": frozen.value,
                "params": frozen.params,
                "facts": frozen.user_attrs,
                "optuna": frozen.system_attrs,
                "scores": scores,
            }
            self._lines.append(line)
            self._kept.append(line)
            self.ended.append(self._trial(line))
            self._journal.add_trial(self.ended[-1])

    def cut(self, number: int) -> None:
        """Forget trial ``number`` and all later ones."""
        del self.ended[number:]
        del self._kept[number:]
        write_sealed_lines(self._file, self._kept, self._first)
        self._lines = SealedLines(self._file, self._first)
        self._journal = self._new_journal()

    def _trial(self, line: Mapping[str, Any]) -> FrozenTrial:
        """The Optuna trial of a sealed line."""
        import optuna
        from optuna.trial import TrialState

        scores = {int(number): score for number, score in line["scores"].items()}
        return optuna.create_trial(
            state=TrialState[line["state"]],
            value=line["value"],
            params=line["params"],
            distributions=self._distributions,
            user_attrs=line["facts"],
            system_attrs=line["optuna"],
            intermediate_values=scores,
        )

    def point_of(self, params: dict[str, Any]) -> PointKey:
        """The point of a trial, in the order of the space."""
        values = tuple((key, self._word(key, params[key])) for key in self.search.space)
        # A search of one method has no parameter for it.
        method = str(params.get(METHOD, self.search.methods[0]))
        return method, values

    def _word(self, key: str, drawn: Any) -> str:
        """The swept value for what Optuna drew: for a list of ordered numbers, Optuna draws the place in this list."""
        kind = self.search.space[key]
        ordered = self.search.ordered(key)
        if isinstance(kind, Range):
            return kind.word(drawn)
        if ordered is None:
            return str(drawn)
        return str(ordered[drawn])

    def _drawn(self, key: str, word: str) -> int | str:
        """The inverse of ``_word``, for values that can be listed."""
        ordered = self.search.ordered(key)
        if isinstance(self.search.space[key], Range):
            return int(word)
        if ordered is None:
            return word
        return ordered.index(word)

    def _dimensions(self) -> Iterator[tuple[str, BaseDistribution]]:
        """The parameters that Optuna draws, with their distributions."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        if len(self.search.methods) > 1:
            yield METHOD, CategoricalDistribution(self.search.methods)
        for key, kind in self.search.space.items():
            ordered = self.search.ordered(key)
            if ordered is not None:
                yield key, IntDistribution(0, len(ordered) - 1)
            elif not isinstance(kind, Range):
                yield key, CategoricalDistribution(kind)
            elif kind.whole:
                yield key, IntDistribution(int(kind.low), int(kind.high), log=kind.log)
            else:
                yield key, FloatDistribution(kind.low, kind.high, log=kind.log)

    def _seed(self, number: int, attempt: int) -> int:
        """The seed of a draw of a trial."""
        sequence = np.random.SeedSequence([self.search.seed, number, attempt])
        return int(sequence.generate_state(1)[0])

    def _sampler(self, number: int, attempt: int) -> BaseSampler:
        from optuna import samplers

        classes = {
            "tpe": samplers.TPESampler,
            "random": samplers.RandomSampler,
            "gp": samplers.GPSampler,
        }
        sampler: BaseSampler = classes[self.search.sampler](seed=self._seed(number, attempt))
        return sampler

    def _new_study(self, sampler: BaseSampler) -> OptunaStudy:
        """A study in memory with the trials that have ended, which draws one more."""
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
        """The journal for Optuna's own tools, rewritten with the trials that have ended."""
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
    words = {"finished": "COMPLETE", "pruned": "PRUNED", "failed": "FAIL"}
    return {word: states.count(name) for word, name in words.items()}


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Optuna's log and its warnings about experimental features."""
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
    jobs: int,
    engine: GridEngine | None = None,
    observer: Observer | None,
    hooks: Sequence[OnRound],
    stop: Stop | None = None,
) -> Grid:
    """Train every point of a grid, or search if the request has a search. Arguments and errors as ``grid``."""
    if request.search is None:
        return train_grid.grid(
            request, jobs=jobs, engine=engine, observer=observer, hooks=hooks, stop=stop
        )
    if jobs > 1 or engine is not None:
        raise UsageError(
            "--sampler optuna trains one trial after another: each trial depends on the earlier ones.",
            "Leave out --jobs and --engine; --sampler random:N trains several at once.",
        )
    once = EachOnce(with_hooks(observer, hooks))
    run = SearchRun(request, request.search, once, stop or Stop())
    check_validation(run, "--sampler optuna selects on validation accuracy")
    if request.search.pruner != "none" and not request.config.eval_every:
        raise UsageError(
            f"--pruner {request.search.pruner} compares trials during training, but only the final model "
            "is scored.",
            "For example --eval-every 5",
        )
    # Two processes that extend the same search would draw the same trials.
    lock = FileLock(run.folder / ".lock")
    run.folder.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise StoreError(
            f"{run.folder} belongs to a search that is still running.", "Wait for it, or stop it."
        ) from None
    try:
        with GridRecord(request, run.name) as run.record:
            return run.search_points()
    finally:
        lock.release()


class SearchRun(GridRun):
    """A running search; its points are the trials so far."""

    def __init__(
        self, request: GridRequest, search: SearchPlan, observer: Observer, stop: Stop
    ) -> None:
        super().__init__(request, observer, stop)
        self.search = search
        self.total = search.trials
        # The number of trials is left out, so that a search with more trials extends the same one.
        identity: tuple[object, ...] = (
            search.methods,
            dict(search.space),
            search.words,
            request.config,
            request.partition,
            request.repartition,
        )
        # The values of trials depend on the score. Searches with the default score were named before it counted.
        if request.score is not None:
            identity += (request.score,)
        digest = sha256_hex(repr(identity).encode())
        self.name = f"search-{digest[:12]}"
        self.folder = request.runs / self.name
        self.done = Grid([], score=request.score)

    def search_points(self) -> Grid:
        """Read the trials that have ended, train the others, and return the result of all."""
        trials = Trials(
            self.search, self.folder, self.request.config.eval_every, fresh=self.request.fresh
        )
        # The points of the request were corners of the space. From here on they are the trials.
        self.request = replace(self.request, points=())
        stored = min(len(trials.ended), self.search.trials)
        if stored == 1:
            self.observer.note("1 trial was stored already.")
        elif stored:
            self.observer.note(f"{stored} trials were stored already.")
        # The sampler draws from earlier results, so trials after the first changed one are drawn again.
        for number in range(stored):
            if not self._read(trials.ended[number], trials):
                self.observer.note(
                    f"Trial {number + 1} was made from other data or with another version of the code. The search "
                    f"repeats trial {number + 1} and all later trials."
                )
                trials.cut(number)
                self.request = replace(self.request, points=self.request.points[:number])
                break
        while len(self.request.points) < self.search.trials:
            trial = trials.ask()
            if trial is None:
                self.observer.note(
                    f"All {len(trials.ended)} configurations of the search space were tried."
                )
                break
            self._make(trial, trials)
        done = self.done
        # More trials may be stored than this command asks for.
        ended = trials.ended[: self.search.trials]
        done.search = {
            "sampler": self.search.sampler,
            "seed": self.search.seed,
            "pruner": self.search.pruner,
            "trials": len(ended),
            **counts(ended),
            "study": str(trials.path),
        }
        done.need_points()
        done.without_result = self.spent_without_result()
        if self.request.retrain:
            done.retrained = retrain(self, done)
        return done

    def _add(self, trials: Trials, params: Mapping[str, Any]) -> tuple[int, str, dict[str, str]]:
        """Append the point of a trial; returns its number, method and swept values."""
        method, values = trials.point_of(dict(params))
        sweep = dict(values)
        points = self.request.points
        number = len(points)
        self.request = replace(self.request, points=(*points, (method, sweep)))
        if self.record is not None:
            self.record.point_drawn(number, method, sweep)
        return number, method, sweep

    def _read(self, trial: FrozenTrial, trials: Trials) -> bool:
        """Add the result of a stored trial; returns whether it was made from the same data and code."""
        number, method, sweep = self._add(trials, trial.params)
        facts = trial.user_attrs
        words = self.request.words_of(number)
        if trial.state.name == "COMPLETE":
            inputs = self.prepare(number)
            run = self.train_alone(number, inputs, PassedOn(self.observer), self.stop)
            if run.path.name != facts.get("run"):
                return False
            self._ended(number, run)
        elif trial.state.name == "PRUNED":
            path = self.request.runs / str(facts["run"])
            last = facts["round"]
            self.recorded(number, run=path.name, pruned=last)
            pruned = PrunedPoint(method, sweep, last, facts["rounds"], trial.value, str(path))
            self.done.pruned.append(pruned)
        else:
            message = str(facts["message"])
            self.done.failed.append(LostPoint(method, sweep, message, str(facts["hint"])))
            self.recorded(number, error=message)
            self.observer.warn(f"The configuration {words} failed in an earlier search: {message}")
        return True

    def _make(self, trial: Trial, trials: Trials) -> None:
        """Train a trial to its end, or until the pruner stops it."""
        number, method, sweep = self._add(trials, trial.params)
        words = self.request.words_of(number)
        self.observer.note(Detail(f"Trial {number + 1} of {self.search.trials}: {words}"))
        watch = Watched(self.observer, trial, EitherStop(self.stop))
        try:
            run = self.train_alone(number, self.prepare(number), watch, watch.halt)
        except FedcacheError as error:
            # The pruner and the user stop a run in the same way. Here the cause is found.
            by_pruner = watch.halt.own and not self.stop.requested
            if watch.pruned is not None and by_pruner:
                self._pruned(number, watch.pruned, trial, trials)
            elif ends_one_run(error):
                self.end_point(number, error)
                self.done.failed.append(LostPoint(method, sweep, error.message, error.hint))
                trials.end(trial, None, message=error.message, hint=error.hint)
            else:
                raise
            return
        value = choice_value(run.result, self.score)
        trials.end(trial, value, run=run.path.name)
        self._ended(number, run)

    def _ended(self, number: int, run: Run) -> None:
        """Keep a trial that has finished."""
        self.end_point(number, run)
        method, sweep = self.request.points[number]
        self.done.points.append(Point(method, sweep, run))

    def _pruned(self, number: int, last: Round, trial: Trial, trials: Trials) -> None:
        """Keep a trial that the pruner stopped after round ``last``."""
        method, sweep = self.request.points[number]
        value = last.diagnostics[VALIDATION_ACCURACY]
        rounds = {"round": last.round, "rounds": last.rounds}
        trials.end(trial, None, pruned=True, run=last.path.name, **rounds)
        mark_pruned(last.path, {**rounds, "validation": value, "search": self.name})
        point = PrunedPoint(method, sweep, last.round, last.rounds, value, str(last.path))
        self.done.pruned.append(point)
        self.recorded(number, run=last.path.name, pruned=last.round)
        words = self.request.words_of(number)
        self.observer.note(Detail(f"{point.sentence}: {words}"))


class EitherStop(Stop):
    """Request to stop a trial: ``own`` for this trial alone, or ``whole`` for the whole search."""

    def __init__(self, whole: Stop) -> None:
        self.whole = whole
        self.own = False

    @property
    def requested(self) -> bool:  # type: ignore[override]
        """Whether the trial or the search should stop."""
        return self.own or self.whole.requested

    def ask(self) -> None:
        """Stop the trial."""
        self.own = True


class PassedOn(Silent):
    """Observer of a stored trial: passes on rounds and results, which hooks need, and drops messages."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def round_done(self, round_: Round) -> None:
        """Passed on."""
        self._observer.round_done(round_)

    def ended(self, path: Path, result: Mapping[str, Any]) -> None:
        """Passed on."""
        tell_ended(self._observer, path, result)


class Watched(PassedOn):
    """Observer of a trial: passes everything on, and reports the rounds of the first seed to the pruner.

    Attributes:
        halt: stops the trial.
        pruned: the round after which the pruner stopped it, or None.
    """

    def __init__(self, observer: Observer, trial: Trial, halt: EitherStop) -> None:
        super().__init__(observer)
        self._trial = trial
        self.halt = halt
        self.pruned: Round | None = None
        for passed_on in ("note", "warn", "start", "advance", "stop"):
            setattr(self, passed_on, getattr(observer, passed_on))

    def round_done(self, round_: Round) -> None:
        """Passed on; the pruner compares a scored round with those of other trials."""
        super().round_done(round_)
        value = round_.diagnostics.get(VALIDATION_ACCURACY)
        if value is None or round_.seed_number > 1 or self.pruned is not None:
            return
        self._trial.report(value, round_.round)
        if round_.round < round_.rounds and self._trial.should_prune():
            self.pruned = round_
            self.halt.ask()
