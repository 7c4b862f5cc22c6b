"""FedProto: clients share class prototypes instead of weights. A penalty pulls projections to the global prototypes.

Each client trains a model of its own. A penalty pulls the projection of each row towards the global prototype (mean
projected feature) of its class. Only prototypes and class counts travel, so the clients' networks may differ.

Tan et al., "FedProto: federated prototype learning across heterogeneous clients", AAAI 2022:
    L = CE(Q(P(x)), y) + lambda * dist(P(x), Cbar^(y)).
FedPCL prints the same numbers for "CE + ProtoDist" in its table 5 and for FedProto in its table 11 (D-19).
After training, C_i^(j) is the mean of z = P(x) over the n_ij rows of class j of client i. ``proto_agg`` selects how the
server merges these prototypes (D-06): weighted by n_ij / N_j, where N_j counts the rows of class j of all clients; as a
plain mean, as in the released code; or by eq 6 of FedPCL as printed. A class that no client sent this round keeps its
prototype. Inference: argmin_j |z - Cbar^(j)|.

The paper has a squared L2 distance; the released code (preset ``official``) takes its mean over dimensions, which is
dim times smaller (D-73, ``protodist``). On unit projections of frozen features, this mean is tiny compared with the
cross-entropy. The layers are those of FedPCL's table 7, which FedPCL uses for all its baselines. In preset ``paper``
they have BatchNorm, and projections have no unit length; preset ``official`` is the opposite (D-02). The released
code collects prototypes in training mode during the last epoch; here they are computed in one pass over the rows after
training.
Special cases: lambda_proto = 0 trains exactly as ``solo``; rows whose class has no global prototype add nothing.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from fedcache.federate.methods.common import (
    FEAT_POST,
    FEDPCL_SETTING,
    LOGIT_HEAD,
    MLP,
    ON_ROWS,
    PROJECTION,
    PROTO_AGG,
    PROTO_INIT,
    PROTO_VIEW,
    TRAIN_VIEW,
    TRAINING,
    ClientData,
    Ctx,
    Hp,
    HParam,
    Method,
    MethodPage,
    Tree,
    declare,
    is_zero,
    keep_optimiser,
    model,
    personal_model,
    prototypes,
    select,
    train,
)
from fedcache.heads.losses import cross_entropy
from fedcache.heads.projection import classify, embed
from fedcache.heads.prototype import class_means, merge, scores


def init(ctx: Ctx) -> Tree:
    """No prototypes yet."""
    bar, count = prototypes.no_prototypes(ctx)
    return {"bar": bar, "has": count > 0}


def enter(_down: Tree, _data: ClientData, ctx: Ctx) -> Tree:
    """The client's own model, and its prototypes, none yet."""
    p = model.init(ctx)
    proto, count = prototypes.no_prototypes(ctx, *ctx.lead)
    return {**p, "proto": proto, "count": count, **keep_optimiser(p, model.trained(ctx.hp), ctx)}


def proto_dist(z: Tensor, y: Tensor, w: Tensor, bar: Tensor, has: Tensor, kind: str) -> Tensor:
    """Batch mean of dist(z_i, Cbar^(y_i)), mse or sq_l2; rows whose class has no prototype add 0.

    Args:
        z: [.., B, P] projections.
        y: [.., B] class indices.
        w: [.., B] batch weights.
        bar: [.., C, P] global prototypes.
        has: [.., C] true where one exists.
        kind: ``sq_l2``, or ``mse`` = sq_l2 / P.

    Returns:
        one value per client.
    """
    lead = z.shape[:-2]
    y = y.expand(z.shape[:-1])
    prototypes_of_client = bar.expand(*lead, *bar.shape[-2:])
    target = prototypes_of_client.gather(-2, y.unsqueeze(-1).expand(z.shape))
    known = has.expand(*lead, has.shape[-1]).gather(-1, y)
    distance = ((z - target) ** 2).sum(-1)
    if kind == "mse":
        distance = distance / z.shape[-1]
    return (w * known * distance).sum(-1)


def loss(p: Tree, batch: Tree, down: Tree, ctx: Ctx) -> tuple[Tensor, Tree]:
    """Cross-entropy plus lambda times the distance to the global prototypes."""
    head = model.head_of(ctx.hp)
    z, updates = embed(head, p, batch["x"], batch["w"])
    value = cross_entropy(classify(head, p, z), batch["y"], batch["w"])
    lam = ctx.number("lambda_proto")
    if is_zero(lam):
        return value, updates
    kind = str(ctx.hp["protodist"])
    pull = proto_dist(z, batch["y"], batch["w"], down["bar"], down["has"], kind)
    return value + lam * pull, updates


