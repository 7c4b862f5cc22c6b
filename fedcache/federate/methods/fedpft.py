"""FedPFT: a Gaussian mixture of every class travels once; the server trains a linear head on rows drawn from them.

Each client fits a mixture of Gaussians to its features of each class and sends the parameters. The server draws
synthetic features from all mixtures. It trains one linear head on them.

Beitollahi et al., "Parametric feature transfer: one-shot federated learning with foundation models", 2024. Client i
fits a mixture of ``k_mix`` Gaussians to its features of each class it has (EM by scikit-learn; one Gaussian is the
sample mean and variance, T-K10) and sends means, scales, weights and the count n_ic as 16-bit numbers. The server draws
n_ic rows from each and trains W, b by SGD. A scale is a standard deviation, or for ``cov=full`` the Cholesky factor of
the covariance: 16-bit numbers can hold a scale where they would round the variance to zero, and a covariance that is
computed from a rounded scale is never indefinite.

A class with n_ic <= k_mix rows is one Gaussian (the released code drops it), with the client's mean and the covariance
of the class over all clients, merged from their moments (T-K11; see tests/), because a covariance of so few rows means
nothing. A mean of one row is that row.

The paper trains on the drawn rows as they are, and SGD then depends on the mean of the features: on data of standard
deviation 1 the accuracy fell from 0.91 at a mean of 10 to 0.38 at a mean of 30. ``center`` (ours) subtracts the mean of
all Gaussians from the rows before the training, and corrects the bias afterwards. The uploaded means still have 16
bits: numbers near 1,000 are rounded to multiples of 0.5. Features that 16-bit numbers cannot hold end the run: features
above 65504, features whose means would mostly be sent as 0, and features whose deviation is less than half the spacing
of 16-bit numbers around their mean.

Clients are sorted by the content of their uploads before rows are drawn, so the result does not depend on their order.
Special case: a Gaussian of scale 0 gives its mean (T-K12; see tests/).
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from torch import Tensor

from fedcache.errors import FederatedRunError
from fedcache.federate.methods.common import (
    FEAT_POST,
    LINEAR,
    TRAINING,
    ClientData,
    Ctx,
    Defaults,
    Hp,
    HParam,
    Method,
    MethodPage,
    Statistic,
    StatisticKind,
    Tree,
    Uploads,
    UploadTensor,
    declare,
    model,
    train,
    without,
)
from fedcache.federate.methods.fedncm import masked, predict
from fedcache.heads.gaussian_mixture import Gaussians, fit_mixture, of_class, pooled, scale_size
from fedcache.heads.linear import head_around, init_linear

SCALE = "Bring the features to mean 0 and variance 1 with --set feat_post=standardize"
"""Hint of messages about features that 16-bit numbers cannot hold."""

COUNT_LIMIT = 65_535
"""Largest count of two bytes; a larger one takes two scalars."""


def fit(_down: Tree, _state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """mean [.., C, K, D], scale [.., C, K, S], weight [.., C, K] in 16 bits, and count [.., C]."""
    C = ctx.env.classes
    K = ctx.count("k_mix")
    D = ctx.env.width
    cov = str(ctx.hp["cov"])
    S = scale_size(cov, D)
    # EM runs on the CPU for one client and class at a time, so leading axes become one.
    lead = data.rows.shape[:-1]
    R = data.rows.shape[-1]
    rows = data.full()[0].reshape(-1, R, D).double().cpu().numpy()
    labels = data.labels().reshape(-1, R).cpu().numpy()
    shapes = {"mean": (C, K, D), "scale": (C, K, S), "weight": (C, K)}
    up = {k: np.zeros((len(rows), *shape)) for k, shape in shapes.items()}
    up["count"] = np.zeros((len(rows), C), np.int64)
    for i, (x, y, n) in enumerate(zip(rows, labels, data.n, strict=True)):
        for c in np.unique(y[:n]):
            z = x[:n][y[:n] == c]
            # A class with no more rows than Gaussians is one Gaussian.
            k = 1
            if len(z) > K:
                k = K
            seed = int(ctx.rng.generator("mixture", i, int(c)).integers(2**31))
            mixture = _fitted(z, k, cov, ctx, seed)
            up["mean"][i, c, :k] = mixture.mean
            up["scale"][i, c, :k] = mixture.scale
            up["weight"][i, c, :k] = mixture.weight
            up["count"][i, c] = len(z)
    sent = {}
    for name, a in up.items():
        t = torch.from_numpy(a).reshape(lead + a.shape[1:]).to(data.x.device)
        if t.is_floating_point():
            t = t.half()
        sent[name] = t
    return {}, sent


def uploads(_server: Tree, ctx: Ctx) -> Uploads:
    """mean [C, K, D], scale [C, K, S] and weight [C, K] of K Gaussians a class in 16 bits, and count [C]."""
    C = ctx.env.classes
    K = ctx.count("k_mix")
    D = ctx.env.width
    cov = str(ctx.hp["cov"])
    reg = ctx.scalar("reg_covar")
    kind: StatisticKind = "mixture deviations"
    if cov == "full":
        kind = "mixture factors"
    scale = Statistic(kind, ridge=reg)
    return {
        "mean": UploadTensor((C, K, D), torch.float16, statistic=Statistic("mixture means")),
        "scale": UploadTensor((C, K, scale_size(cov, D)), torch.float16, statistic=scale),
        "weight": UploadTensor((C, K), torch.float16, statistic=Statistic("mixture weights")),
        "count": UploadTensor((C,), torch.int64, counts_rows=True),
    }


def _fitted(z: np.ndarray, k: int, cov: str, ctx: Ctx, seed: int) -> Gaussians:
    """A mixture of k Gaussians fitted to the rows z [n, D].

    Raises FederatedRunError if a covariance is singular, or if 16-bit numbers cannot hold the mixture.
    """
    reg = ctx.scalar("reg_covar")
    # The engine refuses an upload with NaN, and its message names the client, which EM does not know.
    if not np.isfinite(z).all():
        nan = np.full((1, 1), np.nan)
        return Gaussians(nan, nan, np.ones(1))
    tol = ctx.scalar("tol")
    steps = ctx.count("max_iter")
    try:
        made = fit_mixture(z, k, cov, reg=reg, tol=tol, steps=steps, seed=seed)
    except (ValueError, np.linalg.LinAlgError) as error:
        works = max(1e-6, 10.0 * reg, 1e-4 * float(z.var(0).max()))
        raise FederatedRunError(
            f"A covariance of {len(z)} rows with reg_covar={reg:g} is not positive definite.",
            f"Use --set cov=diag, or regularise more, for example --set reg_covar={works:.1g}",
        ) from error
    largest = max(np.abs(made.mean).max(), np.abs(made.scale).max())
    of_features = np.abs(z).max()
    if largest > 65_504:
        raise FederatedRunError(
            f"The largest absolute value of a feature is {of_features:.3g}, but FedPFT sends 16-bit numbers, which "
            "cannot be larger than 65504.",
            SCALE,
        )
    becomes_zero = (made.mean != 0.0) & (made.mean.astype(np.float16) == 0.0)
    if np.mean(becomes_zero) > 0.5:
        raise FederatedRunError(
            f"Most means would be sent as 0. The largest absolute value of a feature is {of_features:.3g}, and "
            "FedPFT sends 16-bit numbers, whose smallest value above 0 is 6e-08.",
            SCALE,
        )
    return made


def sent(up: Tree, ctx: Ctx) -> int:
    """Scalars of the Gaussians of the classes the client has, and their counts."""
    n = up["count"]
    K = ctx.count("k_mix")
    # A class with more than K rows has K Gaussians, a smaller one has one, and a class without rows none.
    gaussians = torch.where(n > K, K, n > 0).sum()
    each = up["mean"].shape[-1] + up["scale"].shape[-1] + 1
    counts = (n > 0).sum() + (n > COUNT_LIMIT).sum()
    return int(gaussians) * each + int(counts)


def draw(up: Tree, ctx: Ctx) -> tuple[Tensor, Tensor]:
    """n_ic rows of every client's mixture of every class: features [N, D] in the run's dtype and labels [N].

    Args:
        up: uploads with a client axis in front, of any float dtype.
        ctx: the server's.
    """
    cov = str(ctx.hp["cov"])
    D = up["mean"].shape[-1]
    count, mean, scale, weight = (up[k].cpu().numpy() for k in ("count", "mean", "scale", "weight"))

    def content(i: int) -> tuple[list[int], bytes, bytes]:
        return count[i].tolist(), mean[i].tobytes(), scale[i].tobytes()

    # Clients are sorted by content, so that the draws do not depend on the order of clients.
    order = sorted(range(len(count)), key=content)
    count, mean, scale, weight = (a[order] for a in (count, mean, scale, weight))
    # With so few rows a client's own covariance means nothing, so the covariance over all clients replaces it.
    few = (count > 0) & (count <= ctx.count("k_mix"))
    shared = {}
    for c in np.flatnonzero(few.any(0)).tolist():
        mixture = of_class(mean, scale, weight, count, c)
        shared[c] = pooled(mixture, cov)[1]
    xs = []
    ys = []
    for i, counts in enumerate(count):
        rows_of_client = int(counts.sum())
        noise = ctx.rng.normal("synth", [rows_of_client], D, i).double().cpu().numpy()
        pick = ctx.rng.generator("component", 0, i)
        start = 0
        for c in np.flatnonzero(counts).tolist():
            has = weight[i, c] > 0
            if few[i, c]:
                scales = shared[c][None]
            else:
                scales = scale[i, c, has].astype(np.float64)
            means = mean[i, c, has].astype(np.float64)
            weights = weight[i, c, has].astype(np.float64)
            mixture = Gaussians(means, scales, weights)
            rows = mixture.rows(noise[start : start + counts[c]], pick, cov)
            xs.append(torch.from_numpy(rows).to(ctx.env.dtype))
            ys.append(torch.full((len(rows),), c))
            start += len(rows)
    return torch.cat(xs).to(ctx.env.device), torch.cat(ys).to(ctx.env.device)


def aggregate(_server: Tree, up: Tree, ctx: Ctx) -> Tree:
    """W and b after ``epochs`` of SGD on the drawn rows, from the common initial weights.

    Raises FederatedRunError for features whose differences are lost in the 16 bits of the means.
    """
    center = mean_of(up)
    variance = variances(up, ctx)
    # Around the mean, 16-bit numbers may be so far apart that they hide the differences between rows.
    spacing = np.spacing(center.abs().cpu().numpy().astype(np.float16))
    step = torch.from_numpy(spacing.astype(np.float64))
    hidden = (step.to(variance) / 2.0) ** 2 > variance
    if hidden.double().mean() > 0.5:
        value = float(center.abs().median())
        apart = float(step.median())
        deviation = float(variance.median().sqrt())
        raise FederatedRunError(
            f"FedPFT sends 16-bit numbers, which are too coarse for these features. Near their value {value:.3g}, two "
            f"16-bit numbers are {apart:.3g} apart, but the features have a standard deviation of only "
            f"{deviation:.3g}.",
            SCALE,
        )
    x, y = draw(up, ctx)
    if not ctx.hp["center"]:
        center = torch.zeros_like(x[0], dtype=torch.float64)
    x = (x - center).to(x.dtype)
    # The server trains on the drawn rows like a client: with one stored view, and without a broadcast ({}).
    rows = torch.arange(len(y), device=y.device)
    data = ClientData(x.unsqueeze(1), y, rows, (len(y),))
    uniform = ctx.rng.uniform("init")
    head = init_linear(uniform, ctx.env.classes, ctx.env.width)
    p = train(head, ("W", "b"), ctx.count("epochs"), model.ce_loss, {}, data, ctx)
    made = head_around(center, p["W"].double(), p["b"].double(), ctx.env.dtype)
    return masked(made, up["count"].sum(0))


def mean_of(up: Tree) -> Tensor:
    """Mean of all rows [D] in float64, from the means of the Gaussians; uploads with a client axis in front."""
    rows = up["count"].double().unsqueeze(-1) * up["weight"].double()
    total = (rows.unsqueeze(-1) * up["mean"].double()).sum((0, 1, 2))
    mean: Tensor = total / rows.sum()
    return mean


def diagonal_of_product(factor: Tensor, width: int) -> Tensor:
    """The diagonal of LL' [.., D] of Cholesky factors L that are packed row by row [.., D (D + 1) / 2]."""
    row = torch.tril_indices(width, width, device=factor.device)[0]
    made = factor.new_zeros(*factor.shape[:-1], width)
    return made.index_add_(-1, row, factor**2)


