"""Fed3R around the zero-shot classifier: ridge regression that shrinks towards class text features instead of zero.

This is ``fed3r`` with a different target for its ridge: the weights shrink towards the class text features instead of
zero. Clients send the same sums as in ``fed3r``, and only the server needs the texts. With few rows the result is close
to zero-shot; with many rows it is close to least squares.

This method is in no paper. min_W |kappa Y - Z W|^2 + lam |W - W0|^2 with W0 = T', the text features, has the closed
form W = W0 + (A + lam I)^-1 (kappa B - A W0), from the upload of ``fed3r``: A = sum_i Z_i'Z_i, B = sum_i Z_i'Y_i.

The server alone needs the text features. lam is counted in rows: on unit features a direction that lam rows span is
half prior, half data. Special cases: lam -> infinity is ``clip-zs``; lam -> 0 is least squares for every prior (T-K6;
see tests/).

By default ``lam=auto``: the lam with the lowest generalised cross-validation, as in ``fed3r``. W - W0 is the ridge
regression of kappa Y - Z W0, so the criterion is that of these targets: Z'(kappa Y - Z W0) = kappa B - A W0, and the
sum of their squares is kappa^2 n - 2 kappa tr(W0'B) + tr(W0'A W0). Each row of unit length adds 1 to tr(A), so n is
tr(A), and nothing else needs to be sent. If ``feat_post`` does not give rows unit length, n is unknown and lam is 1, as
in preset ``paper``. The criterion measures squared errors, not accuracy: on the packaged digits (glyph-clip, 20 draws)
``auto`` has 1.0 points less than lam = 1 with 100 rows, 0.4 more with 200 and 2.8 more with 3,000, where the texts no
longer count.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fedcache.federate.methods import fedcgs
from fedcache.federate.methods.common import (
    UNIT_FEATURES,
    ClientData,
    Ctx,
    Hp,
    HParam,
    MethodPage,
    RunConstants,
    Tree,
    Uploads,
    model,
    select,
)
from fedcache.heads.ridge import best_ridge, chosen_numbers, solve_spectrum, spectrum, unpack

PAPER_LAM = 1.0
"""lam of preset ``paper``, although no paper has this method."""

UNIT_ROWS = ("l2", "l2_concat", "center")
"""Values of ``feat_post`` that give every row the length 1 (with class texts there is only one backbone)."""

SUMS = ("gram", "class_sum")
"""Names of A_i and B_i among the statistics of ``fedcgs``."""


def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """A_i, packed, and B_i of the client."""
    kept, made = fedcgs.fit(down, state, data, ctx)
    return kept, select(made, SUMS)


def uploads(server: Tree, ctx: Ctx) -> Uploads:
    """The triangle of A_i [D (D + 1) / 2] and B_i [C, D]."""
    declared = fedcgs.uploads(server, ctx)
    return {name: declared[name] for name in SUMS}


def prepare(up: Tree, ctx: Ctx) -> Tree:
    """The eigenvalues of A, which serve every lam and kappa."""
    A = unpack(up["gram"], ctx.env.width)
    return {**up, **spectrum(A, up["class_sum"].mT)}


def aggregate(_server: Tree, up: Tree, ctx: Ctx) -> Tree:
    """W0 + (A + lam I)^-1 (kappa B - A W0), as a linear head without bias, and the numbers of an automatic lam."""
    if "values" not in up:
        up = prepare(up, ctx)
    prior: Tensor = ctx.text.double().mT
    kappa = ctx.scalar("kappa")
    # In the basis of A's eigenvectors V the products with A are products with its eigenvalues.
    rotated = up["vectors"].mT @ prior
    pull = up["values"].unsqueeze(-1) * rotated  # V'A W0
    known = {**up, "target": kappa * up["target"] - pull}
    kept: Tree = {}
    if ctx.hp["lam"] is None:
        # The noise of a private run may make the number of rows negative.
        rows = max(float(up["values"].sum()), 1.0)
        crossed = float((rotated * (pull - 2.0 * kappa * up["target"])).sum())
        choice = best_ridge(known, kappa**2 * rows + crossed, rows)
        kept = choice.numbers("lam", prior)
        lam = choice.ridge
    else:
        lam = ctx.scalar("lam")
    W = prior + solve_spectrum(known, lam)
    head = {"W": W.mT.contiguous().to(ctx.env.dtype), "b": ctx.zeros(W.shape[1])}
    return head | kept


def settle(hp: Hp, _env: RunConstants) -> Hp:
    """``PAPER_LAM`` instead of an automatic lam, if the number of rows cannot be computed from the sums."""
    if hp["lam"] is None and hp["feat_post"] not in UNIT_ROWS:
        return {**hp, "lam": PAPER_LAM}
    return hp


METHOD = replace(
    fedcgs.METHOD,
    name="fed3r-prior",
    paper="ours; after Fani et al., ICML 2024",
    summary="Ridge regression around the zero-shot classifier; one round, exact for every partition.",
    hparams=(
        UNIT_FEATURES,
        HParam(
            "lam",
            PAPER_LAM,
            "float",
            "weight of the zero-shot classifier; a number of rows, if features have unit length",
            low=0.0,
            fit=False,
            usual="auto",
            auto="the value with the lowest generalised cross-validation error; 1 unless "
            "feat_post is l2, l2_concat or center",
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
    settle=settle,
    diagnose=lambda server, *_: chosen_numbers(server, "lam"),
    needs=frozenset({"labels", "text"}),
    zero_shot=model.by_text,
    text_travels=False,
    depends_on_origin="a ridge regression without an intercept, towards class texts",
    page=MethodPage(
        family="With class texts",
        formula=r"""
            W = W_0 + (A + \lambda I)^{-1} (\kappa B - A W_0), \qquad W_0 = T^\top,
                \quad A = \sum_i Z_i^\top Z_i, \quad B = \sum_i Z_i^\top Y_i
        """,
        terms=r"""
            $Z_i$, $Y_i$: the features and one-hot labels of client $i$; $T$: the class text features; $\lambda$: `lam`,
            selected by generalised cross-validation; $\kappa$: the weight of the labels.
        """,
        when="""
            Use it instead of `fed3r` if there are few rows and zero-shot classification is good. `lam` is the number of
            rows that the texts are worth. To stay near the texts, set it yourself, for example `lam=1`.
        """,
        cite=(
            "fani2024fed3r",
            "radford2021clip",
        ),
    ),
)
