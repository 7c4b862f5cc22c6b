"""FedAvg: local training, then the average of the weights.

In each round, clients receive the global model and train it on their own rows for some epochs. The server averages the
trained models, weighted by the number of rows.

McMahan et al., "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017;
FedPCL's eq 1: w <- sum_i a_i w_i with a_i = n_i / N over the round's clients.

The model has the layers that FedPCL prints for all its methods (table 7): FC, ReLU, BatchNorm, FC. A batch of one row
has no variance, so it joins the batch before it, and a client with one row does not train. The server averages running
means and variances like weights.

The released FedPCL code (preset ``official``) differs: it has no BatchNorm, and projections of unit length (D-02). It
has uniform a_i, and 20 random clients per round if there are more than 20 (D-14). It leaves out the last short batch
(D-09), and applies ReLU and L2 normalisation to the logits (D-13; docs/readings.md).

Special cases: lr = 0 keeps w; one client is ``solo``. With ``bn_mode=local`` BatchNorm's running statistics stay with
the client, which is scored with its own statistics.
"""

from __future__ import annotations

from dataclasses import replace

from fedcache.federate.methods.common import (
    AGG,
    FEAT_POST,
    FEDPCL_SETTING,
    INIT,
    LOGIT_SCALE,
    MODEL,
    ON_ROWS,
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
    personal_if,
    select,
    server_tensors,
)


def own_statistics(hp: Hp) -> tuple[str, ...]:
    """Names of the buffers that stay with the client."""
    if hp["bn_mode"] == "local":
        return model.head_of(hp).buffers()
    return ()


def enter(down: Tree, _data: ClientData, ctx: Ctx) -> Tree:
    """Nothing, unless statistics or the optimiser stay with the client."""
    kept = select(down, own_statistics(ctx.hp))
    return {**kept, **keep_optimiser(down, model.trained(ctx.hp), ctx)}


def sent_names(hp: Hp) -> tuple[str, ...]:
    """Names of the model's tensors, without the statistics that stay with the client."""
    return model.names(hp, own_statistics(hp))


uploads = server_tensors(sent_names)


def paper_count(width: int, classes: int, _clients: int, hp: Hp) -> tuple[int, int]:
    """All weights, both ways."""
    n = model.head_of(hp).paper_weights(width, classes)
    return n, n


METHOD = Method(
    name="fedavg",
    paper="McMahan et al., AISTATS 2017",
    summary="Clients train the model locally; the server averages the models, weighted by rows.",
    hparams=declare(FEAT_POST, MODEL, LOGIT_SCALE, INIT, AGG, TRAINING),
    defaults=replace(FEDPCL_SETTING, official_participation=20),
    executions=ON_ROWS,
    init=model.init,
    enter=enter,
    fit=local(model.ce_loss, model.names, model.trained, sent_names),
    uploads=uploads,
    predict=model.predict,
    embed=model.embed,
    protocol=personal_if(own_statistics),
    check=model.check,
    zero_shot=model.zero_shot,
    paper_count=paper_count,
    page=MethodPage(
        family="Many rounds, one model",
        formula=r"""
            w_i = w - \eta \sum_{t} g_i(w_{i,t}), \qquad w \leftarrow \sum_i \frac{n_i}{N}\, w_i
        """,
        terms=r"""
            $w$: the global model; $w_i$: the model of client $i$ after local training; $n_i$: its training rows; $N$:
            the training rows of all clients in the round; $g_i$: the optimiser's direction on a batch, which is the
            gradient for `opt=sgd`; $\eta$: `lr`.
        """,
        when="""
            Use it as the baseline of all other methods. It is accurate if clients are alike, and loses many points of
            accuracy if each client has few classes. On frozen features also try `fed3r`.
        """,
        cite=("mcmahan2017fedavg",),
    ),
)
