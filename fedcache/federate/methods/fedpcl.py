"""FedPCL: prototype-wise contrastive learning. Clients train a projection; only class prototypes travel.

Clients train a projection of the features whose loss pulls each row towards the prototype (mean projected feature) of
its class, and away from those of other classes. Only prototypes travel. Each client receives the global prototypes
(means over clients) and the prototypes of every other client.

Tan et al., "Federated learning from pre-trained models: a contrastive learning approach", NeurIPS 2022 [A]. With
s_c = z.C^(c) / tau and A(y) the available classes except y:
    C_i^(j) = mean of z over the client's rows of class j, after training               (eq 5)
    Cbar^(j) = sum_i (n_ij / N_j) C_i^(j) over the owners O_j of class j                (eq 6, less its extra 1/|O_j|)
    C_i^(j) <- Cbar^(j) where client i does not own j                                   (eq 7, at the server)
    L_g = -s_y + logsumexp_{c in A(y)} s_c with Cbar                                    (eq 8)
    L_p = (1/m) sum_p [the same with C_p]                                               (eq 9)
    L = L_g + L_p                                                                       (eq 10, mean over the batch)
This file follows the equations, as means; eq 6 is computed without the factor 1/|O_j|, which only shrinks norms (D-06;
``proto_agg=eq6``). The layers are table 7's FC, ReLU and BatchNorm. Projections then get unit length, which a
denominator without the positive needs (D-02, D-03).
The released code (preset ``official``) has no BatchNorm (D-02), no L_g, L_p summed over clients (D-05), prototypes as
anchors and the 2B embeddings of two views as candidates (D-04, D-08), plain means (D-06), dropped last batches (D-09),
a first round of decay alone (D-10), own initial weights (D-11), prediction by squared distance (D-12).
The server keeps the last sets of clients that are not sampled. With one available class there is no negative and the
loss is 0.
Images: the released DomainNet code draws two views of every row by flips and rotations, and also computes prototypes
from them (D-08). To do the same, extract with ``--views 9 --augment domainnet`` and train with ``train_view=aug
proto_view=aug``. On other data sets, the two views of the released code are equal. A stored view is drawn for every row
in every epoch; tests are plain.
For the local losses of table 5 see ``supcon``. The paper selects hyperparameters on a fifth of the training rows and
then trains again on all of them (A.1.4): ``fedcache grid --method fedpcl --sweep tau=0.05,0.1 --validation 0.2
--retrain``.

Noise (section 5) is added to the prototypes that a client sends, or to its training data: xt = (1 - p) x + e,
elementwise, where e has the scale s = .05 for prototypes and .2 for images. The same s is not the same power: Laplace
noise of scale s has variance 2 s^2, Gaussian noise s^2. No differential-privacy guarantee follows from it. Noise on
images is drawn before the backbone (``extract --views 9 --augment gaussian-noise=51:0.1``: 51 of 255 levels are .2).
Training then reads it with ``train_view=aug views=twice``: one draw serves both views, and prototypes and tests stay
plain (D-20). Without images ``noise_on=features`` approximates it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedcache.federate.engine.context import narrow_clients
from fedcache.federate.methods.common import (
    FEAT_POST,
    ON_ROWS,
    PROJECTION,
    PROTO_AGG,
    PROTO_INIT,
    TRAINING,
    Batch,
    Batches,
    ClientData,
    Ctx,
    Defaults,
    Hp,
    HParam,
    Method,
    MethodPage,
    Tree,
    declare,
    over,
    personal_model,
    prototypes,
    select,
)
from fedcache.federate.methods.common.prototypes import OWN_PROTOTYPES, TAU
from fedcache.heads.losses import set_contrast
from fedcache.heads.prototype import dots, merge, scores

NOISE = (
    HParam(
        "noise_on",
        "off",
        "choice",
        "proto: perturb uploaded prototypes; features: perturb training features, which "
        "approximates noise on images",
        choices=("off", "proto", "features"),
    ),
    HParam(
        "noise", "gaussian", "choice", "distribution of the noise", choices=("laplace", "gaussian")
    ),
    HParam(
        "p",
        0.1,
        "float",
        "share p of a value that is removed: (1 - p) x + noise",
        low=0.0,
        high=1.0,
    ),
    HParam("s", 0.05, "float", "scale of the noise", low=0.0),
    HParam(
        "noise_local_infer",
        False,
        "bool",
        "classify with the noisy prototypes too (D-20)",
        official=True,
    ),
)


def init(ctx: Ctx) -> Tree:
    """An empty set of prototypes per client."""
    sets, counts = prototypes.no_prototypes(ctx, ctx.env.clients)
    return {"sets": sets, "counts": counts}


def broadcast(server: Tree, ctx: Ctx) -> Tree:
    """Cbar [C, P] and the padded sets [m, C, P], and which classes they have: ``has`` [C] and ``in`` [m, C]."""
    sets = server["sets"]
    owned = server["counts"] > 0
    bar, has = merge(sets, server["counts"], str(ctx.hp["proto_agg"]))
    if ctx.hp["proto_norm"]:
        bar = normalize(bar, dim=-1)
    if ctx.hp["pad"]:
        sets = torch.where(owned.unsqueeze(-1), sets, bar.unsqueeze(-3))
        owned = has.unsqueeze(-2).expand(owned.shape)
    return {"bar": bar, "has": has, "sets": sets, "in": owned}


def enter(_down: Tree, _data: ClientData, ctx: Ctx) -> Tree:
    """The client's own P, and its own prototypes, none yet."""
    proto, count = prototypes.no_prototypes(ctx, *ctx.lead)
    return {**prototypes.own_body(ctx), "proto": proto, "count": count}


