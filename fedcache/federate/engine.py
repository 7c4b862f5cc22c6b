"""Run a method: rounds, evaluation, records, and a state from which a killed run goes on bit for bit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedcache.errors import Exit, FedcacheError
from fedcache.federate.clients import ClientRows, Data, lane_data
from fedcache.federate.evaluate import Scores, evaluate_global, evaluate_personal
from fedcache.federate.lifts import Lift, choose
from fedcache.federate.method import Method, Value, keep_down
from fedcache.federate.metrics import classes_owned
from fedcache.federate.mixed import Own
from fedcache.federate.outcome import STATE_VERSION, Evaluation, Outcome, RoundRecord, Snapshot, pack, unpack
from fedcache.federate.rounds import Rounds
from fedcache.federate.traffic import Traffic
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
        lift: auto | loop | stack.
        chunk: clients at once under ``stack``; None lets the engine pick.
        dtype: of the computation; float64 for comparing lifts.
        eval_every: also score after every k-th round; 0 for the last only.
        state: a snapshot to go on from.
        on_round: called after every round; its snapshot costs nothing unless called.
        own: in what some clients differ, by client number; the run is then computed client by client.

    Returns:
        Models, accuracy, records and traffic.

    Raises:
        FedcacheError: exit 2 for what was asked for, 4 for features a method needs, 7 for a run that fails.
    """
    _check(method, hp, clients, rounds)
    rounds = 1 if method.one_shot else rounds
    job = Rounds(method, hp, data, clients, seed, dtype, own)
    records: list[RoundRecord] = []
    if state is None:
        job.start()
    else:
        records = _resume(job, state)
    per_round = len(job.sample(participation))
    chosen = choose(method, hp, _head_bytes(job), per_round, lift, chunk, mixed=bool(own))
    evaluation: Evaluation | None = None
    while job.round < rounds:
        begun = time.perf_counter()
        took_part = tuple(range(len(clients)) if method.central else job.sample(participation))
        traffic = job.one_round(participation, chosen)
        seconds = time.perf_counter() - begun
        measure = job.round == rounds or (eval_every > 0 and job.round % eval_every == 0)
        evaluation = _evaluate(job) if measure else None
        diagnostics = job.diagnose() if measure else {}
        accuracy = None if evaluation is None else evaluation.accuracy
        records.append(RoundRecord(job.round, took_part, seconds, accuracy, traffic, diagnostics))
        if on_round is not None:
            metrics = {"accuracy": accuracy, "seconds": seconds, "clients": len(took_part), **diagnostics}
            on_round(job.round, metrics, asdict(traffic), lambda: _snapshot(job, records))
    return _outcome(job, chosen, records, evaluation or _evaluate(job))


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


def _head_bytes(job: Rounds) -> int:
    """Bytes of what one client holds besides its rows: what it keeps and what it is sent."""
    first = job.eligible[0]
    down = job.down()
    kept = job.method.enter(down, job.rows([first], 0), job.ctx([first], 0))
    held = [t for k, t in {**down, **kept}.items() if not k.startswith(("rows/", "opt/"))]
    return sum(t.numel() * t.element_size() for t in held)


def _evaluate(job: Rounds) -> Evaluation:
    down, protocol = job.down(), job.method.protocol(job.hp)
    if protocol == "global":
        return evaluate_global(_global_scores(job, down), job.data, job.clients)

    def model(client: int) -> Scores | None:
        if not len(job.lanes[client].train) or client < job.public:
            return None  # it never had anything to deploy
        data, ctx = job.rows([client], 0), job.ctx([client], 0)
        with torch.no_grad():
            known = job.states.get(client) or job.method.enter(down, data, ctx)
        deployed = _deploy(job, down, known, client)
        shown = job.rows([client], 0, test=True) if job.method.reads_test(job.hp) else data
        return lambda x: job.method.predict(deployed, known, shown, x, ctx)

    return evaluate_personal(
        model, job.data, job.clients, job.features,
        everywhere=protocol == "everywhere", headline=job.method.headline,
    )  # fmt: skip


def _global_scores(job: Rounds, down: Tree) -> Scores:
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


def _snapshot(job: Rounds, records: list[RoundRecord]) -> Snapshot:
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
    return pack(job.server, job.states, meta, records)


def _resume(job: Rounds, state: Snapshot) -> list[RoundRecord]:
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
    job.server, job.states, records = unpack(state)
    job.round = int(state.meta["round"])
    job.traffic = Traffic.from_json(state.meta["traffic"])
    for client in state.meta["met"]:
        job.met[client] = True
    return records


def _outcome(job: Rounds, lift: Lift, records: list[RoundRecord], evaluation: Evaluation) -> Outcome:
    protocol = job.method.protocol(job.hp)
    labels = job.data.y.cpu().numpy()

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
        lift=lift.name,
        chunk=lift.chunk,
        threads=torch.get_num_threads(),
        dtype=job.env.dtype,
        clients=tuple(c.name for c in job.clients),
        classes_owned=tuple(classes_owned(labels[np.asarray(c.train, np.int64)]) for c in job.clients),
        trainable=job.method.trainable(job.server, next(iter(job.states.values()), {})),
        server=job.server,
        states=job.states,
        warnings=tuple(job.warnings),
        predict=predict,
    )
