"""FLESD's server: a student learns the ensembled similarities of public rows (eqs 7 to 10).

The student starts at the broadcast weights w (D-38). The key encoder starts there too, and follows the student by an
exponential moving average. Its BatchNorm uses the student's running statistics or those of the batch (D-94). Anchors
are a FIFO queue of keys. Without a queue, as in the equations, every public row is an anchor, and all keys are computed
again in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedcache.errors import UsageError
from fedcache.federate.engine.context import writable_copies
from fedcache.federate.engine.local_training import fold_batches, opt_init, optimiser_step
from fedcache.federate.methods.common import (
    Batch,
    Batches,
    ClientData,
    Ctx,
    Hp,
    HParam,
    Tree,
    minibatches,
    select,
    simclr,
)
from fedcache.federate.methods.common.live_images import precision
from fedcache.heads.simclr import Ensemble, similarity_divergence

ALL = 4096
"""Number of public rows up to which ``anchors=auto`` uses all of them as anchors."""

DISTIL = (
    HParam("tau_T", 0.1, "float", "temperature of the ensemble (eq 5)", low=1e-6),
    HParam("tau_S", 0.1, "float", "temperature of the student (eq 7)", low=1e-6),
    HParam(
        "zeta",
        0.999,
        "float",
        "share of the old key encoder that each update keeps (eq 10)",
        low=0.0,
        high=1.0,
    ),
    HParam(
        "anchors",
        "auto",
        "choice",
        "queue: a queue of keys; all: all public rows; auto: all for up to 4,096 public rows, "
        "else queue",
        choices=("auto", "all", "queue"),
        official="queue",
    ),
    HParam(
        "queue", 2048, "int", "length K_q of the queue; it must be a multiple of esd_batch", low=1
    ),
    HParam(
        "queue_warm",
        True,
        "bool",
        "fill the queue with keys before the first step (D-34)",
        official=False,
    ),
    HParam(
        "key_mode",
        "eval",
        "choice",
        "BatchNorm statistics for the keys of a queue: running statistics for 'eval', statistics of "
        "the batch for 'train' (D-94)",
        choices=("eval", "train"),
        official="train",
    ),
    HParam(
        "ema",
        "after",
        "choice",
        "when eq 10 updates the key encoder; after: after the step; before: before the keys of a "
        "batch are computed; filled: as 'before', except while the queue is being filled (D-95)",
        choices=("after", "before", "filled"),
        official="before",
    ),
    HParam(
        "exclude_self",
        False,
        "bool",
        "leave the key of a query's own row out of its anchors (D-35)",
    ),
    HParam(
        "sim_at",
        "projection",
        "choice",
        "layer whose outputs are compared (D-32)",
        choices=("projection", "trunk"),
    ),
    HParam(
        "sim_topk_percent",
        100.0,
        "float",
        "percentage of the similarities of each row that is kept; the largest are kept",
        low=1e-3,
        high=100,
    ),
    HParam(
        "sim_topk_own",
        False,
        "bool",
        "how many similarities of a row are kept; true: the percentage rounded down, and the row's "
        "similarity to itself; false: the percentage rounded, with the row's similarity to itself "
        "among them (D-96)",
        official=True,
    ),
    HParam("esd_epochs", 200, "int", "epochs of distillation per round", low=0),
    HParam("esd_batch", 256, "int", "batch of the distillation", low=1),
    HParam(
        "esd_drop_last",
        False,
        "bool",
        "leave out the shorter last batch of the distillation (D-93)",
        official=True,
    ),
    HParam(
        "esd_lr",
        1e-3,
        "float",
        "Adam learning rate of the distillation, with weight decay wd",
        low=0.0,
    ),
)


def unit(p: Tree, x: Tensor, ctx: Ctx) -> Tensor:
    """Unit vectors of stored rows x [.., N, D] whose similarities are compared: projections or trunk outputs."""
    z = simclr.represent(p, x, ctx, project=ctx.hp["sim_at"] == "projection")
    return normalize(z, dim=-1)


@dataclass
class Queue:
    """Queue of keys, in which new keys overwrite the oldest."""

    keys: Tensor  # [K, d]
    rows: Tensor  # [K], the numbers of the keys' public rows
    # Number of keys pushed since the start, or with ``queue_warm=false`` since the start of the epoch. The next key
    # gets the slot ``at`` modulo K.
    at: int = 0

    def push(self, keys: Tensor, rows: Tensor) -> None:
        """Add a batch of keys, those of the public rows ``rows``."""
        size = len(self.rows)
        # A batch has one row more than the queue if a last single row joined a batch as long as the queue. Only the
        # last keys are kept then, because two keys in one slot may be written in any order.
        rows = rows[-size:]
        slots = (self.at + torch.arange(len(rows), device=rows.device)) % size
        self.keys[slots] = keys[-size:]
        self.rows[slots] = rows
        self.at += len(rows)


def queued(hp: Hp, rows: int) -> bool:
    """Whether anchors come from a queue."""
    return hp["anchors"] == "queue" or (hp["anchors"] == "auto" and rows > ALL)


def check(hp: Hp, ctx: Ctx) -> None:
    """Refuse a queue that is longer than the public rows or not whole batches, and settings without a training step."""
    simclr.check(hp, ctx)
    rows = len(ctx.public)
    size = ctx.count("queue")
    batch = ctx.count("esd_batch")
    whole = min(batch, rows)  # rows of a whole batch
    with_queue = queued(hp, rows)
    if with_queue and (size > rows or size % whole):
        nearest = max(min(rows, size) // whole, 1) * whole
        raise UsageError(
            f"queue={size} must be a multiple of {whole}, the number of rows in a batch (esd_batch={batch}), and at "
            f"most {rows}, the number of public rows.",
            f"For example --set queue={nearest}, or --set anchors=all.",
        )
    steps = -(-rows // batch)
    if hp["esd_drop_last"]:
        steps = rows // batch
        if not steps:
            raise UsageError(
                f"esd_drop_last=true skips batches with fewer than esd_batch={batch} rows, but there are only {rows} "
                "public rows.",
                f"For example --set esd_batch={rows}, or --set esd_drop_last=false.",
            )
    filled_again = with_queue and not hp["queue_warm"]
    if filled_again and steps <= size // whole:
        raise UsageError(
            f"With queue_warm=false, the queue is filled again in every epoch. For queue={size} this takes all {steps} "
            f"batches of the {rows} public rows, so no step is left for training.",
            "For example --set queue_warm=true, or smaller values of queue and esd_batch.",
        )


def distil(w: Tree, target: Ensemble, ctx: Ctx) -> Tree:
    """The student after ``esd_epochs`` epochs.

    Args:
        w: weights and buffers of the encoder, from which student and key encoder start.
        target: the ensembled similarities of the public rows.
        ctx: the server's; reads ``public`` [Np, V, D].

    Returns:
        The tensors of ``w``, distilled.
    """
    hp = ctx.hp
    ctx = ctx.with_hp(
        opt="adam",
        lr=hp["esd_lr"],
        batch=hp["esd_batch"],
        drop_last=hp["esd_drop_last"],
        # With BatchNorm, a last batch of one image joins the batch before it, because one image has no variance.
        bn=simclr.on_images(hp),
    )
    public = ctx.public[:, 0]
    every = torch.arange(target.size, device=ctx.env.device)
    # Without a queue every public row is an anchor, and its key is made again in each step.
    queue = None
    if queued(hp, target.size):
        queue = _filled_queue(w, every, ctx)
    zeta = ctx.scalar("zeta")
    ema = hp["ema"]
    names = simclr.trained(hp)
    if hp["sim_at"] != "projection":
        # Only trunk outputs are compared, so the projection is not trained.
        names = tuple(name for name in names if name.startswith("t."))
    take_step = optimiser_step(_loss(target), names, {})
    batch_statistics = hp["key_mode"] == "train"

    def follow(p: Tree) -> None:
        """Move the key encoder towards the student (eq 10)."""
        for name in names:
            p[f"key/{name}"].lerp_(p[name], 1.0 - zeta)

    def step(p: Tree, batch: Batch, ctx: Ctx) -> Tree:
        filling = False
        if queue is not None and not hp["queue_warm"]:
            filling = queue.at + len(batch["i"]) <= len(queue.rows)
        if ema == "before" or (ema == "filled" and not filling):
            follow(p)
        key = {name: p[f"key/{name}"] for name in w}
        if queue is None:
            batch = {**batch, "keys": unit(key, public, ctx), "anchors": every}
        else:  # keys are pushed before the logits are computed, so each query meets its own key (D-35)
            with torch.no_grad():
                view = batch.get("x2", batch["x"])
                keys, _ = _embed(key, view, ctx, training=batch_statistics)
                queue.push(keys, batch["i"])
            batch = {**batch, "keys": queue.keys, "anchors": queue.rows}
        # With ``queue_warm=false`` the queue is filled again in every epoch. A batch that only fills the queue takes no
        # step (D-34), also the batch that makes it full, but the student's BatchNorm reads these batches.
        if filling:
            updates = _batchnorm_updates(p, batch, ctx)
        else:
            updates = take_step(p, batch, ctx)
        if ema == "after" and not filling:
            follow(p)
        # ``take_step`` changes the weights in place. ``updates`` are only the running statistics of the student's
        # BatchNorm, which the key encoder copies.
        key_updates = {f"key/{name}": t.clone() for name, t in updates.items()}
        return {**updates, **key_updates}

    first_key = {f"key/{name}": t for name, t in w.items()}
    carry = writable_copies({**w, **first_key, **opt_init(w, names, ctx)}, ctx)
    # The public rows, as the rows of one client.
    views = _views(ClientData(ctx.public, y=None, rows=every, n=(target.size,)), ctx)
    for epoch in range(ctx.count("esd_epochs")):
        if queue is not None and not hp["queue_warm"]:
            queue.at = 0
        carry = fold_batches(carry, views(carry, epoch), step, ctx)
    return select(carry, w)


def _views(data: ClientData, ctx: Ctx) -> Callable[[Tree, int], Batches]:
    """Batches with one view for the query and another for the key; without augmentation, the plain row for both."""
    if ctx.env.image or data.x.shape[1] > 1:
        return simclr.pairs(data, ctx)
    return lambda _p, epoch: minibatches(data, ctx, epoch)


def _embed(p: Tree, x: Tensor, ctx: Ctx, *, training: bool) -> tuple[Tensor, Tree]:
    """``unit`` of a batch that is already in the encoder's input format, and BatchNorm's updates."""
    encoder = simclr.encoder_of(ctx.hp)
    with precision(ctx):
        h, updates = encoder.trunk(p, x, training=training)
        z = h
        if ctx.hp["sim_at"] == "projection":
            z = encoder.project(p, h)
    return normalize(z.to(ctx.env.dtype), dim=-1), updates


def _batchnorm_updates(p: Tree, batch: Batch, ctx: Ctx) -> Tree:
    """BatchNorm's updates by a batch on which no step is taken."""
    encoder = simclr.encoder_of(ctx.hp)
    if not encoder.buffers():
        return {}
    with torch.no_grad(), precision(ctx):
        return encoder.trunk(p, batch["x"], training=True)[1]


