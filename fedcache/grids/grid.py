"""``grid``: the product of methods, sweeps and seeds, each point a run.

Every point has its own digest, so a grid that was killed runs only what is missing, and a point that was trained alone
before is not trained again. Points that differ in floats alone are one program (``api.programs``) where a lift can
compute them together; they equal their single runs up to rounding, and with ``exact`` bit for bit.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from fedcache.config import Home, PartitionConfig, TrainConfig
from fedcache.errors import Exit, FedcacheError
from fedcache.extract.stop import Stop
from fedcache.grids.points import Grid, Lost, Point, combinations, dealt, programs, sampled
from fedcache.grids.sweeps import belonging
from fedcache.progress import Observer, Silent
from fedcache.runs.directory import DamagedRunError
from fedcache.runs.events import OnRound, Place, hooked, tell_stored
from fedcache.runs.loop import train, train_setting
from fedcache.runs.loop_points import dry_run, foresee, settings_of, train_together
from fedcache.runs.prepare import Memo, Setting, find_method, parse_participation, prepare_run
from fedcache.runs.run import Run
from fedcache.runs.spec import check_values, refuse_contradictions
from fedcache.runs.trust import policy_from_config, typed_sweep_values


class GridEngine(Protocol):
    """Where the points of a grid are trained instead of in this process: ``--engine``."""

    def run_grid(self, work: Work, jobs: int) -> None:
        """Train every point of ``work``, ``jobs`` at once, and store the runs where ``work`` says."""


def grid(
    methods: Sequence[str],
    sweeps: Mapping[str, Sequence[str]],
    config: TrainConfig,
    home: Home,
    *,
    partition: PartitionConfig | None = None,
    runs: Path | None = None,
    repartition: bool = False,
    extract: bool = True,
    fresh: bool = False,
    sampler: str = "grid",
    exact: bool = False,
    jobs: int = 1,
    observer: Observer | None = None,
    hooks: Sequence[OnRound] = (),
    stop: Stop | None = None,
    engine: GridEngine | None = None,
) -> Grid:
    """Train every point; see ``train`` for the other arguments.

    ``sampler`` is ``grid``, or ``random:N[:SEED]`` for N points drawn without repeats. ``exact`` computes every point
    alone, with the bits of its single run. ``jobs`` processes train points alone, for what cannot be computed together;
    ``hooks`` are then told of a point's rounds when it ends. On ``engine`` the same points are computed by a
    cluster, to the same bits.

    A point whose stored run is damaged, or whose training diverges, does not stop the others; it is in
    ``Grid.damaged`` or ``Grid.failed``.

    Raises:
        FedcacheError: as ``train``; a stop is honoured between rounds, and finished points are kept. CORRUPT or
            FEDERATED, when no point has a result.
    """
    observer, stop = hooked(observer, hooks), stop or Stop()
    todo = sampled(sampler, combinations(methods, sweeps))
    work = Work(todo, config, partition or PartitionConfig(), home, runs or home.runs, repartition, extract, fresh,
                exact or jobs > 1, observer, stop)  # fmt: skip
    work.check()
    if engine is not None:
        engine.run_grid(work, jobs)
    elif jobs > 1:
        in_processes(work, jobs)
    for program in programs(todo):
        work.run(program)
    return work.grid()


def grid_plan(
    methods: Sequence[str],
    sweeps: Mapping[str, Sequence[str]],
    config: TrainConfig,
    home: Home,
    *,
    partition: PartitionConfig | None = None,
    repartition: bool = False,
    sampler: str = "grid",
    exact: bool = False,
    observer: Observer | None = None,
) -> dict[str, Any]:
    """``--dry-run`` of ``grid`` (and of ``train``, which is a grid of one point): programs, lifts, memory."""
    todo = sampled(sampler, combinations(methods, sweeps))
    work = Work(todo, config, partition or PartitionConfig(), home, home.runs, repartition, False, False, exact,
                observer or Silent(), Stop())  # fmt: skip
    work.check()
    return work.plans()


@dataclass
class Work:
    """A grid under way.

    Attributes:
        todo: every point's method and swept values.
        config: of all points.
        base: partition of all points.
        home: stores.
        runs: directory of results.
        repartition: as in ``grid``.
        extract: as in ``grid``.
        fresh: as in ``grid``.
        exact: whether every point is computed alone.
        observer: told the story.
        stop: honoured between rounds.
        ended: point -> its run or error.
    """

    todo: Sequence[tuple[str, dict[str, str]]]
    config: TrainConfig
    base: PartitionConfig
    home: Home
    runs: Path
    repartition: bool
    extract: bool
    fresh: bool
    exact: bool
    observer: Observer
    stop: Stop
    ended: dict[int, Run | FedcacheError] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from fedcache.federate.execution.grid_cache import GridCache

        self._memo, self._shared, self._best = Memo(), GridCache(), -1.0

    def check(self) -> None:
        """Refuse what a point asks of uploads that its method or number of clients does not allow, before any is run.

        Raises:
            FedcacheError: USAGE, naming the point.
        """
        from fedcache.federate.engine.run_state import sampled as in_a_round

        for number, (name, sweep) in enumerate(self.todo):
            config = self.config_of(number)
            try:
                trust = policy_from_config(config, find_method(name))
                if (clients := dealt(self.base, sweep).clients) is not None and config.participation is not None:
                    trust.check_round(in_a_round(parse_participation(config.participation), clients))
            except FedcacheError as error:
                point = " ".join([name, *(f"{k}={v}" for k, v in sweep.items())])
                raise FedcacheError(error.code, f"{point}: {error.message}", error.hint) from error

    def config_of(self, number: int) -> TrainConfig:
        """What ``train`` would be asked for the point."""
        name, sweep = self.todo[number]
        settings = belonging(sweep, "set")
        values: dict[str, Any] = dict(belonging(sweep, "run"))
        values |= typed_sweep_values(values)
        for key in ("backbones", "domain"):
            if key in values:
                values[key] = tuple(values[key].split("+"))
        return replace(self.config, method=name, set={**self.config.set, **settings}, **values)

    def partition_of(self, number: int) -> PartitionConfig:
        """How its rows are dealt."""
        return dealt(self.base, self.todo[number][1])

    def place_of(self, number: int) -> Place:
        """Where it stands among all points now."""
        name, sweep = self.todo[number]
        many = len({m for m, _ in self.todo}) > 1
        words = [name] if many or not sweep else []
        return Place(" ".join([*words, *(f"{k}={v}" for k, v in sweep.items())]), len(self.ended), len(self.todo))

    def ready(self, number: int) -> None:
        """Extract what a point needs and refuse a wrong option, before anything is trained elsewhere.

        Raises:
            FedcacheError: as ``train``; not for an invalid federated run, which ends its point alone.
        """
        config = self.config_of(number)
        try:
            refuse_contradictions(config, self.base)
            check_values(config)
            self._prepare(config, self.partition_of(number))
        except FedcacheError as error:
            if error.code is not Exit.FEDERATED:
                raise

    def run(self, program: Sequence[int]) -> None:
        """Train the points of one program, those that have not ended."""
        program = [n for n in program if n not in self.ended]
        if not program:
            return
        configs = [self.config_of(n) for n in program]
        words = " ".join(f"{k}={v}" for k, v in self.todo[program[0]][1].items())
        many = f" and {len(program) - 1} that differ in numbers" if len(program) > 1 else ""
        self.observer.note(f"Points {len(self.ended) + 1} to {len(self.ended) + len(program)} of {len(self.todo)}: "
                           f"{configs[0].method} {words}{many}")  # fmt: skip
        try:
            refuse_contradictions(configs[0], self.base)
            check_values(configs[0])
            setting = self._prepare(configs[0], self.partition_of(program[0]))
        except FedcacheError as error:
            if error.code is not Exit.FEDERATED:
                raise
            for n in program:
                self.told(n, error)
            return
        settings = settings_of(setting, configs)
        if not self.exact and (words := self._together(setting, configs)):
            self.observer.note(f"{words} (--exact computes one by one).")
            train_together(settings, configs, self.runs, shared=self._shared, fresh=self.fresh,
                               observer=self.observer, stop=self.stop,
                               told=lambda i, out: self.told(program[i], out),
                               places=[self.place_of(n) for n in program])  # fmt: skip
            return
        for n, one, config in zip(program, settings, configs, strict=True):
            try:
                self.told(n, train_setting(one, config, self.runs, fresh=self.fresh, observer=self.observer,
                                            stop=self.stop, place=self.place_of(n)))  # fmt: skip
            except FedcacheError as error:
                if not _of_a_point(error):
                    raise
                self.told(n, error)

    def _together(self, setting: Setting, configs: Sequence[TrainConfig]) -> str:
        """How points share work with each other or with points before them; "" when each is computed alone."""
        from fedcache.federate.execution.choose import executors
        from fedcache.federate.execution.load import shares_uploads

        method = setting.method
        if shares_uploads(method):
            every = [n for n, (name, _) in enumerate(self.todo) if name == method.name]
            if len(configs) > 1 or (len(every) > 1 and method.additive(setting.hp)):
                return "Clients' statistics are computed once"
        if len(configs) == 1:
            return ""
        lift, _ = foresee(setting, configs[0], len(configs))
        if not executors()[lift.name].joins_points:
            return ""
        return f"They are one program: {lift.name}, {lift.points} points and {lift.chunk} clients at once"

    def plans(self) -> dict[str, Any]:
        """What every program would do; nothing is extracted or trained."""
        found = []
        for program in programs(self.todo):
            config = self.config_of(program[0])
            refuse_contradictions(config, self.base)
            check_values(config)
            setting = self._prepare(config, self.partition_of(program[0]))
            found.append((setting, config, 1 if self.exact else len(program)))
        return dry_run(found)

    def _prepare(self, config: TrainConfig, partition: PartitionConfig) -> Setting:
        if config.clients_from is not None:
            from fedcache.runs.prepare_shards import prepare_from_shards

            return prepare_from_shards(config, self.home, self.observer)
        return prepare_run(config, partition, self.home, repartition=self.repartition, extract=self.extract,
                           observer=self.observer, stop=self.stop, memo=self._memo)[0]  # fmt: skip

    def told(self, number: int, out: Run | FedcacheError) -> None:
        """A point has ended: keep it, and say when it is the best so far."""
        self.ended[number] = out
        name, sweep = self.todo[number]
        if isinstance(out, FedcacheError):
            self.observer.warn(out.message)
            return
        mean = out.accuracy["mean"]
        if mean is not None and mean > self._best and len(self.todo) > 1:
            self._best = mean
            words = " ".join([name, *(f"{k}={v}" for k, v in sweep.items())])
            self.observer.note(f"Best of {len(self.ended)} of {len(self.todo)} points: {words}  {100 * mean:.2f} %")

    def grid(self) -> Grid:
        """What came of it.

        Raises:
            FedcacheError: CORRUPT or FEDERATED, when no point has a result.
        """
        points: list[Point] = []
        damaged: list[Lost] = []
        failed: list[Lost] = []
        for number, (name, sweep) in enumerate(self.todo):
            out = self.ended[number]
            if isinstance(out, Run):
                points.append(Point(name, sweep, out))
            else:
                lost = damaged if isinstance(out, DamagedRunError) else failed
                lost.append(Lost(name, sweep, out.message, out.hint))
        done, lost = Grid(points, damaged, failed), [*damaged, *failed]
        if lost and not points:
            raise FedcacheError(done.code, "\n".join(p.message for p in lost), lost[0].hint)
        return done


def in_processes(work: Work, jobs: int) -> None:
    """Train every point alone, ``jobs`` at once; each process computes with its share of the threads.

    Raises:
        FedcacheError: as ``train``; INTERRUPTED after a stop, with finished points kept.
    """
    import torch

    numbers = list(range(len(work.todo)))
    # The first point alone: what has to be extracted is extracted once, and a wrong option is one message.
    work.run(numbers[:1])
    threads = max(1, torch.get_num_threads() // jobs)
    context = multiprocessing.get_context("spawn")
    work.observer.start("points", len(numbers) - 1, "points")
    try:
        with ProcessPoolExecutor(jobs, mp_context=context, initializer=_settle, initargs=(threads,)) as pool:
            futures = {
                pool.submit(_alone, work.config_of(n), work.partition_of(n), work.home, work.runs, work.repartition,
                            work.fresh): n
                for n in numbers[1:]
            }  # fmt: skip
            waiting = set(futures)
            while waiting:
                done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                if work.stop.requested:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise FedcacheError(
                        Exit.INTERRUPTED,
                        f"Stopped on request after {len(work.ended)} of {len(numbers)} points; they are kept.",
                        "Run the same command again to go on.",
                    )
                for future in done:
                    out = future.result()
                    if isinstance(out, FedcacheError) and not _of_a_point(out):
                        pool.shutdown(wait=False, cancel_futures=True)
                        raise out
                    if isinstance(out, Run):
                        tell_stored(work.observer, out.path, out.result, work.place_of(futures[future]))
                    work.told(futures[future], out)
                    work.observer.advance(1)
    finally:
        work.observer.stop()


def _of_a_point(error: FedcacheError) -> bool:
    """Whether an error ends one point and not the grid."""
    return isinstance(error, DamagedRunError) or error.code is Exit.FEDERATED


def _settle(threads: int) -> None:
    """A worker: its threads, and no part in the keyboard's signals, which the parent answers."""
    import torch

    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _alone(
    config: TrainConfig, partition: PartitionConfig, home: Home, runs: Path, repartition: bool, fresh: bool
) -> Run | FedcacheError:
    """One point in a worker."""
    try:
        return train(config, home, partition=partition, runs=runs, repartition=repartition, extract=False, fresh=fresh)
    except FedcacheError as error:
        return error
