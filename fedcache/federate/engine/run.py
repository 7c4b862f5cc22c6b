"""Run a method: rounds, evaluation, records, and a state from which a killed run goes on bit for bit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedcache.errors import Exit, FedcacheError
from fedcache.federate.engine.client_data import ClientRows, lane_data
from fedcache.federate.engine.evaluate import Scores, evaluate_global, evaluate_personal
from fedcache.federate.engine.method import Method, Value, keep_down
from fedcache.federate.engine.metrics import classes_owned
from fedcache.federate.engine.outcome import STATE_VERSION, Evaluation, Outcome, RoundRecord, Snapshot, pack, unpack
from fedcache.federate.engine.run_state import Rounds
from fedcache.federate.engine.traffic import Traffic
from fedcache.federate.engine.training_run import RunCallbacks, TrainingRun
from fedcache.federate.execution.batched import Program
from fedcache.federate.execution.cache import Memo
from fedcache.federate.execution.choose import Lift, Load, choose
from fedcache.federate.execution.gram import is_first, restore, stored
from fedcache.federate.execution.grid_cache import Shared
from fedcache.federate.trust.policy import TrustPolicy
from fedcache.heads.linear import Tree

SILENT = RunCallbacks()


def run(
    spec: TrainingRun,
    hp: Mapping[str, Value],
    *,
    state: Snapshot | None = None,
    callbacks: RunCallbacks = SILENT,
) -> Outcome:
    """Train a method and score what it deploys.

    Args:
        spec: the method, its clients, rounds and seed.
        hp: from ``method.resolve``.
        state: a snapshot to go on from.
        callbacks: called on the way; ``point`` is 0.

    Returns:
        Models, accuracy, records and traffic.

    Raises:
        FedcacheError: USAGE for what was asked for, STORE for features a method needs, FEDERATED for a run that fails.
    """
    (out,) = run_points(spec, [hp], states=[state], callbacks=callbacks)
    if isinstance(out, FedcacheError):
        raise out
    return out


def run_points(
    spec: TrainingRun,
    hps: Sequence[Mapping[str, Value]],
    *,
    states: Sequence[Snapshot | None] | None = None,
    callbacks: RunCallbacks = SILENT,
    cache: Shared | None = None,
) -> list[Outcome | FedcacheError]:
    """Train the points of a grid that differ in floats alone, together where that pays.

    Args:
        spec: what all points have in common; they share its draws.
        hps: the hyperparameters of each point; those that are no floats are equal.
        states: a snapshot to go on from for each point, all of the same round.
        callbacks: called on the way.
        cache: what other calls on the same data and clients have computed already.

    Returns:
        For each point its outcome, or the error that ended it; the others go on.

    Raises:
        FedcacheError: as ``run``, for what concerns all points; BUG for points that differ in more than floats.
    """
    method = spec.method
    for hp in hps:
        _check(method, hp, spec.clients, spec.rounds)
        if structure(method, hp) != structure(method, hps[0]):
            raise FedcacheError(Exit.BUG, "Points of one program differ in more than floats.", "Please report this.")
    spec = replace(spec, rounds=1 if method.one_shot else spec.rounds)
    snapshots = list(states or [None] * len(hps))
    together, cache = cache is not None or len(hps) > 1, cache or Shared()
    spec = replace(spec, data=cache.cast(spec.data, spec.dtype))
    jobs: list[Rounds] = []
    records: list[list[RoundRecord]] = []
    for hp, state in zip(hps, snapshots, strict=True):
        job = _new_job(spec, hp, callbacks, cache.memo if together else None)
        records.append(resume_job(job, state) if state is not None else [])
        if state is None:
            job.start()
        jobs.append(job)
    per_round = len(jobs[0].sample(spec.participation))
    chosen = choose(method, hps[0], _load(jobs, per_round), spec.execution, spec.chunk, mixed=bool(spec.overrides))
    if not jobs[0].trust.plain:
        chosen = replace(chosen, points=1)  # what is done with uploads is done with those of one run
    grams = cache.grams(jobs[0]) if chosen.name == "dual" else None
    found: list[Outcome | FedcacheError] = []
    for start in range(0, len(jobs), chosen.points):
        part = jobs[start : start + chosen.points]
        if grams is not None:
            for job, state in zip(part, snapshots[start:], strict=False):
                restore(job.states, state, grams)
        program = Program(part, chosen, grams, cache if together else None)
        ended = _run(program, records[start : start + chosen.points], spec, callbacks, start)
        if callbacks.on_done is not None:
            callbacks.on_done(start, ended)
        found += ended
    return found


def _new_job(
    spec: TrainingRun, hp: Mapping[str, Value], callbacks: RunCallbacks = SILENT, memo: Memo | None = None
) -> Rounds:
    """One point before its first round."""
    return Rounds(spec.method, hp, spec.data, spec.clients, spec.seed, spec.dtype, spec.overrides,
                  callbacks.before_step, memo, spec.trust)  # fmt: skip


def plan(spec: TrainingRun, hp: Mapping[str, Value], *, points: int = 1) -> tuple[Lift, Load]:
    """How a run, or that many points of a grid, would be computed, and its sizes; nothing is trained.

    Raises:
        FedcacheError: as ``run``.
    """
    job = _new_job(replace(spec, seed=0, trust=TrustPolicy()), hp)
    job.start()
    load = _load([job] * points, len(job.sample(spec.participation)))
    return choose(spec.method, hp, load, spec.execution, spec.chunk, mixed=bool(spec.overrides)), load


def structure(method: Method, hp: Mapping[str, Value]) -> tuple[tuple[str, Value], ...]:
    """What points of one program have in common: every hyperparameter that is no float."""
    floats = {h.name for h in method.hparams if h.kind == "float"}
    return tuple((k, v) for k, v in sorted(hp.items()) if k not in floats or v is None)


def _run(
    program: Program, records: Sequence[list[RoundRecord]], spec: TrainingRun, callbacks: RunCallbacks, start: int
) -> list[Outcome | FedcacheError]:
    """All rounds of the points of one program, of which the first is number ``start`` of the grid."""
    jobs = program.jobs
    scored: list[Evaluation | None] = [None] * len(jobs)
    while jobs[0].round < spec.rounds and len(program.failed) < len(jobs):
        begun = time.perf_counter()
        first = jobs[0]
        took_part = tuple(range(len(first.clients)) if first.method.central else first.sample(spec.participation))
        traffics = program.one_round(spec.participation)
        seconds = (time.perf_counter() - begun) / len(jobs)
        number = max(job.round for job in jobs)
        for g, (job, traffic) in enumerate(zip(jobs, traffics, strict=True)):
            job.round = number  # a point that failed goes along, as the first one samples and draws for all
            if traffic is None:
                continue
            measure = job.round == spec.rounds or (spec.eval_every > 0 and job.round % spec.eval_every == 0)
            found = scored[g] = score_job(job) if measure else None
            diagnostics = job.diagnose() if measure else {}
            if not job.trust.plain:
                diagnostics["rejected"] = float(sum(r.round == job.round for r in job.rejected))
            accuracy = None if found is None else found.accuracy
            records[g].append(RoundRecord(job.round, took_part, seconds, accuracy, traffic, diagnostics))
            if callbacks.on_round is not None:
                metrics = {"accuracy": accuracy, "seconds": seconds, "clients": len(took_part), **diagnostics}
                snapshot = partial(snapshot_of, job, records[g])
                callbacks.on_round(start + g, job.round, metrics, asdict(traffic), snapshot)
        if callbacks.after_round is not None:
            callbacks.after_round(number)
    labels = jobs[0].data.y.cpu().numpy()
    owned = tuple(classes_owned(labels[np.asarray(c.train, np.int64)]) for c in jobs[0].clients)
    return [
        program.failed[g]
        if g in program.failed
        else _outcome(job, program, records[g], scored[g] or score_job(job), owned)
        for g, job in enumerate(jobs)
    ]


def _check(method: Method, hp: Mapping[str, Value], clients: Sequence[ClientRows], rounds: int) -> None:
    for key in hp:
        method.hparam(key)
    missing = sorted({h.name for h in method.hparams} - set(hp))
    if missing:
        raise FedcacheError(
            Exit.USAGE,
            f"{method.name} is not told {', '.join(missing)}.",
            f"Take all hyperparameters from METHODS[{method.name!r}].resolve(preset, settings).",
        )
    if rounds < 1:
        raise FedcacheError(Exit.USAGE, f"rounds is {rounds}, expected at least 1.", "For example --rounds 10.")
    if not clients:
        raise FedcacheError(
            Exit.FEDERATED, "The partition has no client.", "Make one: fedcache partition --scheme iid --clients 10"
        )
    names = [c.name for c in clients]
    twice = sorted({n for n in names if names.count(n) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise FedcacheError(
            Exit.FEDERATED,
            f"Clients must have different names, found {twice[0]!r} {names.count(twice[0])} times.",
            "Rename the clients of the partition: their names key the random draws.",
        )


def _load(jobs: Sequence[Rounds], clients: int) -> Load:
    """Sizes of a run: what one client holds besides its rows is what it keeps and what it is sent."""
    job = jobs[0]
    first = job.eligible[0]
    down = job.down()
    kept = job.method.enter(down, job.rows([first], 0), job.ctx([first], 0))
    held = {k: t for k, t in {**down, **kept}.items() if not k.startswith(("rows/", "opt/"))}
    return Load(
        head_bytes=_bytes(held),
        clients=clients,
        outputs=sum(t.shape[-2] for k, t in held.items() if is_first(k)),
        rows=[len(job.lanes[c].train) for c in job.eligible],
        width=job.data.x.shape[2],
        itemsize=job.env.dtype.itemsize,
        views=job.env.views,
        points=len(jobs),
        upload_bytes=_upload_bytes(job, kept),
        server_bytes=_bytes(job.server),
        state_bytes=_bytes(kept),
        feature_bytes=_bytes({"x": job.data.x}),
        broadcast_bytes=_bytes({k: t for k, t in down.items() if not is_first(k)}),
        batch=cast(int, job.hp.get("batch", 32)),
    )


def _upload_bytes(job: Rounds, kept: Tree) -> int:
    """Of one client. A server that stacks uploads has all clients' under the names of one's: a client's own tell."""
    total = 0
    for prefix, rule in job.method.pool(job.hp).items():
        places = (kept, job.server) if rule == "stack" else (job.server,)
        named = [{k: t for k, t in place.items() if k.startswith(prefix)} for place in places]
        if not any(named):
            return _bytes(job.server)  # names of its own, such as sums: as large as the model
        total += _bytes(next(filter(None, named)))
    return total


