"""Training of a grid: the product of methods, sweeps and seeds, each point a run.

Every point has its own digest. So a grid that was killed trains only the missing points, and a point that was trained
alone before is not trained again. Points that differ only in floats are trained together if the execution supports it.
Their results then equal those of single runs up to rounding. With ``exact`` every point is trained alone.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch

from fedcache.config import SaveModels, TrainConfig
from fedcache.errors import Exit, FedcacheError, MachineError, StoppedError, UsageError
from fedcache.federate.engine.run import find_executor
from fedcache.federate.execution.grid_batch import GridCache
from fedcache.federate.execution.memory_estimate import shares_uploads
from fedcache.grids.points import point_groups
from fedcache.grids.record import GridRecord
from fedcache.grids.request import GridRequest
from fedcache.grids.request import (
    request_grid as request_grid,
)  # exported: the first call of a grid
from fedcache.grids.result import Grid, LostPoint, Point, Spending, point_words
from fedcache.process import Stop, take_environment, worker_context
from fedcache.progress import Detail, EachOnce, Observer, piece_of_work
from fedcache.runs.directory import DamagedRunError, ends_one_run
from fedcache.runs.events import GridPosition, OnRound, replay_stored, with_hooks
from fedcache.runs.features import RunInputs
from fedcache.runs.loop import (
    PreparedPoint,
    TrainingOptions,
    prepare_run,
    row_source,
    train,
    train_run,
    train_together,
)
from fedcache.runs.privacy_ledger import LEDGER
from fedcache.runs.row_sources import InputCache, Preparation
from fedcache.runs.run import Run
from fedcache.runs.run_models import KeptModels, forecast_run
from fedcache.runs.score import choice_value, has_validation
from fedcache.runs.spec import check_config
from fedcache.store.files import sha256_hex

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


def grid_plan(request: GridRequest, observer: Observer) -> dict[str, Any]:
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
            self.record.point_ended(number, **how)

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
