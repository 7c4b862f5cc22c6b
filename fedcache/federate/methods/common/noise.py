"""Noise on what leaves a client or on what it trains on: xt = (1 - p) x + e, elementwise.

FedPCL section 5 perturbs prototypes (s = .05) or images (s = .2). The same s is not the same power: Laplace noise of
scale s has variance 2 s^2, Gaussian noise s^2. No differential-privacy guarantee follows from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from fedcache.federate.engine.client_data import ClientData
from fedcache.federate.engine.context import Ctx, narrow_clients, over
from fedcache.federate.engine.hyperparameters import HParam
from fedcache.federate.engine.local_training import Batch

NOISE = (
    HParam("noise_on", "off", "choice", "perturb uploaded prototypes, or training features (an approximation of image "
           "noise)", choices=("off", "proto", "features")),
    HParam("noise", "gaussian", "choice", "distribution of the noise", choices=("laplace", "gaussian")),
    HParam("p", 0.1, "float", "share of the value that is removed", low=0.0, high=1.0),
    HParam("s", 0.05, "float", "scale of the noise", low=0.0),
    HParam("noise_local_infer", False, "bool", "classify with the noisy prototypes too (D-20)", official=True),
)  # fmt: skip


def draw(rows: Sequence[int], width: int, ctx: Ctx, *key: int) -> Tensor:
    """Unit noise [*lead, max(rows), width]; client i has ``rows[i]`` rows of it, then zeros."""

    def one(g: np.random.Generator, client: int) -> np.ndarray:
        shape = (rows[client], width)
        return g.laplace(size=shape) if ctx.hp["noise"] == "laplace" else g.standard_normal(shape)

    return ctx.rng.each("noise", one, *key)


def perturb(x: Tensor, e: Tensor, ctx: Ctx) -> Tensor:
    """(1 - p) x + s e for unit noise ``e``; p = s = 0 is ``x`` itself."""
    return over(1.0 - ctx.number("p"), x) * x + over(ctx.number("s"), e) * e


def noisy(batches: Iterator[tuple[int, Batch]], data: ClientData, ctx: Ctx, epoch: int) -> Iterator[tuple[int, Batch]]:
    """Batches of an epoch with noise on their features: one draw for each row, the same in both views of it."""
    noise = draw(data.n, ctx.env.width, ctx, epoch)
    for k, batch in batches:
        e = narrow_clients(noise, k, ctx).gather(-2, batch["i"].unsqueeze(-1).expand(batch["x"].shape))
        yield k, batch | {v: perturb(batch[v], e, ctx) for v in ("x", "x2") if v in batch}


def noisy_prototypes(proto: Tensor, count: Tensor, ctx: Ctx) -> Tensor:
    """Noise on the prototypes [.., C, P] of the classes with rows behind them, ``count`` [.., C]; the others are 0."""
    clients = ctx.lead[-1] if ctx.lead else 1
    e = draw([ctx.env.classes] * clients, proto.shape[-1], ctx)
    return perturb(proto, e, ctx) * (count > 0).unsqueeze(-1)
