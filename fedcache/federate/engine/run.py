"""Run a method: the configuration, the choice of the execution, rounds, evaluation, records, and resumed runs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedcache.errors import FedcacheError, FederatedRunError, InternalError, UsageError, unknown
from fedcache.federate.engine.client_data import Data
from fedcache.federate.engine.context import LruCache
from fedcache.federate.engine.evaluate import (
    deployed_model,
    has_model,
    score_job,
    zero_shot_accuracy,
)
from fedcache.federate.engine.hyperparameters import Hp, Value, has_batchnorm
from fedcache.federate.engine.method import ClientOverrides, Method
from fedcache.federate.engine.outcome import (
    DeployedModel,
    Evaluation,
    RoundRecord,
    Snapshot,
    TrainingOutput,
    classes_of_clients,
)
from fedcache.federate.engine.run_state import RunState
from fedcache.federate.engine.sampling import UNIFORM, SamplingRule
from fedcache.federate.engine.simulated_time import TimedRun, TimingRule
from fedcache.federate.engine.snapshots import resume_job, snapshot_of
from fedcache.federate.execution.executor import Batched, Executor, Sequential, timed_round
from fedcache.federate.execution.gram import Gram
from fedcache.federate.execution.grid_batch import GridBatch, GridCache
from fedcache.federate.execution.memory_estimate import (
    ExecutionPlan,
    Load,
    measure_load,
    refuse_large_server,
    states_in_file,
)
from fedcache.federate.execution.state_table import StateTable
from fedcache.federate.partition.client_table import Client, NumberedNames, names_of
from fedcache.federate.trust.pipeline import TrustPolicy
from fedcache.plugins import find, offer, plugins
from fedcache.process import usual_torch_state
from fedcache.store.files import free_memory

BUILT_IN: tuple[type[Executor], ...] = (Sequential, Batched, Gram)

offer("executors", ["auto", *(executor.name for executor in BUILT_IN)])

_registered: ContextVar[tuple[type[Executor], ...]] = ContextVar("registered", default=())


@contextmanager
def registered(*executors: type[Executor]) -> Iterator[None]:
    """Allow further executors to be requested by name, inside a ``with`` statement."""
    token = _registered.set((*_registered.get(), *executors))
    try:
        yield
    finally:
        _registered.reset(token)


def executors() -> dict[str, type[Executor]]:
    """Every executor that may be chosen, by name: those of the package, then those of ``with registered``."""
    return {executor.name: executor for executor in (*BUILT_IN, *_registered.get())}


def find_executor(name: str) -> type[Executor]:
    """The executor of that name. The executor of a plug-in is used only if it is requested by name.

    Raises UsageError, with "did you mean", for an unknown name.
    """
    known = executors()
    if name in known:
        return known[name]
    plugin = find("executors", name)
    if plugin is None:
        raise unknown("execution", name, ("auto", *known, *plugins("executors")))
    made: type[Executor] = plugin.loaded(Executor)
    return made


def choose(
    method: Method, hp: Hp, load: Load, name: str = "auto", chunk: int | None = None
) -> ExecutionPlan:
    """The plan by which a run, or the points of a grid, will be computed.

    Raises UsageError for an unknown executor, one that cannot serve the method, or a chunk below 1.

    Args:
        method: the method to train.
        hp: its hyperparameters.
        load: sizes.
        name: ``auto``, or the executor to force.
        chunk: clients at once, if the executor takes several; None for the number that the cache suggests.
    """
    known = executors()
    if name != "auto":
        known[name] = find_executor(name)
    refusals = {k: executor.serves(method, hp, load) for k, executor in known.items()}
    able = [k for k, why in refusals.items() if not why]
    if name != "auto" and name not in able:
        why = refusals[name]
        usable = " | ".join(able)
        raise UsageError(
            f"The execution mode {name!r} does not support {method.name}: {why}.",
            f"Use another execution mode: --execution {usable}",
        )
    if chunk is not None and chunk < 1:
        raise UsageError(
            f"chunk is {chunk}, expected at least 1.",
            "Leave it out, and fedcache chooses the value.",
        )
    if name == "auto":
        # Of equal costs the first wins, so built-in executors come before registered ones.
        name = min(able, key=lambda k: known[k].cost(method, hp, load))
    return known[name].plan(method, load, chunk)


OnRound = Callable[[int, int, dict[str, Any], dict[str, Any], Callable[[], Snapshot]], None]
"""(point of the grid, round, metrics, traffic of the round, snapshot); points count from 0, rounds from 1.

