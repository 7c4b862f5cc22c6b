"""GH-OFL: Gaussian heads from summed class statistics; one round, no training.

Clients send counts, sums and squares of their features for each class. The server computes one of three Gaussian
classifiers from them: naive Bayes, or a linear or quadratic discriminant. There is no training, and the partition of
the rows does not matter.

Turazza et al., "The Gaussian-Head OFL family: one-shot federated learning from client global statistics", ICLR 2026.
Clients send the number and the sum of the rows of each class, and the squares or products that the head needs. The
server's scores are
    log pi_c - log det Sigma_c / 2 - (x - mu_c)' Sigma_c^-1 (x - mu_c) / 2,    pi_c = N_c / N,
with one of three covariances (``head``):
    nb   naive Bayes: the variances of each class, E[x^2] - mu_c^2, at least 1e-6; ``variance=pooled`` has one diagonal
         for all classes, that of the pooled covariance. Upload: sums of squares, C D (pooled: D).
    lda  the pooled covariance Sigma = (sum_i x x' - sum_c N_c mu_c mu_c') / (N - C): linear. Upload: a triangle.
    qda  the covariance of each class, (sum_i x x' - N_c mu_c mu_c') / (N_c - 1), and the pooled one for a class of one
         row. Upload: a triangle for each class, C D (D + 1) / 2, which is 13 million numbers at C = 100, D = 512.
The covariances of lda and qda are shrunk, (1 - a) Sigma + a tr(Sigma) / D I + 1e-6 I with a = ``shrink``.

By default (``shrink=auto``, ours) lda has a = g / (g + tr(Sigma) / D). Up to a factor, this adds g = ``gamma_shrink``
of ``fedcgs`` to Sigma. Generalised cross-validation can choose g for lda, but not for qda, whose covariance for each
class belongs to no regression. So qda keeps the released 0.05 (``preset=paper``). The estimate of least squared error
of a covariance (OAS), which follows from the same sums, was tried for qda: 5.9 points more on scikit-learn's digits
with 100 rows, 4.7 less on the packaged digits with 500 (glyph-clip).

All statistics add up, so the partition does not matter. C counts the classes that any client has; others are never
predicted. A feature that is constant over all rows is left out (ours): its variance is rounding. A client sends only
what the head needs. ``lda`` is ``fedcgs`` with nearly the same ridge. The paper's heads that are trained on samples
drawn in a Fisher subspace (FisherMix, Proto-Hyper) are ``gh-ofl-trained``. Its random projections are not implemented.

Checked against the released code (FabioTur-dev/One-Shot-FL, ``server/GH_OFL_server.py``), which is the source of the
floors and the shrinkage. That code counts absent classes in C, gives them a prior of 1e-12, and computes qda in
float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedcache.errors import FederatedRunError
from fedcache.federate.methods import fedcgs, fedncm
from fedcache.federate.methods.common import (
    FEAT_POST,
    ClientData,
    Ctx,
    Hp,
    HParam,
    MethodPage,
    RunConstants,
    StatisticKind,
    Tree,
    Uploads,
    UploadTensor,
    affine,
    count_of,
)
from fedcache.federate.methods.fedncm import add_up, around_mean, class_sums, masked, means
from fedcache.heads.linear import head_around
from fedcache.heads.losses import mask_logits
from fedcache.heads.ridge import (
    chosen_numbers,
    factored,
    gram,
    pack,
    unpack,
    unpack_triangle,
    varying,
    without_constants,
)

FLOOR = 1e-6
"""Smallest variance, and the number that is added to the diagonal of every covariance."""

RELEASED = 0.05
"""``shrink`` of the released code."""


STATISTICS: Mapping[str, StatisticKind] = {
    "class_square": "class squares",
    "square": "squares",
    "gram": "gram",
    "class_gram": "class grams",
}
"""Name of the uploaded squares or products -> their kind of statistic."""


def square_kind(hp: Hp) -> str:
    """Name of the squares that are uploaded: class_square | square | gram | class_gram."""
    if hp["head"] == "nb":
        if hp["variance"] == "class":
            return "class_square"
        return "square"
    if hp["head"] == "lda":
        return "gram"
    return "class_gram"


def class_grams(z: Tensor, y: Tensor, weight: Tensor, classes: int) -> Tensor:
    """Packed z'z of the rows of each class, [.., C, D (D + 1) / 2].

    Args:
        z: [.., R, D] rows in float64.
        y: [.., R] class indices.
        weight: [.., R] 1 on rows, 0 on padding.
        classes: C.
    """
    grams = []
    for c in range(classes):
        member = y == c
        if z.dim() == 2:
            # Rows of one client can be selected, so every row is multiplied once.
            rows = z[member & (weight > 0)]
        else:
            rows = z * (weight * member).unsqueeze(-1)
        grams.append(gram(rows))
    return torch.stack(grams, -2)


def fit(_down: Tree, _state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """N_c, S_c and the squares that the head needs."""
    kind = square_kind(ctx.hp)
    C = ctx.env.classes

    def sums(block: ClientData) -> Tree:
        x, mask = block.full()
        weight = mask.double()
        z = x.double() * weight.unsqueeze(-1)
        total, count = class_sums(z, block, C, weight)
        made = {"class_sum": total, "count": count}
        if kind == "class_square":
            made[kind] = class_sums(z**2, block, C, weight)[0]
        elif kind == "square":
            made[kind] = (z**2).sum(-2)
        elif kind == "gram":
            made[kind] = gram(z)
        else:
            made[kind] = class_grams(z, block.labels(), weight, C)
        return made

    return {}, add_up(data, ctx, ctx.env.width, sums)


def square_shape(hp: Hp, C: int, D: int) -> tuple[int, ...]:
    """Shape of the squares that are uploaded, for C classes and D features."""
    triangle = D * (D + 1) // 2
    shapes = {
        "class_square": (C, D),
        "square": (D,),
        "gram": (triangle,),
        "class_gram": (C, triangle),
    }
    return shapes[square_kind(hp)]


def uploads(_server: Tree, ctx: Ctx) -> Uploads:
    """S_c [C, D], N_c [C], and the squares."""
    C = ctx.env.classes
    D = ctx.env.width
    kind = square_kind(ctx.hp)
    shape = square_shape(ctx.hp, C, D)
    return {
        "class_sum": fedncm.statistic("class sums", C, D),
        "count": UploadTensor((C,), torch.float64, counts_rows=True),
        kind: fedncm.statistic(STATISTICS[kind], *shape),
    }


def pooled(up: Tree, squares: Tensor, between: Tensor) -> Tensor:
    """(squares - between) / (N - C), a covariance or its diagonal.

    Raises FederatedRunError when there are no more rows than classes.
    """
    rows = float(up["count"].sum())
    present = int((up["count"] > 0).sum())
    if rows <= present:
        raise FederatedRunError(
            f"A pooled covariance needs more rows than classes; the clients have {rows:.0f} rows of {present} classes.",
            "Use more rows, or a method without covariances: --method fedncm",
        )
    return (squares - between) / (rows - present)


def shrunk(S: Tensor, a: float) -> Tensor:
    """(1 - a) S + a tr(S) / D I + FLOOR I of covariances [.., D, D]."""
    D = S.shape[-1]
    trace = S.diagonal(dim1=-2, dim2=-1).sum(-1)
    level = a * trace.clamp(min=0.0) / D + FLOOR
    identity = torch.eye(D, dtype=S.dtype, device=S.device)
    return (1.0 - a) * S + level[..., None, None] * identity


def regular_factor(S: Tensor, size: Tensor) -> Tensor:
    """Cholesky factors of covariances [.., D, D]; ``size`` [.., D] as in ``factored``.

    Raises FederatedRunError when one of them is singular.
    """
    factor, regular = factored(S, size)
    if not regular.all():
        raise FederatedRunError(
            "A covariance is not positive definite: some features are constant or sums of other features, or there "
            "are more features than rows.",
            "Use more shrinkage, for example --set shrink=0.2",
        )
    return factor


def class_covariances(up: Tree, mean: Tensor) -> Tensor:
    """Sigma_c [C, D, D]; the pooled one for classes of fewer than two rows."""
    n = up["count"]
    D = mean.shape[-1]
    squares = unpack(up["class_gram"], D)
    rows = n.sqrt().unsqueeze(-1) * mean
    outer = rows.unsqueeze(-1) * rows.unsqueeze(-2)
    made = (squares - outer) / (n - 1.0).clamp(min=1.0)[:, None, None]
    few = n < 2.0
    if few.any():
        made[few] = pooled(up, squares.sum(0), outer.sum(0))
    return made


def mean_squares(up: Tree, kind: str) -> Tensor:
    """Mean squares of the features over all rows, [D]."""
    sums = up[kind]
    if kind.startswith("class_"):
        sums = sums.sum(0)
    if kind.endswith("gram"):
        sums = unpack(sums, up["class_sum"].shape[-1]).diagonal()
    return sums / up["count"].sum()


def notice(up: Tree, ctx: Ctx) -> str:
    """A sentence for features with a variance below the floor; else empty."""
    mean = up["class_sum"].sum(0) / up["count"].sum()
    variance = mean_squares(up, square_kind(ctx.hp)) - mean**2
    mean_variance = float(variance.mean())
    if mean_variance >= FLOOR:
        return ""
    return (
        f"the features have a variance of {mean_variance:.2g}, less than the {FLOOR:g} that the released code adds to "
        "it, so the classes hardly differ. Bring the features to mean 0 and variance 1 with --set feat_post=standardize"
    )


def shrinkage(sigma: Tensor, up: Tree, ctx: Ctx) -> tuple[float, Tree]:
    """``shrink`` for lda; if it is automatic, also the numbers that the server keeps (``RidgeChoice.numbers``)."""
    if ctx.hp["shrink"] is not None:
        return ctx.scalar("shrink"), {}
    free = fedcgs.freedom(up, "within")
    kept = fedcgs.automatic(up).numbers("shrink", sigma, free)
    # (1 - a) (Sigma + g I) = (1 - a) Sigma + a tr(Sigma) / D I
    g = float(kept["shrink"])
    a = g / (g + float(sigma.trace()) / len(sigma))
    return a, kept | {"shrink": sigma.new_tensor(a)}


def settle(hp: Hp, _env: RunConstants) -> Hp:
    """The released value instead of an automatic one, for all heads but lda."""
    if hp["shrink"] is None and hp["head"] != "lda":
        return {**hp, "shrink": RELEASED}
    return hp


HEAD = ("W", "b", "mean", "root", "inverse")
"""Names of the server's tensors that are broadcast."""


