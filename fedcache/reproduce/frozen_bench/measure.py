"""Train every treatment of a study in every block: choose its settings on validation rows, then train the final runs.

Every number comes from ordinary runs under ``$FEDCACHE_HOME/runs``: a second call reads stored runs, a killed call
continues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedcache.config import ExtractConfig, Home, PartitionConfig, SaveModels, TrainConfig
from fedcache.errors import Exit, FedcacheError, MachineError, UsageError
from fedcache.extract.extract_dataset import extract
from fedcache.federate.engine.hyperparameters import HParam
from fedcache.federate.methods import METHODS
from fedcache.federate.partition.partition import InfeasibleError
from fedcache.grids.train_grid import grid, request_grid
from fedcache.parsing import Facts, counted
from fedcache.process import Stop
from fedcache.progress import Observer, Silent
from fedcache.reproduce.frozen_bench.study import BenchTreatment, Study
from fedcache.reproduce.planning import Options, RequirementCheck, settings_text
from fedcache.reproduce.runner import WarningsOnly
from fedcache.runs.features import InputCache, Preparation
from fedcache.runs.loop import KeptModels, TrainingOptions, prepare_run, row_source, train_run
from fedcache.runs.partitions import columns_of
from fedcache.runs.run import Run
from fedcache.runs.spec import parse_seeds, takes_client_prior
from fedcache.store.store import Store


@dataclass(frozen=True)
class Block:
    """Data, backbone and partition on which treatments are compared, by their labels."""

    data: str
    backbone: str
    partition: str

    def __str__(self) -> str:
        return ", ".join((self.data, self.backbone, self.partition))


@dataclass(frozen=True)
class BenchScore:
    """Result of one treatment in one block.

    Attributes:
        block: the block.
        treatment: label of the treatment.
        values: accuracy of every seed, mean over clients, each on its own test rows; fractions. () where it failed.
        pooled: accuracy over the test rows of all clients together, mean over seeds.
        with_prior: as ``values``, with the client prior of the study. () for a method that takes none.
        settings: the settings that validation chose.
        edges: hyperparameters for which validation chose the last value that was tried; better ones may exist.
        points: number of combinations they were chosen from.
        bytes_up: bytes that one client uploads in all rounds, mean over clients and seeds.
        seconds: of training, mean over seeds, as measured when the runs were made.
        runs: digests of the runs that are compared, one for each seed.
        partitions: digests of their partitions, which depend on the images.
        why_not: why there is no value; "" where there is one.
    """

    block: Block
    treatment: str
    values: tuple[float, ...] = ()
    pooled: float | None = None
    with_prior: tuple[float, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)
    edges: tuple[str, ...] = ()
    points: int = 1
    bytes_up: float | None = None
    seconds: float | None = None
    runs: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    why_not: str = ""


@dataclass(frozen=True)
class Chosen:
    """Settings that validation rows chose, the hyperparameters at an end of their range, and how many were tried."""

    settings: dict[str, str]
    edges: tuple[str, ...]
    points: int


def value_beyond(values: Sequence[str], best: str) -> str | None:
    """The next value beyond the end of a range at which the best value is, in the same ratio as the last two.

    None if the best value is inside, or the range has one value or words.
    """
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        return None
    if len(numbers) < 2 or min(numbers) <= 0:
        return None
    if float(best) == numbers[-1]:
        number = numbers[-1] * numbers[-1] / numbers[-2]
    elif float(best) == numbers[0]:
        number = numbers[0] * numbers[0] / numbers[1]
    else:
        return None
    return f"{number:.2g}"


def allows(hparam: HParam, text: str) -> bool:
    """Whether a hyperparameter may have a value."""
    try:
        hparam.parse(text)
    except UsageError:
        return False
    return True


@dataclass
class BenchRun:
    """A study that is being run."""

    study: Study
    home: Home
    options: Options
    runs: Path
    observer: Observer
    halt: Stop

    def __post_init__(self) -> None:
        self.quiet = WarningsOnly(self.observer)
        self._cache = InputCache()

    def blocks(self) -> list[tuple[Block, Store]]:
        """Every block that is possible here, with the store of its features; missing features are extracted.

        Raises:
            MachineError when no backbone is available, or one given with ``--backbones`` is not; FedcacheError, as
                ``extract``.
        """
        if not self.study.data:
            return []
        check = RequirementCheck(self.home, self.options.weights, self.options.data)
        available = []
        for name in self.study.backbones:
            lacks = check.missing_weights(name)
            if lacks is None or lacks.fetched:
                available.append(name)
                continue
            if self.options.backbones:
                raise MachineError(lacks.why, lacks.command)
            # The message ends with a list of places that were searched, which the note leaves out.
            why = lacks.why.split(" Looked at:")[0]
            self.observer.note(f"{name} is left out: {why}")
        if not available:
            raise MachineError(
                "None of the backbones is available.",
                "Use an available backbone:  --backbones efficientnet-lite0",
            )
        made = []
        for label, spec in self.study.data.items():
            names = [name for name in available if self.study.backbones[name].reads(label)]
            replaced = {self.study.backbones[name].replaces for name in names}
            names = [name for name in names if name not in replaced]
            if not names:
                self.observer.note(
                    f"{label} is left out, because none of {', '.join(available)} reads such data."
                )
                continue
            config = ExtractConfig(
                dataset=spec,
                backbones=tuple(names),
                limit=self.study.limit,
                recipe=self.options.recipe,
                weights=self.options.weights,
                data=self.options.data,
                device=self.options.device,
            )
            store = extract(config, self.home, observer=self.observer, stop=self.halt).store
            for partition, bench_partition in self.study.partitions.items():
                domains = len(columns_of(store).domains)
                if domains < bench_partition.domains:
                    self.observer.note(
                        f"{label}, {partition} is left out: the data have only {counted(domains, 'domain')}."
                    )
                    continue
                made += [(Block(label, name, partition), store) for name in names]
        return made

    def score(self, block: Block, store: Store, label: str) -> BenchScore:
        """Train a treatment in a block. If training fails, the score says why.

        Raises:
            StoppedError after a stop; other errors without relation to the treatment, such as CorruptionError for a
                damaged store.
        """
        treatment = self.study.treatments[label]
        runs = []
        try:
            chosen = self._choose(block, store, treatment)
            for seed in parse_seeds(self.study.seeds):
                runs.append(self._train(block, store, treatment, chosen.settings, seed))
        except FedcacheError as error:
            # Only errors of training and of the partition belong to the treatment.
            if error.code is not Exit.FEDERATED and not isinstance(error, InfeasibleError):
                raise
            return BenchScore(block, label, points=treatment.points, why_not=error.message)
        count = len(runs)
        results = [run.result for run in runs]
        clients = results[0]["partition"]["clients"]
        pooled = sum(float(r["accuracy"]["pooled"]) for r in results)
        bytes_up = sum(float(r["traffic"]["exact"]["up_bytes"]) for r in results)
        durations = [run.measured.get("seconds", {}) for run in runs]
        seconds = sum(float(d.get("train", 0.0)) for d in durations)
        values = [float(r["accuracy"]["client_mean"]) for r in results]
        with_prior = []
        for result in results:
            prior = result["accuracy"].get("client_prior")
            if prior is not None:
                with_prior.append(float(prior["own_rows_with_prior"]))
        return BenchScore(
            block,
            label,
            values=tuple(values),
            pooled=pooled / count,
            with_prior=tuple(with_prior),
            settings=chosen.settings,
            edges=chosen.edges,
            points=chosen.points,
            bytes_up=bytes_up / count / clients,
            seconds=seconds / count,
            runs=tuple(str(r["digest"]) for r in results),
            partitions=tuple(str(r["partition"]["digest"]) for r in results),
        )

    def _config(
        self, block: Block, store: Store, treatment: BenchTreatment, seeds: str
    ) -> TrainConfig:
        # One-shot methods have one round, in which all clients take part.
        rounds: Facts = {}
        if not METHODS[treatment.method].one_shot:
            rounds = {"rounds": self.study.rounds, "participation": self.study.participation}
        return TrainConfig(
            method=treatment.method,
            store=str(store.path),
            backbones=(block.backbone,),
            set=dict(treatment.set),
            seeds=seeds,
            **rounds,
        )

    def _partition(self, block: Block, seed: int, **options: Any) -> PartitionConfig:
        of_block = self.study.partitions[block.partition]
        arguments = {**of_block.options, **options}
        return PartitionConfig(of_block.scheme, of_block.clients, seed, arguments)

    def _choose(self, block: Block, store: Store, treatment: BenchTreatment) -> Chosen:
        """The settings with the highest accuracy on validation rows; a single combination is not trained.

        Where the best value is at an end of its range, values beyond this end are tried as long as the accuracy rises.
        """
        searched = treatment.search
        points = treatment.points
        if points == 1:
            return Chosen({key: values[0] for key, values in searched.items()}, (), 1)
        best, accuracy = self._best(block, store, treatment, searched)
        edges = []
        for key, candidates in searched.items():
            hparam = METHODS[treatment.method].hparam(key)
            values = candidates
            for step in range(self.study.extend + 1):
                beyond = value_beyond(values, best[key])
                if beyond is None:
                    break
                if step == self.study.extend or not allows(hparam, beyond):
                    edges.append(key)
                    break
                line = {name: (value,) for name, value in best.items()}
                pair = {**line, key: (best[key], beyond)}
                tried, tried_accuracy = self._best(block, store, treatment, pair)
                points += 1
                if tried_accuracy <= accuracy:
                    break
                best = tried
                accuracy = tried_accuracy
                values = tuple(sorted({*values, beyond}, key=float))
        return Chosen(best, tuple(edges), points)

    def _best(
        self,
        block: Block,
        store: Store,
        treatment: BenchTreatment,
        searched: Mapping[str, Sequence[str]],
    ) -> tuple[dict[str, str], float]:
        """The combination with the highest accuracy on validation rows, and this accuracy."""
        seeds = self.study.search_seeds
        # The prefix marks hyperparameters. Without it, the grid would take ``alpha`` for an argument of the scheme.
        sweeps = {f"set.{key}": values for key, values in searched.items()}
        first_seed = parse_seeds(seeds)[0]
        partition = self._partition(block, first_seed, validation=self.study.validation)
        config = self._config(block, store, treatment, seeds)
        request = request_grid(
            [treatment.method],
            sweeps,
            config,
            self.home,
            partition=partition,
            runs=self.runs,
            extract=False,
            save=SaveModels("none"),
        )
        found = grid(request, observer=self.quiet, stop=self.halt)
        best = found.best()
        settings = {key.removeprefix("set."): value for key, value in best.sweep.items()}
        return settings, found.figure(best) or 0.0

    def _train(
        self,
        block: Block,
        store: Store,
        treatment: BenchTreatment,
        settings: dict[str, str],
        seed: int,
    ) -> Run:
        """One run on all training rows; all treatments of a seed share its partition."""
        plain = self._config(block, store, treatment, str(seed))
        config = replace(plain, set={**plain.set, **settings})
        method = METHODS[treatment.method]
        if takes_client_prior(method, method.resolve(config.preset, config.set)):
            config = replace(config, client_prior=self.study.client_prior)
        partition = self._partition(block, seed)
        preparation = Preparation(
            self.home, self.quiet, self.halt, extract=False, cache=self._cache
        )
        inputs = prepare_run(config, row_source(config, partition, preparation))
        kept = KeptModels(SaveModels("none"))
        return train_run(
            inputs, config, TrainingOptions(self.runs, self.quiet, self.halt, kept=kept)
        )


def check_same_rows(scores: Sequence[BenchScore]) -> None:
    """Raise UsageError if two scores of one data set and partition have different rows of clients."""
    first: dict[tuple[str, str], BenchScore] = {}
    for score in scores:
        if not score.partitions:
            continue
        place = (score.block.data, score.block.partition)
        other = first.setdefault(place, score)
        if other.partitions != score.partitions:
            data, partition = place
            raise UsageError(
                f"The clients have different rows of {data} in the partition {partition}: {score.treatment} on "
                f"{score.block.backbone} and {other.treatment} on {other.block.backbone} cannot be compared.",
                "Compare only results of the same images. To measure other images, give them another label: --on "
                f"{data}-2=DATA",
            )


def run_study(
    study: Study,
    home: Home,
    options: Options | None = None,
    *,
    runs: Path | None = None,
    earlier: Sequence[BenchScore] = (),
    observer: Observer | None = None,
    stop: Stop | None = None,
) -> list[BenchScore]:
    """Score every treatment in every block; treatments that read class texts need a backbone with a text tower.

    ``earlier`` are scores of the study that exist already; they come first in the result.

    Raises:
        MachineError when no backbone is available; StoppedError after a stop, resumable; UsageError for other rows than
            those of the earlier scores; FedcacheError, as ``extract``.
    """
    options = options or Options()
    observer = observer or Silent()
    bench = BenchRun(study, home, options, runs or home.runs, observer, stop or Stop())
    scores = list(earlier)
    scored = {(score.block, score.treatment) for score in earlier}
    todo = []
    for block, store in bench.blocks():
        has_texts = store.has_text(block.backbone)
        for label, treatment in study.treatments.items():
            if (block, label) not in scored and (has_texts or not treatment.reads_texts):
                todo.append((block, store, label))
    count = len(todo)
    for number, (block, store, label) in enumerate(todo, 1):
        score = bench.score(block, store, label)
        scores.append(score)
        check_same_rows(
            scores
        )  # rows that differ from those of earlier scores end the study at once
        observer.note(f"{number} of {count}: {block}, {label}  {_words(score)}")
    return scores


def _words(score: BenchScore) -> str:
    """A score in words: mean accuracy in % and the chosen settings, or why there is none."""
    if score.why_not:
        return f"not trained: {score.why_not}"
    chosen = settings_text(score.settings)
    mean = 100 * sum(score.values) / len(score.values)
    words = f"{mean:.2f} %"
    if chosen:
        words += f" ({chosen})"
    return words
