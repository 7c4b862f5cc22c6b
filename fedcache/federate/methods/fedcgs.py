"""FedCGS: linear discriminant analysis from summed statistics; one round, no training.

Each client sends counts and sums of its features per class, and one matrix of feature products. The server adds them up
and computes a linear discriminant analysis of all rows. There is no training, and the partition of the rows does not
matter.

Guan et al., "Capture global feature statistics for one-shot federated learning", AAAI 2025. Clients send the Gram
matrix G_i = Z'Z, the class sums S_c and the class counts N_c; the server solves, with priors pi_c = N_c / N,
    W_c = Sigma^-1 (mu_c - mu),    b_c = log pi_c - (mu_c - mu)' Sigma^-1 (mu_c - mu) / 2 - mu' W_c,
with the mean mu of all rows. The paper has no mu: its scores differ by a number that is the same for all classes, and
by rounding, which grows with |mu|^2.
``cov=within``: Sigma = (G - sum_c N_c mu_c mu_c') / (N - C), right for Gaussian classes that share a covariance.
``cov=total``, the released code (D-75): Sigma = (G - N mu mu') / (N - 1). ``gamma_shrink`` I is added to Sigma
(released code: nothing).

Statistics are float64 and add up, so the partition does not matter. With gamma_shrink = 0 neither does an invertible
affine map of the features. C counts the classes that any client has; others are never predicted.

A feature that is constant over all rows is left out (ours): its variance is rounding, which grows with its square and
would decide the shrinkage.

``gamma_shrink=auto`` (ours; the paper prints none) is lam / (N - C) for the lam with the lowest generalised
cross-validation of ridge regression on the classes around the mean, as ``fed3r`` with a bias chooses it. With
S_w = (N - C) Sigma, S_t = S_w + M'M, the rows sqrt(N_c) (mu_c - mu) of M, and B' = diag(sqrt N_c) M, its solutions
(S_t + lam I)^-1 B span the same directions as the discriminants (S_w + lam I)^-1 M' (Woodbury): this is penalised
discriminant analysis (Hastie, Buja and Tibshirani, 1995). With ``cov=total`` the two are one system, and N - 1 takes
the place of N - C. All of this can be computed from G, S_c and N_c.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from fedcache.errors import FederatedRunError
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
)
from fedcache.federate.methods.fed3r import best_around_mean, centred
from fedcache.federate.methods.fedncm import (
    add_up,
    around_mean,
    class_sums,
    masked,
    send_head,
    statistic,
)
from fedcache.heads.linear import head_around
from fedcache.heads.ridge import (
    RidgeChoice,
    chosen_numbers,
    gram,
    solve,
    solve_spectrum,
    spectrum,
    unpack,
    varying,
    without_constants,
)


def sums(block: ClientData, ctx: Ctx, view: int = 0) -> Tree:
    """G, packed, S_c and N_c of a block of rows, all read in one stored view."""
    x, mask = block.full(view)
    weight = mask.double()
    z = x.double()
    if not bool((mask == 1.0).all()):
        z = z * weight.unsqueeze(-1)
    total, count = class_sums(z, block, ctx.env.classes, weight)
    return {"gram": gram(z), "class_sum": total, "count": count}


def fit(_down: Tree, _state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """G_i, packed, S_c and N_c of the client."""
    return {}, add_up(data, ctx, ctx.env.width, partial(sums, ctx=ctx))


def uploads(_server: Tree, ctx: Ctx) -> Uploads:
    """G_i, packed [D (D + 1) / 2], S_c [C, D] and N_c [C]."""
    C = ctx.env.classes
    D = ctx.env.width
    return {
        "gram": statistic("gram", D * (D + 1) // 2),
        "class_sum": statistic("class sums", C, D),
        "count": UploadTensor((C,), torch.float64, counts_rows=True),
    }


def freedom(up: Tree, cov: str) -> float:
    """Degrees of freedom: the number of rows minus the number of means that are subtracted from them."""
    lost = 1
    if cov == "within":
        lost = int((up["count"] > 0).sum())
    return float(up["count"].sum()) - lost


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
        between = S / root  # rows sqrt(N_c) mu_c
    else:
        between = S.sum(0, keepdim=True) / n.sum().sqrt()
    free = freedom(up, cov)
    if free < 1:
        rows = float(n.sum())
        raise FederatedRunError(
            f"cov={cov} subtracts {rows - free:.0f} means from the rows and needs more rows than means, but the "
            f"clients have {rows:.0f} rows.",
            "Use more rows, or a method without covariances: --method fedncm",
        )
    return (G - between.mT @ between) / free


def moments(up: Tree) -> torch.Tensor:
    """Mean squares of the features, [D]: their variances before the squared means are subtracted."""
    squares = unpack(up["gram"], up["class_sum"].shape[-1]).diagonal()
    return squares / up["count"].sum()


def features_that_vary(up: Tree) -> torch.Tensor:
    """[D]: 1.0 for each feature that varies over all rows, else 0.0."""
    n = up["count"].sum()
    mean = up["class_sum"].sum(0) / n
    return varying(moments(up), mean, n)


def automatic(up: Tree) -> RidgeChoice:
    """The ridge of S_t = G - N mu mu' with the lowest generalised cross-validation, among the features that vary."""
    A, B, _, _ = centred({**up, "sum": up["class_sum"].sum(-2)})
    varies = features_that_vary(up) > 0
    known = spectrum(A[varies][:, varies], B[varies])
    return best_around_mean(known, up["count"])


