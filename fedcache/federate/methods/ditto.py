"""Ditto: every client trains a model of its own, held near a FedAvg model, which the personal models do not influence.

Clients train a global model by FedAvg. In addition, every client trains a personal model, which a penalty keeps near
the global one. Only the global model travels.

Li et al., "Ditto: fair and robust federated learning through personalization", ICML 2021:
    w: FedAvg,    v_i <- argmin F_i(v) + (lambda/2) |v - w|^2,
by local epochs on v_i against the w that was just received. v_i starts at the run's first weights. Only w travels.

As in PFLlib, v is trained for ``personal_epochs`` by the same optimiser with the same learning rate. Both models pass
over the same batches in the same order, so the special cases below hold for the same random draws. The paper tunes
lambda per data set; fedcache takes 1.

The released FedPCL code has no Ditto, so preset ``official`` uses that code's settings of FedAvg (D-02, D-09, D-13,
D-14; docs/readings.md).
Special cases: w is ``fedavg`` bit for bit for every lambda; lambda = 0 makes v_i ``solo`` bit for bit; for
lr * lambda = 1, v_i stays within lr |gradient| of w.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fedcache.federate.methods import fedavg, solo
from fedcache.federate.methods.common import (
    ClientData,
    Ctx,
    HParam,
    MethodPage,
    Tree,
    is_zero,
    model,
    personal_model,
    select,
    train,
)
from fedcache.federate.methods.fedprox import proximal
from fedcache.heads.projection import logits

OWN = "v/"
"""Prefix of the personal model's tensors; tensors that FedAvg keeps with the client have no prefix."""


def personal(state: Tree) -> Tree:
    """v_i and its optimiser, by their plain names."""
    return {k.removeprefix(OWN): t for k, t in state.items() if k.startswith(OWN)}


def enter(down: Tree, data: ClientData, ctx: Ctx) -> Tree:
    """v_i at the run's first weights, and the state of a FedAvg client."""
    v = solo.enter(down, data, ctx)
    own = {OWN + k: t for k, t in v.items()}
    return {**fedavg.enter(down, data, ctx), **own}


def loss(p: Tree, batch: Tree, down: Tree, ctx: Ctx) -> tuple[Tensor, Tree]:
    """Cross-entropy plus (lambda/2) |v - w|^2."""
    value, updates = model.ce_loss(p, batch, down, ctx)
    lam = ctx.number("lambda")
    if is_zero(lam):
        return value, updates  # the same bits as solo, at the same cost
    return value + 0.5 * lam * proximal(p, down, ctx), updates


def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """FedAvg's local epochs on w, then those on v_i."""
    shared = {k: t for k, t in state.items() if not k.startswith(OWN)}
    kept, up = fedavg.METHOD.fit(down, shared, data, ctx)
    epochs = ctx.count("epochs")
    if ctx.hp["personal_epochs"] is not None:
        epochs = ctx.count("personal_epochs")
    # v_i has the names of w, and is trained even if w is frozen.
    of_v = replace(ctx, frozen=frozenset())
    v = train(personal(state), model.trained(ctx.hp), epochs, loss, down, data, of_v)
    own = {OWN + k: t for k, t in v.items()}
    return select({**kept, **own}, state), up


def predict(down: Tree, state: Tree, _data: ClientData, x: Tensor, ctx: Ctx) -> Tensor:
    """Logits [.., N, C] of the client's own model."""
    return logits(model.head_of(ctx.hp), {**down, **personal(state)}, x)[0]


METHOD = replace(
    fedavg.METHOD,
    name="ditto",
    paper="Li et al., ICML 2021",
    summary="FedAvg, plus a personal model of every client that is kept near the global model.",
    hparams=(
        *fedavg.METHOD.hparams,
        HParam(
            "lambda",
            1.0,
            "float",
            "strength of the pull of the personal model towards the global model; 0 is solo",
            low=0.0,
        ),
        HParam(
            "personal_epochs",
            None,
            "int",
            "local epochs of the personal model",
            low=0,
            auto="epochs",
        ),
    ),
    enter=enter,
    fit=fit,
    predict=predict,
    embed=lambda down, own, x, ctx: model.embed(down, personal(own), x, ctx),
    protocol=personal_model,
    page=MethodPage(
        family="A model for each client",
        formula=r"""
            v_i \leftarrow \mathrm{arg}\min_v\ F_i(v) + \frac{\lambda}{2} \lVert v - w \rVert^2,
                \qquad w \text{ by FedAvg}
        """,
        terms=r"""
            $v_i$: the personal model of client $i$; $w$: the global model; $F_i$: the mean loss of client $i$ on its
            training rows; $\lambda$: the weight of the penalty.
        """,
        when="""
            Use it if you need both a global model and personal models. With `head=linear` clients send little. Ditto is
            accurate if clients differ.
        """,
        cite=("li2021ditto",),
    ),
)
