"""FedCGS: linear discriminant analysis from summed statistics; one round, no training.

Guan et al., "Capture global feature statistics for one-shot federated learning", AAAI 2025. Clients send the Gram
matrix G_i = Z'Z, the class sums S_c and the class counts N_c; the server solves, with priors pi_c = N_c / N,
    W_c = Sigma^-1 (mu_c - mu),    b_c = log pi_c - (mu_c - mu)' Sigma^-1 (mu_c - mu) / 2 - mu' W_c,
with the mean mu of all rows. The paper has no mu: its scores differ by a number that is the same for all classes, and
by rounding, which grows with |mu|^2.
``cov=within``: Sigma = (G - sum_c N_c mu_c mu_c') / (N - C), right for Gaussian classes that share a covariance.
``cov=total``, the released code (D-75): Sigma = (G - N mu mu') / (N - 1). Sigma gets ``gamma_shrink`` I (code: none).

Statistics are float64 and add up, so the partition does not matter. With gamma_shrink = 0 neither does an invertible
affine map of the features (T-K8). C counts the classes that somebody has; the others are never predicted.

A feature that is constant over all rows is left out (ours): its variance is rounding, which grows with its square and
would decide the shrinkage.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from fedcache.errors import FederatedRunError
from fedcache.federate.methods import fedncm
from fedcache.federate.methods.common import (
    ClientData,
    Ctx,
    HParam,
    MethodPage,
    Statistic,
    Tree,
    Uploads,
    UploadTensor,
)
from fedcache.federate.methods.common.model import FEAT_POST
from fedcache.federate.methods.fedncm import add_up, around_mean, class_sums, masked
from fedcache.heads.linear import head_around
from fedcache.heads.ridge import (
    gram,
    solve,
    solve_spectrum,
    spectrum,
    unpack,
    varying,
    without_constants,
)


def sums(block: ClientData, ctx: Ctx, view: int = 0) -> Tree:
    """G, packed, S_c and N_c of a block of rows, each read in one stored view."""
    x, mask = block.full(view)
    if bool((mask == 1.0).all()):
        z = x.double()
    else:
        z = x.double() * mask.double().unsqueeze(-1)
    total, count = class_sums(z, block, ctx.env.classes, mask.double())
    return {"gram": gram(z), "class_sum": total, "count": count}


def fit(_down: Tree, _state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """G_i, packed, S_c and N_c of the client."""
    return {}, add_up(data, ctx, ctx.env.width, partial(sums, ctx=ctx))


def uploads(_server: Tree, ctx: Ctx) -> Uploads:
    """G_i, packed [D (D + 1) / 2], S_c [C, D] and N_c [C]."""
    C = ctx.env.classes
    D = ctx.env.width
    return {
        "gram": UploadTensor((D * (D + 1) // 2,), torch.float64, statistic=Statistic("gram")),
        "class_sum": UploadTensor((C, D), torch.float64, statistic=Statistic("class sums")),
        "count": UploadTensor((C,), torch.float64, counts_rows=True),
    }


def means(up: Tree) -> torch.Tensor:
    """mu_c [C, D]; zero for a class nobody has."""
    return up["class_sum"] / up["count"].clamp(min=1.0).unsqueeze(-1)


def covariance(up: Tree, cov: str) -> torch.Tensor:
    """Sigma [D, D] of pooled statistics, within classes or total.

    Raises:
        FedcacheError: exit 7 when there are too few rows for any covariance.
    """
    G = unpack(up["gram"], up["class_sum"].shape[-1])
    S = up["class_sum"]
    n = up["count"]
    if cov == "within":
        root = n.clamp(min=1.0).sqrt().unsqueeze(-1)
        between, lost = S / root, int((n > 0).sum())  # rows sqrt(N_c) mu_c
    else:
        between = S.sum(0, keepdim=True) / n.sum().sqrt()
        lost = 1
    # Degrees of freedom: every mean that is taken off costs one.
    free = float(n.sum()) - lost
    if free < 1:
        raise FederatedRunError(
            f"cov={cov} needs more rows than means, and the clients have {float(n.sum()):.0f} rows and {lost} means.",
            "Use more rows, or a method without covariances: --method fedncm",
        )
    return (G - between.mT @ between) / free


def moments(up: Tree) -> torch.Tensor:
    """Mean squares of the features, [D]: Sigma is what remains of them without the means."""
    squares = unpack(up["gram"], up["class_sum"].shape[-1]).diagonal()
    return squares / up["count"].sum()


def features_that_vary(up: Tree) -> torch.Tensor:
    """1.0 for each feature that varies over all rows, else 0.0, [D]."""
    n = up["count"].sum()
    return varying(moments(up), up["class_sum"].sum(0) / n, n)


def prepare(up: Tree, ctx: Ctx) -> Tree:
    """The eigenvalues of Sigma, which serve every shrinkage."""
    varies = features_that_vary(up)
    apart = around_mean(up["class_sum"], up["count"])[1] * varies
    sigma = without_constants(covariance(up, str(ctx.hp["cov"])), varies)
    return {**up, **spectrum(sigma, apart.mT, moments(up) * varies)}


def aggregate(_server: Tree, up: Tree, ctx: Ctx) -> Tree:
    """The discriminant functions, as a linear head."""
    n = up["count"]
    known = "values" in up
    varies = features_that_vary(up)
    center, apart = around_mean(up["class_sum"], n)
    apart = apart * varies
    if known:
        sigma = up["values"].diag()
    else:
        sigma = without_constants(covariance(up, str(ctx.hp["cov"])), varies)
    # Without a setting the ridge is a thousandth of the mean variance.
    gamma = 1e-3 * float(sigma.trace()) / sigma.shape[0]
    if ctx.hp["gamma_shrink"] is not None:
        gamma = float(ctx.number("gamma_shrink"))
    name = "gamma_shrink"
    if known:
        W = solve_spectrum(up, gamma, switch=name).mT
    else:
        W = solve(sigma, apart.mT, gamma, size=moments(up) * varies, switch=name).mT
    b = (n / n.sum()).log() - 0.5 * (W * apart).sum(-1)
    return masked(head_around(center, W, b, ctx.env.dtype), n)


METHOD = replace(
    fedncm.METHOD,
    name="fedcgs",
    paper="Guan et al., AAAI 2025",
    summary="Linear discriminant analysis from summed statistics; one round, exact for every partition.",
    hparams=(
        FEAT_POST,
        HParam(
            "cov",
            "within",
            "choice",
            "covariance within classes, or of all rows (D-75)",
            choices=("within", "total"),
            official="total",
            fit=False,
        ),
        HParam(
            "gamma_shrink",
            None,
            "float",
            "added to the diagonal of the covariance (D-75)",
            low=0.0,
            official=0.0,
            auto="1e-3 of its mean diagonal",
            fit=False,
        ),
    ),
    fit=fit,
    uploads=uploads,
    aggregate=aggregate,
    prepare=prepare,
    paper_count=lambda D, C, _clients, _hp: (D * (D + 1) // 2 + C * D, C * (D + 1)),
    page=MethodPage(
        family="One round, closed form",
        formula=r"""
            \begin{aligned}
            \Sigma &= \frac{1}{N - C} \Big(G - \sum_c N_c\, \mu_c \mu_c^\top\Big), \qquad G = \sum_i Z_i^\top Z_i \\
            W_c &= \Sigma^{-1} \mu_c, \qquad b_c = \log \frac{N_c}{N} - \tfrac{1}{2}\, \mu_c^\top \Sigma^{-1} \mu_c
            \end{aligned}
        """,
        terms=r"$\mu_c$, $N_c$: mean and number of all rows of class $c$. `gamma_shrink` adds a ridge to $\Sigma$.",
        when="""
            Linear discriminant analysis on all rows: as `fed3r`, with priors of classes. Give it a ridge
            (`gamma_shrink`) unless rows are many times more than features.
        """,
        cite=("guan2025fedcgs",),
    ),
)
