"""GDA: Gaussian discriminant analysis of image features in addition to CLIP's zero-shot logits; one round, no training.

The server models each class as a Gaussian around its mean feature, with one covariance for all classes. It computes
these Gaussians from summed statistics of the clients, without training. The prediction adds the scores of the Gaussians
to CLIP's zero-shot scores.

Wang et al., "A hard-to-beat baseline for training-free CLIP-based adaptation", ICLR 2024. Classes are Gaussians with
one covariance and equal priors, so their discriminants are linear in the features f:
    W_c = P mu_c,    b_c = -log C - mu_c' P mu_c / 2,    logits = s f.T' + alpha (f W' + b).
P is the empirical Bayes ridge estimate of the precision (Kubokawa and Srivastava, 2008), which exists with fewer rows
than features: with the pooled scatter S = sum_c sum_i (f_i - mu_c)(f_i - mu_c)' of N rows and D features,
    P = D (S + tr(S) / (N - 1) I)^-1.

The upload is that of ``fedcgs``: G, S_c and N_c add up, so the partition does not matter. The server alone reads the
class text features T, and sends one linear head s T + alpha W, alpha b. A class without any image is never
predicted, as it has no Gaussian. Special cases: alpha = 0 is ``clip-zs``; where every class has one row S = 0 and P is
0.

The ridge needs no choice, because it is an estimate. alpha is a weight of logits, not a ridge. A criterion for alpha
needs the scores of held-out rows, which cannot be computed from the sums, so alpha has no ``auto``.

The paper searches alpha among 1e-4, 1e-3 .. 100 on validation rows: ``--sweep alpha=...`` with ``--validation``.
Checked against the released code (mrflogs/ICLR24, ``main_few_shots.py``): s = 100, the estimator and the priors.
Interpretation: that code takes means and scatter from ``augment_epoch`` random crops and flips of every image, and from
no plain image; the paper's equations say nothing of it. ``proto_view=aug`` does this with the stored augmentations
(``fedcache extract --views 11`` for ten). A client sends the mean of its sums over views, and the server takes every
row as many times as there are views.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fedcache.federate.methods import fedcgs
from fedcache.federate.methods.common import (
    PROTO_VIEW,
    UNIT_FEATURES,
    ClientData,
    Ctx,
    Hp,
    HParam,
    MethodPage,
    Tree,
    model,
)
from fedcache.federate.methods.fedncm import add_up, means
from fedcache.heads.losses import mask_logits
from fedcache.heads.ridge import solve, unpack


def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """The statistics of ``fedcgs``, of plain images or as means over the stored augmentations."""
    if ctx.hp["proto_view"] == "center":
        return fedcgs.fit(down, state, data, ctx)
    # View 0 is the plain image; the others are augmentations of it.
    parts = []
    for view in range(1, ctx.env.views):
        sums = partial(fedcgs.sums, ctx=ctx, view=view)
        parts.append(add_up(data, ctx, ctx.env.width, sums))
    return {}, {name: torch.stack([part[name] for part in parts]).mean(0) for name in parts[0]}


def of_all_views(up: Tree, ctx: Ctx) -> Tree:
    """Pooled statistics in which every row counts once for each view that it was read in."""
    if ctx.hp["proto_view"] == "center":
        return up
    return {name: (ctx.env.views - 1) * t for name, t in up.items()}


def discriminants(up: Tree) -> tuple[Tensor, Tensor]:
    """W [C, D] and b [C] of pooled statistics in float64; b is masked for a class that no client has."""
    n = up["count"]
    mean = means(up["class_sum"], n)
    C, D = mean.shape
    scatter = unpack(up["gram"], D)
    rounding = D * torch.finfo(scatter.dtype).eps * float(scatter.trace())
    # S = G - sum_c N_c mu_c mu_c', as a product of rows sqrt(N_c) mu_c.
    rows = mean * n.sqrt().unsqueeze(-1)
    scatter -= rows.mT @ rows
    ridge = float(scatter.trace()) / max(1.0, float(n.sum()) - 1.0)
    # If every class has one row, the scatter is rounding error only. Its pseudo-inverse is 0.
    W = torch.zeros_like(mean)
    if ridge > rounding:
        W = D * solve(scatter, mean.mT, ridge).mT
    log_prior = -torch.log(n.new_tensor(float(C)))
    b = log_prior - 0.5 * (W * mean).sum(-1)
    return W, mask_logits(b, n > 0)


def prepare(up: Tree, ctx: Ctx) -> Tree:
    """The discriminants, which serve every alpha and scale."""
    W, b = discriminants(of_all_views(up, ctx))
    return {**up, "weights": W, "bias": b}


def aggregate(_server: Tree, up: Tree, ctx: Ctx) -> Tree:
    """s T + alpha W and alpha b, as a linear head."""
    if "weights" not in up:
        up = prepare(up, ctx)
    W = up["weights"]
    b = up["bias"]
    alpha = ctx.scalar("alpha")
    scale = ctx.scalar("scale")
    b = torch.where(up["count"] > 0, alpha * b, b)  # a class without a Gaussian stays out
    return {
        "W": (scale * ctx.text.double() + alpha * W).to(ctx.env.dtype),
        "b": b.to(ctx.env.dtype),
    }


def fidelity(hp: Hp, _views: int) -> str:
    """Stored augmentations replace the released code's random ones."""
    if hp["proto_view"] == "aug":
        return "cached_views"
    return "exact"


METHOD = replace(
    fedcgs.METHOD,
    name="gda",
    paper="Wang et al., ICLR 2024",
    summary="Zero-shot scores plus Gaussian discriminants from summed statistics; one round.",
    hparams=(
        UNIT_FEATURES,
        replace(
            PROTO_VIEW,
            help="rows from which the statistics are computed; center: the plain images; aug: all stored "
            "augmentations, as in the released code",
        ),
        HParam(
            "alpha",
            1.0,
            "float",
            "weight of the discriminants; 0 is clip-zs; the paper searches 1e-4 to 100",
            low=0.0,
            fit=False,
        ),
        HParam("scale", 100.0, "float", "logit scale s of the zero-shot term", low=1e-6, fit=False),
    ),
    fit=fit,
    aggregate=aggregate,
    prepare=prepare,
    fidelity=fidelity,
    zero_shot=model.by_text,
    needs=frozenset({"labels", "text"}),
    text_travels=False,
    depends_on_origin="logits are cosines with class texts",
    page=MethodPage(
        family="With class texts",
        formula=r"""
            \begin{aligned}
            \ell &= s\, f T^\top + \alpha\, (f W^\top + b), \qquad W_c = P \mu_c,
                \quad b_c = -\log C - \tfrac{1}{2}\, \mu_c^\top P \mu_c \\
            P &= D \Big(S + \frac{\mathrm{tr}\, S}{N - 1}\, I\Big)^{-1},
                \qquad S = \sum_c \sum_{i:\, y_i = c} (f_i - \mu_c)(f_i - \mu_c)^\top
            \end{aligned}
        """,
        terms=r"""
            $f$: the unit feature of an image; $T$: the unit features of the class texts; $s$: the scale of the logits;
            $\mu_c$: the mean feature of class $c$ over all clients; $N$, $D$, $C$: numbers of rows, features and
            classes; $\alpha$: `alpha`, selected on validation rows.
        """,
        when="""
            Use it if only one round is possible, and validation rows are available to select `alpha`. It trains
            nothing. It sends the same statistics as `fedcgs`.
        """,
        cite=("wang2024gda",),
    ),
)
