"""FedNTD: local training that keeps what the received model knows about the classes that a row does not belong to.

Clients train as in FedAvg with a second loss. It keeps the client's predictions for all wrong classes of a row close to
those of the received model. This protects what the received model knows about classes that the client does not have.

Lee et al., "Preservation of the global knowledge by not-true distillation in federated learning", NeurIPS 2022; the
baseline of FST-CBDG [E]. With the logits l of the client's model and g of the broadcast one, on the same batch:
    L = CE(l, y) + beta tau^2 KL( softmax_{c != y}(g / tau) || softmax_{c != y}(l / tau) )    (mean over the batch)

Defaults are [E]'s setting: a linear head from text features, SGD 0.01 with momentum 0.9 and decay 1e-5, one epoch, ten
rounds of 10 of 100 clients, and tau = beta = 1 of the released configuration. Released code also multiplies the
learning rate by 0.99 every round (``lr_decay``); [E] does not mention it. On unit features without a scale, logits span
less than 2 and the divergence is nearly zero, so FedNTD is nearly FedAvg. ``logit_scale`` multiplies both l and g
(D-83). With ``bn`` the broadcast model normalises with the statistics of the batch, as the client's does, so the two
agree at the first step.

The default head is linear, so ``bn`` does not change it. ``head=mlp`` has a projection whose outputs have unit length,
with BatchNorm only if ``bn``.

Special cases: beta = 0 is ``fedavg`` bit for bit; at l = g the added term is 0; this term never moves the logit of the
true class.
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
    LOGIT_SCALE,
    MODEL,
    TRAINING,
    ClientData,
    Ctx,
    Defaults,
    HParam,
    MethodPage,
    Tree,
    declare,
    is_zero,
    local,
    model,
    over,
)
from fedcache.heads.losses import cross_entropy, not_true_divergence
from fedcache.heads.projection import logits


def loss(p: Tree, batch: Tree, down: Tree, ctx: Ctx) -> tuple[Tensor, Tree]:
    """Cross-entropy plus beta tau^2 KL over the classes that are not true."""
    beta = ctx.number("beta")
    if is_zero(beta):
        return model.ce_loss(p, batch, down, ctx)  # the same bits as fedavg, at the same cost
    head = model.head_of(ctx.hp)
    x = batch["x"]
    y = batch["y"]
    w = batch["w"]
    u, updates = logits(head, p, x, w)
    with torch.no_grad():
        g = logits(head, down, x, w)[0]
    tau = ctx.number("tau")
    temperature = over(tau, u)
    divergence = not_true_divergence(u / temperature, g / temperature, y, w)
    return cross_entropy(u, y, w) + beta * tau**2 * divergence, updates


def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """Local epochs, with the learning rate of this round."""
    lr = ctx.number("lr") * ctx.number("lr_decay") ** ctx.round
    return _local(down, state, data, ctx.with_hp(lr=lr))


_local = local(loss, model.names, model.trained, fedavg.sent_names)

METHOD = replace(
    fedavg.METHOD,
    name="fedntd",
    paper="Lee et al., NeurIPS 2022",
    summary="FedAvg with a loss that preserves what the global model knows about absent classes.",
    hparams=(
        *declare(
            FEAT_POST,
            MODEL,
            LOGIT_SCALE,
            INIT,
            AGG,
            TRAINING,
            feat_post="l2",
            head="linear",
            z_norm="l2",
            bn=False,
            logit_head="plain",
            agg="weighted",
            opt="sgd",
            lr=0.01,
            wd=1e-5,
            momentum=0.9,
            batch=50,
            drop_last=False,
        ),
        HParam("beta", 1.0, "float", "weight of the distillation; 0 is fedavg", low=0.0),
        HParam("tau", 1.0, "float", "temperature of the distillation", low=1e-6),
        HParam(
            "lr_decay",
            1.0,
            "float",
            "factor of the learning rate after every round",
            low=0.0,
            official=0.99,
        ),
    ),
    defaults=Defaults(rounds=10, participation=10, clients=100, scheme="iid"),
    fit=fit,
    page=MethodPage(
        family="Many rounds, one model",
        formula=r"""
            L = \mathrm{CE}(\ell, y) + \beta \tau^2\, \mathrm{KL}\big(\mathrm{softmax}_{c \neq y}(g / \tau)
                \ \Vert\ \mathrm{softmax}_{c \neq y}(\ell / \tau)\big)
        """,
        terms=r"""
            $\ell$, $g$: logits of the client's model and of the received model; $y$: the label; $\tau$: the
            temperature; $\beta$: the weight of the second loss.
        """,
        when="""
            Use it if clients forget classes that they do not have. On features of unit length, also set a larger
            `logit_scale`, because the second loss is nearly zero otherwise.
        """,
        cite=("lee2022fedntd",),
    ),
)
