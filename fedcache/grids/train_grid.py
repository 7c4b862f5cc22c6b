"""``grid``: the product of methods, sweeps and seeds, each point a run.

Every point has its own digest, so a grid that was killed runs only what is missing, and a point that was trained alone
before is not trained again. Points that differ in floats alone are trained together where an execution can; they equal
their single runs up to rounding, and with ``exact`` bit for bit.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import replace
from typing import Any, Protocol

import torch

from fedcache.config import SaveModels, TrainConfig
from fedcache.errors import Exit, FedcacheError, StoppedError, UsageError
from fedcache.federate.execution.choose import find_executor
from fedcache.federate.execution.grid_batch import GridCache
from fedcache.federate.execution.memory_estimate import shares_uploads
from fedcache.grids.points import point_groups
from fedcache.grids.record import GridRecord
from fedcache.grids.request import GridRequest
from fedcache.grids.request import request_grid as request_grid  # with which a grid begins
from fedcache.grids.result import Grid, LostPoint, Point, Spending, ends_one_point
from fedcache.process import Stop
from fedcache.progress import EachOnce, Observer, Silent
from fedcache.runs.directory import DamagedRunError
from fedcache.runs.events import GridPosition, OnRound, replay_stored, with_hooks
from fedcache.runs.features import RunInputs
from fedcache.runs.forecast import forecast_programs, forecast_run
from fedcache.runs.loop import (
    PreparedPoint,
    prepare_run,
    row_source,
    train,
    train_run,
    train_together,
)
from fedcache.runs.privacy_ledger import LEDGER
from fedcache.runs.row_sources import InputCache, Preparation
from fedcache.runs.run import Run
from fedcache.runs.run_models import KeptModels
from fedcache.runs.score import choice_value, has_validation
from fedcache.runs.spec import check_config
from fedcache.store.files import sha256_hex

# ``grid --retrain``: what was chosen by validation is trained again on all training rows (FedPCL,
# appendix A.1.4).


class EndedGrid(Protocol):
    """What is needed of a grid; ``train_grid.GridRun`` is one."""

    request: Any  # its ``GridRequest``
    observer: Observer
    stop: Stop

    def prepare(self, number: int, *, whole: bool = False) -> RunInputs:
        """The inputs of a point; with ``whole`` the rows to choose by are training rows."""


def check_validation(
    grid: EndedGrid, why: str = "--retrain trains what was chosen by validation"
) -> None:
    """Refuse a grid that has no rows to choose by, before any point is trained. Raises UsageError.

    ``why`` is what they are needed for, in words.
    """
    partitions = grid.prepare(0).partitions.values()
    if any(partition.validation is None for partition in partitions):
        raise UsageError(
            f"{why}, and the partition has no rows to choose by.",
            "Take some out of the training rows:  --validation 0.2",
        )


def retrain(grid: EndedGrid, done: Grid) -> list[Point]:
    """The chosen points of a grid, trained on all training rows with all seeds.

    The partition is that of the point with the validation rows among the training rows again, which is the one that is
    made without any: a run on it that is there already is returned. Raises FedcacheError, as ``train``.
    """
    request = grid.request
    made = []
    which = SaveModels("none" if request.save.which == "none" else "all", request.save.clients)
    for point in done.chosen():
        number = request.points.index((point.method, point.sweep))
        grid.observer.note(f"Training {request.words_of(number)} again, on all training rows.")
        config = request.config_of(number)
        run = train_run(
            grid.prepare(number, whole=True),
            config,
            request.runs,
            fresh=request.fresh,
            observer=grid.observer,
            stop=grid.stop,
            position=GridPosition(f"{request.words_of(number)}, on all rows"),
            kept=KeptModels(which),
        )
        made.append(Point(point.method, point.sweep, run))
    return made


class GridEngine(Protocol):
    """What computes the points of a grid elsewhere, to the bits they have here."""

    def run_grid(self, grid: GridRun, jobs: int) -> None:
        """Train every point and hand each to ``grid.end_point``; what is not handed over is trained here."""


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
    or ``Grid.failed``. Raises FedcacheError, as ``train``; CorruptionError or FederatedRunError, when no point has a
    result.

    Args:
        request: from ``request_grid``.
        jobs: processes that train points alone, for what cannot be trained together; hooks are then told of a point's
            rounds when it ends.
        engine: computes the same points on a cluster, to the same bits.
        observer: told the story; a sentence that holds for several points is said once.
        hooks: as in ``train``.
        stop: honoured between rounds; finished points are kept.
    """
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
        for group in point_groups(request.points):
            run.train(group)
        done = run.grid()
        if request.retrain:
            done.retrained = retrain(run, done)
    return done


