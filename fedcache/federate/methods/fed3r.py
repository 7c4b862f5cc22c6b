"""Fed3R: federated recursive ridge regression; one round, no training, the same model for every partition.

Each client sends two sums over its rows: the products of its features with each other, and with its labels. The server
adds the sums of all clients and solves one ridge regression. The result equals ridge regression on all rows in one
place, however the rows are partitioned.

Fani et al., "Accelerating heterogeneous federated learning with closed-form classifiers", ICML 2024. Each client sends
A_i = Z'Z and B_i = Z'Y; the server solves W = (sum_i A_i + lam I)^-1 sum_i B_i.

Paper: no bias. Released code: a column of ones is appended and regularised like the others (``bias``, ``reg_bias``).
The weights and the bias of a class are divided by the norm of its weights without the bias, which can change the
prediction (``w_normalize``; D-74, D-85).

Only the upper triangle of A_i is computed and sent, D(D+1)/2 numbers. The class counts, C more numbers, give the number
of rows in the sums. The bias column needs the sum of the features, D more numbers. Statistics are float64 and add up,
so the model is the centralised ridge (T-K2; see tests/).
``precision=float32`` (ours) multiplies blocks of rows in float32 and adds the products in float64. An entry of A is
then off by at most 6.2e-5 sqrt(a_jj a_kk), and A by 6.2e-5 tr(A) (``gram_single``). A sum in B is off by 6.2e-5 of the
sum of absolute values. So the model is the same if lam or the smallest eigenvalue of A is well above these errors.
Special case: lam -> infinity gives lam W -> sum B. ``class_weight=local`` weighs a row by 1 / (the client's own n_c),
so its result depends on the partition.

By default ``lam=auto`` (ours): the server takes the lam with the lowest generalised cross-validation, which
``heads.ridge.best_ridge`` computes from the sums. So lam does not depend on the partition. The paper's 0.01
(``preset=paper``) is below every eigenvalue of A on the features of many deep networks, where it does nothing.
``lam_by=clients`` takes the lam whose model without client i has the lowest squared error on the rows of client i,
summed over the clients. This error follows from the clients' sums, with the model W_i of all clients but i:
    sum_i tr(W_i' A_i W_i) - 2 tr(W_i' B_i) + n_i.
Use it for few clients that differ, such as domains: the server keeps the sums of each client, and decomposes a matrix
for each.

``rff_dim`` > 0 works on random Fourier features made from the shared seed. Their bandwidth has to follow the scale of
the features: ``rff_sigma=auto`` is the mean length of all clients' training rows, 1 for unit features (D-87). It costs
one exchange more: each client sends the sum of the lengths of its rows and the number of these rows, and receives the
mean. The mean is over all clients, even if only some take part in the round. This exchange counts in the traffic of the
round, as one scalar up and one scalar down for every client. The log of the round has the mean as ``rff_sigma``. Sites
of a real federation do not have that exchange, so their users set a number.

``omega`` > 0 (ours) gives personal models: client i solves (A + omega A_i + lam I)^-1 (B + omega B_i) from the summed
statistics that it receives, so its own rows count 1 + omega times. omega = 0 gives the global model, and omega ->
infinity the model of the client's rows alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor

from fedcache.errors import FederatedRunError
from fedcache.federate.engine.context import generator
from fedcache.federate.methods import fedncm
from fedcache.federate.methods.common import (
    FEAT_POST,
    ClientData,
    Ctx,
    Hp,
    HParam,
    MethodPage,
    Pooling,
    RunConstants,
    Statistic,
    StatisticKind,
    Tree,
    Uploads,
    UploadTensor,
    personal_if,
)
from fedcache.federate.methods.fedncm import add_up, class_rows, class_sums, predict, send_head
from fedcache.heads.ridge import (
    LONGEST_FOURIER,
    SINGLE_ROUNDING,
    SINGLE_ROWS,
    SPECTRUM,
    RidgeChoice,
    best_ridge,
    chosen_numbers,
    drawn_fourier,
    fourier_features,
    gram,
    gram_single,
    ridges_of,
    solve,
    solve_spectrum,
    spectrum,
    unpack,
    usual_eigenvalue,
    varying,
    without_constants,
)


@lru_cache(maxsize=1)
def _drawn(seed: int, width: int, dim: int, scale: float) -> tuple[Tensor, Tensor]:
    """Frequencies and phases of a run, the same for all clients and the server."""
    return drawn_fourier(generator(seed, "fourier", width, dim), width, dim, scale)


def feature_map(x: Tensor, ctx: Ctx) -> Tensor:
    """phi(x) in float64: x itself, or sqrt(2/Dr) cos(x Om + u) with Om ~ N(0, 1/sigma^2), u ~ U[0, 2 pi)."""
    dim = ctx.count("rff_dim")
    z = x.double()
    if not dim:
        return z
    sigma = ctx.scalar("rff_sigma")
    frequencies, phases = _drawn(ctx.rng.seed, ctx.env.width, dim, sigma)
    return fourier_features(z, frequencies, phases)


def sums_single(z: Tensor, block: ClientData, ctx: Ctx, weight: Tensor) -> tuple[Tensor, Tensor]:
    """``class_sums`` of rows z [.., R, D]: added ``SINGLE_ROWS`` at a time in float32, and these sums in float64."""
    C = ctx.env.classes
    lead = z.shape[:-2]
    D = z.shape[-1]
    y = block.labels()
    total = z.new_zeros(*lead, C, D, dtype=torch.float64)
    row_blocks = torch.split(z, SINGLE_ROWS, -2)
    class_blocks = torch.split(y, SINGLE_ROWS, -1)
    for rows, classes in zip(row_blocks, class_blocks, strict=True):
        part = z.new_zeros(*lead, C, D)
        # For one client, ``index_add_`` adds whole rows, which is faster than an index for each number.
        if z.dim() == 2:
            total += part.index_add_(0, classes, rows)
        else:
            total += part.scatter_add_(-2, classes.unsqueeze(-1).expand_as(rows), rows)
    count = weight.new_zeros(*lead, C).scatter_add_(-1, y, weight)
    return total, count


def statistics(data: ClientData, ctx: Ctx) -> Tree:
    """A_i, B_i and the class counts of the client; with a bias, also the sum of the features."""
    class_counts = None
    single = ctx.hp["precision"] == "float32"
    if ctx.hp["class_weight"] == "local":
        # n_c over all rows of the client, not only over a block.
        class_counts = class_rows(data, ctx)

    def sums(block: ClientData) -> Tree:
        x, mask = block.full()
        weight = mask.double()
        if single and not ctx.count("rff_dim"):
            z = x
        else:
            z = feature_map(x, ctx)
        if single:
            z = z.float()
        if not bool((weight == 1.0).all()):  # padding becomes rows of zeros
            z = z * weight.to(z.dtype).unsqueeze(-1)
        rooted = z
        weighted = z
        if class_counts is not None:
            # A row counts by its weight: once in B_i, and by the root in both factors of the product in A_i.
            rows_of_class = class_counts.clamp(min=1.0).gather(-1, block.labels())
            weight = weight / rows_of_class
            factor = weight.to(z.dtype).unsqueeze(-1)
            rooted = z * factor.sqrt()
            weighted = z * factor
        if single:
            total, count = sums_single(weighted, block, ctx, weight)
            matrix = gram_single(rooted)
        else:
            total, count = class_sums(z, block, ctx.env.classes, weight)
            matrix = gram(rooted)
        made = {"gram": matrix, "class_sum": total}
        if sends_counts(ctx.hp):
            made[count_name(ctx.hp)] = count
        if ctx.hp["bias"]:
            made["sum"] = total.sum(-2)
        return made

    return add_up(data, ctx, max(ctx.env.width, ctx.count("rff_dim")), sums)


def fit(_down: Tree, _state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """The statistics. Nothing is kept: a personal model computes them again from the rows, which take less memory."""
    return {}, statistics(data, ctx)


def uploads(_server: Tree, ctx: Ctx) -> Uploads:
    """The triangle of A_i, B_i, and the class counts; with a bias, also the sum of the (Fourier) features."""
    C = ctx.env.classes
    D = ctx.env.width
    longest = None
    if ctx.count("rff_dim"):
        D = ctx.count("rff_dim")
        longest = LONGEST_FOURIER
    rounding = 0.0
    if ctx.hp["precision"] == "float32":
        rounding = SINGLE_ROUNDING

    def sent(shape: tuple[int, ...], kind: StatisticKind) -> UploadTensor:
        statistic = Statistic(kind, longest=longest, rounding=rounding)
        return UploadTensor(shape, torch.float64, statistic=statistic)

    triangle = D * (D + 1) // 2
    sums = {"gram": sent((triangle,), "gram"), "class_sum": sent((C, D), "class sums")}
    if sends_counts(ctx.hp):
        counted = bool(ctx.hp["bias"])
        sums[count_name(ctx.hp)] = UploadTensor((C,), torch.float64, counts_rows=counted)
    if ctx.hp["bias"]:
        sums["sum"] = sent((D,), "sum")
    return sums


def sends_counts(hp: Hp) -> bool:
    """Whether the class counts travel. Weighted rows are not counted, and only a bias needs the sums of weights."""
    return hp["class_weight"] == "none" or bool(hp["bias"])


def count_name(hp: Hp) -> str:
    """Name of the class counts. A bias needs exact counts; else they are sums of targets, which may get noise."""
    if hp["bias"]:
        return "count"
    return "target_sum"


def has_free_bias(hp: Hp) -> bool:
    """Whether there is a bias that is not regularised."""
    return bool(hp["bias"]) and not hp["reg_bias"]


def system(sums: Tree, ctx: Ctx) -> tuple[Tensor, Tensor]:
    """A and B of summed statistics, with the row and column of ones where there is a regularised bias."""
    B = sums["class_sum"].mT
    A = unpack(sums["gram"], B.shape[-2])
    if ctx.hp["bias"]:
        # A column of ones adds the sum of the rows and their number to A, and the class counts to B.
        ones = sums["sum"].unsqueeze(-1)
        count = sums["count"].unsqueeze(-2)
        upper = torch.cat([A, ones], -1)
        lower = torch.cat([ones.mT, count.sum(-1, keepdim=True)], -1)
        A = torch.cat([upper, lower], -2)
        B = torch.cat([B, count], -2)
    return A, B


def prepare(sums: Tree, ctx: Ctx) -> Tree:
    """The sums with the eigenvalues of A, for an automatic lam, or if a given lam can be solved with them.

    It can if every diagonal entry gets the same ridge and there is only one model.
    """
    if ctx.hp["lam_by"] == "clients":
        total = {name: t.sum(0) for name, t in sums.items()}
        known = {**total, **eigenvalues(total, ctx)}
        return known | {"best": best_for_clients(sums, known, ctx)}
    given = ctx.hp["lam"] is not None
    if given and (has_free_bias(ctx.hp) or personal(ctx.hp)):
        return sums
    return {**sums, **eigenvalues(sums, ctx)}


def eigenvalues(sums: Tree, ctx: Ctx) -> Tree:
    """``spectrum`` of the system that the ridge is added to."""
    if has_free_bias(ctx.hp):
        return spectrum(*centred(sums)[:3])
    return spectrum(*system(sums, ctx))


def automatic(known: Tree, ctx: Ctx) -> RidgeChoice:
    """The lam of ``auto``, from the sums and their ``eigenvalues``."""
    count = known[count_name(ctx.hp)]
    # Noise may make the number of rows negative.
    rows = max(float(count.sum()), 1.0)
    if has_free_bias(ctx.hp):
        choice = best_around_mean(known, count)
    else:
        choice = best_ridge(known, rows, rows)
    if "best" in known:
        return replace(choice, ridge=float(known["best"]), limited=False)
    return choice


def best_for_clients(up: Tree, known: Tree, ctx: Ctx) -> Tensor:
    """The lam with the lowest squared error on clients that are left out of the model, summed over all clients.

    Args:
        up: the sums of each client [M, ...].
        known: the sums of all clients, with their ``eigenvalues``.
        ctx: of the server.

    Raises:
        FedcacheError: exit 7 if there is only one client.
    """
    if len(up["gram"]) < 2:
        raise FederatedRunError(
            "lam_by=clients leaves out one client at a time, but there is only one client.",
            "Use --set lam_by=rows",
        )
    ridges = ridges_of(known["values"])
    errors = torch.zeros_like(ridges)
    for i in range(len(up["gram"])):
        own = {name: t[i] for name, t in up.items()}
        others = {name: known[name] - t for name, t in own.items()}
        others |= eigenvalues(others, ctx)
        A, B = system(own, ctx)
        for k, ridge in enumerate(ridges.tolist()):
            W, b = weights(others, ctx, ridge)
            if ctx.hp["bias"]:
                W = torch.cat([W, b.unsqueeze(-2)], -2)
            # The error without its term n_i, which does not depend on the ridge.
            errors[k] += (W * (A @ W - 2.0 * B)).sum()
    return ridges[errors.argmin()]


def best_around_mean(known: Tree, count: Tensor) -> RidgeChoice:
    """``best_ridge`` of the ``spectrum`` of a ``centred`` system; ``count`` [C] rows of each class."""
    rows = max(float(count.sum()), 1.0)
    # Around their mean, the squared targets of a class with n_c of n rows sum to n_c - n_c^2 / n. The mean is one
    # parameter.
    squares = rows - float((count**2).sum()) / rows
    return best_ridge(known, squares, rows - 1.0)


def head(sums: Tree, ctx: Ctx, lam: float) -> Tree:
    """W = (A + lam I)^-1 B of summed statistics, as a linear head W [.., C, D], b [.., C]."""
    W, b = weights(sums, ctx, lam)
    if ctx.hp["w_normalize"]:
        # The norm is that of the weights alone, and divides the bias too (D-85).
        norm = W.norm(dim=-2).clamp(min=1e-12)
        W = W / norm.unsqueeze(-2)
        b = b / norm
    return {"W": W.mT.contiguous().to(ctx.env.dtype), "b": b.to(ctx.env.dtype)}


def weights(sums: Tree, ctx: Ctx, lam: float) -> tuple[Tensor, Tensor]:
    """Weights [.., D, C] and bias [.., C] of summed statistics, before any normalisation."""
    if has_free_bias(ctx.hp):
        return around_mean(sums, lam)
    return through_zero(sums, ctx, lam)


def through_zero(sums: Tree, ctx: Ctx, lam: float) -> tuple[Tensor, Tensor]:
    """Weights [.., D, C] and bias [.., C]. A bias is regularised as the weights are; without one it is 0."""
    if "values" in sums:
        W = solve_spectrum(sums, lam)
    else:
        W = solve(*system(sums, ctx), lam)
    if ctx.hp["bias"]:
        return W[..., :-1, :], W[..., -1, :]
    return W, torch.zeros_like(W[..., 0, :])


def centred(sums: Tree) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A [.., D, D] and B [.., D, C] around the mean of the rows; size [.., D], as in ``factored``; the mean [.., D].

    The entries of constant features are such that their weight becomes 0.
    """
    B = sums["class_sum"].mT
    count = sums["count"]
    rows = count.sum(-1)
    mean = sums["sum"] / rows.unsqueeze(-1)
    A = unpack(sums["gram"], B.shape[-2])
    size = A.diagonal(dim1=-2, dim2=-1)
    varies = varying(size / rows.unsqueeze(-1), mean, rows)
    A = A - sums["sum"].unsqueeze(-1) * mean.unsqueeze(-2)
    A = without_constants(A, varies)
    B = (B - mean.unsqueeze(-1) * count.unsqueeze(-2)) * varies.unsqueeze(-1)
    return A, B, size * varies, mean


