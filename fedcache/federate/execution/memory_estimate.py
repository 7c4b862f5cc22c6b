"""Estimates the peak memory of a run from its sizes and its execution, and refuses a run that does not fit.

The estimate covers the parts that grow with a run: features, packed rows and Gram matrices, client states, uploads, and
the working set of a chunk of clients. It does not cover Python and torch themselves. Uploads are assumed to be as large
as the model; no method sends more than the model and its counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch

from fedcache.errors import MachineError
from fedcache.federate.engine.context import MEMO_BYTES, POOLED
from fedcache.federate.engine.local_training import GATHER_BYTES
from fedcache.federate.engine.method import Method
from fedcache.federate.engine.run_state import RunState
from fedcache.federate.engine.simulated_time import TimedRun
from fedcache.federate.execution.gram_matrices import CACHE_BYTES
from fedcache.federate.execution.gram_states import is_first
from fedcache.federate.partition.client_table import train_sizes
from fedcache.heads.linear import Tree
from fedcache.store.files import disk_free, free_memory

WORKING_SET = 8 << 20
"""Limit in bytes for four copies of a chunk's parameters (weights, gradient, momentum, output): they fit the cache."""

LARGE_SET = 32 << 20
"""The same limit for few clients with large heads, which may use the cache that the cores share."""

GPU_SET = 512 << 20
"""The same limit on a GPU, where more clients and configurations share the time of a kernel launch."""

GRID_SET = 128 << 20
"""The same limit for the configurations of a grid, where sharing rows saves more time than the cache."""

SKINNY = 15
"""Number of outputs at which an epoch in ``batched`` takes as long as the two thin products of a round in ``gram``.

Measured on one core with 10 to 100 classes, 1 to 5 epochs and 50 to 500 rows of 1,024 features.
"""

STATES = 256 << 20
"""Limit in bytes for client states in memory. Larger states are in a file of the run, except in ``gram``."""

SLACK = 16 << 20
"""Bytes that allocators need in addition, measured with 1,000 and 10,000 clients."""

COPIES = 5
"""Copies of a server's tensors for each client: old, new and sent ones, and two for methods that compare with them."""

SCORES = 4096
"""Number of rows that are scored at once, as ``evaluate.BLOCK``."""


@dataclass(frozen=True)
class Load:
    """Sizes of a run that determine its memory."""

    head_bytes: int  # of the tensors that one client trains
    clients: int  # sampled per round
    outputs: int = 0  # of the first linear map
    # Training rows of every client that may take part.
    rows: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    participants: int = 0  # upper bound of the clients that take part in some round
    width: int = 0  # D
    itemsize: int = 4  # bytes of a number
    views: int = 1  # stored per row
    points: int = 1  # of a grid, computed together
    upload_bytes: int = 0  # of one client's upload
    server_bytes: int = 0  # of the server's tensors
    state_bytes: int = 0  # that a client keeps between rounds
    feature_bytes: int = 0  # of all rows
    broadcast_bytes: int = 0  # of the broadcast without the first map; losses compare with it
    batch: int = 32  # rows of a step
    versions: int = 0  # older models of the server from which clients in training started
    mixed: bool = False  # whether clients differ in more than their rows (``client_overrides``)
    rounds: int = 1  # in all
    device: str = "cpu"  # that computes: cpu | cuda

    def dual_rows(self) -> np.ndarray:
        """Rows of the clients for which ``gram`` needs less work: at most half as many as features."""
        return self.rows[2 * self.rows <= self.width]

    def worth(self, epochs: int) -> int:
        """Rows of the clients for which ``gram`` is faster than ``batched``.

        In every round ``gram`` multiplies all rows with the broadcast and with the result, which takes as long as
        ``SKINNY`` outputs in an epoch of ``batched``. Its savings grow with outputs and epochs.
        """
        # Training on n rows takes n^2 operations in coordinates and n D otherwise. For clients with up to ``most`` rows
        # coordinates are faster; without the thin products of a round the limit would be D / 2.
        work = self.outputs * max(1, epochs)
        most = self.width * work / (2.0 * (work + SKINNY))
        return int(self.rows[self.rows <= most].sum())

    def gram_bytes(self) -> int:
        """Bytes of Gram matrices and packed rows of the clients in ``dual_rows``."""
        n = self.dual_rows()
        return int((n * n + n * self.width).sum()) * self.itemsize

    def kept_bytes(self) -> int:
        """Bytes of the states of all participants between rounds, for all points."""
        return self.points * self.participants * self.state_bytes