def _bytes(tree: Tree) -> int:
    return sum(t.numel() * t.element_size() for t in tree.values())


def score_job(job: Rounds) -> Evaluation:
    """Score what a run deploys now, on the test rows of its clients."""
    down, protocol = job.down(), job.method.protocol(job.hp)
    if protocol == "global":
        scores = _global_scores(job, down)
        return evaluate_global(lambda rows: scores(job.data.x[rows, 0]), job.data, job.clients)

    def model(client: int) -> Scores | None:
        if not len(job.lanes[client].train) or client < job.public:
            return None  # it never had anything to deploy
        data, ctx = job.rows([client], 0), job.ctx([client], 0)
        own, kept = job.features(client), client in job.states.kept
        if kept and job.method.deploy is keep_down:

            def scored(rows: Tensor) -> Tensor:
                state, x = job.states.scored(client, own, rows)
                return job.method.predict(down, state, data, cast(Tensor, x), ctx)

            return scored
        with torch.no_grad():
            known = job.states.get(client) or job.method.enter(down, data, ctx)
        deployed = _deploy(job, down, known, client)
        shown = job.rows([client], 0, test=True) if job.method.reads_test(job.hp) else data
        return lambda rows: job.method.predict(deployed, known, shown, own[rows, 0], ctx)

    return evaluate_personal(
        model, job.data, job.clients,
        everywhere=protocol == "everywhere", headline=job.method.headline,
    )  # fmt: skip