def _loss(target: Ensemble) -> Callable[[Tree, Batch, Tree, Ctx], tuple[Tensor, Tree]]:
    """L_ESD of a batch against the ensembled similarities, and BatchNorm's updates."""

    def loss(p: Tree, batch: Batch, _down: Tree, ctx: Ctx) -> tuple[Tensor, Tree]:
        z, updates = _embed(p, batch["x"], ctx, training=True)
        exclude_self = bool(ctx.hp["exclude_self"])
        q = target.targets(batch["i"], batch["anchors"], exclude_self=exclude_self).to(z.dtype)
        tau = ctx.scalar("tau_S")
        value = similarity_divergence(z, batch["keys"], q, batch["w"], tau)
        return value, updates

    return loss


def _filled_queue(w: Tree, every: Tensor, ctx: Ctx) -> Queue:
    """A queue with the keys that the weights ``w`` give to K_q random public rows.

    With ``queue_warm=false`` no step reads these keys, because every epoch first overwrites all of them.
    """
    # Random rows, because public rows may be sorted by class. At the server, ``each`` makes one draw.
    order = ctx.rng.each("queue", lambda g, _client: g.permutation(len(every)))
    rows = every[order[: ctx.count("queue")]]
    keys = unit(w, ctx.public[rows, 0], ctx)
    return Queue(keys, rows.clone())
