"""Tip-Adapter with a federated cache of class means: one round, no training, never a single row's features.

Each client sends one mean feature for each of its classes. The server collects these means in a cache. Predictions add
two scores: the zero-shot score, and the similarity of the image to the cached means.

This method is in no paper. The cache of ``tip-local`` holds raw features of labelled images, which must not be shared.
Here client i sends, for each class it has, the unit mean of its unit features; the cache is all these means, at most m
C:
    logits = s I.T + a sum_i sum_{j in O_i} onehot(j) exp(-b (1 - I.F_ij)),    F_ij = mean_ij / |mean_ij|.

A mean of one row is that row: a class with fewer than ``min_rows`` rows on a client is not sent. A mean over few rows
is no guarantee of privacy either. Special case: a = 0 is ``clip-zs``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from fedcache.federate.methods.common import (
    ClientData,
    Ctx,
    Defaults,
    HParam,
    Method,
    MethodPage,
    Statistic,
    Tree,
    Uploads,
    UploadTensor,
    model,
)
from fedcache.federate.methods.fedncm import class_sums
from fedcache.federate.methods.tip_local import CACHE, cached_logits


def fit(_down: Tree, _state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """Unit class means [.., C, D], and which of them exist and travel."""
    x, mask = data.full()
    unit = normalize(x.double(), dim=-1)
    total, count = class_sums(unit, data, ctx.env.classes, mask.double())
    has = count >= ctx.count("min_rows")
    key = normalize(total, dim=-1) * has.unsqueeze(-1)
    return {}, {"key": key.to(ctx.env.dtype), "has": has}


def uploads(_server: Tree, ctx: Ctx) -> Uploads:
    """Unit class means [C, D], and which of them exist [C]."""
    C = ctx.env.classes
    unit_means = Statistic("class means", longest=1.0)
    return {
        "key": UploadTensor((C, ctx.env.width), ctx.env.dtype, statistic=unit_means),
        "has": UploadTensor((C,), torch.bool),
    }


def sent(up: Tree, _ctx: Ctx) -> int:
    """Numbers of the keys that exist. Their classes are not counted."""
    return int(up["has"].sum()) * up["key"].shape[-1]


def aggregate(_server: Tree, up: Tree, _ctx: Ctx) -> Tree:
    """All keys in one list ``sets`` [n, D] with their classes [n], client by client."""
    has = up["has"]
    return {"sets": up["key"][has], "label": has.nonzero()[:, 1]}


def predict(down: Tree, _state: Tree, _data: ClientData, x: Tensor, ctx: Ctx) -> Tensor:
    """The logits with the clients' class means as the cache."""
    value = one_hot(down["label"], ctx.env.classes).to(x.dtype)
    return cached_logits(x, down["sets"], value, ctx)


METHOD = Method(
    name="fed-tip-proto",
    paper="ours; after Zhang et al., ECCV 2022",
    summary="Zero-shot logits plus a cache of all clients' class means of unit length; one "
    "round, no training.",
    hparams=(
        *CACHE,
        HParam(
            "min_rows",
            2,
            "int",
            "smallest number of rows of a class for which a client sends a mean; the mean of one "
            "row would reveal the row",
            low=2,
        ),
    ),
    defaults=Defaults(rounds=1, participation=None, clients=10, scheme="few-shot"),
    init=lambda _ctx: {},
    fit=fit,
    uploads=uploads,
    pool=lambda _hp: {"": "stack"},
    aggregate=aggregate,
    predict=predict,
    needs=frozenset({"labels", "text"}),
    zero_shot=model.by_text,
    gradient=False,
    one_shot=True,
    sent=sent,
    paper_count=lambda width, classes, clients, _hp: (classes * width, clients * classes * width),
    depends_on_origin="a cache of cosines",
    upload_descriptions={
        "key": (
            "mean feature of each class",
            "the row itself, if a class has only one",
        ),
    },
    page=MethodPage(
        family="With class texts",
        formula=r"""
            \ell = s\, f T^\top + a \sum_i \sum_{j \in O_i} \mathrm{onehot}(j)\, e^{-b\, (1 - f
                \cdot F_{ij})}, \qquad F_{ij} = \frac{\mu_{ij}}{\lVert \mu_{ij} \rVert}
        """,
        terms=r"""
            $f$: the unit feature of an image; $T$: the unit features of the class texts; $s$: the scale of the logits;
            $\mu_{ij}$: the mean feature of client $i$ for class $j$; $O_i$: the classes of client $i$; $a$, $b$: weight
            and sharpness of the cache.
        """,
        when="""
            Use it if class texts are available and only one round is possible. Its upload is as small as that of
            FedNCM.
        """,
        cite=("zhang2022tip",),
    ),
)
