"""IFCA: the server keeps several models, and each client trains the one that fits its rows best.

The server keeps several models. Each client receives all of them, selects the one with the lowest loss on its rows, and
trains that one. The server averages each model over the clients that selected it.

Ghosh et al., "An efficient framework for clustered federated learning", NeurIPS 2020, algorithm 1 with model averaging.
In every round a client receives all K models w_1 .. w_K, finds
    j = argmin_k F_i(w_k)    on its training rows,
trains w_j and sends it with j; the server averages the models that were sent for each j, weighted by their clients'
rows (in the paper with equal weights, ``agg=uniform``), and keeps a model that no client selected. Client i deploys the
model of smallest loss on its rows. All models begin with different weights; otherwise no client could tell them apart.

Clients send one model and its number, and receive K models. By default, models have no BatchNorm. A model that no
client has trained yet would still have its initial running statistics (mean 0, variance 1), which fit no rows. Its loss
would be high, so all clients would always choose the model that happened to be chosen first.
IFCA is run here next to the baselines of FedPCL (Tan et al., NeurIPS 2022). FedPCL's released code has no IFCA, so
preset ``official`` takes the settings that this code gives its other baselines (D-09, D-13, D-14; docs/readings.md).
Special cases: K = 1 is ``fedavg`` (to rounding); a client does not affect the average of a model that it did not
choose.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedcache.federate.engine.method import head_weights
from fedcache.federate.methods import fedavg
from fedcache.federate.methods.common import (
    AGG,
    FEAT_POST,
    FEDPCL_SETTING,
    MODEL,
    SHARED_INIT,
    TRAINING,
    ClientData,
    Ctx,
    Hp,
    HParam,
    MethodPage,
    Tree,
    Uploads,
    UploadTensor,
    declare,
    model,
    no_state,
    over,
    personal_model,
    train,
    without,
)
from fedcache.federate.methods.fedncm import add_up
from fedcache.heads.losses import cross_entropy
from fedcache.heads.projection import logits

ALL = "models/"
"""Prefix of tensors that hold all K models, [K, ...]."""
CHOSEN = "chosen"
"""Name of a tensor [K] with a number for each model. In an upload it is the client's weight for the chosen model, and 0
for the others. At the server it is the sum of these weights."""


def init(ctx: Ctx) -> Tree:
    """K models, each with weights of its own, that no client has selected yet."""
    head = model.head_of(ctx.hp)
    K = ctx.count("models")
    # Each model has its own stream of random numbers: models that start equal would always be chosen by the same
    # clients.
    drawn = []
    for k in range(K):
        uniform = ctx.rng.uniform(f"init/{k}")
        drawn.append(head.init(uniform, ctx.env.width, ctx.env.classes))
    axis = len(ctx.lead)
    out = {}
    for name in model.names(ctx.hp):
        out[ALL + name] = torch.stack([p[name] for p in drawn], axis)
    count = torch.zeros(K, dtype=torch.float64, device=ctx.env.device)
    return {**out, CHOSEN: count.reshape((1,) * axis + (K,))}


def one_model(down: Tree, k: int, ctx: Ctx) -> Tree:
    """Model k under its plain names."""
    return {name: down[ALL + name].select(len(ctx.lead), k) for name in model.names(ctx.hp)}


def losses(down: Tree, data: ClientData, ctx: Ctx) -> Tensor:
    """Summed cross-entropy of the clients' rows under each model in evaluation mode, [*lead, K]."""

    def sums(block: ClientData) -> Tree:
        x, mask = block.full()
        y = block.labels()
        head = model.head_of(ctx.hp)
        values = []
        for k in range(ctx.count("models")):
            u, _ = logits(head, one_model(down, k, ctx), x)
            values.append(cross_entropy(u, y, mask).double())
        return {"loss": torch.stack(values, -1)}

    # Numbers per row of the largest intermediate result (features or projection). They decide the rows of a block.
    width = max(ctx.env.width, ctx.count("dim"))
    # Without gradients, because the models are only compared here; the chosen one is trained afterwards.
    with torch.no_grad():
        return add_up(data, ctx, width, sums)["loss"]


def best(down: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tensor]:
    """The model of smallest loss under its plain names, and its number as a one-hot vector, float64 [*lead, K]."""
    K = ctx.count("models")
    # ``expand``, because axes of ``losses`` may have length 1, such as the grid's if all its points share the models.
    at = losses(down, data, ctx).argmin(-1).expand(ctx.lead)
    return models_at(down, at, ctx), one_hot(at, K).double()


def models_at(down: Tree, at: Tensor, ctx: Ctx) -> Tree:
    """The model of number ``at`` [*lead] for each place of the leading axes, under its plain names."""
    axis = at.dim()
    chosen = {}
    for name in model.names(ctx.hp):
        t = down[ALL + name]
        lead = torch.broadcast_shapes(at.shape, t.shape[:axis])  # type: ignore[no-untyped-call]
        t = t.expand(*lead, *t.shape[axis:])
        # ``gather`` needs an index of the shape of its result, which is one model.
        place = at.expand(lead).reshape(*lead, *(1,) * (t.dim() - axis))
        place = place.expand(*lead, 1, *t.shape[axis + 1 :])
        chosen[name] = t.gather(axis, place).squeeze(axis)
    return chosen


