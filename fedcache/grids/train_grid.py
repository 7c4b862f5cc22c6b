"""Training of a grid: the product of methods, sweeps and seeds, each point a run.

Every point has its own digest. So a grid that was killed trains only the missing points, and a point that was trained
alone before is not trained again. Points that differ only in floats are trained together if the execution supports it.
Their results then equal those of single runs up to rounding. With ``exact`` every point is trained alone.
"""

from __future__ import annotations

import os
import shlex
import signal
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from filelock import FileLock, Timeout

from fedcache.config import (
    Home,
    PartitionConfig,
    SaveModels,
    SharedPartition,
    TrainConfig,
    option_value,
    option_words,
)
from fedcache.errors import (
    CorruptionError,
    Exit,
    FedcacheError,
    MachineError,
    StoppedError,
    StoreError,
    UsageError,
    shell_word,
)
from fedcache.federate.engine.method import clients_per_round
from fedcache.federate.engine.run import find_executor
from fedcache.federate.execution.grid_batch import GridCache
from fedcache.federate.execution.memory_estimate import shares_uploads
from fedcache.federate.methods import find_method
from fedcache.grids.points import (
    MOST_CHECKED,
    MOST_LISTED,
    PointKey,
    Range,
    SearchPlan,
    drop_unread,
    partition_of_point,
    point_groups,
    points_that_differ,
    sampled,
    search_of,
    settings_for,
    swept_schemes,
    typed_sweep_values,
    values_of_place,
)
from fedcache.grids.record import FOLDER, chain_start, damage_of
from fedcache.grids.result import Grid, LostPoint, Point, PrunedPoint, Spending, point_words
from fedcache.grids.sampling import Sampling
from fedcache.parsing import Facts, Record, in_a_list
from fedcache.process import Stop, take_environment, worker_context
from fedcache.progress import (
    VALIDATION_ACCURACY,
    Detail,
    EachOnce,
    Observer,
    Round,
    Silent,
    piece_of_work,
    tell_ended,
)
from fedcache.runs.directory import DamagedRunError, ends_one_run, mark_pruned
from fedcache.runs.events import GridPosition, OnRound, replay_stored, with_hooks
from fedcache.runs.features import InputCache, Preparation, RunInputs
from fedcache.runs.loop import (
    KeptModels,
    PreparedPoint,
    TrainingOptions,
    forecast_run,
    prepare_run,
    row_source,
    train,
    train_run,
    train_together,
)
from fedcache.runs.privacy_ledger import LEDGER
from fedcache.runs.run import Run
from fedcache.runs.score import check_score, choice_value, has_validation
from fedcache.runs.spec import (
    check_config,
    hyperparameters,
    parse_participation,
    policy_from_config,
    timing_from_config,
)
from fedcache.store.files import (
    SealedLines,
    digest_of,
    first_of,
    make_private,
    read_sealed_lines,
    sha256_hex,
    write_sealed_lines,
)
from fedcache.store.lock import this_process

if TYPE_CHECKING:
    from optuna import Study as OptunaStudy
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial, Trial

# Request of a grid: its points and options, checked before anything runs.


