"""SGD with momentum and Adam, as steps on flat dicts; the optimiser's state lives in the carry under ``opt/``.

The arithmetic is torch.optim's (L2 weight decay added to the gradient, bias-corrected Adam). Without leading axes and
with plain floats torch's fused kernels run; otherwise every lane has its own learning rate and step count.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedcache.federate.engine.context import Ctx, is_zero, over
from fedcache.heads.linear import Tree

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


def opt_names(names: Sequence[str], opt: str) -> tuple[str, ...]:
    """Names of the optimiser's state for the trained ``names``."""
    if opt == "adam":
        return (*(f"opt/m/{n}" for n in names), *(f"opt/v/{n}" for n in names), "opt/t")
    return tuple(f"opt/m/{n}" for n in names)


def opt_init(p: Tree, names: Sequence[str], ctx: Ctx) -> Tree:
    """Fresh optimiser state for ``names`` of ``p``: zeros, and one step count per lane."""
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
        ctx: reads ``opt``, ``lr``, ``wd`` and, for SGD, ``momentum``.
    """
    params = [p[n] for n in names]
    first = [p[f"opt/m/{n}"] for n in names]
    hp = (ctx.number("lr"), ctx.number("wd"), ctx.number("momentum"))
    plain = [float(h) for h in hp if not isinstance(h, Tensor)]
    fused = len(plain) == len(hp)
    with torch.no_grad():
        if ctx.hp["opt"] == "adam":
            second = [p[f"opt/v/{n}"] for n in names]
            if fused and not ctx.lead:
                p["opt/t"] += 1.0
                torch._fused_adam_(
                    params, _in_order(grads), first, second, [], [p["opt/t"]] * len(names),
                    lr=plain[0], beta1=BETA1, beta2=BETA2, weight_decay=plain[1], eps=EPS,
                    amsgrad=False, maximize=False,
                )  # fmt: skip
            else:
                _adam(p, params, grads, first, second, hp[0], hp[1])
        elif fused and len(ctx.lead) < 2:  # of a grid, the first lanes of a chunk are no block of memory
            # Without momentum there is nothing to remember, and the kernel insists on no buffers.
            torch._fused_sgd_(
                params, _in_order(grads), first if plain[2] else [],
                lr=plain[0], weight_decay=plain[1], momentum=plain[2],
                dampening=0.0, nesterov=False, maximize=False, is_first_step=False,
            )  # fmt: skip
        else:
            for t, g, m in zip(params, grads, first, strict=True):
                if is_zero(hp[2]):
                    m.copy_(g)
                else:
                    m.mul_(over(hp[2], t)).add_(g)
                if not is_zero(hp[1]):
                    _add_scaled(m, t, over(hp[1], t))
                _add_scaled(t, m, over(-hp[0], t))


def _in_order(grads: Sequence[Tensor]) -> list[Tensor]:
    """The fused kernels read memory in order, whatever the strides say; parameters are row-major."""
    return [g.contiguous() for g in grads]


def _add_scaled(t: Tensor, other: Tensor, scale: float | Tensor) -> None:
    """t += scale * other, in one pass."""
    if isinstance(scale, Tensor):
        t.addcmul_(other, scale)
    else:
        t.add_(other, alpha=scale)


def _adam(
    p: Tree,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    lr: float | Tensor,
    wd: float | Tensor,
) -> None:
    p["opt/t"] += 1.0
    count = p["opt/t"].double()
    for t, grad, m, v in zip(params, grads, first, second, strict=True):
        g = grad + over(wd, t) * t
        m.lerp_(g, 1.0 - BETA1)
        v.mul_(BETA2).addcmul_(g, g, value=1.0 - BETA2)
        scale = over((lr / (1.0 - BETA1**count)).to(t.dtype), t)
        root = over(torch.sqrt(1.0 - BETA2**count).to(t.dtype), t)
        t.sub_(scale * m / (v.sqrt() / root + EPS))
