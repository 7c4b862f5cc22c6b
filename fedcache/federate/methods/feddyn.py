"""FedDyn: each client's loss is changed round by round so that its minimum comes to lie where that of all clients does.

Acar et al., "Federated learning based on dynamic regularization", ICLR 2021, algorithm 1. Client i holds g_i, its last
gradient, the server h, both 0 at first. From the received w a client minimises
    F_i(u) - <g_i, u> + (alpha/2) |u - w|^2    by local epochs,    then    g_i <- g_i - alpha (u_i - w);
with S of M clients in the round the server sets
    h <- h - (alpha / M) sum_i (u_i - w),    w <- mean_i u_i - h / alpha.
The mean is uniform, as printed. h is the mean of all g_i, so a run that has come to rest has h = 0 and every client's
own gradient at w is g_i. Only models travel: a client makes g_i itself.

The paper trains by SGD with rate 0.1, which is kept on the released layers (``preset=official``); 0.01 is ours under
BatchNorm. It takes alpha from {0.1, 0.01, 0.001}; h / alpha is a step that grows as alpha falls, so small values want
long local training. BatchNorm's running statistics are averaged.

Released FedPCL code has no FedDyn; preset ``official`` is its setting of the other baselines (D-09, D-13).
Limits: the first round's models are those of ``fedprox`` with mu = alpha; at lr = 0 nothing moves.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedcache.federate.engine.context import dot, over
from fedcache.federate.engine.local_training import train
from fedcache.federate.methods import fedavg
from fedcache.federate.methods.common import ClientData, Ctx, HParam, Tree, model
from fedcache.federate.methods.common.switches import FEAT_POST, MODEL, TRAINING, declare, init_param, without
from fedcache.federate.methods.fedavgm import broadcast
from fedcache.federate.methods.fedprox import proximal


def init(ctx: Ctx) -> Tree:
    """Initial weights, and h = 0."""
    p = model.init(ctx)
    return {**p, **{f"h/{n}": torch.zeros_like(p[n]) for n in model.trained(ctx.hp)}}


def enter(down: Tree, _data: ClientData, ctx: Ctx) -> Tree:
    """g_i = 0, and what stays of BatchNorm."""
    kept = {k: down[k] for k in fedavg.own_statistics(ctx.hp)}
    return {**kept, **{f"g/{n}": torch.zeros_like(down[n]) for n in model.trained(ctx.hp)}}


def loss(p: Tree, batch: Tree, down: Tree, ctx: Ctx) -> tuple[Tensor, Tree]:
    """Cross-entropy - <g_i, u> + (alpha/2) |u - w|^2."""
    value, updates = model.ce_loss(p, batch, down, ctx)
    for n in model.trained(ctx.hp):
        value = value - dot(p[f"g/{n}"], p[n], ctx)
    return value + 0.5 * ctx.number("alpha") * proximal(p, down, ctx), updates


def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """Local epochs of that loss, then g_i by how far they went."""
    known, moved = {**down, **state}, model.trained(ctx.hp)
    p = {k: known[k] for k in (*model.names(ctx.hp), *(f"g/{n}" for n in moved))}
    p = train(p, moved, ctx.count("epochs"), loss, down, data, ctx)
    kept = {k: p[k] for k in fedavg.own_statistics(ctx.hp)}
    for n in moved:
        kept[f"g/{n}"] = state[f"g/{n}"] - over(ctx.number("alpha"), p[n]) * (p[n] - down[n])
    return kept, {k: p[k] for k in fedavg.sent_names(ctx.hp)}


def aggregate(server: Tree, up: Tree, ctx: Ctx) -> Tree:
    """h by the share of the clients that took part, then w; BatchNorm's statistics are averaged."""
    share, out = len(ctx.ids) / ctx.env.clients, {**server, **up}
    for n in model.trained(ctx.hp):
        alpha = over(ctx.number("alpha"), up[n])
        out[f"h/{n}"] = h = server[f"h/{n}"] - share * alpha * (up[n] - server[n])
        out[n] = up[n] - h / alpha
    return out


METHOD = replace(
    fedavg.METHOD,
    name="feddyn",
    paper="Acar et al., ICLR 2021",
    summary="FedAvg whose clients' losses are changed until their minima agree.",
    hparams=(
        *declare(FEAT_POST, MODEL, init_param(independent=False)),
        *without(declare(TRAINING, opt="sgd", momentum=0.0), "lr", "reset_opt"),
        HParam("lr", 0.01, "float", "learning rate", low=0.0, official=0.1),
        HParam("alpha", 0.1, "float", "strength of the pull, and of the change of the loss", low=1e-9),
    ),
    executions=("sequential", "batched"),  # g_i leaves the rows of the client
    init=init,
    enter=enter,
    fit=fit,
    pool=lambda _hp: {"": "uniform"},
    broadcast=broadcast,
    aggregate=aggregate,
)