The snapshot is a function, and the state is copied only when the function is called.
"""


@dataclass(frozen=True)
class TrainingRun:
    """A method, its clients and its settings: all that the points of a grid have in common."""

    method: Method  # from ``METHODS``, or a user's own
    data: Data  # features, labels, text; on the device that computes
    clients: Sequence[Client]  # names and rows; names are unique and key the random draws
    rounds: int = 1  # total, counted from the first start; one-shot methods take one
    # Clients per round: None for all, an int for a number, a float for a share.
    participation: int | float | None = None
    seed: int = 0  # of every draw
    dtype: torch.dtype = torch.float32  # of the computation; float64 for comparing executions
    eval_every: int = 0  # also score after every k-th round; 0 for the last only
    # Clients whose personal models are scored, drawn once: None for all, an int for a number, a float for a share.
    eval_clients: int | float | None = None
    # Client number -> its differences from the other clients. A run with overrides is computed client by client.
    overrides: Mapping[int, ClientOverrides] = field(default_factory=dict)
    # Treatment of uploads; the default validates them and uses the method's own mean.
    trust: TrustPolicy = field(default_factory=TrustPolicy)
    # Digest of everything that determines the run; part of the key of simulated noise. "" for none.
    identity: str = ""
    execution: str = "auto"  # auto, or the name of an execution to force
    # Clients that are computed at once, if the execution computes several; None lets the engine choose.
    chunk: int | None = None
    # Number of points of the whole grid, by which the execution is chosen: a resumed grid trains fewer points, but with
    # the execution with which it started. 0 for the number of points that are trained.
    grid_points: int = 0
    sampling: SamplingRule = UNIFORM  # how the clients of a round are drawn
    # Times that clients take, and whether rounds wait for them; None for a run without simulated time.
    timing: TimingRule | None = None


@dataclass(frozen=True)
class RunCallbacks:
    """Functions that are called while a run trains; None for none."""

    # Called before every optimiser step; an error with code INTERRUPTED that it raises ends the run inside a round.
    before_step: Callable[[], None] | None = None
    on_round: OnRound | None = None  # called after every round of every point
    # Called with the number of a round, when all points that are computed together have finished it.
    after_round: Callable[[int], None] | None = None
    # Called with the number of the first point, and the outcomes of the points that were computed together.
    on_done: Callable[[int, Sequence[TrainingOutput | FedcacheError]], None] | None = None


SILENT = RunCallbacks()


def run(
    spec: TrainingRun,
    hp: Mapping[str, Value],
    *,
    state: Snapshot | None = None,
    callbacks: RunCallbacks = SILENT,
) -> TrainingOutput:
    """Train a method and score the models that it deploys.

    Raises UsageError for an illegal request, StoreError for missing features, FederatedRunError for a run that fails.

    Args:
        spec: the method, its clients, rounds and seed.
        hp: from ``method.resolve``.
        state: a snapshot to continue from.
        callbacks: called during the run; ``point`` is 0.

    Returns:
        Models, accuracy, records and traffic.
    """
    (out,) = run_points(spec, [hp], states=[state], callbacks=callbacks)
    if isinstance(out, FedcacheError):
        raise out
    return out


@usual_torch_state()
def run_points(
    spec: TrainingRun,
    hps: Sequence[Mapping[str, Value]],
    *,
    states: Sequence[Snapshot | None] | None = None,
    callbacks: RunCallbacks = SILENT,
    cache: GridCache | None = None,
    tables: Sequence[Path] = (),
) -> list[TrainingOutput | FedcacheError]:
    """Train the points of a grid that differ only in floats, together if that is faster.

    Raises FedcacheError, as ``run``, for an error of all points; InternalError if points differ in other values too.

    Args:
        spec: the settings that all points have in common; they share its draws.
        hps: the hyperparameters of each point; all hyperparameters that are not floats are equal.
        states: a snapshot to continue from for each point, all of the same round.
        callbacks: called during the runs.
        cache: results of other calls on the same data and clients.
        tables: for each point a file for its clients' states, used if they are large. Only ``callbacks`` can then
            read the outcome, because the file is closed afterwards. () keeps states of any size in memory.

    Returns:
        For each point its outcome, or the error that ended it; the others continue.
    """
    method = spec.method
    # Points may differ only in floats, so all of them run one program.
    for hp in hps:
        _check(method, hp, spec.clients, spec.rounds)
        if structure(method, hp) != structure(method, hps[0]):
            raise InternalError(
                "Configurations that are trained together may differ only in floats, but these differ in other values.",
                "Please report this.",
            )
    if method.one_shot:
        spec = replace(spec, rounds=1)
    snapshots = list(states or [None] * len(hps))
    # A single run has nothing to share, so its draws and pooled uploads are not cached; its cache only casts features.
    shared = cache
    if shared is None and len(hps) > 1:
        shared = GridCache()
    memo = None
    if shared is not None:
        memo = shared.memo
    cache = shared or GridCache()
    spec = replace(spec, data=cache.cast(spec.data, spec.dtype))
    table_paths: Sequence[Path | None] = tables or [None] * len(hps)
    jobs = []
    records: list[list[RoundRecord]] = []
    with ExitStack() as opened:
        for hp, state, table in zip(hps, snapshots, table_paths, strict=True):
            job = new_run(spec, hp, callbacks, memo)
            opened.callback(job.states.close)
            jobs.append(job)
            if state is None:
                job.start(spec.rounds)
                records.append([])
            else:
                records.append(resume_job(job, state, table))
        # The cheapest execution that serves the method is chosen by the sizes of the first round. A resumed run uses
        # the first round too, so it continues with the execution with which it started.
        load = measure_load(jobs, jobs[0].sampler.planned(0, spec.participation), spec.rounds)
        load = replace(load, points=max(spec.grid_points, len(jobs)))
        chosen = choose(method, hps[0], load, spec.execution, spec.chunk)
        if not jobs[0].trust.plain:
            # Checks, attacks and privacy need the uploads of one run by themselves.
            chosen = replace(chosen, points=1)
        outcomes = []
        for start in range(0, len(jobs), chosen.points):
            points = slice(start, start + chosen.points)
            part = jobs[points]
            for job, table in zip(part, table_paths[points], strict=True):
                _place_states(job, load, chosen, table)
            batch = GridBatch(part, chosen, spec.participation, shared)
            executor = find_executor(chosen.name)(batch, snapshots[points])
            ended = _run(executor, records[points], spec, callbacks, start)
            if callbacks.on_done is not None:
                callbacks.on_done(start, ended)
            outcomes += ended
            if tables:
                for job in part:
                    job.states.close()  # before the next files are opened; there may be hundreds
    return outcomes


def _place_states(job: RunState, load: Load, chosen: ExecutionPlan, table: Path | None) -> None:
    """Keep the clients' states in the file, or in memory."""
    # A resumed run may choose differently than before it was killed. Then its states are moved.
    current = job.states.table
    if table is not None and states_in_file(load, chosen):
        if current is None:
            expected = load.kept_bytes() // load.points
            clients = len(job.training_clients)
            job.states.move(StateTable(table, clients, job.env.device, expected=expected))
    # In a file before and in memory now: for example, before there was too little memory for Gram matrices.
    elif current is not None:
        job.states.move({})
        current.close()


