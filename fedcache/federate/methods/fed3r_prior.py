"""Fed3R around the zero-shot classifier: ridge regression that shrinks towards class text features instead of zero.

Not in any paper. min_W |kappa Y - Z W|^2 + lam |W - W0|^2 with W0 = T', the text features, has the closed form
W = W0 + (A + lam I)^-1 (kappa B - A W0), from the upload of ``fed3r``: A = sum_i Z_i'Z_i, B = sum_i Z_i'Y_i.

The server alone needs the text features. lam is counted in rows: on unit features a direction that lam rows span is
half prior, half data. Limits: lam -> infinity is ``clip-zs``; lam -> 0 is least squares whatever the prior (T-K6).
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fedcache.federate.methods import fedcgs
from fedcache.federate.methods.common import (
    ClientData,
    Ctx,
    HParam,
    MethodPage,
    Tree,
    Uploads,
    model,
)
from fedcache.federate.methods.common.model import FEAT_POST, declare
from fedcache.heads.ridge import solve, solve_spectrum, spectrum, unpack

SUMS = ("gram", "class_sum")
"""A_i and B_i among the statistics of ``fedcgs``."""


def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """A_i, packed, and B_i of the client."""
    kept, made = fedcgs.fit(down, state, data, ctx)
    return kept, {name: made[name] for name in SUMS}


def uploads(server: Tree, ctx: Ctx) -> Uploads:
    """The triangle of A_i [D (D + 1) / 2] and B_i [C, D]."""
    declared = fedcgs.uploads(server, ctx)
    return {name: declared[name] for name in SUMS}


def prepare(up: Tree, ctx: Ctx) -> Tree:
    """The eigenvalues of A, which serve every lam and kappa."""
    return {**up, **spectrum(unpack(up["gram"], ctx.env.width), up["class_sum"].mT)}


def aggregate(_server: Tree, up: Tree, ctx: Ctx) -> Tree:
    """W0 + (A + lam I)^-1 (kappa B - A W0), as a linear head without bias."""
    prior: Tensor = ctx.text.double().mT
    kappa = float(ctx.number("kappa"))
    lam = float(ctx.number("lam"))
    if "values" in up:
        # In the basis of A's eigenvectors V the products with A are products with its eigenvalues.
        pull = up["values"].unsqueeze(-1) * (up["vectors"].mT @ prior)  # V'A W0
        W = prior + solve_spectrum({**up, "target": kappa * up["target"] - pull}, lam)
    else:
        A = unpack(up["gram"], ctx.env.width)
        W = prior + solve(A, kappa * up["class_sum"].mT - A @ prior, lam)
    return {
        "W": W.mT.contiguous().to(ctx.env.dtype),
        "b": W.new_zeros(W.shape[1]).to(ctx.env.dtype),
    }


METHOD = replace(
    fedcgs.METHOD,
    name="fed3r-prior",
    paper="ours; after Fani et al., ICML 2024",
    summary="Ridge regression around the zero-shot classifier; one round, exact for every partition.",
    hparams=(
        *declare(FEAT_POST, feat_post="l2"),
        HParam(
            "lam",
            1.0,
            "float",
            "weight of the zero-shot classifier; in rows, when features are unit",
            low=0.0,
            fit=False,
        ),
        HParam(
            "kappa",
            1.0,
            "float",
            "regression target of a row's own class; the others are 0",
            low=1e-6,
            fit=False,
        ),
    ),
    fit=fit,
    uploads=uploads,
    aggregate=aggregate,
    prepare=prepare,
    needs=frozenset({"labels", "text"}),
    zero_shot=model.by_text,
    text_travels=False,
    page=MethodPage(
        family="With class texts",
        formula=r"""
            W = W_0 + (A + \lambda I)^{-1} (\kappa B - A W_0), \qquad W_0 = T^\top,
                \quad A = \sum_i Z_i^\top Z_i, \quad B = \sum_i Z_i^\top Y_i
        """,
        terms=r"Ridge regression that shrinks to the class texts instead of zero; $\kappa$: what a label is worth.",
        when="""
            `fed3r` where rows are few and zero-shot is good: `lam` says how many rows the texts are worth. One round.
        """,
        cite=(
            "fani2024fed3r",
            "radford2021clip",
        ),
    ),
)
