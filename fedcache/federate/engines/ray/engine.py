"""Engine ``ray``: extractions, grids and the rounds of a run, computed by tasks on a Ray cluster.

For an extraction, workers compute chunk tasks and this process commits their chunks. For a run, they train slices of
each round's clients. A grid is cut into slices that equal the work of one machine: a group of
points that are trained together, or one point if every point is computed alone. All points of a one-shot method that
shares its clients' statistics are one slice. Workers write runs into the usual directories. So a slice that is computed
twice continues from the stored runs, and the driver reads the runs that a worker reports as finished.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch

import fedcache
from fedcache.config import Home, PartitionConfig, TrainConfig
from fedcache.errors import Exit, FedcacheError, MachineError, StoppedError, UsageError
from fedcache.extract.batches import ComputeSettings
from fedcache.extract.device import cores
from fedcache.extract.workers.chunk_tasks import ChunkWorker, TaskSpec, compute
from fedcache.federate.engine.run import new_run, registered
from fedcache.federate.engine.run_state import RunState
from fedcache.federate.engines.ray.cluster import RETRIES, Cluster, first_line, open_cluster
from fedcache.federate.execution.executor import Sequential, fit_group
from fedcache.federate.execution.gram_states import ClientStates
from fedcache.federate.execution.memory_estimate import shares_uploads
from fedcache.federate.methods import find_method, wants_encoders
from fedcache.grids.points import point_groups
from fedcache.grids.train_grid import GridRequest, GridRun
from fedcache.heads.linear import Tree
from fedcache.parsing import Facts, counted
from fedcache.process import Stop, keep_freed_memory
from fedcache.progress import Observer, Silent, piece_of_work
from fedcache.runs.directory import check_files, measured_of, read_result
from fedcache.runs.events import replay_stored
from fedcache.runs.features import Preparation
from fedcache.runs.loop import prepare_run, resolve_inputs, row_source, train, training_run
from fedcache.runs.privacy_ledger import LEDGER
from fedcache.runs.run import Run

# Client slices: a run whose clients are trained on a Ray cluster, while the server stays in this process.
#
# A worker prepares the same run as this process: features mapped from the shared store, the partition, the seed. With
# a slice of clients it gets the round, the broadcast and the clients' states. It returns their uploads, which this
# process pools in the order of the clients. So results equal those of ``--execution sequential`` to the bit, and
# validation, robust rules, attacks and noise work as usual. Where uploads are additive, a worker returns the sums of
# many clients.

AHEAD = 2
"""Number of submitted slices per worker: the worker computes one while the other waits."""

SLICE_CLIENTS = 64
"""Maximum number of clients in a slice. A slice's uploads stay in memory until all earlier slices are pooled."""

Group = Sequence[int]
"""Clients with one upload: one client, or several clients with summed uploads."""


@dataclass(frozen=True)
class ClientsTask:
    """Setup of a worker: a run whose features are extracted, and the threads of a slice."""

    config: TrainConfig
    partition: PartitionConfig
    home: Home
    repartition: bool
    threads: int


class HeldRun:
    """The run in a worker, for the seed of the last slice."""

    def __init__(self, task: ClientsTask) -> None:
        keep_freed_memory()
        torch.set_num_threads(task.threads)
        # False: no extraction, because the driver has extracted the features.
        preparation = Preparation(task.home, Silent(), Stop(), False, task.repartition)
        rows = row_source(task.config, task.partition, preparation)
        # None: no method object, because the configuration names the method.
        inputs = prepare_run(task.config, rows, None, task.home.root / LEDGER)
        self.inputs, self.spec = resolve_inputs(inputs, task.config, Silent())
        self._job: RunState | None = None

    def job(self, seed: int) -> RunState:
        """The constants of the run with that seed."""
        if self._job is None or self._job.seed != seed:
            self._job = new_run(training_run(self.inputs, self.spec, seed), self.inputs.settings)
        return self._job


def fit_slice(
    held: HeldRun,
    seed: int,
    number: int,
    groups: Sequence[Group],
    states: dict[int, Tree],
    down: Tree,
) -> Facts:
    """The upload of each group of clients in round ``number`` (from 0), and the states of the clients after it."""
    job = held.job(seed)
    job.round = number
    job.states = ClientStates()
    job.states.update(states)
    ups = [fit_group(job, down, group) for group in groups]
    return {"ups": ups, "states": dict(job.states)}


