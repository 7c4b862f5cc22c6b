"""What a run will need of memory at its peak, before anything is computed.

The parts are those that grow: features, packed rows and Gram matrices, what clients keep, uploads under way, and a
chunk's working set. What Python and torch take by themselves is not counted. Uploads are taken to be as large as the
model, which no method exceeds by more than its counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedcache.errors import MachineError
from fedcache.federate.engine.local_training import GATHER_BYTES
from fedcache.federate.execution.cache import MEMO_BYTES
from fedcache.federate.execution.gram_matrices import CACHE_BYTES
from fedcache.federate.execution.grid_cache import POOLED
from fedcache.federate.execution.load import ExecutionPlan, Load

SLACK = 16 << 20
"""What allocators keep besides: seen with 1,000 and 10,000 clients, whatever the method."""

SCORES = 4096
"""Rows scored at once in evaluation, as in ``evaluate.BLOCK``."""


@dataclass(frozen=True)
class Forecast:
    """Bytes at the peak, by what they are for.

    Attributes:
        features: rows of all backbones, in the dtype computed in.
        grams: packed rows and Gram matrices of ``gram``.
        states: what clients keep between rounds, all that will ever take part, for all points.
        server: what the server holds, sends and merges.
        working: a chunk of clients in training.
        scoring: a block of test rows.
    """

    features: int
    grams: int
    states: int
    server: int
    working: int
    scoring: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.features + self.grams + self.states + self.server + self.working + self.scoring

    @property
    def above(self) -> int:
        """All but the features."""
        return self.total - self.features

    def to_dict(self) -> dict[str, int]:
        """Plain JSON values, with ``total``."""
        return {**self.__dict__, "total": self.total}

    def words(self) -> str:
        """For a person."""
        parts = ", ".join(f"{k} {v / 2**20:,.0f}" for k, v in self.__dict__.items() if v >= 1 << 20)
        return f"{self.total / 2**20:,.0f} MiB at the peak ({parts})"


def forecast(load: Load, plan: ExecutionPlan, *, opt: str, stacked: bool, closed: bool = False) -> Forecast:
    """The peak of a run.

    Args:
        load: sizes.
        plan: how it is computed.
        opt: adam | sgd; what the optimiser keeps beside weights and gradient.
        stacked: whether uploads are kept one by one until the round ends (``pool`` has a ``stack``).
        closed: whether uploads are sums of products of features, D x D in float64, and not a model.
    """
    points = 1 if plan.name == "sequential" else plan.points
    longest = max(load.rows, default=0)
    # weights, gradient, the optimiser's moments, and one temporary of an update
    copies = 5 if opt == "adam" else 4
    at_once = plan.chunk * points
    row = load.width * load.itemsize
    gathered = min(GATHER_BYTES, plan.chunk * longest * row) + at_once * min(longest, 64) * (row + 64)
    grams = 0
    if plan.name == "gram":
        few = max(load.dual_rows(), default=0)
        coordinates = at_once * (few + 2) * max(1, load.outputs) * load.itemsize
        working = copies * coordinates + plan.rest * load.head_bytes * copies
        grams = load.gram_bytes() + min(CACHE_BYTES, plan.chunk * few * few * load.itemsize)
    else:
        working = copies * at_once * load.head_bytes + gathered
    working += SLACK
    if plan.name == "sequential":
        cut = sum(load.rows) * load.views * row
        working += cut if cut <= MEMO_BYTES else 0
        if load.points > 1:  # first weights too
            working += min(MEMO_BYTES - (cut if cut <= MEMO_BYTES else 0), len(load.rows) * load.head_bytes)
    uploads = load.clients if stacked else plan.chunk
    # the upload of a chunk, its float64 sum, the server's own copy and what it sends
    server = points * (load.upload_bytes * (uploads + 2) + load.server_bytes * 2)
    if closed:
        # a client's, their sum, and the solver's two copies; sums that other points may want, and their eigenvalues
        server += (4 + (POOLED + 1 if load.points > 1 else 0)) * load.width**2 * 8
    return Forecast(
        features=load.feature_bytes,
        grams=grams,
        states=load.points * len(load.rows) * load.state_bytes,
        server=server,
        working=working,
        scoring=SCORES * (row + 8 * load.itemsize * max(1, load.outputs)),
    )


def refuse_too_much(found: Forecast, load: Load, plan: ExecutionPlan, free: int, *, loaded: bool) -> None:
    """Refuse a run that does not fit into free memory, with what would.

    Args:
        found: from ``forecast``.
        load: its sizes.
        plan: how it would be computed.
        free: bytes.
        loaded: whether the features are in memory already.

    Raises:
        MachineError.
    """
    needed = found.above if loaded else found.total
    if needed <= free:
        return
    spare = free - (needed - found.working)
    per_client = found.working / max(1, plan.chunk)
    fits = int(spare // per_client) if per_client else 0
    hint = (
        f"At most {fits} clients at once fit: the engine takes {plan.chunk}; --execution sequential takes one."
        if 0 < fits < plan.chunk
        else "Fewer clients a round (--participation), a smaller head, or fewer points at once would fit."
    )
    raise MachineError(f"The run needs {found.words()}, and {free / 2**20:,.0f} MiB are free.", hint)