def fit(down: Tree, _state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """Local epochs of the model that fits best. It is sent at its place among the K, times the client's weight."""
    p, place = best(down, data, ctx)
    p = train(p, model.trained(ctx.hp), ctx.count("epochs"), model.ce_loss, down, data, ctx)
    weight = place
    if ctx.hp["agg"] != "uniform":
        weight = place * data.per_client(data.n).unsqueeze(-1)
    up: Tree = {CHOSEN: weight}
    for name in model.names(ctx.hp):
        t = p[name].unsqueeze(len(ctx.lead))
        # All other places are 0, so the server's sum over clients adds each model's own clients. ``over`` divides
        # nothing: it gives the weight more axes.
        up[ALL + name] = t.double() * over(weight, t)
    return {}, up


def uploads(server: Tree, ctx: Ctx) -> Uploads:
    """A model in one of K places, times the client's weight, and that weight in the same place."""
    sent = {
        ALL + name: UploadTensor(tuple(server[ALL + name].shape), torch.float64)
        for name in model.names(ctx.hp)
    }
    return {**sent, CHOSEN: UploadTensor((ctx.count("models"),), torch.float64)}


def sent_numbers(up: Tree, ctx: Ctx) -> int:
    """The scalars of one model, and its number: all other places are 0."""
    of_all_places = sum(t.numel() for name, t in up.items() if name != CHOSEN)
    return of_all_places // ctx.count("models") + 1


def aggregate(server: Tree, up: Tree, ctx: Ctx) -> Tree:
    """Every model's average; one that no client selected stays."""
    weight = up[CHOSEN]
    out = {**server, CHOSEN: weight}
    for name in model.names(ctx.hp):
        old = server[ALL + name]
        total = up[ALL + name]
        w = torch.as_tensor(over(weight, total))  # ``as_tensor`` is for the type checker
        # Divide by 1 where no client chose the model, because 0 / 0 is NaN.
        mean = total / torch.where(w > 0, w, 1.0)
        out[ALL + name] = torch.where(w > 0, mean.to(old.dtype), old)
    return out


def personal_part(down: Tree, _state: Tree, data: ClientData, ctx: Ctx) -> Tree:
    """The model of smallest loss on the client's rows."""
    return best(down, data, ctx)[0]


def deployed(down: Tree, own: Tree, ctx: Ctx) -> Tree:
    """The client's model; without one, the model with the largest sum of client weights."""
    if own:
        return own
    return models_at(down, down[CHOSEN].argmax(-1), ctx)


def predict(down: Tree, own: Tree, _data: ClientData, x: Tensor, ctx: Ctx) -> Tensor:
    """Logits [.., N, C] of the ``deployed`` model."""
    return logits(model.head_of(ctx.hp), deployed(down, own, ctx), x)[0]


def embed(down: Tree, own: Tree, x: Tensor, ctx: Ctx) -> Tensor:
    """Projections [.., N, dim] of features by the ``deployed`` model."""
    return model.embed(deployed(down, own, ctx), {}, x, ctx)


def trainable(server: Tree, _state: Tree) -> int:
    """The trained numbers of one of the K models."""
    models = {name.removeprefix(ALL): t for name, t in server.items()}
    return head_weights(models, {}) // server[CHOSEN].shape[-1]


def paper_count(width: int, classes: int, _clients: int, hp: Hp) -> tuple[int, int]:
    """One model and its number up, K models down."""
    n = model.head_of(hp).paper_weights(width, classes)
    return n + 1, n * cast(int, hp["models"])


METHOD = replace(
    fedavg.METHOD,
    name="ifca",
    paper="Ghosh et al., NeurIPS 2020",
    summary="The server keeps several models; each client trains and uses the model that fits "
    "its rows best.",
    hparams=(
        *declare(
            FEAT_POST,
            without(MODEL, "bn_mode"),
            AGG,
            without(TRAINING, "reset_opt"),
            bn=False,
            z_norm="l2",
        ),
        SHARED_INIT,
        HParam("models", 2, "int", "number K of models at the server", low=1),
    ),
    defaults=FEDPCL_SETTING,
    executions=("sequential", "batched"),
    init=init,
    enter=no_state,
    fit=fit,
    uploads=uploads,
    pool=lambda _hp: {"": "sum"},  # every tensor, because each name begins with ""
    aggregate=aggregate,
    sent=sent_numbers,
    personal_part=personal_part,
    predict=predict,
    embed=embed,
    protocol=personal_model,
    trainable=trainable,
    paper_count=paper_count,
    upload_descriptions={
        CHOSEN: (
            "the client's weight, at the number of the model that it chose",
            "how many rows it has, and which clients are like it",
        ),
    },
    page=MethodPage(
        family="A model for each client",
        formula=r"""
            j_i = \mathrm{arg}\min_k\ F_i(w_k),
                \qquad w_k \leftarrow \frac{\sum_{i:\, j_i = k} n_i\, w_{k,i}}{\sum_{i:\, j_i = k} n_i}
        """,
        terms="""
            $w_k$: model $k$ of the server; $w_{k,i}$: the same model after client $i$'s local training; $F_i$: the mean
            loss of client $i$ on its training rows; $j_i$: the model that the client selects; $n_i$: the client's rows.
        """,
        when="""
            Use it if clients form a few groups with different data. Every client downloads all models.
        """,
        cite=("ghosh2020ifca",),
    ),
)