def candidates(down: Tree, hp: Hp) -> Tree:
    """Every set of prototypes in the loss, [.., S, C, P], its mask [.., S, C] and its weight [.., S]."""
    m = down["sets"].shape[-3]
    lead = down["bar"].shape[:-2]
    terms = str(hp["terms"])  # g, p or g+p
    sets = []
    inside = []
    weight = []
    if "g" in terms:
        sets.append(down["bar"].unsqueeze(-3))
        inside.append(down["has"].unsqueeze(-2))
        weight.append(down["bar"].new_ones(*lead, 1))
    if "p" in terms:
        share = 1.0
        if hp["lp_reduce"] == "mean":
            share = 1.0 / m
        sets.append(down["sets"])
        inside.append(down["in"])
        weight.append(down["bar"].new_full((*lead, m), share))
    return {
        "sets": torch.cat(sets, -3),
        "in": torch.cat(inside, -2),
        "weight": torch.cat(weight, -1),
    }


def loss(p: Tree, batch: Tree, known: Tree, ctx: Ctx) -> tuple[Tensor, Tree]:
    """L_g + L_p against ``candidates``; the mean is over the rows whose class some set has."""
    z, y, w, updates = prototypes.embeddings(p, batch, ctx.hp)
    u = dots(z, known["sets"])
    u = u / over(ctx.number("tau"), u)
    anchored = ctx.hp["objective"] == "proto_anchor"
    include = ctx.hp["denominator"] == "include"
    value = set_contrast(u, y, w, known["in"], anchored=anchored, include=include)
    return (known["weight"] * value).sum(-1), updates


def draw(rows: Sequence[int], width: int, ctx: Ctx, *key: int) -> Tensor:
    """Noise of scale 1, [*lead, max(rows), width]; client i has ``rows[i]`` rows of noise, then zeros."""

    def one(g: np.random.Generator, client: int) -> np.ndarray:
        shape = (rows[client], width)
        if ctx.hp["noise"] == "laplace":
            return g.laplace(size=shape)
        return g.standard_normal(shape)

    return ctx.rng.each("noise", one, *key)


def perturb(x: Tensor, e: Tensor, ctx: Ctx) -> Tensor:
    """(1 - p) x + s e for noise ``e`` of scale 1; p = s = 0 is ``x`` itself."""
    return over(1.0 - ctx.number("p"), x) * x + over(ctx.number("s"), e) * e