def new_run(
    spec: TrainingRun,
    hp: Mapping[str, Value],
    callbacks: RunCallbacks = SILENT,
    memo: LruCache | None = None,
) -> RunState:
    """The constants of a run, and its state before the first round. Raises FedcacheError, as ``run``."""
    kind = RunState
    if spec.timing is not None:
        kind = TimedRun
    job = kind(
        spec.method,
        hp,
        spec.data,
        spec.clients,
        spec.seed,
        spec.dtype,
        overrides=spec.overrides,
        watch=callbacks.before_step,
        memo=memo,
        trust=spec.trust,
        identity=spec.identity,
    )
    if spec.sampling != UNIFORM:
        job.draw_by(spec.sampling)
    job.warnings += job.sampler.warnings(spec.participation)
    if isinstance(job, TimedRun) and spec.timing is not None:
        job.time_by(spec.timing, spec.participation)
    return job


def plan(
    spec: TrainingRun, hp: Mapping[str, Value], *, points: int = 1
) -> tuple[ExecutionPlan, Load]:
    """The execution plan and the sizes of a run, or of that many points of a grid.

    Raises FedcacheError, as ``run``.
    """
    # Clients with too many rows do not train. The rest of the policy has no effect on the sizes.
    trust = TrustPolicy(max_rows=spec.trust.max_rows)
    job = new_run(replace(spec, seed=0, trust=trust), hp)
    refuse_large_server(job, free_memory())
    job.start()
    load = measure_load([job] * points, job.sampler.planned(0, spec.participation), spec.rounds)
    return choose(spec.method, hp, load, spec.execution, spec.chunk), load


