"""The engine ``ray``: extractions, grids and the rounds of a run hand it tasks, and it computes them on a Ray cluster.

Of an extraction, workers compute chunk tasks and this process commits their chunks. Of a run they train slices of each
round's clients (``client_slices``). A grid is cut into slices, each the
runs it would be on this machine: a group of points that are trained together, or one point where every point is
computed alone; one-shot methods that share their clients' statistics are one slice each. Runs are written where they
always are, so a slice that is computed twice goes on from what is there, and the driver reads what a worker says it has
finished.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedcache.config import Home, PartitionConfig, TrainConfig
from fedcache.errors import Exit, FedcacheError, MachineError, StoppedError, UsageError
from fedcache.extract.batches import ComputeSettings
from fedcache.extract.device import cores
from fedcache.extract.workers.chunk_tasks import ChunkWorker, TaskSpec, compute
from fedcache.federate.engines.ray.client_slices import (
    ClientsTask,
    check_execution,
    fit_slice,
    over_ray,
    set_up_clients,
)
from fedcache.federate.engines.ray.cluster import counted, open_cluster
from fedcache.federate.engines.ray.remote_calls import RayWorkerPool
from fedcache.federate.execution.memory_estimate import shares_uploads
from fedcache.federate.methods import find_method, wants_encoders
from fedcache.grids.points import point_groups
from fedcache.grids.request import GridRequest
from fedcache.grids.train_grid import GridRun
from fedcache.process import Stop, keep_freed_memory
from fedcache.progress import Observer, Silent
from fedcache.runs.directory import check_files, measured_of, read_result
from fedcache.runs.events import replay_stored
from fedcache.runs.loop import train
from fedcache.runs.run import Run

GRACE = 30.0
"""Seconds that workers get to keep their last round when the grid is stopped."""

Slice = tuple[tuple[int, ...], ...]
"""Programs, in task."""

LoneRun = tuple[TrainConfig, PartitionConfig]
"""One run: what to train, and how rows are dealt."""


@contextmanager
def open_pool(
    address: str | None, spec: TaskSpec, workers: int | None, observer: Observer
) -> Iterator[RayWorkerPool]:
    """Workers that compute chunk tasks, until the block ends.

    Args:
        address: of the cluster to join; None starts one on this machine.
        spec: of the tasks. Device and threads are those of a process of this machine, so that bits are the same.
        workers: at once; None is as many as the CPUs (or GPUs) allow.
        observer: told where they are.
    """
    threads = spec.settings.threads
    on_gpus = needs_gpus(spec.settings)
    gpus = 0
    if on_gpus:
        gpus = _gpus()
    if gpus:
        cpus = cores()
    else:
        cpus = (workers or max(1, cores() // threads)) * threads
    with open_cluster(address, cpus=cpus, gpus=gpus) as cluster:
        nodes = cluster.nodes()
        if on_gpus:  # each worker holds a GPU and decodes with its share of the node's CPUs
            shares = [int(n.get("CPU", 0) // n["GPU"]) for n in nodes if n.get("GPU")]
            spec = replace(spec, decoders=max(1, min(shares, default=1)))
        pool = RayWorkerPool(
            cluster, ChunkWorker, compute, spec, cpus=threads, gpus=int(on_gpus), most=workers
        )
        count = counted(len(nodes), "node")
        observer.note(f"Ray: {pool.slots} at once on {count} of {cluster.words}.")
        yield pool


def needs_gpus(settings: ComputeSettings) -> bool:
    """Whether each worker holds a GPU."""
    return settings.device == "cuda"


def _gpus() -> int:
    return torch.cuda.device_count()


@dataclass(frozen=True)
class GridTask:
    """What every worker is told once: a grid, and the threads that a slice has."""

    request: GridRequest
    threads: int


class Warnings(Silent):
    """Keeps warnings, for the driver to tell."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def warn(self, text: str) -> None:
        """Kept."""
        self.texts.append(text)


def slices(request: GridRequest) -> list[Slice]:
    """The grid in pieces that can be computed anywhere and have the bits they have here."""
    if request.exact:
        return [((number,),) for number in range(len(request.points))]
    found: dict[Any, list[tuple[int, ...]]] = {}
    for group in point_groups(request.points):
        name = request.points[group[0]][0]
        found.setdefault(name if shares_uploads(find_method(name)) else group[0], []).append(
            tuple(group)
        )
    return [tuple(groups) for groups in found.values()]