def noisy(batches: Batches, data: ClientData, ctx: Ctx, epoch: int) -> Batches:
    """Batches of an epoch with noise on their features: one draw for each row, the same in both views of it."""
    noise = draw(data.n, ctx.env.width, ctx, epoch)
    for k, batch in batches:
        rows = batch["i"].unsqueeze(-1).expand(batch["x"].shape)
        e = narrow_clients(noise, k, ctx).gather(-2, rows)
        perturbed: Batch = {v: perturb(batch[v], e, ctx) for v in ("x", "x2") if v in batch}
        yield k, {**batch, **perturbed}


def noisy_prototypes(proto: Tensor, count: Tensor, ctx: Ctx) -> Tensor:
    """Noise on the prototypes [.., C, P] of the classes with rows behind them, ``count`` [.., C]; the others are 0."""
    clients = 1
    if ctx.lead:
        clients = ctx.lead[-1]
    e = draw([ctx.env.classes] * clients, proto.shape[-1], ctx)
    return perturb(proto, e, ctx) * (count > 0).unsqueeze(-1)


def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """Local epochs (none before the first prototypes exist), then one pass over the rows for C_i and n_ij."""

    def batches(epoch: int) -> Batches:
        # Only the training batches may get noise on their features; prototypes and tests stay clean (D-20).
        clean = prototypes.view_batches(data, ctx, epoch)
        if ctx.hp["noise_on"] == "features":
            return noisy(clean, data, ctx, epoch)
        return clean

    p = state
    if ctx.hp["warmup"] == "zero_loss" or bool(down["has"].any()):
        p = prototypes.train_body(state, loss, candidates(down, ctx.hp), data, ctx, batches)
    kept = prototypes.own_prototypes(p, data, ctx)
    up = dict(kept)
    if ctx.hp["noise_on"] == "proto":
        up["proto"] = noisy_prototypes(kept["proto"], kept["count"], ctx)
        if ctx.hp["noise_local_infer"]:
            kept = up
    return select({**p, **kept}, state), up


def aggregate(server: Tree, up: Tree, ctx: Ctx) -> Tree:
    """Replace the sets of the round's clients by the uploaded ones; the sets of all other clients stay."""
    ids = torch.tensor(ctx.ids, device=ctx.env.device)
    sets = server["sets"].index_copy(-3, ids, up["proto"])
    counts = server["counts"].index_copy(-2, ids, up["count"])
    return {"sets": sets, "counts": counts}


def predict(down: Tree, state: Tree, _data: ClientData, x: Tensor, ctx: Ctx) -> Tensor:
    """Similarity [.., N, C] to the client's own prototypes; the global ones for a client that has none yet."""
    z = prototypes.project(down, state, x, ctx)
    rule = ctx.hp["infer_proto"]
    # The classes that the client's own prototypes are used for, and all classes that have a prototype.
    owned = state["count"] > 0
    has = owned | down["has"]
    if rule == "global":
        owned = torch.zeros_like(owned)
        has = down["has"]
    elif rule == "local":
        untrained = ~owned.any(-1, keepdim=True)
        has = owned | untrained & down["has"]
    proto = torch.where(owned.unsqueeze(-1), state["proto"], down["bar"])
    return scores(z, proto, has, str(ctx.hp["infer_score"]))


def caution(hp: Hp) -> tuple[str, ...]:
    """A warning if ``local_padded`` predicts nearly as ``local``, because prototypes differ in length (D-12)."""
    by_dots = hp["infer_score"] == "dot" and not hp["proto_norm"]
    if hp["infer_proto"] != "local_padded" or not by_dots:
        return ()
    return (
        "infer_proto=local_padded with infer_score=dot predicts nearly the same as local. The global prototypes of "
        "absent classes are means over clients, so they are shorter than the client's own and rarely have the largest "
        "dot product. infer_score=cos compares directions only",
    )


def received(down: Tree, _ctx: Ctx) -> int:
    """Numbers of the prototypes that exist in Cbar and the m sets; classes that no client has are not sent."""
    count = int(down["has"].sum() + down["in"].sum())
    return count * down["bar"].shape[-1]


def fidelity(hp: Hp, views: int) -> str:
    """Noise on features approximates noise on images; stored views replace live augmentation."""
    if hp["noise_on"] == "features":
        return "approx"
    return prototypes.cached_views(hp, views)


def paper_count(_width: int, classes: int, clients: int, hp: Hp) -> tuple[int, int]:
    """C prototypes up, Cbar and m sets of C down."""
    n = classes * cast(int, hp["dim"])
    return n, (clients + 1) * n