def notice(up: Tree, ctx: Ctx) -> str:
    """A sentence for a ``reg_covar`` that is larger than the variance of the features; else empty."""
    mean_variance = float(variances(up, ctx).mean())
    reg = ctx.scalar("reg_covar")
    if mean_variance >= reg:
        return ""
    return (
        f"the features have a variance of {mean_variance:.2g}, less than reg_covar={reg:g}, which is added to it, so "
        f"the drawn rows are mostly noise. {SCALE}"
    )


def variances(up: Tree, ctx: Ctx) -> Tensor:
    """Variance of each feature over all rows [D] in float64, without ``reg_covar``, from the Gaussians."""
    D = up["mean"].shape[-1]
    scale = up["scale"].double()
    if ctx.hp["cov"] == "full":
        within = diagonal_of_product(scale, D)
    else:
        within = scale**2
    rows = up["count"].double().unsqueeze(-1) * up["weight"].double()
    share = (rows / rows.sum()).unsqueeze(-1)
    deviation = up["mean"].double() - mean_of(up)
    total = (share * (within + deviation**2)).sum((0, 1, 2))
    variance: Tensor = (total - ctx.scalar("reg_covar")).clamp(min=0.0)
    return variance


def paper_count(width: int, classes: int, _clients: int, hp: Hp) -> tuple[int, int]:
    """Every class as ``k_mix`` Gaussians up; a linear head with bias down."""
    each = width + scale_size(str(hp["cov"]), width) + 1
    return cast(int, hp["k_mix"]) * each * classes, classes * (width + 1)


