"""AFL: each client solves its own ridge regression, and the server merges the solutions without loss; one round.

Each client solves a ridge regression on its own rows and sends the solution and its Gram matrix (features by features).
The server merges these solutions one after another by an exact formula, and then removes the ridge. The result is the
least-squares solution of all rows, however the rows are partitioned.

He et al., "AFL: a single-round analytic approach for federated learning with pre-trained models", CVPR 2025. Client k
sends W_k = C_k^-1 X_k'Y_k and C_k = X_k'X_k + gamma I. The absolute aggregation law merges two of them exactly,
    W = (I - R_u C_v + R_u C_v (C_u + C_v)^-1 C_v) W_u + (I - R_v C_u + R_v C_u (C_u + C_v)^-1 C_u) W_v,
    C = C_u + C_v,    R = C^-1,
and the server merges one client after another. After K of them W is the ridge solution of all rows with K gamma instead
of gamma; its removal,
    W <- W + K gamma (C - K gamma I)^-1 W,
leaves the least squares of all rows, X'X W = X'Y, for every partition: this is ``fed3r`` with lam = 0, which needs no
merging and no separate matrix of each client. AFL adds that each client has a model of its own before anything is sent.

The removal needs X'X to be regular: more rows than features, and no feature that is a sum of others. If X'X is not
regular, the ridge K gamma stays, and ``cleaned`` is 0 in the log of the round. ``clean=false`` always keeps the ridge.

Checked against the released code (ZHUANGHP/Analytic-federated-learning, ``afl.py``): the steps here are the same, with
factors instead of inverses. The released commands set gamma = 1 and remove the ridge. C_k travels as a triangle; the
released code keeps all of C_k, and the inverse of C_k. The server holds all uploads of the round:
clients x D (D + 1) / 2 numbers.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedcache.federate.methods import fedcgs, fedncm
from fedcache.federate.methods.common import (
    FEAT_POST,
    ClientData,
    Ctx,
    HParam,
    MethodPage,
    Statistic,
    Tree,
    Uploads,
    UploadTensor,
)
from fedcache.heads.ridge import factored, solve, unpack


def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """W_k [C, D] and C_k, packed."""
    _, made = fedcgs.fit(down, state, data, ctx)
    D = ctx.env.width
    i = torch.arange(D, device=ctx.env.device)
    # The ridge is added to the diagonal, whose entries have these places in the packed triangle.
    diagonal = i * D - i * (i - 1) // 2
    made["gram"][..., diagonal] += ctx.scalar("gamma")
    W = solve(unpack(made["gram"], D), made["class_sum"].mT, 0.0, switch="gamma")
    return {}, {"head": W.mT.contiguous(), "gram": made["gram"]}


def uploads(_server: Tree, ctx: Ctx) -> Uploads:
    """W_k [C, D] and the triangle of C_k [D (D + 1) / 2]."""
    C = ctx.env.classes
    D = ctx.env.width
    gram_matrix = Statistic("gram", ridge=ctx.scalar("gamma"))
    return {
        "head": fedncm.statistic("ridge solutions", C, D),
        "gram": UploadTensor((D * (D + 1) // 2,), torch.float64, statistic=gram_matrix),
    }


def merge(Wu: Tensor, Cu: Tensor, Wv: Tensor, Cv: Tensor) -> tuple[Tensor, Tensor]:
    """The absolute aggregation law: W [D, C] and C [D, D] of two solutions together.

    Both terms have one form: (I - R_u C_v + R_u C_v S^-1 C_v) W_u = W_u - R_u (t - C_v S^-1 t) with t = C_v W_u and
    S = C_u + C_v.
    """
    # The system of both clients' rows together.
    S = Cu + Cv

    def term(W: Tensor, C: Tensor, other: Tensor) -> Tensor:
        t = other @ W
        difference = t - other @ solve(S, t, 0.0, switch="gamma")
        return W - solve(C, difference, 0.0, switch="gamma")

    return term(Wu, Cu, Cv) + term(Wv, Cv, Cu), S


def remove_ridge(W: Tensor, C: Tensor, ridge: float) -> Tensor | None:
    """W + ridge (C - ridge I)^-1 W, the solution without its ridge; None where C - ridge I is singular."""
    bare = C - ridge * torch.eye(len(C), dtype=C.dtype, device=C.device)
    factor, regular = factored(bare, C.diagonal())
    if regular:
        return W + ridge * torch.cholesky_solve(W, factor)
    return None


def aggregate(_server: Tree, up: Tree, ctx: Ctx) -> Tree:
    """The solutions merged in the order of the clients, without their ridge where that can be removed."""
    W = up["head"][0].mT
    C = unpack(up["gram"][0], ctx.env.width)
    for head, triangle in zip(up["head"][1:], up["gram"][1:], strict=True):
        W, C = merge(W, C, head.mT, unpack(triangle, ctx.env.width))
    # The merged C has the ridge of every client once.
    bare = None
    if ctx.hp["clean"]:
        ridge = len(up["head"]) * ctx.scalar("gamma")
        bare = remove_ridge(W, C, ridge)
    if bare is not None:
        W = bare
    return {
        "W": W.mT.contiguous().to(ctx.env.dtype),
        "b": ctx.zeros(W.shape[1]),
        "cleaned": torch.tensor(bare is not None, device=C.device),
    }


def cleaned(server: Tree, *_: object) -> dict[str, float]:
    """Whether the ridge was removed."""
    return {"cleaned": float(server["cleaned"])}


METHOD = replace(
    fedncm.METHOD,
    name="afl",
    paper="He et al., CVPR 2025",
    summary="Each client solves a ridge regression; the server merges the solutions into that of "
    "all rows; one round.",
    hparams=(
        FEAT_POST,
        HParam("gamma", 1.0, "float", "ridge of each client's solution", low=0.0),
        HParam(
            "clean",
            True,
            "bool",
            "remove the clients' ridges from the merged solution, if the matrix without them is "
            "regular",
            fit=False,
        ),
    ),
    fit=fit,
    uploads=uploads,
    pool=lambda _hp: {"": "stack"},
    aggregate=aggregate,
    broadcast=fedncm.send_head,
    additive=lambda _hp: False,
    diagnose=cleaned,
    paper_count=fedcgs.METHOD.paper_count,
    depends_on_origin="a ridge regression without an intercept",
    page=MethodPage(
        family="One round, closed form",
        formula=r"""
            \begin{aligned}
            W_k &= C_k^{-1} X_k^\top Y_k, \qquad C_k = X_k^\top X_k + \gamma I \\
            W &= \big(I - R_u C_v + R_u C_v (C_u + C_v)^{-1} C_v\big) W_u \\
            &\quad + \big(I - R_v C_u + R_v C_u (C_u + C_v)^{-1} C_u\big) W_v, \qquad R = C^{-1} \\
            W &\leftarrow W + K \gamma\, (C - K \gamma I)^{-1} W
            \end{aligned}
        """,
        terms=r"""
            $X_k$, $Y_k$: the features and one-hot labels of client $k$; $\gamma$: its ridge. The second equation merges
            the solutions $u$ and $v$; the third removes the ridge after all $K$ solutions are merged.
        """,
        when="""
            Use it if each client needs a model of its own before it sends anything. The merged model equals `fed3r`
            without a ridge. Prefer `fed3r` with a ridge if there are fewer rows than features.
        """,
        cite=("he2025afl",),
    ),
)