def _global_scores(job: Rounds, down: Tree) -> Callable[[Tensor], Tensor]:
    """Features [R, D] -> scores of the one model."""
    first = job.eligible[0]
    ctx, data = job.server_ctx(), lane_data(job.data.x, job.labels, [np.asarray(job.lanes[first].train, np.int64)], 0)
    deployed = _deploy(job, down, {}, None)
    return lambda x: job.method.predict(deployed, {}, data, x, ctx)


def _deploy(job: Rounds, down: Tree, state: Tree, client: int | None) -> Tree:
    """What is scored: the broadcast, or what evaluation trains on it (a probe on all labelled rows)."""
    if job.method.deploy is keep_down:
        return down
    ctx = job.server_ctx() if client is None else job.ctx([client], 0)
    return job.method.deploy(down, state, job.labelled(client), ctx)


def snapshot_of(job: Rounds, records: list[RoundRecord]) -> Snapshot:
    """The state between rounds, from which ``resume_job`` goes on bit for bit."""
    meta = {
        "version": STATE_VERSION,
        "method": job.method.name,
        "seed": job.seed,
        "dtype": str(job.env.dtype),
        "round": job.round,
        "clients": [c.name for c in job.lanes],
        "met": [int(i) for i in np.flatnonzero(job.met)],
        "traffic": job.traffic.to_json(),
    }
    made = pack(job.server, dict(job.states), meta, records)
    return Snapshot({**made.tensors, **stored(job.states)}, made.meta)


