"""Fed3R: federated recursive ridge regression; one round, no training, the same model for every partition.

Fani et al., "Accelerating heterogeneous federated learning with closed-form classifiers", ICML 2024. Each client sends
A_i = Z'Z and B_i = Z'Y; the server solves W = (sum_i A_i + lam I)^-1 sum_i B_i.

Paper: no bias. Released code: a column of ones is appended and regularised like the others, and every class column of W
(its bias too) is divided by its norm, which can change the argmax (D-74): ``bias``, ``reg_bias``, ``w_normalize``.

Only the upper triangle of A_i is computed and sent, D(D+1)/2 numbers; the bias column costs the feature sums and class
counts, D + C more. Statistics are float64 and add up, so the model is the centralised ridge (T-K2). Limits:
lam -> infinity gives lam W -> sum B (T-K5); ``rff_dim`` > 0 works on random Fourier features made from the shared seed;
``class_weight=local`` weighs a row by 1 / (the client's own n_c), which does depend on the partition.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from typing import cast

import numpy as np
import torch
from torch import Tensor

from fedcache.errors import Exit, FedcacheError
from fedcache.federate.clients import LaneData
from fedcache.federate.lanes import Ctx
from fedcache.federate.method import Defaults, Hp, HParam, Method
from fedcache.federate.methods.fedncm import class_sums, predict
from fedcache.federate.models import FEAT_POST
from fedcache.heads.linear import Tree

BLOCKS = 8


@lru_cache(maxsize=2)
def _triangle(width: int, device: torch.device) -> Tensor:
    i, j = torch.triu_indices(width, width, device=device)
    packed: Tensor = i * width + j
    return packed


def gram(z: Tensor) -> Tensor:
    """Upper triangle of Z'Z, [.., D(D+1)/2] row by row; Z [.., n, D]. Blocks below the diagonal are skipped."""
    D = z.shape[-1]
    full = z.new_empty(*z.shape[:-2], D, D)
    edges = [D * k // BLOCKS for k in range(BLOCKS + 1)]
    for a, b in pairwise(edges):
        full[..., a:b, a:] = z[..., a:b].mT @ z[..., a:]
    return full.flatten(-2).index_select(-1, _triangle(D, z.device))


def unpack(packed: Tensor, width: int) -> Tensor:
    """The symmetric [D, D] matrix of a packed upper triangle."""
    full = packed.new_zeros(width * width)
    full[_triangle(width, packed.device)] = packed
    upper = full.view(width, width)
    return upper + upper.triu(1).mT


@lru_cache(maxsize=1)
def _fourier(seed: int, width: int, dim: int, scale: float) -> tuple[Tensor, Tensor]:
    g = np.random.default_rng([seed, width, dim])
    return torch.from_numpy(g.standard_normal((width, dim)) / scale), torch.from_numpy(g.uniform(0, 2 * np.pi, dim))


def lift(x: Tensor, ctx: Ctx) -> Tensor:
    """phi(x) in float64: x itself, or sqrt(2/Dr) cos(x Om + u) with Om ~ N(0, 1/sigma^2), u ~ U[0, 2 pi)."""
    dim = ctx.count("rff_dim")
    z = x.double()
    if not dim:
        return z
    om, u = _fourier(ctx.rng.seed, ctx.env.width, dim, float(ctx.number("rff_sigma")))
    return torch.cos(z @ om.to(z.device) + u.to(z.device)) * math.sqrt(2.0 / dim)


def fit(_down: Tree, _state: Tree, data: LaneData, ctx: Ctx) -> tuple[Tree, Tree]:
    """A_i and B_i of the client (and, with a bias, what the column of ones adds to them)."""
    x, mask = data.full()
    weight = mask.double()
    z = lift(x, ctx) * weight.unsqueeze(-1)
    if ctx.hp["class_weight"] == "local":
        y = data.labels(data.positions())
        _, count = class_sums(z, data, ctx.env.classes, weight)
        weight = weight / count.clamp(min=1.0).gather(-1, y)
    total, count = class_sums(z, data, ctx.env.classes, weight)
    root = weight.sqrt().unsqueeze(-1) if ctx.hp["class_weight"] == "local" else 1.0
    up = {"gram": gram(z * root), "class_sum": total}
    if ctx.hp["bias"]:
        up |= {"sum": (z * weight.unsqueeze(-1)).sum(-2), "count": count}
    return {}, up


def solve(A: Tensor, B: Tensor, lam: float, free: int = 0) -> Tensor:
    """(A + lam I)^-1 B by Cholesky; the last ``free`` diagonal entries are not regularised. A [D, D], B [D, C]."""
    ridge = torch.full((A.shape[-1],), lam, dtype=A.dtype, device=A.device)
    if free:
        ridge[-free:] = 0.0
    factor, failed = torch.linalg.cholesky_ex(A + torch.diag(ridge))
    if failed:
        raise FedcacheError(
            Exit.FEDERATED,
            f"The ridge system with lam={lam:g} is not positive definite: its {A.shape[-1]} features are dependent.",
            "Regularise more, for example --set lam=0.01.",
        )
    return torch.cholesky_solve(B, factor)


def aggregate(_server: Tree, up: Tree, ctx: Ctx) -> Tree:
    """W = (sum A_i + lam I)^-1 sum B_i, as a linear head."""
    B = up["class_sum"].mT
    A = unpack(up["gram"], B.shape[0])
    bias = bool(ctx.hp["bias"])
    if bias:
        ones, count = up["sum"].unsqueeze(-1), up["count"]
        A = torch.cat([torch.cat([A, ones], 1), torch.cat([ones.mT, count.sum().reshape(1, 1)], 1)], 0)
        B = torch.cat([B, count.unsqueeze(0)], 0)
    W = solve(A, B, float(ctx.number("lam")), free=int(bias and not ctx.hp["reg_bias"]))
    if ctx.hp["w_normalize"]:
        W = W / W.norm(dim=0).clamp(min=1e-12)
    b = W[-1] if bias else W.new_zeros(W.shape[1])
    weights = W[:-1] if bias else W
    return {"W": weights.mT.contiguous().to(ctx.env.dtype), "b": b.to(ctx.env.dtype)}


def scores(down: Tree, state: Tree, data: LaneData, x: Tensor, ctx: Ctx) -> Tensor:
    """phi(x) W + b, [.., N, C]."""
    if ctx.count("rff_dim"):
        x = lift(x, ctx).to(ctx.env.dtype)
    return predict(down, state, data, x, ctx)


def paper_count(width: int, classes: int, _clients: int, hp: Hp) -> tuple[int, int]:
    """The triangle and the class sums up; a linear head with bias down."""
    D = cast(int, hp["rff_dim"]) or width
    return D * (D + 1) // 2 + classes * D, classes * (D + 1)


METHOD = Method(
    name="fed3r",
    paper="Fani et al., ICML 2024",
    summary="Ridge regression from summed statistics; one round, exact for every partition.",
    hparams=(
        FEAT_POST,
        HParam("lam", 0.01, "float", "ridge; in units of summed squared features", low=0.0),
        HParam("bias", False, "bool", "append a column of ones (D-74)", official=True),
        HParam("reg_bias", False, "bool", "regularise that column too (D-74)", official=True),
        HParam("w_normalize", False, "bool", "divide each class column by its norm (D-74)", official=True),
        HParam("class_weight", "none", "choice", "weigh rows by 1 / the client's own n_c", choices=("none", "local")),
        HParam("rff_dim", 0, "int", "random Fourier features; 0 is none", low=0),
        HParam("rff_sigma", 1.0, "float", "bandwidth of their Gaussian kernel", low=1e-6),
    ),
    defaults=Defaults(rounds=1, participation=None, clients=100, scheme="dirichlet"),
    init=lambda _ctx: {},
    fit=fit,
    pool=lambda _hp: {"": "sum"},
    aggregate=aggregate,
    predict=scores,
    gradient=False,
    one_shot=True,
    paper_count=paper_count,
)
