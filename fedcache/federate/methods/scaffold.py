"""SCAFFOLD: control variates take the clients' drift out of local training.

Clients with different data pull the model in different directions. SCAFFOLD estimates the direction of each client and
of all clients (control variates), and corrects every local step by their difference. Clients send the model and their
control variate.

Karimireddy et al., "SCAFFOLD: stochastic controlled averaging for federated learning", ICML 2020. The server holds x
and c, and client i holds c_i. The variates c and c_i are 0 at first. A client takes K steps of plain SGD from y = x,
    y <- y - lr (g(y) - c_i + c),    then    c_i+ = c_i - c + (x - y) / (K lr)      (option II)
and sends y and c_i+ - c_i; with S clients of M the server sets
    x <- x + (lr_g / S) sum_i (y_i - x),    c <- c + (1 / M) sum_i (c_i+ - c_i).
The correction is the linear term <c - c_i, y> of the loss; decay counts as part of the loss.

Option II computes the mean gradient from the change of the weights, which is right only for plain SGD: there is no
other ``opt``, and momentum must be 0. Both means are uniform, as printed. A run that has converged has c = 0, so with
weights n_i for x alone it would not minimise the weighted loss. K lr = 0 keeps c_i. The paper tunes lr; 0.1 is ours,
and 1 on the released layers (``preset=official``), as plain SGD is slow on projections of unit length.

The released FedPCL code has no SCAFFOLD, so preset ``official`` uses that code's settings of its other baselines (D-02,
D-09, D-13; docs/readings.md).
Special cases: while c and all c_i are 0 (round 1) it is ``fedavg`` with ``agg=uniform`` bit for bit; c is the mean of
all c_i.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedcache.federate.methods import fedavg
from fedcache.federate.methods.common import (
    FEAT_POST,
    INIT,
    MODEL,
    TRAINING,
    ClientData,
    Ctx,
    Hp,
    HParam,
    MethodPage,
    Tree,
    Uploads,
    UploadTensor,
    declare,
    dot,
    local_steps,
    model,
    over,
    select,
    train,
    without,
)

PLAIN = (
    HParam(
        "opt", "sgd", "choice", "optimiser; option II holds only for plain SGD", choices=("sgd",)
    ),
    HParam(
        "momentum",
        0.0,
        "float",
        "momentum of SGD; option II holds only for plain SGD",
        low=0.0,
        high=0.0,
    ),
)


def init(ctx: Ctx) -> Tree:
    """Initial weights, and c = 0."""
    p = model.init(ctx)
    return {**p, **model.zeros_for(p, "c/", ctx)}


def enter(down: Tree, _data: ClientData, ctx: Ctx) -> Tree:
    """c_i = 0, and the BatchNorm statistics that stay with the client."""
    kept = select(down, fedavg.own_statistics(ctx.hp))
    return {**kept, **model.zeros_for(down, "c/", ctx)}


def loss(p: Tree, batch: Tree, down: Tree, ctx: Ctx) -> tuple[Tensor, Tree]:
    """Cross-entropy plus <c - c_i, y>."""
    value, updates = model.ce_loss(p, batch, down, ctx)
    for name in model.trained(ctx.hp):
        value = value + dot(p[f"shift/{name}"], p[name], ctx)
    return value, updates


def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """Corrected local epochs, then c_i by option II."""
    p = select({**down, **state}, model.names(ctx.hp))
    # c - c_i is constant during a round, so its product with the weights can stand in the loss.
    for name in model.trained(ctx.hp):
        p[f"shift/{name}"] = down[f"c/{name}"] - state[f"c/{name}"]
    p = train(p, model.trained(ctx.hp), ctx.count("epochs"), loss, down, data, ctx)
    distance = ctx.number("lr") * local_steps(data, ctx).to(ctx.env.dtype)  # K lr, [*lead]
    kept = select(p, fedavg.own_statistics(ctx.hp))
    up = select(p, fedavg.sent_names(ctx.hp))
    for name in model.trained(ctx.hp):
        old = state[f"c/{name}"]
        # Option II of the paper: the mean gradient of all steps. A client without a step keeps its variate.
        length = torch.as_tensor(over(distance, p[name]))
        divisor = torch.where(length > 0, length, 1.0)
        new = (down[name] - p[name]) / divisor - p[f"shift/{name}"]
        kept[f"c/{name}"] = torch.where(length > 0, new, old)
        up[f"c/{name}"] = kept[f"c/{name}"] - old
    return kept, up


def uploads(server: Tree, ctx: Ctx) -> Uploads:
    """The weights, and by how much c_i has changed."""
    sent = dict(fedavg.uploads(server, ctx))
    for name in model.trained(ctx.hp):
        variate = UploadTensor.like(server[f"c/{name}"])
        sent[f"c/{name}"] = replace(variate, is_step=True)
    return sent


def aggregate(server: Tree, up: Tree, ctx: Ctx) -> Tree:
    """x moves by lr_g, and c by the share of clients that took part; BatchNorm's statistics are averaged."""
    share = len(ctx.ids) / ctx.env.clients
    lr_g = ctx.number("lr_g")
    out = {**server, **up}
    for name in model.trained(ctx.hp):
        out[f"c/{name}"] = server[f"c/{name}"] + share * up[f"c/{name}"]
        if isinstance(lr_g, Tensor) or lr_g != 1.0:  # for 1, ``out`` has the mean, without rounding
            out[name] = server[name] + over(lr_g, up[name]) * (up[name] - server[name])
    return out


def paper_count(width: int, classes: int, _clients: int, hp: Hp) -> tuple[int, int]:
    """All weights and their variates, both ways."""
    n = 2 * model.head_of(hp).paper_weights(width, classes)
    return n, n


METHOD = replace(
    fedavg.METHOD,
    executions=("sequential", "batched"),  # not gram: c is no combination of a client's rows
    name="scaffold",
    paper="Karimireddy et al., ICML 2020",
    summary="FedAvg with control variates against client drift; twice the traffic.",
    hparams=(
        *declare(FEAT_POST, MODEL, INIT),
        *PLAIN,
        *without(TRAINING, "opt", "lr", "momentum", "reset_opt"),
        HParam("lr", 0.1, "float", "learning rate", low=0.0, official=1.0),
        HParam("lr_g", 1.0, "float", "the server's step towards the mean of the clients", low=0.0),
    ),
    init=init,
    enter=enter,
    fit=fit,
    uploads=uploads,
    pool=lambda _hp: {"": "uniform"},
    aggregate=aggregate,
    paper_count=paper_count,
    uneven_rows="the control variates of clients are averaged with equal weights",
    page=MethodPage(
        family="Many rounds, one model",
        formula=r"""
            \begin{aligned}
            y_i &\leftarrow y_i - \eta\, \big(g_i(y_i) - c_i + c\big),
                \qquad c_i^{+} = c_i - c + \frac{w - y_i}{K \eta} \\
            w &\leftarrow w + \frac{\eta_g}{S} \sum_i (y_i - w),
                \qquad c \leftarrow c + \frac{1}{M} \sum_i (c_i^{+} - c_i)
            \end{aligned}
        """,
        terms=r"""
            $w$: the global model; $y_i$: the model of client $i$; $g_i$: its gradient; $c_i$, $c$: control variates of
            client and server; $K$: local steps; $S$ of $M$ clients take part; $\eta$, $\eta_g$: the learning rates of
            clients and server.
        """,
        when="""
            Use it against client drift if the same clients take part in many rounds. It uses plain SGD, so tune `lr`.
            Clients send twice as much as in FedAvg.
        """,
        cite=("karimireddy2020scaffold",),
    ),
)