def resume_job(job: Rounds, state: Snapshot) -> list[RoundRecord]:
    """Put a run where a snapshot was taken; the records up to there."""
    want = {
        "version": STATE_VERSION,
        "method": job.method.name,
        "seed": job.seed,
        "dtype": str(job.env.dtype),
        "clients": [c.name for c in job.lanes],
    }
    for key, expected in want.items():
        if state.meta.get(key) != expected:
            raise FedcacheError(
                Exit.FEDERATED,
                f"The saved state has {key} {state.meta.get(key)!r}, but the run has {expected!r}.",
                "Resume with the configuration that was saved, or start again without the saved state.",
            )
    job.server, held, records = unpack(state)
    for client, tree in held.items():
        job.states[client] = tree
    job.round = int(state.meta["round"])
    job.traffic = Traffic.from_json(state.meta["traffic"])
    for client in state.meta["met"]:
        job.met[client] = True
    return records


def _outcome(
    job: Rounds, program: Program, records: list[RoundRecord], evaluation: Evaluation, owned: tuple[int, ...]
) -> Outcome:
    protocol = job.method.protocol(job.hp)

    def predict(x: Tensor) -> Tensor:
        if protocol != "global":
            raise FedcacheError(
                Exit.USAGE,
                f"{job.method.name} deploys one model per client, so there is no global prediction.",
                "Read evaluation.predictions, which are those of each client's model on its own test rows.",
            )
        rows = x[:, 0] if x.dim() == 3 else x
        scores = _global_scores(job, job.down())
        with torch.no_grad():
            return scores(rows.to(job.env.device, job.data.x.dtype)).argmax(-1)

    return Outcome(
        method=job.method.name,
        hp=dict(cast(Mapping[str, Any], job.hp)),
        seed=job.seed,
        protocol=protocol,
        evaluation=evaluation,
        records=tuple(records),
        traffic=job.traffic,
        fidelity=job.method.fidelity(job.hp, job.env.views),
        lift=program.lift.name,
        chunk=program.lift.chunk,
        points=len(program.jobs),
        threads=torch.get_num_threads(),
        dtype=job.env.dtype,
        clients=tuple(c.name for c in job.clients),
        classes_owned=owned,
        trainable=job.method.trainable(job.server, next(map(job.states.outline, job.states), {})),
        server=job.server,
        states=job.states,
        warnings=tuple(job.warnings),
        attackers=tuple(sorted(job.lanes[c].name for c in job.liars)),
        predict=predict,
    )
