"""What the contrastive methods share: P alone, a batch of one or two views, a client's own prototypes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedcache.federate.clients import LaneData
from fedcache.federate.lanes import Ctx
from fedcache.federate.method import Hp, HParam
from fedcache.federate.models import head_of
from fedcache.federate.steps import Batch, drawn_views, minibatches
from fedcache.heads.linear import Tree
from fedcache.heads.projection import Head, embed
from fedcache.heads.prototype import class_means

TAU = HParam("tau", 0.07, "float", "temperature", low=1e-6)

OWN_PROTOTYPES = (
    HParam("views", "1", "choice", "views of a row in a batch (D-08)", choices=("1", "2"), official="2"),
    HParam("proto_norm", False, "bool", "bring prototypes to unit length (D-07)"),
    HParam("proto_drop_last", False, "bool", "drop the last batch of the prototype pass (D-09)", official=True),
    HParam("infer_score", "dot", "choice", "similarity (D-12)", choices=("dot", "cos", "mse"), official="mse"),
)


def body(hp: Hp) -> Head:
    """P alone: there is no classifier."""
    return head_of(hp, "projection")


def view_batches(data: LaneData, ctx: Ctx, epoch: int) -> Iterator[tuple[int, Batch]]:
    """``minibatches`` of one epoch; with ``views=2`` the second view of every row comes as ``x2``."""
    views = drawn_views(data, ctx, epoch, 2) if ctx.hp["views"] == "2" else (0,)
    return minibatches(data, ctx, epoch, views=views)


def embeddings(p: Tree, batch: Batch, hp: Hp) -> tuple[Tensor, Tensor, Tensor, Tree]:
    """The projections of a batch, its views one after another (L = B or 2B).

    Returns:
        z [.., L, P], y [.., L], w [.., L] and BatchNorm's updates.
    """
    head, w, y = body(hp), batch["w"], batch["y"]
    z, updates = embed(head, p, batch["x"], w)
    if "x2" in batch:
        second, updates = embed(head, {**p, **updates}, batch["x2"], w)
        z, y, w = torch.cat([z, second], -2), torch.cat([y, y], -1), torch.cat([w, w], -1)
    return z, y, w, updates


def own_prototypes(p: Tree, data: LaneData, ctx: Ctx) -> Tree:
    """The client's prototypes, ``proto`` [.., C, P], and the rows behind each, ``count`` [.., C] (FedPCL eq 5)."""
    x, mask = data.full()
    if ctx.hp["proto_drop_last"]:
        size = ctx.count("batch")  # a random n - n mod batch rows count
        mask = ctx.rng.each("proto", lambda g, i: (g.permutation(n := data.n[i]) < n // size * size).astype(float))
    z = embed(body(ctx.hp), p, x)[0]
    proto, count = class_means(z, data.labels(data.positions()), mask, ctx.env.classes)
    return {"proto": normalize(proto, dim=-1) if ctx.hp["proto_norm"] else proto, "count": count}


def cached_views(hp: Hp, views: int) -> str:
    """Two stored views stand in for live augmentation; the same image twice is what it is."""
    return "cached_views" if hp["views"] == "2" and views > 1 else "exact"