METHOD = Method(
    name="fedpcl",
    paper="Tan et al., NeurIPS 2022",
    summary="Clients contrast their projections with global prototypes and with all clients' "
    "prototypes; only prototypes and class counts are sent.",
    hparams=(
        *declare(FEAT_POST, PROJECTION, PROTO_INIT, PROTO_AGG, TRAINING, TAU, z_norm="l2"),
        HParam(
            "objective",
            "paper",
            "choice",
            "anchor of the contrast; paper: the row; proto_anchor: the prototype (D-04)",
            ("paper", "proto_anchor"),
            official="proto_anchor",
        ),
        HParam(
            "denominator",
            "exclude",
            "choice",
            "whether the denominator's set A(y) contains the class y itself (D-03)",
            choices=("exclude", "include"),
        ),
        HParam(
            "terms",
            "g+p",
            "choice",
            "terms of the loss; g: L_g; p: L_p; g+p: both (D-05)",
            choices=("g", "p", "g+p"),
            official="p",
        ),
        HParam(
            "lp_reduce",
            "mean",
            "choice",
            "how L_p combines clients (D-05)",
            choices=("mean", "sum"),
            official="sum",
        ),
        HParam(
            "pad",
            True,
            "bool",
            "replace missing prototypes of a client by the global prototypes (eq 7)",
        ),
        *OWN_PROTOTYPES,
        HParam(
            "warmup",
            "proto_only",
            "choice",
            "round 0, without prototypes yet; proto_only: compute prototypes without training; "
            "zero_loss: Adam steps on a loss of zero (D-10)",
            ("proto_only", "zero_loss"),
            official="zero_loss",
        ),
        HParam(
            "infer_proto",
            "local",
            "choice",
            "prototypes for predictions (D-12, D-15); local: the client's own; global: the "
            "global ones; local_padded: the client's own, and the global ones of its missing "
            "classes; with infer_score=dot it predicts nearly the same as local",
            ("local", "local_padded", "global"),
        ),
        *NOISE,
    ),
    defaults=Defaults(rounds=100, participation=None, clients=5, scheme="feature-shift"),
    executions=ON_ROWS,
    init=init,
    broadcast=broadcast,
    enter=enter,
    fit=fit,
    uploads=prototypes.uploads,
    pool=lambda _hp: {"": "stack"},
    aggregate=aggregate,
    predict=predict,
    by_similarity=lambda _hp: True,
    embed=prototypes.project,
    protocol=personal_model,
    mixed=frozenset({"backbones"}),
    sent=prototypes.owned_rows,
    received=received,
    fidelity=fidelity,
    caution=caution,
    paper_count=paper_count,
    page=MethodPage(
        family="Prototypes and contrast",
        formula=r"""
            \begin{aligned}
            \bar C^{(j)} &= \sum_{i \in O_j} \frac{n_{ij}}{N_j}\, C_i^{(j)},
                \qquad C_i^{(j)} = \frac{1}{n_{ij}} \sum_{x \in D_{ij}} P_i(x) \\
            L &= -\log \frac{e^{z \cdot \bar C^{(y)} / \tau}}{\sum_{c \neq y} e^{z \cdot \bar C^{(c)} / \tau}}
                - \frac{1}{m} \sum_{p=1}^{m} \log \frac{e^{z \cdot C_p^{(y)} / \tau}}{\sum_{c \neq y} e^{z
                \cdot C_p^{(c)} / \tau}}
            \end{aligned}
        """,
        terms=r"""
            $P_i$: the projection of client $i$; $z$: the projection of a row; $C_i^{(j)}$: client $i$'s prototype of
            class $j$; $\bar C^{(j)}$: the global prototype; $D_{ij}$: client $i$'s $n_{ij}$ rows of class $j$; $O_j$:
            the clients that have the class; $m$: the number of clients; $\tau$: the temperature.
        """,
        when="""
            Use it if you have several backbones and few rows per client, and if uploads must be small. Every client
            receives the prototypes of all clients, so downloads grow with the number of clients.
        """,
        cite=("tan2022fedpcl",),
    ),
)