def around_mean(sums: Tree, lam: float) -> tuple[Tensor, Tensor]:
    """Weights [.., D, C] and a bias [.., C] that is not regularised: ridge regression around the mean.

    A constant feature gets the weight 0, which is the exact solution.
    """
    A, B, size, mean = centred(sums)
    if "values" in sums:
        W = solve_spectrum(sums, lam)
    else:
        W = solve(A, B, lam, size=size)
    count = sums["count"]
    share = count.unsqueeze(-2) / count.sum(-1)[..., None, None]
    bias = share - mean.unsqueeze(-2) @ W
    return W, bias.squeeze(-2)


def notice(sums: Tree, ctx: Ctx) -> str:
    """A sentence for a given ``lam`` that decides the model more than the rows do, or that does nothing; else empty."""
    if ctx.hp["lam"] is None:
        return ""
    lam = ctx.scalar("lam")
    usual = usual_eigenvalue(unpack(sums["gram"], sums["class_sum"].shape[-1]))
    if usual < lam:
        return (
            f"lam={lam:g} is larger than the eigenvalues of the summed squared features, which are about "
            f"{usual:.2g} without the largest, so it determines the model more than the rows do. Use "
            f"--set lam={0.01 * usual:.1g}"
        )
    width = sums["class_sum"].shape[-1]
    count = sums.get(count_name(ctx.hp))
    if count is None or float(count.sum()) >= FEW_ROWS * width:
        return ""
    A = system(sums, ctx)[0]
    # A - lam I is positive definite where lam is below all eigenvalues of A.
    identity = torch.eye(len(A), dtype=A.dtype, device=A.device)
    failed = torch.linalg.cholesky_ex(A - lam * identity)[1]
    if int(failed):
        return ""
    known = {**sums, **eigenvalues(sums, ctx)}
    auto = automatic(known, ctx).ridge
    return (
        f"lam={lam:g} is below all eigenvalues of the summed squared features, so it has no effect, and there are "
        f"fewer than {FEW_ROWS} rows for each of {width} features. Use --set lam=auto, which is {auto:.3g}"
    )


