"""FedNCM: nearest class mean from summed features; one round, no training.

Each client sends the sum of its features and the number of its rows for each class. The server divides the sums to get
the mean feature of each class. A row gets the class whose mean is nearest.

Legate et al., "Guiding the last layer in federated learning with pre-trained models", NeurIPS 2023. Over all clients,
S_c is the sum of the features of class c, N_c the number of its rows, and mu_c = S_c / N_c.
``metric=cos``: W_c = mu_c / |mu_c|, b = 0.
``metric=euclid`` is the nearest mean. With mu, the mean of all rows: W_c = mu_c - mu, b_c = -|W_c|^2 / 2 - mu' W_c.

Subtracting mu adds the same number to all scores of a row, so it changes no prediction, except by rounding. It makes
the result independent of a constant that is added to all features.

Sums are float64, so every partition of the same rows gives the classifier of all rows in one place (T-K1; see tests/).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from fedcache.federate.methods.common import (
    FEAT_POST,
    ClientData,
    Ctx,
    Defaults,
    HParam,
    Method,
    MethodPage,
    Statistic,
    StatisticKind,
    Tree,
    Uploads,
    UploadTensor,
    affine,
)
from fedcache.heads.linear import head_around
from fedcache.heads.losses import mask_logits

BLOCK_BYTES = 16 << 20
"""Bytes of a block of rows in float64, so that intermediate results stay small even if a client has many rows."""

GPU_BLOCK_BYTES = 256 << 20
"""Bytes of a block on a GPU, for which ``BLOCK_BYTES`` is too small."""

FEW_ROWS = 1024
"""Up to this number of rows, a product with a 0/1 matrix adds the rows to their classes. With more rows they are added
one by one, because the product costs C times as much. This is also the smallest number of rows in a block.
"""


def add_up(data: ClientData, ctx: Ctx, width: int, sums: Callable[[ClientData], Tree]) -> Tree:
    """The sums over all rows of a client, computed block by block.

    Args:
        data: rows.
        ctx: context of the run, for its device.
        width: numbers per row in the largest intermediate result of ``sums``; it decides the rows of a block.
        sums: returns the sums over a block, as float64 tensors. To those of the first block, ``add_up`` adds those of
            the later blocks in place.
    """
    total: Tree = {}
    size = GPU_BLOCK_BYTES
    if ctx.env.device.type == "cpu":
        size = BLOCK_BYTES
    # A float64 has 8 bytes.
    for block in data.blocks(max(FEW_ROWS, size // (8 * width))):
        part = sums(block)
        if not total:
            total = part
            continue
        for name, t in part.items():
            total[name].add_(t)
    return total


def class_rows(data: ClientData, ctx: Ctx) -> Tensor:
    """Number of rows of each class, for each client: float64 [*lead, C]."""
    y = data.labels()
    mask = data.mask().double()
    count = mask.new_zeros(*mask.shape[:-1], ctx.env.classes)
    # Padding adds 0.
    return count.scatter_add_(-1, y, mask)


def class_sums(z: Tensor, data: ClientData, classes: int, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the rows of each class, [.., C, D], and their number, [.., C], in float64.

    Args:
        z: [.., R, D] rows in float64.
        data: labels.
        classes: C.
        weight: [.., R] weight of each row; 0 on padding.
    """
    y = data.labels()
    # Many rows of one client are added one by one (see ``FEW_ROWS``).
    if z.dim() == 2 and len(z) > FEW_ROWS and z.device.type == "cpu":
        rows = z
        # Weighting copies all rows, so it is skipped if all weights are 1.
        if not bool((weight == 1.0).all()):
            rows = z * weight.unsqueeze(-1)
        total = z.new_zeros(classes, z.shape[1]).index_add_(0, y, rows)
        return total, z.new_zeros(classes).index_add_(0, y, weight)
    member = one_hot(y, classes).double() * weight.unsqueeze(-1)
    return member.mT @ z, member.sum(-2)


