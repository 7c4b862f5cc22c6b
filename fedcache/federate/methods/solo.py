"""Local training: every client trains alone, and nothing is sent.

Every client trains a model on its own rows, and sends nothing. It is the lower bound for every method that gives each
client its own model.

Each client minimises the mean cross-entropy of Q(P(x)) over its own rows (FedPCL's table 2, "Solo"). One client of
``fedavg`` is the same computation, bit for bit.

The released FedPCL code (preset ``official``) differs: it has no BatchNorm, and projections of unit length (D-02). Each
client draws its own initial weights (D-11). The last short batch is left out (D-09), and ReLU and L2 normalisation are
applied to the logits (D-13; docs/readings.md). The cross-entropy row of FedPCL's table 5 is not this method but
``fedavg`` (D-19).
"""

from __future__ import annotations

from dataclasses import replace

from fedcache.federate.methods.common import (
    FEAT_POST,
    FEDPCL_SETTING,
    INIT,
    MODEL,
    ON_ROWS,
    TRAINING,
    ClientData,
    Ctx,
    Method,
    MethodPage,
    Tree,
    declare,
    keep_optimiser,
    local,
    model,
    personal_model,
    sends_nothing,
)


def enter(_down: Tree, _data: ClientData, ctx: Ctx) -> Tree:
    """The client's own model."""
    p = model.init(ctx)
    return {**p, **keep_optimiser(p, model.trained(ctx.hp), ctx)}


# A client keeps its model, so it may start from a draw of its own (D-11).
OWN_INIT = replace(
    INIT,
    choices=("auto", "shared", "independent", "text", "zero"),
    official="independent",
)

METHOD = Method(
    name="solo",
    paper="baseline of FedPCL (Tan et al., NeurIPS 2022)",
    summary="Every client trains its own model; no traffic.",
    hparams=declare(FEAT_POST, MODEL, OWN_INIT, TRAINING),
    defaults=FEDPCL_SETTING,
    executions=ON_ROWS,
    init=lambda _ctx: {},
    enter=enter,
    fit=local(model.ce_loss, model.names, model.trained, send=lambda _hp: ()),
    uploads=sends_nothing,
    predict=model.predict,
    embed=model.embed,
    protocol=personal_model,
    mixed=frozenset({"backbones", "dim"}),
    check=model.check,
    zero_shot=model.zero_shot,
    paper_count=lambda *_: (0, 0),
    page=MethodPage(
        family="References",
        formula=r"""
            (P_i, Q_i) = \mathrm{arg}\min_{P, Q}\ -\frac{1}{n_i} \sum_{(x, y) \in D_i} \log
                \mathrm{softmax}_y\big(Q(P(x))\big)
        """,
        terms="""
            $P$: the projection of the features; $Q$: the classifier on top of it; $D_i$: client $i$'s $n_i$ rows.
        """,
        when="""
            Always run it together with methods that give each client its own model. A method that does not beat it is
            not worth its traffic.
        """,
        cite=("tan2022fedpcl",),
    ),
)
