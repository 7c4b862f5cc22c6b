"""FedDyn: each client's loss is changed in every round so that its minimum moves to the minimum of all clients' loss.

Each client adds two terms to its loss: a linear one, which it updates every round, and a penalty on the distance from
the global model. These terms make the clients' minima agree with the global minimum. The server corrects the average by
the accumulated changes.

Acar et al., "Federated learning based on dynamic regularization", ICLR 2021, algorithm 1. Client i holds g_i, its last
gradient, and the server holds h; both are 0 at first. From the received w a client minimises
    F_i(u) - <g_i, u> + (alpha/2) |u - w|^2    by local epochs,    then    g_i <- g_i - alpha (u_i - w);
with S of M clients in the round the server sets
    h <- h - (alpha / M) sum_i (u_i - w),    w <- mean_i u_i - h / alpha.
The mean is uniform, as printed. h is the mean of all g_i, so a run that has converged has h = 0, and the gradient of
each client's loss at w is g_i. Only models travel: a client makes g_i itself.

The paper trains by SGD with rate 0.1. ``preset=official``, which has the released layers, keeps this rate; our default,
for layers with BatchNorm, is 0.01. The paper takes alpha from {0.1, 0.01, 0.001}; h / alpha is a step that grows as
alpha falls, so small values want long local training. BatchNorm's running statistics are averaged.

Interpretation: the released code (alpemreacar/FedDyn, ``utils_methods.py``) departs from the printed algorithm. A
client of n_i of N rows takes alpha / (n_i M / N) in place of alpha in its loss and in g_i, so that large clients are
pulled less. The server's step is unchanged, because alpha cancels in it. The code also cuts the gradient of F_i(u) -
<g_i + alpha w, u> to norm 10 before it adds alpha u as weight decay. ``alpha_by=rows`` and ``clip=10`` (``official``)
do the same. With ``alpha_by=rows`` each client sends its number of rows and receives the mean number before round 1.

The released FedPCL code has no FedDyn; preset ``official`` combines that code's settings of its baselines (D-09, D-13;
docs/readings.md) with ``alpha_by=rows`` and ``clip=10``.
Special cases: the first round's models are those of ``fedprox`` with mu = alpha; at lr = 0 nothing moves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from fedcache.federate.engine.local_training import ClosedForm
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
    Loss,
    MethodPage,
    Tree,
    declare,
    dot,
    grads,
    is_zero,
    model,
    over,
    select,
    train,
    without,
)
from fedcache.federate.methods.fedavgm import broadcast
from fedcache.federate.methods.fedprox import proximal

NORM_EPS = 1e-6
"""Added to the norm of a gradient before dividing by it, as torch's ``clip_grad_norm_`` does."""


def init(ctx: Ctx) -> Tree:
    """Initial weights, and h = 0."""
    p = model.init(ctx)
    return {**p, **model.zeros_for(p, "h/", ctx)}


def enter(down: Tree, _data: ClientData, ctx: Ctx) -> Tree:
    """g_i = 0, and the BatchNorm statistics that stay with the client."""
    kept = select(down, fedavg.own_statistics(ctx.hp))
    return {**kept, **model.zeros_for(down, "g/", ctx)}


def alpha_of(data: ClientData, ctx: Ctx) -> float | Tensor:
    """alpha of each client: the same for all, or divided by its rows over the mean number of rows."""
    alpha = ctx.number("alpha")
    if ctx.hp["alpha_by"] == "alike":
        return alpha
    # A client with more rows takes more steps, so its pull is weaker by the same factor.
    mean_rows = cast(float, ctx.env.mean_rows)
    # A client without rows takes no step, and its alpha moves nothing.
    rows = data.per_client(data.n).to(ctx.env.dtype).clamp(min=1.0)
    return alpha * mean_rows / rows  # [*lead], a number for each client


def linear_loss(p: Tree, batch: Tree, down: Tree, ctx: Ctx) -> tuple[Tensor, Tree]:
    """Cross-entropy - <g_i, u>."""
    value, updates = model.ce_loss(p, batch, down, ctx)
    for name in model.trained(ctx.hp):
        value = value - dot(p[f"g/{name}"], p[name], ctx)
    return value, updates


def loss(p: Tree, batch: Tree, down: Tree, ctx: Ctx) -> tuple[Tensor, Tree]:
    """Cross-entropy - <g_i, u> + (alpha/2) |u - w|^2."""
    value, updates = linear_loss(p, batch, down, ctx)
    return value + 0.5 * p["alpha"] * proximal(p, down, ctx), updates