@dataclass(frozen=True)
class ExecutionPlan:
    """Execution of a run: the executor, and how many clients and points it computes at once."""

    name: str  # of the executor
    chunk: int  # clients at once; 1 for one by one
    points: int = 1  # of a grid, at once
    # Under ``gram``: clients at once among those with too many rows for coordinates.
    rest: int = 1


def states_in_file(load: Load, plan: ExecutionPlan) -> bool:
    """Whether client states are in a file; ``gram`` keeps small coordinates in memory instead."""
    return plan.name != "gram" and load.kept_bytes() > STATES


def free_memory_on(device: str) -> int:
    """Bytes of memory available on a device, for a GPU as torch reports it."""
    if device != "cuda":
        return free_memory()
    # Memory that torch keeps after its tensors were freed.
    held = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    free, _total = torch.cuda.mem_get_info()
    return int(free) + held


def shares_uploads(method: Method) -> bool:
    """Whether runs that differ only in hyperparameters of the server have the same uploads, and can share them."""
    return method.one_shot and not method.gradient and not method.central


def measure_load(jobs: Sequence[RunState], clients: int, rounds: int) -> Load:
    """Sizes of the points of a grid.

    ``jobs`` are the started points; ``clients`` are sampled in each of the ``rounds``. In addition to its rows, a
    client holds its state and the broadcast.
    """
    job = jobs[0]
    # One client has the sizes of all, because clients differ only in rows.
    first = int(job.eligible[0])
    down = job.down()
    kept = job.method.enter(down, job.rows([first], 0), job.ctx([first], 0))
    # What a client trains: its state and the broadcast, without tensors per row and tensors of its optimiser.
    both = {**down, **kept}
    held = {k: t for k, t in both.items() if not k.startswith(("rows/", "opt/"))}
    compared = {k: t for k, t in down.items() if not is_first(k)}
    return Load(
        head_bytes=_bytes(held),
        clients=clients,
        outputs=sum(t.shape[-2] for k, t in held.items() if is_first(k)),
        rows=train_sizes(job.training_clients)[job.eligible],
        participants=min(len(job.eligible), clients * rounds),
        width=job.data.x.shape[2],
        itemsize=job.env.dtype.itemsize,
        views=job.env.views,
        points=len(jobs),
        upload_bytes=_upload_bytes(job, kept),
        server_bytes=_bytes(job.server),
        state_bytes=_bytes(kept),
        feature_bytes=job.data.x.nbytes,
        broadcast_bytes=_bytes(compared),
        batch=cast(int, job.hp.get("batch", 32)),
        versions=_versions(job, clients, rounds),
        mixed=bool(job.overrides),
        rounds=rounds,
        device=job.env.device.type,
    )


