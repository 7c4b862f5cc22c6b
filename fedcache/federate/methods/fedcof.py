"""FedCOF: class covariances from class means alone; one round, the upload of FedNCM.

Each client sends the sum of its features and the number of its rows for each class. The server estimates the covariance
of a class from the differences between the clients' means. It then solves a ridge regression with this estimate instead
of the true matrix.

Goswami et al., "Covariances for free: exploiting mean distributions for training-free federated learning", NeurIPS
2025. Clients send sums and counts per class. Means of n_kc rows scatter with covariance Sigma_c / n_kc, so over the K_c
clients with class c
    Sig_c = 1/(K_c - 1) sum_k n_kc (mu_kc - mu_c)(mu_kc - mu_c)' + gamma I
is unbiased (before gamma) when a class's rows are assigned to clients at random; K_c = 1 leaves gamma I. Then
    G = sum_c (N_c - 1) Sig_c + N mu mu',    W_c = G^-1 S_c / |G^-1 S_c|,    b = 0:
ridge regression whose Gram matrix is estimated, without the scatter between classes. Few clients per class make a weak
estimate, so the log of the round has the smallest and the mean K_c (``owners_min``, ``owners_mean``). With one row per
client Sig_c is the sample covariance itself.

The paper takes gamma from 0.1 to 1 for unnormalised features. On features of unit length that is tens of times their
variance, and the method becomes FedNCM. So ``gamma=auto`` follows the variance of the features. With
``gamma_auto=backbone`` it is the value of the released scripts for the backbone: 0.1 for MobileNets, 1.0 for ViTs and
SqueezeNets; other backbones get the default of the released program, 1.0 (D-86). Features of several backbones get 0.1
only if all are MobileNets. The gamma of a run is in the log of the round.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedcache.federate.methods import fedncm
from fedcache.federate.methods.common import (
    FEAT_POST,
    Ctx,
    Hp,
    HParam,
    MethodPage,
    RunConstants,
    Tree,
)
from fedcache.federate.methods.fedncm import around_mean, means, send_head
from fedcache.heads.losses import mask_logits
from fedcache.heads.ridge import solve

MOBILENET = 0.1
OTHERS = 1.0
"""gamma of the released scripts for MobileNets, and for all other backbones."""


def settle(hp: Hp, env: RunConstants) -> Hp:
    """gamma of the released scripts, for ``gamma_auto=backbone``."""
    if hp["gamma"] is not None or hp["gamma_auto"] != "backbone":
        return hp
    gamma = OTHERS
    if env.backbones and all("mobilenet" in name.lower() for name in env.backbones):
        gamma = MOBILENET
    return {**hp, "gamma": gamma}


def scatter(sums: Tensor, counts: Tensor) -> Tensor:
    """sum_c (N_c - 1) Sig_c, without gamma, [D, D].

    Args:
        sums: [m, C, D] of each client and class.
        counts: [m, C] rows behind them.
    """
    N = counts.sum(0)
    K = (counts > 0).sum(0)
    mean = means(sums.sum(0), N)
    # With K_c = 1 the one mean is mu_c, so nothing is added.
    share = (N - 1.0).clamp(min=0.0) / (K - 1.0).clamp(min=1.0)
    weight = (counts * share).sqrt().unsqueeze(-1)
    deviation = means(sums, counts) - mean
    # The spread of the clients' class means around the mean of the class estimates its covariance.
    rows = (deviation * weight).flatten(0, 1)
    return rows.mT @ rows


def variance(sums: Tensor, counts: Tensor) -> float:
    """The estimated variance within classes plus the variance between classes, as a mean over features."""
    N = counts.sum(0)
    D = sums.shape[-1]
    _, deviation = around_mean(sums.sum(0), N)
    between = (N.unsqueeze(-1) * deviation**2).sum()
    within = scatter(sums, counts).trace()
    return float((within + between) / N.sum()) / D


def aggregate(_server: Tree, up: Tree, ctx: Ctx) -> Tree:
    """The ridge head of the estimated Gram matrix, and K_c and gamma, which stay with the server."""
    S = up["sum"].sum(0)
    N = up["count"].sum(0)
    mean = S.sum(0, keepdim=True) / N.sum()
    G = scatter(up["sum"], up["count"]) + N.sum() * mean.mT @ mean
    if ctx.hp["gamma"] is None:
        gamma = 1e-2 * variance(up["sum"], up["count"])
    else:
        gamma = ctx.scalar("gamma")
    # gamma is added to the covariance of each class, which counts N_c - 1 times.
    times = max(1.0, float((N - 1.0).clamp(min=0.0).sum()))
    W = solve(G, S.mT, times * gamma, switch="gamma", unit=times)
    b = mask_logits(torch.zeros_like(N), N > 0)
    return {
        "W": normalize(W.mT, dim=-1).to(ctx.env.dtype).contiguous(),
        "b": b.to(ctx.env.dtype),
        "owners": (up["count"] > 0).sum(0),
        "gamma": G.new_tensor(gamma),
    }


def estimate(server: Tree, *_: object) -> dict[str, float]:
    """gamma, and the smallest and the mean K_c over the classes that any client has."""
    known = server["owners"][server["owners"] > 0].double()
    return {
        "gamma": float(server["gamma"]),
        "owners_min": float(known.min()),
        "owners_mean": float(known.mean()),
    }


METHOD = replace(
    fedncm.METHOD,
    name="fedcof",
    paper="Goswami et al., NeurIPS 2025",
    summary="Ridge regression with class covariances that are estimated from class means; one round.",
    hparams=(
        FEAT_POST,
        HParam(
            "gamma",
            None,
            "float",
            "number added to the diagonal of every class covariance; the paper has 0.1 to 1",
            low=0.0,
            auto="the value of gamma_auto",
        ),
        HParam(
            "gamma_auto",
            "scale",
            "choice",
            "value of gamma=auto; scale: 1e-2 of the estimated variance; backbone: the value of "
            "the released scripts for the backbone (D-86)",
            choices=("scale", "backbone"),
            official="backbone",
            fit=False,
        ),
    ),
    pool=lambda _hp: {"": "stack"},
    aggregate=aggregate,
    broadcast=send_head,
    additive=lambda _hp: False,
    settle=settle,
    diagnose=estimate,
    depends_on_origin="a ridge regression without an intercept",
    page=MethodPage(
        family="One round, closed form",
        formula=r"""
            \begin{aligned}
            \hat\Sigma_c &= \frac{1}{K_c - 1} \sum_k n_{kc}\, (\mu_{kc} - \mu_c)(\mu_{kc} - \mu_c)^\top + \gamma I \\
            G &= \sum_c (N_c - 1)\, \hat\Sigma_c + N \mu \mu^\top,
                \qquad W_c = \frac{G^{-1} S_c}{\lVert G^{-1} S_c \rVert}
            \end{aligned}
        """,
        terms=r"""
            $\mu_{kc}$: the mean of client $k$'s $n_{kc}$ rows of class $c$; $\mu_c$, $S_c$, $N_c$: mean, sum and number
            of all rows of the class; $\mu$, $N$: mean and number of the rows of all classes; $K_c$: the number of
            clients that have the class; $\gamma$: the ridge.
        """,
        when="""
            Use it for a better head than that of FedNCM with the same upload. Each class must be at several clients.
        """,
        cite=("goswami2025fedcof",),
    ),
)