def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """Local epochs, then one pass over all rows for the prototypes."""
    names = model.names(ctx.hp)
    start = {k: t for k, t in state.items() if k in names or k.startswith("opt/")}
    p = train(start, model.trained(ctx.hp), ctx.count("epochs"), loss, down, data, ctx)
    x, mask = prototypes.prototype_rows(data, ctx)
    z = embed(model.head_of(ctx.hp), p, x)[0]
    proto, count = class_means(z, data.labels(), mask, ctx.env.classes)
    up = {"proto": proto, "count": count}
    return select({**p, **up}, state), up


def aggregate(server: Tree, up: Tree, ctx: Ctx) -> Tree:
    """Merge the uploaded prototypes; classes without an upload keep their prototypes."""
    bar, has = merge(up["proto"], up["count"], str(ctx.hp["proto_agg"]))
    bar = torch.where(has.unsqueeze(-1), bar, server["bar"])
    return {"bar": bar, "has": has | server["has"]}


def predict(down: Tree, state: Tree, _data: ClientData, x: Tensor, ctx: Ctx) -> Tensor:
    """Scores [.., N, C]: z . C - |C|^2 / 2, which is largest for the nearest prototype C; or the logits."""
    z = model.embed({}, state, x, ctx)
    rule = ctx.hp["proto_infer"]
    if rule == "head":
        return classify(model.head_of(ctx.hp), state, z)
    owned = state["count"] > 0
    # Here "mse" is a rule of ``scores``: the nearest prototype, which is the same for both values of ``protodist``.
    if rule == "local":
        return scores(z, state["proto"], owned, "mse")
    has = down["has"]
    if rule == "global_own":
        has = has & owned
    return scores(z, down["bar"], has, "mse")


def paper_count(_width: int, classes: int, _clients: int, hp: Hp) -> tuple[int, int]:
    """One prototype per class, both ways."""
    n = classes * cast(int, hp["dim"])
    return n, n


METHOD = Method(
    name="fedproto",
    paper="Tan et al., AAAI 2022",
    summary="Personal models that are pulled towards shared class prototypes; only prototypes and class "
    "counts are sent.",
    hparams=(
        *declare(
            FEAT_POST,
            MLP,
            PROJECTION,
            LOGIT_HEAD,
            PROTO_INIT,
            PROTO_AGG,
            TRAINING,
            TRAIN_VIEW,
            PROTO_VIEW,
        ),
        HParam(
            "protodist",
            "sq_l2",
            "choice",
            "distance to the prototype; sq_l2: squared distance; mse: its mean over all numbers "
            "(D-73)",
            choices=("sq_l2", "mse"),
            official="mse",
        ),
        HParam(
            "lambda_proto",
            1.0,
            "float",
            "weight of the distance to the prototype; 0 is solo",
            low=0.0,
        ),
        HParam(
            "proto_infer",
            "global",
            "choice",
            "global: classify by the global prototypes; global_own: by those of the client's own "
            "classes; local: by the client's own prototypes; head: by the classifier (D-73)",
            choices=("global", "global_own", "local", "head"),
            official="global_own",
        ),
    ),
    defaults=FEDPCL_SETTING,
    executions=ON_ROWS,
    init=init,
    enter=enter,
    fit=fit,
    uploads=prototypes.uploads,
    pool=lambda _hp: {"": "stack"},
    aggregate=aggregate,
    merges="classes",
    predict=predict,
    by_similarity=lambda hp: hp["proto_infer"] != "head",
    embed=model.embed,
    protocol=personal_model,
    mixed=frozenset({"backbones"}),
    sent=prototypes.owned_rows,
    received=lambda down, _ctx: int(down["has"].sum()) * down["bar"].shape[-1],
    paper_count=paper_count,
    page=MethodPage(
        family="Prototypes and contrast",
        formula=r"""
            L = \mathrm{CE}\big(Q(P(x)), y\big) + \lambda\, \lVert P(x) - \bar C^{(y)} \rVert^2,
                \qquad \hat y = \mathrm{arg}\min_j\ \lVert P(x) - \bar C^{(j)} \rVert
        """,
        terms=r"""
            $P$: the projection of the features; $Q$: the classifier on top of it; $\bar C^{(j)}$: the mean of the
            clients' prototypes of class $j$; $\lambda$: the weight of the penalty; $\hat y$: the prediction.
        """,
        when="""
            Use it if the clients' networks differ, or if uploads must be small. It is simpler and faster than `fedpcl`.
        """,
        cite=("tan2022fedproto",),
    ),
)