def broadcast(server: Tree, _ctx: Ctx) -> Tree:
    """The head, without the other tensors that the server keeps."""
    return {k: t for k, t in server.items() if k in HEAD}


def aggregate(_server: Tree, up: Tree, ctx: Ctx) -> Tree:
    """The head: a linear one for lda; else means, inverse covariances and the constant term of each class."""
    n = up["count"]
    mean = means(up["class_sum"], n)
    kind = square_kind(ctx.hp)
    prior = (n / n.sum()).clamp(min=1e-300).log()
    size = mean_squares(up, kind)
    varies = varying(size, up["class_sum"].sum(0) / n.sum(), n.sum())
    made: Tree = {"mean": mean}
    if kind == "gram":
        weighted = mean * n.sqrt().unsqueeze(-1)
        sigma = pooled(up, unpack(up["gram"], mean.shape[-1]), weighted.mT @ weighted)
        sigma = without_constants(sigma, varies)
        a, kept = shrinkage(sigma, up, ctx)
        S = shrunk(sigma, a)
        center, deviation = around_mean(up["class_sum"], n)
        deviation = deviation * varies
        W = torch.cholesky_solve(deviation.mT, regular_factor(S, size * varies)).mT
        b = prior - 0.5 * (W * deviation).sum(-1)
        return masked(head_around(center, W, b, ctx.env.dtype), n) | kept
    if kind == "class_gram":
        sigma = without_constants(class_covariances(up, mean), varies)
        S = shrunk(sigma, ctx.scalar("shrink"))
        squares = unpack(up["class_gram"], mean.shape[-1]).diagonal(dim1=-2, dim2=-1)
        factor = regular_factor(S, squares / n.clamp(min=1.0).unsqueeze(-1) * varies)
        eye = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device) * varies
        # |L^-1 (x - mu)|^2 is the quadratic form, and L^-T is an upper triangle.
        made["root"] = pack(torch.linalg.solve_triangular(factor, eye, upper=False).mT)
        half_log_det = (factor.diagonal(dim1=-2, dim2=-1).log() * varies).sum(-1)
        b = prior - half_log_det
    else:
        if kind == "class_square":
            variance = up[kind] / n.clamp(min=1.0).unsqueeze(-1) - mean**2
        else:
            between = (n.unsqueeze(-1) * mean**2).sum(0)
            variance = pooled(up, up[kind], between).unsqueeze(0)
        variance = variance.clamp(min=FLOOR)
        made["inverse"] = varies / variance
        b = prior - 0.5 * (variance.log() * varies).sum(-1)
    made["b"] = mask_logits(b, n > 0)
    return {k: t.to(ctx.env.dtype) for k, t in made.items()}