@dataclass(frozen=True)
class GridRequest:
    """A requested grid.

    Attributes:
        methods: names of the methods.
        sweeps: key -> values, as the user wrote them.
        sampling: how points are drawn.
        points: method and swept values of every point.
        config: options of all points, without the swept values.
        partition: partition of all points, without its swept arguments.
        home: the fedcache home, which has the stores.
        runs: directory of results.
        repartition: whether every seed draws its own partition.
        extract: whether to run the extraction that is missing.
        fresh: whether to train again although a result is stored.
        exact: whether every point is computed alone, with the bits of its single run.
        save: points whose models are kept.
        retrain: whether to train the points chosen by validation again, on all training rows.
        search: how points are drawn one after another; ``points`` are then corners of its space. None for a grid.
        score: client-mean | pooled, by which points are ranked; None for the default of ``runs.score.score_for``.
        notes: sentences to show before anything is trained.
    """

    methods: tuple[str, ...]
    sweeps: Mapping[str, Sequence[str]]
    sampling: Sampling
    points: tuple[tuple[str, dict[str, str]], ...]
    config: TrainConfig
    partition: PartitionConfig
    home: Home
    runs: Path
    repartition: bool = False
    extract: bool = True
    fresh: bool = False
    exact: bool = False
    save: SaveModels = field(default_factory=lambda: SaveModels("best"))
    retrain: bool = False
    search: SearchPlan | None = None
    score: str | None = None
    notes: tuple[str, ...] = ()

    def config_of(self, number: int) -> TrainConfig:
        """The configuration with which ``train`` trains a point alone."""
        name, sweep = self.points[number]
        words = values_of_place(sweep, "run")
        values: Facts = {**words, **typed_sweep_values(words)}
        # These options are tuples of names; a swept value joins several names with +.
        for key in ("backbones", "domain"):
            if key in values:
                values[key] = tuple(values[key].split("+"))
        settings = settings_for(name, self.methods, self.config.set)
        settings |= values_of_place(sweep, "set")
        return replace(self.config, method=name, set=settings, **values)

    def partition_of(self, number: int) -> PartitionConfig:
        """The partition of a point."""
        _, sweep = self.points[number]
        base = self.partition
        first = self.methods[0]
        if set(self.methods) != {first}:
            base = SharedPartition(base.scheme, base.clients, base.seed, base.options, first)
        return partition_of_point(base, sweep, swept_schemes(self.points))

    def words_of(self, number: int) -> str:
        """Method and swept values of a point: ``fedavg lr=0.1``."""
        return point_words(*self.points[number])

    def compared_by(self) -> str:
        """The one score of all points: the requested one, else the one that ``runs.score.score_for`` will choose."""
        if self.score is not None:
            return self.score
        protocols = set()
        for number, (name, _) in enumerate(self.points):
            # An error of a point is reported when the point is trained.
            with suppress(FedcacheError):
                method = find_method(name)
                hp = hyperparameters(method, self.config_of(number))
                protocols.add(method.protocol(hp))
        # Methods of one protocol have the same primary metric (``own``).
        if len(protocols) < 2:
            return "own"
        return "client-mean"

    def check(self) -> None:
        """Check upload policy and timing of every point against its method and number of clients.

        Raises UsageError, naming the point.
        """
        for number, (name, _) in enumerate(self.points):
            config = self.config_of(number)
            clients = self.partition_of(number).clients
            method = find_method(name)
            try:
                trust = policy_from_config(config, method)
                timing_from_config(config, method)
                if clients is not None and config.participation is not None:
                    participation = parse_participation(config.participation)
                    trust.check_round(clients_per_round(participation, clients))
            except FedcacheError as error:
                words = self.words_of(number)
                raise FedcacheError(error.code, f"{words}: {error.message}", error.hint) from error


def request_grid(
    methods: Sequence[str],
    sweeps: Mapping[str, Sequence[str]],
    config: TrainConfig,
    home: Home,
    *,
    partition: PartitionConfig | None = None,
    runs: Path | None = None,
    sampling: Sampling | None = None,
    **fields: Any,
) -> GridRequest:
    """The grid of every combination of methods and swept values, checked before anything runs. Raises UsageError.

    ``methods`` are names and ``sweeps`` key -> values, as ``--sweep``; ``sampling`` says how points are drawn, by
    default all combinations. All other arguments are fields of ``GridRequest``.
    """
    check_score(fields.get("score"))
    sampling = sampling or Sampling()
    search = search_of(sampling, methods, sweeps)
    notes: tuple[str, ...] = ()
    if search is None:
        all_points, notes = points_that_differ(methods, sweeps, config)
        points = sampled(sampling.sampler, all_points)
    else:
        points = search.corners()
        # If there are fewer corners than ``MOST_CHECKED``, none was left out, so they contain every value of each list.
        # Only then can ``drop_unread`` refuse a key that no point reads.
        if len(points) < MOST_CHECKED:
            drop_unread(points, config)
    if config.rounds is None and "rounds" not in sweeps:
        notes += different_rounds(methods)
    request = GridRequest(
        tuple(methods),
        sweeps,
        sampling,
        tuple(points),
        config,
        partition or PartitionConfig(),
        home,
        runs or home.runs,
        search=search,
        notes=notes,
        **fields,
    )
    # The constructor checks the options of saved models.
    KeptModels(request.save)
    request.check()
    return request


