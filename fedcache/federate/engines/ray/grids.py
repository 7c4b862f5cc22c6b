"""``grid --engine ray``: slices of a grid as tasks of a Ray cluster, each the runs it would be on this machine.

A slice is a program of points that are computed together, or one point where every point is computed alone; one-shot
methods that share their clients' statistics are one slice each. Runs are written where they always are, so a slice that
is computed twice goes on from what is there, and the driver reads what a worker says it has finished.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcache.allocator import keep_freed_memory
from fedcache.config import Home, PartitionConfig, TrainConfig
from fedcache.errors import Exit, FedcacheError
from fedcache.extract.device import cores
from fedcache.extract.stop import Stop
from fedcache.federate.engines.ray.cluster import opened
from fedcache.federate.engines.ray.workers import RayWorkerPool
from fedcache.federate.execution.load import shares_uploads
from fedcache.grids.grid import Work
from fedcache.grids.points import programs
from fedcache.progress import Observer, Silent
from fedcache.runs.directory import check_files, measured_of, read_result
from fedcache.runs.encoders import wants_towers
from fedcache.runs.events import tell_stored
from fedcache.runs.loop import train
from fedcache.runs.prepare import find_method
from fedcache.runs.run import Run

GRACE = 30.0
"""Seconds that workers get to keep their last round when the grid is stopped."""

Slice = tuple[tuple[int, ...], ...]
"""Programs, in order."""


@dataclass(frozen=True)
class Order:
    """What every worker is told once: a grid, and the threads that a slice has."""

    todo: Sequence[tuple[str, dict[str, str]]]
    config: TrainConfig
    base: PartitionConfig
    home: Home
    runs: Path
    repartition: bool
    fresh: bool
    exact: bool
    threads: int


class Warnings(Silent):
    """Keeps warnings, for the driver to tell."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def warn(self, text: str) -> None:
        """Kept."""
        self.texts.append(text)


def slices(work: Work) -> list[Slice]:
    """The grid in pieces that can be computed anywhere and have the bits they have here."""
    if work.exact:
        return [((number,),) for number in range(len(work.todo))]
    made: dict[Any, list[tuple[int, ...]]] = {}
    for program in programs(work.todo):
        name = work.todo[program[0]][0]
        made.setdefault(name if shares_uploads(find_method(name)) else program[0], []).append(tuple(program))
    return [tuple(found) for found in made.values()]


def enter(order: Order) -> Work:
    """The grid in a worker; what has to be extracted has been extracted."""
    import torch

    keep_freed_memory()
    torch.set_num_threads(order.threads)
    return Work(order.todo, order.config, order.base, order.home, order.runs, order.repartition, False, order.fresh,
                order.exact, Silent(), Stop())  # fmt: skip


def compute(work: Work, piece: Slice) -> dict[str, Any]:
    """Train a slice; what ended how, in a few words. An interruption keeps the last round of every point."""
    stop, heard = Stop(), Warnings()
    work.stop, work.observer = stop, heard
    work.ended.clear()
    before = signal.signal(signal.SIGINT, lambda *_: stop.ask())
    try:
        for program in piece:
            work.run(program)
    finally:
        signal.signal(signal.SIGINT, before)
    lost = {out.message for out in work.ended.values() if isinstance(out, FedcacheError)}
    ended = {n: (str(out.path), out.reused) if isinstance(out, Run) else out for n, out in work.ended.items()}
    return {"ended": ended, "warnings": [text for text in dict.fromkeys(heard.texts) if text not in lost]}


