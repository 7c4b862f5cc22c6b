"""FedPer: clients share the projection P and keep their own classifier Q, and train both at once.

Clients share a projection of the features, and each keeps a classifier of its own. Both parts are trained together.
Only the projection is averaged.

Arivazhagan et al., "Federated learning with personalization layers", 2019: the base layers are averaged, the
personalization layers stay. Here P is the base and Q the personal layer. ``fedrep`` trains P and Q one after the other
instead.

The released FedPCL code has no FedPer, so preset ``official`` uses that code's settings of its other baselines (D-09,
D-11, D-13; docs/readings.md).
Special cases: one client is ``solo``, bit for bit; P is the only upload.

FedSim (Pillutla et al., "Federated learning with partial model personalization", ICML 2022) is this method, with Q as
the personal part and plain SGD (D-112; see tests/). Its FedAlt is ``fedrep``. With P as the personal part, FedSim is
``lg-fedavg``.
"""

from __future__ import annotations

from dataclasses import replace

from fedcache.federate.methods import fedrep
from fedcache.federate.methods.common import (
    AGG,
    BN_MODE,
    FEAT_POST,
    LOGIT_HEAD,
    MLP,
    PROJECTION,
    PROTO_INIT,
    TRAIN_VIEW,
    TRAINING,
    ClientData,
    Ctx,
    MethodPage,
    Tree,
    declare,
    keep_optimiser,
    local,
    model,
)


def enter(down: Tree, data: ClientData, ctx: Ctx) -> Tree:
    """The client's own Q, its optimiser if that is kept, and the BatchNorm statistics that stay with the client."""
    kept = fedrep.enter(down, data, ctx)
    return {**kept, **keep_optimiser({**down, **kept}, model.trained(ctx.hp), ctx)}


METHOD = replace(
    fedrep.METHOD,
    name="fedper",
    paper="Arivazhagan et al., 2019",
    summary="A shared projection and a personal classifier, trained together; only the "
    "projection is sent.",
    hparams=declare(
        FEAT_POST, MLP, PROJECTION, BN_MODE, LOGIT_HEAD, PROTO_INIT, AGG, TRAINING, TRAIN_VIEW
    ),
    enter=enter,
    fit=local(model.ce_loss, model.names, model.trained, fedrep.shared),
    page=MethodPage(
        family="A model for each client",
        formula=r"""
            (P_i, Q_i) \leftarrow \mathrm{arg}\min_{P', Q'}\ F_i(Q' \circ P'),
                \qquad P \leftarrow \sum_i \frac{n_i}{N}\, P_i
        """,
        terms="""
            $P$: the projection of the features; $Q$: the classifier on top of it; $F_i$: the mean loss of client $i$ on
            its training rows; $n_i$, $N$: rows of client $i$ and of all clients.
        """,
        when="""
            Use it like `fedrep` if training must be faster: it trains projection and classifier together. FedSim
            (Pillutla et al., 2022) is `fedper` with `opt=sgd`, `momentum=0` and `bn=false`.
        """,
        cite=("arivazhagan2019fedper", "pillutla2022partial"),
    ),
)
