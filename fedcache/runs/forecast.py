"""One seed of a prepared run as the engine takes it, and what computing it would need of memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedcache.federate.engine.method import clients_per_round
from fedcache.federate.engine.run import TrainingRun, plan
from fedcache.federate.execution.memory_estimate import (
    ExecutionPlan,
    Forecast,
    forecast,
    free_memory,
    refuse_too_little_room,
    refuse_too_much,
)
from fedcache.federate.partition.client_table import names_of
from fedcache.runs.features import RunInputs
from fedcache.runs.run_models import KeptModels
from fedcache.runs.spec import ResolvedRun
from fedcache.store.files import digest_of


def training_run(inputs: RunInputs, spec: ResolvedRun, seed: int) -> TrainingRun:
    """One seed of a run as the engine takes it."""
    return TrainingRun(
        inputs.method,
        inputs.data,
        inputs.partitions[seed].clients,
        rounds=spec.rounds,
        participation=spec.participation,
        sampling=spec.sampling,
        timing=spec.timing,
        seed=seed,
        dtype=spec.dtype,
        eval_every=spec.requested.eval_every,
        eval_clients=spec.eval_clients,
        overrides=inputs.overrides,
        trust=spec.trust,
        identity=digest_of_data(inputs, spec, seed),
        execution=spec.execution,
    )


def digest_of_data(inputs: RunInputs, spec: ResolvedRun, seed: int) -> str:
    """Digest of one seed of a run, less its hyperparameters and how it is computed; simulated noise is keyed by it.

    So noise is the same for every execution and for a point of a grid and the run alone, and differs between all runs
    that differ in what clients send, or in what is made of it.
    """
    free = {"set", "execution", "together", "device", "engine"}
    words = {k: v for k, v in spec.to_identity().items() if k not in free}
    return digest_of(
        [words, inputs.features.digests, inputs.dataset["digest"], inputs.partitions[seed].digest]
    )


def forecast_run(
    inputs: RunInputs,
    spec: ResolvedRun,
    points: int = 1,
    kept: KeptModels | None = None,
    place: Path | None = None,
) -> tuple[ExecutionPlan, Forecast]:
    """Forecast for a number of points: the execution, the memory, and the disk space of ``place``.

    Raises UsageError for a forced execution that cannot serve, and for a robust rule that a round's clients cannot
    carry; MachineError when the peak does not fit into memory, or what is ``kept`` of the models, or what clients keep
    between rounds on the disk.
    """
    spec.trust.check_round(clients_per_round(spec.participation, len(inputs.clients)))
    execution, load = plan(
        training_run(inputs, spec, spec.seeds[0]), inputs.settings, points=points
    )
    found = forecast(
        load,
        execution,
        opt=str(inputs.settings.get("opt", "sgd")),
        stacked="stack" in inputs.method.pool(inputs.settings).values(),
        closed=not inputs.method.gradient,
    )
    refuse_too_much(found, load, execution, free_memory(load.device), loaded=True)
    if (
        kept is not None
        and inputs.method.protocol(inputs.settings) != "global"
        and not spec.trust.protects
    ):
        kept.check_room(inputs.method, load, found, names_of(inputs.clients), free_memory())
    if place is not None:
        refuse_too_little_room(load, execution, place)
    return execution, found


def forecast_programs(programs: Sequence[tuple[RunInputs, ResolvedRun, int]]) -> dict[str, Any]:
    """Forecast of each program: its execution, clients and points at once, and peak memory in bytes.

    A program is inputs, specification and number of points.
    """
    plans = []
    for inputs, spec, points in programs:
        execution, found = forecast_run(inputs, spec, points)
        points_at_once = execution.points
        if execution.name == "sequential":
            points_at_once = 1
        plans.append(
            {
                "method": inputs.method.name,
                "points": points,
                "execution": execution.name,
                "clients_at_once": execution.chunk,
                "points_at_once": points_at_once,
                "memory": found.to_dict(),
                "words": found.words(),
            }
        )
    return {"programs": plans}