def different_rounds(methods: Sequence[str]) -> tuple[str, ...]:
    """A note if methods that train in several rounds have different numbers of them by default; () otherwise."""
    found = [find_method(name) for name in dict.fromkeys(methods)]
    rounds = {method.name: method.defaults.rounds for method in found if not method.one_shot}
    if len(set(rounds.values())) < 2:
        return ()
    listed = ", ".join(f"{name} {count}" for name, count in rounds.items())
    return (
        f"Each method trains for as many rounds as in its paper: {listed}. For equal rounds: --rounds NUMBER",
    )


class GridRecord:
    """Writer of the record of a running grid: a line at its start, for each point that ends, and at its end.

    Args:
        request: the grid.
        search: name of a search; it does not change if the search is continued with more trials. None for a grid.
    """

    def __init__(self, request: GridRequest, search: str | None = None) -> None:
        points = []
        if not search:
            points = [[method, dict(sweep)] for method, sweep in request.points]
        # The directory of the runs, if it is not that of the home: no path inside the home is recorded, because a home
        # may be moved.
        elsewhere = ""
        if request.runs != request.home.runs:
            elsewhere = str(request.runs.resolve())
        command = command_of_grid(request)
        identity = [points, command, elsewhere]
        if search:
            # More trials change the command, but not the record. So the name of the search replaces points and command.
            identity = [search, search, elsewhere]
        name = digest_of(identity)[:16]
        self._file = request.home.root / FOLDER / f"{name}.jsonl"
        start: Facts = {
            "process": this_process(),
            "started": time.time(),
            "command": command,
            "runs": elsewhere,
            "points": points,
        }
        if request.search is not None:
            start["trials"] = int(min(request.search.trials, request.search.size))
        self._lines: SealedLines | None = None
        with suppress(OSError):
            make_private(self._file.parent)
            write_sealed_lines(self._file, [start], chain_start(self._file))
            self._lines = SealedLines(self._file, chain_start(self._file))

    def __enter__(self) -> GridRecord:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: object
    ) -> None:
        line: Facts = {"ended": time.time()}
        if error is not None:
            line["error"] = getattr(error, "message", "") or type(error).__name__
        self.append(line)

    def append(self, line: Record) -> None:
        """Record that a search has drawn a point, or that a point has ended.

        A drawn point replaces recorded points with its number and higher ones. The line of an end has ``run`` (the name
        of the directory), and for a pruned run also ``pruned`` (its last round); without a run it has only ``error``.
        """
        if self._lines is not None:
            with suppress(OSError):
                self._lines.append(line)


def command_of_grid(request: GridRequest) -> str:
    """One line for a shell: the methods, the sweeps, and every option that is not at its default."""
    words = ["fedcache", "grid", "--method", ",".join(request.methods)]
    for key, values in request.sweeps.items():
        words += ["--sweep", f"{key}={in_a_list(values)}"]
    sampling = request.sampling
    search = {
        "--sampler": (sampling.sampler, "grid"),
        "--trials": (sampling.trials, None),
        "--pruner": (sampling.pruner, "none"),
    }
    words += _changed(search)
    words += option_words(request.config, without=("method",))
    words += option_words(request.partition)
    further = {
        "--repartition": (request.repartition, False),
        "--no-extract": (not request.extract, False),
        "--exact": (request.exact, False),
        "--retrain": (request.retrain, False),
        "--score": (request.score, None),
        "--save-models": (request.save.which, "best"),
        "--save-clients": (request.save.clients, None),
        "--runs": (request.runs, request.home.runs),
    }
    words += _changed(further)
    return shlex.join(words)


def _changed(options: Mapping[str, tuple[object, object]]) -> list[str]:
    """Command-line words of the options that are not at their default; ``options`` is option -> (value, default)."""
    words = []
    for option, (value, default) in options.items():
        if value != default:
            words.append(option)
            if value is not True:
                words.append(option_value(value))
    return words


# ``grid --retrain``: the point of each method chosen by validation is trained again on all training rows (FedPCL,
# appendix A.1.4).


