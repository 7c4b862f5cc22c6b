"""Engine ``ray``: extractions, grids and the rounds of a run, computed by tasks on a Ray cluster.

For an extraction, workers compute chunk tasks and this process commits their chunks. For a run, they train slices of
each round's clients (``client_slices``). A grid is cut into slices that equal the work of one machine: a group of
points that are trained together, or one point if every point is computed alone. All points of a one-shot method that
shares its clients' statistics are one slice. Workers write runs into the usual directories. So a slice that is computed
twice continues from the stored runs, and the driver reads the runs that a worker reports as finished.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    HeldRun,
    fit_slice,
    over_ray,
)
from fedcache.federate.engines.ray.cluster import open_cluster
from fedcache.federate.engines.ray.remote_calls import Make, RayWorkerPool, Use
from fedcache.federate.execution.memory_estimate import shares_uploads
from fedcache.federate.methods import find_method, wants_encoders
from fedcache.grids.points import point_groups
from fedcache.grids.request import GridRequest
from fedcache.grids.train_grid import GridRun
from fedcache.parsing import counted
from fedcache.process import Stop, keep_freed_memory
from fedcache.progress import Observer, Silent
from fedcache.runs.directory import check_files, measured_of, read_result
from fedcache.runs.events import replay_stored
from fedcache.runs.loop import train
from fedcache.runs.run import Run

GRACE = 30.0
"""Seconds that workers have to save their last round when the grid is stopped."""

Slice = tuple[tuple[int, ...], ...]
"""Groups of configurations that one worker trains."""

LoneRun = tuple[TrainConfig, PartitionConfig]
"""Configuration and partition of a run that is not part of a grid."""


@contextmanager
def open_pool(
    address: str | None, spec: TaskSpec, workers: int | None, observer: Observer
) -> Iterator[RayWorkerPool]:
    """Workers that compute chunk tasks, until the block ends.

    Args:
        address: of the cluster to join; None starts one on this machine.
        spec: of the tasks. Device and threads are those of a process of this machine, so that bits are equal.
        workers: at once; None for as many as the CPUs (or GPUs) allow.
        observer: gets a note of the number of workers and their nodes.
    """
    threads = spec.settings.threads
    on_gpus = needs_gpus(spec.settings)
    gpus = 0
    if on_gpus:
        gpus = _gpus()
    # A local cluster has the CPUs of its workers; with GPUs all CPUs, because they decode images.
    cpus = cores()
    if not gpus:
        workers_here = workers or max(1, cores() // threads)
        cpus = workers_here * threads
    with open_cluster(address, cpus=cpus, gpus=gpus) as cluster:
        nodes = cluster.nodes()
        if on_gpus:
            # Each worker holds a GPU and decodes images with its share of the node's CPUs.
            with_gpu = [node for node in nodes if node.get("GPU")]
            shares = [int(node.get("CPU", 0) // node["GPU"]) for node in with_gpu]
            spec = replace(spec, decoders=max(1, min(shares, default=1)))
        pool = RayWorkerPool(
            cluster, ChunkWorker, compute, spec, cpus=threads, gpus=int(on_gpus), most=workers
        )
        count = counted(len(nodes), "node")
        observer.note(f"Ray: {pool.slots} tasks at once on {count} of {cluster.words}.")
        yield pool


def needs_gpus(settings: ComputeSettings) -> bool:
    """Whether each worker holds a GPU."""
    return settings.device == "cuda"


def _gpus() -> int:
    return torch.cuda.device_count()


@dataclass(frozen=True)
class GridTask:
    """Setup of a worker: the grid, and the threads of a slice."""

    request: GridRequest
    threads: int


class Warnings(Silent):
    """Observer of a worker; it keeps warnings, which the driver passes on."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def warn(self, text: str) -> None:
        """Keep a warning."""
        self.texts.append(text)


def slices(request: GridRequest) -> list[Slice]:
    """The grid in pieces that give the same bits on any machine."""
    # With ``exact`` every point is computed alone.
    if request.exact:
        return [((number,),) for number in range(len(request.points))]
    pieces: dict[Any, list[tuple[int, ...]]] = {}
    for group in point_groups(request.points):
        # All points of a method that shares uploads are one slice; any other group of points is a slice of its own.
        key: str | int = group[0]
        name, _ = request.points[group[0]]
        if shares_uploads(find_method(name)):
            key = name
        pieces.setdefault(key, []).append(tuple(group))
    return [tuple(groups) for groups in pieces.values()]