def _versions(job: RunState, clients: int, rounds: int) -> int:
    """Number of models that an asynchronous server keeps, one for each of its steps while a client trains.

    In four times the mean duration, the server takes about 4 ``clients`` / K steps. One half-normal duration in 700 is
    longer; each client that is slower needs one model more.
    """
    if not isinstance(job, TimedRun) or job.rule.buffer is None:
        return 0
    return min(rounds, 4 * clients // job.rule.buffer + 1)


def _upload_bytes(job: RunState, kept: Tree) -> int:
    """Bytes of one client's upload, estimated by the server's tensors of the same names.

    A server that stacks uploads holds the tensors of all clients under these names, so the tensors of one client are
    counted instead.
    """
    total = 0
    for prefix, rule in job.method.pool(job.hp).items():
        named = {k: t for k, t in job.server.items() if k.startswith(prefix)}
        if rule == "stack":
            of_client = {k: t for k, t in kept.items() if k.startswith(prefix)}
            named = of_client or named
        if not named:
            return _bytes(job.server)  # other names, such as sums: assumed as large as the model
        total += _bytes(named)
    return total


def _bytes(tree: Tree) -> int:
    return sum(t.nbytes for t in tree.values())


@dataclass(frozen=True)
class Forecast:
    """Bytes at the peak, by use."""

    features: int  # rows of all backbones, in the dtype of the computation
    grams: int  # packed rows and Gram matrices of ``gram``
    states: int  # states of all participants, for all points; 0 if they are in a file
    server: int  # the server's tensors, its broadcast and pooled uploads
    working: int  # a chunk of clients in training
    scoring: int  # a block of test rows

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.features + self.grams + self.states + self.server + self.working + self.scoring

    @property
    def above(self) -> int:
        """The sum of all parts without the features."""
        return self.total - self.features

    def to_dict(self) -> dict[str, int]:
        """Plain JSON values, with ``total``."""
        return {**self.__dict__, "total": self.total}

    def words(self) -> str:
        """The peak and its parts of at least 1 MiB, in words."""
        large = {name: size for name, size in self.__dict__.items() if size >= 1 << 20}
        parts = ", ".join(f"{name} {size / 2**20:,.0f}" for name, size in large.items())
        return f"{_mib(self.total)} at the peak ({parts})"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


def forecast(
    load: Load, plan: ExecutionPlan, *, opt: str, stacked: bool, closed: bool = False
) -> Forecast:
    """The peak of a run.

    Args:
        load: sizes.
        plan: its execution.
        opt: adam | sgd; determines the optimiser's tensors.
        stacked: whether uploads are kept one by one until the round ends (``pool`` has a ``stack``).
        closed: whether uploads are sums of products of features, D x D in float64, instead of a model.
    """
    points = plan.points
    if plan.name == "sequential":
        points = 1
    longest = int(load.rows.max(initial=0))
    # Weights, gradient, one temporary of an update, and one moment of the optimiser; adam has a second moment.
    copies = 4 + (opt == "adam")
    at_once = plan.chunk * points
    row = load.width * load.itemsize
    outputs = max(1, load.outputs)
    grams = 0
    if plan.name == "gram":
        few = int(load.dual_rows().max(initial=0))
        # (few + 2) rows of coordinates for each output, instead of weights [U, D].
        coordinates = at_once * (few + 2) * outputs * load.itemsize
        working = copies * coordinates + plan.rest * load.head_bytes * copies
        stacked_grams = min(CACHE_BYTES, plan.chunk * few * few * load.itemsize)
        grams = load.gram_bytes() + stacked_grams
    else:
        # The rows of a chunk that are gathered at once, and a batch of each client: at most 64 rows are assumed, with
        # 64 bytes of scores for each row.
        gathered = min(GATHER_BYTES, plan.chunk * longest * row)
        batches = at_once * min(longest, 64) * (row + 64)
        working = copies * at_once * load.head_bytes + gathered + batches
    working += SLACK
    if plan.name == "sequential":
        # Cut rows are cached if the rows of all clients fit into the cache.
        cut = int(load.rows.sum()) * load.views * row
        if cut > MEMO_BYTES:
            cut = 0
        working += cut
        if load.points > 1:  # initial weights are cached too
            working += min(MEMO_BYTES - cut, load.participants * load.head_bytes)
    uploads = plan.chunk
    if stacked:
        uploads = load.clients
    # The uploads of a chunk and their float64 sum; the server's own copy, its broadcast and older models.
    uploaded = load.upload_bytes * (uploads + 2)
    served = load.server_bytes * (2 + load.versions)
    server = points * (uploaded + served)
    if closed:
        # A client's matrix, the sum, and the solver's two copies; for a grid also cached sums and their eigenvalues.
        matrices = 4
        if load.points > 1:
            matrices += POOLED + 1
        server += matrices * load.width**2 * 8
    states = load.kept_bytes()
    if states_in_file(load, plan):
        states = 0
    return Forecast(
        features=load.feature_bytes,
        grams=grams,
        states=states,
        server=server,
        working=working,
        # The features of the rows, and eight tensors of their outputs.
        scoring=SCORES * (row + 8 * load.itemsize * outputs),
    )


def refuse_too_much(
    found: Forecast, load: Load, plan: ExecutionPlan, free: int, *, loaded: bool
) -> None:
    """Refuse a run that does not fit into free memory. Raises MachineError, with settings that would fit.

    ``free`` is in bytes; ``loaded`` says whether the features are in memory already.
    """
    needed = found.total
    if loaded:
        needed = found.above
    if needed <= free:
        return
    where = ""
    if load.device != "cpu":
        where = " of the GPU"
    peak = found.words()
    problem = f"The run needs {peak}, but {_mib(free)}{where} are free."
    # The bytes that the other parts leave. If states are the largest part, fewer participants help most, otherwise
    # fewer clients at once.
    for_states = free - (needed - found.states)
    if 2 * found.states > needed and for_states >= 0:
        hint = _fewer_participants(load, for_states, "use a smaller head")
        raise MachineError(problem, hint)
    for_working = free - (needed - found.working)
    per_client = found.working / max(1, plan.chunk)
    fits = int(for_working // per_client)
    hint = "Use fewer clients per round (--participation), a smaller head, or fewer configurations at once."
    if 0 < fits < plan.chunk:
        hint = (
            f"At most {fits} clients fit in memory at the same time, but this run trains {plan.chunk} clients "
            "together. To train one client after another: --execution sequential"
        )
    raise MachineError(problem, hint)


def refuse_large_server(job: RunState, free: int) -> None:
    """Refuse a run if the server's tensors do not fit into memory, before they are allocated for all clients.

    Raises MachineError, with the number of clients that would fit into ``free`` bytes.
    """
    method = job.method
    ctx = job.server_ctx()
    clients = job.env.clients
    if job.env.device.type != "cpu" or "stack" not in method.pool(job.hp).values():
        return
    if "text" in method.reads(job.hp) and job.env.text is None:
        return  # ``RunState.start`` refuses this run
    # The difference between two clients and one client is the size per client.
    envs = [replace(ctx.env, clients=n) for n in (1, 2)]
    one, two = (_bytes(method.init(replace(ctx, env=env))) for env in envs)
    each = COPIES * (two - one)
    needed = each * clients
    if needed > free:
        fit = free // each
        raise MachineError(
            f"The server of {method.name} keeps data of every client and sends it to all clients. For "
            f"{clients:,} clients this takes {_mib(needed)}, but {_mib(free)} are free.",
            f"At most {fit:,} clients fit in memory: fedcache partition --clients N",
        )


def refuse_too_little_room(load: Load, plan: ExecutionPlan, place: Path) -> None:
    """Refuse a run whose client states do not fit on the disk of ``place``. Raises MachineError.

    State files from an earlier start of the run count as free space.
    """
    if not states_in_file(load, plan):
        return
    reused = sum(file.stat().st_size for file in place.rglob("states-*.table"))
    free = disk_free(place) + reused
    needed = load.kept_bytes()
    if needed > free:
        raise MachineError(
            f"{load.participants:,} clients take part, and their state between rounds takes {_mib(needed)}, but "
            f"{_mib(free)} are free in {place}.",
            _fewer_participants(load, free, "use another disk with --runs DIR"),
        )


def _fewer_participants(load: Load, room: int, other: str) -> str:
    """The hint for states that may take ``room`` bytes: options for the clients that fit, or ``other`` if none does."""
    # At most (clients per round) x (rounds) clients take part.
    fits = room // (load.points * load.state_bytes)
    if not fits:
        return f"There is no space even for one client, so {other}."
    a_round = max(1, fits // load.rounds)
    rounds = min(fits, load.rounds)
    return (
        f"There is space for at most {fits:,} clients: --participation {a_round} --rounds {rounds}"
    )
