"""FedAdam: FedAvg whose server takes Adam's steps. FedAdagrad and FedYogi use this file's code.

Clients train as in FedAvg. The server treats the average change of the weights as a gradient and applies Adam to it.
Each weight therefore gets a step size of its own.

Reddi et al., "Adaptive federated optimization", ICLR 2021, algorithm 2. With the mean w' of the round's models and
Delta = w' - w,
    m <- beta1 m + (1 - beta1) Delta
    v <- v + Delta^2                                        (FedAdagrad)
    v <- v - (1 - beta2) Delta^2 sign(v - Delta^2)          (FedYogi)
    v <- beta2 v + (1 - beta2) Delta^2                      (FedAdam)
    w <- w + lr_g m / (sqrt(v) + tau)
from m = 0 and v = tau^2, without bias correction, as printed. The paper chooses beta1 = 0.9 (0 for
FedAdagrad), beta2 = 0.99 and tau = 1e-3. It tunes lr_g for each task. The default of fedcache is 0.03, and 0.01 for
FedAdagrad. BatchNorm's running statistics are averaged. Algorithm 2 prints the uniform mean of clients
(``agg=uniform``).

The released FedPCL code has no FedAdam, FedAdagrad or FedYogi, so preset ``official`` uses that code's settings of
FedAvg (D-09, D-13, D-14; docs/readings.md).
Special cases: tau -> infinity with lr_g = tau and beta1 = 0 is ``fedavg``; no first step moves a weight by more than
lr_g (1 - beta1) / sqrt(1 - beta2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fedcache.federate.methods import fedavg
from fedcache.federate.methods.common import Ctx, HParam, Method, MethodPage, Tree, model, over
from fedcache.federate.methods.fedavgm import LR_G, broadcast

SecondMoment = Callable[[Tensor, Tensor, float | Tensor], Tensor]
"""(v, Delta^2, 1 - beta2) -> v of the next round. 1 - beta2 is called ``new_share``: the share of Delta^2 in v."""


def init(ctx: Ctx) -> Tree:
    """Initial weights, m = 0, and v = 0, which stands for tau^2 until the first round has passed."""
    p = model.init(ctx)
    return {**p, **model.zeros_for(p, "m/", ctx), **model.zeros_for(p, "v/", ctx)}


def aggregate_by(second_moment: SecondMoment) -> Callable[[Tree, Tree, Ctx], Tree]:
    """The server's step with that rule for v."""

    def aggregate(server: Tree, up: Tree, ctx: Ctx) -> Tree:
        out = {**server, **up}
        for name in model.trained(ctx.hp):
            delta = up[name] - server[name]
            beta1 = over(ctx.number("beta1"), delta)
            tau = over(ctx.number("tau"), delta)
            lr_g = over(ctx.number("lr_g"), delta)
            new_share: float | Tensor = 1.0
            if "beta2" in ctx.hp:
                new_share = over(1.0 - ctx.number("beta2"), delta)
            v = server[f"v/{name}"]
            # The first v is set here and not in ``init``, because the points of a grid begin with one server and may
            # have different tau.
            first = torch.ones_like(v) * tau**2
            v = second_moment(torch.where(v == 0, first, v), delta**2, new_share)
            m = beta1 * server[f"m/{name}"] + (1.0 - beta1) * delta
            out[f"m/{name}"] = m
            out[f"v/{name}"] = v
            out[name] = server[name] + lr_g * m / (v.sqrt() + tau)
        return out

    return aggregate


def adam(v: Tensor, square: Tensor, new_share: float | Tensor) -> Tensor:
    """beta2 v + (1 - beta2) Delta^2."""
    return v + new_share * (square - v)


BETA2 = HParam(
    "beta2", 0.99, "float", "decay of the second moment", low=0.0, high=0.999999, fit=False
)


def server_optimiser(
    name: str,
    summary: str,
    rule: SecondMoment,
    *more: HParam,
    rate: float,
    beta1: float,
    page: MethodPage,
) -> Method:
    """The method of that name: FedAvg's clients under a server with that rule for v."""
    return replace(
        fedavg.METHOD,
        name=name,
        paper="Reddi et al., ICLR 2021",
        summary=summary,
        hparams=(
            *fedavg.METHOD.hparams,
            replace(LR_G, default=rate),
            HParam(
                "beta1",
                beta1,
                "float",
                "decay of the first moment",
                low=0.0,
                high=0.999999,
                fit=False,
            ),
            *more,
            HParam(
                "tau",
                1e-3,
                "float",
                "number added to the root of the second moment",
                low=1e-12,
                fit=False,
            ),
        ),
        executions=("sequential", "batched"),  # not gram: the step is not linear in the models
        init=init,
        broadcast=broadcast,
        aggregate=aggregate_by(rule),
        page=page,
    )


METHOD = server_optimiser(
    "fedadam",
    "FedAvg with Adam as the server's optimiser.",
    adam,
    BETA2,
    rate=0.03,
    beta1=0.9,
    page=MethodPage(
        family="Many rounds, one model",
        formula=r"""
            \begin{aligned}
            \Delta &= \sum_i \frac{n_i}{N}\, w_i - w, \qquad m \leftarrow \beta_1 m + (1 - \beta_1)\, \Delta \\
            v &\leftarrow \beta_2 v + (1 - \beta_2)\, \Delta^2,
                \qquad w \leftarrow w + \eta_g\, \frac{m}{\sqrt{v} + \tau}
            \end{aligned}
        """,
        terms=r"""
            $w$: the global model; $w_i$: the model of client $i$ after local training; $n_i$: its training rows; $N$:
            the training rows of all clients in the round; $m$, $v$: first and second moment; $\beta_1$, $\beta_2$:
            their decay; $\eta_g$: `lr_g`; $\tau$: a small constant.
        """,
        when="""
            Use it if the weights need steps of different sizes. Its second learning rate, `lr_g`, must be tuned too.
        """,
        cite=("reddi2021adaptive",),
    ),
)
