"""Per-FedAvg: a global model from which one gradient step makes a good model for each client, in its first-order form.

Clients train a global model that becomes good after one gradient step on a client's own rows. Before use, each client
takes one or more such steps. The server averages the models as in FedAvg.

Fallah et al., "Personalized federated learning with theoretical guarantees: a model-agnostic meta-learning approach",
NeurIPS 2020, in its first-order form. For each pair of batches of the client's rows,
    theta' = theta - alpha * grad f(theta; B1)
    theta <- theta - beta * grad f(theta'; B2);
the server averages theta. Client i deploys theta after ``adapt_steps`` steps of size alpha, each on a batch of its
training rows. The factor (I - alpha Hessian) of the exact meta-gradient is left out.

Both steps are plain SGD. B2 is the stream of batches that ``fedavg`` sees and B1 a second one over the same rows, so an
epoch passes twice over them. The released code (preset ``official``) adapts twice on batches of the TEST set, with its
labels (D-71). The engine warns that such an accuracy is no test accuracy. The tables of ``fedcache reproduce`` adapt on
training rows, and show the accuracy with this leak in a separate row.

Rates: FedPCL, which compares with Per-FedAvg, prints Adam with 0.001 for all methods, and no rates of this one
(section 5.1, D-79). The defaults are those of the released code. Plain SGD with beta = 0.001 hardly moves a model in a
few rounds of a few steps. ``preset=tuned`` has the rates that were chosen once on rows of ``digits`` that are used
neither for training nor for testing: ``fedcache grid --ready tuned-perfedavg``, which kept alpha.
Special cases: alpha = 0 trains as ``fedavg`` by SGD with lr = beta, bit for bit; adapt_steps = 0 deploys theta as it
is.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from fedcache.federate.methods import fedavg
from fedcache.federate.methods.common import (
    FEDPCL_SETTING,
    OWN_STEPS,
    Batch,
    Batches,
    ClientData,
    Ctx,
    HParam,
    MethodPage,
    Tree,
    grads,
    is_zero,
    minibatches,
    model,
    no_state,
    over,
    personal_if,
    select,
    server_tensors,
    train,
)


def as_sgd(ctx: Ctx, rate: str) -> Ctx:
    """The context of plain SGD whose learning rate is the hyperparameter of name ``rate``."""
    return ctx.with_hp(opt="sgd", lr=ctx.hp[rate], wd=0.0, momentum=0.0)


def loss(p: Tree, batch: Batch, down: Tree, ctx: Ctx) -> tuple[Tensor, Tree]:
    """f(theta'; B2) with theta' = theta - alpha grad f(theta; B1), where that gradient counts as a constant."""
    alpha = ctx.number("alpha")
    if is_zero(alpha):
        return model.ce_loss(p, batch, down, ctx)  # the same bits as fedavg, at the same cost
    trained = model.trained(ctx.hp)
    first = {**batch, "x": batch["x1"], "y": batch["y1"], "i": batch["i1"]}
    g, _ = grads(model.ce_loss, trained, p, first, down, ctx)
    # First order: the gradient of the step is a constant, so there are no second derivatives.
    ahead = {}
    for name, gradient in zip(trained, g, strict=True):
        ahead[name] = p[name] - over(alpha, gradient) * gradient
    return model.ce_loss({**p, **ahead}, batch, down, ctx)


def pairs(data: ClientData, ctx: Ctx, epoch: int) -> Batches:
    """The usual batches as B2, and B1 of the same sizes from a stream of its own as ``x1``, ``y1``, ``i1``."""
    seconds = minibatches(data, ctx, epoch)
    firsts = minibatches(data, ctx, epoch, "inner")
    for (k, second), (_, first) in zip(seconds, firsts, strict=True):
        inner = {f"{name}1": first[name] for name in ("x", "y", "i")}
        yield k, {**second, **inner}


def fit(down: Tree, _state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """Local epochs over pairs of batches."""
    sgd = as_sgd(ctx, "beta")
    trained = model.trained(ctx.hp)
    p = select(down, model.names(ctx.hp))

    def batches(_now: Tree, epoch: int) -> Batches:
        return pairs(data, sgd, epoch)

    p = train(p, trained, ctx.count("epochs"), loss, down, data, sgd, batches=batches)
    return {}, select(p, down)


def adapt(down: Tree, data: ClientData, ctx: Ctx) -> Tree:
    """theta after ``adapt_steps`` steps, each on one batch of ``data`` from a stream that no training reads."""
    # A client with fewer rows than a batch adapts on the rows it has.
    sgd = as_sgd(ctx, "alpha").with_hp(drop_last=False)
    trained = model.trained(ctx.hp)
    steps = ctx.count("adapt_steps")

    # Each "epoch" is one step, on the plain view (0) of the first batch in a fresh order.
    def batches(_now: Tree, epoch: int) -> Batches:
        return islice(minibatches(data, sgd, epoch, "adapt", (0,)), 1)

    # Evaluation runs without gradients, and adaptation needs them.
    with torch.enable_grad():
        return train(down, trained, steps, model.ce_loss, down, data, sgd, batches=batches)


def personal_part(down: Tree, _state: Tree, data: ClientData, ctx: Ctx) -> Tree:
    """The adapted model, without the state of its optimiser; nothing if theta is deployed."""
    if not ctx.count("adapt_steps"):
        return {}
    adapted = adapt(down, data, ctx)
    return {name: t for name, t in adapted.items() if name in down}


METHOD = replace(
    fedavg.METHOD,
    name="perfedavg",
    paper="Fallah et al., NeurIPS 2020 (first order)",
    summary="A global model that is trained so that one gradient step adapts it to each client.",
    hparams=(
        *OWN_STEPS,
        HParam(
            "alpha",
            1e-2,
            "float",
            "learning rate of the look-ahead step and of the adaptation; 0 is fedavg",
            low=0.0,
        ),
        HParam("beta", 1e-3, "float", "learning rate of theta", low=0.0, tuned=1e-2),
        HParam(
            "adapt_on",
            "train",
            "choice",
            "rows on which a client adapts the model before it is scored; test uses labelled "
            "test rows, which is a leak (D-71)",
            choices=("train", "test"),
            official="test",
        ),
        HParam(
            "adapt_steps",
            1,
            "int",
            "number of adaptation steps; 0 uses theta itself (D-71)",
            low=0,
            official=2,
        ),
    ),
    defaults=FEDPCL_SETTING,
    fit=fit,
    enter=no_state,
    uploads=server_tensors(model.names),
    personal_part=personal_part,
    protocol=personal_if(lambda hp: hp["adapt_steps"]),
    reads_test=lambda hp: hp["adapt_on"] == "test" and bool(hp["adapt_steps"]),
    page=MethodPage(
        family="A model for each client",
        formula=r"""
            \theta' = \theta - \alpha\, \nabla f(\theta; B_1),
                \qquad \theta \leftarrow \theta - \beta\, \nabla f(\theta'; B_2),
                \qquad \theta \leftarrow \sum_i \frac{n_i}{N}\, \theta_i
        """,
        terms=r"""
            $\theta$: the global model; $f$: the loss of a model on a batch; $B_1$, $B_2$: two batches of the client's
            rows; $\alpha$, $\beta$: the two learning rates. A client deploys $\theta$ after `adapt_steps` steps of size
            $\alpha$.
        """,
        when="""
            Use it if new clients should adapt in a step or two. It has two learning rates of plain SGD. `--preset
            tuned` sets both rates.
        """,
        cite=("fallah2020perfedavg",),
    ),
)
