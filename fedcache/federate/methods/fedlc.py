"""FedLC: local training under logits calibrated by how many rows of each class the client has.

Clients train as in FedAvg with a changed loss. It lowers the logit of each class, and lowers it most for the client's
rarest classes. Rare classes must therefore win by a larger margin in training.

Zhang et al., "Federated learning with label distribution skew via logits calibration", ICML 2022. With n_c rows of
class c at the client, its loss is the cross-entropy of
    u_c - tau n_c^(-1/4)
in place of the logits u_c, so that rare classes must win by a larger margin. The formula does not cover classes without
any row at the client. They count as ``absent`` rows. Public code has 1e-8 rows: the margin of 100 tau removes such a
class from the sum of the loss, so no row pushes its logit down. On frozen features and clients of few classes the
result is far below FedAvg, so the default is 1. The global model is used with its own logits. All else is FedAvg;
counts stay with the client. The paper tunes tau; 1 is ours.

Interpretation: the paper prints the sum of the loss over all classes but the row's own, c != y. That loss has no
minimum, because it falls without end as u_y grows; an implementer reports that training collapses
(KarhouTam/FL-bench, issue 5), and public code (FL-bench, fluke) sums over all classes. The default follows that code;
``denominator=exclude`` is the loss as printed.

The released FedPCL code has no FedLC, so preset ``official`` uses that code's settings of FedAvg (D-09, D-14;
docs/readings.md), but with plain logits, because a margin on logits between 0 and 1 is not the paper's.
Special cases, with all classes in the sum: tau = 0 is ``fedavg`` bit for bit; a client with equally many rows of every
class trains as in ``fedavg``, except for rounding.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedcache.federate.methods import fedavg
from fedcache.federate.methods.common import (
    AGG,
    FEAT_POST,
    INIT,
    MODEL,
    TRAINING,
    ClientData,
    Ctx,
    HParam,
    MethodPage,
    Tree,
    declare,
    is_zero,
    model,
    over,
    select,
    train,
)
from fedcache.federate.methods.fedncm import class_rows
from fedcache.heads.losses import MASKED, cross_entropy
from fedcache.heads.projection import logits


def loss(p: Tree, batch: Tree, down: Tree, ctx: Ctx) -> tuple[Tensor, Tree]:
    """Cross-entropy of u - tau n^(-1/4), whose denominator sums over all classes, or all but the row's own."""
    tau = ctx.number("tau")
    printed = ctx.hp["denominator"] == "exclude"
    if is_zero(tau) and not printed:
        return model.ce_loss(p, batch, down, ctx)  # the same bits as fedavg, at the same cost
    u, updates = logits(model.head_of(ctx.hp), p, batch["x"], batch["w"])
    margin = p["margin"].unsqueeze(-2)
    calibrated = u - over(tau, margin) * margin
    if not printed:
        return cross_entropy(calibrated, batch["y"], batch["w"]), updates
    index = batch["y"].expand(calibrated.shape[:-1]).unsqueeze(-1)
    log_sum = calibrated.scatter(-1, index, MASKED).logsumexp(-1)
    value = log_sum - calibrated.gather(-1, index).squeeze(-1)
    return (batch["w"] * value).sum(-1), updates


def calibration(count: Tensor, absent: float | Tensor) -> Tensor:
    """n^(-1/4) for the rows of each class [.., C]; a class without rows counts as ``absent`` rows."""
    floor = over(absent, count) * torch.ones_like(count)
    return torch.where(count > 0, count, floor).pow(-0.25)


def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """Local epochs of ``loss``."""
    p = {**select(down, model.names(ctx.hp)), **state}
    margin = calibration(class_rows(data, ctx), ctx.number("absent"))
    p["margin"] = margin.to(ctx.env.dtype)
    p = train(p, model.trained(ctx.hp), ctx.count("epochs"), loss, down, data, ctx)
    return select(p, state), select(p, fedavg.sent_names(ctx.hp))


METHOD = replace(
    fedavg.METHOD,
    name="fedlc",
    paper="Zhang et al., ICML 2022",
    summary="FedAvg with a larger margin for the classes that are rare at the client.",
    hparams=(
        *declare(FEAT_POST, MODEL, INIT, AGG, TRAINING, logit_head="plain"),
        HParam("tau", 1.0, "float", "size of the margin; 0 is fedavg", low=0.0),
        HParam(
            "absent",
            1.0,
            "float",
            "number of rows that is assumed for a class without rows at the client",
            low=1e-12,
        ),
        HParam(
            "denominator",
            "include",
            "choice",
            "sum in the loss; include: over all classes; exclude: without the row's class, as "
            "printed",
            choices=("include", "exclude"),
        ),
    ),
    fit=fit,
    uneven_rows="a row's margin follows from the classes of its client's other rows",
    page=MethodPage(
        family="Many rounds, one model",
        formula=r"""
            L = -\log \frac{e^{u_y}}{\sum_c e^{u_c}}, \qquad u_c = \ell_c - \tau\, n_c^{-1/4}
        """,
        terms=r"""
            $\ell_c$: the logit of class $c$; $n_c$: the number of the client's rows of class $c$; $\tau$: `tau`; $y$:
            the label.
        """,
        when="""
            Use it if every client has all classes, but in very different numbers. If clients lack classes, first read
            the description of the hyperparameter `absent`.
        """,
        cite=("zhang2022fedlc",),
    ),
)
