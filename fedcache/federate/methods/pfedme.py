"""pFedMe: every client deploys its own model, held near the global one by a Moreau envelope.

Every client trains a personal model that a penalty keeps near a local copy of the global model. The local copy moves
towards the personal model, and the server averages the copies.

Dinh et al., "Personalized federated learning with Moreau envelopes", NeurIPS 2020. A client starts with
theta = w_i = w and, for each batch,
    theta <- theta - lr_p * (grad f(theta) + lambda * (theta - w_i))     K times, towards
             argmin_theta f(theta) + (lambda/2) |theta - w_i|^2,
    w_i   <- w_i - eta * lambda * (w_i - theta);
the server mixes w <- (1 - beta) w + beta * sum_i a_i w_i. Client i deploys theta_i (``eval=personalised``).

Both steps are plain SGD. theta continues from batch to batch within a round and starts from w in the next, as in
released code, which also decays theta by 0.001 in the inner step (D-70: ``inner_decay``). In the released code all
clients train in every round, and a sample of them is averaged; here only the sample trains. With BatchNorm w_i takes
theta_i's running statistics.
The inner step shrinks theta - w_i by the factor 1 - lr_p * lambda: keep lr_p * lambda below 2.

Rates: FedPCL, which compares with pFedMe, prints Adam with 0.001 for all methods, and no rates of this one (section
5.1, D-79). The defaults are those of pFedMe's released code for MNIST. With them a step moves w_i by eta * lambda =
0.075 of the way to theta_i: too little for a few rounds of a few steps. ``preset=tuned`` has rates that were chosen
once on rows of ``digits`` that are used neither for training nor for testing: ``fedcache grid --ready tuned-pfedme``,
which kept lambda. With these rates, a step moves w_i by eta * lambda = 3 times its distance to theta_i, so beyond
theta_i.
Special cases: lambda = 0 never moves w; eta * lambda = 1 makes w_i = theta_i; beta = 0 keeps w.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

from fedcache.federate.engine.context import writable_copies
from fedcache.federate.engine.local_training import Step, fold_batches
from fedcache.federate.methods import fedavg
from fedcache.federate.methods.common import (
    FEDPCL_SETTING,
    OWN_STEPS,
    Batch,
    ClientData,
    Ctx,
    Hp,
    HParam,
    MethodPage,
    Protocol,
    Tree,
    grads,
    minibatches,
    model,
    over,
    select,
    server_tensors,
)

NEAR = "near/"
"""Prefix of w_i in the carry, in addition to theta_i under the model's names."""


def enter(down: Tree, _data: ClientData, ctx: Ctx) -> Tree:
    """theta_i = w; nothing if w is deployed."""
    if ctx.hp["eval"] == "personalised":
        return select(down, model.names(ctx.hp))
    return {}


def envelope(down: Tree) -> Step:
    """K steps of theta on one batch, then one step of w_i towards it."""

    def one(p: Tree, batch: Batch, ctx: Ctx) -> Tree:
        lr = ctx.number("lr_p")
        lam = ctx.number("lambda")
        decay = ctx.number("inner_decay")
        trained = model.trained(ctx.hp)
        p = dict(p)
        # The inner problem: theta near w_i that fits this batch, by K steps.
        for _ in range(ctx.count("K")):
            g, updates = grads(model.ce_loss, trained, p, batch, down, ctx)
            for name, gradient in zip(trained, g, strict=True):
                pull = over(lam, gradient) * (p[name] - p[NEAR + name])
                direction = gradient + pull + over(decay, gradient) * p[name]
                p[name] = p[name] - over(lr, gradient) * direction
            p |= updates
        pace = ctx.number("eta") * lam
        for name in trained:  # lerp is exact at 0 and 1
            p[NEAR + name] = torch.lerp(p[NEAR + name], p[name], over(pace, p[name]))
        return p

    return one


def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """Local epochs; w_i is sent, and theta_i stays with the client."""
    trained = model.trained(ctx.hp)
    near = {NEAR + name: down[name] for name in trained}
    p = writable_copies({**select(down, model.names(ctx.hp)), **near}, ctx)
    step = envelope(down)
    for epoch in range(ctx.count("epochs")):
        p = fold_batches(p, minibatches(data, ctx, epoch), step, ctx)
    up = {name: p[NEAR + name] for name in trained}
    up |= select(p, model.head_of(ctx.hp).buffers())
    return select(p, state), up


def aggregate(server: Tree, up: Tree, ctx: Ctx) -> Tree:
    """(1 - beta) w + beta times the mean, exact at beta 0 and 1."""
    return {k: torch.lerp(server[k], t, over(ctx.number("beta"), t)) for k, t in up.items()}


def protocol(hp: Hp) -> Protocol:
    """Personal models or a global one, as ``eval`` says."""
    return cast(Protocol, hp["eval"])


METHOD = replace(
    fedavg.METHOD,
    name="pfedme",
    paper="Dinh et al., NeurIPS 2020",
    summary="Personal models that are kept near a global model, which moves towards them.",
    hparams=(
        *OWN_STEPS,
        HParam("K", 5, "int", "number of inner steps on each batch", low=1),
        HParam(
            "lambda", 15.0, "float", "strength of the pull towards w_i; 0 never changes w", low=0.0
        ),
        HParam("lr_p", 0.1, "float", "learning rate of the inner steps", low=0.0, tuned=0.01),
        HParam(
            "eta",
            0.005,
            "float",
            "learning rate of w_i; with eta * lambda = 1, w_i becomes theta_i",
            low=0.0,
            tuned=0.2,
        ),
        HParam(
            "beta",
            1.0,
            "float",
            "share of the clients' mean in the new w; 0 never changes w",
            low=0.0,
        ),
        HParam(
            "inner_decay",
            0.0,
            "float",
            "weight decay of the inner steps (D-70)",
            low=0.0,
            official=0.001,
        ),
        HParam(
            "eval",
            "personalised",
            "choice",
            "personalised: each client uses theta_i; global: all clients use w",
            choices=("personalised", "global"),
        ),
    ),
    defaults=FEDPCL_SETTING,
    enter=enter,
    fit=fit,
    uploads=server_tensors(model.names),
    aggregate=aggregate,
    protocol=protocol,
    page=MethodPage(
        family="A model for each client",
        formula=r"""
            \begin{aligned}
            &\theta_i \approx \mathrm{arg}\min_\theta\ f_i(\theta) + \frac{\lambda}{2} \lVert \theta
                - w_i \rVert^2, \qquad w_i \leftarrow w_i - \eta \lambda\, (w_i - \theta_i) \\
            &w \leftarrow (1 - \beta)\, w + \beta \sum_i \frac{n_i}{N}\, w_i
            \end{aligned}
        """,
        terms=r"""
            $\theta_i$: the personal model of client $i$; $w_i$: its copy of the global model $w$; $f_i$: its loss on a
            batch; $\lambda$: the weight of the penalty; $\eta$: the step of the copy; $\beta$: the share of the new
            average; $n_i$, $N$: rows.
        """,
        when="""
            Use it if personal models should stay near a common model. It has more learning rates than any other method,
            so start with `--preset tuned`.
        """,
        cite=("dinh2020pfedme",),
    ),
)
