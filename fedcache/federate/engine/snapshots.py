"""Snapshots of a run between rounds, from which a killed run resumes bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcache.errors import FederatedRunError
from fedcache.federate.engine.outcome import RoundRecord, Snapshot, Traffic
from fedcache.federate.engine.run_state import RunState
from fedcache.federate.engine.simulated_time import TimedRun
from fedcache.federate.execution.gram_states import stored
from fedcache.federate.execution.state_table import StateTable
from fedcache.heads.linear import Tree

STATE_VERSION = 1

NAMES = 1 << 12
"""Number of client names that are hashed at once."""


def _meta(job: RunState) -> dict[str, Any]:
    """The part of a snapshot that identifies its run, and the counters of the run."""
    return {
        "version": STATE_VERSION,
        "method": job.method.name,
        "seed": job.seed,
        "dtype": str(job.env.dtype),
        "round": job.round,
        "clients": digest_of_names(job.client_names),
        "met": np.flatnonzero(job.met).tolist(),
        "traffic": job.traffic.to_json(),
    }


def digest_of_names(names: Sequence[str]) -> str:
    """Number and digest of the clients' names, which seed the clients' draws."""
    digest = hashlib.sha256()
    for start in range(0, len(names), NAMES):
        lines = "".join(f"{name}\n" for name in names[start : start + NAMES])
        digest.update(lines.encode())
    short = digest.hexdigest()[:16]
    return f"{len(names)} named {short}"


def _copy(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)  # as in a file


def snapshot_of(job: RunState, records: list[RoundRecord]) -> Snapshot:
    """The state between rounds, from which ``resume_job`` resumes bit for bit; it shares no memory with the run."""
    tensors = {f"server/{k}": _copy(t) for k, t in job.server.items()}
    table = job.states.table
    meta = {**_meta(job), "records": [asdict(r) for r in records]}
    if isinstance(job, TimedRun):
        versions, timing = job.keep()
        tensors |= {name: _copy(t) for name, t in versions.items()}
        meta |= timing
    # If clients are in a file, the snapshot has the index of the file instead of their tensors. ``entered`` lists the
    # clients whose tensors are in the snapshot.
    if table is not None:
        index, kinds = table.mark()
        meta |= {"entered": [], "table": kinds}
        return Snapshot(tensors | index, meta, table.kept)
    states = dict(job.states)
    meta["entered"] = sorted(states)
    for client in meta["entered"]:
        tensors |= {f"client/{client}/{k}": _copy(t) for k, t in states[client].items()}
    return Snapshot(tensors | stored(job.states), meta)


def resume_job(job: RunState, state: Snapshot, table: Path | None = None) -> list[RoundRecord]:
    """Set a run to the state of a snapshot. Returns the records of its rounds.

    ``table`` is the file with the clients' tensors, if they are in a file. Raises FederatedRunError for the snapshot
    of another run.
    """
    expected = _meta(job)
    saved = dict(state.meta)
    if isinstance(saved.get("clients"), list):  # earlier releases wrote all names
        saved["clients"] = digest_of_names(saved["clients"])
    for key in ("version", "method", "seed", "dtype", "clients"):
        found = saved.get(key)
        if found != expected[key]:
            raise FederatedRunError(
                f"The saved state has {key} {found!r}, but the run has {expected[key]!r}.",
                "Resume with the configuration that was saved, or start again without the saved state.",
            )
    # Tensors are copied to the run's device, so that the snapshot shares no memory with the run. Tensors under other
    # names are read by ``StateTable``, ``TimedRun.take_up`` and ``gram_states.restore``.
    server = {}
    states: dict[int, Tree] = {int(c): {} for c in state.meta["entered"]}
    for key, t in state.tensors.items():
        owner, name = key.split("/", 1)
        if owner == "server":
            server[name] = t.to(job.env.device, copy=True)
        elif owner == "client":
            client, name = name.split("/", 1)
            states[int(client)][name] = t.to(job.env.device, copy=True)
    job.server = server
    if state.meta.get("table") is not None and table is not None:
        clients = len(job.training_clients)
        job.states.move(StateTable(table, clients, job.env.device, state))
    for number, tree in states.items():
        job.states[number] = tree
    if isinstance(job, TimedRun):
        job.take_up(state.tensors, state.meta)
    job.round = int(state.meta["round"])
    job.traffic = Traffic.from_json(state.meta["traffic"], len(job.clients))
    job.met[state.meta["met"]] = True
    return [RoundRecord.from_json(r) for r in state.meta["records"]]
