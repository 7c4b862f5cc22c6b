"""ATPFL on cached features, an approximation: ``tpfl-feat`` with the pull of ``atpfl``.

This approximates ``atpfl`` on cached features: trained vectors are added to the image features and the class texts
instead of the two prompts. An extra loss pulls the features towards those of the received vectors, and away from those
of the client's previous vectors. No encoder runs, so training takes seconds.

This method is not from the paper. It applies ATPFL's eqs 4 and 5 to the features of ``tpfl-feat``. z_g comes from the
vectors that the client receives in this round. z_prev comes from the vectors that the client had at the end of its last
participation; in its first participation z_prev is z_g. On cached features both cost only an addition, so they are
computed for each batch. The paper prints one Gamma for eqs 2 and 4, which ``gamma_aug=auto`` takes (1/scale). A number
sets the Gamma of eq 4 alone (D-82).

Special cases: mu_aug = 0 is ``tpfl-feat`` bit for bit.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fedcache.federate.methods import tpfl_feat
from fedcache.federate.methods.atpfl import PREVIOUS, enter
from fedcache.federate.methods.common import (
    Batch,
    ClientData,
    Ctx,
    MethodPage,
    Tree,
    is_zero,
    over,
    select,
    train,
)
from fedcache.federate.methods.common.prompts import AUG, pull_temperature, scheduled
from fedcache.federate.methods.tpfl_feat import NAMES, images, texts
from fedcache.heads.prompt import l_aug


def loss(p: Tree, batch: Batch, down: Tree, ctx: Ctx) -> Tensor:
    """l_con + mu (mean_c l_aug(t'_c) + mean_i l_aug(z_v,i)); ``p`` also holds the client's previous vectors."""
    value, z, t = tpfl_feat.forward(p, batch, ctx)
    mu = ctx.number("mu_aug")
    gamma = pull_temperature(ctx)
    if is_zero(mu):
        return value  # the same bits as tpfl-feat, at the same cost
    x = batch["x"]
    w = batch["w"]
    temperature = over(gamma, w)
    z_g = images(down["u"], x)
    z_prev = images(p[PREVIOUS + "u"], x)
    visual = l_aug(z, z_g, z_prev, temperature)
    t_g = texts(down["rho"], ctx)
    t_prev = texts(p[PREVIOUS + "rho"], ctx)
    text = l_aug(t, t_g, t_prev, temperature)
    return value + mu * (text.mean(-1) + (w * visual).sum(-1))


def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """Local epochs from the received vectors; the client keeps a copy of what it sends."""
    now = scheduled(ctx)
    p = train({**down, **state}, NAMES, ctx.count("epochs"), loss, down, data, now)
    sent = select(p, NAMES)
    previous = {PREVIOUS + k: t for k, t in sent.items()}
    return {**select(p, state), **previous}, sent


METHOD = replace(
    tpfl_feat.METHOD,
    name="atpfl-feat",
    paper="after Zhao et al., UbiComp companion 2023; an approximation of atpfl",
    summary="Approximates ATPFL on cached features: tpfl-feat with a pull towards the global features.",
    hparams=(*tpfl_feat.METHOD.hparams, *AUG),
    enter=enter,
    fit=fit,
    page=MethodPage(
        family="Prompts",
        formula=r"""
            L = \ell_{\mathrm{con}} + \mu \Big(\mathrm{mean}_c\, \ell_{\mathrm{aug}}(t'_c)
                + \mathrm{mean}_i\, \ell_{\mathrm{aug}}(z_i)\Big), \qquad z = \frac{f(x) + u}{\lVert f(x) + u \rVert}
        """,
        terms=r"""
            $\ell_{\mathrm{con}}$ and $t'_c$: as in [tpfl-feat](tpfl-feat.md); $\ell_{\mathrm{aug}}$: as in
            [atpfl](atpfl.md); $u$: the vector that is added to image features; $\mu$: the weight of the extra loss.
        """,
        when="""
            Use it like `tpfl-feat` if the clients' data differ strongly. It does not estimate the traffic of `atpfl`.
        """,
        cite=("zhao2023tpfl",),
    ),
)