PAPER_LAM = 0.01
"""lam of the paper."""
FEW_ROWS = 3
"""Number of rows per feature below which least squares without a ridge overfits single rows."""


def aggregate(_server: Tree, up: Tree, ctx: Ctx) -> Tree:
    """The head and lam; with omega > 0 lam and the sums, from which each client makes its own head."""
    if ctx.hp["lam"] is None:
        if "values" not in up:
            up = prepare(up, ctx)
        kept = automatic(up, ctx).numbers("lam", up["gram"])
    else:
        kept = {"lam": up["gram"].new_tensor(ctx.scalar("lam"))}
    if personal(ctx.hp):
        sums = {k: t for k, t in up.items() if k not in (*SPECTRUM, "best")}
        return sums | kept
    return head(up, ctx, float(kept["lam"])) | kept


def broadcast(server: Tree, ctx: Ctx) -> Tree:
    """The head; with omega > 0 the sums and lam."""
    if personal(ctx.hp):
        return server
    return send_head(server, ctx)


def personal_part(down: Tree, _state: Tree, data: ClientData, ctx: Ctx) -> Tree:
    """With omega > 0 the head of A + omega A_i, B + omega B_i."""
    if not personal(ctx.hp):
        return {}
    omega = ctx.scalar("omega")
    # The client's own rows are in the sums already. They are added omega times more.
    own = statistics(data, ctx)
    sums = {k: down[k] + omega * t for k, t in own.items()}
    return head(sums, ctx, float(down["lam"]))


