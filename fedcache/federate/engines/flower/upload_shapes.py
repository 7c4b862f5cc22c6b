"""What an upload of a run must look like, for the gate: known before the first one comes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from fedcache.federate.engine.local_training import batch_sizes
from fedcache.federate.engine.run_state import RunState
from fedcache.federate.partition.partition import Client
from fedcache.federate.trust.policy import TrustPolicy
from fedcache.federate.trust.update_validation import UpdateValidation
from fedcache.heads.linear import Tree

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def expected_upload(run: RunState) -> Shapes | None:
    """Names, shapes and types of an upload: of one that the method makes of a few rows of noise.

    No upload has an axis as long as its client's rows, so any rows will do. None for a method that cannot fit noise;
    then the uploads of a round are compared with one another.
    """
    C, V, D = run.env.classes, run.env.views, run.env.width
    n = max(8, C)
    while run.method.gradient and "batch" in run.hp and not batch_sizes(n, run.hp):
        n *= 2
    draw = np.random.default_rng(0)
    x = torch.from_numpy(draw.standard_normal((n, V, D), np.float32)).to(run.env.dtype)
    rows = np.arange(n)
    data = replace(run.data, x=x, y=torch.arange(n) % C, domain=torch.zeros(n, dtype=torch.int64))
    nobody = Client("", rows[:0], rows[:0])
    try:
        clients = [Client("/noise", rows, rows[:0]), *[nobody] * (len(run.lanes) - 1)]
        tried = RunState(run.method, run.hp, data, clients, 0, run.env.dtype, trust=TrustPolicy(on_bad="reject"))
        tried.start()
        return UpdateValidation.shape_of(tried.fit_one(tried.down(), 0))
    except Exception:  # a closed form may need more of its rows than noise has
        return None


def most_common(ups: Mapping[int, Tree]) -> dict[int, str]:
    """Clients whose uploads look otherwise than most, each with why; of equals the first client's look counts."""
    if not ups:
        return {}
    looks = {
        c: tuple(sorted(UpdateValidation.shape_of(up).items(), key=lambda item: item[0]))
        for c, up in sorted(ups.items())
    }
    usual = Counter(looks.values()).most_common(1)[0][0]
    gate = UpdateValidation(dict(usual), 0)
    return {c: str(gate.problem(ups[c], float("inf"))) for c, look in looks.items() if look != usual}