class OverRay(Sequential):
    """``Sequential`` execution whose clients are trained by workers; ``pool`` opens the workers at the first call."""

    pool: Callable[[], RayWorkerPool]

    def uploads(
        self, point: RunState, down: Tree, groups: Sequence[Group]
    ) -> Iterator[tuple[Group, Tree]]:
        """As ``Sequential``; clients of later slices are trained while the uploads of earlier ones are pooled."""
        pool = type(self).pool()
        pieces = slices_of_clients(groups, AHEAD * pool.slots)
        begun = 0
        # The broadcast is stored once in the cluster; every slice refers to it.
        broadcast = pool.cluster.ray.put(down)
        answers: dict[int, Facts] = {}
        for turn, piece in enumerate(pieces):
            while begun < min(len(pieces), turn + AHEAD * pool.slots):
                states = {}
                for client in chain.from_iterable(pieces[begun]):
                    state = point.states.get(client)
                    if state is not None:
                        states[client] = state
                pool.submit(begun, point.seed, point.round, pieces[begun], states, broadcast)
                begun += 1
            while turn not in answers:
                point.env.watch()
                answers.update(pool.wait(0.5))
            answer = answers.pop(turn)
            point.states.update(answer["states"])
            yield from zip(piece, answer["ups"], strict=True)