def scores(down: Tree, own: Tree, data: ClientData, x: Tensor, ctx: Ctx) -> Tensor:
    """phi(x) W + b, [.., N, C], with the client's own head if it has one."""
    z = embed(down, own, x, ctx)
    return predict({**down, **own}, {}, data, z, ctx)


def embed(_down: Tree, _own: Tree, x: Tensor, ctx: Ctx) -> Tensor:
    """phi(x) in the run's dtype."""
    if ctx.count("rff_dim"):
        return feature_map(x, ctx).to(ctx.env.dtype)
    return x


def automatic_bandwidth(hp: Hp) -> bool:
    """Whether the bandwidth follows the lengths of the rows."""
    return bool(hp["rff_dim"]) and hp["rff_sigma"] is None


def settle(hp: Hp, env: RunConstants) -> Hp:
    """The bandwidth of the run, if it is automatic, and the paper's lam for weighted rows, which are not counted.

    If lam is given, ``lam_by`` has no effect and gets its default.
    """
    settled = dict(hp)
    if hp["lam"] is None and hp["class_weight"] != "none":
        settled["lam"] = PAPER_LAM
    if settled["lam"] is not None:
        settled["lam_by"] = "rows"
    if automatic_bandwidth(hp):
        settled["rff_sigma"] = max(cast(float, env.row_norm), 1e-6)
    return settled