def fit(_down: Tree, _state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """An empty state, and the client's own part of S_c and N_c."""

    def sums(block: ClientData) -> Tree:
        x, mask = block.full()
        total, count = class_sums(x.double(), block, ctx.env.classes, mask.double())
        return {"sum": total, "count": count}

    return {}, add_up(data, ctx, ctx.env.width, sums)


def statistic(kind: StatisticKind, *shape: int) -> UploadTensor:
    """Declaration of an uploaded tensor of this shape: a statistic of the client's rows in float64."""
    return UploadTensor(shape, torch.float64, statistic=Statistic(kind))


def uploads(_server: Tree, ctx: Ctx) -> Uploads:
    """S_c [C, D] and N_c [C]."""
    C = ctx.env.classes
    return {
        "sum": statistic("class sums", C, ctx.env.width),
        "count": UploadTensor((C,), torch.float64, counts_rows=True),
    }


def aggregate(_server: Tree, up: Tree, ctx: Ctx) -> Tree:
    """Class means as a linear head; a class that no client has is never predicted."""
    count = up["count"]
    if ctx.hp["metric"] == "cos":
        made = {
            "W": normalize(means(up["sum"], count), dim=-1).to(ctx.env.dtype),
            "b": ctx.zeros(len(count)),
        }
    else:
        center, deviation = around_mean(up["sum"], count)
        b = -0.5 * (deviation**2).sum(-1)
        # b is the bias for x - mu. The head of x has the bias b - W mu.
        made = head_around(center, deviation, b, ctx.env.dtype)
    return masked(made, count)


def means(sums: Tensor, count: Tensor) -> Tensor:
    """Means [.., C, D] of the rows of each class from their sums and their numbers [.., C]; 0 without rows."""
    return sums / count.clamp(min=1.0).unsqueeze(-1)


def around_mean(sums: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of all rows [D], and the differences [C, D] of the class means from it; zero for a class without rows.

    Args:
        sums: [C, D] of the rows of each class.
        count: [C] rows of each class.
    """
    center = sums.sum(0) / count.sum()
    deviation = torch.where(count.unsqueeze(-1) > 0, means(sums, count) - center, 0.0)
    return center, deviation


def masked(head: Tree, count: Tensor) -> Tree:
    """A linear head that never predicts a class that no client has; ``count`` [C] rows of each class."""
    return {**head, "b": mask_logits(head["b"], count > 0)}


def send_head(server: Tree, _ctx: Ctx) -> Tree:
    """The linear head, without other tensors that the server keeps; nothing before the first round."""
    return {k: server[k] for k in ("W", "b") if k in server}


def predict(down: Tree, _state: Tree, _data: ClientData, x: Tensor, _ctx: Ctx) -> Tensor:
    """Scores [.., N, C]."""
    return affine(x, down["W"], down["b"])


METHOD = Method(
    name="fedncm",
    paper="Legate et al., NeurIPS 2023",
    summary="Nearest class mean, computed from summed features; one round, no training.",
    hparams=(
        FEAT_POST,
        HParam(
            "metric",
            "cos",
            "choice",
            "cos: class means of unit length; euclid: the class with the nearest mean",
            choices=("cos", "euclid"),
            fit=False,
        ),
    ),
    defaults=Defaults(rounds=1, participation=None, clients=100, scheme="dirichlet"),
    init=lambda _ctx: {},
    fit=fit,
    uploads=uploads,
    # Every tensor of the uploads is summed over clients.
    pool=lambda _hp: {"": "sum"},
    aggregate=aggregate,
    additive=lambda _hp: True,
    predict=predict,
    gradient=False,
    one_shot=True,
    # Sent and received, as the paper counts: without the numbers of rows and without b.
    paper_count=lambda width, classes, _clients, _hp: (classes * width, classes * width),
    page=MethodPage(
        family="One round, closed form",
        formula=r"""
            \mu_c = \frac{\sum_i S_{ic}}{\sum_i n_{ic}}, \qquad W_c = \frac{\mu_c}{\lVert \mu_c \rVert}, \quad b = 0
        """,
        terms="""
            $S_{ic}$: the sum of client $i$'s features of class $c$; $n_{ic}$: their number; $W_c$: the weights of class
            $c$, for cosine similarity. `metric=euclid` uses the Euclidean distance instead.
        """,
        when="""
            Use it as the first baseline, because no method sends less. It is accurate enough on a backbone that was
            trained for the task, and weak if the features of a class are spread out.
        """,
        cite=("legate2023guiding",),
    ),
)