def slices_of_clients(groups: Sequence[Group], at_least: int) -> list[list[Group]]:
    """The groups in order, as at least ``at_least`` pieces if there are so many, of at most ``SLICE_CLIENTS`` each."""
    size = max(1, min(SLICE_CLIENTS, -(-len(groups) // at_least)))
    starts = range(0, len(groups), size)
    return [list(groups[start : start + size]) for start in starts]


def over_ray(opened: ExitStack, open_pool: Callable[[], RayWorkerPool]) -> None:
    """Train the clients of every run of this block on workers; ``open_pool`` is called when they are first needed."""
    # An executor is registered as a class, so the pool belongs to a new class.
    pool = staticmethod(cache(open_pool))
    execution = type("OverRay", (OverRay,), {"pool": pool})
    opened.enter_context(registered(execution))


# Remote calls on a Ray cluster. They are idempotent, are repeated if a worker or a node dies, and return small
# values.
#
# Without GPUs, calls are plain tasks. With GPUs, each GPU has one actor that takes calls, so that models are loaded
# once. The called functions belong to this package, so workers import it and never a user's script.

Make = Callable[[Any], Any]
Use = Callable[..., Facts]


@cache
def package_digest() -> str:
    """sha256 over all source files of fedcache; other code could compute other results."""
    root = Path(fedcache.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def check_code(expected: str) -> None:
    """Refuse calls of a driver with other code. Raises MachineError."""
    if package_digest() != expected:
        raise MachineError(
            f"{socket.gethostname()} has another version of fedcache than the machine that runs the "
            "command.",
            "Install the same version of fedcache on every node.",
        )


class RayWorkerPool:
    """Pool of calls of one function on a cluster.

    Every worker process computes ``make(setup)`` once and passes the value to all of its calls.

    Args:
        cluster: runs the calls.
        make: ``make(setup)`` -> value, in a worker.
        use: ``use(value, *args)`` -> a small dict, in a worker; must be idempotent.
        setup: argument of ``make``.
        cpus: of a call.
        gpus: 1 for calls by actors that hold a GPU each, 0 for tasks.
        most: limit of simultaneous calls.
    """

    def __init__(
        self,
        cluster: Cluster,
        make: Make,
        use: Use,
        setup: Any,
        *,
        cpus: int,
        gpus: int = 0,
        most: int | None = None,
    ) -> None:
        self.cluster = cluster
        self.cpus = cpus
        self.gpus = gpus
        self.most = most or 1 << 20  # without a limit, a number that no cluster reaches
        ray = cluster.ray
        # Sent with every call. The setup may be large, so it is stored once in the cluster, and workers fetch it. In a
        # list it stays a reference; Ray would replace a reference that is itself an argument by the value.
        session = secrets.token_hex(8)
        environment = worker_environment(cluster.home)
        self._head = (make, use, session, environment, [ray.put(setup)])
        # Reference of a call -> its tag, and the number of its actor (0 for a task).
        self._waiting: dict[Any, Any] = {}
        self._actors: list[Any] = []
        if gpus:
            # Actors reserve no CPU, because tasks would wait forever for CPUs that actors hold.
            remote = ray.remote(
                num_gpus=1, num_cpus=0, max_restarts=RETRIES, max_task_retries=RETRIES
            )
            kind = remote(GpuActor)
            count = min(self.most, cluster.need(0, gpus))
            self._actors = [kind.remote() for _ in range(count)]
        else:
            cluster.need(cpus)
            self._task = ray.remote(num_cpus=cpus, max_retries=RETRIES)(call)

    @property
    def slots(self) -> int:
        """Number of simultaneous calls."""
        if self.gpus:
            return len(self._actors)
        return max(1, min(self.most, self.cluster.slots(self.cpus)))

    @property
    def waiting(self) -> int:
        """Number of calls without an answer."""
        return len(self._waiting)

    def submit(self, tag: Any, *args: Any) -> None:
        """Start a call; ``wait`` returns its answer with ``tag``."""
        if not self.gpus:
            ref = self._task.remote(*self._head, *args)
            self._waiting[ref] = (tag, 0)
            return
        # The actor with the fewest waiting calls gets the call, so that no GPU is idle while another has a queue.
        counts = [0] * len(self._actors)
        for _, actor in self._waiting.values():
            counts[actor] += 1
        idlest = counts.index(min(counts))
        ref = self._actors[idlest].call.remote(*self._head, *args)
        self._waiting[ref] = (tag, idlest)

    def wait(self, seconds: float) -> list[tuple[Any, Facts]]:
        """(tag, answer) of the calls that have ended, after at most that many seconds.

        Raises FedcacheError from a call; MachineError if its workers died ``RETRIES`` + 1 times.
        """
        ray = self.cluster.ray
        refs = list(self._waiting)
        # First all calls that have ended; if there are none, wait for the next one.
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        if not done:
            done, _ = ray.wait(refs, num_returns=1, timeout=seconds)
        answers = []
        for ref in done:
            tag, _ = self._waiting.pop(ref)
            answer = self._answer(ref)
            error = answer.get("error")
            if isinstance(error, BaseException):
                raise error
            answers.append((tag, answer))
        return answers

    def ask(self, *args: Any) -> Facts:
        """One call and its answer; errors as ``wait``."""
        self.submit(None, *args)
        while True:
            for _, answer in self.wait(1.0):
                return answer

    def interrupt(self) -> None:
        """Send every call the signal of Ctrl-C, so that it saves its last round and ends. Its answer is lost."""
        for ref in self._waiting:
            with suppress(Exception):
                self.cluster.ray.cancel(ref)

    def settle(self, seconds: float) -> None:
        """Wait until all calls have ended, at most ``seconds``. Their answers are discarded."""
        refs = list(self._waiting)
        if refs:
            self.cluster.ray.wait(refs, num_returns=len(refs), timeout=seconds)
        self._waiting.clear()

    def _answer(self, ref: Any) -> Facts:
        errors = self.cluster.ray.exceptions
        try:
            found: Facts = self.cluster.ray.get(ref)
        except errors.RayTaskError:
            raise  # a bug, with the traceback of the worker
        except errors.RayError as error:
            why = first_line(error, "no reason given")
            kind = type(error).__name__
            attempts = RETRIES + 1
            raise MachineError(
                f"A worker of {self.cluster.words} ended {attempts} times ({kind}: {why}).",
                "A common cause is too little memory. To resume, run the same command again with fewer CPUs for Ray "
                "or a smaller --batch.",
            ) from error
        return found


class GpuActor:
    """Actor: one process that holds a GPU and the models it has loaded there."""

    def call(self, *args: Any) -> Facts:
        """``call`` in the process of this actor."""
        return call(*args)


@dataclass(frozen=True)
class WorkerEnvironment:
    """Settings of the driver that a worker takes over before it imports anything."""

    code: str  # ``package_digest``
    folder: str  # working directory, so that relative paths mean the same
    variables: dict[str, str]  # of the environment


def worker_environment(home: str | None) -> WorkerEnvironment:
    """The settings of this process; ``home`` is HOME of the user if workers have another one."""
    named = ("FEDCACHE_", "HF_", "TORCH_HOME", "XDG_")
    variables = {key: value for key, value in os.environ.items() if key.startswith(named)}
    if home:
        variables["HOME"] = home
    return WorkerEnvironment(package_digest(), str(Path.cwd()), variables)


_sessions: Facts = {}
"""Session -> value of ``make``, in a worker. It has at most one entry."""


def call(
    make: Make, use: Use, session: str, environment: WorkerEnvironment, box: list[Any], *args: Any
) -> Facts:
    """In a worker: one call of ``use``, with the value of ``make(setup)`` that this process computes at its first call.

    ``box`` is a list with the reference of the setup.
    """
    try:
        if session not in _sessions:
            import ray

            check_code(environment.code)
            os.environ.update(environment.variables)
            with suppress(OSError):
                os.chdir(environment.folder)
            # The value of an earlier session goes first, because two sets of backbones may not fit into memory.
            _sessions.clear()
            _sessions[session] = make(ray.get(box[0]))
        return use(_sessions[session], *args)
    except FedcacheError as error:
        return {"error": error}


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


def train_slice(grid: GridRun, piece: Slice) -> Facts:
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
) -> Iterator[Facts]:
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


def train_one(task: RunsTask, lone_run: LoneRun) -> Facts:
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
        warned: set[str] = set()

        def done() -> str:
            return f"{len(grid.ended)} of {many} configurations"

        with opening as pool, piece_of_work(grid.observer, "training", many, "configurations"):
            for answer in _answers(pool, pieces, grid.stop, done):
                for text in answer["warnings"]:
                    if text not in warned:
                        warned.add(text)
                        grid.observer.warn(text)
                for number, out in answer["ended"].items():
                    _end_point(grid, number, out)

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

        def done() -> str:
            return f"{len(made)} of {many} runs"

        with opening as pool, piece_of_work(observer, "runs", many, "runs"):
            for answer in _answers(pool, todo, stop, done):
                if answer and not answer["reused"]:
                    made.add(Path(answer["path"]))
                observer.advance(1)
        return made