@contextmanager
def _asked_by_sigint() -> Iterator[Stop]:
    stop = Stop()
    before = signal.signal(signal.SIGINT, lambda *_: stop.ask())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def set_up_grid(task: GridTask) -> GridRun:
    """The grid in a worker; what has to be extracted has been extracted."""
    keep_freed_memory()
    torch.set_num_threads(task.threads)
    return GridRun(replace(task.request, extract=False), Silent(), Stop())


def train_slice(grid: GridRun, piece: Slice) -> dict[str, Any]:
    """Train a slice; what ended how, in a few words. An interruption keeps the last round of every point."""
    grid.observer = heard = Warnings()
    grid.ended.clear()
    with _asked_by_sigint() as grid.stop:
        for group in piece:
            grid.train(group)
    lost = {out.message for out in grid.ended.values() if isinstance(out, FedcacheError)}
    ended = {
        n: (str(out.path), out.reused) if isinstance(out, Run) else out
        for n, out in grid.ended.items()
    }
    return {
        "ended": ended,
        "warnings": [text for text in dict.fromkeys(heard.texts) if text not in lost],
    }


def _note_place(observer: Observer, pool: RayWorkerPool, what: str) -> None:
    nodes = counted(len(pool.cluster.nodes()), "node")
    threads = counted(pool.cpus, "thread")
    where = f"{nodes} of {pool.cluster.words}"
    observer.note(f"Ray: {what}, {pool.slots} at once with {threads} each on {where}.")


def _answers(
    pool: RayWorkerPool, todo: Sequence[Any], stop: Stop, done: Callable[[], str]
) -> Iterator[dict[str, Any]]:
    """The answers of all calls, as they end.

    Raises FedcacheError, as ``RayWorkerPool.wait``; INTERRUPTED after a stop, once every call has kept what it has.
    """
    begun = 0
    while begun < len(todo) or pool.waiting:
        while begun < len(todo) and pool.waiting < pool.slots:
            pool.submit(begun, todo[begun])
            begun += 1
        for _, answer in pool.wait(0.5):
            yield answer
        if stop.requested and (begun < len(todo) or pool.waiting):
            pool.interrupt()
            pool.settle(GRACE)
            raise StoppedError(
                f"Stopped on request after {done()}; they are kept.",
                "Run the same command again to go on.",
            )


def _end_point(grid: GridRun, number: int, out: tuple[str, bool] | FedcacheError) -> None:
    """A point has ended on a worker."""
    if isinstance(out, FedcacheError):
        grid.end_point(number, out)
    else:
        run = read_run(Path(out[0]), reused=out[1])
        replay_stored(grid.observer, run.path, run.result, grid.position_of(number))
        grid.end_point(number, run)
    grid.observer.advance(1)


def read_run(path: Path, *, reused: bool) -> Run:
    """A run that a worker has finished. Raises MachineError, where this machine does not see it; CorruptionError."""
    if not (path / "result.json").exists():
        raise MachineError(
            f"A worker finished {path.name}, and there is no {path / 'result.json'} here.",
            "Results and stores must lie on a path that all nodes share: give it with --runs or FEDCACHE_HOME.",
        )
    result = read_result(path / "result.json")
    check_files(path, result)
    return Run(path, result, measured_of(path, result) or {}, reused=reused)


@dataclass(frozen=True)
class RunsTask:
    """What every worker is told once of runs that are no grid."""

    home: Home
    runs: Path
    threads: int


def set_up_runs(task: RunsTask) -> RunsTask:
    """A worker that trains."""
    keep_freed_memory()
    torch.set_num_threads(task.threads)
    return task


def train_one(task: RunsTask, one: LoneRun) -> dict[str, Any]:
    """Train one run; its directory and whether it was there, or nothing where it cannot be trained."""
    try:
        with _asked_by_sigint() as stop:
            done = train(
                one[0], task.home, partition=one[1], runs=task.runs, extract=False, stop=stop
            )
    except FedcacheError as error:
        if error.code in (Exit.INTERRUPTED, Exit.BUG):
            raise
        return {}
    return {"path": str(done.path), "reused": done.reused}


