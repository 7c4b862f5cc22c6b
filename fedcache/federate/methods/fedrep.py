"""FedRep: clients share the projection P and keep their own classifier Q.

Clients share a projection of the features, and each keeps a classifier of its own. In each round a client first trains
its classifier and then the projection. Only the projection is averaged.

Collins et al., "Exploiting shared representations for personalized federated learning", ICML 2021. A client receives P
and, in each round,
    Q_i <- e_h epochs of CE(Q_i(P(x)), y) with P frozen,
    P_i <- e_b epochs of the same loss with Q_i frozen;
the server averages P_i alone. Client i deploys the new global P under its own Q_i.

FedPCL compares with FedRep in a setting it does not print (D-18), and says that all baselines use one architecture
(section 5.1). So both presets have the layers of the other baselines, and one epoch of each part (``official``:
released FedPCL layers, with the ReLU and L2 on the logits that its other baselines have, D-13). Released FedRep code
takes e_h = 10 (D-72: ``--set e_h=10``) and SGD (``--set opt=sgd --set lr=0.01 --set momentum=0.5``), and trains every
client's Q once more after the last round, which is not done here. Ten epochs on logits behind a ReLU leave classes
whose logit is 0 for every row and never learn again: with ``e_h=10`` take ``logit_head=plain``.
Both phases start with a fresh optimiser and have their own order of rows. A frozen P with BatchNorm uses its running
statistics, as it does in inference. Special cases: e_h = 0 never changes a Q, e_b = 0 never changes P.

FedAlt (Pillutla et al., "Federated learning with partial model personalization", ICML 2022) is this method, with Q as
the personal part, plain SGD and as many epochs of Q as of P (D-112; see tests/). Without BatchNorm its released code,
facebookresearch/FL_partial_personalization, takes the same steps, but weighs clients by batches instead of rows.
"""

from __future__ import annotations

from torch import Tensor

from fedcache.federate.methods.common import (
    AGG,
    BN_MODE,
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
    Batch,
    ClientData,
    Ctx,
    Hp,
    HParam,
    Method,
    MethodPage,
    Tree,
    declare,
    model,
    personal_model,
    select,
    server_tensors,
    train,
    without,
)
from fedcache.federate.methods.fedavg import own_statistics
from fedcache.heads.losses import cross_entropy
from fedcache.heads.projection import classify, embed


def shared(hp: Hp) -> tuple[str, ...]:
    """Names of P's tensors, without the statistics that stay with the client."""
    return model.names(hp, (*CLASSIFIER, *own_statistics(hp)))


def init(ctx: Ctx) -> Tree:
    """P; with ``init=independent`` only the classifiers differ between clients."""
    return {k: t for k, t in model.drawn(ctx).items() if k not in CLASSIFIER}


def enter(down: Tree, _data: ClientData, ctx: Ctx) -> Tree:
    """The client's own Q."""
    p = model.init(ctx)
    return {**select(p, CLASSIFIER), **select(down, own_statistics(ctx.hp))}


def head_loss(p: Tree, batch: Batch, _down: Tree, ctx: Ctx) -> Tensor:
    """Cross-entropy of Q on projections by P in evaluation mode."""
    head = model.head_of(ctx.hp)
    z, _ = embed(head, p, batch["x"])
    u = classify(head, p, z)
    return cross_entropy(u, batch["y"], batch["w"])


def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """e_h epochs of Q, then e_b epochs of P; P leaves, Q stays."""
    body = model.head_of(ctx.hp).body()
    p = select({**down, **state}, model.names(ctx.hp))
    # The classifier first, on projections that do not change.
    p = train(p, CLASSIFIER, ctx.count("e_h"), head_loss, down, data, ctx, purpose="head")
    # The second phase starts without the optimiser state of the first, because Adam counts the steps of a phase.
    p = select(p, model.names(ctx.hp))
    p = train(p, body, ctx.count("e_b"), model.ce_loss, down, data, ctx)
    return select(p, state), select(p, shared(ctx.hp))


def paper_count(width: int, classes: int, _clients: int, hp: Hp) -> tuple[int, int]:
    """The weights of P, both ways."""
    n = model.head_of(hp, "projection").paper_weights(width, classes)
    return n, n


METHOD = Method(
    name="fedrep",
    paper="Collins et al., ICML 2021",
    summary="A shared projection and a personal classifier, trained one after the other; only "
    "the projection is sent.",
    hparams=(
        *declare(FEAT_POST, MLP, PROJECTION, BN_MODE, LOGIT_HEAD, PROTO_INIT, AGG, TRAIN_VIEW),
        *without(TRAINING, "epochs", "reset_opt"),
        HParam(
            "e_h",
            1,
            "int",
            "epochs of the classifier, which is trained before the projection; FedRep's released "
            "code has 10 (D-72)",
            low=0,
        ),
        HParam("e_b", 1, "int", "epochs of the projection (D-72)", low=0),
    ),
    defaults=FEDPCL_SETTING,
    executions=ON_ROWS,
    init=init,
    enter=enter,
    fit=fit,
    uploads=server_tensors(shared),
    predict=model.predict,
    embed=model.embed,
    protocol=personal_model,
    paper_count=paper_count,
    page=MethodPage(
        family="A model for each client",
        formula=r"""
            Q_i \leftarrow \mathrm{arg}\min_{Q}\ F_i(Q \circ P),
                \qquad P_i \leftarrow \mathrm{arg}\min_{P'}\ F_i(Q_i \circ P'),
                \qquad P \leftarrow \sum_i \frac{n_i}{N}\, P_i
        """,
        terms="""
            $P$: the projection of the features; $Q$: the classifier on top of it; $F_i$: the mean loss of client $i$ on
            its training rows; $n_i$, $N$: rows of client $i$ and of all clients.
        """,
        when="""
            Use it if clients differ in more than their class shares. Compare it with `fed3r` and `--client-prior
            fitted` first. To predict, a client needs its own saved classifier. FedAlt (Pillutla et al., 2022) is
            `fedrep` with `opt=sgd`, `momentum=0`, `bn=false` and the same number for `e_h` and `e_b`.
        """,
        cite=("collins2021fedrep", "pillutla2022partial"),
    ),
)