def predict(down: Tree, _state: Tree, _data: ClientData, x: Tensor, _ctx: Ctx) -> Tensor:
    """Log-densities up to a constant, [.., N, C]; class by class, as [.., N, C, D] may be large."""
    if "W" in down:
        return affine(x, down["W"], down["b"])
    mean = down["mean"]
    scores = []
    for c in range(mean.shape[-2]):
        deviation = x - mean[..., c, :].unsqueeze(-2)
        if "root" in down:
            root = unpack_triangle(down["root"][..., c, :], x.shape[-1])
            square = (deviation @ root) ** 2
        else:
            inverse = down["inverse"].expand_as(mean)[..., c, :]
            square = deviation**2 * inverse.unsqueeze(-2)
        b = down["b"][..., c].unsqueeze(-1)
        scores.append(b - 0.5 * square.sum(-1))
    return torch.stack(scores, -1)


def paper_count(width: int, classes: int, _clients: int, hp: Hp) -> tuple[int, int]:
    """Sums and squares up; a linear head, or means, inverses and constants, down."""
    squares = math.prod(square_shape(hp, classes, width))
    head = classes * (width + 1)
    if hp["head"] != "lda":
        head += squares
    return classes * width + squares, head


METHOD = replace(
    fedncm.METHOD,
    name="gh-ofl",
    paper="Turazza et al., ICLR 2026",
    summary="Naive Bayes, linear discriminants or quadratic discriminants from summed "
    "statistics; one round.",
    hparams=(
        FEAT_POST,
        HParam(
            "head",
            "nb",
            "choice",
            "nb: naive Bayes; lda: linear discriminants; qda: quadratic discriminants",
            choices=("nb", "lda", "qda"),
        ),
        HParam(
            "variance",
            "class",
            "choice",
            "variances of naive Bayes; class: separate for each class; pooled: the same for all "
            "classes",
            choices=("class", "pooled"),
        ),
        HParam(
            "shrink",
            RELEASED,
            "float",
            "for lda and qda: share of a covariance that is replaced by its mean diagonal",
            low=0.0,
            high=1.0,
            fit=False,
            usual="auto",
            auto="for lda the value with the lowest generalised cross-validation error, else 0.05",
        ),
    ),
    fit=fit,
    uploads=uploads,
    aggregate=aggregate,
    broadcast=broadcast,
    settle=settle,
    diagnose=lambda server, *_: chosen_numbers(server, "shrink"),
    notice=notice,
    predict=predict,
    trainable=count_of(*HEAD),
    paper_count=paper_count,
    page=MethodPage(
        family="One round, closed form",
        formula=r"""
            \begin{aligned}
            &\max_c\ \log \pi_c - \tfrac{1}{2} \log\det \Sigma_c - \tfrac{1}{2} (x - \mu_c)^\top \Sigma_c^{-1} (x
                - \mu_c), \qquad \pi_c = \frac{N_c}{N} \\
            &\Sigma \leftarrow (1 - a)\, \Sigma + a\, \frac{\mathrm{tr}\, \Sigma}{D}\, I
            \end{aligned}
        """,
        terms=r"""
            $\mu_c$, $N_c$: mean and number of all rows of class $c$; $N$, $D$: numbers of rows and features;
            $\Sigma_c$: a diagonal for each class (`head=nb`), one matrix for all (`lda`) or one for each class (`qda`);
            $a$: `shrink`, for the matrices.
        """,
        when="""
            Use `head=nb` if uploads must be small. Use `head=lda` if a client can send a matrix; it equals FedCGS with
            nearly the same ridge. `head=qda` needs many rows for each class.
        """,
        cite=("turazza2026ghofl",),
    ),
)