def check_validation(
    grid: GridRun, why: str = "--retrain trains the configuration selected on validation rows"
) -> None:
    """Refuse a grid without validation rows, before any point is trained. Raises UsageError.

    ``why`` is the beginning of the message: it says why validation rows are needed.
    """
    partitions = grid.prepare(0).partitions.values()
    if any(partition.validation is None for partition in partitions):
        raise UsageError(
            f"{why}, but the partition has no validation rows.",
            "Take validation rows out of the training rows:  --validation 0.2",
        )


def retrain(grid: GridRun, done: Grid) -> list[Point]:
    """The chosen points of a grid, trained on all training rows with all seeds (FedPCL, appendix A.1.4).

    The validation rows return to the training rows, which gives the partition of a run without validation rows. If that
    run is stored, it is returned. Raises FedcacheError, as ``train``.
    """
    request = grid.request
    retrained = []
    # Every run that is trained here belongs to a best point, so ``--save-models best`` keeps all models.
    save = SaveModels("all", request.save.clients)
    if request.save.which == "none":
        save = request.save
    for point in done.chosen():
        # ``grid`` knows points by their number in the request.
        number = request.points.index((point.method, point.sweep))
        grid.observer.note(Detail(f"Training {point.words} again, on all training rows."))
        run = train_run(
            grid.prepare(number, whole=True),
            request.config_of(number),
            TrainingOptions(
                request.runs, grid.observer, grid.stop, request.fresh, KeptModels(save)
            ),
            GridPosition(f"{point.words}, on all rows"),
        )
        retrained.append(Point(point.method, point.sweep, run))
    return retrained


class GridEngine(Protocol):
    """Engine that computes the points of a grid elsewhere, with the same bits."""

    def run_grid(self, grid: GridRun, jobs: int) -> None:
        """Train every point and pass each to ``grid.end_point``; points that are not passed are trained here."""


def grid(
    request: GridRequest,
    *,
    jobs: int = 1,
    engine: GridEngine | None = None,
    observer: Observer | None = None,
    hooks: Sequence[OnRound] = (),
    stop: Stop | None = None,
) -> Grid:
    """Train every point.

    A point whose stored run is damaged, or whose training diverges, does not stop the others; it is in ``Grid.damaged``
    or ``Grid.failed``. Raises FedcacheError, as ``train``; CorruptionError or FederatedRunError if no point has a
    result.

    Args:
        request: from ``request_grid``.
        jobs: number of processes. Each process trains one point at a time, and hooks get the rounds of a point when it
            ends.
        engine: computes the same points on a cluster, with the same bits.
        observer: gets the messages; a sentence about several points is passed on once.
        hooks: as in ``train``.
        stop: checked between rounds; finished points are kept.
    """
    # Processes train one point each, so none are trained together.
    request = replace(request, exact=request.exact or jobs > 1)
    run = GridRun(request, EachOnce(with_hooks(observer, hooks)), stop or Stop())
    run.note_points()
    if request.retrain:
        check_validation(run)
    with GridRecord(request) as run.record:
        if engine is not None:
            engine.run_grid(run, jobs)
        elif jobs > 1:
            train_in_processes(run, jobs)
        # Train the points that have no result yet: all of them, if neither an engine nor processes trained them.
        for group in point_groups(request.points):
            run.train(group)
        done = run.grid()
        if request.retrain:
            done.retrained = retrain(run, done)
    return done


def grid_plan(request: GridRequest, observer: Observer) -> Facts:
    """``--dry-run`` of ``grid`` (and of ``train``, which is a grid of one point). Nothing is extracted or trained.

    Returns:
        for each program (a group of points that are trained together), its execution, the clients and points computed
        at once, and the peak memory in bytes.
    """
    points = request.points
    # The trials of a search have similar costs, so one of them is enough.
    if request.search is not None:
        points = points[:1]
    request = replace(request, points=points, extract=False, fresh=False)
    run = GridRun(request, EachOnce(observer), Stop())
    run.note_points()
    plans = []
    for group in point_groups(request.points):
        together = len(group)
        if request.exact:
            together = 1
        inputs = run.prepare(group[0])
        spec = inputs.resolve(request.config_of(group[0]))
        execution, memory = forecast_run(inputs, spec, together)
        # ``sequential`` computes one point after another, even if several points are planned together.
        points_at_once = execution.points
        if execution.name == "sequential":
            points_at_once = 1
        plans.append(
            {
                "method": inputs.method.name,
                "points": together,
                "execution": execution.name,
                "clients_at_once": execution.chunk,
                "points_at_once": points_at_once,
                "memory": memory.to_dict(),
                "words": memory.words(),
            }
        )
    return {"programs": plans}


