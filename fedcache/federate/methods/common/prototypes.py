"""Shared code of the contrastive methods: models of P alone, batches of one or two views, a client's own prototypes."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedcache.federate.engine.context import drawn_views, training_views
from fedcache.federate.methods.common import (
    PROTO_VIEW,
    TRAIN_VIEW,
    Batch,
    Batches,
    ClientData,
    Ctx,
    Hp,
    HParam,
    Loss,
    Statistic,
    Tree,
    Uploads,
    UploadTensor,
    keep_optimiser,
    minibatches,
    model,
    train,
)
from fedcache.heads.projection import Head, embed
from fedcache.heads.prototype import class_means

TAU = HParam("tau", 0.07, "float", "temperature", low=1e-6)

OWN_PROTOTYPES = (
    HParam(
        "views",
        "1",
        "choice",
        "views of each row in a batch; 1: the row of train_view; twice: the same row twice; 2: "
        "two augmentations, if three views are stored (D-08)",
        choices=("1", "2", "twice"),
        official="2",
    ),
    TRAIN_VIEW,
    PROTO_VIEW,
    HParam("proto_norm", False, "bool", "scale prototypes to unit length (D-07)"),
    HParam(
        "proto_drop_last",
        False,
        "bool",
        "leave out the shorter last batch when prototypes are computed (D-09)",
        official=True,
    ),
    HParam(
        "infer_score",
        "dot",
        "choice",
        "similarity of a row and a prototype in predictions (D-12)",
        choices=("dot", "cos", "mse"),
        official="mse",
    ),
)


def body(hp: Hp) -> Head:
    """P alone: there is no classifier."""
    return model.head_of(hp, "projection")


def project(_down: Tree, own: Tree, x: Tensor, ctx: Ctx) -> Tensor:
    """Projections [.., N, dim] of features by the client's P."""
    return embed(body(ctx.hp), own, x)[0]


def no_prototypes(ctx: Ctx, *lead: int) -> tuple[Tensor, Tensor]:
    """Prototypes [*lead, C, P] of no rows, and their counts [*lead, C], all zero."""
    proto = ctx.zeros(*lead, ctx.env.classes, ctx.count("dim"))
    return proto, proto.sum(-1)


def own_body(ctx: Ctx) -> Tree:
    """The client's own P by the ``init`` switch, and its optimiser where it is kept."""
    head = body(ctx.hp)
    uniform = ctx.rng.uniform("init", independent=ctx.hp["init"] == "independent")
    p = head.init(uniform, ctx.env.width, ctx.env.classes)
    return {**p, **keep_optimiser(p, head.trained(), ctx)}


def train_body(
    state: Tree,
    loss: Loss,
    down: Tree,
    data: ClientData,
    ctx: Ctx,
    batches: Callable[[int], Batches],
) -> Tree:
    """The client's P after ``epochs`` of ``loss`` on the batches of each epoch."""
    names = body(ctx.hp).names()
    p = {k: t for k, t in state.items() if k in names or k.startswith("opt/")}
    return train(
        p,
        body(ctx.hp).trained(),
        ctx.count("epochs"),
        loss,
        down,
        data,
        ctx,
        batches=lambda _now, epoch: batches(epoch),
    )


def view_batches(data: ClientData, ctx: Ctx, epoch: int) -> Batches:
    """``minibatches`` of one epoch; ``x2`` is the second view of every row, if there are two."""
    if ctx.hp["views"] == "2":
        views = drawn_views(data, ctx, epoch, 2)
    else:
        views = training_views(data, ctx, epoch)
    if ctx.hp["views"] == "twice":
        views = views * 2
    return minibatches(data, ctx, epoch, views=views)


def embeddings(p: Tree, batch: Batch, hp: Hp) -> tuple[Tensor, Tensor, Tensor, Tree]:
    """The projections of a batch, its views one after another (L = B or 2B).

    Returns:
        z [.., L, P], y [.., L], w [.., L] and BatchNorm's updates.
    """
    head = body(hp)
    w = batch["w"]
    y = batch["y"]
    z, updates = embed(head, p, batch["x"], w)
    if "x2" in batch:
        # The second view continues from the running statistics that the first has moved.
        second, updates = embed(head, {**p, **updates}, batch["x2"], w)
        z = torch.cat([z, second], -2)
        y = torch.cat([y, y], -1)
        w = torch.cat([w, w], -1)
    return z, y, w, updates


def prototype_rows(data: ClientData, ctx: Ctx) -> tuple[Tensor, Tensor]:
    """All rows of every client as ``ClientData.full``, each in the view that ``proto_view`` asks for."""
    # Models of an earlier release have no proto_view.
    if ctx.hp.get("proto_view", "center") == "center":
        return data.full()
    positions = data.positions()
    (view,) = drawn_views(data, ctx, 0, 1, "views proto")
    if isinstance(view, Tensor):
        view = view.gather(-1, positions)
    return data.take(positions, view), data.mask()


def own_prototypes(p: Tree, data: ClientData, ctx: Ctx) -> Tree:
    """The client's prototypes, ``proto`` [.., C, P], and their numbers of rows, ``count`` [.., C] (FedPCL eq 5)."""
    x, mask = prototype_rows(data, ctx)
    if ctx.hp["proto_drop_last"]:
        # The released code leaves out the last short batch of a shuffled pass over the rows.
        size = ctx.count("batch")

        def in_whole_batches(g: np.random.Generator, i: int) -> np.ndarray:
            n = data.n[i]
            return (g.permutation(n) < n // size * size).astype(float)

        mask = ctx.rng.each("proto", in_whole_batches)
    z = embed(body(ctx.hp), p, x)[0]
    proto, count = class_means(z, data.labels(), mask, ctx.env.classes)
    if ctx.hp["proto_norm"]:
        proto = normalize(proto, dim=-1)
    return {"proto": proto, "count": count}


def cached_views(hp: Hp, views: int) -> str:
    """Two stored views approximate live augmentation; batches of plain images are exact."""
    if hp["views"] == "2" and views > 1:
        return "cached_views"
    return "exact"


def uploads(_server: Tree, ctx: Ctx) -> Uploads:
    """Clients send a prototype of each class, ``proto`` [C, P], and its number of rows, ``count`` [C]."""
    C = ctx.env.classes
    dtype = ctx.env.dtype
    # The mean of rows of length 1 has at most length 1, which update validation checks.
    unit = ctx.hp.get("z_norm") == "l2" or bool(ctx.hp.get("proto_norm"))
    noisy = ctx.hp.get("noise_on") == "proto"
    longest = math.inf
    if unit and not noisy:
        longest = 1.0
    means = Statistic("class means", longest=longest)
    return {
        "proto": UploadTensor((C, ctx.count("dim")), dtype, statistic=means),
        "count": UploadTensor((C,), dtype, counts_rows=True),
    }


def owned_rows(up: Tree, _ctx: Ctx) -> int:
    """Scalars of an upload of prototypes: the rows of the classes the client owns, and their counts."""
    owned = int((up["count"] > 0).sum())
    return owned * (up["proto"].shape[-1] + 1)
