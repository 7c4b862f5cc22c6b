"""Shrunken class means: a method of one's own in one file.

Each client sends, for every class, the sum of its features and the number of its rows, as in FedNCM. The server moves
the mean of each class towards the mean of all rows, and most for the classes with few rows. A row gets the class with
the nearest mean.

With the sum S_c and the number N_c of a class and the mean m of all rows,
    mu_c = (S_c + shrink m) / (N_c + shrink),
as if the class had ``shrink`` more rows, all at m. shrink = 0 is FedNCM with ``metric=euclid``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedcache.federate.engine.client_data import ClientData
from fedcache.federate.engine.context import Ctx, over
from fedcache.federate.engine.hyperparameters import HParam
from fedcache.federate.engine.method import Defaults, Method, MethodPage, Uploads, UploadTensor
from fedcache.federate.methods.common.model import FEAT_POST
from fedcache.heads.linear import Tree, affine, head_around
from fedcache.heads.losses import MASKED


def fit(_down: Tree, _state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """Nothing is kept; sums [.., C, D] and counts [.., C] are sent, in float64 so that they add up exactly."""
    # [.., R, D] and [.., R]: clients have different numbers of rows, padding has mask 0
    x, mask = data.full()
    labels = data.labels(data.positions())
    member = one_hot(labels, ctx.env.classes).double() * mask.double().unsqueeze(-1)  # [.., R, C]
    return {}, {"sum": member.mT @ x.double(), "count": member.sum(-2)}


def uploads(_server: Tree, ctx: Ctx) -> Uploads:
    """What leaves a client; an upload with another name, shape or type is refused."""
    C, D = ctx.env.classes, ctx.env.width
    return {
        "sum": UploadTensor((C, D), torch.float64),
        "count": UploadTensor((C,), torch.float64, counts_rows=True),
    }


def aggregate(_server: Tree, up: Tree, ctx: Ctx) -> Tree:
    """The nearest of the shrunken means as a linear head.

    With d_c = mu_c - m it is the class with the largest d_c . (x - m) - |d_c|^2 / 2. Distances from m are small, so
    float32 holds them even where all features are large.
    """
    total = up["sum"]
    count = up["count"].unsqueeze(-1)
    everywhere = total.sum(-2) / count.sum(-2)
    shrink = over(ctx.number("shrink"), total)
    apart = (total - count * everywhere.unsqueeze(-2)) / (count + shrink).clamp(min=1.0)
    head = head_around(everywhere, apart, -0.5 * (apart**2).sum(-1), ctx.env.dtype)
    # a class that nobody has is never predicted
    return {**head, "b": torch.where(up["count"] > 0, head["b"], MASKED)}


def predict(down: Tree, _state: Tree, _data: ClientData, x: Tensor, _ctx: Ctx) -> Tensor:
    """Scores [.., N, C] of rows x [.., N, D]."""
    return affine(x, down["W"], down["b"])


METHOD = Method(
    name="shrunken-means",
    paper="an example, not a paper",
    summary="Class means moved towards the mean of all rows; one round, no training.",
    hparams=(
        FEAT_POST,
        HParam(
            "shrink",
            10.0,
            "float",
            "rows at the common mean that each class is given",
            low=0.0,
            fit=False,
        ),
    ),
    defaults=Defaults(rounds=1, participation=None, clients=20, scheme="dirichlet"),
    init=lambda _ctx: {},
    fit=fit,
    uploads=uploads,
    pool=lambda _hp: {"": "sum"},
    aggregate=aggregate,
    additive=lambda _hp: True,
    predict=predict,
    gradient=False,
    one_shot=True,
    paper_count=None,
    page=MethodPage(
        family="One round, closed form",
        formula=r"""
            \mu_c = \frac{\sum_i S_{ic} + s\, m}{\sum_i n_{ic} + s}, \qquad
            \hat y = \mathrm{arg}\min_c\ \lVert x - \mu_c \rVert
        """,
        terms="""
            $S_{ic}$, $n_{ic}$: sum and number of client $i$'s rows of class $c$; $m$: mean of all rows; $s$: `shrink`.
        """,
        when="""
            Use it if some classes have few rows on all clients together. `shrink=0` is `fedncm` with `metric=euclid`.
        """,
        cite=("legate2023guiding",),
    ),
)
