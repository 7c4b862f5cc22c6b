"""FedAvgM: FedAvg whose server has momentum.

Clients train as in FedAvg. The server keeps a running average of its past changes and moves the model along it. This
smooths the jumps between rounds.

Hsu, Qi & Brown, "Measuring the effects of non-identical data distribution for federated visual classification", 2019.
With the weighted mean w' of the round's models and Delta = w - w',
    v <- server_momentum v + Delta,    w <- w - lr_g v;
the paper has lr_g = 1, and calls server_momentum = 0.9 a good default. BatchNorm's running statistics are averaged.

The released FedPCL code has no FedAvgM, so preset ``official`` uses that code's settings of FedAvg (D-09, D-13, D-14;
docs/readings.md).
Special cases: server_momentum = 0 with lr_g = 1 is ``fedavg`` bit for bit; the first round is ``fedavg`` with a step of
lr_g.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fedcache.federate.methods import fedavg
from fedcache.federate.methods.common import (
    Ctx,
    HParam,
    MethodPage,
    Tree,
    is_zero,
    model,
    over,
    select,
)

LR_G = HParam("lr_g", 1.0, "float", "the server's learning rate", low=0.0, fit=False)


def init(ctx: Ctx) -> Tree:
    """Initial weights, and v = 0."""
    p = model.init(ctx)
    return {**p, **model.zeros_for(p, "v/", ctx)}


def broadcast(server: Tree, ctx: Ctx) -> Tree:
    """The model, without the tensors that the server keeps for later rounds."""
    return select(server, model.names(ctx.hp))


def aggregate(server: Tree, up: Tree, ctx: Ctx) -> Tree:
    """v and w of the next round."""
    # In a grid, a swept hyperparameter is a tensor with one value per grid point. ``over(h, w)`` reshapes it so that it
    # broadcasts against w.
    momentum = ctx.number("server_momentum")
    lr_g = ctx.number("lr_g")
    full_step = not isinstance(lr_g, Tensor) and lr_g == 1.0
    # ``up`` holds the means of the round. Means of BatchNorm's statistics stay, means of weights are replaced below.
    out = {**server, **up}
    for name in model.trained(ctx.hp):
        delta = server[name] - up[name]
        v = delta
        if not is_zero(momentum):
            v = over(momentum, delta) * server[f"v/{name}"] + delta
        out[f"v/{name}"] = v
        # A full step without momentum ends at the mean, which ``out`` has already; computing w - (w - w') would round.
        if not (full_step and is_zero(momentum)):
            out[name] = server[name] - over(lr_g, v) * v
    return out


METHOD = replace(
    fedavg.METHOD,
    name="fedavgm",
    paper="Hsu, Qi & Brown, 2019",
    summary="FedAvg with momentum at the server.",
    hparams=(
        *fedavg.METHOD.hparams,
        HParam(
            "server_momentum",
            0.9,
            "float",
            "momentum: share of the last server step that is added to the next; 0 is fedavg",
            low=0.0,
            high=1.0,
            fit=False,
        ),
        LR_G,
    ),
    # Not gram: it needs a global model that is a linear combination of the round's models, but v has earlier changes.
    executions=("sequential", "batched"),
    init=init,
    broadcast=broadcast,
    aggregate=aggregate,
    page=MethodPage(
        family="Many rounds, one model",
        formula=r"""
            \Delta = w - \sum_i \frac{n_i}{N}\, w_i, \qquad v \leftarrow \beta v + \Delta,
                \qquad w \leftarrow w - \eta_g v
        """,
        terms=r"""
            $w$: the global model; $w_i$: the model of client $i$ after local training; $n_i$: its training rows; $N$:
            the training rows of all clients in the round; $v$: the server's momentum vector; $\beta$:
            `server_momentum`; $\eta_g$: `lr_g`.
        """,
        when="""
            Use it if few clients take part in each round, so that the model changes abruptly between rounds. Clients
            send no more than in FedAvg.
        """,
        cite=("hsu2019fedavgm",),
    ),
)
