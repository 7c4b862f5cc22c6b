"""The sizes of a run, read off its state before the first round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from fedcache.federate.engine.run_state import RunState
from fedcache.federate.execution.gram_matrices import is_first
from fedcache.federate.execution.load import Load
from fedcache.heads.linear import Tree


def measure_load(jobs: Sequence[RunState], clients: int) -> Load:
    """Sizes of the points of a grid; what one client holds besides its rows is what it keeps and what it is sent.

    Args:
        jobs: the points, started; one is a run alone.
        clients: sampled a round.
    """
    job = jobs[0]
    first = job.eligible[0]
    down = job.down()
    kept = job.method.enter(down, job.rows([first], 0), job.ctx([first], 0))
    held = {k: t for k, t in {**down, **kept}.items() if not k.startswith(("rows/", "opt/"))}
    return Load(
        head_bytes=_bytes(held),
        clients=clients,
        outputs=sum(t.shape[-2] for k, t in held.items() if is_first(k)),
        rows=[len(job.training_clients[c].train) for c in job.eligible],
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
        mixed=bool(job.own),
    )


def _upload_bytes(job: RunState, kept: Tree) -> int:
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
