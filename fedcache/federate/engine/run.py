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
from fedcache.federate.engine.client_data import ClientRows, Data, lane_data
from fedcache.federate.engine.client_overrides import Own
from fedcache.federate.engine.evaluate import Scores, evaluate_global, evaluate_personal
from fedcache.federate.engine.method import Method, Value, keep_down
from fedcache.federate.engine.metrics import classes_owned
from fedcache.federate.engine.outcome import STATE_VERSION, Evaluation, Outcome, RoundRecord, Snapshot, pack, unpack
from fedcache.federate.engine.run_state import Rounds
from fedcache.federate.engine.traffic import Traffic
from fedcache.federate.execution.batched import Program
from fedcache.federate.execution.choose import Lift, Load, choose
from fedcache.federate.execution.gram import is_first, restore, stored
from fedcache.federate.execution.grid_cache import Shared
from fedcache.federate.trust.policy import TrustPolicy
from fedcache.heads.linear import Tree

OnRound = Callable[[int, dict[str, Any], dict[str, Any], Callable[[], Snapshot]], None]
"""(round, metrics, traffic of the round, snapshot) after each round; rounds count from 1."""


def run(
    method: Method,
    hp: Mapping[str, Value],
    data: Data,
    clients: Sequence[ClientRows],
    *,
    rounds: int,
    participation: int | float | None = None,
    seed: int = 0,
    lift: str = "auto",
    chunk: int | None = None,
    dtype: torch.dtype = torch.float32,
    eval_every: int = 0,
    state: Snapshot | None = None,
    on_round: OnRound | None = None,
    own: Mapping[int, Own] | None = None,
    watch: Callable[[], None] | None = None,
    trust: TrustPolicy | None = None,
) -> Outcome:
    """Train ``method`` on ``clients`` and score what it deploys.

    Args:
        method: from ``METHODS``.
        hp: from ``method.resolve``.
        data: features, labels, text; on the device that computes.
        clients: names and rows; names are unique and key the random streams.
        rounds: total, counted from the first start; one-shot methods take one.
        participation: clients a round: None for all, an int for a number, a float for a share.
        seed: of every draw.
        lift: auto | loop | stack | dual.
        chunk: clients at once under ``stack`` and ``dual``; None lets the engine pick.
        dtype: of the computation; float64 for comparing lifts.
        eval_every: also score after every k-th round; 0 for the last only.
        state: a snapshot to go on from.
        on_round: called after every round; its snapshot costs nothing unless called.
        own: in what some clients differ, by client number; the run is then computed client by client.
        watch: called before every step; an INTERRUPTED it raises ends the run inside a round.
        trust: what is done with uploads; None checks them and takes the method's own mean.

    Returns:
        Models, accuracy, records and traffic.

    Raises:
        FedcacheError: exit 2 for what was asked for, 4 for features a method needs, 7 for a run that fails.
    """

    def told(_point: int, *story: Any) -> None:
        if on_round is not None:
            on_round(*story)

    (out,) = run_points(
        method, [hp], data, clients, rounds=rounds, participation=participation, seed=seed, lift=lift, chunk=chunk,
        dtype=dtype, eval_every=eval_every, states=[state], on_round=told, own=own, watch=watch, trust=trust,
    )  # fmt: skip
    if isinstance(out, FedcacheError):
        raise out
    return out