def grid_plan(request: GridRequest, observer: Observer | None = None) -> dict[str, Any]:
    """``--dry-run`` of ``grid`` (and of ``train``, which is a grid of one point): programs, executions, memory.

    Nothing is extracted or trained.
    """
    # a trial like any
    if request.search is None:
        points = request.points
    else:
        points = request.points[:1]
    request = replace(request, points=points, extract=False, fresh=False)
    run = GridRun(request, EachOnce(observer or Silent()), Stop())
    run.note_points()
    plans = []
    for group in point_groups(request.points):
        config = request.config_of(group[0])
        inputs = run.prepare(group[0])
        plans.append((inputs, inputs.resolve(config), 1 if request.exact else len(group)))
    return forecast_programs(plans)


class GridRun:
    """A grid under way.

    Attributes:
        ended: point -> its run or the error that ended it.
        name: the same whenever the same grid is asked for; "" for one point.
        total: points that there will be.
    """

    def __init__(self, request: GridRequest, observer: Observer, stop: Stop) -> None:
        self.request = request
        self.observer = observer
        self.stop = stop
        self.ended: dict[int, Run | FedcacheError] = {}
        self._inputs = InputCache()
        self._shared = GridCache()
        self._best = -1.0
        self.score = request.compared_by()
        self.total = len(request.points)
        self._kept = KeptModels(request.save, None if self.score == "own" else self.score)
        asked = repr(
            (request.points, request.config, request.partition, request.repartition)
        ).encode()
        self.name = f"grid-{sha256_hex(asked)[:12]}" if len(request.points) > 1 else ""
        self.record: GridRecord | None = None  # none of a plan

    def note_points(self) -> None:
        """Say what of the sweeps does not reach every point."""
        for note in self.request.notes:
            self.observer.note(note)

    def position_of(self, number: int) -> GridPosition:
        """Where a point stands among all points now."""
        points = self.request.points
        name, sweep = points[number]
        many = len({method for method, _ in points}) > 1
        if many or not sweep:
            words = [name]
        else:
            words = []
        return GridPosition(
            " ".join([*words, *(f"{k}={v}" for k, v in sweep.items())]),
            len(self.ended),
            self.total,
            self.name,
        )

    def prepare_first(self) -> None:
        """Extract what the first point needs and refuse a wrong option, before anything is trained elsewhere.

        Raises FedcacheError, as ``train``; not for an invalid federated run, which ends its point alone.
        """
        try:
            self.prepare(0)
        except FedcacheError as error:
            if error.code is not Exit.FEDERATED:
                raise

    def prepare(self, number: int, *, whole: bool = False) -> RunInputs:
        """The inputs of a point, which are those of every point of its group but for the hyperparameters.

        With ``whole`` the rows to choose by are training rows.
        """
        request = self.request
        config = request.config_of(number)
        partition = request.partition_of(number)
        check_config(config, partition)
        preparation = Preparation(
            request.home,
            self.observer,
            self.stop,
            request.extract,
            request.repartition,
            self._inputs,
            whole,
        )
        return prepare_run(
            config, row_source(config, partition, preparation), ledger=request.home.root / LEDGER
        )

    def train(self, group: Sequence[int]) -> None:
        """Train the points of a group, those that have not ended."""
        group = [n for n in group if n not in self.ended]
        if not group:
            return
        request = self.request
        count = len(self.ended)
        configs = [request.config_of(n) for n in group]
        swept = " ".join(f"{k}={v}" for k, v in request.points[group[0]][1].items())
        many = ""
        if len(group) > 1:
            many = f" and {len(group) - 1} that differ in numbers"
        self.observer.note(
            f"Points {count + 1} to {count + len(group)} of {len(request.points)}: "
            f"{configs[0].method} {swept}{many}"
        )
        try:
            first = self.prepare(group[0])
        except FedcacheError as error:
            if error.code is not Exit.FEDERATED:
                raise
            for n in group:
                self.end_point(n, error)
            return
        if not request.exact and (sharing := self._sharing(first, configs)):
            self.observer.note(f"{sharing} (--exact computes one by one).")
            points = [
                PreparedPoint(first.with_settings_of(config), config, self.position_of(n))
                for n, config in zip(group, configs, strict=True)
            ]
            train_together(
                points,
                request.runs,
                cache=self._shared,
                fresh=request.fresh,
                observer=self.observer,
                stop=self.stop,
                on_end=lambda i, out: self.end_point(group[i], out),
                kept=self._kept,
            )
            return
        for n, config in zip(group, configs, strict=True):
            try:
                run = train_run(
                    first.with_settings_of(config),
                    config,
                    request.runs,
                    fresh=request.fresh,
                    observer=self.observer,
                    stop=self.stop,
                    position=self.position_of(n),
                    kept=self._kept,
                )
            except FedcacheError as error:
                if not ends_one_point(error):
                    raise
                self.end_point(n, error)
            else:
                self.end_point(n, run)

    def _sharing(self, inputs: RunInputs, configs: Sequence[TrainConfig]) -> str:
        """How points share work with each other or with points before them; "" when each is computed alone."""
        method = inputs.method
        if shares_uploads(method):
            every = [n for n, (name, _) in enumerate(self.request.points) if name == method.name]
            if len(configs) > 1 or (len(every) > 1 and method.additive(inputs.settings)):
                return "Clients' statistics are computed once"
        if len(configs) == 1:
            return ""
        execution, _ = forecast_run(
            inputs, inputs.resolve(configs[0]), len(configs), place=self.request.runs
        )
        if execution.points == 1 or not find_executor(execution.name).joins_points:
            return ""
        points = execution.points
        clients = execution.chunk
        return (
            f"They are one program: {execution.name}, {points} points and {clients} clients at once"
        )

    def end_point(self, number: int, out: Run | FedcacheError) -> None:
        """A point has ended: keep it, and say when it is the best so far."""
        self.ended[number] = out
        if self.record is not None:
            if isinstance(out, FedcacheError):
                how = {"error": out.message}
            else:
                how = {"run": out.path.name}
            self.record.point_ended(number, **how)
        if isinstance(out, FedcacheError):
            self.observer.warn(out.message)
            return
        self._kept.ended(out.path, out.result)
        mean = choice_value(out.result, self.score)
        points = self.total
        # Accuracies on values that are held out in turn are of different rows: none of them is the highest.
        comparable = "hold_out" not in self.request.points[number][1]
        if mean is not None and mean > self._best and points > 1 and comparable:
            self._best = mean
            words = self.request.words_of(number)
            what = "test"
            if has_validation([out.result]):
                what = "validation"
            self.observer.note(
                f"Highest {what} accuracy so far, {len(self.ended)} of {points} points: {words}  {100 * mean:.2f} %"
            )

    def spent_without_result(self) -> list[Spending]:
        """What the noise of points that were pruned, failed or are damaged costs: rounds of them may have been told."""
        found = []
        for number in range(len(self.request.points)):
            config = self.request.config_of(number)
            if not config.dp_noise or isinstance(self.ended.get(number), Run):
                continue
            try:
                inputs = self.prepare(number)
                spec = inputs.resolve(config)
            except FedcacheError:  # it was refused before anything was drawn
                continue
            partitions = tuple(inputs.partitions[seed].digest for seed in spec.seeds)
            cost = spec.privacy_cost(len(inputs.clients))
            found.append(Spending(str(inputs.dataset["digest"]), partitions, cost))
        return found

    def grid(self) -> Grid:
        """What came of it. Raises CorruptionError or FederatedRunError, when no point has a result."""
        done = Grid([], score=self.request.score, without_result=self.spent_without_result())
        for number, (name, sweep) in enumerate(self.request.points):
            out = self.ended[number]
            if isinstance(out, Run):
                done.points.append(Point(name, sweep, out))
            else:
                if isinstance(out, DamagedRunError):
                    lost = done.damaged
                else:
                    lost = done.failed
                lost.append(LostPoint(name, sweep, out.message, out.hint))
        lost = [*done.damaged, *done.failed]
        if lost and not done.points:
            raise FedcacheError(done.code, "\n".join(p.message for p in lost), lost[0].hint)
        return done