@contextmanager
def _stopped_by_sigint() -> Iterator[Stop]:
    """A stop request that SIGINT sets, which is how Ray cancels a task."""
    stop = Stop()
    before = signal.signal(signal.SIGINT, lambda *_: stop.ask())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def set_up_grid(task: GridTask) -> GridRun:
    """The grid in a worker; the driver has extracted all features before."""
    keep_freed_memory()
    torch.set_num_threads(task.threads)
    return GridRun(replace(task.request, extract=False), Silent(), Stop())


def train_slice(grid: GridRun, piece: Slice) -> dict[str, Any]:
    """Train a slice; returns the end of every point and the warnings. A stop keeps the last round of every point."""
    warnings = Warnings()
    grid.observer = warnings
    grid.ended.clear()
    with _stopped_by_sigint() as grid.stop:
        for group in piece:
            grid.train(group)
    ended: dict[int, Any] = {}
    lost = set()  # the driver warns of lost points itself
    for number, out in grid.ended.items():
        if isinstance(out, FedcacheError):
            ended[number] = out
            lost.add(out.message)
        else:
            ended[number] = (str(out.path), out.reused)
    texts = [text for text in dict.fromkeys(warnings.texts) if text not in lost]
    return {"ended": ended, "warnings": texts}


def _answers(
    pool: RayWorkerPool, todo: Sequence[Any], stop: Stop, done: Callable[[], str]
) -> Iterator[dict[str, Any]]:
    """The answers of all calls, as they end. ``done`` gives the finished work in words.

    Raises FedcacheError, as ``RayWorkerPool.wait``; StoppedError after a stop, when every call has saved its round.
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
                f"Stopped on request after {done()}; finished work is kept.",
                "Run the same command again to resume.",
            )


def _end_point(grid: GridRun, number: int, out: tuple[str, bool] | FedcacheError) -> None:
    """Add a point that has ended on a worker to the grid."""
    if isinstance(out, FedcacheError):
        grid.end_point(number, out)
    else:
        path, reused = out
        run = read_run(Path(path), reused=reused)
        replay_stored(grid.observer, run.path, run.result, grid.position_of(number))
        grid.end_point(number, run)
    grid.observer.advance(1)


def read_run(path: Path, *, reused: bool) -> Run:
    """A run that a worker has finished. Raises MachineError if this machine does not have it; CorruptionError."""
    file = path / "result.json"
    if not file.exists():
        raise MachineError(
            f"A worker finished {path.name}, but {file} is missing on this machine.",
            "Results and stores must be on a path that all nodes share: set it with --runs or "
            "FEDCACHE_HOME.",
        )
    result = read_result(file)
    check_files(path, result)
    return Run(path, result, measured_of(path, result) or {}, reused=reused)


@dataclass(frozen=True)
class RunsTask:
    """Setup of a worker for runs that are not part of a grid."""

    home: Home
    runs: Path
    threads: int


def set_up_runs(task: RunsTask) -> RunsTask:
    """Prepare a worker that trains runs."""
    keep_freed_memory()
    torch.set_num_threads(task.threads)
    return task


def train_one(task: RunsTask, lone_run: LoneRun) -> dict[str, Any]:
    """Train one run; returns its directory and whether it was stored before, or {} if it cannot be trained."""
    config, partition = lone_run
    try:
        with _stopped_by_sigint() as stop:
            done = train(
                config, task.home, partition=partition, runs=task.runs, extract=False, stop=stop
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
                "--workers 0 computes in this process, but --engine ray uses other processes.",
                "Leave one of them out.",
            )

    def extraction_workers(
        self, spec: TaskSpec, workers: int | None, observer: Observer
    ) -> AbstractContextManager[RayWorkerPool]:
        """Workers for the chunk tasks of an extraction; see ``open_pool``."""
        return open_pool(self.address, spec, workers, observer)

    def run_grid(self, grid: GridRun, jobs: int) -> None:
        """Train every point of a grid.

        A slice has as many threads as on this machine: those of this process, divided by ``jobs``. Raises as ``train``;
        MachineError for the cluster; StoppedError after a stop. Finished points are kept.
        """
        request = grid.request
        # Before the workers start, so that features are extracted once, and a wrong option gives one message.
        grid.prepare_first()
        methods = {name for name, _ in request.points}
        pieces = slices(request)
        many = len(request.points)
        sliced = counted(len(pieces), "slice")
        task = GridTask(request, max(1, torch.get_num_threads() // jobs))
        opening = self._training_pool(
            set_up_grid,
            train_slice,
            task,
            f"{sliced} of {many} configurations",
            grid.observer,
            device=request.config.device,
            methods=methods,
            jobs=jobs,
        )
        with opening as pool:
            warned: set[str] = set()
            grid.observer.start("training", many, "configurations")

            def done() -> str:
                return f"{len(grid.ended)} of {many} configurations"

            try:
                for answer in _answers(pool, pieces, grid.stop, done):
                    for text in answer["warnings"]:
                        if text not in warned:
                            warned.add(text)
                            grid.observer.warn(text)
                    for number, out in answer["ended"].items():
                        _end_point(grid, number, out)
            finally:
                grid.observer.stop()

    @contextmanager
    def _training_pool(
        self,
        make: Make,
        use: Use,
        task: GridTask | ClientsTask | RunsTask,
        what: str,
        observer: Observer,
        *,
        device: str,
        methods: Iterable[str],
        jobs: int = 1,
    ) -> Iterator[RayWorkerPool]:
        """Workers that train, until the block ends. A local cluster has the CPUs of this machine.

        Args:
            make: as in ``RayWorkerPool``.
            use: as in ``RayWorkerPool``.
            task: argument of ``make``, with the threads of a call.
            what: the work of a call, for the note to the observer.
            observer: gets a note of the number of workers and their nodes.
            device: of the training; for ``cuda`` each worker holds a GPU.
            methods: names; methods with live encoders hold a GPU too.
            jobs: calls at once; with 1, as many as there are CPUs.
        """
        gpus = 0
        needs_gpu = device == "cuda" or any(wants_encoders(find_method(name)) for name in methods)
        if needs_gpu and torch.cuda.is_available():
            gpus = _gpus()
        cpus = max(cores(), task.threads)
        if jobs > 1:
            cpus = task.threads * jobs
        with open_cluster(self.address, cpus=cpus, gpus=gpus) as cluster:
            pool = RayWorkerPool(cluster, make, use, task, cpus=task.threads, gpus=int(gpus > 0))
            nodes = counted(len(cluster.nodes()), "node")
            threads = counted(task.threads, "thread")
            where = f"{nodes} of {cluster.words}"
            observer.note(f"Ray: {what}, {pool.slots} at once with {threads} each on {where}.")
            yield pool

    def client_by_client(self, config: TrainConfig) -> TrainConfig:
        """The configuration of a run that ``training`` serves, with sequential execution.

        Raises UsageError if it requests another execution.
        """
        if config.execution not in ("auto", "sequential"):
            raise UsageError(
                "--engine ray trains clients one by one (--execution sequential), but --execution "
                f"{config.execution} is given.",
                "Leave --execution out.",
            )
        return replace(config, execution="sequential")

    @contextmanager
    def training(
        self,
        config: TrainConfig,
        partition: PartitionConfig,
        home: Home,
        repartition: bool,
        observer: Observer,
    ) -> Iterator[None]:
        """Train the clients of a sequential run on the cluster, which opens when the first round begins.

        Raises MachineError for the cluster, inside the block.
        """
        # Sums of floats depend on the number of threads, so a worker has as many as this process.
        task = ClientsTask(config, partition, home, repartition, torch.get_num_threads())
        opening = self._training_pool(
            HeldRun,
            fit_slice,
            task,
            "the clients of each round",
            observer,
            device=config.device,
            methods=[str(config.method)],
        )
        with ExitStack() as opened:
            over_ray(opened, lambda: opened.enter_context(opening))
            yield

    def run_configurations(
        self, todo: Sequence[LoneRun], home: Home, runs: Path, observer: Observer, stop: Stop
    ) -> set[Path]:
        """Train runs that are not part of a grid, each with the threads of this process; returns the new ones.

        A run that cannot be trained is left out; training it on this machine gives its error. Raises MachineError for
        the cluster; StoppedError after a stop.
        """
        made: set[Path] = set()
        many = len(todo)
        opening = self._training_pool(
            set_up_runs,
            train_one,
            RunsTask(home, runs, torch.get_num_threads()),
            f"{many} runs",
            observer,
            device="cpu",
            methods=[str(config.method) for config, _ in todo],
        )
        with opening as pool:
            observer.start("runs", many, "runs")

            def done() -> str:
                return f"{len(made)} of {many} runs"

            try:
                for answer in _answers(pool, todo, stop, done):
                    if answer and not answer["reused"]:
                        made.add(Path(answer["path"]))
                    observer.advance(1)
            finally:
                observer.stop()
        return made
