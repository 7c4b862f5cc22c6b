"""The optimisers: SGD with momentum and Adam, as steps on flat dicts whose state lives under ``opt/``.

The arithmetic is torch.optim's (L2 weight decay added to the gradient, bias-corrected Adam). With plain floats and at
most one leading axis torch's fused kernels run; of a grid every point and client has numbers of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from fedcache.federate.engine.context import Ctx, is_zero, over
from fedcache.heads.linear import Tree

Tensors = Sequence[Tensor]
PerClient = float | Tensor
"""One number for all clients, or one of each."""


@dataclass(frozen=True)
class AdamConstants:
    """Adam's decay rates and what is added to its denominator; the defaults are torch's."""

    beta1: PerClient = 0.9
    beta2: PerClient = 0.999
    eps: PerClient = 1e-8


def adam_constants(ctx: Ctx) -> AdamConstants:
    """Those of a method that declares them, else torch's."""
    if "adam_beta1" not in ctx.hp:
        return AdamConstants()
    return AdamConstants(ctx.number("adam_beta1"), ctx.number("adam_beta2"), ctx.number("adam_eps"))


def opt_names(names: Sequence[str], opt: str) -> tuple[str, ...]:
    """Names of the optimiser's state for the trained ``names``."""
    if opt == "adam":
        return (*(f"opt/m/{n}" for n in names), *(f"opt/v/{n}" for n in names), "opt/t")
    return tuple(f"opt/m/{n}" for n in names)


def opt_init(p: Tree, names: Sequence[str], ctx: Ctx) -> Tree:
    """Fresh optimiser state for ``names`` of ``p``: zeros, and one step count per client."""
    core = len(ctx.lead)
    state: Tree = {}
    for name in opt_names(names, str(ctx.hp["opt"])):
        if name == "opt/t":
            state[name] = torch.zeros(ctx.lead, dtype=torch.float32, device=ctx.env.device)
        else:
            t = p[name.split("/", 2)[2]]
            full = t.expand((*ctx.lead, *t.shape[core:]))
            state[name] = torch.zeros_like(full)  # in the memory order of what it belongs to
    return state


def step(p: Tree, names: Sequence[str], grads: Sequence[Tensor], ctx: Ctx) -> None:
    """One optimiser step on ``names`` of ``p``, in place.

    Args:
        p: parameters and ``opt/`` state with full leading axes, owned by the caller.
        names: what is stepped.
        grads: one per name.
        ctx: reads ``opt``, ``lr``, ``wd`` and, for SGD, ``momentum``; for Adam its constants where they are declared.
    """
    # Fused kernels take plain numbers alone; one that is swept over a grid is a tensor.
    params = [p[n] for n in names]
    first = [p[f"opt/m/{n}"] for n in names]
    lr = ctx.number("lr")
    wd = ctx.number("wd")
    momentum = ctx.number("momentum")
    plain = [h for h in (lr, wd, momentum) if isinstance(h, float)]
    fused = len(plain) == 3 and fused_kernels_work()
    with torch.no_grad():
        if ctx.hp["opt"] == "adam":
            second = [p[f"opt/v/{n}"] for n in names]
            p["opt/t"] += 1.0
            constants = adam_constants(ctx)
            same = [
                c for c in (constants.beta1, constants.beta2, constants.eps) if isinstance(c, float)
            ]
            if fused and len(same) == 3 and len(ctx.lead) < 2:
                _fused_adam(params, grads, first, second, p["opt/t"], plain[0], plain[1], same)
            else:
                _adam(params, grads, first, second, p["opt/t"], lr, wd, constants)
        elif (
            fused and len(ctx.lead) < 2
        ):  # of a grid, the first clients of a chunk are no block of memory
            _fused_sgd(params, grads, first, plain[0], plain[1], plain[2])
        else:
            _sgd(params, grads, first, lr, wd, momentum)


