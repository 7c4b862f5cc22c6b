"""The centralised reference: one linear head on all clients' labelled rows. It is not federated, and nothing is sent.

All labelled rows are brought to one place, and one linear head is trained on them. This is not federated: it is the
reference that federated linear heads are compared with. By default, L-BFGS trains the head to convergence, so the
result is deterministic.

``probe=lbfgs``, the default (D-88), is the reference that federated linear heads are measured against, and the usual
linear probe: mean cross-entropy + (l2/2) |W|^2 by L-BFGS from zero weights to convergence, in float64. It is
deterministic, and ignores ``init`` and the switches of SGD. ``probe=sgd`` is "FC-central" of table 1 of FST-CBDG (E):
SGD with rate 0.01, momentum 0.9, decay 1e-5. E prints no batch and no epochs, so fedcache takes a batch of 50 and 10
epochs (D-52). With few rows these are too few steps for an upper bound. ``logit_scale`` s makes the logits
s (W x + b), for both (D-83).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedcache.federate.methods.common import (
    FEAT_POST,
    INIT,
    LINEAR,
    LOGIT_SCALE,
    TRAINING,
    ClientData,
    Ctx,
    Defaults,
    HParam,
    Method,
    MethodPage,
    Tree,
    affine,
    declare,
    local,
    model,
    server_tensors,
)

sgd = local(model.ce_loss, model.names, model.trained, send=model.names)


def lbfgs(
    x: Tensor, y: Tensor, classes: int, l2: float, steps: int, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """W [C, D] and b [C] that minimise the mean cross-entropy of scale (W x + b), plus (l2/2) |W|^2.

    The rows x [N, D] are in float64. b is not penalised.
    """
    # The problem is convex, so a start at zero reaches the same minimum as any other.
    W = x.new_zeros(classes, x.shape[1]).requires_grad_()
    b = x.new_zeros(classes).requires_grad_()
    solver = torch.optim.LBFGS(
        [W, b],
        max_iter=steps,
        tolerance_grad=1e-8,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )

    def objective() -> Tensor:
        solver.zero_grad()
        loss = cross_entropy(scale * affine(x, W, b), y)
        value = loss + 0.5 * l2 * (W**2).sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    solver.step(objective)  # type: ignore[no-untyped-call]
    return W.detach(), b.detach()


def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """Train on all rows; the only client has the rows of all clients."""
    if ctx.hp["probe"] == "sgd":
        return sgd(down, state, data, ctx)
    x = data.full()[0].double().flatten(0, -2)
    y = data.labels().flatten()
    W, b = lbfgs(
        x,
        y,
        ctx.env.classes,
        ctx.scalar("l2"),
        ctx.count("lbfgs_steps"),
        ctx.scalar("logit_scale"),
    )
    up = {"W": W.to(ctx.env.dtype), "b": b.to(ctx.env.dtype)}
    return {}, {k: t.reshape(ctx.lead + tuple(t.shape)) for k, t in up.items()}


def zero_shot(ctx: Ctx) -> Callable[[Tensor], Tensor] | None:
    """The zero-shot classifier, if SGD starts from it; L-BFGS starts at zero."""
    if ctx.hp["probe"] == "sgd":
        return model.zero_shot(ctx)
    return None


METHOD = Method(
    name="central",
    paper="reference of FST-CBDG (Yan & Guo), table 1",
    summary="One linear head on all labelled rows, by L-BFGS or SGD; not federated.",
    hparams=(
        *declare(
            FEAT_POST,
            LOGIT_SCALE,
            INIT,
            TRAINING,
            feat_post="l2",
            opt="sgd",
            lr=0.01,
            wd=1e-5,
            momentum=0.9,
            batch=50,
            epochs=10,
            drop_last=False,
        ),
        LINEAR,
        HParam("probe", "lbfgs", "choice", "how the head is trained", choices=("lbfgs", "sgd")),
        HParam("l2", 1e-4, "float", "L2 penalty of probe=lbfgs", low=0.0),
        HParam("lbfgs_steps", 500, "int", "largest number of iterations of probe=lbfgs", low=1),
    ),
    defaults=Defaults(rounds=1, participation=None, clients=100, scheme="iid"),
    init=model.init,
    fit=fit,
    uploads=server_tensors(model.names),
    predict=model.predict,
    check=model.check,
    zero_shot=zero_shot,
    one_shot=True,
    central=True,
    paper_count=lambda *_: (0, 0),
    depends_on_origin="trained by gradient steps",
    page=MethodPage(
        family="References",
        formula=r"""
            \min_{W, b}\ -\frac{1}{N} \sum_{(x, y)} \log \mathrm{softmax}_y(W x + b)
                + \frac{\lambda}{2} \lVert W \rVert^2
        """,
        terms=r"""
            $W$, $b$: the linear head; $N$: the rows of all clients; $\lambda$: `l2`.
        """,
        when="""
            Use it to see how accurate a linear head is if all rows are in one place. It is not an upper bound for
            closed-form methods such as `fed3r`.
        """,
        cite=("yan2024fstcbdg",),
    ),
)
