"""Soft means: class means of unlabelled rows, weighted by their zero-shot probabilities; one round, no training.

Each client predicts its unlabelled images with the class texts, and adds up its features, weighted by the predicted
probabilities. The server divides the sums to get a mean feature for each class. A row gets the class whose mean is most
similar, after all directions have been scaled to a similar variance.

This method is ours. It is one step of expectation and maximisation (EM) for Gaussian classes that share one covariance.
It starts from class texts, and uses no class frequencies. With the features z of all clients, their number N and mean
m, their covariance Sigma, and class texts T,
    q = softmax(s z T'),    mu_c = sum q_c z / sum q_c - m,
    W_c = P mu_c / sqrt(mu_c' P mu_c),    P = (Sigma + ridge tr(Sigma) / D I)^-1,    b_c = -m' W_c.
W_c z + b_c is, up to a factor that is the same for all classes, the cosine of z - m and mu_c after both are multiplied
by P^(1/2).

More EM steps reinforce the errors of the first, and accuracy falls with each. So the method has one round. Its
statistics add up, so the partition does not matter. Without class frequencies, a class that no client has can still be
predicted.

With ``own_mean=true``, each client first subtracts the mean of its own rows and makes them unit length again. This
costs no traffic, and helps if each client has rows of one domain. The result then depends on the partition.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedcache.federate.methods import fedncm
from fedcache.federate.methods.common import (
    FEAT_POST,
    ClientData,
    Ctx,
    HParam,
    MethodPage,
    Tree,
    Uploads,
    UploadTensor,
    affine,
    declare,
    model,
    personal_if,
)
from fedcache.heads.linear import head_around
from fedcache.heads.ridge import gram, nearest_gram, pack, solve, unpack


def own_mean(_down: Tree, _state: Tree, data: ClientData, ctx: Ctx) -> Tree:
    """The mean of the client's rows [1, D], with ``own_mean``."""
    if not ctx.hp["own_mean"]:
        return {}

    def sums(block: ClientData) -> Tree:
        x, mask = block.full()
        weighted = x.double() * mask.double().unsqueeze(-1)
        return {"sum": weighted.sum(-2, keepdim=True)}

    total = fedncm.add_up(data, ctx, ctx.env.width, sums)
    rows = data.per_client(data.n)[..., None, None]
    mean = total["sum"] / rows.clamp(min=1.0)
    return {"mean": mean.to(ctx.env.dtype)}


def centred(x: Tensor, own: Tree) -> Tensor:
    """Rows [.., R, D] minus the client's own mean, at unit length; the rows as they are if there is no own mean."""
    if not own:
        return x
    return normalize(x - own["mean"], dim=-1)


def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """G, packed; for each class the sum of its probabilities, and the sum of the rows, weighted by them."""
    own = own_mean(down, state, data, ctx)

    def sums(block: ClientData) -> Tree:
        x, mask = block.full()
        x = centred(x, own)
        weight = mask.double().unsqueeze(-1)
        u = ctx.scalar("scale") * affine(x, ctx.text)
        # Probabilities of the classes [.., R, C]; padding has none.
        q = u.double().softmax(-1) * weight
        z = x.double() * weight
        return {"gram": gram(z), "soft_sum": q.mT @ z, "soft_count": q.sum(-2)}

    return {}, fedncm.add_up(data, ctx, ctx.env.width, sums)