def clipped_gradients(p: Tree, batch: Tree, down: Tree, ctx: Ctx) -> list[Tensor]:
    """The gradients of ``loss``. As released, the part without alpha u is cut to a norm of ``clip``."""
    names = model.trained(ctx.hp)
    g, updates = grads(linear_loss, names, p, batch, down, ctx)
    for name, t in updates.items():
        p[name].copy_(t)
    parts = {}  # gradients of F_i(u) - <g_i + alpha w, u>
    for name, gradient in zip(names, g, strict=True):
        parts[name] = gradient - over(p["alpha"], p[name]) * down[name]
    square = torch.zeros_like(p["alpha"])
    for part in parts.values():
        square = square + dot(part, part, ctx)
    cut = (ctx.number("clip") / (square.sqrt() + NORM_EPS)).clamp(max=1.0)
    return [over(cut, part) * part + over(p["alpha"], p[n]) * p[n] for n, part in parts.items()]


def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """Local epochs of ``loss``, then the update of g_i by the change of the weights."""
    trained = model.trained(ctx.hp)
    linear_terms = [f"g/{name}" for name in trained]
    p = select({**down, **state}, (*model.names(ctx.hp), *linear_terms))
    alpha = torch.as_tensor(alpha_of(data, ctx), dtype=ctx.env.dtype, device=ctx.env.device)
    alpha = alpha.expand(ctx.lead)  # one for each client and grid point
    p["alpha"] = alpha
    objective: Loss | ClosedForm = loss
    if not is_zero(ctx.number("clip")):
        objective = ClosedForm(clipped_gradients)
    p = train(p, trained, ctx.count("epochs"), objective, down, data, ctx)
    kept = select(p, fedavg.own_statistics(ctx.hp))
    for name in trained:
        kept[f"g/{name}"] = state[f"g/{name}"] - over(alpha, p[name]) * (p[name] - down[name])
    return kept, select(p, fedavg.sent_names(ctx.hp))


def aggregate(server: Tree, up: Tree, ctx: Ctx) -> Tree:
    """Update h and then w. BatchNorm's statistics are averaged.

    ``up`` holds the mean of the clients' models. So the sum over S of M clients, divided by M, is (S / M) (up - w).
    """
    share = len(ctx.ids) / ctx.env.clients
    out = {**server, **up}
    for name in model.trained(ctx.hp):
        alpha = over(ctx.number("alpha"), up[name])
        h = server[f"h/{name}"] - share * alpha * (up[name] - server[name])
        out[f"h/{name}"] = h
        out[name] = up[name] - h / alpha
    return out


def needs(hp: Hp) -> frozenset[str]:
    """Labels, and the mean number of rows if alpha depends on it."""
    if hp["alpha_by"] == "rows":
        return frozenset({"labels", "row counts"})
    return frozenset({"labels"})


METHOD = replace(
    fedavg.METHOD,
    name="feddyn",
    paper="Acar et al., ICLR 2021",
    summary="FedAvg with a correction of each client's loss, so that all clients have the same "
    "minimum.",
    hparams=(
        *declare(FEAT_POST, MODEL, INIT),
        *without(declare(TRAINING, opt="sgd", momentum=0.0), "lr", "reset_opt"),
        HParam("lr", 0.01, "float", "learning rate", low=0.0, official=0.1),
        HParam(
            "alpha",
            0.1,
            "float",
            "strength of the pull towards the received model, and of the correction of the loss",
            low=1e-9,
        ),
        HParam(
            "alpha_by",
            "alike",
            "choice",
            "alike: all clients have the same alpha; rows: alpha is divided by n_i M / N, as in "
            "the released code",
            choices=("alike", "rows"),
            official="rows",
        ),
        HParam(
            "clip",
            0.0,
            "float",
            "largest norm of a gradient, without its term alpha u; 0 for no limit",
            low=0.0,
            official=10.0,
        ),
    ),
    executions=("sequential", "batched"),  # not gram: g_i is no combination of a client's rows
    init=init,
    enter=enter,
    fit=fit,
    pool=lambda _hp: {"": "uniform"},
    broadcast=broadcast,
    aggregate=aggregate,
    needs_for=needs,
    uneven_rows="clients are averaged with equal weights",
    page=MethodPage(
        family="Many rounds, one model",
        formula=r"""
            \begin{aligned}
            u_i &\approx \mathrm{arg}\min_u\ F_i(u) - \langle g_i, u \rangle + \frac{\alpha}{2} \lVert u
                - w \rVert^2, \qquad g_i \leftarrow g_i - \alpha\, (u_i - w) \\
            h &\leftarrow h - \frac{\alpha}{M} \sum_i (u_i - w),
                \qquad w \leftarrow \frac{1}{S} \sum_i u_i - \frac{h}{\alpha}
            \end{aligned}
        """,
        terms=r"""
            $w$: the global model; $u_i$: the model of client $i$ after local training; $F_i$: the mean loss of client
            $i$ on its training rows; $g_i$: the client's estimate of its own gradient; $h$: the server's mean of all
            $g_i$; $S$ of $M$ clients take part; $\alpha$: `alpha`.
        """,
        when="""
            Use it against client drift if the traffic must not exceed that of FedAvg. Between rounds, every client
            stores a vector as large as the model. A small `alpha` needs long local training.
        """,
        cite=("acar2021feddyn",),
    ),
)
