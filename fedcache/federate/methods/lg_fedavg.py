"""LG-FedAvg: clients keep their own projection P and share the classifier Q.

Each client keeps a projection of the features of its own, and all clients share the classifier on top of it. Both parts
are trained together. Only the classifier is averaged.

Liang et al., "Think locally, act globally: federated learning with local and global representations", 2020: every
client learns its own representation, and the model that reads representations is averaged. Here P is the local part and
Q the global one, C (dim + 1) numbers; both are trained together. The paper scores a client's own rows with its own
representation, as here, and new clients by an ensemble of all local models, which is not implemented.

The released FedPCL code has no LG-FedAvg, so preset ``official`` uses that code's settings of its other baselines
(D-09, D-13, D-14; docs/readings.md). With ``init=shared`` all projections start from the same weights, so at first
their coordinates have the same meaning for the shared Q. With ``init=independent`` training must first align them.
Special cases: one client is ``solo``, bit for bit; Q is the only upload.
"""

from __future__ import annotations

from fedcache.federate.methods.common import (
    AGG,
    CLASSIFIER,
    FEAT_POST,
    FEDPCL_SETTING,
    LOGIT_HEAD,
    MLP,
    ON_ROWS,
    PROJECTION,
    PROTO_INIT,
    TRAIN_VIEW,
    TRAINING,
    ClientData,
    Ctx,
    Hp,
    Method,
    MethodPage,
    Tree,
    declare,
    keep_optimiser,
    local,
    model,
    personal_model,
    select,
    server_tensors,
)


def init(ctx: Ctx) -> Tree:
    """Q."""
    return select(model.drawn(ctx), CLASSIFIER)


def enter(_down: Tree, _data: ClientData, ctx: Ctx) -> Tree:
    """The client's own P, with BatchNorm's statistics, and its optimiser where it is kept."""
    p = model.init(ctx)
    kept = {k: t for k, t in p.items() if k not in CLASSIFIER}
    return {**kept, **keep_optimiser(p, model.trained(ctx.hp), ctx)}


def paper_count(_width: int, classes: int, _clients: int, hp: Hp) -> tuple[int, int]:
    """The weights of Q, both ways."""
    n = classes * model.head_of(hp).dim
    return n, n


METHOD = Method(
    name="lg-fedavg",
    paper="Liang et al., 2020",
    summary="A personal projection under a shared classifier; only the classifier is sent.",
    hparams=declare(FEAT_POST, MLP, PROJECTION, LOGIT_HEAD, PROTO_INIT, AGG, TRAINING, TRAIN_VIEW),
    defaults=FEDPCL_SETTING,
    executions=ON_ROWS,
    init=init,
    enter=enter,
    fit=local(model.ce_loss, model.names, model.trained, lambda _hp: CLASSIFIER),
    uploads=server_tensors(lambda _hp: CLASSIFIER),
    predict=model.predict,
    embed=model.embed,
    protocol=personal_model,
    mixed=frozenset({"backbones"}),
    paper_count=paper_count,
    page=MethodPage(
        family="A model for each client",
        formula=r"""
            (P_i, Q_i) \leftarrow \mathrm{arg}\min_{P', Q'}\ F_i(Q' \circ P'),
                \qquad Q \leftarrow \sum_i \frac{n_i}{N}\, Q_i
        """,
        terms="""
            $P$: the projection of the features; $Q$: the classifier on top of it; $F_i$: the mean loss of client $i$ on
            its training rows; $n_i$, $N$: rows of client $i$ and of all clients.
        """,
        when="""
            Use it if uploads must be small, or if each client is a domain of its own: clients send only the classifier.
            The projections must start from the same weights, so that the classifier fits all of them.
        """,
        cite=("liang2020lgfedavg",),
    ),
)
