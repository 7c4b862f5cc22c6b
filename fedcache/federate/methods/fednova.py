"""FedNova: clients that take more steps do not pull the average further their way.

In FedAvg, a client that takes more local steps moves the average further. FedNova divides each client's change by the
length of its training before the average. It then scales the average back to the usual step.

Wang et al., "Tackling the objective inconsistency problem in heterogeneous federated optimization", NeurIPS 2020. After
tau_i local steps client i sends its mean step d_i = (w - w_i) / a_i and the length a_i, the sum of the weights with
which its gradients enter w - w_i, in units of lr (section 4):
    a_i = tau_i for plain SGD,    a_i = [tau_i - rho (1 - rho^tau_i) / (1 - rho)] / (1 - rho) with momentum rho.
With p_i = n_i / N the server sets
    w <- w - (sum_i p_i a_i) sum_i p_i d_i.
FedAvg takes the step sum_i p_i a_i d_i instead, which minimises a loss in which client i has the weight n_i a_i. Decay
counts as part of the gradient. The lengths hold for SGD that starts afresh every round, and for no other optimiser.
BatchNorm's running statistics are averaged. lr = 0.03 is ours, and 0.3 on the released layers (``preset=official``), as
plain SGD is slow on projections of unit length.

The released FedPCL code has no FedNova, so preset ``official`` uses that code's settings of its other baselines (D-09,
D-13, D-14; docs/readings.md).
Special cases: clients of equally many steps make it ``fedavg`` with SGD (to rounding); lr = 0 leaves w as it is.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedcache.federate.methods import fedavg
from fedcache.federate.methods.common import (
    AGG,
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
    local_steps,
    model,
    over,
    select,
    train,
    without,
)

LENGTH = "length"
"""Name of a_i, [1], in an upload."""

SGD = (
    HParam(
        "opt",
        "sgd",
        "choice",
        "optimiser; the normalisation of steps holds only for SGD",
        choices=("sgd",),
    ),
    HParam("momentum", 0.0, "float", "momentum of SGD", low=0.0, high=0.999),
)


def length(data: ClientData, ctx: Ctx) -> Tensor:
    """a_i of every client, [*lead, 1]; the axis of grid points has length 1 if all have the same momentum."""
    tau = local_steps(data, ctx)
    rho = ctx.number("momentum")
    a = (tau - rho * (1.0 - rho**tau) / (1.0 - rho)) / (1.0 - rho)
    return a.to(ctx.env.dtype).unsqueeze(-1)


def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """Local epochs, then their mean step and its length."""
    trained = model.trained(ctx.hp)
    p = select({**down, **state}, model.names(ctx.hp))
    p = train(p, trained, ctx.count("epochs"), model.ce_loss, down, data, ctx)
    a = length(data, ctx)
    up = {k: p[k] for k in fedavg.sent_names(ctx.hp) if k not in trained}
    for name in trained:
        # a_i is 0 or at least 1, so ``clamp`` only avoids a division by 0.
        divisor = torch.as_tensor(over(a.squeeze(-1), p[name]))
        up[name] = (down[name] - p[name]) / divisor.clamp(min=1.0)
    up[LENGTH] = a.expand(*ctx.lead, 1)
    return select(p, state), up


def uploads(server: Tree, ctx: Ctx) -> Uploads:
    """A step for every trained tensor, BatchNorm's statistics, and a_i."""
    trained = model.trained(ctx.hp)
    sent = {
        name: replace(UploadTensor.like(server[name]), is_step=name in trained)
        for name in fedavg.sent_names(ctx.hp)
    }
    return {**sent, LENGTH: UploadTensor((1,), ctx.env.dtype)}


def aggregate(server: Tree, up: Tree, ctx: Ctx) -> Tree:
    """w after the mean step, times the mean length."""
    tensors = {k: t for k, t in up.items() if k != LENGTH}
    out = {**server, **tensors}
    for name in model.trained(ctx.hp):
        mean_length = over(up[LENGTH].squeeze(-1), up[name])
        out[name] = server[name] - mean_length * up[name]
    return out


def paper_count(width: int, classes: int, _clients: int, hp: Hp) -> tuple[int, int]:
    """All weights both ways, and a_i up."""
    n = model.head_of(hp).paper_weights(width, classes)
    return n + 1, n


METHOD = replace(
    fedavg.METHOD,
    name="fednova",
    paper="Wang et al., NeurIPS 2020",
    summary="FedAvg in which a client does not get more weight by taking more local steps.",
    hparams=(
        *declare(FEAT_POST, MODEL, INIT, AGG),
        *SGD,
        *without(TRAINING, "opt", "lr", "momentum", "reset_opt"),
        HParam("lr", 0.03, "float", "learning rate", low=0.0, official=0.3),
    ),
    executions=("sequential", "batched"),
    enter=lambda down, _data, ctx: select(down, fedavg.own_statistics(ctx.hp)),
    fit=fit,
    uploads=uploads,
    aggregate=aggregate,
    paper_count=paper_count,
    upload_descriptions={
        LENGTH: (
            "length of its local training",
            "how many steps it took, and so about how many rows it has",
        ),
    },
    page=MethodPage(
        family="Many rounds, one model",
        formula=r"""
            d_i = \frac{w - w_i}{a_i}, \qquad w \leftarrow w - \Big(\sum_i p_i a_i\Big) \sum_i p_i d_i,
                \qquad p_i = \frac{n_i}{N}
        """,
        terms="""
            $w$: the global model; $w_i$: the model of client $i$ after local training; $n_i$: its training rows; $N$:
            the training rows of all clients in the round; $a_i$: the length of client $i$'s training, for plain SGD the
            number of its steps; $d_i$: the mean of its steps.
        """,
        when="""
            Use it if clients take very different numbers of local steps, for example because their numbers of rows
            differ.
        """,
        cite=("wang2020fednova",),
    ),
)
