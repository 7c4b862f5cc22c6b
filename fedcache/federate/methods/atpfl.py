"""ATPFL: TPFL with a loss that pulls features towards the received prompts and away from the previous prompts.

Clients learn two prompts, as in ``tpfl``: vectors among the words of the class texts, and a frame or patch on the
images. An extra loss pulls the features towards those of the received prompts, and away from those of the client's
previous prompts. The server averages the prompts.

Zhao et al., UbiComp/ISWC 2023 companion, eqs 4 and 5:
    l_aug(z, z_g, z_prev) = -log( e^(cos(z, z_g)/G) / (e^(cos(z, z_g)/G) + e^(cos(z, z_prev)/G)) ),
    L = l_con + mu ( mean_c l_aug(t_c) + mean_i l_aug(z_v,i) ).
z_g comes from the prompts that the client receives in this round. z_prev comes from the prompts that the client had at
the end of its last participation; in its first participation it had none, so z_prev is z_g. Neither takes a gradient.
Both are constant during the round, so they are computed once for each class and image. Only a random patch moves with
every batch, so the images of a batch are then encoded again, with the patch at the place that it has in this batch.

The paper writes one Gamma in eqs 2 and 4 and prints no value. ``gamma_aug=auto`` is the Gamma of eq 2, 1/scale (0.01
with CLIP's scale). A number, for example 0.5, is the Gamma of eq 4 alone (D-82). mu is not printed (D-62: 0.5).

Special cases: mu = 0 gives the bits of ``tpfl``. In a client's first round z_prev is z_g, so l_aug is log 2 and its
gradient is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fedcache.federate.methods import tpfl
from fedcache.federate.methods.common import (
    Batch,
    ClientData,
    Ctx,
    MethodPage,
    Tree,
    is_zero,
    keep_optimiser,
    prompts,
    select,
)
from fedcache.federate.methods.common.prompts import AUG
from fedcache.heads.prompt import l_aug

PREVIOUS = "prev/"
FixedFeatures = Callable[[Batch], tuple[Tensor, Tensor]]
"""A batch's z_g and z_prev [B, D]."""


def enter(down: Tree, _data: ClientData, ctx: Ctx) -> Tree:
    """The received tensors, as the client's previous ones."""
    previous = {PREVIOUS + k: t for k, t in down.items()}
    return {**previous, **keep_optimiser(down, tuple(down), ctx)}


def fixed_images(down: Tree, previous: Tree, data: ClientData, ctx: Ctx) -> FixedFeatures:
    """Function that returns z_g and z_prev of a batch's images, computed once, or for each batch if the patch moves."""
    if "v" not in down or ctx.hp["vp_template"] != "random_patch":
        z_g = prompts.encode_rows(data, down, ctx)
        same = "v" not in down or torch.equal(down["v"], previous["v"])
        if same:
            z_prev = z_g
        else:
            z_prev = prompts.encode_rows(data, previous, ctx)
        return lambda batch: (z_g[batch["i"]], z_prev[batch["i"]])

    def of_batch(batch: Batch) -> tuple[Tensor, Tensor]:
        at = batch["at"].tolist()
        with torch.no_grad():
            g = prompts.image_features(batch["x"], prompts.paint(down, ctx, at), ctx)
            prev = prompts.image_features(batch["x"], prompts.paint(previous, ctx, at), ctx)
        return g, prev

    return of_batch


def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """``epochs`` of eq 5 from the received prompts; the client remembers what it sends."""
    names = prompts.class_names(ctx, down["ctx"].shape[-2])
    mu = ctx.number("mu_aug")
    gamma = prompts.pull_temperature(ctx)
    previous = {k: state[PREVIOUS + k] for k in down}
    if not is_zero(mu):
        t_g = prompts.frozen_text(down["ctx"], names, ctx)
        t_prev = prompts.frozen_text(previous["ctx"], names, ctx)
        images = fixed_images(down, previous, data, ctx)

    def loss(p: Tree, batch: Batch, _down: Tree, batch_ctx: Ctx) -> Tensor:
        value, z, t = tpfl.forward(p, batch, names, batch_ctx)
        if is_zero(mu):
            return value  # the same bits as tpfl, at the same cost
        z_g, z_prev = images(batch)
        visual = (batch["w"] * l_aug(z, z_g, z_prev, gamma)).sum(-1)
        text = l_aug(t, t_g, t_prev, gamma).mean(-1)
        return value + mu * (text + visual)

    kept = {k: t for k, t in state.items() if not k.startswith(PREVIOUS)}
    p = prompts.train_prompts(loss, {**down, **kept}, data, ctx)
    sent = select(p, down)
    remembered = {PREVIOUS + k: t for k, t in sent.items()}
    return {**remembered, **select(p, kept)}, sent


METHOD = replace(
    tpfl.METHOD,
    name="atpfl",
    summary="TPFL with an extra loss that keeps clients near the global prompts; needs images.",
    hparams=(*tpfl.METHOD.hparams, *AUG),
    enter=enter,
    fit=fit,
    page=MethodPage(
        family="Prompts",
        formula=r"""
            L = \ell_{\mathrm{con}} + \mu \Big(\mathrm{mean}_c\, \ell_{\mathrm{aug}}(t_c)
                + \mathrm{mean}_i\, \ell_{\mathrm{aug}}(z_i)\Big),
                \qquad \ell_{\mathrm{aug}}(z) = -\log \frac{e^{\cos(z, z_g) / \Gamma}}{e^{\cos(z, z_g) / \Gamma}
                + e^{\cos(z, z_{\mathrm{prev}}) / \Gamma}}
        """,
        terms=r"""
            $\ell_{\mathrm{con}}$: the loss of [tpfl](tpfl.md); $t_c$: the text feature of class $c$; $z_i$: the feature
            of image $i$; $z_g$: the same feature with the received prompts; $z_{\mathrm{prev}}$: with the client's
            prompts of its previous round; $\Gamma$: the temperature; $\mu$: the weight of the extra loss.
        """,
        when="""
            Use it like `tpfl` if the clients' data differ strongly. It needs the images and takes minutes; `atpfl-feat`
            takes seconds.
        """,
        cite=("zhao2023tpfl",),
    ),
)