def uploads(_server: Tree, ctx: Ctx) -> Uploads:
    """G_i, packed [D (D + 1) / 2]; the weighted sums of rows of each class [C, D]; the sums of probabilities [C]."""
    C = ctx.env.classes
    D = ctx.env.width
    return {
        "gram": fedncm.statistic("gram", D * (D + 1) // 2),
        "soft_sum": UploadTensor((C, D), torch.float64),
        "soft_count": UploadTensor((C,), torch.float64),
    }


def aggregate(_server: Tree, up: Tree, ctx: Ctx) -> Tree:
    """The head W, b."""
    # With noise on the uploads, the probabilities of a class may sum to less than zero; such a class has no mean.
    count = up["soft_count"].clamp(min=0.0).unsqueeze(-1)
    mean = torch.where(count > 0, up["soft_sum"] / count, 0.0)
    rows = count.sum()
    center = (count * mean).sum(0) / rows
    mu = torch.where(count > 0, mean - center, 0.0)
    D = len(center)
    # Noise may also leave negative eigenvalues in the covariance.
    covariance = up["gram"] / rows - pack(torch.outer(center, center))
    sigma = unpack(nearest_gram(covariance), D)
    unit = float(sigma.trace()) / D
    ridge = ctx.scalar("ridge") * unit
    W = solve(sigma, mu.mT, ridge, switch="ridge", unit=unit).mT
    square = (W * mu).sum(-1, keepdim=True)
    W = torch.where(square > 0, W / square.sqrt(), 0.0)
    return head_around(center, W, torch.zeros_like(W[:, 0]), ctx.env.dtype)


def predict(down: Tree, own: Tree, _data: ClientData, x: Tensor, _ctx: Ctx) -> Tensor:
    """Scores [.., N, C]."""
    return affine(centred(x, own), down["W"], down["b"])


METHOD = replace(
    fedncm.METHOD,
    name="soft-means",
    paper="ours; one step of EM from class texts",
    summary="Class means of unlabelled rows, weighted by zero-shot class probabilities; one "
    "round, no labels.",
    hparams=(
        *declare(FEAT_POST, feat_post="center"),
        HParam(
            "own_mean",
            False,
            "bool",
            "each client subtracts the mean of its own rows; use it if each client has one domain",
        ),
        HParam("scale", 30.0, "float", "factor s of the zero-shot scores", low=1e-6),
        HParam(
            "ridge",
            1.0,
            "float",
            "number that is multiplied by the mean variance and added to the diagonal of the "
            "covariance",
            low=0.0,
            fit=False,
        ),
    ),
    fit=fit,
    uploads=uploads,
    aggregate=aggregate,
    additive=lambda hp: not hp["own_mean"],
    personal_part=own_mean,
    predict=predict,
    protocol=personal_if(lambda hp: hp["own_mean"]),
    zero_shot=model.by_text,
    needs=frozenset({"text"}),
    paper_count=lambda D, C, _clients, _hp: (D * (D + 1) // 2 + C * (D + 1), C * (2 * D + 1)),
    depends_on_origin="logits are cosines with class texts",
    upload_descriptions={
        "soft_sum": (
            "sum of the features, weighted by the predicted probabilities of each class",
            "the mean image of each class, as the class texts see it",
        ),
        "soft_count": (
            "sum of the predicted probabilities of each class",
            "about how many of its rows are of each class",
        ),
    },
    page=MethodPage(
        family="With class texts",
        formula=r"""
            \begin{aligned}
            q &= \mathrm{softmax}(s\, z T^\top), \qquad \mu_c = \frac{\sum q_c\, z}{\sum q_c} - m \\
            W_c &= \frac{P \mu_c}{\sqrt{\mu_c^\top P \mu_c}}, \qquad b_c = -m^\top W_c,
                \qquad P = \Big(\Sigma + \rho\, \frac{\mathrm{tr}\, \Sigma}{D}\, I\Big)^{-1}
            \end{aligned}
        """,
        terms=r"""
            $z$: the features of all clients, with mean $m$ and covariance $\Sigma$; $D$: the width of a feature; $T$:
            the unit features of the class texts; $q_c$: the zero-shot probability of class $c$; $s$: the scale of the
            logits; $\rho$: `ridge`.
        """,
        when="""
            Use it if there are class texts and many images, but no labels. It trains nothing, takes one round, and does
            not depend on the partition. If each client has images of one domain, set `own_mean=true`. The method
            assumes that all classes are about equally frequent, and lowers the accuracy if they are not. See D-51 in
            the [interpretations](../readings.md).
        """,
        cite=("dempster1977em",),
    ),
)