def chosen(
    server: Tree, _states: Mapping[int, Tree], _labels: Mapping[int, Tensor], ctx: Ctx
) -> dict[str, float]:
    """Numbers for the log: the bandwidth, and those of an automatic lam (``RidgeChoice.numbers``)."""
    numbers = chosen_numbers(server, "lam")
    if ctx.count("rff_dim"):
        numbers["rff_sigma"] = ctx.scalar("rff_sigma")
    return numbers


def personal(hp: Hp) -> bool:
    """Whether clients weigh their own rows more."""
    return bool(hp["omega"])


def paper_count(width: int, classes: int, _clients: int, hp: Hp) -> tuple[int, int]:
    """The triangle and the class sums up; a linear head with bias down, or for personal models the sums."""
    D = cast(int, hp["rff_dim"]) or width
    up = D * (D + 1) // 2 + classes * D
    down = classes * (D + 1)
    if personal(hp):
        down = up
    return up, down


def pool(hp: Hp) -> Mapping[str, Pooling]:
    """The sums are added up; with ``lam_by=clients`` the server keeps the sums of each client."""
    if hp["lam_by"] == "clients":
        return {"": "stack"}
    return {"": "sum"}


def is_additive(hp: Hp) -> bool:
    """Whether the sums of all clients are those of one client with all rows, and serve every seed."""
    plain_features = hp["class_weight"] == "none" and not hp["rff_dim"]
    return plain_features and hp["lam_by"] == "rows"