class GridRun:
    """A running grid.

    Attributes:
        ended: number of a point -> its run or the error that ended it.
        name: contains a digest of the request; "" for one point.
        total: number of points when the grid has ended.
        score: the one score of all points.
        record: the record of the grid in the fedcache home; None for a plan.
    """

    def __init__(self, request: GridRequest, observer: Observer, stop: Stop) -> None:
        self.request = request
        self.observer = observer
        self.stop = stop
        self.ended: dict[int, Run | FedcacheError] = {}
        self._inputs = InputCache()
        self._shared = GridCache()
        # The highest accuracy so far, at first below every accuracy.
        self._best = -1.0
        self.score = request.compared_by()
        self.total = len(request.points)
        # ``KeptModels`` takes None for the primary metric.
        score: str | None = self.score
        if score == "own":
            score = None
        self._kept = KeptModels(request.save, score)
        self.name = ""
        if len(request.points) > 1:
            identity = (request.points, request.config, request.partition, request.repartition)
            digest = sha256_hex(repr(identity).encode())
            self.name = f"grid-{digest[:12]}"
        self.record: GridRecord | None = None

    def note_points(self) -> None:
        """Pass the notes of the request to the observer."""
        for note in self.request.notes:
            self.observer.note(note)

    def position_of(self, number: int) -> GridPosition:
        """The name of a point and its place among all points, for progress messages."""
        points = self.request.points
        name, sweep = points[number]
        words = point_words(name, sweep)
        methods = {method for method, _ in points}
        if sweep and len(methods) == 1:
            words = words.removeprefix(f"{name} ")
        return GridPosition(words, len(self.ended), self.total, self.name)

    def prepare_first(self) -> None:
        """Extract missing features of the first point and refuse wrong options, before an engine trains elsewhere.

        Raises FedcacheError, as ``train``. An error of training (``Exit.FEDERATED``) is not raised: it ends one point,
        and the others may work.
        """
        try:
            self.prepare(0)
        except FedcacheError as error:
            if error.code is not Exit.FEDERATED:
                raise

    def prepare(self, number: int, *, whole: bool = False) -> RunInputs:
        """The inputs of a point; the other points of its group differ only in hyperparameters.

        With ``whole`` the validation rows are training rows.
        """
        request = self.request
        config = request.config_of(number)
        partition = request.partition_of(number)
        check_config(config, partition)
        preparation = Preparation(
            request.home,
            self.observer,
            self.stop,
            extract=request.extract,
            repartition=request.repartition,
            cache=self._inputs,
            whole=whole,
        )
        source = row_source(config, partition, preparation)
        return prepare_run(config, source, ledger=request.home.root / LEDGER)

    def train(self, group: Sequence[int]) -> None:
        """Train the points of a group that have not ended."""
        group = [n for n in group if n not in self.ended]
        if not group:
            return
        request = self.request
        configs = [request.config_of(n) for n in group]
        name, sweep = request.points[group[0]]
        words = point_words(name, sweep)
        more = len(group) - 1
        if more:
            words += f" and {more} more configurations that differ in numbers"
        first_number = len(self.ended) + 1
        total = len(request.points)
        self.observer.note(
            Detail(f"Configurations {first_number} to {first_number + more} of {total}: {words}")
        )
        try:
            shared = self.prepare(group[0])
        except FedcacheError as error:
            if error.code is not Exit.FEDERATED:
                raise
            # All points of a group have the same inputs, so all of them fail.
            for n in group:
                self.end_point(n, error)
            return
        sharing = ""
        if not request.exact:
            sharing = self._sharing(shared, configs)
        # Points that share work are trained together; the others one after another.
        if sharing:
            self.observer.note(Detail(f"{sharing} (--exact trains one by one)."))
            points = []
            for n, config in zip(group, configs, strict=True):
                inputs = shared.with_settings_of(config)
                points.append(PreparedPoint(inputs, config, self.position_of(n)))
            train_together(
                points,
                self._options(self.observer, self.stop),
                cache=self._shared,
                on_end=lambda i, out: self.end_point(group[i], out),
            )
            return
        for n, config in zip(group, configs, strict=True):
            try:
                inputs = shared.with_settings_of(config)
                run = self.train_alone(n, inputs, self.observer, self.stop)
            except FedcacheError as error:
                if not ends_one_run(error):
                    raise
                self.end_point(n, error)
            else:
                self.end_point(n, run)

    def train_alone(self, number: int, inputs: RunInputs, observer: Observer, stop: Stop) -> Run:
        """The run of one point: trained alone, or stored. Raises FedcacheError, as ``train``."""
        config = self.request.config_of(number)
        options = self._options(observer, stop)
        return train_run(inputs, config, options, self.position_of(number))

    def _options(self, observer: Observer, stop: Stop) -> TrainingOptions:
        return TrainingOptions(self.request.runs, observer, stop, self.request.fresh, self._kept)

    def _sharing(self, inputs: RunInputs, configs: Sequence[TrainConfig]) -> str:
        """How points share work with each other or with earlier points, in words; "" if each is computed alone."""
        method = inputs.method
        if shares_uploads(method):
            together = len(configs) > 1
            # Sums of statistics are kept for the other groups of the method too.
            of_method = [name for name, _ in self.request.points if name == method.name]
            if together or (len(of_method) > 1 and method.additive(inputs.settings)):
                return "Clients' statistics are computed once"
        if len(configs) == 1:
            return ""
        spec = inputs.resolve(configs[0])
        execution, _ = forecast_run(inputs, spec, len(configs), place=self.request.runs)
        if execution.points == 1 or not find_executor(execution.name).joins_points:
            return ""
        size = f"{execution.points} configurations and {execution.chunk} clients at once"
        return f"The configurations are trained together: {execution.name}, {size}"

    def end_point(self, number: int, out: Run | FedcacheError) -> None:
        """Keep a point that has ended, and note if it is the best so far."""
        self.ended[number] = out
        if isinstance(out, FedcacheError):
            self.recorded(number, error=out.message)
            self.observer.warn(out.message)
            return
        self.recorded(number, run=out.path.name)
        self._kept.ended(out.path, out.result)
        _, sweep = self.request.points[number]
        # One point needs no comparison. Accuracies on different held-out values are not comparable, because their test
        # rows differ.
        if self.total < 2 or "hold_out" in sweep:
            return
        mean = choice_value(out.result, self.score)
        if mean is not None and mean > self._best:
            self._best = mean
            words = self.request.words_of(number)
            split = "test"
            if has_validation([out.result]):
                split = "validation"
            count = f"{len(self.ended)} of {self.total} configurations"
            self.observer.note(
                Detail(f"Highest {split} accuracy so far, {count}: {words}  {100 * mean:.2f} %")
            )

    def recorded(self, number: int, **how: str | int) -> None:
        """Write the end of a point into the record of the grid, if there is one."""
        if self.record is not None:
            self.record.append({"point": number, **how})

    def spent_without_result(self) -> list[Spending]:
        """The privacy cost of points that were pruned, failed or are damaged: some of their rounds may be published."""
        spent = []
        for number in range(len(self.request.points)):
            config = self.request.config_of(number)
            if not config.dp_noise or isinstance(self.ended.get(number), Run):
                continue
            # A point that cannot be prepared ended before any noise was drawn.
            try:
                inputs = self.prepare(number)
                spec = inputs.resolve(config)
            except FedcacheError:
                continue
            partitions = tuple(inputs.partitions[seed].digest for seed in spec.seeds)
            cost = spec.privacy_cost(len(inputs.clients))
            spent.append(Spending(str(inputs.dataset["digest"]), partitions, cost))
        return spent

    def grid(self) -> Grid:
        """The result. Raises CorruptionError or FederatedRunError if no point has a result."""
        done = Grid([], score=self.request.score, without_result=self.spent_without_result())
        for number, (name, sweep) in enumerate(self.request.points):
            out = self.ended[number]
            if isinstance(out, Run):
                done.points.append(Point(name, sweep, out))
                continue
            lost = LostPoint(name, sweep, out.message, out.hint)
            if isinstance(out, DamagedRunError):
                done.damaged.append(lost)
            else:
                done.failed.append(lost)
        done.need_points()
        return done


