"""FedProx: FedAvg with a pull towards the broadcast model.

Clients train as in FedAvg with a penalty on the distance from the received model. The penalty keeps clients from moving
too far in many local steps.

Li et al., "Federated optimization in heterogeneous networks", MLSys 2020:
h_i(w) = f_i(w) + (mu/2) |w - w_g|^2.

The released FLESD code adds mu |w - w_g|^2 without the factor 1/2 (D-31, ``prox_half=false``), so its mu is half of the
paper's.
Special cases: mu = 0 is ``fedavg`` bit for bit; at w = w_g the added gradient is exactly 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from fedcache.federate.methods import fedavg
from fedcache.federate.methods.common import (
    Ctx,
    HParam,
    MethodPage,
    Tree,
    is_zero,
    local,
    model,
    squared_distance,
)


def proximal(p: Tree, down: Tree, ctx: Ctx) -> Tensor:
    """|w - w_g|^2 over the trained tensors, one value per client."""
    return squared_distance(p, down, model.trained(ctx.hp), ctx)


def pulled(value: Tensor, p: Tree, down: Tree, trained: Sequence[str], ctx: Ctx) -> Tensor:
    """A loss plus (mu/2) |w - w_g|^2 over the ``trained`` tensors; the loss itself if mu is 0, bit for bit."""
    mu = ctx.number("mu")
    if is_zero(mu):
        return value
    scale = mu
    if ctx.hp["prox_half"]:
        scale = 0.5 * mu
    return value + scale * squared_distance(p, down, trained, ctx)


def loss(p: Tree, batch: Tree, down: Tree, ctx: Ctx) -> tuple[Tensor, Tree]:
    """Cross-entropy plus (mu/2) |w - w_g|^2."""
    value, updates = model.ce_loss(p, batch, down, ctx)
    return pulled(value, p, down, model.trained(ctx.hp), ctx), updates


PROX_HALF = HParam(
    "prox_half", True, "bool", "keep the paper's factor 1/2 before mu (D-31)", official=False
)

METHOD = replace(
    fedavg.METHOD,
    name="fedprox",
    paper="Li et al., MLSys 2020",
    summary="FedAvg with a penalty that keeps clients near the received model.",
    hparams=(
        *fedavg.METHOD.hparams,
        HParam(
            "mu",
            1e-3,
            "float",
            "strength of the pull towards the received model; 0 is fedavg",
            low=0.0,
        ),
        PROX_HALF,
    ),
    fit=local(loss, model.names, model.trained, fedavg.sent_names),
    page=MethodPage(
        family="Many rounds, one model",
        formula=r"""
            \min_{w_i}\ F_i(w_i) + \frac{\mu}{2} \lVert w_i - w \rVert^2,
                \qquad w \leftarrow \sum_i \frac{n_i}{N}\, w_i
        """,
        terms=r"""
            $w$: the global model; $w_i$: the model of client $i$ after local training; $n_i$: its training rows; $N$:
            the training rows of all clients in the round; $F_i$: the mean loss of client $i$ on its training rows;
            $\mu$: `mu`.
        """,
        when="""
            Use it if clients train for many local steps and drift apart. Select `mu` on validation rows: a small `mu`
            has no effect, and a large `mu` stops the training.
        """,
        cite=("li2020fedprox",),
    ),
)