def train_grid(work: Work, address: str | None, jobs: int) -> None:
    """Train every point on a Ray cluster.

    A slice has the threads it would have here: all of this process, or its share with ``jobs``.

    Raises:
        FedcacheError: as ``train``; ENVIRONMENT for the cluster; INTERRUPTED after a stop, with what is finished kept.
    """
    import torch

    work.ready(0)  # what has to be extracted is extracted once, and a wrong option is one message
    threads = max(1, torch.get_num_threads() // jobs)
    live = work.config.device == "cuda" or any(wants_towers(find_method(name)) for name, _ in work.todo)
    gpus = torch.cuda.device_count() if live and torch.cuda.is_available() else 0
    order = Order(work.todo, work.config, work.base, work.home, work.runs, work.repartition, work.fresh, work.exact,
                  threads)  # fmt: skip
    todo = slices(work)
    cpus = threads * jobs if jobs > 1 else max(cores(), threads)
    with opened(address, cpus=cpus, gpus=gpus) as cluster:
        crew = RayWorkerPool(cluster, enter, compute, order, cpus=threads, gpus=int(gpus > 0))
        _told(work.observer, crew, f"{len(todo)} slice{'s' * (len(todo) != 1)} of {len(work.todo)} points")
        said: set[str] = set()
        work.observer.start("points", len(work.todo), "points")
        try:
            for answer in _answers(crew, todo, work.stop, lambda: f"{len(work.ended)} of {len(work.todo)} points"):
                for text in answer["warnings"]:
                    if text not in said:
                        said.add(text)
                        work.observer.warn(text)
                for number, out in answer["ended"].items():
                    _take(work, number, out)
        finally:
            work.observer.stop()


def _told(observer: Observer, crew: RayWorkerPool, what: str) -> None:
    """Where the work is done."""
    nodes = len(crew.cluster.nodes())
    observer.note(
        f"Ray: {what}, {crew.slots} at once with {crew.cpus} thread{'s' * (crew.cpus > 1)} each on {nodes} "
        f"node{'s' * (nodes != 1)} of {crew.cluster.words}."
    )


def _answers(crew: RayWorkerPool, todo: Sequence[Any], stop: Stop, done: Callable[[], str]) -> Iterator[dict[str, Any]]:
    """The answers of all calls, as they end.

    Raises:
        FedcacheError: as ``RayWorkerPool.wait``; INTERRUPTED after a stop, once every call has kept what it has.
    """
    begun = 0
    while begun < len(todo) or crew.waiting:
        while begun < len(todo) and crew.waiting < crew.slots:
            crew.submit(begun, todo[begun])
            begun += 1
        for _, answer in crew.wait(0.5):
            yield answer
        if stop.requested and (begun < len(todo) or crew.waiting):
            crew.interrupt()
            crew.settle(GRACE)
            raise FedcacheError(
                Exit.INTERRUPTED,
                f"Stopped on request after {done()}; they are kept.",
                "Run the same command again to go on.",
            )


def _take(work: Work, number: int, out: tuple[str, bool] | FedcacheError) -> None:
    """A point has ended on a worker."""
    if isinstance(out, FedcacheError):
        work.told(number, out)
    else:
        run = read_run(Path(out[0]), reused=out[1])
        tell_stored(work.observer, run.path, run.result, work.place_of(number))
        work.told(number, run)
    work.observer.advance(1)


def read_run(path: Path, *, reused: bool) -> Run:
    """A run that a worker has finished.

    Raises:
        FedcacheError: ENVIRONMENT, where this machine does not see it; CORRUPT for a damaged one.
    """
    if not (path / "result.json").exists():
        raise FedcacheError(
            Exit.ENVIRONMENT,
            f"A worker finished {path.name}, and there is no {path / 'result.json'} here.",
            "Results and stores must lie on a path that all nodes share: give it with --runs or FEDCACHE_HOME.",
        )
    result = read_result(path / "result.json")
    check_files(path, result)
    return Run(path, result, measured_of(path) or {}, reused=reused)


@dataclass(frozen=True)
class Runs:
    """What every worker is told once of runs that are no grid."""

    home: Home
    runs: Path
    threads: int


Lone = tuple[TrainConfig, PartitionConfig]
"""One run: what to train, and how rows are dealt."""


def enter_runs(order: Runs) -> Runs:
    """A worker that trains."""
    import torch

    keep_freed_memory()
    torch.set_num_threads(order.threads)
    return order


def compute_run(order: Runs, one: Lone) -> dict[str, Any]:
    """Train one run; its directory and whether it was there, or nothing where it cannot be trained."""
    stop = Stop()
    before = signal.signal(signal.SIGINT, lambda *_: stop.ask())
    try:
        done = train(one[0], order.home, partition=one[1], runs=order.runs, extract=False, stop=stop)
    except FedcacheError as error:
        if error.code in (Exit.INTERRUPTED, Exit.BUG):
            raise
        return {}
    finally:
        signal.signal(signal.SIGINT, before)
    return {"path": str(done.path), "reused": done.reused}


def train_runs(
    address: str | None, todo: Sequence[Lone], home: Home, runs: Path, observer: Observer, stop: Stop
) -> set[Path]:
    """Train runs on a Ray cluster, each with the threads of this process; returns those that were not there before.

    A run that cannot be trained is left out: whoever asks for it next is told why.

    Raises:
        FedcacheError: ENVIRONMENT for the cluster; INTERRUPTED after a stop.
    """
    import torch

    threads = torch.get_num_threads()
    live = any(wants_towers(find_method(str(config.method))) for config, _ in todo)
    gpus = torch.cuda.device_count() if live and torch.cuda.is_available() else 0
    made: set[Path] = set()
    with opened(address, cpus=max(cores(), threads), gpus=gpus) as cluster:
        crew = RayWorkerPool(
            cluster, enter_runs, compute_run, Runs(home, runs, threads), cpus=threads, gpus=int(gpus > 0)
        )
        _told(observer, crew, f"{len(todo)} runs")
        observer.start("runs", len(todo), "runs")
        try:
            for answer in _answers(crew, todo, stop, lambda: f"{len(made)} of {len(todo)} runs"):
                if answer and not answer["reused"]:
                    made.add(Path(answer["path"]))
                observer.advance(1)
        finally:
            observer.stop()
    return made