@dataclass(frozen=True)
class RayEngine:
    """A Ray cluster to work on."""

    address: str | None = None  # HOST:PORT of the cluster to join; None starts one on this machine

    def check_extraction(self, workers: int | None) -> None:
        """Refuse ``--workers 0``, which keeps everything in this process. Raises UsageError."""
        if workers == 0:
            raise UsageError(
                "--workers 0 keeps everything in this process, and --engine ray takes others.",
                "Leave one of them out.",
            )

    def extraction_workers(
        self, spec: TaskSpec, workers: int | None, observer: Observer
    ) -> AbstractContextManager[RayWorkerPool]:
        """Workers for the chunk tasks of an extraction; see ``open_pool``."""
        return open_pool(self.address, spec, workers, observer)

    def run_grid(self, grid: GridRun, jobs: int) -> None:
        """Train every point of a grid.

        A slice has the threads it would have here: all of this process, or its share with ``jobs``. Raises as
        ``train``; MachineError for the cluster; StoppedError after a stop: what is finished is kept.
        """
        request = grid.request
        grid.prepare_first()  # what has to be extracted is extracted once, and a wrong option is one message
        threads = max(1, torch.get_num_threads() // jobs)
        names = {name for name, _ in request.points}
        live = request.config.device == "cuda" or any(
            wants_encoders(find_method(name)) for name in names
        )
        gpus = 0
        if live and torch.cuda.is_available():
            gpus = _gpus()
        pieces = slices(request)
        many = len(request.points)
        if jobs > 1:
            cpus = threads * jobs
        else:
            cpus = max(cores(), threads)
        with open_cluster(self.address, cpus=cpus, gpus=gpus) as cluster:
            task = GridTask(request, threads)
            pool = RayWorkerPool(
                cluster, set_up_grid, train_slice, task, cpus=threads, gpus=int(gpus > 0)
            )
            sliced = counted(len(pieces), "slice")
            _note_place(grid.observer, pool, f"{sliced} of {many} points")
            warned: set[str] = set()
            grid.observer.start("points", many, "points")
            try:
                for answer in _answers(
                    pool, pieces, grid.stop, lambda: f"{len(grid.ended)} of {many} points"
                ):
                    for text in answer["warnings"]:
                        if text not in warned:
                            warned.add(text)
                            grid.observer.warn(text)
                    for number, out in answer["ended"].items():
                        _end_point(grid, number, out)
            finally:
                grid.observer.stop()

    def client_by_client(self, config: TrainConfig) -> TrainConfig:
        """The configuration of a run that ``training`` serves. Raises UsageError for another execution."""
        return check_execution(config)

    @contextmanager
    def training(
        self,
        config: TrainConfig,
        partition: PartitionConfig,
        home: Home,
        repartition: bool,
        observer: Observer,
    ) -> Iterator[None]:
        """Have the clients of a sequential run trained on the cluster, which is opened when its first round begins.

        Raises MachineError for the cluster, inside the block.
        """
        threads = torch.get_num_threads()
        live = config.device == "cuda" or wants_encoders(find_method(str(config.method)))
        gpus = 0
        if live and torch.cuda.is_available():
            gpus = _gpus()
        task = ClientsTask(config, partition, home, repartition, threads)
        with ExitStack() as opened:

            def open_workers() -> RayWorkerPool:
                cluster = opened.enter_context(
                    open_cluster(self.address, cpus=max(cores(), threads), gpus=gpus)
                )
                pool = RayWorkerPool(
                    cluster, set_up_clients, fit_slice, task, cpus=threads, gpus=int(gpus > 0)
                )
                _note_place(observer, pool, "the clients of each round")
                return pool

            over_ray(opened, open_workers)
            yield

    def run_configurations(
        self, todo: Sequence[LoneRun], home: Home, runs: Path, observer: Observer, stop: Stop
    ) -> set[Path]:
        """Train runs that are no grid, each with the threads of this process; returns those that were not there before.

        A run that cannot be trained is left out: whoever asks for it next is told why. Raises MachineError for the
        cluster; StoppedError after a stop.
        """
        threads = torch.get_num_threads()
        live = any(wants_encoders(find_method(str(config.method))) for config, _ in todo)
        gpus = 0
        if live and torch.cuda.is_available():
            gpus = _gpus()
        made: set[Path] = set()
        with open_cluster(self.address, cpus=max(cores(), threads), gpus=gpus) as cluster:
            pool = RayWorkerPool(
                cluster,
                set_up_runs,
                train_one,
                RunsTask(home, runs, threads),
                cpus=threads,
                gpus=int(gpus > 0),
            )
            _note_place(observer, pool, f"{len(todo)} runs")
            observer.start("runs", len(todo), "runs")
            try:
                for answer in _answers(
                    pool, todo, stop, lambda: f"{len(made)} of {len(todo)} runs"
                ):
                    if answer and not answer["reused"]:
                        made.add(Path(answer["path"]))
                    observer.advance(1)
            finally:
                observer.stop()
        return made