def structure(method: Method, hp: Mapping[str, Value]) -> tuple[tuple[str, Value], ...]:
    """The hyperparameters that are equal in all points of one program: all but floats with a number (None is auto)."""
    floats = {h.name for h in method.hparams if h.kind == "float"}
    return tuple((k, v) for k, v in sorted(hp.items()) if k not in floats or v is None)


def _run(
    executor: Executor,
    records: Sequence[list[RoundRecord]],
    spec: TrainingRun,
    callbacks: RunCallbacks,
    start: int,
) -> list[TrainingOutput | FedcacheError]:
    """All rounds of points that are computed together; ``start`` is the number of the first point in the grid."""
    jobs = executor.batch.points
    failed = executor.batch.failed
    scored: list[Evaluation | None] = [None] * len(jobs)
    chosen = jobs[0].sampler.scored(spec.eval_clients)
    while jobs[0].round < spec.rounds and len(failed) < len(jobs):
        begun = time.perf_counter()
        first = jobs[0]
        if isinstance(first, TimedRun):
            took_part, traffics = timed_round(executor)
        else:
            took_part = tuple(range(len(first.clients)))
            if not first.method.central:
                took_part = tuple(first.sample(spec.participation))
            traffics = executor.train_round()
        # Points share the time of the round that computed them together.
        seconds = (time.perf_counter() - begun) / len(jobs)
        round_number = max(job.round for job in jobs)
        for g, (job, traffic) in enumerate(zip(jobs, traffics, strict=True)):
            # Also for a point that failed: the first point samples and draws for all points.
            job.round = round_number
            if traffic is None:
                continue
            scored[g] = None  # scores of an earlier round are outdated
            accuracy = None
            diagnostics = {}
            due = spec.eval_every > 0 and round_number % spec.eval_every == 0
            if due or round_number == spec.rounds:
                evaluation = score_job(job, chosen)
                scored[g] = evaluation
                accuracy = evaluation.accuracy
                diagnostics = {**job.diagnose(), **evaluation.diagnostics}
            if not job.trust.plain:
                rejected = sum(r.round == round_number for r in job.rejected)
                diagnostics["rejected"] = float(rejected)
            if isinstance(job, TimedRun):
                diagnostics |= job.timing()
            record = RoundRecord(round_number, took_part, seconds, accuracy, traffic, diagnostics)
            records[g].append(record)
            if callbacks.on_round is not None:
                metrics = {
                    "accuracy": accuracy,
                    "seconds": seconds,
                    "clients": len(took_part),
                    **diagnostics,
                }
                snapshot = partial(snapshot_of, job, records[g])
                callbacks.on_round(start + g, round_number, metrics, asdict(traffic), snapshot)
        if callbacks.after_round is not None:
            callbacks.after_round(round_number)
    classes_owned = classes_of_clients(jobs[0].data.y.cpu().numpy(), jobs[0].clients)
    # Computed once, because all points have the same zero-shot accuracy.
    zero_shot = cache(lambda: zero_shot_accuracy(jobs[0], chosen))

    def ended(g: int, job: RunState) -> TrainingOutput | FedcacheError:
        if g in failed:
            return failed[g]
        # A run that was resumed after its last round is not scored yet.
        evaluation = scored[g] or score_job(job, chosen)
        out = _outcome(job, executor.batch, records[g], evaluation, classes_owned)
        return replace(out, zero_shot=zero_shot())

    return [ended(g, job) for g, job in enumerate(jobs)]


