"""A run's state between rounds, taken out and put back, so that a killed run goes on bit for bit."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcache.errors import FederatedRunError
from fedcache.federate.engine.outcome import RoundRecord, Snapshot, Traffic
from fedcache.federate.engine.run_state import RunState
from fedcache.federate.execution.gram_states import stored
from fedcache.heads.linear import Tree

STATE_VERSION = 1


def snapshot_of(job: RunState, records: list[RoundRecord]) -> Snapshot:
    """The state between rounds, from which ``resume_job`` goes on bit for bit."""
    meta = {
        "version": STATE_VERSION,
        "method": job.method.name,
        "seed": job.seed,
        "dtype": str(job.env.dtype),
        "round": job.round,
        "clients": [c.name for c in job.training_clients],
        "met": [int(i) for i in np.flatnonzero(job.met)],
        "traffic": job.traffic.to_json(),
    }
    made = pack(job.server, dict(job.states), meta, records)
    return Snapshot({**made.tensors, **stored(job.states)}, made.meta)


def resume_job(job: RunState, state: Snapshot) -> list[RoundRecord]:
    """Put a run where a snapshot was taken; the records up to there."""
    want = {
        "version": STATE_VERSION,
        "method": job.method.name,
        "seed": job.seed,
        "dtype": str(job.env.dtype),
        "clients": [c.name for c in job.training_clients],
    }
    for key, expected in want.items():
        if state.meta.get(key) != expected:
            raise FederatedRunError(
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


def _copy(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)  # files hold nothing else


def pack(server: Tree, states: dict[int, Tree], meta: dict[str, Any], records: list[RoundRecord]) -> Snapshot:
    """A snapshot that shares no memory with the run."""
    tensors = {f"server/{k}": _copy(t) for k, t in server.items()}
    for client in sorted(states):
        tensors |= {f"client/{client}/{k}": _copy(t) for k, t in states[client].items()}
    entered = sorted(states)
    return Snapshot(tensors, {**meta, "entered": entered, "records": [asdict(r) for r in records]})


def unpack(snapshot: Snapshot) -> tuple[Tree, dict[int, Tree], list[RoundRecord]]:
    """Server, states and records of a snapshot, on memory of their own."""
    server: Tree = {}
    states: dict[int, Tree] = {int(c): {} for c in snapshot.meta["entered"]}
    for key, t in snapshot.tensors.items():
        place, name = key.split("/", 1)
        if place == "server":
            server[name] = t.clone()
        elif place == "client":
            client, name = name.split("/", 1)
            states[int(client)][name] = t.clone()
    return server, states, [RoundRecord.from_json(r) for r in snapshot.meta["records"]]
