"""Client slices: a run whose clients are trained on a Ray cluster, while the server stays in this process.

A worker prepares the same run as this process: features mapped from the shared store, the partition, the seed. With a
slice of clients it gets the round, the broadcast and the clients' states. It returns their uploads, which this process
pools in the order of the clients. So results equal those of ``--execution sequential`` to the bit, and validation,
robust rules, attacks and noise work as usual. Where uploads are additive, a worker returns the sums of many clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import torch

from fedcache.config import Home, PartitionConfig, TrainConfig
from fedcache.federate.engine.run import new_run, registered
from fedcache.federate.engine.run_state import RunState
from fedcache.federate.engines.ray.remote_calls import RayWorkerPool
from fedcache.federate.execution.executor import Sequential, fit_group
from fedcache.federate.execution.gram_states import ClientStates
from fedcache.heads.linear import Tree
from fedcache.process import Stop, keep_freed_memory
from fedcache.progress import Silent
from fedcache.runs.loop import prepare_run, resolve_inputs, row_source
from fedcache.runs.privacy_ledger import LEDGER
from fedcache.runs.row_sources import Preparation
from fedcache.runs.run_models import training_run

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
) -> dict[str, Any]:
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
        pieces = slices(groups, AHEAD * pool.slots)
        begun = 0
        # The broadcast is stored once in the cluster; every slice refers to it.
        broadcast = pool.cluster.ray.put(down)
        answers: dict[int, dict[str, Any]] = {}
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


def slices(groups: Sequence[Group], at_least: int) -> list[list[Group]]:
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