def _check(method: Method, hp: Mapping[str, Value], clients: Sequence[Client], rounds: int) -> None:
    for key in hp:
        method.hparam(key)
    missing = sorted({h.name for h in method.hparams} - set(hp))
    if missing:
        lacking = ", ".join(missing)
        raise UsageError(
            f"{method.name} is missing hyperparameters: {lacking}.",
            f"Get all hyperparameters from METHODS[{method.name!r}].resolve(preset, settings).",
        )
    if has_batchnorm(hp) and hp.get("batch") == 1:
        raise UsageError(
            f"batch is 1, but {method.name} uses BatchNorm (bn), which needs at least two rows in a batch.",
            "Use --set batch=2 or more, or --set bn=false.",
        )
    if rounds < 1:
        raise UsageError(f"rounds is {rounds}, expected at least 1.", "For example --rounds 10.")
    if not clients:
        raise FederatedRunError(
            "The partition has no clients.",
            "Make one: fedcache partition --scheme iid --clients 10",
        )
    names = names_of(clients)
    if isinstance(names, NumberedNames):
        return  # numbered names differ by construction, and may be millions
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise FederatedRunError(
            f"Clients must have different names, found {name!r} {count} times.",
            "Rename the clients of the partition, because random draws depend on client names.",
        )


def _outcome(
    job: RunState,
    batch: GridBatch,
    records: list[RoundRecord],
    evaluation: Evaluation,
    classes_owned: np.ndarray,
) -> TrainingOutput:
    protocol = job.method.protocol(job.hp)

    @usual_torch_state()
    def predict(x: Tensor) -> Tensor:
        if protocol != "global":
            raise UsageError(
                f"{job.method.name} has one model for each client, so there are no predictions of a global model.",
                "Use evaluation.predictions: the predictions of each client's model on the client's own test rows.",
            )
        rows = x
        if x.dim() == 3:
            rows = x[:, 0]  # view 0 is the plain image
        rows = rows.to(job.env.device, job.data.x.dtype)
        model = deployed_model(job, None)
        with torch.no_grad():
            return model.scores(rows).argmax(-1)

    broadcast = cache(job.down)  # made once, so that the models of all clients share its tensors
    # Made once, because it may train a probe.
    global_model = cache(lambda: deployed_model(job, None, broadcast()))

    def deployed(client: int | None) -> DeployedModel | None:
        if protocol == "global":
            if client is None:
                return global_model()
            return None
        if client is None or not has_model(job, client):
            return None
        return deployed_model(job, client, broadcast())

    # Names and shapes of the first client's state; {} if no client has a state.
    outline = next(map(job.states.outline, job.states), {})
    return TrainingOutput(
        method=job.method.name,
        hp=dict(cast(Mapping[str, Any], job.hp)),
        seed=job.seed,
        protocol=protocol,
        evaluation=evaluation,
        records=tuple(records),
        traffic=job.traffic,
        fidelity=job.method.faithful(job.hp, job.env.views),
        execution=batch.plan.name,
        chunk=batch.plan.chunk,
        points=batch.plan.points,
        threads=torch.get_num_threads(),
        dtype=job.env.dtype,
        clients=names_of(job.clients),
        classes_owned=classes_owned,
        trainable=job.method.trainable(job.server, outline),
        server=job.server,
        states=job.states,
        warnings=(*job.warnings, *job.traffic.idle_rounds()),
        attackers=tuple(sorted(job.training_clients[c].name for c in job.attackers)),
        predict=predict,
        deployed=deployed,
        broadcast=broadcast,
    )
