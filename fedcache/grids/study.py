"""The trials of a search: sealed lines on disk, of which an Optuna study is built.

Each point is drawn by a sampler of its own, seeded by the search's seed and the number of the trial, from all trials
before it. So what is drawn depends on nothing that a killed process took with it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedcache.errors import CorruptionError, shell_word
from fedcache.grids.search_space import MOST_LISTED, PointKey, Range, SearchPlan
from fedcache.store.sealed_lines import SealedLines, first_of, read_sealed_lines, write_sealed_lines

if TYPE_CHECKING:
    from optuna import Study as OptunaStudy
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial, Trial

NAME, METHOD = "fedcache", "method"
TRIALS = "trials.jsonl"
"""In the folder of a search: one sealed line for every trial that has ended. It is what a search reads again."""
JOURNAL = "study.journal"
"""Alongside: the same trials for Optuna's own tools. It is written anew by every search, and never read."""
ATTEMPTS = 20
"""How often a trial is drawn again that was had before."""

REDUCTION, STARTUP = 3, 5
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
        self.search, self.path, self._eval_every = search, folder / JOURNAL, eval_every
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

        taken, number = {self.point_of(t.params) for t in self.ended}, len(self.ended)
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
            state = (
                TrialState.PRUNED
                if pruned
                else TrialState.FAIL
                if value is None
                else TrialState.COMPLETE
            )
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
        kind, ordered = self.search.space[key], self.search.ordered(key)
        return (
            kind.word(drawn)
            if isinstance(kind, Range)
            else str(drawn)
            if ordered is None
            else ordered[drawn]
        )

    def _drawn(self, key: str, word: str) -> int | str:
        """The inverse of ``_word``, of values that can be listed."""
        ordered = self.search.ordered(key)
        return (
            int(word)
            if isinstance(self.search.space[key], Range)
            else word
            if ordered is None
            else (ordered.index(word))
        )

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
