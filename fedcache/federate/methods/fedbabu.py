"""FedBABU: only the projection P is trained and averaged; each client fine-tunes the result before it is used.

Clients train and average the projection only, under a classifier that keeps its random first weights. Before use, each
client fine-tunes the shared model on its own rows for a few epochs.

Oh, Kim & Yun, "FedBABU: toward enhanced representation for federated image classification", ICLR 2022. The classifier Q
keeps its first weights, the same for all clients, while P is trained under it and averaged. Client i then deploys the
global model after ``tune_epochs`` epochs on its own training rows: of all weights (the paper's choice), of Q or of P.
Five epochs are the paper's.

Fine-tuning is part of every evaluation, and its result is not kept. The released FedPCL code has no FedBABU, so preset
``official`` uses that code's settings of its other baselines (D-09, D-13, D-14; docs/readings.md).
Special cases: tune_epochs = 0 deploys the global model; Q of the global model never changes.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fedcache.federate.methods import fedavg
from fedcache.federate.methods.common import (
    AGG,
    CLASSIFIER,
    FEAT_POST,
    FEDPCL_SETTING,
    LOGIT_HEAD,
    MLP,
    PROJECTION,
    SHARED_INIT,
    TRAIN_VIEW,
    TRAINING,
    ClientData,
    Ctx,
    Hp,
    HParam,
    MethodPage,
    Tree,
    declare,
    model,
    no_state,
    personal_if,
    select,
    server_tensors,
    train,
    without,
)


def sent_names(hp: Hp) -> tuple[str, ...]:
    """P, with BatchNorm's statistics."""
    return model.names(hp, CLASSIFIER)


def fit(down: Tree, _state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """Local epochs of P under the first Q."""
    body = model.head_of(ctx.hp).body()
    p = select(down, model.names(ctx.hp))
    p = train(p, body, ctx.count("epochs"), model.ce_loss, down, data, ctx)
    return {}, select(p, sent_names(ctx.hp))


def tuned_names(hp: Hp) -> tuple[str, ...]:
    """The tensors that fine-tuning moves."""
    if hp["tune"] == "all":
        return model.trained(hp)
    if hp["tune"] == "head":
        return CLASSIFIER
    return model.head_of(hp).body()


def personal_part(down: Tree, _state: Tree, data: ClientData, ctx: Ctx) -> Tree:
    """The tensors that ``tune_epochs`` epochs on the client's rows change; none if the global model is deployed."""
    if not ctx.count("tune_epochs"):
        return {}
    # A client with fewer rows than a batch tunes on the rows it has.
    tuning = ctx.with_hp(drop_last=False)
    names = tuned_names(ctx.hp)
    epochs = ctx.count("tune_epochs")
    # Evaluation runs without gradients, and fine-tuning needs them.
    with torch.enable_grad():
        p = train(down, names, epochs, model.ce_loss, down, data, tuning, purpose="tune")
    return select(p, (*names, *model.head_of(ctx.hp).buffers()))


def paper_count(width: int, classes: int, _clients: int, hp: Hp) -> tuple[int, int]:
    """The weights of P up, those of P and Q down."""
    up = model.head_of(hp, "projection").paper_weights(width, classes)
    down = model.head_of(hp).paper_weights(width, classes)
    return up, down


METHOD = replace(
    fedavg.METHOD,
    name="fedbabu",
    paper="Oh, Kim & Yun, ICLR 2022",
    summary="A shared projection under a classifier that keeps its first weights; at the end "
    "every client fine-tunes the model.",
    hparams=(
        *declare(
            FEAT_POST, MLP, PROJECTION, LOGIT_HEAD, AGG, without(TRAINING, "reset_opt"), TRAIN_VIEW
        ),
        SHARED_INIT,
        HParam(
            "tune_epochs",
            5,
            "int",
            "epochs of fine-tuning on the client's own rows before its model is used",
            low=0,
            fit=False,
        ),
        HParam(
            "tune",
            "all",
            "choice",
            "weights that the fine-tuning changes",
            choices=("all", "head", "body"),
            fit=False,
        ),
    ),
    defaults=FEDPCL_SETTING,
    enter=no_state,
    fit=fit,
    uploads=server_tensors(sent_names),
    personal_part=personal_part,
    protocol=personal_if(lambda hp: hp["tune_epochs"]),
    paper_count=paper_count,
    page=MethodPage(
        family="A model for each client",
        formula=r"""
            \begin{aligned}
            &P_i \leftarrow \mathrm{arg}\min_{P'}\ F_i(Q_0 \circ P'),
                \qquad P \leftarrow \sum_i \frac{n_i}{N}\, P_i \\
            &\text{then}\quad (P_i, Q_i) \leftarrow \text{a few epochs on } F_i \text{ from } (P, Q_0)
            \end{aligned}
        """,
        terms="""
            $P$: the projection of the features; $Q$: the classifier on top of it, and $Q_0$ its first weights;
            $F_i$: the mean loss of client $i$ on its training rows; $n_i$, $N$: rows of client $i$ and of all clients.
        """,
        when="""
            Use it if new clients will join: a new client needs the shared projection and a few epochs on its own rows.
        """,
        cite=("oh2022fedbabu",),
    ),
)