def run_points(
    method: Method,
    hps: Sequence[Mapping[str, Value]],
    data: Data,
    clients: Sequence[ClientRows],
    *,
    rounds: int,
    participation: int | float | None = None,
    seed: int = 0,
    lift: str = "auto",
    chunk: int | None = None,
    dtype: torch.dtype = torch.float32,
    eval_every: int = 0,
    states: Sequence[Snapshot | None] | None = None,
    on_round: Callable[..., None] | None = None,
    after_round: Callable[[int], None] | None = None,
    on_done: Callable[[int, Sequence[Outcome | FedcacheError]], None] | None = None,
    own: Mapping[int, Own] | None = None,
    shared: Shared | None = None,
    watch: Callable[[], None] | None = None,
    trust: TrustPolicy | None = None,
) -> list[Outcome | FedcacheError]:
    """Train the points of a grid that differ in floats alone, together where that pays.

    Args:
        method: of all points.
        hps: one for each point; other hyperparameters than floats are equal.
        data: as in ``run``.
        clients: as in ``run``.
        rounds: as in ``run``.
        participation: as in ``run``.
        seed: of every draw; points share their draws.
        lift: as in ``run``.
        chunk: as in ``run``.
        dtype: as in ``run``.
        eval_every: as in ``run``.
        states: a snapshot to go on from for each point, all of the same round.
        on_round: as in ``run``, with the point's number first.
        after_round: called with the number of a round when all points that are computed together have ended it.
        on_done: called with the first number and the outcomes of points that were computed together.
        own: as in ``run``.
        shared: what other calls on the same data and clients have computed already.
        watch: as in ``run``.
        trust: as in ``run``.

    Returns:
        For each point its outcome, or the error that ended it; the others go on.

    Raises:
        FedcacheError: as ``run``, for what concerns all points; BUG for points that differ in more than floats.
    """
    for hp in hps:
        _check(method, hp, clients, rounds)
        if structure(method, hp) != structure(method, hps[0]):
            raise FedcacheError(Exit.BUG, "Points of one program differ in more than floats.", "Please report this.")
    rounds = 1 if method.one_shot else rounds
    together, shared = shared is not None or len(hps) > 1, shared or Shared()
    data = shared.cast(data, dtype)
    jobs: list[Rounds] = []
    records: list[list[RoundRecord]] = []
    for hp, state in zip(hps, states or [None] * len(hps), strict=True):
        job = Rounds(method, hp, data, clients, seed, dtype, own, watch, shared.memo if together else None, trust)
        records.append(resume_job(job, state) if state is not None else [])
        if state is None:
            job.start()
        jobs.append(job)
    per_round = len(jobs[0].sample(participation))
    chosen = choose(method, hps[0], _load(jobs, per_round), lift, chunk, mixed=bool(own))
    if not jobs[0].trust.plain:
        chosen = replace(chosen, points=1)  # what is done with uploads is done with those of one run
    grams = shared.grams(jobs[0]) if chosen.name == "dual" else None
    found: list[Outcome | FedcacheError] = []
    for start in range(0, len(jobs), chosen.points):
        part = jobs[start : start + chosen.points]
        if grams is not None:
            for job, state in zip(part, (states or [None] * len(hps))[start:], strict=False):
                restore(job.states, state, grams)
        program = Program(part, chosen, grams, shared if together else None)

        def told(point: int, *story: Any, first: int = start) -> None:
            if on_round is not None:
                on_round(first + point, *story)

        part_records = records[start : start + chosen.points]
        ended = _run(program, part_records, rounds, participation, eval_every, told, after_round)
        if on_done is not None:
            on_done(start, ended)
        found += ended
    return found


def plan(
    method: Method,
    hp: Mapping[str, Value],
    data: Data,
    clients: Sequence[ClientRows],
    *,
    points: int = 1,
    participation: int | float | None = None,
    lift: str = "auto",
    chunk: int | None = None,
    dtype: torch.dtype = torch.float32,
    own: Mapping[int, Own] | None = None,
) -> tuple[Lift, Load]:
    """How a run would be computed, and its sizes; nothing is trained. Arguments and errors as in ``run``."""
    job = Rounds(method, hp, data, clients, 0, dtype, own)
    job.start()
    load = _load([job] * points, len(job.sample(participation)))
    return choose(method, hp, load, lift, chunk, mixed=bool(own)), load


def structure(method: Method, hp: Mapping[str, Value]) -> tuple[tuple[str, Value], ...]:
    """What points of one program have in common: every hyperparameter that is no float."""
    floats = {h.name for h in method.hparams if h.kind == "float"}
    return tuple((k, v) for k, v in sorted(hp.items()) if k not in floats or v is None)


def _run(
    program: Program,
    records: Sequence[list[RoundRecord]],
    rounds: int,
    participation: int | float | None,
    eval_every: int,
    on_round: Callable[..., None],
    after_round: Callable[[int], None] | None,
) -> list[Outcome | FedcacheError]:
    """All rounds of some points."""
    jobs = program.jobs
    scored: list[Evaluation | None] = [None] * len(jobs)
    while jobs[0].round < rounds and len(program.failed) < len(jobs):
        begun = time.perf_counter()
        first = jobs[0]
        took_part = tuple(range(len(first.clients)) if first.method.central else first.sample(participation))
        traffics = program.one_round(participation)
        seconds = (time.perf_counter() - begun) / len(jobs)
        number = max(job.round for job in jobs)
        for g, (job, traffic) in enumerate(zip(jobs, traffics, strict=True)):
            job.round = number  # a point that failed goes along, as the first one samples and draws for all
            if traffic is None:
                continue
            measure = job.round == rounds or (eval_every > 0 and job.round % eval_every == 0)
            found = scored[g] = score_job(job) if measure else None
            diagnostics = job.diagnose() if measure else {}
            if not job.trust.plain:
                diagnostics["rejected"] = float(sum(r.round == job.round for r in job.rejected))
            accuracy = None if found is None else found.accuracy
            records[g].append(RoundRecord(job.round, took_part, seconds, accuracy, traffic, diagnostics))
            metrics = {"accuracy": accuracy, "seconds": seconds, "clients": len(took_part), **diagnostics}
            on_round(g, job.round, metrics, asdict(traffic), partial(snapshot_of, job, records[g]))
        if after_round is not None:
            after_round(number)
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
