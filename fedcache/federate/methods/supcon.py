"""SupCon on every client alone: the contrastive loss of FedPCL's ablation that needs no prototypes of others.

Every client trains a projection on its own rows, and sends nothing. The loss pulls rows of one class together and
pushes rows of different classes apart. A row gets the class of the nearest of the client's own prototypes (class
means).

Khosla et al., "Supervised contrastive learning", NeurIPS 2020. Over the B embeddings of a batch (2B with two views)
    L = (tau / tau_base) mean_i -1/|Pos(i)| sum_{p in Pos(i)} log( exp(z_i.z_p/tau) / sum_{a != i} exp(z_i.z_a/tau) ),
where rows without a positive are skipped. P alone is trained, nothing travels, and a client classifies by its own
prototypes as ``fedpcl`` does. A client that never trained has the prototypes of its initial P.

The methods below have the local losses of FedPCL's table 5. In both presets their switches are the same, except one:
projections that are contrasted always have unit length, and the others only in the released code (D-02).
    cross-entropy   ``solo``, or ``fedavg``       CE + ProtoDist   ``fedproto`` (``--set proto_infer=local``)
    SupCon          ``supcon``                    FedPCL           ``fedpcl``
As printed, the first two of these rows are not local: 32.98 and 43.94 are the FedAvg and FedProto rows of table 11,
where Solo, the local cross-entropy, has 38.35 (D-19). So compare SupCon's 42.18 with ``solo``, and 32.98 with
``fedavg``.
Special cases: with unique labels and two views the loss is NT-Xent; a batch without a positive has loss 0.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from fedcache.federate.methods.common import (
    FEAT_POST,
    FEDPCL_SETTING,
    ON_ROWS,
    PROJECTION,
    PROTO_INIT,
    TRAINING,
    Batch,
    ClientData,
    Ctx,
    HParam,
    Method,
    MethodPage,
    Tree,
    declare,
    over,
    personal_model,
    prototypes,
    select,
    sends_nothing,
)
from fedcache.federate.methods.common.prototypes import OWN_PROTOTYPES, TAU
from fedcache.heads.losses import supervised_contrast
from fedcache.heads.prototype import scores


def enter(_down: Tree, data: ClientData, ctx: Ctx) -> Tree:
    """The client's own P, and the prototypes it makes before training."""
    p = prototypes.own_body(ctx)
    # A client may have fewer rows than a batch, so none is dropped.
    every_row = ctx.with_hp(proto_drop_last=False)
    return {**p, **prototypes.own_prototypes(p, data, every_row)}


def loss(p: Tree, batch: Batch, _down: Tree, ctx: Ctx) -> tuple[Tensor, Tree]:
    """tau / tau_base times the contrast of the batch with itself."""
    z, y, w, updates = prototypes.embeddings(p, batch, ctx.hp)
    tau = ctx.number("tau")
    contrast = supervised_contrast(z, y, w, over(tau, z))
    return (tau / ctx.number("tau_base")) * contrast, updates


def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """Local epochs, then the prototypes; nothing leaves."""
    batches = partial(prototypes.view_batches, data, ctx)
    p = prototypes.train_body(state, loss, down, data, ctx, batches)
    kept = prototypes.own_prototypes(p, data, ctx)
    return select({**p, **kept}, state), {}


def predict(down: Tree, state: Tree, _data: ClientData, x: Tensor, ctx: Ctx) -> Tensor:
    """Similarity [.., N, C] to the client's own prototypes."""
    z = prototypes.project(down, state, x, ctx)
    return scores(z, state["proto"], state["count"] > 0, str(ctx.hp["infer_score"]))


METHOD = Method(
    name="supcon",
    paper="Khosla et al., NeurIPS 2020, as an ablation of FedPCL (Tan et al., NeurIPS 2022)",
    summary="Every client trains a contrastive loss on its own rows and predicts by its own "
    "prototypes; no traffic.",
    hparams=(
        *declare(FEAT_POST, PROJECTION, PROTO_INIT, TRAINING, z_norm="l2"),
        TAU,
        HParam("tau_base", 0.07, "float", "the loss is scaled by tau / tau_base", low=1e-6),
        *OWN_PROTOTYPES,
    ),
    defaults=FEDPCL_SETTING,
    executions=ON_ROWS,
    init=lambda _ctx: {},
    enter=enter,
    fit=fit,
    uploads=sends_nothing,
    predict=predict,
    by_similarity=lambda _hp: True,
    embed=prototypes.project,
    protocol=personal_model,
    fidelity=prototypes.cached_views,
    paper_count=lambda *_: (0, 0),
    page=MethodPage(
        family="Prototypes and contrast",
        formula=r"""
            L = \frac{\tau}{\tau_0}\ \frac{1}{B} \sum_i \frac{-1}{|\mathrm{Pos}(i)|} \sum_{p \in \mathrm{Pos}(i)}
                \log \frac{e^{z_i \cdot z_p / \tau}}{\sum_{a \neq i} e^{z_i \cdot z_a / \tau}}
        """,
        terms=r"""
            $z_i$: the projection of row $i$; $\mathrm{Pos}(i)$: the other rows of its class in the batch of $B$;
            $\tau$: the temperature; $\tau_0$: a constant.
        """,
        when="""
            Compare it with `fedpcl` to measure the benefit of exchanging prototypes: here, clients exchange nothing.
        """,
        cite=("khosla2020supcon", "tan2022fedpcl"),
    ),
)