def prepare(up: Tree, ctx: Ctx) -> Tree:
    """The eigenvalues of Sigma, which serve every shrinkage."""
    varies = features_that_vary(up)
    _, deviation = around_mean(up["class_sum"], up["count"])
    deviation = deviation * varies
    sigma = without_constants(covariance(up, str(ctx.hp["cov"])), varies)
    return {**up, **spectrum(sigma, deviation.mT, moments(up) * varies)}


def aggregate(_server: Tree, up: Tree, ctx: Ctx) -> Tree:
    """The discriminant functions, as a linear head, and the numbers of an automatic shrinkage."""
    n = up["count"]
    has_spectrum = "values" in up
    varies = features_that_vary(up)
    center, deviation = around_mean(up["class_sum"], n)
    deviation = deviation * varies
    if has_spectrum:
        # After ``prepare``, only the dtype and the device of ``sigma`` are used.
        sigma = up["values"].diag()
    else:
        sigma = without_constants(covariance(up, str(ctx.hp["cov"])), varies)
    name = "gamma_shrink"
    kept: Tree = {}
    if ctx.hp[name] is None:
        free = freedom(up, str(ctx.hp["cov"]))
        kept = automatic(up).numbers(name, sigma, free)
        gamma = float(kept[name])
    else:
        gamma = ctx.scalar(name)
    if has_spectrum:
        W = solve_spectrum(up, gamma, switch=name).mT
    else:
        W = solve(sigma, deviation.mT, gamma, size=moments(up) * varies, switch=name).mT
    b = (n / n.sum()).log() - 0.5 * (W * deviation).sum(-1)
    return masked(head_around(center, W, b, ctx.env.dtype), n) | kept


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
            "covariance; within: within classes; total: of all rows (D-75)",
            choices=("within", "total"),
            official="total",
            fit=False,
        ),
        HParam(
            "gamma_shrink",
            None,
            "float",
            "number added to the diagonal of the covariance (D-75)",
            low=0.0,
            official=0.0,
            auto="the value with the lowest generalised cross-validation error",
            fit=False,
        ),
    ),
    fit=fit,
    uploads=uploads,
    aggregate=aggregate,
    broadcast=send_head,
    diagnose=lambda server, *_: chosen_numbers(server, "gamma_shrink"),
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
        terms=r"""
            $Z_i$: the features of client $i$; $\mu_c$, $N_c$: mean and number of all rows of class $c$; $N$: all rows;
            $C$: the number of classes. `gamma_shrink` adds a ridge to $\Sigma$.
        """,
        when="""
            Use it instead of `fed3r` if class frequencies should influence the prediction. It selects its ridge
            (`gamma_shrink`) by generalised cross-validation.
        """,
        cite=("guan2025fedcgs",),
    ),
)