@cache
def fused_kernels_work() -> bool:
    """Whether torch still has its private fused kernels, and one step of each is the step that is written out here.

    They are not of torch's public interface, so another release may rename or change them; the plain steps then serve.
    """

    def fresh() -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], Tensor]:
        values = [
            torch.arange(1.0, 4.0, dtype=torch.float64) * scale
            for scale in (1.0, -0.5, 0.25, 0.125)
        ]
        p, g, m, v = ([t] for t in values)
        return p, g, m, v, torch.tensor(3.0)

    a = fresh()
    b = fresh()
    try:
        _fused_sgd(*a[:3], 0.1, 0.01, 0.9)
        _sgd(*b[:3], 0.1, 0.01, 0.9)
        same = all(
            torch.allclose(x[0], y[0], rtol=1e-12) for x, y in zip(a[:3], b[:3], strict=True)
        )
        _fused_adam(*a, 0.1, 0.01, (0.9, 0.999, 1e-8))
        _adam(*b, 0.1, 0.01, AdamConstants())
        # Adam's bias correction is in float32 in one of them.
        return same and all(
            torch.allclose(x[0], y[0], rtol=1e-5) for x, y in zip(a[:4], b[:4], strict=True)
        )
    except (AttributeError, TypeError, RuntimeError):
        return False


def _fused_adam(
    params: list[Tensor],
    grads: Sequence[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    count: Tensor,
    lr: float,
    wd: float,
    constants: Sequence[float],
) -> None:
    beta1, beta2, eps = constants

    # The fused kernels read memory in order, whatever the strides say; parameters are row-major. Clients on an axis
    # are tensors of their own there, as each has its own number of steps.
    def each(tensors: Sequence[Tensor]) -> list[Tensor]:
        if count.dim():
            return [row for t in tensors for row in t.unbind(0)]
        return list(tensors)

    torch._fused_adam_(
        each(params),
        each([g.contiguous() for g in grads]),
        each(first),
        each(second),
        [],
        each([count] * len(params)),
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=wd,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )


def _fused_sgd(
    params: list[Tensor],
    grads: Sequence[Tensor],
    first: list[Tensor],
    lr: float,
    wd: float,
    momentum: float,
) -> None:
    # Without momentum there is nothing to remember, and the kernel insists on no buffers.
    if not momentum:
        first = []
    torch._fused_sgd_(
        params,
        [g.contiguous() for g in grads],
        first,
        lr=lr,
        weight_decay=wd,
        momentum=momentum,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


def _add_scaled(t: Tensor, other: Tensor, scale: PerClient) -> None:
    """t += scale * other, in one pass."""
    if isinstance(scale, Tensor):
        t.addcmul_(other, scale)
    else:
        t.add_(other, alpha=scale)


def _sgd(
    params: Tensors,
    grads: Tensors,
    first: Tensors,
    lr: PerClient,
    wd: PerClient,
    momentum: PerClient,
) -> None:
    for t, g, m in zip(params, grads, first, strict=True):
        if is_zero(momentum):
            m.copy_(g)
        else:
            m.mul_(over(momentum, t)).add_(g)
        # L2 weight decay is part of the gradient, so it enters the momentum too.
        if not is_zero(wd):
            _add_scaled(m, t, over(wd, t))
        _add_scaled(t, m, over(-lr, t))


def _towards(mean: Tensor, value: Tensor, decay: PerClient) -> None:
    """mean <- decay mean + (1 - decay) value, in place."""
    rest = over(1.0 - decay, mean)
    if isinstance(rest, Tensor):
        mean.add_(rest * (value - mean))
    else:
        mean.lerp_(value, rest)


def _towards_square(mean: Tensor, value: Tensor, decay: PerClient) -> None:
    """mean <- decay mean + (1 - decay) value^2, in place."""
    mean.mul_(over(decay, mean))
    rest = over(1.0 - decay, mean)
    if isinstance(rest, Tensor):
        mean.add_(rest * value * value)
    else:
        mean.addcmul_(value, value, value=rest)


def _adam(
    params: Tensors,
    grads: Tensors,
    first: Tensors,
    second: Tensors,
    count: Tensor,
    lr: PerClient,
    wd: PerClient,
    constants: AdamConstants,
) -> None:
    steps = count.double()
    for t, grad, m, v in zip(params, grads, first, second, strict=True):
        g = grad + over(wd, t) * t
        _towards(m, g, constants.beta1)
        _towards_square(v, g, constants.beta2)
        # The bias corrections of both moments, in float64 by each client's own number of steps.
        scale = over((lr / (1.0 - constants.beta1**steps)).to(t.dtype), t)
        root = over(torch.sqrt(1.0 - constants.beta2**steps).to(t.dtype), t)
        t.sub_(scale * m / (v.sqrt() / root + over(constants.eps, t)))