def needs(hp: Hp) -> frozenset[str]:
    """Labels, and the lengths of rows for an automatic bandwidth."""
    if automatic_bandwidth(hp):
        return frozenset({"labels", "row norms"})
    return frozenset({"labels"})


METHOD = replace(
    fedncm.METHOD,
    name="fed3r",
    paper="Fani et al., ICML 2024",
    summary="Ridge regression from summed statistics; one round, exact for every partition.",
    hparams=(
        FEAT_POST,
        HParam(
            "lam",
            PAPER_LAM,
            "float",
            "ridge, in units of summed squared features",
            low=0.0,
            fit=False,
            usual="auto",
            auto="the value with the lowest generalised cross-validation error; the paper's "
            "value for weighted rows",
        ),
        HParam(
            "lam_by",
            "rows",
            "choice",
            "error that lam=auto minimises; rows: generalised cross-validation; clients: error "
            "on each client by the model of all other clients",
            choices=("rows", "clients"),
        ),
        HParam("bias", False, "bool", "append a column of ones (D-74)", official=True),
        HParam(
            "reg_bias",
            False,
            "bool",
            "regularise the column of ones too (D-74)",
            official=True,
            fit=False,
        ),
        HParam(
            "w_normalize",
            False,
            "bool",
            "divide the weights and the bias of each class by the norm of its weights (D-74, D-85)",
            official=True,
            fit=False,
        ),
        HParam(
            "class_weight",
            "none",
            "choice",
            "local: weigh rows of class c by 1/n_c, the client's number of rows of that class; "
            "none: equal weights",
            choices=("none", "local"),
        ),
        HParam(
            "omega",
            0.0,
            "float",
            "extra weight of a client's own rows in its personal model; 0 gives one global model",
            low=0.0,
            fit=False,
        ),
        HParam("rff_dim", 0, "int", "number of random Fourier features; 0 is none", low=0),
        HParam(
            "rff_sigma",
            None,
            "float",
            "bandwidth of the Gaussian kernel of the random Fourier features (D-87)",
            low=1e-6,
            auto="mean length of all clients' training rows",
        ),
        HParam(
            "precision",
            "float64",
            "choice",
            "precision of the products in A_i; float32 is faster and needs a well-conditioned A",
            choices=("float64", "float32"),
        ),
    ),
    fit=fit,
    uploads=uploads,
    pool=pool,
    aggregate=aggregate,
    broadcast=broadcast,
    notice=notice,
    prepare=prepare,
    personal_part=personal_part,
    predict=scores,
    embed=embed,
    additive=is_additive,
    needs_for=needs,
    settle=settle,
    diagnose=chosen,
    protocol=personal_if(personal),
    paper_count=paper_count,
    page=MethodPage(
        family="One round, closed form",
        formula=r"""
            W = \Big(\sum_i A_i + \lambda I\Big)^{-1} \sum_i B_i, \qquad A_i = Z_i^\top Z_i, \quad B_i = Z_i^\top Y_i
        """,
        terms=r"""
            $Z_i$: the features of client $i$, one row each; $Y_i$: its labels, one-hot; $\lambda$: `lam`, selected by
            generalised cross-validation.
        """,
        when="""
            Try it first. If each client is scored on its own rows, add `--client-prior fitted`. Each client sends a
            matrix whose side is the number of features, so use FedCOF or FedNCM for very wide features.
        """,
        cite=("fani2024fed3r",),
    ),
)