def train_in_processes(grid: GridRun, jobs: int) -> None:
    """Train every point alone, ``jobs`` at once; the processes share the threads equally.

    Raises FedcacheError, as ``train``; INTERRUPTED after a stop, with finished points kept.
    """
    numbers = list(range(len(grid.request.points)))
    # The first point is trained alone, so that features are extracted once and a wrong option gives one message.
    grid.train(numbers[:1])
    threads = max(1, torch.get_num_threads() // jobs)
    pool = ProcessPoolExecutor(
        jobs,
        mp_context=worker_context(__name__),
        initializer=_set_up_process,
        initargs=(threads, dict(os.environ)),
    )
    with (
        piece_of_work(grid.observer, "training", len(numbers) - 1, "configurations"),
        pool,
        lost_workers(grid),
    ):
        futures = {pool.submit(_train_point, grid.request, n): n for n in numbers[1:]}
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
            if grid.stop.requested:
                pool.shutdown(wait=False, cancel_futures=True)
                raise stopped(grid)
            for future in done:
                number = futures[future]
                out = future.result()
                if isinstance(out, FedcacheError) and not ends_one_run(out):
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise out
                if isinstance(out, Run):
                    position = grid.position_of(number)
                    replay_stored(grid.observer, out.path, out.result, position)
                grid.end_point(number, out)
                grid.observer.advance(1)


def stopped(grid: GridRun) -> StoppedError:
    """The error for a requested stop."""
    return StoppedError(
        f"Stopped on request after {len(grid.ended)} of {len(grid.request.points)} configurations; "
        "finished ones are kept.",
        "Run the same command again to resume.",
    )


@contextmanager
def lost_workers(grid: GridRun) -> Iterator[None]:
    """Raise StoppedError or MachineError when workers, or the process that forks them, are ended from outside."""
    try:
        yield
    except (BrokenProcessPool, ConnectionError, EOFError) as error:
        # A signal to the whole process group also ends the workers.
        if grid.stop.requested:
            raise stopped(grid) from error
        raise MachineError(
            "A process that trains configurations was killed. Finished configurations are kept.",
            "A common cause is too little memory. To resume, run the same command again with a smaller --jobs.",
        ) from error


def _set_up_process(threads: int, environment: dict[str, str]) -> None:
    """Set the threads and environment of a worker, and let it ignore Ctrl-C, which its parent handles."""
    take_environment(environment)
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _train_point(request: GridRequest, number: int) -> Run | FedcacheError:
    """Train one point in a worker; an error is returned, so that its parent can handle it."""
    try:
        return train(
            request.config_of(number),
            request.home,
            partition=request.partition_of(number),
            runs=request.runs,
            repartition=request.repartition,
            extract=False,
            fresh=request.fresh,
            save=request.save,
        )
    except FedcacheError as error:
        return error


# Search (``grid --sampler optuna``): points are drawn one after another, guided by earlier validation accuracies.
#
# A trial is a run trained alone, equal to the run of ``train``; stored trials are read. A search that was killed
# resumes its last trial from the checkpoint.

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
                params: Facts = {key: self._drawn(key, word) for key, word in values}
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

    def _trial(self, line: Record) -> FrozenTrial:
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

    def point_of(self, params: Facts) -> PointKey:
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
        return grid(request, jobs=jobs, engine=engine, observer=observer, hooks=hooks, stop=stop)
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

    def _add(self, trials: Trials, params: Record) -> tuple[int, str, dict[str, str]]:
        """Append the point of a trial; returns its number, method and swept values."""
        method, values = trials.point_of(dict(params))
        sweep = dict(values)
        points = self.request.points
        number = len(points)
        self.request = replace(self.request, points=(*points, (method, sweep)))
        if self.record is not None:
            self.record.append({"drawn": number, "method": method, "sweep": sweep})
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

    def ended(self, path: Path, result: Record) -> None:
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