METHOD = Method(
    name="fedpft",
    paper="Beitollahi et al., 2024",
    summary="Clients send Gaussian mixtures of their features once; the server trains a head on their samples.",
    hparams=(
        FEAT_POST,
        HParam(
            "k_mix",
            1,
            "int",
            "Gaussians per class and client; a class with at most this many rows gets one",
            low=1,
        ),
        HParam(
            "cov",
            "spherical",
            "choice",
            "covariances of the Gaussians",
            choices=("spherical", "diag", "full"),
        ),
        HParam(
            "reg_covar", 1e-6, "float", "number added to the diagonal of every covariance", low=0.0
        ),
        HParam("tol", 1e-12, "float", "EM stops if the likelihood gains less than this", low=0.0),
        HParam("max_iter", 1000, "int", "largest number of EM steps", low=1),
        LINEAR,
        HParam(
            "center",
            True,
            "bool",
            "train on drawn rows minus their mean; the bias is corrected afterwards",
            official=False,
            fit=False,
        ),
        *declare(
            without(TRAINING, "reset_opt"),
            opt="sgd",
            lr=0.01,
            wd=0.0,
            batch=128,
            epochs=50,
            drop_last=False,
        ),
    ),
    defaults=Defaults(rounds=1, participation=None, clients=100, scheme="dirichlet"),
    init=lambda _ctx: {},
    fit=fit,
    uploads=uploads,
    pool=lambda _hp: {"": "stack"},
    aggregate=aggregate,
    predict=predict,
    notice=notice,
    gradient=False,
    one_shot=True,
    sent=sent,
    paper_count=paper_count,
    page=MethodPage(
        family="One round, closed form",
        formula=r"""
            \begin{aligned}
            \text{client } i:\quad & p_{ic}(z)
                = \sum_{k=1}^{K} w_{ick}\, \mathcal{N}\big(z;\ m_{ick}, \Sigma_{ick}\big) \\
            \text{server}:\quad & \min_{W, b}\ \sum_{i, c}\ \sum_{j=1}^{n_{ic}} -\log \mathrm{softmax}_c(W \tilde
                z_{icj} + b), \qquad \tilde z_{icj} \sim p_{ic}
            \end{aligned}
        """,
        terms=r"""
            $p_{ic}$: the mixture of client $i$ for class $c$, with weights $w$, means $m$ and covariances $\Sigma$,
            fitted by EM; $\tilde z$: a drawn feature, $n_{ic}$ from each mixture; $W$, $b$: the head.
        """,
        when="""
            Use it if the server must train the head itself, for example with a special loss. Mixtures reveal more about
            a client's rows than sums do, and take longer to compute.
        """,
        cite=("beitollahi2024fedpft",),
    ),
)