def train_in_processes(grid: GridRun, jobs: int) -> None:
    """Train every point alone, ``jobs`` at once; each process computes with its share of the threads.

    Raises FedcacheError, as ``train``; INTERRUPTED after a stop, with finished points kept.
    """
    numbers = list(range(len(grid.request.points)))
    # The first point alone: what has to be extracted is extracted once, and a wrong option is one message.
    grid.train(numbers[:1])
    threads = max(1, torch.get_num_threads() // jobs)
    context = multiprocessing.get_context("spawn")
    grid.observer.start("points", len(numbers) - 1, "points")
    try:
        with ProcessPoolExecutor(
            jobs, mp_context=context, initializer=_set_up_process, initargs=(threads,)
        ) as pool:
            futures = {pool.submit(_train_point, grid.request, n): n for n in numbers[1:]}
            waiting = set(futures)
            while waiting:
                done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                if grid.stop.requested:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise StoppedError(
                        f"Stopped on request after {len(grid.ended)} of {len(numbers)} points; they are kept.",
                        "Run the same command again to go on.",
                    )
                for future in done:
                    out = future.result()
                    if isinstance(out, FedcacheError) and not ends_one_point(out):
                        pool.shutdown(wait=False, cancel_futures=True)
                        raise out
                    if isinstance(out, Run):
                        replay_stored(
                            grid.observer, out.path, out.result, grid.position_of(futures[future])
                        )
                    grid.end_point(futures[future], out)
                    grid.observer.advance(1)
    finally:
        grid.observer.stop()


def _set_up_process(threads: int) -> None:
    """A worker: its threads, and no part in the keyboard's signals, which the parent answers."""
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _train_point(request: GridRequest, number: int) -> Run | FedcacheError:
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
