"""MOON: a loss pulls clients to the broadcast model's projection, and away from that of their own last model.

Clients train as in FedAvg with a contrastive loss. It pulls the projection of each row towards that of the received
model, and pushes it away from that of the client's own previous model.

Li, He & Song, "Model-contrastive federated learning", CVPR 2021. With z = P(x) of the model that trains, z_g of the
model that was received and z_prev of the client's model at the end of its last round,
    L = CE + mu * mean of -log[ e^{cos(z, z_g) / tau} / (e^{cos(z, z_g) / tau} + e^{cos(z, z_prev) / tau}) ].
z_g and z_prev are constants. A client that takes part for the first time has no last model: z_prev is z_g, whose term
is log 2 without a gradient. (The released code takes the run's first weights instead, which differs only for clients
that first take part in a later round.) With ``bn`` all three normalise with the statistics of the batch. mu = 1 and tau
= 0.5 as in PFLlib; the paper tunes mu in {0.1, 1, 5, 10} and keeps tau.

The released FedPCL code has no MOON, so preset ``official`` uses that code's settings of FedAvg (D-02, D-09, D-13,
D-14; docs/readings.md).
Special cases: mu = 0 is ``fedavg`` bit for bit, and so is every client's first round for every mu.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedcache.federate.methods import fedavg
from fedcache.federate.methods.common import (
    AGG,
    BN_MODE,
    FEAT_POST,
    LOGIT_HEAD,
    MLP,
    PROJECTION,
    SHARED_INIT,
    TRAIN_VIEW,
    TRAINING,
    ClientData,
    Ctx,
    HParam,
    MethodPage,
    Tree,
    declare,
    is_zero,
    model,
    over,
    select,
    train,
)
from fedcache.heads.losses import cross_entropy, model_contrast
from fedcache.heads.projection import classify, embed

LAST = "last/"
"""Prefix of the projection at the end of the client's last round."""


def enter(down: Tree, data: ClientData, ctx: Ctx) -> Tree:
    """The received projection as the last one, and the state of a FedAvg client."""
    last = {LAST + name: down[name] for name in model.head_of(ctx.hp).body()}
    return {**fedavg.enter(down, data, ctx), **last}


def loss(p: Tree, batch: Tree, down: Tree, ctx: Ctx) -> tuple[Tensor, Tree]:
    """Cross-entropy plus mu times the contrast of models."""
    mu = ctx.number("mu")
    if is_zero(mu):
        return model.ce_loss(p, batch, down, ctx)  # the same bits as fedavg, at the same cost
    head = model.head_of(ctx.hp)
    x = batch["x"]
    w = batch["w"]
    z, updates = embed(head, p, x, w)
    received_body = select(down, head.body())
    last_body = {name: p[LAST + name] for name in head.body()}
    with torch.no_grad():
        # All three normalise with the statistics of the batch. Updates of running statistics are not needed here.
        received = embed(head, {**p, **received_body}, x, w)[0]
        last = embed(head, {**p, **last_body}, x, w)[0]
    value = cross_entropy(classify(head, p, z), batch["y"], w)
    contrast = model_contrast(z, received, last, over(ctx.number("tau"), w), w)
    return value + mu * contrast, updates


def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """Local epochs; the resulting projection is the last one of the next round."""
    p = {**select(down, model.names(ctx.hp)), **state}
    p = train(p, model.trained(ctx.hp), ctx.count("epochs"), loss, down, data, ctx)
    # The new projection is kept as the last one; all other tensors of the state keep their names.
    kept = {k: p[k.removeprefix(LAST)] for k in state}
    return kept, select(p, fedavg.sent_names(ctx.hp))


METHOD = replace(
    fedavg.METHOD,
    name="moon",
    paper="Li, He & Song, CVPR 2021",
    summary="FedAvg with a contrastive loss that keeps projections near those of the global model.",
    hparams=(
        *declare(FEAT_POST, MLP, PROJECTION, BN_MODE, LOGIT_HEAD, AGG, TRAINING, TRAIN_VIEW),
        SHARED_INIT,
        HParam("mu", 1.0, "float", "weight of the contrast; 0 is fedavg", low=0.0),
        HParam("tau", 0.5, "float", "temperature of the contrast", low=1e-6),
    ),
    enter=enter,
    fit=fit,
    page=MethodPage(
        family="Many rounds, one model",
        formula=r"""
            L = \mathrm{CE} - \mu\, \log \frac{e^{\cos(z, z_g) / \tau}}{e^{\cos(z, z_g) / \tau}
                + e^{\cos(z, z_{\mathrm{prev}}) / \tau}}
        """,
        terms=r"""
            $z$, $z_g$, $z_{\mathrm{prev}}$: the projection of a row by the trained model, the received model and the
            client's previous model; $\tau$: the temperature; $\mu$: the weight of the loss.
        """,
        when="""
            Use it against drift of the projection. Clients send as much as in FedAvg and need three forward passes per
            batch. It has no effect with a linear head.
        """,
        cite=("li2021moon",),
    ),
)
