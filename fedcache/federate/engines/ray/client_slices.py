"""A run whose clients are trained on a Ray cluster: slices of a round's clients, and the server in this process.

A worker has the run as this process has it: features mapped from the shared store, the partition, the seed. For a slice
it is told the round, what the server sent and what the slice's clients keep, and it answers with their uploads, which
are pooled here in the order of the clients. So results are those of ``--execution sequential`` to the bit, and whatever
looks at uploads (validation, robust rules, attacks, noise) does so as always. Where uploads add up, the sums of many
clients travel in place of theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedcache.config import Home, PartitionConfig, TrainConfig
from fedcache.errors import UsageError
from fedcache.federate.engine.run import new_run
from fedcache.federate.engine.run_state import RunState
from fedcache.federate.engines.ray.remote_calls import RayWorkerPool
from fedcache.federate.execution.choose import registered
from fedcache.federate.execution.executor import Sequential, fit_group
from fedcache.federate.execution.gram_states import ClientStates
from fedcache.heads.linear import Tree
from fedcache.process import Stop, keep_freed_memory
from fedcache.progress import Silent
from fedcache.runs.forecast import training_run
from fedcache.runs.loop import prepare_run, resolve_inputs, row_source
from fedcache.runs.privacy_ledger import LEDGER
from fedcache.runs.row_sources import Preparation

AHEAD = 2
"""Slices for each worker that are under way: one that is computed, and one that waits for it."""

SLICE_CLIENTS = 64
"""Clients of a slice at most: what they send is held here until the clients before them have answered."""

Group = Sequence[int]
OpenPool = Callable[["ClientsTask"], RayWorkerPool]


@dataclass(frozen=True)
class ClientsTask:
    """What every worker is told once: a run whose features are there, and the threads that a slice has."""

    config: TrainConfig
    partition: PartitionConfig
    home: Home
    repartition: bool
    threads: int


class HeldRun:
    """The run in a worker, for the seed that was asked for last."""

    def __init__(self, task: ClientsTask) -> None:
        keep_freed_memory()
        torch.set_num_threads(task.threads)
        preparation = Preparation(task.home, Silent(), Stop(), False, task.repartition)
        rows = row_source(task.config, task.partition, preparation)
        inputs = prepare_run(task.config, rows, None, task.home.root / LEDGER)
        self.inputs, self.spec = resolve_inputs(inputs, task.config, Silent())
        self._job: RunState | None = None

    def job(self, seed: int) -> RunState:
        """The constants of the run with that seed."""
        if self._job is None or self._job.seed != seed:
            self._job = new_run(training_run(self.inputs, self.spec, seed), self.inputs.settings)
        return self._job


def set_up_clients(task: ClientsTask) -> HeldRun:
    """A worker that trains clients of one run."""
    return HeldRun(task)


def fit_slice(
    held: HeldRun,
    seed: int,
    number: int,
    groups: Sequence[Group],
    states: dict[int, Tree],
    down: Tree,
) -> dict[str, Any]:
    """What each group of clients sends in round ``number`` (from 0), and what its clients keep afterwards."""
    job = held.job(seed)
    job.round = number
    job.states = ClientStates()
    for client, state in states.items():
        job.states[client] = state
    ups = [fit_group(job, down, group) for group in groups]
    return {"ups": ups, "states": {client: job.states[client] for client in job.states}}


class OverRay(Sequential):
    """``Sequential`` whose clients are trained by workers; ``pool`` opens them when the first round begins."""

    pool: Callable[[], RayWorkerPool]

    def uploads(
        self, point: RunState, down: Tree, groups: Sequence[Group]
    ) -> Iterator[tuple[Group, Tree]]:
        """As ``Sequential``; clients of later slices are trained while earlier ones are pooled."""
        pool = type(self).pool()
        pieces = slices(groups, AHEAD * pool.slots)
        begun = 0
        sent = pool.cluster.ray.put(down)  # once a round, whatever the number of slices
        answers: dict[int, dict[str, Any]] = {}
        for turn, piece in enumerate(pieces):
            while begun < min(len(pieces), turn + AHEAD * pool.slots):
                held = {
                    c: s
                    for group in pieces[begun]
                    for c in group
                    if (s := point.states.get(c)) is not None
                }
                pool.submit(begun, point.seed, point.round, pieces[begun], held, sent)
                begun += 1
            while turn not in answers:
                point.env.watch()
                answers.update(pool.wait(0.5))
            answer = answers.pop(turn)
            for client, state in answer["states"].items():
                point.states[client] = state
            yield from zip(piece, answer["ups"], strict=True)


def slices(groups: Sequence[Group], at_least: int) -> list[list[Group]]:
    """The groups in order, in at least so many pieces where there are as many, none of more than ``SLICE_CLIENTS``."""
    size = max(1, min(SLICE_CLIENTS, -(-len(groups) // at_least)))
    waiting = deque(groups)
    made = []
    while waiting:
        made.append([waiting.popleft() for _ in range(min(size, len(waiting)))])
    return made


def check_execution(config: TrainConfig) -> TrainConfig:
    """The configuration of such a run, which is that of a sequential one. Raises UsageError for another execution."""
    if config.execution not in ("auto", "sequential"):
        raise UsageError(
            f"--engine ray trains client by client, which is --execution sequential, and not {config.execution}.",
            "Leave --execution out.",
        )
    return replace(config, execution="sequential")


def over_ray(opened: ExitStack, open_pool: Callable[[], RayWorkerPool]) -> None:
    """Train the clients of every run of this block on workers, which ``open_pool`` gives when they are first needed."""
    held: list[RayWorkerPool] = []

    def pool() -> RayWorkerPool:
        if not held:
            held.append(open_pool())
        return held[0]

    opened.enter_context(registered(type("OverRay", (OverRay,), {"pool": staticmethod(pool)})))
